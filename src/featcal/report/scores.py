"""Scores of a calibrator on labelled data: every metric from one pass."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from operator import add
from typing import Any, final

import torch
from torch import Tensor

from featcal.core.batch import Batch, Data, Head, as_data, head_of, raw_logits, wide
from featcal.core.calibrator import Calibrator
from featcal.core.checks import InputError
from featcal.core.fit import Facts, evaluating, plain, survey
from featcal.core.memory import Size, under_cap
from featcal.core.progress import calm
from featcal.data.pack import Pack, rows_of
from featcal.heads.head import as_head
from featcal.metrics import Bins, ClassBins, Ordered, Predictions, ProperSums
from featcal.metrics.columns import COLUMNS
from featcal.report.bootstrap import (
    FEW_WRONG,
    UNKNOWN,
    Bootstrap,
    Chance,
    Interval,
    Resamples,
    checked_resamples,
    first_row,
    metric_interval,
)

# The order of JSON and of `Scores.metrics`; tables have that of COLUMNS.
ORDER = (
    *("accuracy", "ece", "adaptive_ece", "classwise_ece", "mce", "nll", "brier", "rms_ce"),
    *("debiased_ce", "smooth_ece", "confidence", "overconfidence", "auroc", "aurc"),
)


@final
@dataclass(frozen=True)
class Scores:
    """How good the probabilities are.

    Attributes:
        n: rows scored.
        metrics: name -> value, as fractions.
        bins: the sums behind ECE and the reliability diagram.
        replicates: name -> (1 + b,) the metric where `Resamples` are centred, then on each of them;
            empty without resamples.
        chance: name -> what chance alone does to a binned error, see `Bootstrap.chance`.
    """

    n: int
    metrics: dict[str, float]
    bins: Bins
    replicates: dict[str, Tensor] = field(default_factory=dict, repr=False)
    chance: dict[str, Chance] = field(default_factory=dict, repr=False)

    @property
    def few_wrong(self) -> bool:
        """Whether so few rows are wrong that intervals rest on those that were not seen."""
        return self.n * (1 - self.metrics["accuracy"]) < FEW_WRONG

    @property
    def intervals(self) -> dict[str, Interval]:
        """Name -> 95 % interval; empty without resamples."""
        return {name: self.interval(name) for name in self.metrics if name in self.replicates}

    def interval(self, name: str) -> Interval:
        """The 95 % interval of a metric, NaN at both ends without resamples."""
        if name not in self.replicates:
            return UNKNOWN
        chance = self.chance.get(name, (0.0, 0.0))
        return metric_interval(name, self.metrics[name], self.replicates[name], chance)

    def as_json(self) -> dict[str, Any]:
        """The public form, as `featcal eval --json` prints it."""
        return plain({"n": self.n, "metrics": self.metrics})  # type: ignore[no-any-return]


@under_cap
@torch.no_grad()
def evaluate(
    data: Batch | Data | Pack,
    calibrator: Calibrator | None = None,
    head: Head | None = None,
    *,
    bins: int = 15,
    resamples: int = 0,
    seed: int = 0,
    memory: Size = None,
) -> Scores:
    """Scores the calibrated logits, or the classifier's own without a calibrator.

    Args:
        data: labelled rows that were not used to fit: batches, what `collect` gave, a pack (its
            split test) or a split of it, or a pair of arrays (logits, labels).
        calibrator: what to apply; None scores the network as it is.
        head: the classifier's last layer, when the data holds features and does not bring it along.
        bins: equal-width bins of ECE and MCE, and equal-mass bins of adaptive and debiased ECE.
        resamples: how often the rows are drawn again for `Scores.intervals`; 0 for never.
        seed: of the resamples.
        memory: the most this process may hold, such as "2GB", mapped files aside.
    """
    data = rows_of(data, "test")
    head = as_head(head_of(data) if head is None else head)
    data = as_data(data, head)
    with evaluating(head):
        facts = survey(data, head)
        check_usable(calibrator, facts, head)
        bootstrap = None
        if checked_resamples(resamples):
            drawn = Resamples.of(data, head, facts.rows, resamples, seed)
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

    def summaries(logits: Tensor, labels: Tensor) -> tuple[Any, ...]:
        seen = Predictions.of(logits=logits, labels=labels)
        if bootstrap is not None:
            bootstrap.add(logits, seen)
        return (
            Bins.of_predictions(seen, bins=bins),
            ClassBins.of_predictions(seen, bins=bins),
            Ordered.of_predictions(seen),
            ProperSums.of_predictions(seen),
        )

    # A rank without rows takes part in the sums, too.
    found = summaries(torch.zeros(0, facts.classes), torch.zeros(0, dtype=torch.int64))
    with calm(facts.work):
        for batch, logits in parts:
            found = tuple(map(add, found, summaries(logits, batch.labels)))
    known = {type(one): one.reduced() for one in found}
    metrics = {name: COLUMNS[name].of(known[COLUMNS[name].summary], bins) for name in ORDER}
    scores = Scores(int(known[Bins].n), metrics, known[Bins])
    if bootstrap is None or scores.n < 2:  # one row says nothing of how others would vary
        return scores
    replicates = bootstrap.replicates(known[Ordered], metrics["smooth_ece"])
    return replace(scores, replicates=replicates, chance=bootstrap.chance(known[Ordered], metrics))


def calibrated_logits(batch: Batch, calibrator: Calibrator | None, head: Head | None) -> Tensor:
    """The logits a calibrator makes of a batch; the classifier's own without one."""
    if calibrator is None:
        return wide(raw_logits(batch, head))
    if calibrator.needs_features and head is not None:
        return calibrator(batch.features, head)  # type: ignore[no-any-return]
    return calibrator(batch.features, lambda _: raw_logits(batch, head))  # type: ignore[no-any-return]
