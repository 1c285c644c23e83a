"""Scores of a calibrator on labelled data: every metric from one pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from featcal.core.batch import Batch, Data, Head, as_data, raw_logits, wide
from featcal.core.calibrator import Calibrator
from featcal.core.errors import InputError
from featcal.core.fitting import evaluating, plain
from featcal.core.survey import survey
from featcal.core.threads import calm
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


@final
@dataclass(frozen=True)
class Scores:
    """How good the probabilities are.

    Attributes:
        n: rows scored.
        metrics: name -> value, as fractions.
        bins: the sums behind ECE and the reliability diagram.
    """

    n: int
    metrics: dict[str, float]
    bins: Bins

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
) -> Scores:
    """Scores the calibrated logits, or the classifier's own without a calibrator.

    Args:
        data: labelled rows that were not used to fit.
        calibrator: what to apply; None scores the network as it is.
        head: the classifier's last layer, when the data holds features.
        bins: equal-width bins of ECE and MCE, and equal-mass bins of adaptive and debiased ECE.
    """
    data = as_data(data, head)
    with evaluating(head):
        facts = survey(data, head)
        ready = head is not None and facts.width > 0
        if calibrator is not None and calibrator.needs_features and not ready:
            raise InputError(
                f"{calibrator!r} works on features: pass data with features, and head="
            )
        nothing = torch.zeros(0, facts.classes), torch.zeros(0, dtype=torch.int64)
        tally = _Tally.of(Predictions.of(logits=nothing[0], labels=nothing[1]), bins)
        with calm(facts.work):
            for batch in data:
                logits = calibrated_logits(batch, calibrator, head)
                tally += _Tally.of(Predictions.of(logits=logits, labels=batch.labels), bins)
    return tally.reduced().scores(bins)


def calibrated_logits(batch: Batch, calibrator: Calibrator | None, head: Head | None) -> Tensor:
    """The logits a calibrator makes of a batch; the classifier's own without one."""
    if calibrator is None:
        return wide(raw_logits(batch, head))
    if calibrator.needs_features and head is not None:
        return calibrator(batch.features, head)  # type: ignore[no-any-return]
    return calibrator(batch.features, lambda _: raw_logits(batch, head))  # type: ignore[no-any-return]
