"""Numbers and names as sentences have them: 9.2 points, 84.3 %, "temperature scaling"."""

from __future__ import annotations

import math
from collections.abc import Sequence

from featcal.report.intervals import Interval

# What the literature calls a method, for a person who knows none of them.
STEPS = {
    "bbq": "Bayesian binning into quantiles",
    "classwise": "class-based temperature scaling",
    "clip": "feature clipping",
    "density": "density-aware calibration",
    "dirichlet": "Dirichlet calibration",
    "ensemble": "ensemble temperature scaling",
    "group": "group calibration",
    "histogram": "histogram binning",
    "isotonic": "isotonic regression",
    "logit_clip": "logit clipping",
    "matrix": "matrix scaling",
    "parameterised": "parameterised temperature scaling",
    "proximity": "proximity-informed calibration",
    "sms": "structured matrix scaling",
    "spline": "spline calibration",
    "svs": "structured vector scaling",
    "temperature": "temperature scaling",
    "vector": "vector scaling",
}
FROM = " from "  # between the recipe of a calibrator and its file


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


def rows(count: int) -> str:
    """1 row, 3,000 rows."""
    return f"{count:,} row" if count == 1 else f"{count:,} rows"


def between(found: Interval, *, signed: bool = False, digits: int | None = None) -> str:
    """An interval in brackets, in points unless `digits` are given; nothing where there is none.

    >>> between(Interval(0.081, 0.102))
    ' (95 % interval 8.1 to 10.2)'
    """
    if math.isnan(found.low):
        return ""
    sign = "+z" if signed else "z"  # z: no minus before a zero
    if digits is not None:
        low, high = (f"{end:{sign}.{digits}f}" for end in (found.low, found.high))
    else:
        close = max(abs(found.low), abs(found.high)) < 0.01
        low, high = (f"{100 * end:{sign}.{2 if close else 1}f}" for end in (found.low, found.high))
    return f" (95 % interval {low} to {high})"


def mirrored(found: Interval) -> Interval:
    """The interval of the same number with its sign changed: a fall of 2, not a rise of -2."""
    return Interval(-found.high, -found.low)


def listed(names: Sequence[str]) -> str:
    """A, b and c.

    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def in_words(recipe: str) -> str:
    """The recipe by the names its steps have in the literature, where they have one.

    >>> in_words("clip(min_accuracy=0.99) | temperature")
    'feature clipping (min_accuracy=0.99) followed by temperature scaling'
    """
    recipe, where, file = recipe.partition(FROM)
    return " followed by ".join(map(_step, recipe.split(" | "))) + where + file


def _step(step: str) -> str:
    """One step; its arguments stay, since they may be all that tells two recipes apart."""
    name, opened, arguments = step.strip().partition("(")
    return f"{STEPS[name]}{' ' if opened else ''}{opened}{arguments}" if name in STEPS else step


def capital(text: str) -> str:
    """The text with a capital first letter."""
    return text[:1].upper() + text[1:]
