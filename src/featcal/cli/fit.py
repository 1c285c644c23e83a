"""featcal fit, eval and predict: a calibrator into a file, its scores, its probabilities."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from featcal.cli import app
from featcal.core.checks import CalibrationWarning, InputError, check_finite, doubt_logits
from featcal.core.files import check_free
from featcal.core.progress import tell
from featcal.core.table import Table

if TYPE_CHECKING:
    from torch import Tensor

    from featcal.core.batch import Batch, Head
    from featcal.core.calibrator import Calibrator
    from featcal.core.fit import StepReport
    from featcal.data import Pack
    from featcal.report.scores import Scores

FITTED_WIDTH = 24  # of fitted values where there is no room for more: a range over folds


@click.command()
@app.shared
@app.PACK
@click.argument("recipe")
@app.output_option("File to write.")
@app.FIT_SPLIT
@app.TRAIN_SPLIT
@app.SEQUENTIAL
@app.DEVICE
@app.MEMORY
@app.FORCE
@app.answered
def fit(
    pack_path: Path,
    recipe: str,
    output: Path,
    fit_split: str,
    train_split: str | None,
    sequential: bool,
    device: str | None,
    force: bool,
) -> app.Answer:
    """Fit RECIPE on a split of PACK and write the calibrator to a file.

    The recipe "auto" chooses among others by rows left out of their fits.

    Example: featcal fit my-pack auto -o cal.safetensors
    """
    from featcal import io
    from featcal.core.labels import all_labels
    from featcal.core.text import parse
    from featcal.data import Pack
    from featcal.report.tables import folded, step_text

    io.check_ending(output)
    if app.is_first():
        check_free(output, overwrite=force)
    calibrator = parse(recipe)
    pack = Pack.open(pack_path)
    if pack.manifest.several and not calibrator.several:
        calibrator = all_labels(calibrator)
    check_recipe(calibrator, pack, train=train_split is not None)
    check_train(train_split, fit_split)
    train = None if train_split is None else app.own(pack.split(train_split), device)
    data, head = app.own(pack.split(fit_split), device), app.head_on(pack, device)
    with app.progress_bar(), app.about(pack, fit_split), warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)  # told from the report
        report = calibrator.fit(data, head, mode=app.mode_of(sequential), train=train).report
    assert report is not None
    calibrator.report = report = replace(report, class_names=pack.manifest.class_names)
    if app.is_first():
        io.save(calibrator, output, overwrite=force)
    name, rows = report.loss.upper(), []
    for step in report.steps:
        numbers = (f"{step.loss_before:.4f}", f"{step.loss_after:.4f}", str(step.head_passes))
        fitted = folded(step_text(step), FITTED_WIDTH)
        rows.append((step.name, fitted, *numbers, f"{step.seconds:.2f}"))
    headings = ("step", "fitted", f"{name} before", f"{name} after", "head passes", "seconds")
    chose = [] if report.choice is None else [choice_table(report.choice)]
    return {**report.as_json(), "output": str(output)}, [
        *chose,
        f"{report.recipe}: fitted on {report.rows:,} rows of {fit_split}, {report.mode}",
        Table("", headings, tuple(rows)),
        *(("Warning: " if s.warning else "") + f"{s.name}: {s.message}" for s in report.steps),
        *([f"Warning: {report.few_rows}"] if report.few_rows else []),
        f"{name} {report.loss_before:.4f} -> {report.loss_after:.4f}; wrote {output}",
    ]


def choice_table(made: StepReport) -> Table:
    """The recipes that were tried, on rows left out of their fits."""
    from featcal.core.text import NONE

    used, metric = made.values.get("recipe", NONE), made.details["metric"].upper()
    rows = [
        (
            f"**{one['recipe']}**" if one["recipe"] == used else one["recipe"],
            *(f"{one[key]:.4f}" for key in ("value", "difference", "error")),
            f"{100 * one['accuracy']:.2f}",
        )
        for one in made.details["choice"]
    ]
    headings = ("recipe", metric, "difference", "standard error", "accuracy %")
    return Table("Rows left out of the fit", headings, tuple(rows))


def check_recipe(calibrator: Calibrator, pack: Pack, *, train: bool = True) -> None:
    """Refuses a recipe that needs features, or training rows, that it would not be given."""
    if calibrator.needs_features and pack.manifest.head is None:
        held = "holds logits alone: import features with the head's weight and bias"
        if pack.manifest.features is not None:
            held = "has no linear head to go with its features: fit it in Python, fit(data, head)"
        raise InputError(
            f"{calibrator!r} works on features and {pack.path} {held}, or use a method that needs "
            "no features"
        )
    if calibrator.needs_train and not train:
        raise InputError(
            f"{calibrator!r} measures distance to rows the network was trained on: name their "
            "split with --train-split"
        )


def check_train(train_split: str | None, *others: str) -> None:
    """Refuses rows to fit on or to score as rows the network was trained on."""
    if train_split in others:
        raise InputError(
            f"--train-split is {train_split!r}, which is fitted on or scored: name the rows the "
            "network was trained on"
        )


@click.command("eval")
@app.shared
@app.PACK
@click.argument("calibrator_path", metavar="[CALIBRATOR]", required=False, type=app.PATH)
@app.TEST_SPLIT
@app.BINS
@app.DEVICE
@app.MEMORY
@app.answered
def evaluate(
    pack_path: Path, calibrator_path: Path | None, test_split: str, bins: int, device: str | None
) -> app.Answer:
    """Score the network of PACK, or CALIBRATOR on it, by every metric.

    Example: featcal eval my-pack cal.safetensors
    """
    from featcal.data import Pack
    from featcal.metrics.columns import COLUMNS
    from featcal.report.scores import evaluate as score

    pack = Pack.open(pack_path)
    calibrator = None if calibrator_path is None else load_for(calibrator_path, pack)
    data, head = app.own(pack.split(test_split), device), app.head_on(pack, device)
    if device is not None and calibrator is not None:
        calibrator.to(app.device_of(device))
    with app.progress_bar(), app.about(pack, test_split):
        scores = score(data, calibrator, head, bins=bins)
    name = "uncalibrated"
    if calibrator is not None:  # with what was learned, where that is a single number
        single = ((key, value) for key, value in calibrator.named_buffers() if value.numel() == 1)
        values = (f"{key.rpartition('.')[2]}={value.item():.4g}" for key, value in single)
        name = f"{calibrator!r}   {' '.join(values)}".rstrip()
    recipe = None if calibrator is None else repr(calibrator)
    told: dict[str, Any] = {"recipe": recipe, **scores.as_json()}
    if scores.labels:
        return told, labels_text(f"{name}, {test_split}: ", scores, pack.manifest.class_names)
    rows = ((column.title, column.text(scores.metrics[key])) for key, column in COLUMNS.items())
    return told, [f"{name}, {scores.n:,} rows of {test_split}", Table("", ("", ""), tuple(rows))]


def labels_text(where: str, scores: Scores, names: Sequence[str] | None) -> list[app.Line]:
    """Scores of several labels a sample: of all answers, their mean over labels, and of each."""
    from featcal.metrics.columns import COLUMNS, columns
    from featcal.report.tables import answers_text

    macro = scores.macro
    rows = (
        (column.title, column.text(scores.metrics[key]), column.text(macro[key]))
        for key, column in COLUMNS.items()
    )
    shown = columns()
    each = (
        (name, *(column.text(one[column.name]) for column in shown))
        for name, one in zip(names or range(len(scores.labels)), scores.labels, strict=True)
    )
    return [
        where + answers_text(scores),
        Table("", ("", "all answers", "mean of labels"), tuple(rows)),
        Table("", ("label", *(c.heading for c in shown)), tuple(tuple(map(str, r)) for r in each)),
    ]


def load_for(path: Path, pack: Pack) -> Calibrator:
    """The calibrator in a file, refused where it was fitted to another network than the pack's."""
    from featcal import io

    calibrator = io.load(path)
    check_recipe(calibrator, pack)
    if calibrator.several != pack.manifest.several:
        kind = "several labels" if pack.manifest.several else "one label"
        raise InputError(f"{path} and {pack.path}: {calibrator!r} is not for {kind} a row")
    try:
        about = pack.manifest
        calibrator.check_rows(
            classes=about.classes, features=about.features or 0, class_names=about.class_names
        )
    except InputError as error:
        raise InputError(f"{path} and {pack.path}: {error}") from error
    return calibrator


