"""Equal-width bins of the confidence, the summary behind ECE, MCE, RMS-CE and every diagram.

Guo, Pleiss, Sun and Weinberger, "On Calibration of Modern Neural Networks", 2017.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from featcal.core import dist
from featcal.core.binning import bin_edges, bin_sums
from featcal.core.errors import InputError
from featcal.metrics.inputs import Values, checked_bins, checked_rows
from featcal.metrics.predictions import Predictions, TopLabel, top_label


@final
@dataclass(frozen=True, slots=True, eq=False)
class Bins:
    """Sums over m bins (lo, hi] of the confidence, 0 in the first; each (m,) float64.

    Attributes:
        count: rows in the bin.
        confidence: their summed confidence.
        correct: how many of them were right.
    """

    count: Tensor
    confidence: Tensor
    correct: Tensor

    @classmethod
    def of(
        cls,
        probs: Values | None = None,
        labels: Values | None = None,
        *,
        logits: Values | None = None,
        bins: int = 15,
    ) -> Bins:
        """The bins of n predictions, given as probabilities or as logits.

        >>> probs = torch.tensor([[0.75, 0.25], [0.75, 0.25]])
        >>> (Bins.of(probs, torch.tensor([0, 1])) + Bins.of(probs, torch.tensor([0, 0]))).ece
        0.0
        """
        return cls.of_predictions(top_label(probs, labels, logits=logits), bins=bins)

    @classmethod
    def of_predictions(cls, predictions: Predictions | TopLabel, *, bins: int = 15) -> Bins:
        """The bins of predictions that are already read."""
        m = checked_bins(bins)
        return cls(*bin_sums(predictions.confidence, predictions.correct, m).cpu())

    def __add__(self, other: Bins) -> Bins:
        if len(self.count) != len(other.count):
            raise InputError(
                f"bins differ, {len(self.count)} and {len(other.count)}: "
                "make both summaries with the same bins="
            )
        return Bins(
            self.count + other.count,
            self.confidence + other.confidence,
            self.correct + other.correct,
        )

    def reduced(self) -> Bins:
        """The sum over all processes."""
        return Bins(*dist.total(torch.stack([self.count, self.confidence, self.correct])))

    @property
    def n(self) -> int:
        """The number of rows."""
        return int(self.count.sum())

    @property
    def edges(self) -> Tensor:
        """The m + 1 edges."""
        return bin_edges(len(self.count), torch.float64)

    @property
    def accuracy(self) -> Tensor:
        """The share of right rows in each bin; NaN where a bin is empty."""
        return self.correct / self.count

    @property
    def mean_confidence(self) -> Tensor:
        """The mean confidence in each bin; NaN where a bin is empty."""
        return self.confidence / self.count

    @property
    def gap(self) -> Tensor:
        """Mean confidence minus accuracy, positive where overconfident; NaN in an empty bin."""
        return (self.confidence - self.correct) / self.count

    @property
    def ece(self) -> float:
        """Expected calibration error: the mean of |gap|, each bin weighted by its rows."""
        return float((self.confidence - self.correct).abs().sum()) / checked_rows(self.n)

    @property
    def mce(self) -> float:
        """Maximum calibration error: the largest |gap| of a non-empty bin."""
        checked_rows(self.n)
        return float(self.gap[self.count > 0].abs().max())

    @property
    def rms_ce(self) -> float:
        """Root mean square calibration error: the root of the weighted mean of gap squared."""
        filled = self.count > 0
        squares = self.count[filled] * self.gap[filled].square()
        return float((squares.sum() / checked_rows(self.n)).sqrt())

    @property
    def overconfidence(self) -> float:
        """Mean confidence minus accuracy over all rows, negative when underconfident."""
        return float((self.confidence - self.correct).sum()) / checked_rows(self.n)


def ece(
    probs: Values | None = None,
    labels: Values | None = None,
    *,
    logits: Values | None = None,
    bins: int = 15,
) -> float:
    """Expected calibration error, see `Bins.ece`.

    >>> ece(torch.tensor([[0.75, 0.25]]), torch.tensor([0]))
    0.25
    """
    return Bins.of(probs, labels, logits=logits, bins=bins).ece


def mce(
    probs: Values | None = None,
    labels: Values | None = None,
    *,
    logits: Values | None = None,
    bins: int = 15,
) -> float:
    """Maximum calibration error, see `Bins.mce`; noisy, since one row can fill a bin."""
    return Bins.of(probs, labels, logits=logits, bins=bins).mce


def rms_ce(
    probs: Values | None = None,
    labels: Values | None = None,
    *,
    logits: Values | None = None,
    bins: int = 15,
) -> float:
    """Root mean square calibration error, see `Bins.rms_ce`."""
    return Bins.of(probs, labels, logits=logits, bins=bins).rms_ce
