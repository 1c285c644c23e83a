"""The commands: read the arguments, call the library, print."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from featcal import io
from featcal.cli import tables
from featcal.cli.bar import progress_bar
from featcal.core.calibrator import Calibrator, Mode
from featcal.core.disk import check_free, new_file
from featcal.core.errors import CalibrationWarning, InputError
from featcal.core.spec import parse
from featcal.data import Pack, import_npz
from featcal.report import comparison
from featcal.report.scores import calibrated_logits
from featcal.report.scores import evaluate as score

PACK = click.argument("pack_path", metavar="PACK", type=click.Path(path_type=Path))
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object for programs.")
FORCE = click.option("--force", is_flag=True, help="Overwrite the output if it exists.")
BINS = click.option(
    "--bins", default=15, show_default=True, type=click.IntRange(1, 1000), help="Bins of ECE."
)


def split_option(default: str) -> Callable[[Any], Any]:
    """The option --split with the default of a command."""
    return click.option("--split", default=default, show_default=True, help="The split to read.")


def print_json(value: dict[str, Any]) -> None:
    """One JSON object, and nothing else, on standard output."""
    click.echo(json.dumps(value, indent=2, allow_nan=False))


@click.command()
@PACK
@click.argument("recipe")
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path), help="File to write."
)
@split_option("val")
@click.option("--sequential", is_flag=True, help="Fit step by step, as the paper does.")
@FORCE
@JSON
def fit(
    pack_path: Path,
    recipe: str,
    output: Path,
    split: str,
    sequential: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Fit RECIPE on a split of PACK and write the calibrator to a file.

    Example: featcal fit my-pack "clip | temperature" -o cal.safetensors
    """
    check_free(output, overwrite=force)
    calibrator = parse(recipe)
    pack = Pack.open(pack_path)
    notes = _fit(calibrator, pack, split, "sequential" if sequential else "joint")
    io.save(calibrator, output, overwrite=force)
    report = calibrator.report
    assert report is not None
    if as_json:
        print_json({**report.as_json(), "output": str(output), "warnings": notes})
        return
    console = tables.console()
    console.print(tables.fit_table(report))
    for note in notes:
        console.print(f"[yellow]Warning:[/] {note}")
    console.print(f"{report.loss.upper()} {report.loss_before:.4f} -> {report.loss_after:.4f}")
    console.print(f"Wrote {output}", soft_wrap=True)


def _fit(calibrator: Calibrator, pack: Pack, split: str, mode: Mode) -> list[str]:
    """Fits on a split and returns what a person should be warned of."""
    data, head = pack.split(split), pack.head
    if calibrator.needs_features and head is None:
        raise InputError(
            f"{calibrator!r} works on features and {pack.path} holds logits alone: "
            "import features with the head's weight and bias, or use a recipe without clip"
        )
    with progress_bar(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CalibrationWarning)
        calibrator.fit(data, head, mode=mode)
    return [str(warning.message) for warning in caught]


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
    calibrator = None if calibrator_path is None else _load_for(calibrator_path, pack)
    with progress_bar():
        scores = score(pack.split(split), calibrator, pack.head, bins=bins)
    if as_json:
        print_json({"recipe": None if calibrator is None else repr(calibrator), **scores.as_json()})
        return
    name = "uncalibrated" if calibrator is None else str(calibrator)
    title = f"{name}   {scores.n:,} rows of {split}"
    tables.console().print(tables.scores_table(scores, title))


def _load_for(path: Path, pack: Pack) -> Calibrator:
    calibrator = io.load(path)
    if calibrator.needs_features and pack.manifest.head is None:
        raise InputError(f"{path} works on features and {pack.path} holds logits alone")
    return calibrator


