"""Proper scores and accuracy: plain averages over the rows."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from functools import reduce
from operator import add
from typing import final

import torch

from featcal.core import dist
from featcal.metrics.inputs import Predictions, Values, checked_rows


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
