"""The logits at every threshold of a linear head, for little more than one product of the head.

From one threshold to the next lower one, all units above both move the logits together, along a
slope W sign(x); a unit between the two begins to move. Every unit begins once, so that a whole grid
costs what the few units above its lowest threshold cost, not a product a threshold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from featcal.core.batch import Head
from featcal.core.head import linear_view

MANY = 256  # classes; with fewer, products a threshold are as quick and round less


def directions(head: Head, features: Tensor, own: Tensor) -> Tensor | None:
    """(d, k): what each unit adds to the logits; None where products a threshold serve better."""
    layer = linear_view(head)
    if layer is None or own.shape[1] < MANY or features.dtype != own.dtype:
        return None
    weight = layer.weight.detach()
    return weight.T.contiguous() if weight.dtype == own.dtype else None


def logits_along(
    features: Tensor, own: Tensor, thresholds: Sequence[float], weights: Tensor
) -> Tensor:
    """(t, n, k): the logits at every threshold.

    Args:
        features: (n, d).
        own: (n, k) logits of the features as they are.
        thresholds: ascending.
        weights: (d, k) of the head.
    """
    found = own.new_empty(len(thresholds), *own.shape)
    row, unit = (features.abs() > thresholds[0]).nonzero(as_tuple=True)
    size, sign = features[row, unit].abs(), features[row, unit].sign()
    grid = torch.tensor(thresholds, dtype=size.dtype, device=size.device)
    begins = torch.searchsorted(grid, size) - 1  # the highest threshold that clips the unit
    order = begins.argsort(stable=True)  # rows and units stay in order, as sparse products need
    parts = torch.split(order, torch.bincount(begins, minlength=len(grid)).tolist())
    logits, slope, above = own, torch.zeros_like(own), math.inf
    for place in reversed(range(len(grid))):
        c, part = thresholds[place], parts[place]
        if math.isfinite(above):  # nothing is above infinity
            logits = torch.add(logits, slope, alpha=c - above)
        if len(part):
            where = torch.stack([row[part], unit[part]])
            logits = _plus(logits, where, sign[part] * (c - size[part]), weights)
            slope = _plus(slope, where, sign[part], weights)
        found[place], above = logits, c
    return found


def _plus(logits: Tensor, where: Tensor, amounts: Tensor, weights: Tensor) -> Tensor:
    """The logits with some units changed by some amounts."""
    shape = len(logits), len(weights)
    # In range and sorted by construction: nonzero() gave the places.
    with torch.sparse.check_sparse_tensor_invariants(enable=False):  # type: ignore[no-untyped-call]
        few = torch.sparse_coo_tensor(where, amounts, shape, is_coalesced=True)
    moved: Tensor = torch.sparse.addmm(logits, few, weights)
    return moved
