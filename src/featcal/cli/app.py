"""The command group, and how everything that goes wrong is said: one sentence, exit code 2."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from typing import Any

import click

from featcal.cli.compare import compare, demo
from featcal.cli.export import export
from featcal.cli.packs import collect, pack
from featcal.cli.paper import paper
from featcal.cli.report import explore, report
from featcal.cli.shared import BAD_INPUT, INTERRUPTED, evaluate, fit, predict
from featcal.cli.train import history, train
from featcal.core.checks import InputError
from featcal.version import __version__


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="featcal")
def group() -> None:
    """Calibrate a trained classifier: fit on held-out features, measure, ship.

    A PACK is a folder of features, labels and the head of a network: see "featcal train",
    "featcal collect" and "featcal pack import".
    A RECIPE is text such as "clip | temperature" or "clip(min_accuracy=0.99)".
    """


MAKING = (demo, train, collect, fit, predict, export, pack)
LOOKING = (evaluate, compare, report, explore, history, paper)
for command in (*MAKING, *LOOKING):
    group.add_command(command)


def main(args: list[str] | None = None) -> None:
    """Runs the command line and leaves with its exit code."""
    # Warnings are said by the commands themselves, in their own place and once.
    warnings.simplefilter("ignore")
    if sys.stdout is None:  # closed by the caller: nobody wants to read
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - open until the process ends
    code = 0
    try:
        code = _run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _run(args: list[str] | None) -> int:
    interrupts = _noted_interrupts()
    try:
        result: Any = group.main(args=args, prog_name="featcal", standalone_mode=False)
    except (click.Abort, KeyboardInterrupt):
        return _stopped()
    except Exception as error:
        # Code below Python may swallow the interrupt and fail with an error of its own instead.
        return _stopped() if interrupts else _explained(error)
    return result if isinstance(result, int) else 0


def _noted_interrupts() -> list[int]:
    """A list that Ctrl-C makes non-empty, whatever becomes of the KeyboardInterrupt."""
    seen: list[int] = []

    def note(number: int, _: object) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    main_thread = threading.current_thread() is threading.main_thread()
    if main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, note)
    return seen


def _explained(error: Exception) -> int:
    """One sentence for what a person can mend; anything else is raised again."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        click.echo(error.format_message())
        return BAD_INPUT
    if isinstance(error, click.ClickException):
        return _refused(error.format_message())
    if isinstance(error, InputError):
        return _refused(str(error))
    if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
        return _refused(f"{error.filename or 'output'}: {error.strerror or error}")
    raise error


def _stopped() -> int:
    click.echo("Interrupted: nothing was written.", err=True)
    return INTERRUPTED


def _refused(sentence: str) -> int:
    click.echo(f"Error: {' '.join(sentence.split())}", err=True)
    return BAD_INPUT
