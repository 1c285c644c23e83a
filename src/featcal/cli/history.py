"""featcal history: how runs of `featcal train` have learned, as a table and a picture."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
from rich.table import Table

from featcal.cli import tables
from featcal.cli.commands import FORCE, JSON, OVERWRITE, output_option, print_json
from featcal.cli.train_job import SHOWN
from featcal.core.disk import check_free
from featcal.core.errors import InputError
from featcal.report.columns import COLUMNS
from featcal.train import History, save_history
from featcal.train.epoch import looks
from featcal.train.picture import MAX_RUNS, check_picture

SCORES = tuple(f"val {COLUMNS[key].heading}" for key in SHOWN)
HEADINGS = ("run", "loss", "epochs", "training loss", *SCORES, "lowest val NLL")


@click.command()
@click.argument(
    "folders", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@output_option(f"Picture to write, .png or .svg, of up to {MAX_RUNS} runs.", required=False)
@FORCE
@JSON
def history(folders: tuple[Path, ...], output: Path | None, force: bool, as_json: bool) -> None:
    """Show how each RUN has learned so far, and draw loss, accuracy, NLL and ECE by epoch.

    RUN is a folder that "featcal train" made or is at work in. Training losses of different kinds
    cannot be compared; scores on val can.

    Example: featcal history run-ce run-focal -o history.png
    """
    folders = tuple(dict.fromkeys(folders))
    if output is not None:
        _check_output(output, len(folders), force)
    runs = [History.read(folder) for folder in folders]
    names = _names(folders)
    if output is not None:
        labels = (f"{name}: {run.loss}" for name, run in zip(names, runs, strict=True))
        by_name = dict(zip(labels, (run.epochs for run in runs), strict=True))
        save_history(by_name, output, overwrite=force)
    if as_json:
        picture = None if output is None else str(output)
        print_json({"runs": [run.as_json() for run in runs], "output": picture})
        return
    _show([(name, *_cells(run)) for name, run in zip(names, runs, strict=True)])
    typed = " ".join(shlex.quote(str(folder)) for folder in folders)
    tables.say(f"Wrote {output}" if output else f"Draw it: featcal history {typed} -o history.png")


def _check_output(output: Path, runs: int, force: bool) -> None:
    check_picture(output)
    if runs > MAX_RUNS:
        raise InputError(f"{runs} runs are given, and -o draws at most {MAX_RUNS}: give fewer")
    check_free(output, overwrite=force, remedy=OVERWRITE)


def _names(folders: Sequence[Path]) -> list[str]:
    """The folders without what all of them begin with, which tells none apart."""
    if len(folders) == 1 or len({folder.is_absolute() for folder in folders}) > 1:
        return list(map(str, folders))
    shared = os.path.commonpath([folder.parent for folder in folders])
    return [str(folder.relative_to(shared)) if shared else str(folder) for folder in folders]


def _cells(run: History) -> Iterator[str]:
    """The loss of the last epoch, the scores when val was last looked at, and the lowest NLL."""
    last, found = run.epochs[-1], looks(run.epochs)
    stale = found and found[-1][0] != last.epoch
    yield run.loss
    yield f"{last.epoch} of {run.planned}" + (f", val after {found[-1][0]}" if stale else "")
    yield f"{last.loss:.4f}"
    if not found:
        yield from ("-",) * (len(SHOWN) + 1)
        return
    for key in SHOWN:
        yield COLUMNS[key].text(getattr(found[-1][1], key))
    epoch, lowest = min(found, key=lambda pair: pair[1].nll)
    yield f"{COLUMNS['nll'].text(lowest.nll)} (epoch {epoch})"


def _show(rows: Sequence[Sequence[str]]) -> None:
    """A line a run where the terminal is wide enough, else a few: no number is ever cut."""
    table = Table()
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading in HEADINGS[:2] else "right")
    for row in rows:
        table.add_row(*row)
    if tables.measured(table) <= tables.console().width:
        tables.console().print(table)
        return
    for name, *cells in rows:
        tables.say(name)
        for heading, cell in zip(HEADINGS[1:], cells, strict=True):
            tables.say(f"  {heading}: {cell}")
