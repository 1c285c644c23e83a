"""Scores of a calibrator on labelled data: every metric from one pass."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, final

import torch
from torch import Tensor

from featcal.core.batch import Batch, Data, Head, as_data, raw_logits, wide
from featcal.core.calibrator import Calibrator
from featcal.core.checks import InputError
from featcal.core.fit import Facts, evaluating, plain, survey
from featcal.core.progress import calm
from featcal.heads.head import as_head
from featcal.metrics import (
    Bins,
    ClassBins,
    Ordered,
    Predictions,
    ProperSums,
    adaptive_ece_of,
    aurc_of,
    auroc_of,
    debiased_ce_of,
    smooth_ece_of,
)
from featcal.report.bootstrap import Bootstrap, Resamples, checked_resamples, first_row

# --- What every metric is called, how it is printed, which way is better, and where it can lie.


@final
@dataclass(frozen=True)
class Column:
    """One metric as tables show it.

    Attributes:
        name: its key in `Scores.metrics` and in JSON.
        heading: over a column.
        title: where there is room.
        better: +1 where higher is better, -1 where lower is, 0 where neither is: a mean confidence
            is no merit, and overconfidence is judged by its size, as the calibration errors are.
        percent: whether it is shown as percent with two digits, else with four.
        low: its smallest possible value.
        high: its largest.
        power: of the noise variance it grows by where all is noise, see `report/intervals.py`.
    """

    name: str
    heading: str
    title: str
    better: int = -1
    percent: bool = True
    low: float = 0.0
    high: float = 1.0
    power: float = 0.5

    @property
    def unit(self) -> str:
        """The heading with its unit, for cells that hold numbers alone."""
        return f"{self.heading} %" if self.percent else self.heading

    def number(self, value: float) -> str:
        """The value alone: 4.68 for 0.0468, or 1.0312."""
        if math.isnan(value):
            return "n/a"
        # Adding 0 turns a rounded -0.00 into 0.00.
        return f"{round(100 * value, 2) + 0:.2f}" if self.percent else f"{round(value, 4) + 0:.4f}"

    def text(self, value: float) -> str:
        """The value with its unit: 4.68 %."""
        number = self.number(value)
        return f"{number} %" if self.percent and number != "n/a" else number

    def merit(self, value: float) -> float:
        """A number that is larger for the better value, by which rows are sorted."""
        if math.isnan(value):
            return -math.inf
        return self.better * value if self.better else -abs(value)


_ALL = (
    Column("accuracy", "accuracy", "accuracy", +1),
    Column("confidence", "confidence", "mean confidence", 0),
    Column(
        "overconfidence", "overconfidence", "overconfidence (confidence - accuracy)", 0, low=-1.0
    ),
    Column("ece", "ECE", "ECE (equal-width bins)"),
    Column("adaptive_ece", "adaptive ECE", "adaptive ECE (equal-mass bins)"),
    Column("classwise_ece", "classwise ECE", "classwise ECE"),
    Column("mce", "MCE", "MCE (worst bin)"),
    Column("rms_ce", "RMS-CE", "RMS calibration error"),
    Column("debiased_ce", "debiased CE", "debiased RMS calibration error"),
    # Smoothed noise of width s is as s^-1/2, and the width is the metric itself.
    Column("smooth_ece", "smooth ECE", "smooth ECE (no bins)", power=1 / 3),
    Column("nll", "NLL", "NLL", percent=False, high=math.inf),
    Column("brier", "Brier", "Brier score", percent=False, high=2.0),
    Column("auroc", "AUROC", "AUROC of correctness", +1, percent=False),
    Column("aurc", "AURC", "AURC (area under risk-coverage)", percent=False),
)
COLUMNS = {column.name: column for column in _ALL}
USUAL = ("accuracy", "ece", "adaptive_ece", "nll", "brier")


def columns(names: tuple[str, ...] = USUAL) -> list[Column]:
    """The columns of these metrics.

    Raises:
        InputError: for a name that no metric has.
    """
    for name in names:
        if name not in COLUMNS:
            raise InputError(f"metric is {name!r}: choose one of {', '.join(sorted(COLUMNS))}")
    return [COLUMNS[name] for name in names]


# --- From replicates to what a reader is told: an interval, a paired difference, a verdict.
#
# Binned calibration errors are biased upwards, and on a resample more so than on the data: the
# plain
# percentile interval may lie above the estimate altogether. docs/numerics.md says how the kind of
# interval was chosen.

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


@final
@dataclass(frozen=True)
class Scores:
    """How good the probabilities are.

    Attributes:
        n: rows scored.
        metrics: name -> value, as fractions.
        bins: the sums behind ECE and the reliability diagram.
        replicates: name -> (b,) the metric on each resample of the rows; empty without resamples.
    """

    n: int
    metrics: dict[str, float]
    bins: Bins
    replicates: dict[str, Tensor] = field(default_factory=dict, repr=False)

    @property
    def intervals(self) -> dict[str, Interval]:
        """Name -> 95 % interval; empty without resamples."""
        return {name: self.interval(name) for name in self.metrics if name in self.replicates}

    def interval(self, name: str) -> Interval:
        """The 95 % interval of a metric, NaN at both ends without resamples."""
        if name not in self.replicates:
            return UNKNOWN
        return metric_interval(name, self.metrics[name], self.replicates[name])

    def as_json(self) -> dict[str, Any]:
        """The public form, as `featcal eval --json` prints it."""
        return plain({"n": self.n, "metrics": self.metrics})  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Tally:
    """The four summaries behind all metrics."""

    bins: Bins
    classes: ClassBins
    ordered: Ordered
    proper: ProperSums

    @classmethod
    def of(cls, seen: Predictions, bins: int) -> _Tally:
        return cls(
            Bins.of_predictions(seen, bins=bins),
            ClassBins.of_predictions(seen, bins=bins),
            Ordered.of_predictions(seen),
            ProperSums.of_predictions(seen),
        )

    def __add__(self, other: _Tally) -> _Tally:
        return _Tally(
            self.bins + other.bins,
            self.classes + other.classes,
            self.ordered + other.ordered,
            self.proper + other.proper,
        )

    def reduced(self) -> _Tally:
        return _Tally(
            self.bins.reduced(),
            self.classes.reduced(),
            self.ordered.reduced(),
            self.proper.reduced(),
        )

    def scores(self, bins: int) -> Scores:
        metrics = {
            "accuracy": self.proper.accuracy,
            "ece": self.bins.ece,
            "adaptive_ece": adaptive_ece_of(self.ordered, bins=bins),
            "classwise_ece": self.classes.ece,
            "mce": self.bins.mce,
            "nll": self.proper.nll,
            "brier": self.proper.brier,
            "rms_ce": self.bins.rms_ce,
            "debiased_ce": debiased_ce_of(self.ordered, bins=bins),
            "smooth_ece": smooth_ece_of(self.ordered),
            "confidence": float(self.bins.confidence.sum()) / self.bins.n,
            "overconfidence": self.bins.overconfidence,
            "auroc": auroc_of(self.ordered),
            "aurc": aurc_of(self.ordered),
        }
        return Scores(int(self.bins.n), metrics, self.bins)


@torch.no_grad()
def evaluate(
    data: Batch | Data,
    calibrator: Calibrator | None = None,
    head: Head | None = None,
    *,
    bins: int = 15,
    resamples: int = 0,
    seed: int = 0,
) -> Scores:
    """Scores the calibrated logits, or the classifier's own without a calibrator.

    Args:
        data: labelled rows that were not used to fit.
        calibrator: what to apply; None scores the network as it is.
        head: the classifier's last layer, when the data holds features.
        bins: equal-width bins of ECE and MCE, and equal-mass bins of adaptive and debiased ECE.
        resamples: how often the rows are drawn again for `Scores.intervals`; 0 for never.
        seed: of the resamples.
    """
    head = as_head(head)
    data = as_data(data, head)
    with evaluating(head):
        facts = survey(data, head)
        check_usable(calibrator, facts, head)
        bootstrap = None
        if checked_resamples(resamples):
            drawn = Resamples.draw(facts.rows, resamples, seed)
            bootstrap = Bootstrap(drawn, first_row(data), bins)
        parts = ((batch, calibrated_logits(batch, calibrator, head)) for batch in data)
        return score(parts, facts, bins, bootstrap)


def check_usable(calibrator: Calibrator | None, facts: Facts, head: Head | None) -> None:
    """Refuses a calibrator that needs features where there are none."""
    ready = head is not None and facts.width > 0
    if calibrator is not None and calibrator.needs_features and not ready:
        raise InputError(f"{calibrator!r} works on features: pass data with features, and head=")


def score(
    parts: Iterable[tuple[Batch, Tensor]], facts: Facts, bins: int, bootstrap: Bootstrap | None
) -> Scores:
    """Scores batches with their calibrated logits; every rank gets the scores of all rows."""
    nothing = torch.zeros(0, facts.classes), torch.zeros(0, dtype=torch.int64)
    seen = Predictions.of(logits=nothing[0], labels=nothing[1])
    tally = _Tally.of(seen, bins)
    if bootstrap is not None:
        bootstrap.add(seen)  # a rank without rows takes part in the sums
    with calm(facts.work):
        for batch, logits in parts:
            seen = Predictions.of(logits=logits, labels=batch.labels)
            tally += _Tally.of(seen, bins)
            if bootstrap is not None:
                bootstrap.add(seen)
    tally = tally.reduced()
    scores = tally.scores(bins)
    if bootstrap is None or scores.n < 2:  # one row says nothing of how others would vary
        return scores
    return replace(scores, replicates=bootstrap.replicates(tally.ordered))


def calibrated_logits(batch: Batch, calibrator: Calibrator | None, head: Head | None) -> Tensor:
    """The logits a calibrator makes of a batch; the classifier's own without one."""
    if calibrator is None:
        return wide(raw_logits(batch, head))
    if calibrator.needs_features and head is not None:
        return calibrator(batch.features, head)  # type: ignore[no-any-return]
    return calibrator(batch.features, lambda _: raw_logits(batch, head))  # type: ignore[no-any-return]
