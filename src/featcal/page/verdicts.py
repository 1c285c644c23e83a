"""Which way a network errs, and the one sentence that tells it."""

from __future__ import annotations

import math
from typing import Literal

from featcal.metrics.bins import Bins
from featcal.page.phrases import about, rows
from featcal.report.intervals import Interval
from featcal.report.rows import Row

Kind = Literal["over", "under", "calibrated", "mixed", "unclear"]

FEW_ROWS = 500
SMALL = 0.01  # a mean error below one point matters to nobody, however sure it is
CLOSE = 0.03  # no error was found, and one of the mean beyond this would have been
LOPSIDED = 0.5  # of the error must point one way, or it is called mixed
EXAMPLE, EXAMPLE_ROWS, EXAMPLE_RANGE = 0.9, 30, (0.6, 0.97)  # of the bin that is told as an example


def verdict(raw: Row) -> Kind:
    """Which way the network errs, beyond what chance explains and beyond what anyone would mind.

    With few rows no error that can be shown is not the same as no error: only a clear one counts.
    """
    metrics = raw.scores.metrics
    gap, error = metrics["overconfidence"], metrics["ece"]
    few = raw.scores.n < FEW_ROWS
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
    if kind == "calibrated":
        said, right = _example(raw.scores.bins) or _means(raw)
        return (
            "This model's confidence can be taken at its word: when it says "
            f"{about(said)}, it is right about {about(right)} of the time."
        )
    if kind == "mixed":
        return "This model is too sure in some places and too modest in others" + _where(raw)
    said, right = _example(raw.scores.bins) or _means(raw)
    if (said > right) != (kind == "over"):  # this bin errs the other way: tell the averages
        said, right = _means(raw)
    told = "is too sure of itself" if kind == "over" else "is better than it thinks"
    return (
        f"This model {told}: when it says {about(said)}, it is right about {about(right)} of the "
        "time."
    )


def _example(bins: Bins) -> tuple[float, float] | None:
    """Confidence and accuracy of the filled bin nearest to 90 %, which is easy to picture."""
    enough = max(EXAMPLE_ROWS, bins.n // 200)
    low, high = EXAMPLE_RANGE
    pairs = [
        (said, right)
        for count, said, right in _filled(bins)
        if count >= enough and low <= said <= high
    ]
    return min(pairs, key=lambda pair: abs(pair[0] - EXAMPLE), default=None)


def _where(raw: Row) -> str:
    """The bins that add most to the error in each direction, where both have enough rows."""
    found = [bin for bin in _filled(raw.scores.bins) if bin[0] >= EXAMPLE_ROWS]
    missed = [(count * (said - right), said, right) for count, said, right in found]
    (most, *over), (least, *under) = max(missed, default=(0,)), min(missed, default=(0,))
    if most <= 0 or least >= 0:
        return "."
    return (
        f": when it says {about(over[0])} it is right {about(over[1])} of the time, and when it "
        f"says {about(under[0])}, {about(under[1])}."
    )


def _filled(bins: Bins) -> list[tuple[float, float, float]]:
    """Rows, mean confidence and accuracy of each bin that is not empty."""
    columns = (bins.count, bins.mean_confidence, bins.accuracy)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [(count, said, right) for count, said, right in rows if count > 0]


def _means(raw: Row) -> tuple[float, float]:
    return raw.scores.metrics["confidence"], raw.scores.metrics["accuracy"]


def _within(raw: Row, most: float) -> bool:
    """Whether the mean gap is known to be small, rather than not known to be large."""
    found = raw.scores.interval("overconfidence")
    return math.isnan(found.low) or max(abs(found.low), abs(found.high)) <= most


def _holds_zero(found: Interval) -> bool:
    """Whether chance alone explains it; where there is no interval, the size has to decide."""
    return not math.isnan(found.low) and found.low <= 0 <= found.high
