"""The page: one file with its style, its script, its numbers and Plotly, which loads nothing.

The content security policy in its head forbids every request, so that the promise is kept by the
browser too. With `live` it may talk to the server it came from, and to nobody else. The Markdown
report is the same words and tables without figures.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, final

from featcal.analysis import ChangedPredictions, ClipSweep, GroupCalibration
from featcal.core.text import NONE
from featcal.metrics.columns import columns
from featcal.page.content import Content, Entry, Scene
from featcal.page.verdict import Certainty, contest
from featcal.page.wording import ASSETS, environment, missing, named, percent, say, words
from featcal.report.compare import Comparison
from featcal.report.tables import WIDE, comparison_block, inert, metric_cells, notes
from featcal.report.tables import Table as TextTable
from featcal.version import __version__

if TYPE_CHECKING:
    from markupsafe import Markup

SCRIPTS = ("charts.js", "explorer.js", "page.js")
# Inside a script element only these can end it, or start a comment; JSON has other spellings.
UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def render(content: Content, *, live: bool = False) -> str:
    """The whole page as text.

    Args:
        content: what it shows.
        live: with a box for further recipes, which the page sends to `recipe` on its own server.

    Raises:
        InputError: when jinja2 or plotly is missing.
    """
    pack, sentences = content.about["pack"], page_words(content)
    title = ", ".join(part for part in (pack["dataset"], pack["model"]) if part) or pack["name"]
    template = environment().get_template("page.html")
    page = template.render(
        content=content,
        live=live,
        title=title,
        tables=page_tables(content),
        words=sentences,
        findings=_findings(content),
        meanings=words().meanings,
        predicted=int((content.classes[0].count > 0).sum()),
        version=__version__,
        css=_asset("page.css"),
        scripts=[_asset(name) for name in SCRIPTS],
        plotly=_plotly(),
        data=embedded({**content.as_json(), "sentences": sentences, "shown": content.pick}),
    )
    # Half a character, as odd bytes in a path give, is spelled out as JSON spells it.
    return page.encode("utf-8", "backslashreplace").decode("utf-8")


def markdown(content: Content) -> str:
    """The report for a pull request: the summary, the comparison, the entropies."""
    template, tables = environment().get_template("report.md"), page_tables(content)
    shown = comparison_block(content.comparison, columns(SHOWN))
    first, *heads = tables["comparison"].heads
    signed = (
        replace(head, text=head.text + WIDE * (WIDE in marked))
        for head, marked in zip(heads, shown.marked, strict=True)
    )
    tables["comparison"] = replace(tables["comparison"], heads=(first, *signed))
    text = template.render(
        content=content,
        summary=content.summary,
        tables=tables,
        findings=_findings(content),
        meanings=words().meanings,
        notes=notes(content.comparison, [shown]),
        fits=[entry for entry in content.entries if entry.fitted],
        markdown_table=_markdown_table,
    )
    return inert(text)


def check_packages() -> None:
    """Refuses to begin where a package is missing, before minutes of work.

    Raises:
        InputError: naming it.
    """
    environment()
    _plotly()


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


def _asset(name: str) -> Markup:
    from markupsafe import Markup

    return Markup((ASSETS / name).read_text(encoding="utf-8"))


@cache
def _plotly() -> Markup:
    """Plotly's own script, packed: the five million characters are most of a page."""
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
    except ImportError as error:
        raise missing("plotly") from error
    from markupsafe import Markup

    packed = gzip.compress(get_plotlyjs().encode(), mtime=0)
    return Markup(base64.b64encode(packed).decode())


def page_words(content: Content) -> dict[str, list[str]]:
    """The sentences under the figures, by section."""
    curves: dict[int, ClipSweep] = {}  # recipes that differ in arguments of the clip share one
    for sweep in content.sweeps:
        curves.setdefault(id(sweep.val), sweep)
    shown = _shown_changes(content)
    told = say("changed", shown) if len(shown.rows) else "No recipe changes an answer."
    return {
        "entropy": [" ".join(filter(None, one)) for one in _findings(content)],
        "counts": [say("counts", content.entries[content.pick].counts)],
        "changed": [told] if content.entries[1:] else [],
        "classes": [say("classes", content.classes[0])],
        "units": [] if content.units is None else [say("units", content.units)],
        "values": [] if content.values is None else [say("values", content.values)],
        "sweeps": [say("sweep", sweep) for sweep in curves.values()],
    }


def _findings(content: Content) -> list[tuple[str, str]]:
    """Whom each clip makes less certain: a short sentence, and the numbers behind it."""
    growths = {entry.recipe: entry.entropy for entry in content.entries[1:]}
    found = Certainty.of_all(growths)
    return [(say("certainty", one), say("certainty_numbers", one)) for one in found]


