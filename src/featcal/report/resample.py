"""Resamples: the same rows drawn again with replacement, told by how often each row is drawn.

Efron, "Bootstrap methods: another look at the jackknife", 1979. A sum over a resample is then a
product of counts and values, and no row is ever copied. Recipes share the counts, so that the
difference of two replicates is a paired one.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from featcal.core.errors import InputError

FEWEST, MOST = 100, 10_000  # fewer leave too little beyond the 2.5 % quantile, more move no digit
MATRIX = 2**20  # numbers of one factor of a product: 8 MiB


def checked_resamples(resamples: int) -> int:
    """The number of resamples: 0 for none, or 100 to 10,000."""
    number = _integer(resamples)
    if number != 0 and not FEWEST <= number <= MOST:
        raise InputError(f"resamples is {resamples!r}: pass 0 for none, or {FEWEST} to {MOST}")
    return number


def checked_seed(seed: int) -> int:
    """The seed, an integer of at least 0."""
    if _integer(seed) < 0:
        raise InputError(f"seed is {seed!r}: pass an integer of at least 0")
    return _integer(seed)


def _integer(value: int) -> int:
    try:
        return -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return -1


@final
@dataclass(frozen=True, eq=False)
class Resamples:
    """How often each of n rows is drawn in each of b resamples: (n, b) uint8, columns sum to n.

    Row i is row i of the data, counted over the ranks in their order.
    """

    counts: Tensor

    @classmethod
    def draw(cls, rows: int, resamples: int, seed: int = 0) -> Resamples:
        """The resamples of a seed: they depend on nothing else, and every process draws the same.

        >>> Resamples.draw(5, 100).counts.sum(0).unique().tolist()
        [5]
        """
        draw = np.random.default_rng(checked_seed(seed))
        # A byte is enough: a row drawn 256 times is rarer than one resample in 10^500.
        counts = np.empty((checked_resamples(resamples), rows), dtype=np.uint8)
        for counted in counts:
            counted[:] = np.bincount(draw.integers(0, rows, rows), minlength=rows)
        return cls(torch.from_numpy(counts.T.copy()))


def weighted_sums(values: Tensor, counts: Tensor) -> Tensor:
    """The sums of (v, n) values over the resamples of (n, b) counts: (v, b) float64."""
    sums = torch.zeros(len(values), counts.shape[1], dtype=torch.float64)
    for rows in row_blocks(len(counts), counts.shape[1]):
        sums.addmm_(values[:, rows], counts[rows].double())
    return sums


def row_blocks(rows: int, width: int) -> Iterator[slice]:
    """Slices of the rows, such that `width` numbers a row make a matrix of moderate size."""
    step = max(1, MATRIX // width)
    for start in range(0, rows, step):
        yield slice(start, start + step)