@click.command()
@app.shared
@click.argument("source", metavar="PACK|FILE", type=app.PATH)
@app.CALIBRATOR
@app.output_option("The file to write: .npy, .csv, .tsv, .parquet or .safetensors.")
@click.option("--test-split", help="The split; test of a pack, and the only one of a file.")
@app.LOGITS
@app.PROBS
@app.LABEL
@app.IGNORE
@app.FORCE
def predict(
    source: Path,
    calibrator_path: Path,
    output: Path,
    test_split: str | None,
    logits: bool,
    probs: bool,
    label: str,
    ignore: tuple[str, ...],
    force: bool,
) -> None:
    """Write calibrated probabilities of a pack's split or of rows in a file.

    A FILE is one that "featcal pack import" reads; labels are not needed, and not looked at. Tables
    get a column prob_CLASS for each class, arrays are (rows, classes) in float32.

    \b
    Examples:
      featcal predict my-pack cal.safetensors -o probs.npy
      featcal predict new.csv cal.safetensors --logits -o probs.csv
    """  # noqa: D301 - click knows a block by the character itself
    from featcal import io
    from featcal.core import dist
    from featcal.core.batch import wide
    from featcal.core.fit import survey
    from featcal.data import Pack
    from featcal.data.files import opened_rows
    from featcal.data.pack import Gate, head_tensors
    from featcal.data.predictions import check_format, write_probs
    from featcal.heads.head import linear_of

    if app.is_first():
        check_free(output, overwrite=force)
    check_format(output)
    kind, told = app.kind_of(logits, probs), ""
    if not source.is_file():
        pack = Pack.open(source)
        calibrator = load_for(calibrator_path, pack)
        # By turns, so that the rows come in their order and no process holds more than a block.
        data = replace(pack.split(test_split or "test"), turn=(dist.rank(), dist.world()))
        with app.progress_bar(), app.about(pack, data.name):
            survey(data, pack.head)
            found = _predicted(data, calibrator, pack.head, data.rows)
            found = dist.in_turn(found, pack.manifest.classes)
            if not app.is_first():
                for _ in found:  # none: all of them go to the first
                    pass
                return
            rows = write_probs(output, found, pack.manifest.class_names, overwrite=force)
    elif not app.is_first():
        return  # a file is read by one process
    else:
        calibrator = io.load(calibrator_path)
        with (
            opened_rows(source, label=label, kind=kind, ignore=ignore) as contents,
            app.progress_bar(),
        ):
            name = test_split or next(iter(contents.splits))
            if name not in contents.splits or (test_split is None and len(contents.splits) > 1):
                known = ", ".join(contents.splits)
                raise InputError(f"{source} holds the splits {known}: choose one with --test-split")
            weights = None if contents.head is None else head_tensors(contents.head)
            if calibrator.needs_features and weights is None:
                raise InputError(
                    f"{calibrator!r} works on features, and {source} holds scores alone: give an "
                    ".npz or .safetensors file of features, weight and bias"
                )
            calibrator.check_rows(class_names=contents.class_names)
            checked = Gate(weights, contents.class_names).checked(name, contents.splits[name])
            head = (
                None if weights is None else linear_of(**{k: wide(v) for k, v in weights.items()})
            )
            first = next(checked)
            if weights is None and first.logits is not None:
                rows_of = f"the rows of {source}"
                told = doubt_logits(
                    first.logits, rows_of, "give --probs, or name columns prob_...,"
                )
            found = _predicted(chain([first], checked), calibrator, head)
            rows = write_probs(output, found, contents.class_names, overwrite=force)
    warned = [f"Warning: {told}"] if told else []
    app.say(*warned, f"Wrote {output}: {rows[0]:,} rows, {rows[1]} classes")


def _predicted(
    data: Iterable[Batch], calibrator: Calibrator, head: Head | None, total: int = 0
) -> Iterator[Tensor]:
    """The probabilities of each batch; of so many rows, where that is known."""
    import torch
    from torch import nn

    from featcal.report.scores import calibrated_logits

    row = 0
    for batch in data:
        if batch.features is not None:
            calibrator.check_rows(features=batch.features.shape[1])
            dtype = head.weight.dtype if isinstance(head, nn.Linear) else batch.features.dtype
            batch = replace(batch, features=batch.features.to(dtype))
        with torch.no_grad():
            logits = calibrated_logits(batch, calibrator, head)
            probs = logits.sigmoid() if calibrator.several else logits.softmax(1)
        calibrator.check_rows(classes=probs.shape[1])
        check_finite("the probabilities", probs, first_row=row)
        row += len(batch)
        tell("predicting rows", row, max(total, row))
        yield probs
