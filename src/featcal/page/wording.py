"""From facts to sentences: the templates, and numbers and names as sentences have them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from featcal.analysis.changes import FEW
from featcal.core.checks import InputError
from featcal.core.fit import plain
from featcal.metrics.columns import COLUMNS
from featcal.page.verdict import FEW_ROWS, FROM, SAME, Facts, Kind
from featcal.report.bootstrap import Interval

if TYPE_CHECKING:
    from jinja2 import Environment

ASSETS = Path(__file__).parent / "assets"
CAUTIONS = (
    "answers",
    "scored_on_its_rows",
    "unknown_rows",
    "few_scored",
    "few_fitted",
    "no_intervals",
)


@final
@dataclass(frozen=True)
class Point:
    """A question a reader has, and its answer."""

    question: str
    answer: str


@final
@dataclass(frozen=True)
class Summary:
    """The first screen, for a person who has never heard of calibration.

    Attributes:
        kind: which way the model errs.
        headline: one sentence.
        trust: whether to trust the confidence, in one sentence.
        command: what to type next.
        points: questions and answers.
        cautions: what a reader must know before acting on it.
        pick: the place of the recommended recipe, None to leave the model as it is.
        seen: places of calibrators that were fitted on the scored rows.
    """

    kind: Kind
    headline: str
    trust: str
    command: str
    points: tuple[Point, ...]
    cautions: tuple[str, ...]
    pick: int | None
    seen: tuple[int, ...]

    @classmethod
    def of(cls, facts: Facts) -> Summary:
        """Says the facts."""
        questions: dict[str, str] = words().questions
        asked = questions if facts.tried or facts.seen else ("how_far", "what_to_do")
        cautions = [say(name, facts) for name in CAUTIONS]
        return cls(
            facts.kind,
            say("headline", facts),
            say("trust", facts),
            facts.command,
            tuple(Point(questions[name], say(name, facts)) for name in asked),
            (*filter(None, cautions), *(say("idle", one) for one in facts.idle)),
            facts.place,
            facts.where.seen,
        )

    def as_json(self) -> dict[str, Any]:
        """The public form."""
        return plain(asdict(self))  # type: ignore[no-any-return]


def say(macro: str, facts: Any) -> str:  # noqa: ANN401 - whatever the macro is about
    """What a macro of `words.txt` makes of facts, as one line of text."""
    text = " ".join(getattr(words(), macro)(facts).split())
    return re.sub(r" (?=[,.;:](\s|$)|\))", "", text)


@cache
def words() -> Any:  # noqa: ANN401 - a template's module has whatever the template has
    """The sentences, as text: whoever puts them into HTML escapes them."""
    kept = environment().overlay(trim_blocks=False, lstrip_blocks=False)  # a line break is a space
    return kept.get_template("words.txt").module


@cache
def environment() -> Environment:
    """Where templates are found; only what is HTML is escaped.

    Raises:
        InputError: where jinja2 is missing.
    """
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError as error:
        raise missing("jinja2") from error
    made = Environment(
        autoescape=lambda name: name is not None and name.endswith(".html"),
        loader=FileSystemLoader(ASSETS),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (about, percent, points, rows, span, metric, named, capital, tidy, share_of, signed)
    made.filters.update({one.__name__: one for one in filters})
    made.tests.update(known=lambda value: not math.isnan(value), infinite=math.isinf)
    made.globals.update(apart=apart, digits_of=digits_of, FEW_ROWS=FEW_ROWS, FEW=FEW, SAME=SAME)
    return made


def missing(package: str) -> InputError:
    """The refusal to make a report without a package."""
    return InputError(
        f"a report needs {package}, which is not installed: pip install 'featcal[report]'"
    )


def percent(share: float) -> str:
    """84.3 %."""
    return f"{100 * share:.1f} %"


def about(share: float) -> str:
    """84 %, and never 100 % for what is less."""
    rounded = round(100 * share)
    if rounded in (0, 100) and 0 < share < 1:
        return f"{min(max(100 * share, 0.1), 99.9):.1f} %"
    return f"{rounded} %"


def apart(said: float, right: float) -> tuple[str, str]:
    """Two shares, with as many digits as it takes to see that they differ.

    >>> apart(0.9, 0.82), apart(0.894, 0.886)
    (('90 %', '82 %'), ('89.4 %', '88.6 %'))
    """
    for told in (about, percent, lambda share: f"{100 * share:.2f} %"):
        texts = told(said), told(right)
        if texts[0] != texts[1]:
            return texts
    return about(said), about(right)


def points(share: float) -> str:
    """9.2 points, 1 point: of 100."""
    text = f"{100 * share:.2f}" if abs(share) < 0.01 else f"{100 * share:.1f}"
    return f"{text} point" if text == "1.00" else f"{text} points"


def metric(value: float, name: str) -> str:
    """A metric as sentences have it: 4.7 %, or 1.0312."""
    return percent(value) if COLUMNS[name].percent else f"{value:.4f}"


def rows(count: int) -> str:
    """1 row, 3,000 rows."""
    return f"{count:,} row" if count == 1 else f"{count:,} rows"


def share_of(part: int, whole: int) -> str:
    """3 of 1,200 (0.2 %)."""
    return f"{part:,} of {whole:,} ({percent(part / whole)})"


def signed(value: float, digits: int) -> str:
    """+0.25, and no minus before a zero."""
    return f"{value:+z.{digits}f}"


def digits_of(error: float) -> int:
    """Decimals that show two figures of an error."""
    return max(0, 1 - math.floor(math.log10(error))) if error > 0 else 4


def span(found: Interval, name: str = "ece", *, flip: bool = False, signed: bool = False) -> str:
    """An interval in brackets, in points for a metric in percent; nothing where there is none.

    Args:
        found: the interval.
        name: of the metric.
        flip: whether a fall of 2 is told, not a rise of -2.
        signed: whether to show a plus.

    >>> span(Interval(0.081, 0.102))
    '(95 % interval 8.1 to 10.2)'
    """
    if math.isnan(found.low):
        return ""
    low, high = (-found.high, -found.low) if flip else (found.low, found.high)
    scale, digits = 1, 4
    if COLUMNS[name].percent:
        scale, digits = 100, 2 if max(abs(low), abs(high)) < 0.01 else 1
    sign = "+z" if signed else "z"  # z: no minus before a zero
    return f"(95 % interval {scale * low:{sign}.{digits}f} to {scale * high:{sign}.{digits}f})"


def named(recipes: str | Iterable[str]) -> str:
    """Recipes by the names their steps have in the literature, where they have one.

    Arguments stay, since they may be all that tells two recipes apart.

    >>> named("clip(min_accuracy=0.99) | temperature")
    'feature clipping (min_accuracy=0.99) followed by temperature scaling'
    >>> named("per_label(vector(ridge=0))")
    'vector scaling (ridge=0), with own values for each label'
    >>> named(["clip", "vector", "matrix"])
    'feature clipping, vector scaling and matrix scaling'
    """
    if not isinstance(recipes, str):
        *most, last = map(named, recipes)
        return " and ".join(filter(None, [", ".join(most), last]))
    steps, where, file = recipes.partition(FROM)
    whole = re.fullmatch(r"(all_labels|per_label)\(((?:[^()]|\([^()]*\))*)\)", steps)
    if whole:
        own = ", with own values for each label" if whole[1] == "per_label" else ""
        return f"{named(whole[2])}{own}{where}{file}"
    known: dict[str, str] = words().steps
    told = []
    for step in steps.split(" | "):
        name, opened, arguments = step.strip().partition("(")
        text = f"{known.get(name)}{' ' if opened else ''}{opened}{arguments}"
        told.append(text if name in known else step)
    return " followed by ".join(told) + where + file


def capital(text: str) -> str:
    """The text with a capital first letter."""
    return text[:1].upper() + text[1:]


def tidy(text: str) -> str:
    """A number and its percent sign stay on one line."""
    return text.replace(" %", "\u00a0%")
