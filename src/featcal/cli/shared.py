"""The commands: read the arguments, call the library, print."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TextIO, final

import click
import numpy as np
import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import TimeElapsedColumn as Elapsed
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from featcal import io
from featcal.core.batch import Batch, Head
from featcal.core.calibrator import Calibrator
from featcal.core.checks import CalibrationWarning, InputError
from featcal.core.files import check_free, new_file
from featcal.core.fit import FitReport, Mode, check_finite, survey
from featcal.core.progress import ROWS, listen, tell
from featcal.core.text import parse
from featcal.data import Pack, PackSplit
from featcal.report.scores import COLUMNS, Scores, calibrated_logits
from featcal.report.scores import evaluate as score
from featcal.report.tables import folded, step_text

# --- A progress bar on stderr for whoever watches a terminal, silent for everyone else.


class _Speed(ProgressColumn):
    """Rows a second, of work that counts rows."""

    def render(self, task: Task) -> Text:
        speed = task.speed if task.description.endswith(ROWS) else None
        return Text("" if speed is None else f"{speed:,.0f} rows/s")


@contextmanager
def progress_bar() -> Iterator[None]:
    """Draws the progress of the work inside the block."""
    if not sys.stderr.isatty():
        yield
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _Speed(),
        Elapsed(),
        TimeRemainingColumn(compact=True),
    )
    shown = Console(stderr=True)
    # What is printed meanwhile goes above the bar, or to the file or pipe that asked for it.
    above = sys.stdout.isatty()
    with Progress(*columns, console=shown, transient=True, redirect_stdout=above) as bar:
        tasks: dict[str, TaskID] = {}

        def draw(label: str, done: int, of: int) -> None:
            if label not in tasks:
                tasks[label] = bar.add_task(label, total=of, completed=done)
            bar.update(tasks[label], completed=done, total=of, visible=done < of)

        with listen(draw):
            yield


# --- Tables for people: the same numbers as --json, rounded.

BOUNDLESS = 10_000  # wider than any table
PIPE_WIDTH = BOUNDLESS  # a pipe has no width of its own, and a table must not be cut there
HEIGHT = 25  # rich takes a width at its word only with a height, else a dumb terminal has 80
TEXT_WIDTH = 120  # of prose in a pipe, which has to be folded somewhere
FITTED_WIDTH = 24  # of fitted values where there is no room for more: a range over folds


class _Console(Console):
    """A console that leaves a closed pipe to the caller."""

    def on_broken_pipe(self) -> NoReturn:
        """Rich would leave with exit code 1; a reader that has seen enough is no failure."""
        raise BrokenPipeError

    def print(self, *objects: Any, **options: Any) -> None:  # noqa: ANN401 - as in rich
        """A file or a pipe gets no blanks at the ends of lines; a terminal shows none."""
        if self.is_terminal:
            super().print(*objects, **options)
            return
        with self.capture() as caught:
            super().print(*objects, **options)
        try:
            self.file.write("\n".join(line.rstrip(" ") for line in caught.get().split("\n")))
            self.file.flush()
        except BrokenPipeError:
            self.on_broken_pipe()


def measured(table: Table) -> int:
    """The columns a table takes where nothing limits it."""
    return Console(width=BOUNDLESS, height=HEIGHT).measure(table).maximum


def console(file: TextIO | None = None) -> Console:
    """Standard output, as wide as the terminal; wide enough for any table when it is a pipe.

    No markup: a file called [red] is called that.
    """
    shown = file is None and sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if shown else PIPE_WIDTH
    return _Console(
        file=file, width=width, height=HEIGHT, highlight=False, markup=False, emoji=False
    )


def say(text: str) -> None:
    """One line of text; a terminal wraps it, nothing cuts it."""
    console().print(text, soft_wrap=True)


def fit_table(report: FitReport) -> Table:
    """One row a step: what it learned, what it did to the loss, what it cost."""
    table = Table()
    table.add_column("step")
    table.add_column("fitted")
    name = report.loss.upper()
    for heading in (f"{name} before", f"{name} after", "head passes", "seconds"):
        table.add_column(heading, justify="right")
    for step in report.steps:
        numbers = (f"{step.loss_before:.4f}", f"{step.loss_after:.4f}", str(step.head_passes))
        fitted = folded(step_text(step), FITTED_WIDTH)
        table.add_row(step.name, fitted, *numbers, f"{step.seconds:.2f}")
    return table


def scores_table(scores: Scores) -> Table:
    """Every metric, one a line."""
    table = Table(show_header=False)
    table.add_column("metric")
    table.add_column("value", justify="right", no_wrap=True)
    for name, column in COLUMNS.items():
        table.add_row(column.title, column.text(scores.metrics[name]))
    return table


def pack_table(summary: dict[str, Any]) -> Table:
    """The splits of a pack."""
    table = Table()
    for heading in ("split", "rows", "shards", "MB"):
        table.add_column(heading, justify="left" if heading == "split" else "right")
    for name, split in summary["splits"].items():
        size = f"{split['bytes'] / 1e6:.1f}"
        table.add_row(name, f"{split['rows']:,}", str(split["shards"]), size)
    return table


def pack_lines(summary: dict[str, Any]) -> list[str]:
    """What a pack is, in words."""
    origin = ", ".join(part for part in (summary["dataset"], summary["model"]) if part)
    stored = ", ".join(f"{name} {dtype}" for name, dtype in summary["tensors"].items())
    width = f"{summary['features']} features" if summary["features"] else "logits alone"
    head = "with the head" if summary["head"] else "without a head"
    title = f"{summary['name']}: {origin}" if origin else summary["name"]
    return [title, f"{width}, {summary['classes']} classes, {head}; stored as {stored}"]


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
    say(f"{report.recipe}: fitted on {report.rows:,} rows of {split}, {report.mode}")
    console().print(fit_table(report))
    for step in report.steps:
        say(f"{'Warning: ' if step.warning else ''}{step.name}: {step.message}")
    name = report.loss.upper()
    say(f"{name} {report.loss_before:.4f} -> {report.loss_after:.4f}; wrote {output}")


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
    say(f"{name}, {scores.n:,} rows of {split}")
    console().print(scores_table(scores))


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
    say(f"Wrote {output}: {shape[0]:,} rows, {shape[1]} classes")


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


# --- A network given as `package.module:function`, which returns the model and its loaders.

OPTIONS = ("class_names", "dataset", "name", "head", "layer", "unpack", "meta")
DYNAMIC = "dynamic"  # axes of any size, for export alone
RETURNS = "return (model, {'val': loader, 'test': loader})"


@final
@dataclass(frozen=True)
class Target:
    """What such a function returned.

    Attributes:
        model: the classifier.
        loaders: a loader for every split, by name.
        options: of `collect_pack`, where the function returned a mapping that says more.
        dynamic: the axes of any size of an exported file; None for the rows alone.
    """

    model: nn.Module
    loaders: Mapping[str, Iterable[Any]]
    options: dict[str, Any] = field(default_factory=dict)
    dynamic: Any = None


def load_target(spec: str) -> Target:
    """Imports the function, with the current folder on the path, and calls it."""
    made = named_function(spec)()
    options: dict[str, Any] = {}
    if isinstance(made, Mapping):
        options = {key: value for key, value in made.items() if key not in ("model", "loaders")}
        made = made.get("model"), made.get("loaders")
    if not isinstance(made, (tuple, list)) or len(made) != 2 or not isinstance(made[0], nn.Module):
        raise InputError(f"{spec} returned {_shape(made)}: {RETURNS}")
    dynamic = options.pop(DYNAMIC, None)
    unknown = set(options) - set(OPTIONS)
    if unknown:
        known = ", ".join((*OPTIONS, DYNAMIC))
        raise InputError(f"{spec} returned {min(unknown)!r}: it may say {known}")
    loaders = made[1] if isinstance(made[1], Mapping) else {"val": made[1]}
    return Target(made[0], loaders, options, dynamic)


def named_function(spec: str, returns: str = "the model and its loaders") -> Callable[..., Any]:
    """The function that `package.module:function` names, the current folder on the path.

    Args:
        spec: the text.
        returns: what the function gives, said where the text names none.
    """
    module_name, colon, name = spec.partition(":")
    if not (module_name and colon and name):
        raise InputError(
            f"{spec!r} is not package.module:function: name the function that returns "
            f"{returns}, such as my_project.models:build"
        )
    module = _module(module_name)
    found = getattr(module, name, None)
    if not callable(found):
        have = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        raise InputError(
            f"{module_name} has no function {name!r}: it has {', '.join(have) or 'none'}"
        )
    return found  # type: ignore[no-any-return]


def _module(name: str) -> Any:  # noqa: ANN401
    """The module; what goes wrong inside it is its own affair and keeps its traceback."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise
        hint = f"; for a file write {Path(name).stem}:function" if name.endswith(".py") else ""
        raise InputError(
            f"there is no module {name!r} here or among the installed packages: run the command "
            f"in the folder that holds it{hint}"
        ) from error


def _shape(value: object) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(type(part).__name__ for part in value)})"
    return type(value).__name__


def placed_on(model: nn.Module, device: str | None) -> nn.Module:
    """The model on a device, where one is named."""
    if device is None:
        return model
    try:
        return model.to(torch.device(device))
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"--device {device} cannot be used here: {reason}") from error
