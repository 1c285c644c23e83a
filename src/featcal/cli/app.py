"""The command group, and what its commands share: options, output, and what is said of errors.

A command returns one object for programs and the lines and tables that people read; `answered`
prints the one or the other.
"""

from __future__ import annotations

import difflib
import functools
import json
import os
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from featcal.core import listed, memory
from featcal.core.checks import ENDED, ArgumentError, Elsewhere, InputError, Kind
from featcal.core.progress import ROWS, listen
from featcal.core.table import Table, spelled
from featcal.version import __version__

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from rich.progress import Task, TaskID
    from rich.table import Table as RichTable
    from rich.text import Text
    from torch import nn

    from featcal.core.batch import Chunked
    from featcal.core.fit import Mode
    from featcal.data import Pack, PackSplit

BAD_INPUT = 2  # the exit code for what a person can mend
INTERRUPTED = 130  # the exit code of a program that Ctrl-C ended
BOUNDLESS = 10_000  # wider than any table
PIPE_WIDTH = BOUNDLESS  # a pipe has no width of its own, and a table must not be cut there
HEIGHT = 25  # rich takes a width at its word only with a height, else a dumb terminal has 80
PATIENCE = 5.0  # seconds; torchrun looks at its processes ten times in one
TEXT_WIDTH = 120  # of footnotes in a pipe, which have to be folded somewhere
STYLES = {r"\S better": "green", r"\S worse": "red", r"\[[-\d].*\]": "dim"}  # of parts of a cell
PLAIN = str.maketrans({"▼": "v", "▲": "^", "↓": "v", "↑": "^", "±": "+-", "†": "+", "‡": "#"})
Line = str | Table
Answer = tuple[dict[str, Any], Iterable[Line]]

HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True}


# Every command by task: its module, the name it has there, and its help in a line. A command is
# loaded when it is called. All of them but `paper` need torch, which takes seconds to load: they
# import what needs it inside their functions, so that help and completion come at once.
COMMANDS = {
    "See what it does": {
        "demo": ("compare.demo", "Watch an overconfident network become honest, on shipped data."),
        "paper": ("paper.paper", "List the tables of the feature clipping paper, or show one."),
    },
    "Make a pack of features": {
        "collect": ("packs.collect", "Run a network over its data and keep what enters its head."),
        "pack": ("packs.pack", "Make packs of files, and look at them."),
        "train": ("train.train", "Train a network for calibration, and make a pack of it."),
        "history": ("train.history", "Show how runs of train have learned."),
    },
    "Calibrate": {
        "compare": ("compare.compare", "Fit recipes on val and score them on test, side by side."),
        "fit": ("fit.fit", "Fit a recipe and write the calibrator to a file."),
        "predict": ("fit.predict", "Write calibrated probabilities of a pack or a file."),
        "export": ("packs.export", "Write a calibrated network as an ONNX file."),
    },
    "Measure": {
        "eval": ("fit.evaluate", "Score a network or a calibrator by every metric."),
        "report": ("report.report", "Write one page: may its confidence be trusted, what helps."),
        "explore": ("report.explore", "Look at a pack in a browser, and try any recipe on it."),
    },
}


SHARED = ("collect", "compare", "eval", "fit", "predict", "train")  # by torchrun's processes
KNOWN = {name: one for task in COMMANDS.values() for name, one in task.items()}


