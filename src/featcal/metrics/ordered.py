"""Metrics that need the order of the confidences: equal-mass bins and the cumulative error.

Equal confidences have no order. Wherever rows are ranked, each row of a tied run counts with the
run's mean correctness, its expected value over all orders, so that no metric depends on the order
in which rows arrived.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from featcal.core import dist
from featcal.metrics.inputs import Values, checked_bins, checked_rows
from featcal.metrics.predictions import Predictions, TopLabel, top_label


@final
@dataclass(frozen=True, slots=True, eq=False)
class Ordered:
    """Every row's confidence (n,), in the precision it came in, and correctness (n,) bool."""

    confidence: Tensor
    correct: Tensor

    @classmethod
    def of(
        cls,
        probs: Values | None = None,
        labels: Values | None = None,
        *,
        logits: Values | None = None,
    ) -> Ordered:
        """The rows of n predictions, given as probabilities or as logits."""
        return cls.of_predictions(top_label(probs, labels, logits=logits))

    @classmethod
    def of_predictions(cls, predictions: Predictions | TopLabel) -> Ordered:
        """The rows of predictions that are already read."""
        return cls(predictions.confidence.cpu(), predictions.correct.cpu())

    def __len__(self) -> int:
        return len(self.confidence)

    def __add__(self, other: Ordered) -> Ordered:
        # No rows must not widen the other's precision, which decides ties.
        if len(self) == 0 or len(other) == 0:
            return self if len(self) else other
        return Ordered(
            torch.cat([self.confidence, other.confidence]),
            torch.cat([self.correct, other.correct]),
        )

    def reduced(self) -> Ordered:
        """The rows of all processes."""
        # Ranks exchange one type: a rank without rows does not know the precision of the others.
        width = float(self.confidence.dtype.itemsize if len(self) else 0)
        widest = float(dist.largest(torch.tensor(width)))
        confidence = dist.gather(self.confidence.double())
        correct = dist.gather(self.correct.to(torch.uint8)).bool()
        return Ordered(confidence if widest == 8 else confidence.float(), correct)

    def ranked(self) -> tuple[Tensor, Tensor]:
        """Ascending confidences and expected correctness, (n,) float64 each.

        >>> rows = Ordered(torch.tensor([0.9, 0.5, 0.9]), torch.tensor([True, True, False]))
        >>> rows.ranked()[1].tolist()
        [1.0, 0.5, 0.5]
        """
        values, run = torch.unique(self.confidence, return_inverse=True)
        size = torch.bincount(run, minlength=len(values))
        right = torch.bincount(run[self.correct], minlength=len(values))
        return (
            values.double().repeat_interleave(size),
            (right.double() / size).repeat_interleave(size),
        )

    def groups(self, *, bins: int = 15) -> Tensor:
        """Count, summed confidence and summed correctness of m rank groups: (3, m) float64.

        The sorted rows are cut into groups of nearly equal size, the larger ones first.
        """
        m = checked_bins(bins)
        confidence, correct = self.ranked()
        small, larger = divmod(len(self), m)
        size = small + (torch.arange(m) < larger).long()
        group = torch.arange(m).repeat_interleave(size)
        rows = torch.stack([torch.ones_like(confidence), confidence, correct])
        return torch.zeros(3, m, dtype=torch.float64).index_add_(1, group, rows)


def adaptive_ece_of(ordered: Ordered, *, bins: int = 15, reference: bool = False) -> float:
    """The calibration error over groups of nearly equal size (Nguyen and O'Connor, 2015).

    Args:
        ordered: the rows.
        bins: the number of groups.
        reference: do what the published tables did. Their edges are interpolated in the sorted
            confidences and their bins are (lo, hi], so all rows at the smallest confidence are
            dropped while n still counts them, and tied confidences leave bins empty.
    """
    n = checked_rows(len(ordered))
    if reference:
        return _interpolated_ece(ordered, checked_bins(bins))
    _, confidence, correct = ordered.groups(bins=bins)
    return float((confidence - correct).abs().sum()) / n


def _interpolated_ece(ordered: Ordered, bins: int) -> float:
    order = ordered.confidence.sort().values
    n = len(order)
    # Points past the last row take its value, as the published interpolation did.
    at = torch.linspace(0, n, bins + 1, dtype=torch.float64).clamp(max=n - 1)
    low, high = order.double()[at.floor().long()], order.double()[at.ceil().long()]
    edges = (low + (high - low) * at.frac()).to(order.dtype)
    index = torch.bucketize(ordered.confidence, edges) - 1
    kept = index >= 0
    gap = ordered.confidence.double() - ordered.correct.double()
    sums = torch.zeros(bins, dtype=torch.float64).index_add_(0, index[kept], gap[kept])
    return float(sums.abs().sum()) / n


def debiased_ce_of(ordered: Ordered, *, bins: int = 15) -> float:
    """Root mean square calibration error over rank groups, less its sampling bias.

    With confidence p_b and accuracy a_b of group b of n_b rows (Kumar, Liang and Ma, 2019),

        CE^2 = sum_b (n_b / n) [(p_b - a_b)^2 - a_b (1 - a_b) / (n_b - 1)],

    floored at 0; a group of fewer than two rows adds nothing.
    """
    n = checked_rows(len(ordered))
    sums = ordered.groups(bins=bins)
    count, confidence, correct = sums[:, sums[0] >= 2]
    accuracy = correct / count
    bias = accuracy * (1 - accuracy) / (count - 1)
    square = (count * ((confidence / count - accuracy).square() - bias)).sum() / n
    return float(square.clamp(min=0).sqrt())


def ks_error_of(ordered: Ordered) -> float:
    """Largest distance between cumulative confidence and correctness (Gupta et al., 2021).

    Within a tied run the difference grows linearly, so its maximum lies at the end of a run.
    """
    n = checked_rows(len(ordered))
    confidence, correct = ordered.ranked()
    return float((confidence - correct).cumsum(0).abs().max()) / n


def adaptive_ece(
    probs: Values | None = None,
    labels: Values | None = None,
    *,
    logits: Values | None = None,
    bins: int = 15,
    reference: bool = False,
) -> float:
    """Equal-mass calibration error, see `adaptive_ece_of`.

    >>> adaptive_ece(torch.tensor([[0.75, 0.25]]), torch.tensor([0]))
    0.25
    """
    ordered = Ordered.of(probs, labels, logits=logits)
    return adaptive_ece_of(ordered, bins=bins, reference=reference)


def debiased_ce(
    probs: Values | None = None,
    labels: Values | None = None,
    *,
    logits: Values | None = None,
    bins: int = 15,
) -> float:
    """Debiased root mean square calibration error, see `debiased_ce_of`."""
    return debiased_ce_of(Ordered.of(probs, labels, logits=logits), bins=bins)


def ks_error(
    probs: Values | None = None, labels: Values | None = None, *, logits: Values | None = None
) -> float:
    """Kolmogorov-Smirnov calibration error, see `ks_error_of`."""
    return ks_error_of(Ordered.of(probs, labels, logits=logits))
