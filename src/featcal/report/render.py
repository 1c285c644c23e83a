"""A comparison as text: Markdown for a pull request, LaTeX for a paper, CSV for a spreadsheet."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from featcal.report.blocks import Block, Cell, comparison_block
from featcal.report.columns import COLUMNS, Column, columns

if TYPE_CHECKING:
    from featcal.report.rows import Comparison

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