class Commands(click.Group):
    """The commands, listed by task; each is loaded when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Their names, in the order of the help."""
        return list(KNOWN)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a name."""
        if cmd_name not in KNOWN:
            return None
        module, _, name = KNOWN[cmd_name][0].partition(".")
        found: click.Command = getattr(import_module(f"featcal.cli.{module}"), name)
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that is called; where there is none, the nearest is named."""
        near = difflib.get_close_matches(args[0], KNOWN, n=1)
        if args[0] not in KNOWN and near and not ctx.resilient_parsing:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the commands by task, and what a recipe may name."""
        for task, commands in COMMANDS.items():
            with formatter.section(task):
                formatter.write_dl([(name, line) for name, (_, line) in commands.items()])
        with formatter.section("Methods, for recipes"):
            formatter.write_text(", ".join(listed.METHODS))

    def shell_complete(
        self, ctx: click.Context, incomplete: str
    ) -> list[click.shell_completion.CompletionItem]:
        """The commands that begin like this, and the options."""
        return [
            *(
                click.shell_completion.CompletionItem(name, help=line)
                for name, (_, line) in KNOWN.items()
                if name.startswith(incomplete)
            ),
            *click.Command.shell_complete(self, ctx, incomplete),
        ]


@click.group(cls=Commands, context_settings=HELP)
@click.version_option(__version__, prog_name="featcal")
def group() -> None:
    """Calibrate a trained classifier: fit on held-out features, measure, ship.

    A PACK is a folder of features, labels and the head of a network: see "featcal train",
    "featcal collect" and "featcal pack import".
    A RECIPE is text such as "clip | temperature" or "clip(min_accuracy=0.99)".
    """
    if not is_first() and click.get_current_context().invoked_subcommand not in SHARED:
        raise click.exceptions.Exit(0)  # the first process does it all


def main(args: list[str] | None = None) -> None:
    """Runs the command line and leaves with its exit code.

    What a person can mend is one sentence on stderr and exit code 2; anything else is raised.
    """
    # Warnings are said by the commands themselves, in their own place and once.
    warnings.simplefilter("ignore")
    memory.steady()
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
            code = told(KeyboardInterrupt() if interrupts else error)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def told(error: BaseException) -> int:
    """Says what ended a command; its exit code. What no person can mend is raised."""
    match error:
        case click.Abort() | KeyboardInterrupt():
            click.echo("Interrupted: no file was left half written.", err=True)
            return INTERRUPTED
        case click.exceptions.Exit():
            return error.exit_code
        case click.exceptions.NoArgsIsHelpError():
            click.echo(error.format_message())
            return BAD_INPUT
    sentence = _sentence(error)
    if sentence is None:
        raise error
    click.echo(f"Error: {spelled(' '.join(sentence.split()))}", err=True)
    return BAD_INPUT


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
    name = argument.partition("=")[0].replace("_", "-")
    return f"--{'force' if name == 'overwrite' else name}"


PATH = click.Path(path_type=Path)
COUNT, FROM_ZERO = click.IntRange(1), click.IntRange(0)
PACK = click.argument("pack_path", metavar="PACK", type=PATH)
CALIBRATOR = click.argument("calibrator_path", metavar="CALIBRATOR", type=PATH)
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object for programs.")
FORCE = click.option("--force", is_flag=True, help="Overwrite the output if it exists.")
HEAD = click.option("--head", help="Path of the last layer, such as fc, if it is not found.")
BINS = click.option("--bins", default=15, type=click.IntRange(1, 1000), help="Bins of ECE.")
SEQUENTIAL = click.option(
    "--sequential", is_flag=True, help="Fit step by step, as the paper does, and not jointly."
)
FIT_SPLIT = click.option("--fit-split", default="val", help="The split to fit on.")
TEST_SPLIT = click.option("--test-split", default="test", help="The split to score.")
DEVICE = click.option("--device", help="Where to compute, such as cuda.  [default: cpu]")
MEMORY = click.option(
    "--memory",
    metavar="SIZE",
    expose_value=False,
    callback=lambda context, _, size: context.with_resource(memory.limited(size)),
    help="The most it may hold, such as 2GB, mapped files aside.",
)
TRAIN_SPLIT = click.option(
    "--train-split", help="Rows the network was trained on, for recipes that ask."
)


LOGITS = click.option("--logits", is_flag=True, help="The numbers of the file are logits.")
PROBS = click.option("--probs", is_flag=True, help="The numbers of the file are probabilities.")
LABEL = click.option("--label", default="label", help="A table's column of labels.")
IGNORE = click.option(
    "--ignore", multiple=True, metavar="COLUMN", help="A column that holds no scores; repeatable."
)


def kind_of(logits: bool, probs: bool) -> Kind | None:
    """What --logits and --probs say of the numbers in a file; None without them."""
    if logits and probs:
        raise InputError("--logits and --probs contradict each other: give one")
    return "logits" if logits else "probs" if probs else None


def mode_of(sequential: bool) -> Mode:
    """How pipelines are fitted, as --sequential says."""
    return "sequential" if sequential else "joint"


def output_option(what: str, *, required: bool = True, **more: Any) -> Callable[[Any], Any]:  # noqa: ANN401
    """The option -o, --output: the file or folder that a command writes."""
    return click.option(
        "-o", "--output", **{"required": required, "type": PATH, "help": what, **more}
    )


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
    except (ArgumentError, Elsewhere):  # of an option or another process, not of these rows
        raise
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


def say(*lines: Line, file: TextIO | None = None) -> None:
    """Prints sentences, which a terminal wraps and nothing cuts, and tables.

    A table wider than the terminal is printed in parts, its labels in front of each; a pipe and a
    file are wide enough for any. No markup: a file called [red] is called that.
    """
    from rich.console import Console  # a third of the time that help takes, which needs none

    shown = file is None and sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if shown else PIPE_WIDTH
    plain: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}
    screen = Console(file=file, width=width, height=HEIGHT, **plain)
    with screen.capture() as caught:
        for line in lines:
            if isinstance(line, str):
                screen.print(printable(line, screen.encoding), soft_wrap=True)
            else:
                _print_table(line, screen)
    text = caught.get()
    if not screen.is_terminal:  # which shows no blanks at the ends of lines
        text = "\n".join(line.rstrip(" ") for line in text.split("\n"))
    try:
        screen.file.write(text)
        screen.file.flush()
    except BrokenPipeError:  # without the number by which click would leave with 1
        raise BrokenPipeError from None


def _print_table(table: Table, screen: Console) -> None:
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    if table.title:
        screen.print(Text(spelled(table.title), "bold"), soft_wrap=True)
    whole = _drawn(table, screen.encoding)
    least = Console(width=BOUNDLESS, height=HEIGHT).measure(whole).minimum
    for part in [table] if least <= screen.width else table.blocks(screen.width):
        screen.print(_drawn(part, screen.encoding))
    if table.notes:
        footnotes = RichTable.grid(padding=(0, 1))
        footnotes.add_column(no_wrap=True)
        footnotes.add_column(overflow="fold")
        for letter, text in table.notes:
            footnotes.add_row(printable(f"[{letter}]", screen.encoding), Text(spelled(text)))
        screen.print(footnotes, width=min(screen.width, TEXT_WIDTH))


def _drawn(table: Table, encoding: str) -> RichTable:
    """A table for rich: words at the left, where they may wrap, and numbers whole at the right."""
    from rich.table import Table as RichTable

    drawn = RichTable(show_header=any(table.headings))
    headings = [printable(heading, encoding) for heading in table.headings]
    for index, (heading, *cells) in enumerate(zip(headings, *table.rows, strict=True)):
        if index == 0 or any(cell[:1].isalpha() and cell != "n/a" for cell in cells):
            drawn.add_column(heading, overflow="fold")
        else:
            texts = "\n".join([heading, *cells]).replace("**", "").split("\n")
            drawn.add_column(heading, justify="right", no_wrap=True, min_width=max(map(len, texts)))
    for row in table.rows:
        drawn.add_row(*(_styled(printable(cell, encoding)) for cell in row))
    return drawn


def _styled(cell: str) -> Text:
    from rich.text import Text

    text = Text()
    for index, part in enumerate(cell.split("**")):
        text.append(part, style="bold" if index % 2 else "")
    for pattern, style in STYLES.items():
        text.highlight_regex(pattern, style)
    return text


def printable(text: str, encoding: str | None) -> str:
    """The text with signs that this encoding has, and none that a terminal would obey."""
    text = spelled(text)
    try:
        text.encode(encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return text.translate(PLAIN)
    return text


def print_json(value: dict[str, Any]) -> None:
    """One JSON object, and nothing else, on standard output."""
    click.echo(json.dumps(value, indent=2, allow_nan=False))


def answered(command: Callable[..., Answer]) -> Callable[..., None]:
    """A command with the option --json: it prints its answer for programs or for people."""

    @JSON
    @functools.wraps(command)
    def run(*, as_json: bool, **options: Any) -> None:  # noqa: ANN401 - of the command
        found, lines = command(**options)
        if as_json:
            print_json(found)
        else:
            say(*lines)

    return run


def shared(command: Callable[..., None]) -> Callable[..., None]:
    """A command that the processes of torchrun share: each reads its own rows.

    The first prints and writes. What ends the job is said once, by the process that knows best.
    """

    @functools.wraps(command)
    def run(**options: Any) -> None:  # noqa: ANN401 - of the command
        if not launched_several():
            return command(**options)

        def told_to_end(*_: object) -> None:  # by torchrun, where a process has failed
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            raise Elsewhere(ENDED)

        # While torch loads: what is raised in there may be swallowed, and nothing is begun yet.
        signal.signal(signal.SIGTERM, lambda *_: _leave(told(Elsewhere(ENDED))))
        from featcal.core import dist

        first, code = is_first(), 0
        gpu = str(options.get("device") or "").startswith("cuda")
        with ExitStack() as joined:
            try:
                signal.signal(signal.SIGTERM, told_to_end)
                joined.enter_context(dist.processes(gpu=gpu))
                if first:
                    command(**options)
                else:
                    with open(os.devnull, "w") as quiet, redirect_stdout(quiet), listen(_nobody):
                        command(**options)
            except BaseException as error:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what ends this one is known
                speaks = dist.speaks(error, PATIENCE)
                code = told(error) if speaks else BAD_INPUT
                # torchrun ends the others when this one leaves: late, where it is silent. The first
                # may hold what tells the others that it has spoken.
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                time.sleep(PATIENCE if not speaks else PATIENCE / 5 if first else 0)
                _leave(code)
        if not first:
            _leave(0)

    return run


def _leave(code: int) -> None:
    """Ends the process without Python's own end, in which threads of torch may still want it.

    With torch 2.13 that aborted in one of forty runs, and ended the others, too.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _nobody(label: str, done: int, of: int) -> None:
    """Draws nothing."""


