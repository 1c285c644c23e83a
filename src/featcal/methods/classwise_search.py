"""The greedy search for class temperatures: sweeps over classes, each tried on a grid.

By predicted class a row's confidence depends on the temperature of its own class alone, so one pass
tabulates every class at every temperature and the sweeps read the table. By logit every candidate
moves every row: the rows are gathered, and what the other classes contribute is kept.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from featcal.core import dist
from featcal.core.batch import Batch, stored_logits
from featcal.core.binning import bin_index
from featcal.core.descend import gathered
from featcal.core.fitting import Problem
from featcal.core.loss import ECE_BINS
from featcal.core.progress import tell

GRID = np.arange(5, 51) / 10  # 0.5, 0.6, ..., 5.0
SWEEPS = 5
LESS = 1e-12  # a candidate must be better by more than rounding

Array = NDArray[np.float64]
Scores = Callable[[list[int], int], Array]  # (grid index a class, class) -> score of each candidate


def greedy_by_predicted_class(problem: Problem, criterion: str, common: float) -> Array:
    """T of each predicted class, (k,), by ECE or NLL of all rows.

    Classes that no row is predicted to be stay where they start.
    """
    table = _table(problem, criterion)  # (k, g, sums)

    def scores(chosen: list[int], which: int) -> Array:
        others = table[np.arange(len(table)), chosen].sum(0) - table[which, chosen[which]]
        sums: Array = np.abs(others + table[which]).sum(1) / problem.facts.rows
        return sums

    return _sweep(scores, problem.facts.classes, common, range(problem.facts.classes))


def _table(problem: Problem, criterion: str) -> Array:
    """What each class contributes at each temperature: a gap for each bin, or its NLL."""
    classes = problem.facts.classes
    width = ECE_BINS if criterion == "ece" else 1
    table = torch.zeros(classes, len(GRID), width, dtype=torch.float64)
    for batch in problem.data:
        if len(batch):
            cell = stored_logits(batch).argmax(1).cpu()
            for column, temperature in enumerate(GRID):
                value, place = _contribution(batch, float(temperature), criterion)
                flat = table[:, column]
                flat.index_put_((cell, place), value, accumulate=True)
    found: Array = dist.total(table).numpy()
    return found


def _contribution(batch: Batch, temperature: float, criterion: str) -> tuple[Tensor, Tensor]:
    """What a row adds, and to which sum: confidence less correctness to its bin, or its NLL."""
    scaled = stored_logits(batch) / temperature
    if criterion == "nll":
        rows = F.cross_entropy(scaled, batch.labels, reduction="none")
        return rows.double().cpu(), torch.zeros_like(batch.labels).cpu()
    confidence, prediction = scaled.softmax(1).max(1)
    gap = confidence.double() - (prediction == batch.labels).double()
    return gap.cpu(), bin_index(confidence, ECE_BINS).cpu()


def greedy_by_logit(problem: Problem, criterion: str, common: float) -> Array:
    """T of each logit, (k,), by ECE or NLL of all rows, never at the cost of accuracy.

    Classes without a row of their own stay where they start.
    """
    logits, labels = gathered(problem.data, problem.facts.classes)
    rows = _Rows(logits, labels, criterion)
    present = torch.unique(labels).tolist()
    return _sweep(rows.scores, problem.facts.classes, common, present)


class _Rows:
    """All rows, of which one logit is divided by every temperature of the grid at once."""

    def __init__(self, logits: Tensor, labels: Tensor, criterion: str) -> None:
        self.logits, self.labels, self.criterion = logits, labels, criterion
        self.grid = torch.from_numpy(GRID).to(logits)

    def scores(self, chosen: list[int], which: int) -> Array:
        """The score of each candidate; infinite where it costs accuracy."""
        scaled = self.logits / self.grid[chosen]  # (n, k)
        own = self.logits[:, which, None] / self.grid  # (n, g)
        others = scaled.clone()
        others[:, which] = -torch.inf
        rival, place = others.max(1, keepdim=True)
        total = torch.logaddexp(others.logsumexp(1, keepdim=True), own)
        mine = self.labels[:, None] == which
        if self.criterion == "nll":
            true = scaled.gather(1, self.labels[:, None])
            score = (total - torch.where(mine, own, true)).mean(0, dtype=torch.float64)
        right = torch.where(
            self._ahead(own, rival, which, place), mine, place == self.labels[:, None]
        )
        if self.criterion == "ece":
            score = _ece((torch.maximum(own, rival) - total).exp(), right)
        accurate = right.sum(0)
        score[accurate < accurate[chosen[which]]] = torch.inf
        found: Array = score.cpu().numpy()
        return found

    @staticmethod
    def _ahead(own: Tensor, rival: Tensor, which: int, place: Tensor) -> Tensor:
        """Where the class is the prediction: the first among equals."""
        return (own > rival) | ((own == rival) & (which < place))


def _ece(confidence: Tensor, right: Tensor) -> Tensor:
    """ECE of each column of confidences (n, g)."""
    columns = torch.arange(confidence.shape[1], device=confidence.device) * ECE_BINS
    place = bin_index(confidence, ECE_BINS) + columns
    gaps = torch.zeros(confidence.shape[1] * ECE_BINS, dtype=torch.float64, device=place.device)
    gaps.index_add_(0, place.flatten(), (confidence.double() - right.double()).flatten())
    return gaps.view(-1, ECE_BINS).abs().sum(1) / len(confidence)


def _sweep(scores: Scores, classes: int, common: float, present: range | list[int]) -> Array:
    """Each class in turn to its best candidate, from the common T rounded to the grid."""
    start = int(np.abs(GRID - common).argmin())
    chosen = [start] * classes
    for sweep in range(SWEEPS):
        before = list(chosen)
        for which in present:
            found = scores(chosen, which)
            best = int((found <= found.min() + LESS).argmax())  # the smallest T among equals
            if found[best] < found[chosen[which]] - LESS:
                chosen[which] = best
        tell("classwise", sweep + 1, SWEEPS)
        if chosen == before:
            break
    return GRID[chosen]
