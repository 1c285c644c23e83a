"""The commands: read the arguments, call the library, print."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor

from featcal import io
from featcal.cli import tables
from featcal.cli.bar import progress_bar
from featcal.core.batch import Batch, Head
from featcal.core.calibrator import Calibrator
from featcal.core.disk import check_free, new_file
from featcal.core.errors import CalibrationWarning, InputError
from featcal.core.fitting import FitReport
from featcal.core.progress import tell
from featcal.core.spec import parse
from featcal.core.steps import Mode
from featcal.core.survey import check_finite, survey
from featcal.data import Pack, PackSplit
from featcal.report.scores import calibrated_logits
from featcal.report.scores import evaluate as score

PACK = click.argument("pack_path", metavar="PACK", type=click.Path(path_type=Path))
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object for programs.")
FORCE = click.option("--force", is_flag=True, help="Overwrite the output if it exists.")
HEAD = click.option("--head", help="Path of the last layer, such as fc, if it is not found.")
BAD_INPUT = 2  # the exit code for what a person can mend
INTERRUPTED = 130  # the exit code of a program that Ctrl-C ended
OVERWRITE = "choose another name, or overwrite it with --force"
BINS = click.option(
    "--bins", default=15, show_default=True, type=click.IntRange(1, 1000), help="Bins of ECE."
)


def split_option(default: str) -> Callable[[Any], Any]:
    """The option --split with the default of a command."""
    return click.option("--split", default=default, show_default=True, help="The split to read.")


def output_option(what: str, *, required: bool = True) -> Callable[[Any], Any]:
    """The option -o, --output: the file or folder that a command writes."""
    path = click.Path(path_type=Path)
    return click.option("-o", "--output", required=required, type=path, help=what)


def with_options(options: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    """Gives a command its options, in the order of its help."""

    def add(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


@contextmanager
def going_on_later(kept: Path) -> Iterator[None]:
    """Says what Ctrl-C leaves, and what to do about it."""
    try:
        yield
    except KeyboardInterrupt:
        if not kept.exists():
            raise
        click.echo(
            f"Interrupted: what is done is kept in {kept}; give the same command to go on.",
            err=True,
        )
        raise click.exceptions.Exit(INTERRUPTED) from None


def print_json(value: dict[str, Any]) -> None:
    """One JSON object, and nothing else, on standard output."""
    click.echo(json.dumps(value, indent=2, allow_nan=False))


@click.command()
@PACK
@click.argument("recipe")
@output_option("File to write.")
@split_option("val")
@click.option("--train-split", help="Rows the network was trained on, for recipes that ask.")
@click.option("--sequential", is_flag=True, help="Fit step by step, as the paper does.")
@FORCE
@JSON
def fit(
    pack_path: Path,
    recipe: str,
    output: Path,
    split: str,
    train_split: str | None,
    sequential: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Fit RECIPE on a split of PACK and write the calibrator to a file.

    Example: featcal fit my-pack "clip | temperature" -o cal.safetensors
    """
    check_free(output, overwrite=force, remedy=OVERWRITE)
    calibrator = parse(recipe)
    pack = Pack.open(pack_path)
    check_recipe(calibrator, pack, train=train_split is not None)
    if train_split is not None:
        check_train(train_split, split)
    train = None if train_split is None else pack.split(train_split)
    mode: Mode = "sequential" if sequential else "joint"
    report = _fit(calibrator, pack, split, mode, train)
    io.save(calibrator, output, overwrite=force)
    if as_json:
        print_json({**report.as_json(), "output": str(output)})
        return
    tables.say(f"{report.recipe}: fitted on {report.rows:,} rows of {split}, {report.mode}")
    tables.console().print(tables.fit_table(report))
    for step in report.steps:
        tables.say(f"{'Warning: ' if step.warning else ''}{step.name}: {step.message}")
    name = report.loss.upper()
    tables.say(f"{name} {report.loss_before:.4f} -> {report.loss_after:.4f}; wrote {output}")


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


def check_train(train_split: str, *others: str) -> None:
    """Refuses rows to fit on or to score as rows the network was trained on."""
    if train_split in others:
        raise InputError(
            f"--train-split is {train_split!r}, which is fitted on or scored: name the rows the "
            "network was trained on"
        )


