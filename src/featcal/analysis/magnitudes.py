"""Quantiles of sizes from a stream: every |x| is counted by the leading bits of its float32.

Sign, exponent and seven bits of the fraction, as bfloat16 has them: 2^15 counters whatever the
data, exact counts, and quantiles to within 1 / 128 of their value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

DROPPED = 16  # bits of a float32 that are not looked at
CELLS = 2 ** (31 - DROPPED)


@final
@dataclass(frozen=True, eq=False)
class Magnitudes:
    """How many values lie in each cell: (2^15,) int64; summaries of parts add up."""

    counts: Tensor

    @classmethod
    def of(cls, values: Tensor) -> Magnitudes:
        """The sizes of any number of values.

        >>> Magnitudes.of(torch.tensor([0.0, -1.0, 1.0, 100.0])).quantile(0.5)
        1.0
        """
        bits = values.detach().abs().float().contiguous().view(torch.int32).flatten()
        return cls(torch.bincount(bits >> DROPPED, minlength=CELLS).cpu())

    @classmethod
    def none(cls) -> Magnitudes:
        """Of no values."""
        return cls(torch.zeros(CELLS, dtype=torch.int64))

    def __add__(self, other: Magnitudes) -> Magnitudes:
        return Magnitudes(self.counts + other.counts)

    def quantile(self, share: float, *, zeros: bool = True) -> float:
        """The lower end of the cell in which this share of the values is reached; NaN for none.

        Args:
            share: 0 to 1.
            zeros: whether values of 0 count, which are many after a ReLU.
        """
        counts = (
            self.counts if zeros else torch.cat([torch.zeros(1).to(self.counts), self.counts[1:]])
        )
        total = int(counts.sum())
        if total == 0:
            return math.nan
        wanted = min(max(math.ceil(share * total), 1), total)
        cell = int(torch.searchsorted(counts.cumsum(0), wanted))
        return float((torch.tensor(cell, dtype=torch.int32) << DROPPED).view(torch.float32))
