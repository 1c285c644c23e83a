"""A comparison as text: Markdown for a pull request, LaTeX for a paper, CSV for a spreadsheet."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

from featcal.core.fit import FitReport, StepReport
from featcal.report.scores import COLUMNS, UNKNOWN, Column, Difference, Interval, columns

if TYPE_CHECKING:
    from featcal.report.compare import Comparison

# --- The fitted values in a few characters: c = 2.26, T = 1.14, or over folds T = 1.14 to 1.16.

SYMBOLS = {
    **{"threshold": "c", "temperature": "T", "proximity": "mean proximity"},
    **{"ridge": "penalty", "off_diagonal": "penalty", "bias": "penalty"},
}
# What a step was held back by: the first that it names is shown, after what it learned.
PENALTIES = ("ridge", "off_diagonal", "bias")
ENDS = {"lowest": ("values", "highest")}  # and X_min with X_max: the two ends of one range
SHOWN = 4  # values of a step; JSON has them all
BETWEEN = ", "  # steps
WITHIN = "; "  # the values of a step


def fitted_text(reports: Sequence[FitReport]) -> str:
    """What one fit, or the fits of the same recipe on several folds, chose."""
    steps = zip(*(report.steps for report in reports), strict=True)
    return BETWEEN.join(filter(None, map(_over_folds, steps)))


def step_text(step: StepReport) -> str:
    """What one step chose."""
    return _over_folds([step])


def _over_folds(steps: Sequence[StepReport]) -> str:
    acting = [step for step in steps if not step.noop]
    idle = f"{steps[0].name}: no-op"
    if not acting:
        return idle
    found = _found(acting)
    told = [f"{name} {text}" for name, text in _named(found) if text]
    text = WITHIN.join([*told[:SHOWN], *(["..."] if len(told) > SHOWN else [])])
    if len(acting) < len(steps):
        return f"{text} ({idle} in {len(steps) - len(acting)} of {len(steps)} folds)".lstrip()
    return text


def _found(acting: Sequence[StepReport]) -> dict[str, list[float]]:
    """The numbers under each key, over all folds that have it; one penalty, and that last."""
    keys = list(dict.fromkeys(key for step in acting for key in step.values))
    learned = [key for key in keys if key not in PENALTIES]
    held = [key for key in PENALTIES if key in keys][:1]
    return {
        key: list(_numbers(step.values[key] for step in acting if key in step.values))
        for key in [*learned, *held]
    }


def _named(found: dict[str, list[float]]) -> Iterator[tuple[str, str]]:
    """Names and texts; two ends of a range, as T_min and T_max, are one: T 1.35 to 2.18."""
    left = dict(found)
    for key in found:
        if key not in left:
            continue
        numbers, stem = left.pop(key), key.removesuffix("_min")
        name, other = ENDS.get(key, (stem, f"{stem}_max" if stem != key else ""))
        if other in left:
            yield name, _text(numbers + left.pop(other), ends=True)
        else:
            yield SYMBOLS.get(key, key), _text(numbers)


def _text(numbers: Sequence[float], *, ends: bool = False) -> str:
    if not numbers:
        return ""
    low, high = f"{min(numbers):.4g}", f"{max(numbers):.4g}"
    if low == high:
        return f"= {low}"
    return f"{low} to {high}" if ends else f"= {low} to {high}"


def folded(text: str, width: int) -> str:
    """The text in lines no wider than `width` where that can be: broken between values alone."""
    lines: list[str] = []
    for part in re.split("(?<=[;,]) ", text):
        if lines and len(lines[-1]) + 1 + len(part) <= width:
            lines[-1] += f" {part}"
        else:
            lines.append(part)
    return "\n".join(lines)


def _numbers(values: Iterable[Any]) -> Iterator[float]:
    """Every number in values, which may be lists of numbers; words and switches are no numbers."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _numbers(value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield float(value)


# --- The cells of a comparison, laid out: one line a recipe, or the paper's two columns a metric.
#
# A block knows what stands where and nothing of how it is drawn; `render.py` writes it as text for
# files, the command line as a table for the terminal.

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


ARROWS = {"down": "↓", "up": "↑"}
CSV_HEADER = (
    *("recipe", "metric", "value", "low", "high"),
    *("baseline", "delta", "delta_low", "delta_high", "verdict", "n"),
)


def markdown(
    comparison: Comparison,
    blocks: Sequence[Block] | None = None,
    arrows: Mapping[str, str] = ARROWS,
) -> str:
    """Tables of Markdown and below them how the numbers came about.

    Args:
        comparison: the rows.
        blocks: their layout; without one, one line a recipe and the usual metrics.
        arrows: the marks for "down" and "up".
    """
    if blocks is None:
        blocks = [comparison_block(comparison, columns())]
    parts = [_markdown_block(block, arrows) for block in blocks]
    return "\n\n".join([*parts, "\n".join(f"- {note}" for note in notes(comparison))]) + "\n"


def _markdown_block(block: Block, arrows: Mapping[str, str]) -> str:
    fitted = any(line.fitted for line in block.lines)
    heads = [block.labels, *_headings(block), *(["fitted"] if fitted else [])]
    rule = ["---", *("---:" for _ in block.headings), *(["---"] if fitted else [])]
    rows = []
    for line in block.lines:
        cells = [_markdown_cell(cell, arrows) for cell in line.cells]
        label = line.label if block.title else _code(line.label)
        rows.append([label, *cells, *([line.fitted] if fitted else [])])
    lines = ["| " + " | ".join(row) + " |" for row in [heads, rule, *rows]]
    return "\n".join([f"**{block.title}**\n", *lines] if block.title else lines)