def _shown_changes(content: Content) -> ChangedPredictions:
    """The answers that what is recommended changes; if none, those of whatever changes the most."""
    pick = content.entries[content.pick].changed
    every = [entry.changed for entry in content.entries]
    return pick if len(pick.rows) else max(every, key=lambda one: len(one.rows))


SHOWN = ("accuracy", "overconfidence", "ece", "adaptive_ece", "nll", "brier")
WORST = 20  # classes
TOLD = 12  # changed predictions


@final
@dataclass(frozen=True)
class Head:
    """The top of a column: its text, what it means, and whether numbers stand below it."""

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
        finding: "better" or "worse", also where the mark is "best".
        code: whether the text is to be typed.
    """

    text: str
    value: float | None = None
    small: str = ""
    mark: str = ""
    finding: str = ""
    code: bool = False


Cells = tuple[Cell, ...]


@final
@dataclass(frozen=True)
class Table:
    """A table with a name for programs, a caption, and rows whose first cell is their name."""

    name: str
    caption: str
    heads: tuple[Head, ...]
    rows: tuple[Cells, ...]

    @classmethod
    def of(cls, name: str, rows: Iterable[Cells]) -> Table:
        """The rows under the caption and the columns that `words.txt` has for them."""
        caption, heads = words().tables[name]
        return cls(name, caption, tuple(Head(*head) for head in heads), tuple(rows))


def page_tables(content: Content) -> dict[str, Table]:
    """The tables by their names."""
    entries, changes = content.entries, _shown_changes(content)
    found = [
        comparison_table(content.comparison, content.summary.seen),
        recipe_table("counts", entries),
        recipe_table("entropy", entries[1:]),
        recipe_table("changed", entries[1:]),
        classes_table(*content.classes),
    ]
    found += choice_table(content)
    if len(changes.rows):
        found.append(examples_table(changes, content.scene))
    return {table.name: table for table in found}


def comparison_table(comparison: Comparison, seen: Sequence[int] = ()) -> Table:
    """One row per recipe; the best of a column is marked where no other may be as good.

    Args:
        comparison: the rows.
        seen: places of those that were fitted on the scored rows: they are not judged.
    """
    fair = [place for place in range(len(comparison)) if place not in seen]
    rows = [[_recipe(row.recipe)] for row in comparison]
    for place in seen:
        (name,) = rows[place]
        rows[place] = [replace(name, small=f"{name.small}, fitted on these very rows")]
    for column in columns(SHOWN):
        alike, tied = contest(comparison, column.name, fair)
        clear = alike == tied and len(alike) < len(fair)
        for place, cell in enumerate(metric_cells(comparison, column)):
            # Too modest is no better than too sure.
            value = abs(cell.value) if column.name == "overconfidence" else cell.value
            judged = "" if cell.finding is None else cell.finding[1]
            mark = "best" if clear and place in alike else judged
            marks = (mark, judged) if place in fair else ()
            rows[place].append(Cell(cell.number, _known(value), cell.range, *marks))
    return Table.of("comparison", map(tuple, rows))


def choice_table(content: Content) -> list[Table]:
    """What cross-validation found, where `auto` is on the page."""
    entries = content.entries
    own = [entry.row for entry in (entries[content.pick], *entries) if not entry.file]
    made = [(row, report.choice) for row in own for report in row.reports if report.choice]
    if not made:
        return []
    auto, step = made[0]
    metric, chosen = step.details["metric"], step.values.get("recipe", NONE)
    scored = {row.recipe: row.scores.metrics[metric] for row in content.comparison}
    scored[chosen] = auto.scores.metrics[metric]
    rows = []
    for one in step.details["choice"]:
        numbers = [one[key] for key in ("value", "difference", "error")]
        cells = [Cell(f"{value:.4f}", value) for value in numbers]
        cells.append(Cell(f"{100 * one['accuracy']:.2f}", one["accuracy"]))
        value = scored.get(one["recipe"])
        cells.append(Cell("") if value is None else Cell(f"{value:.4f}", value))
        name = _recipe(one["recipe"])
        told = f"{name.small}, chosen".lstrip(", ") if one["recipe"] == chosen else name.small
        rows.append((replace(name, small=told), *cells))
    table = Table.of("choice", rows)
    names = (head.text.replace("%s", metric.upper()) for head in table.heads)
    heads = (replace(head, text=text) for head, text in zip(table.heads, names, strict=True))
    return [replace(table, heads=tuple(heads))]


def recipe_table(name: str, entries: Sequence[Entry]) -> Table:
    """The table of counts, of entropies or of changes."""
    found = Table.of(name, (recipe_cells(entry)[name] for entry in entries))
    if name != "counts":
        return found
    first, level = found.heads
    levels = (replace(level, text=level.text % (100 * one)) for one in entries[0].counts.levels)
    return replace(found, heads=(first, *levels))


def recipe_cells(entry: Entry) -> dict[str, Cells]:
    """The rows of one recipe, by the names of the tables."""
    counts = []
    for right, wrong in entry.counts.after.T.tolist():
        sure = right + wrong
        share = wrong / sure if sure else math.nan
        text = f"{100 * share:.2f} %" if sure else "none"
        counts.append(Cell(text, _known(share), f"{wrong:,} of {sure:,}"))
    grown, changed = entry.entropy, entry.changed
    means = [float(side[group]) for group in (0, 1) for side in (grown.before, grown.after)]
    ends = grown.interval.low, grown.interval.high
    kinds = [int(mask.sum()) for mask in (changed.fixed, changed.broken, changed.other)]
    change = round(100 * changed.accuracy_change, 2) + 0
    name = _recipe(entry.recipe)
    return {
        "counts": (name, *counts),
        "entropy": (
            name,
            *(Cell(_number(mean, ".4f"), _known(mean)) for mean in means),
            Cell(
                _number(grown.gap, "+.4f"),
                _known(grown.gap),
                _span(*(_number(end, "+.4f") for end in ends)),
            ),
        ),
        "changed": (
            name,
            *(Cell(f"{count:,}", float(count)) for count in (len(changed.rows), *kinds)),
            Cell(f"{change:+.2f}", change),
        ),
    }


def examples_table(found: ChangedPredictions, scene: Scene) -> Table:
    """The changed rows the model was most sure of before."""
    names, labels = scene.class_names, scene.pack.manifest.class_names

    def place(row: int) -> Cell:
        if not scene.several:
            return Cell(str(row), float(row))
        sample, label = divmod(row, scene.pack.manifest.classes)
        return Cell(f"{sample}, {label if labels is None else labels[label]}", float(row))

    def named_class(index: int, label: int | None = None) -> Cell:
        text = str(index) if names is None else names[index]
        return Cell(text, small="right" if index == label else "")

    told = found.numbers()["told"]
    keys = ("rows", "labels", "before", "sure_before", "after", "sure_after")
    rows = [
        (
            place(row),
            named_class(label),
            named_class(before, label),
            Cell(percent(sure_before), sure_before),
            named_class(after, label),
            Cell(percent(sure_after), sure_after),
        )
        for row, label, before, sure_before, after, sure_after in zip(
            *(told[key][:TOLD] for key in keys), strict=True
        )
    ]
    table = Table.of("examples", rows)
    return replace(table, caption=table.caption % found.recipe)


def classes_table(before: GroupCalibration, after: GroupCalibration) -> Table:
    """The worst classes of the model as it is, with the same classes after the recommendation."""
    both = (before, after) if after.recipe != before.recipe else (before,)
    rows = []
    for group in before.worst(WORST):
        count = int(before.count[group])
        cells = [
            Cell(before.names[group]),
            Cell(f"{count:,}", float(count), "few" if bool(before.few[group]) else ""),
        ]
        for share in (float(before.confidence[group]), float(before.accuracy[group])):
            cells.append(Cell(f"{100 * share:.1f}", share))
        for found in both:
            gap, low, high = (
                round(100 * float(value), 1) + 0
                for value in (found.overconfidence[group], *found.interval[group])
            )
            known = Cell(f"{gap:+.1f}", gap, _span(f"{low:+.1f}", f"{high:+.1f}"))
            cells.append(Cell("none", small="no longer predicted") if math.isnan(gap) else known)
        rows.append(tuple(cells))
    table = Table.of("labels" if before.by == "label" else "classes", rows)
    *heads, last = table.heads
    heads += [replace(last, hint=last.hint % after.recipe)] if len(both) > 1 else []
    return replace(table, name="classes", heads=tuple(heads))


def _recipe(recipe: str) -> Cell:
    plain = "the model as it is" if recipe == NONE else named(recipe)
    return Cell(recipe, small="" if plain == recipe else plain, code=True)


def _number(value: float, form: str) -> str:
    return "n/a" if math.isnan(value) else format(value, form)


def _span(low: str, high: str) -> str:
    return "" if low == "n/a" else f"[{low}, {high}]"


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def rows_html(rows: Mapping[str, Cells]) -> dict[str, str]:
    """Rows of tables as the template writes them, by the name of the table."""
    row = environment().get_template("tables.html").module.row  # type: ignore[attr-defined]
    return {name: str(row(cells)) for name, cells in rows.items()}


def _markdown_table(table: Table) -> str:
    """The table as Markdown."""

    def text(cell: Cell) -> str:
        if cell.code:
            return f"`{cell.text}`"
        number = f"**{cell.text}**" if cell.mark == "best" else cell.text
        return " ".join(filter(None, (number, cell.small, cell.finding)))

    heads = tuple(head.text for head in table.heads)
    rows = tuple(tuple(map(text, row)) for row in table.rows)
    numeric = [head.numeric for head in table.heads]
    return TextTable(table.caption, heads, rows).markdown(gap=" ", numeric=numeric)
