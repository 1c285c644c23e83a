"""From (confidence, proximity) to the chance of being right: two densities, or bins within bins.

Both coordinates are kept as their distance from 1, where most rows lie: a number close to 0 has
digits left in any precision, a number close to 1 has not.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BLOCK = 1024  # kernels at a time: the loop's length is fixed, so that export unrolls it
NARROWEST = 1e-3  # of the kernels, in units of probability: all rows may be alike
FLOOR = 1e-10  # of the published denominator


def widths(spots: Tensor, everyone: Tensor) -> Tensor:
    """Bandwidths (2,) by the normal reference rule, 1.06 s n^(-1/6).

    Args:
        spots: (n, 2), the rows of one density.
        everyone: (m, 2), all rows, whose spread stands in where there are fewer than two.
    """
    values = spots if len(spots) > 1 else everyone
    spread = values.std(0, correction=0) if len(values) else values.new_zeros(2)
    rule: Tensor = 1.06 * spread * float(max(len(spots), 1)) ** (-1 / 6)
    return rule.clamp(min=NARROWEST)


def kernel_sums(at: Tensor, spots: Tensor, width: Tensor, *, mirror: bool) -> Tensor:
    """The sum of the kernels around the spots, (n,): their number times their density.

    Far from every spot it is 0; both forms below have a floor that holds then.

    Args:
        at: (n, 2), where; the first coordinate is 0 at full confidence.
        spots: (m, 2).
        width: (2,).
        mirror: reflect the kernels at full confidence, beyond which no row can lie.
    """
    total = torch.zeros_like(at[:, 0])
    for block in torch.split(spots.to(at.dtype), BLOCK):
        across = ((at[:, 1:] - block[:, 1]) / width[1]).square()  # (n, b)
        for side in (1, -1) if mirror else (1,):
            along = ((at[:, :1] - side * block[:, 0]) / width[0]).square()
            total = total + (-(along + across) / 2).exp().sum(1)
    return total / _area(width)


def _area(width: Tensor) -> Tensor:
    """The inverse of a kernel's height at its centre."""
    return 2 * math.pi * width[0] * width[1]


def density_ratio(
    at: Tensor, right: Tensor, wrong: Tensor, width: Tensor, *, mirror: bool
) -> Tensor:
    """The chance of being right, (n,), by the densities of right and of wrong rows.

    The row's own confidence counts as one further row that lies right here, under a kernel as wide
    as both densities' on average. Where rows are many it changes nothing; where there are none, the
    confidence stays what it was.

    Args:
        at: (n, 2), where.
        right: (m, 2), the rows that were right; wrong likewise.
        wrong: (l, 2).
        width: (2, 2), bandwidths of the one and of the other.
        mirror: reflect at full confidence.
    """
    height = 1 / _area(width.prod(0).sqrt())  # one for both, or the wider density would lose
    hits = kernel_sums(at, right, width[0], mirror=mirror) + (1 - at[:, 0]) * height
    misses = kernel_sums(at, wrong, width[1], mirror=mirror) + at[:, 0] * height
    return hits / (hits + misses)


def published_ratio(at: Tensor, right: Tensor, wrong: Tensor, width: Tensor) -> Tensor:
    """The ratio as published: no reflection, and 0 far from every row that was right."""
    hits = kernel_sums(at, right, width[0], mirror=False)
    misses = kernel_sums(at, wrong, width[1], mirror=False)
    floor = max(FLOOR * right.shape[0], torch.finfo(at.dtype).tiny)
    return hits / (hits + misses).clamp(min=floor)


def binned(at: Tensor, far_edges: Tensor, edges: Tensor, values: Tensor) -> Tensor:
    """The stored value of each row's bin, (n,).

    Args:
        at: (n, 2).
        far_edges: (s - 1,), between slices of proximity.
        edges: (s, m - 1), between bins of confidence within each slice.
        values: (s, m).
    """
    slice_of = (at[:, 1:] > far_edges.to(at.dtype)).sum(1)
    bin_of = (at[:, :1] > edges.to(at.dtype)[slice_of]).sum(1)
    return values.to(at.dtype)[slice_of, bin_of]


def learn_bins(at: Tensor, right: Tensor, slices: int, bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """Edges and values of bins of equal numbers of rows: see `binned`.

    A bin's value is its share of right rows, its own mean confidence counted as one row more.
    """
    far_edges = inner_quantiles(at[:, 1], slices)
    slice_of = (at[:, 1:] > far_edges).sum(1)
    parts = [at[slice_of == part, 0] for part in range(slices)]
    edges = torch.stack([inner_quantiles(part if len(part) else at[:, 0], bins) for part in parts])
    bin_of = slice_of * bins + (at[:, :1] > edges[slice_of]).sum(1)
    columns = torch.stack([torch.ones_like(at[:, 0]), 1 - at[:, 0], right.to(at.dtype)], 1)
    sums = at.new_zeros(slices * bins, 3).index_add_(0, bin_of, columns)
    rows, sure, hits = sums.unbind(1)
    # An empty bin, as equal confidences leave them, is never asked for a fit row's value.
    mean = torch.where(rows > 0, sure / rows.clamp(min=1), (1 - at[:, 0]).mean())
    return far_edges, edges, ((hits + mean) / (rows + 1)).view(slices, bins)


def inner_quantiles(values: Tensor, parts: int) -> Tensor:
    """The values that cut into parts of equal size, (parts - 1,)."""
    levels = torch.arange(1, parts, dtype=values.dtype, device=values.device) / parts
    return torch.quantile(values, levels)