@click.command()
@PACK
@click.argument("recipes", metavar="[RECIPE]...", nargs=-1)
@click.option("--fit-split", default="val", show_default=True, help="The split to fit on.")
@click.option("--test-split", default="test", show_default=True, help="The split to score on.")
@click.option("--joint", is_flag=True, help="Fit pipelines jointly instead of step by step.")
@BINS
@JSON
def compare(
    pack_path: Path,
    recipes: tuple[str, ...],
    fit_split: str,
    test_split: str,
    joint: bool,
    bins: int,
    as_json: bool,
) -> None:
    """Fit each RECIPE on val and score it on test.

    Without RECIPEs: none, temperature, clip and clip | temperature. Pipelines are fitted step by
    step, as in the paper, unless --joint is given.

    Example: featcal compare my-pack none temperature "clip(min_accuracy=0.99) | temperature"
    """
    pack = Pack.open(pack_path)
    if fit_split == test_split:
        raise InputError(f"--fit-split and --test-split are both {fit_split!r}: never fit on test")
    rows = compare_splits(
        pack, recipes, fit_split, test_split, "joint" if joint else "sequential", bins
    )
    if as_json:
        print_json({"rows": [row.as_json() for row in rows]})
        return
    how = "jointly" if joint else "step by step"
    title = f"{pack.path.resolve().name}: fitted {how} on {fit_split}, scored on {test_split}"
    print_comparison(rows, f"{title} ({rows[0].scores.n:,} rows)")


def compare_splits(
    pack: Pack, recipes: tuple[str, ...], fit_split: str, test_split: str, mode: Mode, bins: int
) -> list[comparison.Row]:
    """Fits and scores recipes on the splits of a pack; the standard ones when none are given."""
    if not recipes:
        headless = pack.manifest.head is None
        recipes = ("none", "temperature") if headless else comparison.DEFAULT_RECIPES
    with progress_bar():
        return comparison.compare(
            pack.split(fit_split), pack.split(test_split), recipes, pack.head, mode=mode, bins=bins
        )


def print_comparison(rows: list[comparison.Row], title: str) -> None:
    """The table, then every warning and the reason of every no-op."""
    console = tables.console()
    console.print(tables.comparison_table(rows, title))
    for row in rows:
        for note in row.notes:
            console.print(f"[yellow]Warning:[/] {row.recipe}: {note}")
        report = None if row.calibrator is None else row.calibrator.report
        for step in () if report is None else report.steps:
            if step.noop:
                console.print(f"{row.recipe}: {step.message}")


@click.command()
@PACK
@click.argument("calibrator_path", metavar="CALIBRATOR", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path), help="The .npy file to write."
)
@split_option("test")
@FORCE
def predict(pack_path: Path, calibrator_path: Path, output: Path, split: str, force: bool) -> None:
    """Write the calibrated probabilities of a split as a .npy array (rows, classes), float32.

    Example: featcal predict my-pack cal.safetensors -o probs.npy
    """
    check_free(output, overwrite=force)
    pack = Pack.open(pack_path)
    calibrator = _load_for(calibrator_path, pack)
    data, head = pack.split(split), pack.head
    shape = (data.rows, pack.manifest.classes)
    with progress_bar(), new_file(output, overwrite=force) as temporary, torch.no_grad():
        probs = np.lib.format.open_memmap(temporary, mode="w+", dtype=np.float32, shape=shape)
        start = 0
        for batch in data:
            logits = calibrated_logits(batch, calibrator, head)
            probs[start : start + len(batch)] = logits.softmax(1).numpy()
            start += len(batch)
        probs.flush()
    tables.console().print(f"Wrote {output}: {shape[0]:,} rows, {shape[1]} classes", soft_wrap=True)


@click.group()
def pack() -> None:
    """Make and look at feature packs."""


@pack.command("import")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path), help="The folder to make."
)
def import_(file: Path, output: Path) -> None:
    """Make a pack of an .npz FILE.

    The file holds val_features, val_labels, test_features, test_labels, weight and bias (logits are
    features @ weight.T + bias), or logits alone: val_logits, val_labels, test_logits, test_labels.
    """
    with progress_bar():
        made = import_npz(file, output)
    tables.console().print(tables.pack_table(made.summary()))
    tables.console().print(f"Wrote {output}", soft_wrap=True)


@pack.command()
@PACK
@click.option("--verify", is_flag=True, help="Read every byte and check it against its sha256.")
@JSON
def info(pack_path: Path, verify: bool, as_json: bool) -> None:
    """Say what PACK holds."""
    opened = Pack.open(pack_path)
    if verify:
        with progress_bar():
            opened.verify()
    summary = opened.summary()
    if as_json:
        print_json({**summary, "verified": verify})
        return
    tables.console().print(tables.pack_table(summary))
    if verify:
        tables.console().print("Every byte is as its sha256 says.")
