"""What a linear head gives away: the logits of many thresholds for the price of a few products.

With logits W x + b, the logits at c are W clamp(x, -c, c) + b, a piecewise linear function of c
whose kinks lie at the |x_j|.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from featcal.core.batch import KEEP_BYTES, Batch, Data, Head, stored_logits
from featcal.core.fitting import Counted, Problem
from featcal.core.head import linear_view

SMALL = 2**24  # n d k up to which the whole path is kept: 256 MiB in float64


def linear(head: Head | None) -> nn.Linear | None:
    """The plain linear layer a head consists of, in float32 or wider; None for any other head."""
    return linear_view(head.head if isinstance(head, Counted) else head)


@dataclass(frozen=True)
class _Near:
    """One batch around a threshold: its logits there, their slope, and the units in the window."""

    labels: Tensor  # (n,)
    logits: Tensor  # (n, k)
    slope: Tensor  # (n, k)
    row: Tensor  # (e,)
    unit: Tensor  # (e,)
    size: Tensor  # (e,)
    sign: Tensor  # (e,)


@final
class Window:
    """The exact logits of every threshold near c0, for one product of the head's size.

    Given the logits at c0, dz/dc = W s, with s = sign(x) where |x| > c0, moves all clipped units
    together; only the few units with |x| inside the window need a correction. NLL(c) is rough on
    the scale of single units, so that no smooth model of it finds its lowest point: looking at all
    of it does.
    """

    def __init__(
        self, problem: Problem, centre: float, at_centre: Data, *, low: float, high: float
    ) -> None:
        layer = linear(problem.head)
        assert layer is not None
        self.centre, self.directions = centre, layer.weight.detach().T.contiguous()
        self.parts = [
            _near(batch, stored_logits(there), problem.head, (low, centre, high))
            for batch, there in zip(problem.source, at_centre, strict=True)
        ]

    @staticmethod
    def fits(problem: Problem) -> bool:
        """Whether the head is linear and two logits a row and class fit into memory."""
        facts = problem.facts
        small = facts.rows * facts.classes * 8 <= KEEP_BYTES
        return linear(problem.head) is not None and small

    def at(self, threshold: float) -> list[Batch]:
        """The batches with the logits of this threshold."""
        return [Batch(self._logits(part, threshold), part.labels) for part in self.parts]

    def _logits(self, part: _Near, threshold: float) -> Tensor:
        logits = torch.add(part.logits, part.slope, alpha=threshold - self.centre)
        # A unit between the two thresholds stays itself instead of moving with the clipped ones.
        if threshold > self.centre:
            moved = ((part.size > self.centre) & (part.size < threshold)).nonzero()[:, 0]
            amount = part.sign[moved] * (part.size[moved] - threshold)
        else:
            moved = ((part.size > threshold) & (part.size <= self.centre)).nonzero()[:, 0]
            amount = part.sign[moved] * (threshold - part.size[moved])
        where = torch.stack([part.row[moved], part.unit[moved]])
        shape = (len(logits), len(self.directions))
        # Sorted and in range by construction: nonzero() gave the indices.
        with torch.sparse.check_sparse_tensor_invariants(enable=False):  # type: ignore[no-untyped-call]
            few = torch.sparse_coo_tensor(where, amount, shape, is_coalesced=True)
        corrected: Tensor = torch.sparse.addmm(logits, few, self.directions)
        return corrected


def _near(
    batch: Batch, logits: Tensor, head: Head | None, places: tuple[float, float, float]
) -> _Near:
    low, centre, high = places
    layer = linear(head)
    assert layer is not None
    assert batch.features is not None
    assert isinstance(head, Counted)
    weight = layer.weight.detach()
    features = batch.features.to(weight.dtype)
    slope = (features - features.clamp(-centre, centre)).sign_() @ weight.T
    head.rows += len(features)  # the slope is a product of the head's size
    size = features.abs()
    row, unit = ((size - (low + high) / 2).abs_() < (high - low) / 2).nonzero(as_tuple=True)
    sign = features[row, unit].sign()
    return _Near(batch.labels, logits, slope, row, unit, size[row, unit], sign)


@final
class Path:
    """The logits of a linear head at any threshold, by sums along each row sorted by size.

    For data so small that the sums fit into memory; building them costs one pass of the head.
    """

    def __init__(self, data: Data, head: Counted) -> None:
        layer = linear(head)
        assert layer is not None
        weight = layer.weight.detach()
        self.parts = [(batch.labels, *_prefix_sums(batch, weight)) for batch in data]
        self.bias = 0.0 if layer.bias is None else layer.bias.detach()
        head.rows += sum(len(part[0]) for part in self.parts)

    @staticmethod
    def fits(problem: Problem) -> bool:
        """Whether the head is linear and the data small."""
        facts = problem.facts
        size = facts.rows * facts.classes * facts.width
        return linear(problem.head) is not None and size <= SMALL

    def at(self, threshold: float) -> list[Batch]:
        """The batches with the logits of this threshold."""
        return [Batch(self._logits(threshold, *sums), labels) for labels, *sums in self.parts]

    def _logits(self, threshold: float, size: Tensor, whole: Tensor, cut: Tensor) -> Tensor:
        row = torch.arange(len(size), device=size.device)
        edge = torch.full((len(size), 1), threshold, dtype=size.dtype, device=size.device)
        kept = torch.searchsorted(size, edge, right=True)[:, 0]
        beyond = 0.0 if threshold == float("inf") else threshold * cut[row, kept]
        return (whole[row, kept] + beyond + self.bias).float()


def _prefix_sums(batch: Batch, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sorted sizes (n, d); sums of units kept whole and of directions cut, both (n, d + 1, k).

    In float64: one huge activation must not swallow the digits of the others.
    """
    assert batch.features is not None
    features = batch.features.double()
    size, order = features.abs().sort(1)
    signed = features.gather(1, order)
    directions = weight.double().T[order]  # (n, d, k)
    none = directions.new_zeros(len(features), 1, weight.shape[0])
    whole = torch.cat([none, (signed[..., None] * directions).cumsum(1)], 1)
    steps = (signed.sign()[..., None] * directions).flip(1).cumsum(1).flip(1)
    return size, whole, torch.cat([steps, none], 1)
