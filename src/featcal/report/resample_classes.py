"""Replicates of the class-wise calibration error, summed while the predictions stream by.

A row holds fewer than m probabilities above 1 / m. They are kept, one by one, each with its cell
(class and bin); all the others lie in the first bin of their class, and there the sums over
all resamples are one product of the n x k gaps with the counts, and the gaps need not be kept.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from featcal.core import dist
from featcal.core.binning import bin_edges, bin_index
from featcal.core.threads import calm
from featcal.metrics import Predictions
from featcal.report.resample import row_blocks


@final
class ClassReplicates:
    """Sums over the rows seen so far, for b resamples.

    Attributes:
        counts: (n, b) how often each row is drawn in each resample.
        row: the row that comes next, counted over all ranks.
        bins: m.
    """

    def __init__(self, counts: Tensor, first_row: int, bins: int) -> None:
        self.counts, self.row, self.bins = counts, first_row, bins
        self._first: Tensor | None = None  # (k, b) summed gaps of the first bin of each class
        # (e, 3) row, cell and gap of each larger probability; a rank may have no rows at all
        self._others = [torch.zeros(0, 3, dtype=torch.float64)]

    def add(self, seen: Predictions) -> None:
        """Takes the next rows."""
        k = seen.probs.shape[1]
        if self._first is None:
            self._first = torch.zeros(k, self.counts.shape[1], dtype=torch.float64)
        for rows in row_blocks(len(seen), max(self._first.shape)):
            self._add(self._first, seen.probs[rows].cpu(), seen.labels[rows].cpu())

    def _add(self, first: Tensor, probs: Tensor, labels: Tensor) -> None:
        gaps = probs.to(torch.float64, copy=True)
        gaps[torch.arange(len(labels)), labels] -= 1
        above = probs > bin_edges(self.bins, probs.dtype)[1]
        row, column = above.nonzero(as_tuple=True)
        cell = column * self.bins + bin_index(probs[row, column], self.bins)
        entries = [(self.row + row).double(), cell.double(), gaps[row, column]]
        self._others.append(torch.stack(entries, 1))
        drawn = self.counts[self.row : self.row + len(labels)]
        first.addmm_(gaps.masked_fill_(above, 0).T, drawn.double())
        self.row += len(labels)

    def replicates(self, rows: int) -> Tensor:
        """The class-wise error on each resample, (b,), once all ranks have seen their rows."""
        assert self._first is not None
        first = dist.total(self._first)
        total = first.abs().sum(0)
        entries = dist.gather(torch.cat(self._others))
        with calm(0):
            for few in _by_class(entries, self.bins):
                total += self._of_class(few)
        return total / (rows * len(first))

    def _of_class(self, entries: Tensor) -> Tensor:
        """The summed |gap| of the cells of one class, all but the first, (b,)."""
        row, cell, gap = entries.unbind(1)
        gaps = torch.zeros(self.bins, len(row), dtype=torch.float64)
        gaps[cell.long() % self.bins, torch.arange(len(row))] = gap
        return (gaps @ self.counts[row.long()].double()).abs().sum(0)


def _by_class(entries: Tensor, bins: int) -> list[Tensor]:
    """Row, cell and gap of the entries, those of one class at a time."""
    entries = entries[entries[:, 1].argsort()]
    owner = torch.div(entries[:, 1], bins, rounding_mode="floor")
    _, size = torch.unique_consecutive(owner, return_counts=True)
    ends = size.cumsum(0).tolist()
    return [entries[start:end] for start, end in zip([0, *ends], ends, strict=False)]
