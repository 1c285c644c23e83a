"""The cells of a comparison, laid out: one line a recipe, or the paper's two columns a metric.

A block knows what stands where and nothing of how it is drawn; `render.py` writes it as text for
files, the command line as a table for the terminal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, final

from featcal.report.columns import Column
from featcal.report.fitted import fitted_text
from featcal.report.intervals import UNKNOWN, Difference, Interval

if TYPE_CHECKING:
    from featcal.report.rows import Comparison

# The rows of the paper's Table 2 (ece-posthoc) under its names, and the recipe of each; each is
# shown alone and after clip.
PAPER_METHODS = {
    "Original Feature": "none",
    "TS": "temperature",
    "ETS": "ensemble",
    "PTS": "parameterised",
    "CTS": "classwise",
    "Group Calibration": "group",
}
PAPER_METRICS = ("ece", "adaptive_ece")


def after_clip(recipe: str) -> str:
    """The recipe with clip in front of it."""
    return "clip" if recipe == "none" else f"clip | {recipe}"


PAPER_RECIPES = tuple(
    recipe for base in PAPER_METHODS.values() for recipe in (base, after_clip(base))
)


@final
@dataclass(frozen=True)
class Cell:
    """One metric of one row.

    Attributes:
        column: the metric.
        value: as a fraction.
        interval: NaN at both ends where there is none.
        difference: from the row it is compared with, if any.
        best: whether no other cell it is to be compared with is better as printed.
    """

    column: Column
    value: float
    interval: Interval = UNKNOWN
    difference: Difference | None = None
    best: bool = False

    @property
    def number(self) -> str:
        """The value as printed, without its unit."""
        return self.column.number(self.value)

    @property
    def range(self) -> str:
        """[4.31, 5.07], or nothing."""
        if math.isnan(self.interval.low):
            return ""
        return (
            f"[{self.column.number(self.interval.low)}, {self.column.number(self.interval.high)}]"
        )

    @property
    def finding(self) -> tuple[str, str] | None:
        """("down", "better") and so on where the paired difference is one; else None."""
        found = self.difference
        if found is None or found.verdict not in ("better", "worse"):
            return None
        return ("up" if found.delta > 0 else "down"), found.verdict


@final
@dataclass(frozen=True)
class Line:
    """A label and its cells; what was fitted and the seconds stand beside them in some layouts."""

    label: str
    cells: tuple[Cell, ...]
    fitted: str = ""
    seconds: float = math.nan


@final
@dataclass(frozen=True)
class Block:
    """A table: its title, what the labels are, the headings of the cells, the lines."""

    title: str
    labels: str
    headings: tuple[str, ...]
    lines: tuple[Line, ...]


def comparison_block(comparison: Comparison, columns: Sequence[Column]) -> Block:
    """One line a recipe, one column a metric; the best of each column is marked."""
    grid = [_cells(comparison, range(len(comparison)), column) for column in columns]
    lines = (
        Line(row.recipe, cells, fitted_text(row.reports), row.seconds)
        for row, cells in zip(comparison, zip(*grid, strict=True), strict=True)
    )
    return Block("", "recipe", tuple(column.heading for column in columns), tuple(lines))


def paper_blocks(comparison: Comparison, columns: Sequence[Column]) -> list[Block]:
    """A block a metric: one line a method, alone and after clip; rows as in PAPER_RECIPES."""
    return [_paper_block(comparison, column) for column in columns]


def _paper_block(comparison: Comparison, column: Column) -> Block:
    cells = _cells(comparison, range(len(comparison)), column)
    pairs = zip(PAPER_METHODS, zip(cells[::2], cells[1::2], strict=True), strict=True)
    lines = tuple(Line(label, pair) for label, pair in pairs)
    return Block(column.heading, "method", ("base", "after clip"), lines)


def against_own_base(comparison: Comparison) -> Comparison:
    """The rows of PAPER_RECIPES, each one after clip compared with the same method without."""
    against = tuple(index - 1 if index % 2 else None for index in range(len(comparison)))
    baseline = "the same method without clip"
    settings = {**comparison.settings, "baseline": baseline, "methods": dict(PAPER_METHODS)}
    return replace(comparison, against=against, settings=settings)


def _cells(comparison: Comparison, rows: Sequence[int], column: Column) -> list[Cell]:
    found = []
    for index in rows:
        scores = comparison[index].scores
        value = scores.metrics[column.name]
        interval = scores.interval(column.name)
        found.append(Cell(column, value, interval, comparison.difference(index, column.name)))
    if column.better == 0 or len(found) < 2:
        return found
    best = max(found, key=lambda cell: column.merit(cell.value)).number
    # Equal as printed is equal to the reader: both are marked.
    return [replace(cell, best=cell.number == best != "n/a") for cell in found]
