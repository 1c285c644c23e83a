"""The tables of a comparison.

A comparison is laid out once, as blocks of cells that know their metric, value, interval and
difference; Markdown, LaTeX and the terminal print the same blocks. CSV holds every number in full.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import starmap
from typing import TYPE_CHECKING, Any, final

from featcal.core.calibrator import METHODS
from featcal.core.fit import FitReport, StepReport
from featcal.core.table import Table as Table
from featcal.core.table import html_table, spelled
from featcal.metrics.columns import COLUMNS, USUAL, Column, columns
from featcal.report.bootstrap import FEW_WRONG, UNKNOWN, Difference, Interval

if TYPE_CHECKING:
    from featcal.report.compare import Comparison
    from featcal.report.scores import Scores

FEW = "†"  # at an interval that rests on few wrong rows
WIDE = "‡"  # over those that may hold the truth more often than they say


def inert(text: str) -> str:
    """Markdown in which no name can be HTML.

    >>> inert("dog<script>")
    'dog&lt;script>'
    """
    return spelled(text).replace("<", "&lt;")


# The fitted values in a few characters: c = 2.26, T = 1.14, or over folds T = 1.14 to 1.16.

# What a step was held back by: the first that it names is shown, after what it learned.
PENALTIES = ("ridge", "off_diagonal", "bias")
SHOWN = 4  # values of a step; JSON has them all
BETWEEN = ", "  # steps
WITHIN = "; "  # the values of a step


def fitted_text(reports: Sequence[FitReport]) -> str:
    """What one fit, or the fits of the same recipe on several folds, chose."""
    steps = zip(*(report.steps for report in reports), strict=True)
    return BETWEEN.join(filter(None, starmap(step_text, steps)))


def step_text(*steps: StepReport) -> str:
    """What one step chose, or the same step on several folds."""
    acting = [step for step in steps if not step.noop]
    idle = f"{steps[0].name}: no-op"
    if not acting:
        return idle
    recipes = dict.fromkeys(step.values["recipe"] for step in acting if "recipe" in step.values)
    told = [*([" or ".join(recipes)] if recipes else []), *_named_values(acting)]
    text = WITHIN.join([*told[:SHOWN], *(["..."] if len(told) > SHOWN else [])])
    text += " (given)" if acting[0].details.get("fixed") else ""
    if len(acting) < len(steps):
        return f"{text} ({idle} in {len(steps) - len(acting)} of {len(steps)} folds)".lstrip()
    return text


def _named_values(steps: Sequence[StepReport]) -> Iterator[str]:
    """Each value over all folds that have it, T = 1.14 to 1.16; one penalty, and that last.

    The two ends of a range, as T_min and T_max, are one value: T 1.35 to 2.18.
    """
    keys = list(dict.fromkeys(key for step in steps for key in step.values))
    learned = [key for key in keys if key not in PENALTIES]
    held = [key for key in PENALTIES if key in keys][:1]
    left = {
        key: list(_numbers([step.values[key] for step in steps if key in step.values]))
        for key in [*learned, *held]
    }
    symbols = METHODS[steps[0].name].symbols
    while left:
        key = next(iter(left))
        numbers, stem = left.pop(key), key.removesuffix("_min")
        name, equals, other = symbols.get(key, key), "= ", f"{stem}_max" if stem != key else ""
        if key == "lowest":
            stem, other = "values", "highest"
        if other in left:
            name, equals, numbers = stem, "", numbers + left.pop(other)
        if numbers:
            low, high = f"{min(numbers):.4g}", f"{max(numbers):.4g}"
            yield f"{name} = {low}" if low == high else f"{name} {equals}{low} to {high}"


def _numbers(value: object) -> Iterator[float]:
    """Every number in a value or in lists of values; words and switches are no numbers."""
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from _numbers(part)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield float(value)


def folded(text: str, width: int) -> str:
    """The text in lines no wider than `width` where that can be: broken between values alone."""
    lines: list[str] = []
    for part in re.split("(?<=[;,]) ", text):
        if lines and len(lines[-1]) + 1 + len(part) <= width:
            lines[-1] += f" {part}"
        else:
            lines.append(part)
    return "\n".join(lines)


# The cells of a comparison: one line per recipe, or the paper's two columns per metric.

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
        few_wrong: whether the interval rests on few wrong rows.
    """

    column: Column
    value: float
    interval: Interval = UNKNOWN
    difference: Difference | None = None
    best: bool = False
    few_wrong: bool = False

    @property
    def number(self) -> str:
        """The value as printed, without its unit."""
        return self.column.number(self.value)

    @property
    def range(self) -> str:
        """[4.31, 5.07], or nothing."""
        low, high = self.interval.low, self.interval.high
        number = self.column.number
        sign = FEW * self.few_wrong
        return "" if math.isnan(low) else f"[{number(low)}, {number(high)}]{sign}"

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

    @property
    def marked(self) -> list[str]:
        """The headings, with a sign over intervals that may be longer than they need be."""
        cells = zip(self.headings, self.lines[0].cells, strict=True)
        return [text + WIDE * (cell.column.wide and bool(cell.range)) for text, cell in cells]

    @property
    def units(self) -> list[str]:
        """The same with the units of the numbers below them."""
        cells = zip(self.marked, self.lines[0].cells, strict=True)
        return [f"{text} %" if cell.column.percent else text for text, cell in cells]


