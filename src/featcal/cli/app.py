"""The command group, and what its commands share: options, output, and what is said of errors."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TextIO

import click
from rich import progress
from rich.console import Console
from rich.table import Table
from rich.text import Text

from featcal.core import dist
from featcal.core.checks import ArgumentError, InputError
from featcal.core.progress import ROWS, listen
from featcal.data import Pack
from featcal.version import __version__

BAD_INPUT = 2  # the exit code for what a person can mend
INTERRUPTED = 130  # the exit code of a program that Ctrl-C ended
OVERWRITE = "choose another name, or overwrite it with --force"
BOUNDLESS = 10_000  # wider than any table
PIPE_WIDTH = BOUNDLESS  # a pipe has no width of its own, and a table must not be cut there
HEIGHT = 25  # rich takes a width at its word only with a height, else a dumb terminal has 80
TEXT_WIDTH = 120  # of prose in a pipe, which has to be folded somewhere


HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True}


@click.group(context_settings=HELP)
@click.version_option(__version__, prog_name="featcal")
def group() -> None:
    """Calibrate a trained classifier: fit on held-out features, measure, ship.

    A PACK is a folder of features, labels and the head of a network: see "featcal train",
    "featcal collect" and "featcal pack import".
    A RECIPE is text such as "clip | temperature" or "clip(min_accuracy=0.99)".
    """


def main(args: list[str] | None = None) -> None:
    """Runs the command line and leaves with its exit code.

    What a person can mend is one sentence on stderr and exit code 2; anything else is raised.
    """
    # Warnings are said by the commands themselves, in their own place and once.
    warnings.simplefilter("ignore")
    if sys.stdout is None:  # closed by the caller: nobody wants to read
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - open until the process ends
    interrupts: list[int] = []  # Ctrl-C fills it, whatever becomes of the KeyboardInterrupt

    def note(number: int, _: object) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    main_thread = threading.current_thread() is threading.main_thread()
    if main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, note)
    code = 0
    try:
        try:
            result: Any = group.main(args=args, prog_name="featcal", standalone_mode=False)
            code = result if isinstance(result, int) else 0
        except (Exception, KeyboardInterrupt) as error:
            # Code below Python may swallow the interrupt and fail with an error of its own instead.
            stopped = interrupts or isinstance(error, (click.Abort, KeyboardInterrupt))
            if stopped:
                click.echo("Interrupted: nothing was written.", err=True)
            elif isinstance(error, click.exceptions.NoArgsIsHelpError):
                click.echo(error.format_message())
            else:
                sentence = _sentence(error)
                if sentence is None:
                    raise
                click.echo(f"Error: {' '.join(sentence.split())}", err=True)
            code = INTERRUPTED if stopped else BAD_INPUT
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _sentence(error: BaseException) -> str | None:
    """What a person can mend, with options for arguments; None for any other error."""
    match error:
        case click.ClickException():
            return error.format_message()
        case ArgumentError():
            return error.sentence(option_of)
        case InputError():
            return str(error)
        case OSError() if not isinstance(error, BrokenPipeError):
            return f"{error.filename or 'output'}: {error.strerror or error}"
    return None


def option_of(argument: str) -> str:
    """--held-out for held_out, and --download for download=True."""
    return f"--{argument.partition('=')[0].replace('_', '-')}"


PATH = click.Path(path_type=Path)
COUNT, FROM_ZERO = click.IntRange(1), click.IntRange(0)
PACK = click.argument("pack_path", metavar="PACK", type=PATH)
CALIBRATOR = click.argument("calibrator_path", metavar="CALIBRATOR", type=PATH)
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object for programs.")
FORCE = click.option("--force", is_flag=True, help="Overwrite the output if it exists.")
HEAD = click.option("--head", help="Path of the last layer, such as fc, if it is not found.")
BINS = click.option("--bins", default=15, type=click.IntRange(1, 1000), help="Bins of ECE.")
TRAIN_SPLIT = click.option(
    "--train-split", help="Rows the network was trained on, for recipes that ask."
)


def split_option(default: str) -> Callable[[Any], Any]:
    """The option --split with the default of a command."""
    return click.option("--split", default=default, help="The split to read.")


def output_option(what: str, *, required: bool = True) -> Callable[[Any], Any]:
    """The option -o, --output: the file or folder that a command writes."""
    return click.option("-o", "--output", required=required, type=PATH, help=what)


def format_option(forms: Iterable[str], what: str) -> Callable[[Any], Any]:
    """The option --format."""
    return click.option("--format", "form", type=click.Choice(list(forms)), help=what)


def format_of(form: str | None, as_json: bool) -> str | None:
    """The format that --format or --json asks for."""
    if as_json and form not in (None, "json"):
        raise InputError(f"--json and --format {form} contradict each other: give one")
    return "json" if as_json else form


@contextmanager
def about(pack: Pack, *splits: str) -> Iterator[None]:
    """Names the pack and the split in whatever is wrong with their rows."""
    try:
        yield
    except InputError as error:
        names = " or ".join(map(repr, splits))
        raise InputError(f"{pack.path}, split {names}: {error}") from error


@contextmanager
def going_on_later(kept: Path) -> Iterator[None]:
    """Says what Ctrl-C leaves, and what to do about it."""
    try:
        yield
    except KeyboardInterrupt:
        if not kept.exists():
            raise
        what = f"what is done is kept in {kept}; give the same command to go on."
        click.echo(f"Interrupted: {what}", err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None


class _Console(Console):
    """A console that leaves a closed pipe to the caller."""

    def on_broken_pipe(self) -> NoReturn:
        """Rich would leave with exit code 1; a reader that has seen enough is no failure."""
        raise BrokenPipeError  # without the number by which click would leave with 1, too

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


def console(file: TextIO | None = None) -> Console:
    """Standard output, as wide as the terminal; wide enough for any table when it is a pipe.

    No markup: a file called [red] is called that.
    """
    shown = file is None and sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if shown else PIPE_WIDTH
    return _Console(
        file=file, width=width, height=HEIGHT, highlight=False, markup=False, emoji=False
    )


def table_of(
    headings: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1, title: str = ""
) -> Table:
    """A table of words in the first columns and numbers in the others."""
    table = Table(*headings[:left], title=title or None, title_justify="left")
    for heading in headings[left:]:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def measured(table: Table) -> int:
    """The columns a table takes where nothing limits it."""
    return Console(width=BOUNDLESS, height=HEIGHT).measure(table).maximum


def say(text: str) -> None:
    """One line of text; a terminal wraps it, nothing cuts it."""
    console().print(text, soft_wrap=True)


def print_json(value: dict[str, Any]) -> None:
    """One JSON object, and nothing else, on standard output."""
    click.echo(json.dumps(value, indent=2, allow_nan=False))


class _Speed(progress.ProgressColumn):
    """Rows per second, of work that counts rows."""

    def render(self, task: progress.Task) -> Text:
        speed = task.speed if task.description.endswith(ROWS) else None
        return Text("" if speed is None else f"{speed:,.0f} rows/s")


@contextmanager
def progress_bar() -> Iterator[None]:
    """Draws the progress of the block on stderr, if that is a terminal; of the first process."""
    if dist.rank() > 0 or not sys.stderr.isatty():
        yield
        return
    columns = (
        *(progress.TextColumn("{task.description}"), progress.BarColumn()),
        *(progress.MofNCompleteColumn(), _Speed(), progress.TimeElapsedColumn()),
        progress.TimeRemainingColumn(compact=True),
    )
    shown = Console(stderr=True)
    # What is printed meanwhile goes above the bar, or to the file or pipe that asked for it.
    above = sys.stdout.isatty()
    with progress.Progress(*columns, console=shown, transient=True, redirect_stdout=above) as bar:
        tasks: dict[str, progress.TaskID] = {}

        def draw(label: str, done: int, of: int) -> None:
            if label not in tasks:
                tasks[label] = bar.add_task(label, total=of, completed=done)
            bar.update(tasks[label], completed=done, total=of, visible=done < of)

        with listen(draw):
            yield