def _code(text: str) -> str:
    """A label as code; a bar inside would end the cell even there."""
    return "`" + text.replace("|", "\\|") + "`"


def _markdown_cell(cell: Cell, arrows: Mapping[str, str]) -> str:
    number = f"**{cell.number}**" if cell.best else cell.number
    return " ".join(filter(None, [number, cell.range, finding_text(cell, arrows)]))


def finding_text(cell: Cell, arrows: Mapping[str, str] = ARROWS) -> str:
    """↓ better, ↑ worse, ... or nothing where the difference may be chance."""
    if cell.finding is None:
        return ""
    direction, word = cell.finding
    return f"{arrows[direction]} {word}"


def _headings(block: Block) -> list[str]:
    """The headings with the units of the numbers below them."""
    first = block.lines[0].cells
    if block.title:
        unit = " %" if first[0].column.percent else ""
        return [heading + unit for heading in block.headings]
    return [cell.column.unit for cell in first]


def latex(comparison: Comparison, blocks: Sequence[Block] | None = None) -> str:
    r"""A tabular a block, for a document with \usepackage{booktabs}; the notes are comments."""
    if blocks is None:
        blocks = [comparison_block(comparison, columns())]
    head = "% needs \\usepackage{booktabs}\n"
    comments = "".join(f"% {note}\n" for note in notes(comparison))
    return head + comments + "\n".join(map(_latex_block, blocks))


def _latex_block(block: Block) -> str:
    heads = [block.labels, *_headings(block)]
    lines = [f"\\begin{{tabular}}{{l{'r' * len(block.headings)}}}", "\\toprule"]
    if block.title:
        lines += [f"\\multicolumn{{{len(heads)}}}{{l}}{{{escaped(block.title)}}} \\\\", "\\midrule"]
    lines += [" & ".join(map(escaped, heads)) + " \\\\", "\\midrule"]
    for line in block.lines:
        label = escaped(line.label) if block.title else f"\\texttt{{{escaped(line.label)}}}"
        lines.append(" & ".join([label, *map(_latex_cell, line.cells)]) + " \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}"]) + "\n"


def _latex_cell(cell: Cell) -> str:
    number = f"\\textbf{{{cell.number}}}" if cell.best else cell.number
    arrows = {"down": "$\\downarrow$", "up": "$\\uparrow$"}
    small = " ".join(filter(None, [cell.range, finding_text(cell, arrows)]))
    return f"{number} {{\\scriptsize {small}}}" if small else number


_LATEX = {
    **{mark: f"\\{mark}" for mark in "&%$#_{}"},
    **{"\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}"},
    **{"|": "\\textbar{}", "<": "\\textless{}", ">": "\\textgreater{}", '"': "\\textquotedbl{}"},
    "'": "\\textquotesingle{}",
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
            found = comparison.difference(index, column.name)
            interval = row.scores.interval(column.name)
            values: list[Any] = [row.scores.metrics[column.name], interval.low, interval.high]
            more: list[Any] = [""] * 5
            if found is not None:
                ends = found.interval.low, found.interval.high
                more = [found.baseline, found.delta, *ends, found.verdict or ""]
            cells = [row.recipe, column.name, *values, *more, row.scores.n]
            write.writerow("" if _unknown(cell) else cell for cell in cells)
    return text.getvalue()


def _unknown(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)


def notes(comparison: Comparison, *, intervals: bool = True, findings: bool = True) -> list[str]:
    """How the numbers came about, in two or three sentences.

    Args:
        comparison: the rows.
        intervals: whether they are shown, and so have to be explained.
        findings: whether they are.
    """
    settings, n = comparison.settings, comparison[0].scores.n if len(comparison) else 0
    found = [_how(settings, n)]
    if settings.get("methods"):
        names = (f"{name} is {recipe}" for name, recipe in settings["methods"].items())
        found.append(f"{', '.join(names)}.")
    if not settings.get("resamples") or n < 2:
        return found
    if intervals:
        found.append(
            f"In brackets: 95 % intervals from {settings['resamples']:,} resamples of these rows "
            f"(seed {settings['seed']}); the fits stay as they are."
        )
    if findings and any(other is not None for other in comparison.against):
        found.append(
            f"Better, worse: the paired difference from {settings['baseline']} excludes 0; no "
            "word: undecided."
        )
    return found


def _how(settings: dict[str, Any], n: int) -> str:
    where = f"{settings['pack']}: " if settings.get("pack") else ""
    way = "jointly" if settings.get("mode") == "joint" else "step by step"
    fit, test = settings.get("fit_split"), settings.get("test_split")
    if settings.get("folds"):
        of = f" of {fit}" if fit else ""
        text = f"cross-fitted {way} in {settings['folds']} folds, scored on all {n:,} rows{of}"
    else:
        text = f"fitted {way}{f' on {fit}' if fit else ''}, scored on {n:,} rows"
        text += f" of {test}" if test else ""
    return f"{where}{text}."