def comparison_block(comparison: Comparison, columns: Sequence[Column]) -> Block:
    """One line per recipe, one column per metric; the best of each column is marked."""
    grid = zip(*(metric_cells(comparison, column) for column in columns), strict=True)
    lines = (
        Line(row.recipe, cells, fitted_text(row.reports), row.seconds)
        for row, cells in zip(comparison, grid, strict=True)
    )
    return Block("", "recipe", tuple(column.heading for column in columns), tuple(lines))


def paper_blocks(comparison: Comparison, columns: Sequence[Column]) -> list[Block]:
    """A block per metric: one line per method, alone and after clip; rows as in PAPER_RECIPES."""
    blocks = []
    for column in columns:
        cells = metric_cells(comparison, column)
        pairs = zip(PAPER_METHODS, zip(cells[::2], cells[1::2], strict=True), strict=True)
        lines = tuple(Line(label, pair) for label, pair in pairs)
        blocks.append(Block(column.heading, "method", ("base", "after clip"), lines))
    return blocks


def against_own_base(comparison: Comparison) -> Comparison:
    """The rows of PAPER_RECIPES, each one after clip compared with the same method without."""
    against = tuple(index - 1 if index % 2 else None for index in range(len(comparison)))
    baseline = "the same method without clip"
    settings = {**comparison.settings, "baseline": baseline, "methods": dict(PAPER_METHODS)}
    return replace(comparison, against=against, settings=settings)


def metric_cells(comparison: Comparison, column: Column) -> list[Cell]:
    """One metric of every row, the best of them marked."""
    name = column.name
    found = [
        Cell(
            column,
            row.scores.metrics[name],
            row.scores.interval(name),
            difference,
            few_wrong=row.scores.few_wrong,
        )
        for row, difference in zip(comparison, comparison.differences(name), strict=True)
    ]
    if column.better == 0 or len(found) < 2:
        return found
    best = max(found, key=lambda cell: column.merit(cell.value)).number
    # Equal as printed is equal to the reader: both are marked.
    return [replace(cell, best=cell.number == best != "n/a") for cell in found]


# A comparison as text: Markdown for a pull request, LaTeX for a paper, CSV for a spreadsheet.

ARROWS = {"down": "↓", "up": "↑"}
CSV_HEADER = (
    *("recipe", "metric", "value", "low", "high"),
    *("baseline", "delta", "delta_low", "delta_high", "verdict", "n"),
)


