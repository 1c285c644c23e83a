"""From replicates to what a reader is told: an interval, a paired difference, a verdict.

Binned calibration errors are biased upwards, and on a resample more so than on the data: the plain
percentile interval may lie above the estimate altogether. docs/numerics.md says how the kind of
interval was chosen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor

from featcal.core.fitting import plain
from featcal.report.columns import COLUMNS

LEVEL = 0.95
# A smaller difference is no finding: the same logits by another route differ by as much.
ROUNDING = 1e-7

Verdict = Literal["better", "worse", "undecided"]


@final
@dataclass(frozen=True)
class Interval:
    """Where a value lies with 95 % confidence; NaN at both ends where the resamples cannot say."""

    low: float
    high: float

    def as_json(self) -> list[float | None]:
        """[low, high], null where there is none."""
        return plain([self.low, self.high])  # type: ignore[no-any-return]


UNKNOWN = Interval(math.nan, math.nan)


def interval(estimate: float, replicates: Tensor, power: float = 0.5) -> Interval:
    """The interval of an estimate from its replicates (b,); it always holds the estimate.

    The replicates' 95 % range is shifted by their own bias onto the estimate, and lengthened on the
    side of the truth by the bias of the estimate itself. That is the larger one: where all gaps are
    noise, a replicate has the noise of the data and as much of its own, so a metric that grows as
    noise variance to the power p is 2^p times as large on it, and the bias of the estimate, which
    is then all of it, is 1 / (2^p - 1) times what the replicates show.

    Args:
        estimate: the value on the data.
        replicates: the values on the resamples, NaN where undefined.
        power: p; 1/2 for binned errors, 1/3 for the smooth one.

    >>> interval(1.0, torch.tensor([0.5, 1.0, 1.5]))
    Interval(low=0.525, high=1.475)
    """
    known = replicates[torch.isfinite(replicates)].double()
    # Where a metric is undefined on many resamples, the others are no fair sample of them.
    if math.isnan(estimate) or len(known) == 0 or len(known) < LEVEL * len(replicates):
        return UNKNOWN
    tail = (1 - LEVEL) / 2
    low, high = known.quantile(known.new_tensor([tail, 1 - tail])).tolist()
    mean = float(known.mean())
    bias = (mean - estimate) / (2**power - 1)
    return Interval(
        estimate - max(mean - low, 0) - max(bias, 0),
        estimate + max(high - mean, 0) - min(bias, 0),
    )


def metric_interval(name: str, estimate: float, replicates: Tensor) -> Interval:
    """The interval of a metric, cut where the metric cannot lie."""
    column = COLUMNS[name]
    found = interval(estimate, replicates, column.power)
    if math.isnan(found.low):
        return found
    return Interval(max(found.low, column.low), min(found.high, column.high))


@final
@dataclass(frozen=True)
class Difference:
    """A row against its baseline by one metric.

    Attributes:
        baseline: the recipe compared with.
        delta: the row's value minus the baseline's.
        interval: of delta, from the same resamples of both.
        verdict: "better" or "worse" where the interval excludes 0, else "undecided"; None for a
            metric of which neither more nor less is better, or without resamples.
    """

    baseline: str
    delta: float
    interval: Interval
    verdict: Verdict | None

    def as_json(self) -> dict[str, Any]:
        """The public form."""
        return {
            "baseline": self.baseline,
            "delta": plain(self.delta),
            "interval": self.interval.as_json(),
            "verdict": self.verdict,
        }


def verdict(name: str, found: Interval) -> Verdict | None:
    """What the interval of a difference says of a metric.

    >>> verdict("ece", Interval(-0.02, -0.01)), verdict("accuracy", Interval(-0.02, -0.01))
    ('better', 'worse')
    """
    better = COLUMNS[name].better
    if better == 0 or math.isnan(found.low):
        return None
    if found.low <= ROUNDING and found.high >= -ROUNDING:
        return "undecided"
    return "better" if better * found.low > 0 else "worse"