def launched_several() -> bool:
    """Whether torchrun started several processes of this command."""
    return os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1")


def is_first() -> bool:
    """Whether this process prints and writes: of several the first."""
    return not launched_several() or os.environ.get("RANK", "0") == "0"


def own(data: PackSplit, device: str | None = None) -> Chunked | PackSplit:
    """The rows of a split that this process reads; logits on a device, features go to the head's.

    In order of the processes they are the rows of the split, so that folds and resamples are those
    of one process.
    """
    from featcal.core import dist
    from featcal.core.batch import Chunked

    data = replace(data, part=(dist.rank(), dist.world()))
    to_move = device is not None and data.manifest.head is None
    return Chunked(data, device_of(str(device))) if to_move else data


def head_on(pack: Pack, device: str | None) -> nn.Linear | None:
    """The head of a pack, on a device."""
    head = pack.head
    return head if head is None or device is None else head.to(device_of(device))


def device_of(name: str) -> torch.device:
    """The device of a name, refused where nothing can be computed there."""
    from featcal.train import Engine

    return Engine.best(name).device


@contextmanager
def progress_bar() -> Iterator[None]:
    """Draws the progress of the block on stderr, if that is a terminal; of the first process."""
    from featcal.core import dist

    if dist.rank() > 0 or not sys.stderr.isatty():
        yield
        return
    from rich import progress
    from rich.console import Console
    from rich.text import Text

    class Speed(progress.ProgressColumn):
        """Rows per second, of work that counts rows."""

        def render(self, task: Task) -> Text:
            speed = task.speed if task.description.endswith(ROWS) else None
            return Text("" if speed is None else f"{speed:,.0f} rows/s")

    columns = (
        *(progress.TextColumn("{task.description}"), progress.BarColumn()),
        *(progress.MofNCompleteColumn(), Speed(), progress.TimeElapsedColumn()),
        progress.TimeRemainingColumn(compact=True),
    )
    shown = Console(stderr=True)
    # What is printed meanwhile goes above the bar, or to the file or pipe that asked for it.
    above = sys.stdout.isatty()
    with progress.Progress(*columns, console=shown, transient=True, redirect_stdout=above) as bar:
        tasks: dict[str, TaskID] = {}

        def draw(label: str, done: int, of: int) -> None:
            if label not in tasks:
                tasks[label] = bar.add_task(label, total=of, completed=done)
            bar.update(tasks[label], completed=done, total=of, visible=done < of)

        with listen(draw):
            yield