def finding_text(cell: Cell, arrows: Mapping[str, str] = ARROWS) -> str:
    """↓ better, ↑ worse, ... or nothing where the difference may be chance."""
    if cell.finding is None:
        return ""
    direction, word = cell.finding
    return f"{arrows[direction]} {word}"


def markdown(
    comparison: Comparison,
    blocks: Sequence[Block] | None = None,
    arrows: Mapping[str, str] = ARROWS,
) -> str:
    """Tables of Markdown and below them how the numbers came about.

    Args:
        comparison: the rows.
        blocks: their layout; without one, one line per recipe and the usual metrics.
        arrows: the marks for "down" and "up".
    """
    parts = []
    for table in text_tables(comparison, blocks, arrows):
        title = f"**{table.title}**\n\n" if table.title else ""
        parts.append(title + table.markdown(gap=" "))
    told = "\n".join(f"- {note}" for note in notes(comparison, blocks))
    return inert("\n\n".join([*parts, told])) + "\n"


def html(comparison: Comparison, blocks: Sequence[Block] | None = None) -> str:
    """The same as HTML, for notebooks."""
    tables = text_tables(comparison, blocks)
    told = " ".join(notes(comparison, blocks))
    return "".join(
        html_table(
            table.headings, table.rows, above=table.title, below=told if table is tables[-1] else ""
        )
        for table in tables
    )


def text_tables(
    comparison: Comparison,
    blocks: Sequence[Block] | None = None,
    arrows: Mapping[str, str] = ARROWS,
) -> list[Table]:
    """The blocks of a comparison as text, with **bold** and `code` in it."""

    def text(cell: Cell) -> str:
        number = f"**{cell.number}**" if cell.best else cell.number
        return " ".join(filter(None, [number, cell.range, finding_text(cell, arrows)]))

    found = []
    for block in blocks or [comparison_block(comparison, columns(comparison.metrics or USUAL))]:
        fitted = any(line.fitted for line in block.lines)
        heads = (block.labels, *block.units, *(["fitted"] if fitted else []))
        rows = tuple(
            (
                line.label if block.title else f"`{line.label}`",
                *map(text, line.cells),
                *([line.fitted] if fitted else []),
            )
            for line in block.lines
        )
        found.append(Table(block.title, heads, rows))
    return found


def latex(comparison: Comparison, blocks: Sequence[Block] | None = None) -> str:
    r"""A tabular per block, for a document with \usepackage{booktabs}; the notes are comments."""

    def text(cell: Cell) -> str:
        number = f"\\textbf{{{cell.number}}}" if cell.best else cell.number
        arrows = {"down": "$\\downarrow$", "up": "$\\uparrow$"}
        small = " ".join(filter(None, [escaped(cell.range), finding_text(cell, arrows)]))
        return f"{number} {{\\scriptsize {small}}}" if small else number

    parts = []
    for block in blocks or [comparison_block(comparison, columns(comparison.metrics or USUAL))]:
        width = 1 + len(block.headings)
        rows = [f"\\begin{{tabular}}{{{'l'.ljust(width, 'r')}}}", "\\toprule"]
        if block.title:
            title = f"\\multicolumn{{{width}}}{{l}}{{{escaped(block.title)}}}"
            rows += [f"{title} \\\\", "\\midrule"]
        rows += [" & ".join(map(escaped, [block.labels, *block.units])) + " \\\\", "\\midrule"]
        for line in block.lines:
            label = escaped(line.label) if block.title else f"\\texttt{{{escaped(line.label)}}}"
            rows.append(" & ".join([label, *map(text, line.cells)]) + " \\\\")
        parts.append("\n".join([*rows, "\\bottomrule", "\\end{tabular}"]) + "\n")
    comments = "".join(f"% {note}\n" for note in notes(comparison, blocks))
    return "% needs \\usepackage{booktabs}\n" + comments + "\n".join(parts)


_LATEX = {
    **{mark: f"\\{mark}" for mark in "&%$#_{}"},
    **{"\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}"},
    **{"|": "\\textbar{}", "<": "\\textless{}", ">": "\\textgreater{}", '"': "\\textquotedbl{}"},
    **{"'": "\\textquotesingle{}", FEW: "$\\dagger$", WIDE: "$\\ddagger$"},
}