@contextmanager
def about(pack: Pack, *splits: str) -> Iterator[None]:
    """Names the pack and the split in whatever is wrong with their rows."""
    try:
        yield
    except InputError as error:
        names = " or ".join(map(repr, splits))
        raise InputError(f"{pack.path}, split {names}: {error}") from error


def _fit(
    calibrator: Calibrator, pack: Pack, split: str, mode: Mode, train: PackSplit | None
) -> FitReport:
    """Fits on a split; warnings are told from the report."""
    data, head = pack.split(split), pack.head
    with progress_bar(), about(pack, split), warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        report = calibrator.fit(data, head, mode=mode, train=train).report
    assert report is not None
    return report


@click.command("eval")
@PACK
@click.argument(
    "calibrator_path", metavar="[CALIBRATOR]", required=False, type=click.Path(path_type=Path)
)
@split_option("test")
@BINS
@JSON
def evaluate(
    pack_path: Path, calibrator_path: Path | None, split: str, bins: int, as_json: bool
) -> None:
    """Score the network of PACK, or CALIBRATOR on it, by every metric.

    Example: featcal eval my-pack cal.safetensors
    """
    pack = Pack.open(pack_path)
    calibrator = None if calibrator_path is None else load_for(calibrator_path, pack)
    data = pack.split(split)
    with progress_bar(), about(pack, split):
        scores = score(data, calibrator, pack.head, bins=bins)
    if as_json:
        print_json({"recipe": None if calibrator is None else repr(calibrator), **scores.as_json()})
        return
    name = "uncalibrated" if calibrator is None else _described(calibrator)
    tables.say(f"{name}, {scores.n:,} rows of {split}")
    tables.console().print(tables.scores_table(scores))


def _described(calibrator: Calibrator) -> str:
    """The recipe, and what was learned where that is a single number."""
    single = ((key, value) for key, value in calibrator.named_buffers() if value.numel() == 1)
    values = (f"{key.rpartition('.')[2]}={value.item():.4g}" for key, value in single)
    return f"{calibrator!r}   {' '.join(values)}".rstrip()


def load_for(path: Path, pack: Pack) -> Calibrator:
    """The calibrator in a file, refused where it was fitted to another network than the pack's."""
    calibrator = io.load(path)
    check_recipe(calibrator, pack)
    report, manifest = calibrator.report, pack.manifest
    if report is None:
        return calibrator
    sizes = [("classes", report.classes, manifest.classes)]
    if calibrator.needs_features:
        sizes.append(("features", report.features, manifest.features or 0))
    for name, fitted, here in sizes:
        if fitted not in (0, here):
            raise InputError(
                f"{path} was fitted to {fitted} {name} and {pack.path} has {here}: give the "
                "calibrator of this network"
            )
    return calibrator


@click.command()
@PACK
@click.argument("calibrator_path", metavar="CALIBRATOR", type=click.Path(path_type=Path))
@output_option("The .npy file to write.")
@split_option("test")
@FORCE
def predict(pack_path: Path, calibrator_path: Path, output: Path, split: str, force: bool) -> None:
    """Write the calibrated probabilities of a split as a .npy array (rows, classes), float32.

    Example: featcal predict my-pack cal.safetensors -o probs.npy
    """
    check_free(output, overwrite=force, remedy=OVERWRITE)
    pack = Pack.open(pack_path)
    calibrator = load_for(calibrator_path, pack)
    data = pack.split(split)
    shape = (data.rows, pack.manifest.classes)
    with progress_bar(), about(pack, split), new_file(output, overwrite=force) as temporary:
        write_probs(temporary, shape, predicted(data, calibrator, pack.head))
    tables.say(f"Wrote {output}: {shape[0]:,} rows, {shape[1]} classes")


@torch.no_grad()
def predicted(data: PackSplit, calibrator: Calibrator, head: Head | None) -> Iterator[Tensor]:
    """The calibrated probabilities, chunk by chunk, refused where they are not finite."""
    survey(data, head)
    row = 0
    for batch in data:
        probs = calibrated_logits(batch, calibrator, head).softmax(1)
        check_finite([Batch(probs, batch.labels)], "the probabilities", first_row=row)
        row += len(batch)
        tell("predicting rows", row, data.rows)
        yield probs


def write_probs(path: Path, shape: tuple[int, int], chunks: Iterable[Tensor]) -> None:
    """Writes a .npy file chunk by chunk; by plain writes, so that a full disk is an error."""
    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for probs in chunks:
            file.write(probs.numpy().astype("<f4").tobytes())
