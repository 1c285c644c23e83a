"""Rows chosen by their content: the same ones whatever their order, batches and processes.

A hash of a row decides whether it belongs to a sample and which fold it falls into. Rows that
belong together, as the pixels of an image, fall into one fold, by the number of their group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from featcal.core import dist
from featcal.core.batch import Batch, Data, by_blocks, joined, stored_logits, unchecked


def row_hash(values: Tensor) -> Tensor:
    """A well mixed number from 0 to 2^32 - 1 for each row of values (n, ...), (n,) int64."""

    def sums(rows: Tensor) -> Tensor:
        bits = rows.detach().float().contiguous().view(torch.int32)
        if bits.is_cpu:  # numpy needs no copy in 64 bits
            return torch.from_numpy(bits.numpy().sum(1, dtype=np.int64))
        return bits.sum(1, dtype=torch.int64)

    return mixed(torch.cat(by_blocks(sums, values)))


def mixed(numbers: Tensor) -> Tensor:
    """Fibonacci hashing: the high bits come out well mixed, those of a count evenly spread."""
    return (numbers * -7046029254386353131 >> 32) & 0xFFFFFFFF


def first_row(data: Data) -> int:
    """How many rows lie on the ranks before this one."""
    if not dist.active():
        return 0
    sizes = dist.gather(torch.tensor([sum(map(len, data))]))
    return int(sizes[: dist.rank()].sum())


def fold_of(batch: Batch, folds: int, share: int = 1) -> Tensor:
    """The fold of each row by its logits, 0 to folds - 1, (n,) int64; equal rows stay together.

    Rows of one group share the fold of the group's number. The logits are rounded to bfloat16
    first: their last digits depend on the device and the chunk a head computed them in, and must
    move no row.

    Args:
        batch: with logits.
        folds: how many there are.
        share: deal out about one row of so many; the others get numbers from `folds` on.
    """
    by_row = row_hash(stored_logits(batch).bfloat16())
    if batch.groups is None:
        return by_row * (folds * share) >> 32
    fold = mixed(batch.groups) * folds >> 32
    return fold.where(by_row * share >> 32 == 0, folds)


@dataclass(frozen=True, eq=False)
class Folds:
    """Data dealt out to folds, so that every row can be held out once.

    Iterating gives every batch with the fold of each of its rows, (n,) int64.

    Attributes:
        data: the batches.
        count: the number of folds.
        dealt: (rows of this process,) the fold of each row, in order; None to deal rows out as
            `fold_of` does.
    """

    data: Data
    count: int
    dealt: Tensor | None = None

    @classmethod
    def shuffled(
        cls,
        data: Data,
        count: int,
        rows: int,
        *,
        seed: int,
        first_row: int = 0,
        grouped: bool = False,
    ) -> Folds:
        """Folds of equal size by a seeded permutation of the rows, or of groups where there are.

        Args:
            data: this process's batches.
            count: the number of folds.
            rows: of all processes.
            seed: the number of folds joins it, so that folds and resamples are not drawn alike.
            first_row: the place of this process's first row among all of them.
            grouped: whether rows belong to groups.
        """
        own, numbers = torch.arange(first_row, rows), np.arange(rows)
        if grouped:
            parts = [batch.groups.cpu() for batch in data if batch.groups is not None]
            own = torch.cat([own[:0], *parts])
            numbers = np.unique(dist.gather(own).numpy())
        order = np.random.default_rng((seed, count)).permutation(len(numbers))
        fold = torch.empty(len(numbers), dtype=torch.int64)
        fold[torch.from_numpy(order)] = torch.arange(len(numbers)) % count
        return cls(data, count, fold[torch.searchsorted(torch.from_numpy(numbers), own)])

    def __iter__(self) -> Iterator[tuple[Batch, Tensor]]:
        row = 0
        for batch in self.data:
            if self.dealt is None:
                yield batch, fold_of(batch, self.count)
            else:
                yield batch, self.dealt[row : row + len(batch)].to(batch.labels.device)
            row += len(batch)

    def only(self, fold: int) -> Data:
        """The rows of one fold, as a view: no more than a batch of them is copied."""
        return _Part(self, fold, held=True)

    def without(self, fold: int) -> Data:
        """The rows of all other folds, as a view."""
        return _Part(self, fold, held=False)

    def sizes(self) -> list[int]:
        """Rows per fold, of all processes."""
        counts = (torch.bincount(fold, minlength=self.count) for _, fold in self)
        return [int(size) for size in dist.summed(counts, self.count)]


@dataclass(frozen=True, eq=False)
class _Part:
    """The rows of one fold, or those of all others."""

    folds: Folds
    fold: int
    held: bool

    def __iter__(self) -> Iterator[Batch]:
        for batch, fold in self.folds:
            yield batch.rows((fold == self.fold) == self.held)


def hashed_sample(
    data: Data, most: int, *, width: int, classes: int = 0, device: torch.device | None = None
) -> Batch:
    """The rows with the lowest hashes of their features, at most so many, in the order of these.

    Every process gets the same rows in the same order, so that what is computed from them needs no
    reduction and comes out equal to the bit. One pass; besides the sample one chunk is held.

    Args:
        data: batches with features, and with logits where classes are asked for.
        most: rows to keep.
        width: features per row, which a process without rows cannot know.
        classes: logits per row; 0 to leave them out.
        device: where a process without rows puts the result.

    Returns:
        Features in float32, logits in float64 or None, labels.
    """

    def lowest(batch: Batch) -> Batch:
        """By hash, then by label: rows alike in both are taken for copies."""
        assert batch.features is not None
        labels = batch.labels if batch.labels.ndim == 1 else batch.labels.sum(1)
        by_label = labels.argsort(stable=True)
        order = by_label[row_hash(batch.features)[by_label].argsort(stable=True)]
        return batch.rows(order[:most])  # copies, so that the chunk can go

    pool = unchecked(
        torch.zeros(0, classes, dtype=torch.float64, device=device) if classes else None,
        torch.zeros(0, dtype=torch.int64, device=device),
        torch.zeros(0, width, device=device),
    )
    for batch in data:
        if len(batch):
            assert batch.features is not None
            logits = stored_logits(batch).double() if classes else None
            part = lowest(unchecked(logits, batch.labels.long(), batch.features.float()))
            pool = lowest(joined([pool.to(part.labels.device), part]))
    parts = (pool.logits, pool.labels, pool.features)
    logits, labels, features = (None if part is None else dist.gather(part) for part in parts)
    assert labels is not None
    return lowest(unchecked(logits, labels, features))


DROPPED = 16  # bits of a float32 that are not looked at
CELLS = 2 ** (31 - DROPPED)


# Quantiles of sizes from a stream: every |x| is counted by the leading bits of its float32. Sign,
# exponent and seven bits of the fraction, as bfloat16 has them: counters of a fixed number whatever
# the data, and quantiles to within 1 / 128 of their value. Counts of parts add up.


def size_counts(values: Tensor) -> Tensor:
    """(2^15,) int64: how many of some values have each size."""

    def counts_of(rows: Tensor) -> Tensor:
        cell = rows.abs().float().contiguous().view(torch.int32).flatten() >> DROPPED
        if not cell.is_cuda:
            return torch.bincount(cell, minlength=CELLS)
        some = cell[cell > 0]  # half are 0 after a ReLU, and would wait for each other
        counts = torch.bincount(some, minlength=CELLS).cpu()
        counts[0] = len(cell) - len(some)
        return counts

    return torch.stack(by_blocks(counts_of, values.detach())).sum(0)


def size_quantile(counts: Tensor, share: float, *, zeros: bool = True) -> float:
    """The lower end of the cell in which this share of the values is reached; NaN for none.

    Args:
        counts: of the sizes.
        share: 0 to 1.
        zeros: whether values of 0 count, which are many after a ReLU.

    >>> size_quantile(size_counts(torch.tensor([0.0, -1.0, 1.0, 100.0])), 0.5)
    1.0
    """
    above = counts if zeros else torch.cat([counts.new_zeros(1), counts[1:]])
    total = int(above.sum())
    if total == 0:
        return math.nan
    wanted = min(max(math.ceil(share * total), 1), total)
    cell = int(torch.searchsorted(above.cumsum(0), wanted))
    return float((torch.tensor(cell, dtype=torch.int32) << DROPPED).view(torch.float32))