def escaped(text: str) -> str:
    r"""Text that LaTeX prints as it is.

    >>> print(escaped("clip(min_accuracy=0.99) | temperature"))
    clip(min\_accuracy=0.99) \textbar{} temperature
    """
    return "".join(_LATEX.get(mark, mark) for mark in text)


def as_csv(comparison: Comparison, shown: Sequence[Column] = tuple(COLUMNS.values())) -> str:
    """One line for every recipe and metric, fractions in full precision; empty where unknown."""
    text = io.StringIO()
    write = csv.writer(text, lineterminator="\n")
    write.writerow(CSV_HEADER)
    for index, row in enumerate(comparison):
        for column in shown:
            interval = row.scores.interval(column.name)
            values: list[Any] = [row.scores.metrics[column.name], interval.low, interval.high]
            found = comparison.difference(index, column.name)
            more: list[Any] = [""] * 5
            if found is not None:
                ends = found.interval.low, found.interval.high
                more = [found.baseline, found.delta, *ends, found.verdict or ""]
            # Only NaN differs from itself.
            known = ("" if value != value else value for value in [*values, *more])
            write.writerow([row.recipe, column.name, *known, row.scores.n])
    return text.getvalue()


def answers_text(scores: Scores) -> str:
    """What the rows are where samples have several labels."""
    return (
        f"the answers, yes or no, about {len(scores.labels)} labels of {scores.samples:,} samples"
    )


def notes(comparison: Comparison, blocks: Sequence[Block] | None = None) -> list[str]:
    """How the numbers came about, in two or three sentences, and what the signs in blocks mean."""
    settings, n = comparison.settings, comparison[0].scores.n if len(comparison) else 0
    where = f"{settings['pack']}: " if settings.get("pack") else ""
    way = "jointly" if settings.get("mode") == "joint" else "step by step"
    fit, test = settings.get("fit_split"), settings.get("test_split")
    if settings.get("folds"):
        of = f" of {fit}" if fit else ""
        text = f"cross-fitted {way} in {settings['folds']} folds, scored on all {n:,} rows{of}"
    else:
        text = f"fitted {way}{f' on {fit}' if fit else ''}, scored on {n:,} rows"
        text += f" of {test}" if test else ""
    if len(comparison) and comparison[0].scores.labels:
        text += f": {answers_text(comparison[0].scores)}; JSON has each label and their mean"
    found = [f"{where}{text}."]
    if settings.get("methods"):
        names = (f"{name} is {recipe}" for name, recipe in settings["methods"].items())
        found.append(f"{', '.join(names)}.")
    if not settings.get("resamples") or n < 2:
        return found
    drawn = settings.get("drawn", {})
    groups, samples = drawn.get("groups"), drawn.get("samples")
    of = f"{samples:,} samples with all their rows" if samples else "these rows"
    of = f"{groups:,} groups of {of}" if groups else of
    found.append(
        f"In brackets: 95 % intervals from {settings['resamples']:,} resamples of {of} "
        f"(seed {settings['seed']}); the fits stay as they are."
    )
    if any(row.scores.few_wrong for row in comparison):
        found.append(
            f"{FEW} Fewer than {FEW_WRONG} rows are wrong: what errors that were not seen "
            "would cost is a guess, and so is the length of the interval."
        )
    shown = blocks or [comparison_block(comparison, columns(comparison.metrics or USUAL))]
    if any(WIDE in heading for block in shown for heading in block.marked):
        found.append(
            f"{WIDE} Rather too long than too short: simulated ones hold the truth in over 95 %."
        )
    if any(other is not None for other in comparison.against):
        found.append(
            f"Better, worse: the paired difference from {settings['baseline']} excludes 0, by "
            "Holm's correction for all recipes of a column, and shows in its digits; no word: "
            "undecided."
        )
    return found
