"""The page: one file with its style, its script, its numbers and Plotly, which loads nothing.

The content security policy in its head forbids every request, so that the promise is kept by the
browser too. With `live` it may talk to the server it came from, and to nobody else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from featcal.analysis import (
    ChangedPredictions,
    ClipSweep,
    ConfidentCounts,
    FeatureValues,
    GroupCalibration,
    UnitMeans,
)
from featcal.analysis.confident import FEW
from featcal.core.checks import InputError
from featcal.page.content import Content, Entry
from featcal.page.verdict import (
    Finding,
    about,
    capital,
    contest,
    entropy_findings,
    in_words,
    percent,
)
from featcal.report.compare import NONE, Comparison
from featcal.report.scores import Column, Interval, columns
from featcal.report.tables import notes
from featcal.version import __version__

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

# --- The tables of the page as plain cells, written as HTML by the template.

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


# --- One sentence under each figure: what it shows here, in numbers, whatever the paper says.

HALF, NEAR = 0.5, 0.1  # of values at 0 as a rectified normal of mean 0 has them, and how nearly


def units_words(found: UnitMeans) -> str:
    """Whether features are larger where the network is sure and wrong."""
    if math.isnan(found.higher):
        return "One of the groups has no rows, so their features cannot be compared."
    means = [float(group.mean()) for group in (found.hce, found.lce)]
    what = "mean absolute feature" if found.absolute else "mean feature"
    return (
        f"The {what} over all {len(found.hce):,} units is {means[0]:.4g} for confident wrong "
        f"answers and {means[1]:.4g} for confident right ones; {percent(found.higher)} of the "
        "units are larger where the answer is wrong."
    )


def values_words(found: FeatureValues) -> str:
    """How wide the two distributions are."""
    wrong, right = (fit.sigma for fit in found.fits)
    if math.isnan(wrong) or math.isnan(right):
        return "One of the groups has no rows, so their values cannot be compared."
    kind = "rectified normal of mean 0, as the paper's theory has it"
    if found.signed:
        kind = "normal of mean 0"
    told = (
        f"Fitted with a {kind}, the values have sigma (their spread) {wrong:.4g} where a confident "
        f"answer is wrong and {right:.4g} where it is right"
    )
    return f"{told}{_wider(found)}{_zeros(found)}"


def _wider(found: FeatureValues) -> str:
    """Whether the values of wrong answers are spread more, as far as these rows can tell."""
    low, high = found.interval.low, found.interval.high
    if math.isnan(low):
        return "; there are too few rows to tell whether that is more than chance."
    if max(abs(found.gap), abs(low), abs(high)) == 0:
        return ": there is no difference."
    digits = _digits((high - low) / 2)
    gap, low_text, high_text = (f"{end:+z.{digits}f}" for end in (found.gap, low, high))
    span = f". The difference is {gap} (95 % interval {low_text} to {high_text})"
    rough = " The smaller group has few rows, so the interval is rough."
    few = rough if min(found.groups.sizes) < FEW else ""
    if low <= 0 <= high:
        return f"{span}, which may be chance.{few}"
    if low > 0:
        return f"{span}: wider where it is wrong, as the paper reports of its networks.{few}"
    return (
        f"{span}: narrower where it is wrong, the opposite of what the paper reports of its "
        f"networks.{few}"
    )


def _digits(error: float) -> int:
    """Decimals that show two figures of an error."""
    return max(0, 1 - math.floor(math.log10(error))) if error > 0 else 4


def _zeros(found: FeatureValues) -> str:
    """Where the values are no rectified normals of mean 0, which have half of them at 0."""
    if found.signed or all(abs(share - HALF) <= NEAR for share in found.zeros):
        return ""
    wrong, right = (percent(share) for share in found.zeros)
    return (
        f" Of such a normal half the values would be 0; of these, {wrong} (wrong answers) and "
        f"{right} (right ones) are. It does not describe them, so read sigma as no more than the "
        "root mean square of the values above 0."
    )


def counts_words(found: ConfidentCounts, level: float = 0.95) -> str:
    """How many confident answers are wrong, before and after."""
    at = found.levels.index(level) if level in found.levels else len(found.levels) - 1
    (right, wrong), (right_after, wrong_after) = (
        [int(count) for count in counts[:, at]] for counts in (found.before, found.after)
    )
    told, tail = f"No answer is above {about(found.levels[at])} confidence", " of such are wrong"
    if right + wrong:
        told = f"Of the answers above {about(found.levels[at])} confidence, "
        told, tail = f"{told}{_share(wrong, right + wrong)} are wrong", ""
    if found.recipe == "none":
        return f"{told} as the model is."
    after = "no answer is that sure"
    if right_after + wrong_after:
        after = _share(wrong_after, right_after + wrong_after) + tail
    return f"{told} as the model is; with {in_words(found.recipe)}, {after}."


def _share(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,} ({percent(part / whole)})"


def changed_words(found: ChangedPredictions) -> str:
    """How many predictions became others, and how that went."""
    name = capital(in_words(found.recipe))
    if not len(found.rows):
        return f"{name} changes no predicted class."
    fixed, broken, other = (int(kind.sum()) for kind in (found.fixed, found.broken, found.other))
    return (
        f"{name} changes the predicted class of {len(found.rows):,} of {found.n:,} rows "
        f"({percent(len(found.rows) / found.n)}): {fixed:,} became right, {broken:,} became wrong, "
        f"{other:,} went from one wrong class to another."
    )


def classes_words(found: GroupCalibration) -> str:
    """For how many classes the interval excludes 0, and for how many it would by chance."""
    low, high = found.interval.T
    over, under = int((low > 0).sum()), int((high < 0).sum())
    filled = int((found.count > 0).sum())
    few = int((found.few & (found.count > 0)).sum())
    which = "All" if few == filled else f"{few:,} of the {filled:,}"
    some = f" {which} have fewer than 100 rows." if few else ""
    chance = 0.05 * filled
    expected = f"about {chance:.0f}" if chance >= 1 else "fewer than one"
    beside = f"; {expected} would be so by chance alone"
    if 0 < over + under <= chance:
        beside = f", no more than chance alone would give ({expected})"
    return (
        f"Predicted classes: {filled:,}. By the 95 % interval of each, the model as it is claims "
        f"too much in {over:,} and too little in {under:,}{beside}.{some}"
    )


def sweep_words(found: ClipSweep) -> str:
    """Where the optimum lies, and what it gives on the scored rows."""
    best, name = found.best, in_words(found.recipe)
    if math.isinf(float(found.thresholds[best])):
        return (
            f"No threshold on this grid lowers the loss of {name} on the rows it is fitted on: the "
            "best is not to clip."
        )
    c, last = float(found.thresholds[best]), len(found.thresholds) - 1
    before, after = (float(found.test.ece[place]) for place in (last, best))
    return (
        f"The loss of {name} on the rows it is fitted on is lowest at c = {c:.4g}; on the scored "
        f"rows ECE is then {percent(after)}, and {percent(before)} without clipping."
    )


# --- The report for a pull request: the summary in words, the comparison, the entropies.

MARKDOWN_MEANING = (
    "ECE, expected calibration error: how far confidence and the share of right answers lie apart, "
    "on average over levels of confidence. NLL, negative log-likelihood: how unlikely the model "
    "thought the truth was, on average. Brier score: how far its probabilities lie from the truth, "
    "squared, on average. All: lower is better."
)
BOLD = (
    "In bold: the best of its column, where no other may be as good by paired intervals; recipes "
    "that score the same on all rows share it. Gap: mean confidence minus accuracy."
)


def markdown(content: Content) -> str:
    """The text, without figures and without anything that needs a browser."""
    summary, entries = content.summary, content.entries
    parts = [f"## {summary.headline}", f"**Should you trust its confidence?** {summary.trust}"]
    parts += [f"**{point.question}** {point.answer}" for point in summary.points]
    if summary.command:
        parts.append(f"```\n{summary.command}\n```")
    parts += [f"> {caution}" for caution in (*summary.cautions, *content.notes)]
    compared = comparison_table(content.comparison, summary.seen)
    parts += [MARKDOWN_MEANING, _table(compared).rstrip()]
    learned = [f"`{entry.recipe}` {entry.fitted}" for entry in entries if entry.fitted]
    told = [f"What was learned: {'; '.join(learned)}."] if learned else []
    parts.append("\n".join(f"- {note}" for note in (*notes(content.comparison), BOLD, *told)))
    if len(entries) > 1:
        table = entropy_table(entries)
        level = content.scene.groups.confidence
        parts.append(f"### {table.caption}, of answers above {100 * level:g} % confidence")
        parts.append(_table(table).rstrip())
        growths = {entry.recipe: entry.entropy for entry in entries[1:]}
        parts += [f"**{one.lead}** {one.numbers}".rstrip() for one in entropy_findings(growths)]
    return "\n\n".join(parts) + "\n"


def _table(table: Table) -> str:
    """The table as Markdown; bars inside code would end a cell even there."""
    rule = ["---:" if head.numeric else "---" for head in table.heads]
    lines = [[head.text for head in table.heads], rule]
    lines += [[_cell(cell) for cell in row] for row in table.rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _cell(cell: Cell) -> str:
    text = cell.text.replace("|", "\\|")
    if cell.code:
        return f"`{text}`"
    if cell.mark == "best":
        return " ".join(filter(None, [f"**{text}**", cell.small]))
    return " ".join(filter(None, [text, cell.small, cell.mark]))


ASSETS = Path(__file__).parent / "assets"
SCRIPTS = ("charts.js", "explorer.js", "page.js")
# Inside a script element only these can end it, or start a comment; JSON has other spellings.
UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
KINDS = {
    "over": ("▲", "Too sure"),
    "under": ("▼", "Too modest"),
    "calibrated": ("●", "Well calibrated"),
    "mixed": ("◆", "Off in places"),
    "unclear": ("?", "Too few rows"),
}


def render(content: Content, *, live: bool = False) -> str:
    """The whole page as text.

    Args:
        content: what it shows.
        live: with a box for further recipes, which the page sends to `recipe` on its own server.

    Raises:
        InputError: when jinja2 or plotly is missing.
    """
    template = _environment().get_template("page.html")
    page = template.render(
        content=content,
        live=live,
        title=_title(content),
        kind=KINDS[content.summary.kind],
        gauge=_gauge(content),
        tables=page_tables(content),
        words=page_words(content),
        findings=page_findings(content),
        predicted=int((content.classes[0].count > 0).sum()),
        version=__version__,
        css=_asset("page.css"),
        scripts=[_asset(name) for name in SCRIPTS],
        plotly=_plotly(),
        data=embedded(
            {**content.as_json(), "sentences": page_words(content), "shown": content.pick}
        ),
    )
    # Half a character, as odd bytes in a path give, is spelled out as JSON spells it.
    return page.encode("utf-8", "backslashreplace").decode("utf-8")


def embedded(value: dict[str, Any]) -> Markup:
    r"""JSON that can stand inside a script element whatever its strings hold.

    >>> str(embedded({"name": "</script>"}))
    '{"name":"\\u003c/script\\u003e"}'
    """
    from markupsafe import Markup

    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    for mark, spelling in UNSAFE.items():
        text = text.replace(mark, spelling)
    return Markup(text)


def rows_html(rows: Mapping[str, Sequence[Cell]]) -> dict[str, str]:
    """Rows of tables as the template writes them, by the name of the table."""
    row = _environment().get_template("html").module.row  # type: ignore[attr-defined]
    return {name: str(row(cells)) for name, cells in rows.items()}


def page_tables(content: Content) -> dict[str, Table]:
    """The tables by their names."""
    entries = content.entries
    found = {
        "comparison": comparison_table(content.comparison, content.summary.seen),
        "counts": counts_table(entries),
        "entropy": entropy_table(entries),
        "changed": changed_table(entries),
        "classes": classes_table(*content.classes),
    }
    most = _most_changed(content)
    if len(most.changed.rows):
        found["examples"] = examples_table(most.changed, content.scene.class_names)
    return found


def page_findings(content: Content) -> list[Finding]:
    """Whom each clip makes less certain."""
    return entropy_findings({one.recipe: one.entropy for one in content.entries[1:]})


def page_words(content: Content) -> dict[str, list[str]]:
    """The sentences under the figures, by section."""
    others = content.entries[1:]
    return {
        "entropy": list(map(str, page_findings(content))),
        "counts": [counts_words(content.entries[content.pick].counts)],
        "changed": [_changed_words(content)] if others else [],
        "classes": [classes_words(content.classes[0])],
        "units": [] if content.units is None else [units_words(content.units)],
        "values": [] if content.values is None else [values_words(content.values)],
        "sweeps": [sweep_words(sweep) for sweep in _curves(content.sweeps)],
    }


def _curves(sweeps: Sequence[ClipSweep]) -> list[ClipSweep]:
    """Each curve once: recipes that differ in the arguments of their clip share one."""
    return [
        one
        for place, one in enumerate(sweeps)
        if all(one.val is not other.val for other in sweeps[:place])
    ]


def _changed_words(content: Content) -> str:
    most = _most_changed(content).changed
    return changed_words(most) if len(most.rows) else "No recipe changes an answer."


def _most_changed(content: Content) -> Entry:
    return max(content.entries, key=lambda entry: len(entry.changed.rows))


def _gauge(content: Content) -> list[dict[str, Any]]:
    """What the model says and what it achieves, as it is and after the recommendation."""
    places = [0] if content.summary.pick is None else [0, content.summary.pick]
    rows = [content.comparison[place] for place in places]
    return [
        {
            "name": f"With {in_words(row.recipe)}" if place else "As it is, on average",
            "said": 100 * row.scores.metrics["confidence"],
            "right": 100 * row.scores.metrics["accuracy"],
        }
        for place, row in enumerate(rows)
    ]


def _title(content: Content) -> str:
    pack = content.about["pack"]
    return ", ".join(part for part in (pack["dataset"], pack["model"]) if part) or pack["name"]


def _environment() -> Environment:
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError as error:
        raise _missing("jinja2") from error
    made = Environment(
        autoescape=True,
        loader=FileSystemLoader(ASSETS),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(about=about, tidy=_tidy)
    return made


def _tidy(text: str) -> str:
    """A number and its percent sign stay on one line."""
    return text.replace(" %", "\u00a0%")


def check_packages() -> None:
    """Refuses to begin where a package is missing, before minutes of work.

    Raises:
        InputError: naming it.
    """
    _environment()
    _plotly()


def _asset(name: str) -> Markup:
    from markupsafe import Markup

    return Markup((ASSETS / name).read_text(encoding="utf-8"))


@cache
def _plotly() -> Markup:
    """Plotly's own script, five million characters of it."""
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
    except ImportError as error:
        raise _missing("plotly") from error
    from markupsafe import Markup

    return Markup(get_plotlyjs())


def _missing(package: str) -> InputError:
    return InputError(
        f"a report needs {package}, which is not installed: pip install 'featcal[report]'"
    )
