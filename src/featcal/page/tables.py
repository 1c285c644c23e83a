"""The tables of the page as plain cells, written as HTML by the template."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import final

from featcal.analysis import ChangedPredictions, GroupCalibration
from featcal.page.contest import contest
from featcal.page.entries import Entry
from featcal.page.phrases import in_words
from featcal.report.columns import Column, columns
from featcal.report.comparison import NONE
from featcal.report.intervals import Interval
from featcal.report.rows import Comparison

SHOWN = ("accuracy", "overconfidence", "ece", "adaptive_ece", "nll", "brier")
SHORT = {"overconfidence": "gap %"}
WORST = 20  # classes
TOLD = 12  # changed predictions


@final
@dataclass(frozen=True)
class Head:
    """The top of a column: its text, what it means, whether numbers stand below it."""

    text: str
    hint: str = ""
    numeric: bool = True


@final
@dataclass(frozen=True)
class Cell:
    """A cell.

    Attributes:
        text: what it says.
        value: what it is sorted by; None to sort by the text.
        small: a second line, such as an interval.
        mark: "best", "better" or "worse", said in words as well.
        code: whether the text is to be typed.
    """

    text: str
    value: float | None = None
    small: str = ""
    mark: str = ""
    code: bool = False


@final
@dataclass(frozen=True)
class Table:
    """A table with a name for programs, a caption, and rows whose first cell is their name."""

    name: str
    caption: str
    heads: tuple[Head, ...]
    rows: tuple[tuple[Cell, ...], ...]


RECIPE = Head("recipe", "what was fitted", numeric=False)
MEANING = {
    "accuracy": "share of right answers; higher is better",
    "overconfidence": "mean confidence minus accuracy; nearer to 0 is better, and sorted so",
    "ece": "mean gap between confidence and accuracy, in bins of equal width; lower is better",
    "adaptive_ece": "the same in bins with equally many rows; lower is better",
    "nll": "how unlikely the truth was by the model: minus the logarithm of the probability it "
    "gave to the true class, on average; lower is better",
    "brier": "squared distance of the probabilities from the truth; lower is better",
}


def _by_recipe(
    name: str, caption: str, heads: Iterable[tuple[str, str]], rows: Iterable[tuple[Cell, ...]]
) -> Table:
    """A table with a row a recipe; the heads are those of its numbers, with what they mean."""
    return Table(name, caption, (RECIPE, *(Head(*head) for head in heads)), tuple(rows))


def comparison_table(comparison: Comparison, seen: Sequence[int] = ()) -> Table:
    """One row a recipe; the best of a column is marked where no other may be as good.

    Args:
        comparison: the rows.
        seen: places of those that were fitted on the scored rows: they are not judged.
    """
    shown = columns(SHOWN)
    heads = [(SHORT.get(column.name, column.unit), MEANING[column.name]) for column in shown]
    fair = tuple(place for place in range(len(comparison)) if place not in seen)
    winners = {column.name: _winners(comparison, column, fair) for column in shown}
    rows = []
    for index, row in enumerate(comparison):
        cells = [_metric(comparison, index, column, winners[column.name]) for column in shown]
        name = _recipe(row.recipe)
        if index in seen:
            name = replace(name, small=f"{name.small}, fitted on these very rows")
            cells = [replace(cell, mark="") for cell in cells]
        rows.append((name, *cells))
    return _by_recipe("comparison", "All recipes on the same rows", heads, rows)


def _winners(comparison: Comparison, column: Column, fair: tuple[int, ...]) -> tuple[int, ...]:
    """Rows that are the best whatever rows are drawn; none where all are, or none is."""
    found = contest(comparison, column.name, fair)
    if found is None or not found.clear or len(found.alike) == len(fair):
        return ()
    return found.alike


def _metric(comparison: Comparison, index: int, column: Column, best: tuple[int, ...]) -> Cell:
    scores = comparison[index].scores
    value = scores.metrics[column.name]
    found = comparison.difference(index, column.name)
    judged = "" if found is None or found.verdict in (None, "undecided") else found.verdict
    mark = "best" if index in best else judged or ""
    size = value if column.better else abs(value)  # too modest is no better than too sure
    return Cell(
        column.number(value), _known(size), _ends(scores.interval(column.name), column), mark
    )


def _ends(found: Interval, column: Column) -> str:
    if math.isnan(found.low):
        return ""
    return f"[{column.number(found.low)}, {column.number(found.high)}]"


def _recipe(recipe: str) -> Cell:
    plain = "the model as it is" if recipe == NONE else in_words(recipe)
    return Cell(recipe, small="" if plain == recipe else plain, code=True)


def entropy_table(entries: Sequence[Entry]) -> Table:
    """The paper's table: mean entropy of confident wrong and right rows, before and after."""
    heads = (
        ("wrong before", "mean entropy of confident wrong answers, as the model is"),
        ("wrong after", "the same answers, calibrated"),
        ("right before", "mean entropy of confident right answers, as the model is"),
        ("right after", "the same answers, calibrated"),
        ("grew more by", "growth for wrong answers minus growth for right ones"),
    )
    rows = (entropy_row(entry) for entry in entries if entry.recipe != NONE)
    return _by_recipe("entropy", "Mean softmax entropy in nats", heads, rows)


