"""Equal-width bins of every class probability, and the class-wise calibration error.

Kull et al., "Beyond temperature scaling: Obtaining well-calibrated multi-class probabilities with
Dirichlet calibration", 2019.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import final

import torch
from torch import Tensor

from featcal.core import dist
from featcal.core.binning import bin_edges, bin_index
from featcal.core.errors import InputError
from featcal.metrics.bins import Bins
from featcal.metrics.inputs import Values, checked_bins, checked_class, checked_rows
from featcal.metrics.predictions import Predictions


@final
@dataclass(frozen=True, slots=True, eq=False)
class ClassBins:
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
        cls,
        probs: Values | None = None,
        labels: Values | None = None,
        *,
        logits: Values | None = None,
        bins: int = 15,
    ) -> ClassBins:
        """The class bins of n predictions, given as probabilities or as logits."""
        parts = Predictions.stream(probs, labels, logits=logits)
        return reduce(add, (cls.of_predictions(part, bins=bins) for part in parts))

    @classmethod
    def of_predictions(cls, predictions: Predictions, *, bins: int = 15) -> ClassBins:
        """The class bins of predictions that are already read."""
        sums = _class_sums(predictions.probs, predictions.labels, checked_bins(bins))
        return cls(*sums.cpu())

    def __add__(self, other: ClassBins) -> ClassBins:
        if self.count.shape != other.count.shape:
            raise InputError(
                f"(classes, bins) differ, {tuple(self.count.shape)} and "
                f"{tuple(other.count.shape)}: make both summaries from the same classes and bins="
            )
        return ClassBins(
            self.count + other.count,
            self.probability + other.probability,
            self.hits + other.hits,
        )

    def reduced(self) -> ClassBins:
        """The sum over all processes."""
        return ClassBins(*dist.total(torch.stack([self.count, self.probability, self.hits])))

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


def classwise_ece(
    probs: Values | None = None,
    labels: Values | None = None,
    *,
    logits: Values | None = None,
    bins: int = 15,
) -> float:
    """Class-wise calibration error, see `ClassBins.ece`.

    >>> classwise_ece(torch.tensor([[0.75, 0.25, 0.0]]), torch.tensor([0])) * 3
    0.5
    """
    return ClassBins.of(probs, labels, logits=logits, bins=bins).ece
