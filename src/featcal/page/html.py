"""The page: one file with its style, its script, its numbers and Plotly, which loads nothing.

The content security policy in its head forbids every request, so that the promise is kept by the
browser too. With `live` it may talk to the server it came from, and to nobody else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featcal.analysis import ClipSweep
from featcal.core.errors import InputError
from featcal.page import sentences, tables
from featcal.page.certainty import Finding, entropy_findings
from featcal.page.content import Content
from featcal.page.entries import Entry
from featcal.page.phrases import about, in_words
from featcal.version import __version__

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

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


def rows_html(rows: Mapping[str, Sequence[tables.Cell]]) -> dict[str, str]:
    """Rows of tables as the template writes them, by the name of the table."""
    row = _environment().get_template("tables.html").module.row  # type: ignore[attr-defined]
    return {name: str(row(cells)) for name, cells in rows.items()}


def page_tables(content: Content) -> dict[str, tables.Table]:
    """The tables by their names."""
    entries = content.entries
    found = {
        "comparison": tables.comparison_table(content.comparison, content.summary.seen),
        "counts": tables.counts_table(entries),
        "entropy": tables.entropy_table(entries),
        "changed": tables.changed_table(entries),
        "classes": tables.classes_table(*content.classes),
    }
    most = _most_changed(content)
    if len(most.changed.rows):
        found["examples"] = tables.examples_table(most.changed, content.scene.class_names)
    return found


def page_findings(content: Content) -> list[Finding]:
    """Whom each clip makes less certain."""
    return entropy_findings({one.recipe: one.entropy for one in content.entries[1:]})


def page_words(content: Content) -> dict[str, list[str]]:
    """The sentences under the figures, by section."""
    others = content.entries[1:]
    return {
        "entropy": list(map(str, page_findings(content))),
        "counts": [sentences.counts_words(content.entries[content.pick].counts)],
        "changed": [_changed_words(content)] if others else [],
        "classes": [sentences.classes_words(content.classes[0])],
        "units": [] if content.units is None else [sentences.units_words(content.units)],
        "values": [] if content.values is None else [sentences.values_words(content.values)],
        "sweeps": [sentences.sweep_words(sweep) for sweep in _curves(content.sweeps)],
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
    return sentences.changed_words(most) if len(most.rows) else "No recipe changes an answer."


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
