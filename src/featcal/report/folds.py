"""Cross-fitting: every row is scored by a calibrator that was fitted without it.

The rows are dealt out to k folds by a seeded permutation; a recipe is fitted k times, each time
without one fold, and the rows of that fold are what it is scored on. One split serves for both, and
no other split is touched.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from featcal.core.batch import Batch, Data, Head
from featcal.core.calibrator import Calibrator
from featcal.core.errors import InputError
from featcal.report.scores import calibrated_logits


def checked_folds(folds: int, rows: int) -> int:
    """The number of folds, at least 2 and at most as many as there are rows."""
    try:
        number = operator.index(folds)
    except TypeError:
        number = 0
    if isinstance(folds, bool) or not 2 <= number <= rows:
        raise InputError(f"folds is {folds!r} for {rows} rows: pass an integer from 2 to {rows}")
    return number


@final
@dataclass(frozen=True, eq=False)
class Folds:
    """Rows that are each held out once.

    Attributes:
        data: the batches.
        fold: (rows of this process,) the fold of each row, 0 to k - 1.
        count: k.
    """

    data: Data
    fold: Tensor
    count: int

    @classmethod
    def deal(cls, data: Data, rows: int, folds: int, *, seed: int, first_row: int) -> Folds:
        """Deals out `rows` rows, those of all processes; `first_row` is the first of this one."""
        count = checked_folds(folds, rows)
        # The number of folds joins the seed, so that folds and resamples are not drawn alike.
        order = np.random.default_rng((seed, count)).permutation(rows)
        fold = torch.empty(rows, dtype=torch.int64)
        fold[torch.from_numpy(order)] = torch.arange(rows) % count
        return cls(data, fold[first_row:], count)

    def without(self, fold: int) -> Data:
        """The rows of all other folds, as a view: no more than a batch of them is copied."""
        return _Others(self, fold)

    def scored(
        self, calibrators: Sequence[Calibrator | None], head: Head | None
    ) -> Iterator[tuple[Batch, Tensor]]:
        """Every batch with its logits, each row's by the calibrator that has not seen it."""
        for batch, fold in self.batches():
            chosen = [(fold == number).nonzero()[:, 0] for number in range(self.count)]
            logits = [
                calibrated_logits(batch.rows(rows), calibrator, head)
                for rows, calibrator in zip(chosen, calibrators, strict=True)
                if len(rows)
            ]
            back = torch.cat(chosen).argsort()
            yield batch, torch.cat(logits)[back] if logits else calibrated_logits(batch, None, head)

    def batches(self) -> Iterator[tuple[Batch, Tensor]]:
        """Every batch with the folds of its rows."""
        row = 0
        for batch in self.data:
            yield batch, self.fold[row : row + len(batch)].to(batch.labels.device)
            row += len(batch)


@final
@dataclass(frozen=True, eq=False)
class _Others:
    """All rows but those of one fold."""

    folds: Folds
    left_out: int

    def __iter__(self) -> Iterator[Batch]:
        for batch, fold in self.folds.batches():
            yield batch.rows((fold != self.left_out).nonzero()[:, 0])
