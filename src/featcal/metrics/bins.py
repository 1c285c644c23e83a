"""Metrics that are sums over rows: proper scores, and equal-width bins.

Bins of the confidence are behind ECE, MCE, RMS-CE and every diagram (Guo, Pleiss, Sun and
Weinberger, "On Calibration of Modern Neural Networks", 2017); bins of every class probability are
behind the class-wise error (Kull et al., "Beyond temperature scaling: Obtaining well-calibrated
multi-class probabilities with Dirichlet calibration", 2019).
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from functools import reduce
from operator import add
from typing import Self, final

import torch
from torch import Tensor

from featcal.core import dist
from featcal.core.batch import bin_edges, bin_index, bin_sums
from featcal.core.checks import InputError
from featcal.metrics.inputs import (
    Predictions,
    TopLabel,
    Values,
    checked_bins,
    checked_class,
    checked_rows,
    top_label,
)


@final
@dataclass(frozen=True, slots=True)
class ProperSums:
    """Sums over the rows.

    Attributes:
        count: the number of rows.
        log_loss: the summed -log p of the labels.
        squared_error: the summed squared distance of the probabilities from the one-hot labels.
        correct: how many predictions were right.
    """

    count: float
    log_loss: float
    squared_error: float
    correct: float

    @classmethod
    def of(
        cls, probs: Values = None, labels: Values = None, *, logits: Values = None
    ) -> ProperSums:
        """The sums of n predictions, given as probabilities or as logits."""
        parts = Predictions.stream(probs, labels, logits=logits)
        return reduce(add, map(cls.of_predictions, parts))

    @classmethod
    def of_predictions(cls, predictions: Predictions) -> ProperSums:
        """The sums of predictions that are already read."""
        probs, labels = predictions.probs, predictions.labels
        true = probs.gather(1, labels[:, None])[:, 0].double()
        # sum_k (p_k - y_k)^2 = sum_k p_k^2 - 2 p_y + 1, without a one-hot matrix.
        squares = probs.square().sum(dtype=torch.float64) + (1 - 2 * true).sum()
        return cls(
            float(len(predictions)),
            0.0 - float(predictions.log_true.sum(dtype=torch.float64)),  # never -0.0
            float(squares),
            float(predictions.correct.sum()),
        )

    def __add__(self, other: ProperSums) -> ProperSums:
        return ProperSums(*map(add, astuple(self), astuple(other)))

    def reduced(self) -> ProperSums:
        """The sum over all processes."""
        return ProperSums(*dist.total(torch.tensor(astuple(self), dtype=torch.float64)).tolist())

    @property
    def n(self) -> int:
        """The number of rows."""
        return int(self.count)

    @property
    def nll(self) -> float:
        """Negative log-likelihood in nats: the mean of -log p of the label."""
        return self.log_loss / checked_rows(self.n)

    @property
    def brier(self) -> float:
        """Brier score, summed over the classes: 0 to 2, twice the binary convention."""
        return self.squared_error / checked_rows(self.n)

    @property
    def accuracy(self) -> float:
        """The share of rows whose largest probability, the first of equal ones, is the label's."""
        return self.correct / checked_rows(self.n)


@dataclass(frozen=True, slots=True, eq=False)
class BinSums:
    """Sums that parts of the data and processes add up, tensors of one shape."""

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.stacked().shape[1:]))
        return f"{type(self).__name__}({shape})"

    def stacked(self) -> Tensor:
        """The sums one upon the other."""
        return torch.stack([getattr(self, part.name) for part in fields(self)])

    def __add__(self, other: Self) -> Self:
        mine, more = self.stacked(), other.stacked()
        if mine.shape != more.shape:
            raise InputError(
                f"bins or classes differ, {tuple(mine.shape[1:])} and {tuple(more.shape[1:])}: "
                "make both summaries from the same classes and bins="
            )
        return type(self)(*(mine + more))

    def reduced(self) -> Self:
        """The sum over all processes."""
        return type(self)(*dist.total(self.stacked()))


@final
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Bins(BinSums):
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
        cls, probs: Values = None, labels: Values = None, *, logits: Values = None, bins: int = 15
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


