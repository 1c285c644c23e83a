"""The command group, and how everything that goes wrong is said: one sentence, exit code 2."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import click

from featcal.cli.commands import evaluate, fit, predict
from featcal.cli.compare import compare
from featcal.cli.demo import demo
from featcal.cli.packs import pack
from featcal.cli.paper import paper
from featcal.core.errors import InputError
from featcal.version import __version__

BAD_INPUT = 2
INTERRUPTED = 130


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="featcal")
def group() -> None:
    """Calibrate a trained classifier: fit on held-out features, measure, ship.

    A PACK is a folder of features, labels and the head of a network: see "featcal pack import".
    A RECIPE is text such as "clip | temperature" or "clip(min_accuracy=0.99)".
    """


for command in (demo, fit, evaluate, compare, predict, pack, paper):
    group.add_command(command)


def main(args: list[str] | None = None) -> None:
    """Runs the command line and leaves with its exit code."""
    # Warnings are said by the commands themselves, in their own place and once.
    warnings.simplefilter("ignore")
    if sys.stdout is None:  # closed by the caller: nobody wants to read
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - open until the process ends
    try:
        code = _run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)


def _run(args: list[str] | None) -> int:
    try:
        result: Any = group.main(args=args, prog_name="featcal", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return BAD_INPUT
    except click.ClickException as error:
        return _refused(error.format_message())
    except (click.Abort, KeyboardInterrupt):
        click.echo("Interrupted: nothing was written.", err=True)
        return INTERRUPTED
    except InputError as error:
        return _refused(str(error))
    except BrokenPipeError:
        raise
    except OSError as error:
        return _refused(f"{error.filename or 'output'}: {error.strerror or error}")
    return result if isinstance(result, int) else 0


def _refused(sentence: str) -> int:
    click.echo(f"Error: {' '.join(sentence.split())}", err=True)
    return BAD_INPUT
