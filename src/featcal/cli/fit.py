"""featcal fit, eval and predict: a calibrator into a file, its scores, its probabilities."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import click
import torch
from torch import Tensor, nn

from featcal import io
from featcal.cli import app
from featcal.core.batch import Batch, Head, wide
from featcal.core.calibrator import Calibrator
from featcal.core.checks import CalibrationWarning, InputError, check_finite
from featcal.core.files import check_free
from featcal.core.fit import Mode, StepReport, survey
from featcal.core.progress import tell
from featcal.core.text import NONE, parse
from featcal.data import Pack
from featcal.data.files import opened_rows
from featcal.data.pack import Gate, head_tensors
from featcal.data.predictions import check_format, write_probs
from featcal.heads.head import linear_of
from featcal.metrics.columns import COLUMNS
from featcal.report.scores import calibrated_logits
from featcal.report.scores import evaluate as score
from featcal.report.tables import Table, folded, step_text

FITTED_WIDTH = 24  # of fitted values where there is no room for more: a range over folds


@click.command()
@app.PACK
@click.argument("recipe")
@app.output_option("File to write.")
@app.split_option("val")
@app.TRAIN_SPLIT
@click.option("--sequential", is_flag=True, help="Fit step by step, as the paper does.")
@app.MEMORY
@app.FORCE
@app.answered
def fit(
    pack_path: Path,
    recipe: str,
    output: Path,
    split: str,
    train_split: str | None,
    sequential: bool,
    force: bool,
) -> app.Answer:
    """Fit RECIPE on a split of PACK and write the calibrator to a file.

    The recipe "auto" chooses among others by rows left out of their fits.

    Example: featcal fit my-pack auto -o cal.safetensors
    """
    check_free(output, overwrite=force)
    calibrator = parse(recipe)
    pack = Pack.open(pack_path)
    check_recipe(calibrator, pack, train=train_split is not None)
    check_train(train_split, split)
    train = None if train_split is None else pack.split(train_split)
    data = pack.split(split)
    with app.progress_bar(), app.about(pack, split), warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)  # told from the report
        mode: Mode = "sequential" if sequential else "joint"
        report = calibrator.fit(data, pack.head, mode=mode, train=train).report
    assert report is not None
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
        f"{report.recipe}: fitted on {report.rows:,} rows of {split}, {report.mode}",
        Table("", headings, tuple(rows)),
        *(("Warning: " if s.warning else "") + f"{s.name}: {s.message}" for s in report.steps),
        f"{name} {report.loss_before:.4f} -> {report.loss_after:.4f}; wrote {output}",
    ]


def choice_table(made: StepReport) -> Table:
    """The recipes that were tried, on rows left out of their fits."""
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
@app.PACK
@click.argument("calibrator_path", metavar="[CALIBRATOR]", required=False, type=app.PATH)
@app.split_option("test")
@app.BINS
@app.MEMORY
@app.answered
def evaluate(pack_path: Path, calibrator_path: Path | None, split: str, bins: int) -> app.Answer:
    """Score the network of PACK, or CALIBRATOR on it, by every metric.

    Example: featcal eval my-pack cal.safetensors
    """
    pack = Pack.open(pack_path)
    calibrator = None if calibrator_path is None else load_for(calibrator_path, pack)
    data = pack.split(split)
    with app.progress_bar(), app.about(pack, split):
        scores = score(data, calibrator, pack.head, bins=bins)
    name = "uncalibrated"
    if calibrator is not None:  # with what was learned, where that is a single number
        single = ((key, value) for key, value in calibrator.named_buffers() if value.numel() == 1)
        values = (f"{key.rpartition('.')[2]}={value.item():.4g}" for key, value in single)
        name = f"{calibrator!r}   {' '.join(values)}".rstrip()
    rows = ((column.title, column.text(scores.metrics[key])) for key, column in COLUMNS.items())
    recipe = None if calibrator is None else repr(calibrator)
    return {"recipe": recipe, **scores.as_json()}, [
        f"{name}, {scores.n:,} rows of {split}",
        Table("", ("", ""), tuple(rows)),
    ]


def load_for(path: Path, pack: Pack) -> Calibrator:
    """The calibrator in a file, refused where it was fitted to another network than the pack's."""
    calibrator = io.load(path)
    check_recipe(calibrator, pack)
    try:
        calibrator.check_sizes(classes=pack.manifest.classes, features=pack.manifest.features or 0)
    except InputError as error:
        raise InputError(f"{path} and {pack.path}: {error}") from error
    return calibrator


@click.command()
@click.argument("source", metavar="PACK|FILE", type=app.PATH)
@app.CALIBRATOR
@app.output_option("The file to write: .npy, .csv, .tsv, .parquet or .safetensors.")
@click.option("--split", help="The split to read; test of a pack, and the only one of a file.")
@app.LOGITS
@app.PROBS
@app.LABEL
@app.IGNORE
@app.FORCE
@torch.no_grad()
def predict(
    source: Path,
    calibrator_path: Path,
    output: Path,
    split: str | None,
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
    check_free(output, overwrite=force)
    check_format(output)
    kind = app.kind_of(logits, probs)
    if not source.is_file():
        pack = Pack.open(source)
        calibrator = load_for(calibrator_path, pack)
        data = pack.split(split or "test")
        with app.progress_bar(), app.about(pack, data.name):
            survey(data, pack.head)
            found = _predicted(data, calibrator, pack.head, data.rows)
            rows = write_probs(output, found, pack.manifest.class_names, overwrite=force)
    else:
        calibrator = io.load(calibrator_path)
        with (
            opened_rows(source, label=label, kind=kind, ignore=ignore) as contents,
            app.progress_bar(),
        ):
            name = split or next(iter(contents.splits))
            if name not in contents.splits or (split is None and len(contents.splits) > 1):
                known = ", ".join(contents.splits)
                raise InputError(f"{source} holds the splits {known}: choose one with --split")
            weights = None if contents.head is None else head_tensors(contents.head)
            if calibrator.needs_features and weights is None:
                raise InputError(
                    f"{calibrator!r} works on features, and {source} holds scores alone: give an "
                    ".npz or .safetensors file of features, weight and bias"
                )
            checked = Gate(weights, contents.class_names).checked(name, contents.splits[name])
            head = (
                None if weights is None else linear_of(**{k: wide(v) for k, v in weights.items()})
            )
            found = _predicted(checked, calibrator, head)
            rows = write_probs(output, found, contents.class_names, overwrite=force)
    app.say(f"Wrote {output}: {rows[0]:,} rows, {rows[1]} classes")


def _predicted(
    data: Iterable[Batch], calibrator: Calibrator, head: Head | None, total: int = 0
) -> Iterator[Tensor]:
    """The probabilities of each batch; of so many rows, where that is known."""
    row = 0
    for batch in data:
        if batch.features is not None:
            calibrator.check_sizes(features=batch.features.shape[1])
            dtype = head.weight.dtype if isinstance(head, nn.Linear) else batch.features.dtype
            batch = replace(batch, features=batch.features.to(dtype))
        probs = calibrated_logits(batch, calibrator, head).softmax(1)
        calibrator.check_sizes(classes=probs.shape[1])
        check_finite("the probabilities", probs, first_row=row)
        row += len(batch)
        tell("predicting rows", row, max(total, row))
        yield probs
