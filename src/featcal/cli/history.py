"""featcal history: how runs of `featcal train` have learned, as a table and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
from rich.table import Table

from featcal.cli import tables
from featcal.cli.commands import FORCE, JSON, OVERWRITE, output_option, print_json
from featcal.core.disk import check_free
from featcal.report.columns import COLUMNS
from featcal.train import Epoch, History, save_history
from featcal.train.picture import check_picture

SHOWN = ("accuracy", "ece", "nll")


@click.command()
@click.argument(
    "folders", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@output_option("Picture to write, .png or .svg.", required=False)
@FORCE
@JSON
def history(folders: tuple[Path, ...], output: Path | None, force: bool, as_json: bool) -> None:
    """Show how each RUN has learned so far, and draw loss, accuracy, NLL and ECE by epoch.

    RUN is a folder that "featcal train" made or is at work in. Training losses of different kinds
    cannot be compared; scores on val can.

    Example: featcal history run-ce run-focal -o history.png
    """
    if output is not None:
        check_picture(output)
        check_free(output, overwrite=force, remedy=OVERWRITE)
    runs = [History.read(folder) for folder in folders]
    if output is not None:
        by_name = {f"{run.folder}: {run.loss}": run.epochs for run in runs}
        save_history(by_name, output, overwrite=force)
    if as_json:
        picture = None if output is None else str(output)
        print_json({"runs": [run.as_json() for run in runs], "output": picture})
        return
    tables.console().print(_table(runs))
    tables.say(f"Wrote {output}" if output is not None else "A picture of it: -o history.png")


def _table(runs: Sequence[History]) -> Table:
    """A line a run: its last epoch, the scores when val was last looked at, and the best NLL."""
    table = Table()
    for heading in ("run", "loss"):
        table.add_column(heading)
    scores = [f"val {COLUMNS[key].heading}" for key in SHOWN]
    for heading in ("epochs", "training loss", *scores, "lowest val NLL"):
        table.add_column(heading, justify="right")
    for run in runs:
        done = f"{len(run.epochs)} of {run.planned}"
        last = f"{run.epochs[-1].loss:.4f}"
        table.add_row(str(run.folder), run.loss, done, last, *_seen(run.watched))
    return table


def _seen(watched: Sequence[Epoch]) -> tuple[str, ...]:
    """The scores of the last epoch that was watched, and when NLL was lowest."""
    found = [(epoch.epoch, epoch.watched) for epoch in watched if epoch.watched is not None]
    if not found:
        return ("-",) * (len(SHOWN) + 1)
    last = (COLUMNS[key].text(getattr(found[-1][1], key)) for key in SHOWN)
    epoch, lowest = min(found, key=lambda pair: pair[1].nll)
    return (*last, f"{COLUMNS['nll'].text(lowest.nll)} (epoch {epoch})")
