"""What a fit minimises: sums over the data, reduced once, turned into one number at the end."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from featcal.core import dist
from featcal.core.batch import Batch, Data
from featcal.core.rows import bin_sums, predicted

ECE_BINS = 15


def mean(sums: Tensor, rows: float) -> float:
    """The plain average over the rows."""
    return float(sums[0]) / rows


@dataclass(frozen=True)
class Loss:
    """A quantity that batches, shards and ranks add up.

    Attributes:
        name: what a report calls it.
        sums: (logits, batch) -> (s,) float64, summed over the batch and never averaged.
        value: (sums over all rows, number of rows) -> the loss. An average by default; a binned
            error such as ECE is a function of its bins' sums.
        size: s, known beforehand so that a rank without rows can still take part.
        smooth: whether the sums have a gradient in the logits that a descent can follow.
    """

    name: str
    sums: Callable[[Tensor, Batch], Tensor]
    value: Callable[[Tensor, float], float] = mean
    size: int = 1
    smooth: bool = True

    def after(self, change: Callable[[Tensor], Tensor]) -> "Loss":
        """This loss of changed logits, as a search over a method's values needs it."""
        return replace(self, sums=lambda logits, batch: self.sums(change(logits), batch))

    def __call__(self, logits: Tensor, batch: Batch) -> Tensor:
        """The sums over one batch."""
        return self.sums(logits, batch)


def _nll_sums(logits: Tensor, batch: Batch) -> Tensor:
    rows = F.cross_entropy(logits, batch.labels, reduction="none")
    return rows.sum(dtype=torch.float64).view(1)


def _brier_sums(logits: Tensor, batch: Batch) -> Tensor:
    probs = logits.softmax(1)
    true = probs.gather(1, batch.labels[:, None])[:, 0]
    # sum_k (p_k - y_k)^2 = sum_k p_k^2 - 2 p_y + 1, without a one-hot matrix.
    return (probs.square().sum(1) - 2 * true + 1).sum(dtype=torch.float64).view(1)


def _correct_sums(logits: Tensor, batch: Batch) -> Tensor:
    return (predicted(logits) == batch.labels).sum(dtype=torch.float64).view(1)


def _confidence_sums(logits: Tensor, batch: Batch) -> Tensor:
    return logits.softmax(1).amax(1).sum(dtype=torch.float64).view(1)


def _ece_sums(logits: Tensor, batch: Batch) -> Tensor:
    confidence = logits.softmax(1).amax(1)
    return bin_sums(confidence, predicted(logits) == batch.labels, ECE_BINS).flatten()


def _ece_value(sums: Tensor, rows: float) -> float:
    _, confidence, correct = sums.view(3, -1)
    return float((confidence - correct).abs().sum()) / rows


nll = Loss("nll", _nll_sums)
brier = Loss("brier", _brier_sums)
ece = Loss("ece", _ece_sums, _ece_value, size=3 * ECE_BINS, smooth=False)
accuracy = Loss("accuracy", _correct_sums, smooth=False)
confidence = Loss("confidence", _confidence_sums)

CRITERIA = {loss.name: loss for loss in (nll, brier, ece)}


@torch.no_grad()
def measure(data: Data, *losses: Loss) -> list[float]:
    """The value of each loss over all data: one pass, one reduction."""
    sizes = [loss.size for loss in losses]
    sums = torch.zeros(sum(sizes) + 1, dtype=torch.float64)
    for batch in data:
        assert batch.logits is not None
        parts = [loss(batch.logits, batch) for loss in losses]
        sums[:-1] += torch.cat(parts).cpu()
        sums[-1] += len(batch)
    *totals, rows = torch.split(dist.total(sums), [*sizes, 1])
    return [loss.value(part, float(rows)) for loss, part in zip(losses, totals, strict=True)]
