"""Tables for people: the same numbers as --json, rounded."""

from __future__ import annotations

import shutil
import sys
from typing import Any, NoReturn, TextIO

from rich.console import Console
from rich.table import Table

from featcal.core.fitting import FitReport
from featcal.report.columns import COLUMNS
from featcal.report.fitted import folded, step_text
from featcal.report.scores import Scores

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