def entropy_row(entry: Entry) -> tuple[Cell, ...]:
    """One recipe of the entropy table."""
    found = entry.entropy
    values = [float(side[group]) for group in (0, 1) for side in (found.before, found.after)]
    low, high = found.interval.low, found.interval.high
    span = "" if math.isnan(low) else f"[{low:+.4f}, {high:+.4f}]"
    gap = Cell(_number(found.gap, "+.4f"), _known(found.gap), span)
    return (_recipe(entry.recipe), *(Cell(_number(v, ".4f"), _known(v)) for v in values), gap)


def counts_table(entries: Sequence[Entry]) -> Table:
    """How many answers are confident, and how many of those are wrong."""
    levels = entries[0].counts.levels
    heads = [
        (f"> {100 * level:g} %", "share of wrong answers among those above this confidence")
        for level in levels
    ]
    rows = map(counts_row, entries)
    return _by_recipe("counts", "Wrong answers among confident ones", heads, rows)


def counts_row(entry: Entry) -> tuple[Cell, ...]:
    """One recipe of the table of counts."""
    cells = []
    for right, wrong in entry.counts.after.T.tolist():
        share = wrong / (right + wrong) if right + wrong else math.nan
        small = f"{wrong:,} of {right + wrong:,}"
        cells.append(
            Cell(f"{100 * share:.2f} %" if right + wrong else "none", _known(share), small)
        )
    return (_recipe(entry.recipe), *cells)


def changed_table(entries: Sequence[Entry]) -> Table:
    """How many predictions each recipe changed."""
    heads = (
        ("changed", "rows whose predicted class is another one"),
        ("became right", "wrong before, right after"),
        ("became wrong", "right before, wrong after"),
        ("wrong either way", "from one wrong class to another"),
        ("accuracy, points", "accuracy after minus accuracy before"),
    )
    rows = (changed_row(entry) for entry in entries if entry.recipe != NONE)
    return _by_recipe("changed", "Predictions that became others", heads, rows)


def changed_row(entry: Entry) -> tuple[Cell, ...]:
    """One recipe of the table of changes."""
    found = entry.changed
    kinds = (found.fixed, found.broken, found.other)
    counts = [len(found.rows), *(int(kind.sum()) for kind in kinds)]
    change = round(100 * found.accuracy_change, 2) + 0
    cells = [Cell(f"{count:,}", float(count)) for count in counts]
    return (_recipe(entry.recipe), *cells, Cell(f"{change:+.2f}", change))


def examples_table(found: ChangedPredictions, names: Sequence[str] | None) -> Table:
    """The changed rows the model was most sure of before."""
    heads = (
        Head("row", "its place in the scored split"),
        Head("truth", numeric=False),
        Head("before", numeric=False),
        Head("sure before"),
        Head("after", numeric=False),
        Head("sure after"),
    )
    told = found.numbers()["told"]
    rows = []
    for place in range(min(TOLD, len(told["rows"]))):
        label, before, after = (told[key][place] for key in ("labels", "before", "after"))
        sure = [told[key][place] for key in ("sure_before", "sure_after")]
        row = told["rows"][place]
        rows.append(
            (
                Cell(str(row), float(row)),
                _class(label, names),
                _class(before, names, "right" if before == label else ""),
                Cell(f"{100 * sure[0]:.1f} %", sure[0]),
                _class(after, names, "right" if after == label else ""),
                Cell(f"{100 * sure[1]:.1f} %", sure[1]),
            )
        )
    caption = f"{found.recipe}: the changed rows the model was most sure of"
    return Table("examples", caption, heads, tuple(rows))


def _class(index: int, names: Sequence[str] | None, small: str = "") -> Cell:
    return Cell(str(index) if names is None else names[index], small=small)


def classes_table(before: GroupCalibration, after: GroupCalibration) -> Table:
    """The worst classes of the model as it is, with the same classes after the recommendation."""
    after_head = Head("gap after", f"the same after {after.recipe}")
    heads = (
        Head("predicted class", numeric=False),
        Head("rows", "how often it is predicted"),
        Head("confidence %", "mean confidence of these predictions"),
        Head("accuracy %", "share of them that are right"),
        Head("gap", "confidence minus accuracy, points"),
        *((after_head,) if after.recipe != before.recipe else ()),
    )
    rows = [_class_row(before, after, group) for group in before.worst(WORST)]
    return Table("classes", "Calibration by predicted class", heads, tuple(rows))


def _class_row(before: GroupCalibration, after: GroupCalibration, group: int) -> tuple[Cell, ...]:
    count = int(before.count[group])
    shares = [float(values[group]) for values in (before.confidence, before.accuracy)]
    small = "few" if bool(before.few[group]) else ""
    cells = [
        Cell(before.names[group]),
        Cell(f"{count:,}", float(count), small),
        *(Cell(f"{100 * share:.1f}", share) for share in shares),
        _gap(before, group),
    ]
    if after.recipe != before.recipe:
        cells.append(_gap(after, group))
    return tuple(cells)


def _gap(found: GroupCalibration, group: int) -> Cell:
    gap = round(100 * float(found.overconfidence[group]), 1) + 0
    if math.isnan(gap):
        return Cell("none", small="no longer predicted")
    low, high = (round(100 * float(end), 1) + 0 for end in found.interval[group])
    return Cell(f"{gap:+.1f}", gap, f"[{low:+.1f}, {high:+.1f}]")


def _number(value: float, form: str) -> str:
    return "n/a" if math.isnan(value) else format(value, form)


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