@final
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ClassBins(BinSums):
    """Sums over m bins of each of k class probabilities; each (k, m) float64.

    Bins are (lo, hi] with 0 in the first, so that no row is lost and each class counts n rows.

    Attributes:
        count: rows whose probability of the class lies in the bin.
        probability: their summed probability of the class.
        hits: how many of them have the class as label.
    """

    count: Tensor
    probability: Tensor
    hits: Tensor

    @classmethod
    def of(
        cls, probs: Values = None, labels: Values = None, *, logits: Values = None, bins: int = 15
    ) -> ClassBins:
        """The class bins of n predictions, given as probabilities or as logits."""
        parts = Predictions.stream(probs, labels, logits=logits)
        return reduce(add, (cls.of_predictions(part, bins=bins) for part in parts))

    @classmethod
    def of_predictions(cls, predictions: Predictions, *, bins: int = 15) -> ClassBins:
        """The class bins of predictions that are already read."""
        sums = _class_sums(predictions.probs, predictions.labels, checked_bins(bins))
        return cls(*sums.cpu())

    @property
    def n(self) -> int:
        """The number of rows."""
        return int(self.count[0].sum())

    def of_class(self, label: int) -> Bins:
        """The bins of one class against the rest: its probability, and its share of the rows.

        They are what a curve of a binary model shows: of class 1, the whole of [0, 1].

        >>> ClassBins.of(torch.tensor([0.25, 0.75]), torch.tensor([0, 1])).of_class(1).ece
        0.25
        """
        row = checked_class(label, len(self.count))
        return Bins(self.count[row], self.probability[row], self.hits[row])

    @property
    def by_class(self) -> Tensor:
        """The calibration error of each class against the rest, (k,)."""
        return (self.probability - self.hits).abs().sum(1) / checked_rows(self.n)

    @property
    def ece(self) -> float:
        """Class-wise calibration error: the mean of `by_class` over all k columns.

        Classes that no label names count too. The value shrinks with k, about as 2 ECE / k, and is
        not comparable between different numbers of classes.
        """
        return float(self.by_class.mean())


def _class_sums(probs: Tensor, labels: Tensor, bins: int) -> Tensor:
    """Count, probability and hits: (3, k, m) float64.

    A row holds fewer than m probabilities above 1 / m, so all the others, nearly everything when
    classes are many, are summed as the first bin without asking for their bin.
    """
    n, k = probs.shape
    above = probs > bin_edges(bins, probs.dtype)[1].to(probs.device)
    row, column = above.nonzero(as_tuple=True)
    values = probs[row, column]
    cell = column * bins + bin_index(values, bins)
    sums = torch.zeros(3, k * bins, dtype=torch.float64, device=probs.device)
    sums[0] = torch.bincount(cell, minlength=k * bins)
    sums[1].index_add_(0, cell, values.double())
    true = probs.gather(1, labels[:, None])[:, 0]
    sums[2] = torch.bincount(labels * bins + bin_index(true, bins), minlength=k * bins)
    sums = sums.view(3, k, bins)
    sums[0, :, 0] += n - above.sum(0)
    sums[1, :, 0] += probs.masked_fill(above, 0).sum(0, dtype=torch.float64)
    return sums


def nll(probs: Values = None, labels: Values = None, *, logits: Values = None) -> float:
    """Negative log-likelihood, see `ProperSums.nll`; a probability under 1e-12 counts as 1e-12."""
    return ProperSums.of(probs, labels, logits=logits).nll


def brier(probs: Values = None, labels: Values = None, *, logits: Values = None) -> float:
    """Brier score, see `ProperSums.brier`.

    >>> brier(torch.tensor([[1.0, 0.0]]), torch.tensor([1]))
    2.0
    """
    return ProperSums.of(probs, labels, logits=logits).brier


def accuracy(probs: Values = None, labels: Values = None, *, logits: Values = None) -> float:
    """Top-1 accuracy, see `ProperSums.accuracy`."""
    return ProperSums.of(probs, labels, logits=logits).accuracy


def ece(
    probs: Values = None, labels: Values = None, *, logits: Values = None, bins: int = 15
) -> float:
    """Expected calibration error, see `Bins.ece`.

    >>> ece(torch.tensor([[0.75, 0.25]]), torch.tensor([0]))
    0.25
    """
    return Bins.of(probs, labels, logits=logits, bins=bins).ece


def mce(
    probs: Values = None, labels: Values = None, *, logits: Values = None, bins: int = 15
) -> float:
    """Maximum calibration error, see `Bins.mce`; noisy, since one row can fill a bin."""
    return Bins.of(probs, labels, logits=logits, bins=bins).mce


def rms_ce(
    probs: Values = None, labels: Values = None, *, logits: Values = None, bins: int = 15
) -> float:
    """Root mean square calibration error, see `Bins.rms_ce`."""
    return Bins.of(probs, labels, logits=logits, bins=bins).rms_ce


def classwise_ece(
    probs: Values = None, labels: Values = None, *, logits: Values = None, bins: int = 15
) -> float:
    """Class-wise calibration error, see `ClassBins.ece`.

    >>> classwise_ece(torch.tensor([[0.75, 0.25, 0.0]]), torch.tensor([0])) * 3
    0.5
    """
    return ClassBins.of(probs, labels, logits=logits, bins=bins).ece
