"""Which way a network errs, and the one sentence that tells it."""

from __future__ import annotations

import math
from typing import Literal

from featcal.metrics.bins import Bins
from featcal.page.phrases import about, apart, points, rows
from featcal.report.intervals import Interval
from featcal.report.rows import Row

Kind = Literal["over", "under", "calibrated", "mixed", "unclear"]
Pair = tuple[float, float]  # what it says, and how often it is right

FEW_ROWS = 500
SMALL = 0.01  # a mean error below one point matters to nobody, however sure it is
CLOSE = 0.03  # no error was found, and one of the mean beyond this would have been
LOPSIDED = 0.5  # of the error must point one way, or it is called mixed
# Standard errors beyond which a bin is known to err: of fifteen honest ones, none does so in 24 of
# 25 pages.
CLEAR = 3.0
LIKELY = 2.0  # standard errors of a bin that is told as an example of what is known already
EXAMPLE, EXAMPLE_ROWS, EXAMPLE_RANGE = 0.9, 30, (0.6, 0.97)  # of the bin that is told as an example

TRUST = {
    "over": "Not as it is: it claims more than it delivers.",
    "under": "Yes, and more than it says: it is right more often than it claims.",
    "calibrated": "Yes. Read its confidence as the share of such answers that are right.",
    "unclear": "Nobody can say yet: there are too few labelled rows to judge it by.",
}


def verdict(raw: Row) -> Kind:
    """Which way the network errs, beyond what chance explains and beyond what anyone would mind.

    With few rows no error that can be shown is not the same as no error: only a clear one counts.
    """
    metrics = raw.scores.metrics
    gap, error = metrics["overconfidence"], metrics["ece"]
    few = raw.scores.n < FEW_ROWS
    if few and math.isnan(raw.scores.interval("overconfidence").low):
        return "unclear"
    # The mean gap first: a binned error is biased upwards, and its interval reaches 0 long after
    # that of the mean does not.
    sided = abs(gap) >= max(LOPSIDED * error, SMALL)
    if sided and not _holds_zero(raw.scores.interval("overconfidence")):
        return "over" if gap > 0 else "under"
    if error <= SMALL:
        return "unclear" if few else "calibrated"
    if _holds_zero(raw.scores.interval("ece")):
        return "calibrated" if not few and _within(raw, CLOSE) else "unclear"
    return "unclear" if few else "mixed"


def headline(kind: Kind, raw: Row) -> str:
    """One sentence with numbers anyone can picture."""
    if kind == "unclear":
        said, right = _means(raw)
        return (
            f"{rows(raw.scores.n)} cannot tell whether this model's confidence is honest: it is "
            f"{about(said)} sure on average and right in {about(right)}."
        )
    if kind == "mixed":
        return f"This model{_mixed(raw)}."
    told = {
        "calibrated": "'s confidence can be taken at its word",
        "over": " is too sure of itself",
        "under": " is better than it thinks",
    }[kind]
    example = _example(kind, raw.scores.bins)
    return f"This model{told}: {_said(raw, example, close=kind == 'calibrated')}."


def trust(kind: Kind, raw: Row) -> str:
    """Whether to trust the confidence, in one sentence."""
    if kind != "mixed":
        return TRUST[kind]
    over, under = _astray(raw.scores.bins)
    if over and under:
        return "Not as it is: it claims too much in some places and too little in others."
    if over:
        return "Not everywhere: in places it claims more than it delivers."
    if under:
        return "Only as a rough guide: in places it is right more often than it claims."
    return "Only as a rough guide: it is off, and these rows do not tell which way."


def _said(raw: Row, example: Pair | None, *, close: bool) -> str:
    """A bin as an example, or the averages, which are nothing the model ever says."""
    pair = example or _means(raw)
    said, right = map(about, pair) if close else apart(*pair)
    if example is None:
        return f"on average it is {said} sure, and right {right} of the time"
    return f"when it says {said}, it is right about {right} of the time"


def _mixed(raw: Row) -> str:
    """Where it errs in each direction, as far as single bins can show it."""
    over, under = _astray(raw.scores.bins)
    if over and under:
        return (
            f" is too sure in some places and too modest in others: when it says {about(over[0])} "
            f"it is right {about(over[1])} of the time, and when it says {about(under[0])}, "
            f"{about(under[1])}"
        )
    found = over or under
    if found is None:
        error = points(raw.scores.metrics["ece"])
        return (
            f"'s confidence is off, by {error} on average, but {rows(raw.scores.n)} do not tell "
            "which way"
        )
    way = "too sure" if over else "too modest"
    return f" is {way} in places: {_said(raw, found, close=False)}"


def _example(kind: Kind, bins: Bins) -> Pair | None:
    """Confidence and accuracy of the filled bin nearest to 90 %, where it shows the verdict.

    A bin that errs the other way, or that may be off by chance, is no example of an error.
    """
    enough = max(EXAMPLE_ROWS, bins.n // 200)
    low, high = EXAMPLE_RANGE
    filled = [one for one in _filled(bins) if one[0] >= enough and low <= one[1] <= high]
    if not filled:
        return None
    nearest = min(filled, key=lambda one: abs(one[1] - EXAMPLE))
    _, said, right = nearest
    if kind == "calibrated":
        return (said, right) if abs(said - right) <= CLOSE else None
    errors = _errors(*nearest) if kind == "over" else -_errors(*nearest)
    return (said, right) if abs(said - right) >= SMALL and errors >= LIKELY else None


def _astray(bins: Bins) -> tuple[Pair | None, Pair | None]:
    """Of the bins known to claim too much the one that adds most to the error; too little.

    The bins are judged by the score test of a share, which Wilson's interval is the inverse of.
    """
    over: list[tuple[float, Pair]] = []
    under: list[tuple[float, Pair]] = []
    for count, said, right in _filled(bins):
        missed = count * (said - right)
        if count >= EXAMPLE_ROWS and abs(_errors(count, said, right)) > CLEAR:
            (over if missed > 0 else under).append((abs(missed), (said, right)))
    worst = [max(side)[1] if side else None for side in (over, under)]
    return worst[0], worst[1]


def _errors(count: float, said: float, right: float) -> float:
    """By how many standard errors a bin claims too much; by how many too little, below 0."""
    missed = count * (said - right)
    error = math.sqrt(count * max(said * (1 - said), 0))  # rounding may put a mean above 1
    if not error:
        return math.copysign(math.inf, missed) if missed else 0.0
    return missed / error


def _filled(bins: Bins) -> list[tuple[float, float, float]]:
    """Rows, mean confidence and accuracy of each bin that is not empty."""
    columns = (bins.count, bins.mean_confidence, bins.accuracy)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [(count, said, right) for count, said, right in rows if count > 0]


def _means(raw: Row) -> Pair:
    return raw.scores.metrics["confidence"], raw.scores.metrics["accuracy"]


def _within(raw: Row, most: float) -> bool:
    """Whether the mean gap is known to be small, rather than not known to be large."""
    found = raw.scores.interval("overconfidence")
    return math.isnan(found.low) or max(abs(found.low), abs(found.high)) <= most


def _holds_zero(found: Interval) -> bool:
    """Whether chance alone explains it; where there is no interval, the size has to decide."""
    return not math.isnan(found.low) and found.low <= 0 <= found.high
