"""The comparison on a terminal: as many columns as fit, the best in bold, findings in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from featcal.cli.tables import FITTED_WIDTH, measured
from featcal.report.blocks import Block, Cell
from featcal.report.columns import USUAL
from featcal.report.fitted import BETWEEN, folded
from featcal.report.intervals import UNKNOWN
from featcal.report.render import ARROWS, finding_text

PLAIN_ARROWS = {"down": "v", "up": "^"}
# What a narrow terminal does without, first to go first; columns that were asked for go last.
EXPENDABLE = ("seconds", "brier", "adaptive_ece", "fitted", "nll")
INTERVALS, FINDINGS = "intervals", "findings"  # what goes after all columns that can
STYLES = {"better": "green", "worse": "red"}

T = TypeVar("T")


def arrows(encoding: str | None) -> Mapping[str, str]:
    """Arrows that can be printed in this encoding."""
    try:
        "".join(ARROWS.values()).encode(encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return PLAIN_ARROWS
    return ARROWS


def comparison_table(block: Block, console: Console) -> tuple[Table, list[str]]:
    """The widest table that fits, and the headings it had to leave out."""
    for part, hidden in _narrower(block):
        labels = dict.fromkeys((_longest_label(part), _longest_step(part)))
        for width, fitted in product(labels, (None, FITTED_WIDTH)):
            table = _table(part, width, fitted, arrows(console.encoding))
            if measured(table) <= console.width:
                return table, hidden
    return table, hidden


def _narrower(block: Block) -> Iterator[tuple[Block, list[str]]]:
    """The block, and again with less and less, with the headings that are gone."""
    names = [cell.column.name for cell in block.lines[0].cells]
    asked = ("seconds", "fitted", *reversed(names[1:]))
    order = EXPENDABLE if tuple(names) == USUAL else asked
    if block.title:  # alone and after clip: neither means anything without the other
        order = ()
    hidden: list[str] = []
    yield block, list(hidden)
    for name in order:
        block, heading = _without(block, name)
        hidden += heading
        yield block, list(hidden)
    cells = [cell for line in block.lines for cell in line.cells]
    hidden += [INTERVALS] * any(cell.range for cell in cells)
    yield _mapped(block, lambda cell: replace(cell, interval=UNKNOWN)), list(hidden)
    hidden += [FINDINGS] * any(cell.finding for cell in cells)
    yield _mapped(block, lambda cell: Cell(cell.column, cell.value, best=cell.best)), hidden


def _mapped(block: Block, change: Callable[[Cell], Cell]) -> Block:
    lines = (replace(line, cells=tuple(map(change, line.cells))) for line in block.lines)
    return replace(block, lines=tuple(lines))


def _without(block: Block, name: str) -> tuple[Block, list[str]]:
    """The block without one column, and its heading where it was there."""
    if name == "fitted":
        lines = tuple(replace(line, fitted="") for line in block.lines)
        return replace(block, lines=lines), [name] * any(line.fitted for line in block.lines)
    if name == "seconds":
        lines = tuple(replace(line, seconds=float("nan")) for line in block.lines)
        return replace(block, lines=lines), [name]
    at = [cell.column.name for cell in block.lines[0].cells].index(name)
    lines = tuple(replace(line, cells=_but(line.cells, at)) for line in block.lines)
    left = replace(block, headings=_but(block.headings, at), lines=lines)
    return left, [block.headings[at]]


def _but(values: tuple[T, ...], at: int) -> tuple[T, ...]:
    return values[:at] + values[at + 1 :]


def _longest_label(block: Block) -> int:
    return max(len(block.labels), *(len(line.label) for line in block.lines))


def _longest_step(block: Block) -> int:
    """The width at which recipes break after a bar and nowhere else."""
    steps = (line.label.replace(" | ", " |\n").splitlines() for line in block.lines)
    return max(len(block.labels), *(len(step) for parts in steps for step in parts))


def _table(block: Block, labels: int, fitted_width: int | None, marks: Mapping[str, str]) -> Table:
    table = Table(title=block.title or None, title_justify="left", title_style="bold")
    table.add_column(block.labels, width=labels, overflow="fold")
    for heading in block.headings:
        table.add_column(heading, justify="right", no_wrap=True)
    fitted = any(line.fitted for line in block.lines)
    if fitted:
        table.add_column("fitted", max_width=fitted_width, overflow="fold")
    timed = any(not math.isnan(line.seconds) for line in block.lines)
    if timed:
        table.add_column("seconds", justify="right", no_wrap=True)
    tall = any(cell.range or cell.finding for line in block.lines for cell in line.cells)
    for line in block.lines:
        cells = [_cell(cell, marks) for cell in line.cells]
        # Where cells have two lines anyway, so may a pipeline of two steps.
        steps = line.fitted.split(BETWEEN) if tall else [line.fitted]
        text = "\n".join(folded(step, fitted_width or len(step)) for step in steps)
        more = [text] * fitted + [f"{line.seconds:.2f}"] * timed
        table.add_row(line.label, *cells, *more)
    return table


def _cell(cell: Cell, marks: Mapping[str, str]) -> Text:
    """The finding before the value, so that the numbers of a column stay below each other.

    Without an interval below the value there is room for the finding, which is narrower there.
    """
    value = Text(cell.column.text(cell.value), "bold" if cell.best else "")
    found = Text() if cell.finding is None else Text(finding_text(cell, marks))
    if cell.finding is not None:
        found.stylize(STYLES[cell.finding[1]])
    if not cell.range:
        return Text("\n").join([value, found]) if found else value
    first = Text(" ").join([found, value]) if found else value
    return Text("\n").join([first, Text(cell.range, "dim")])
