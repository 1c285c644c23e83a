"""Distances to the nearest of many stored rows, in blocks of bounded memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 1024  # stored rows a product: the loop's length is fixed, so that export unrolls it


def on_sphere(features: Tensor) -> Tensor:
    """Rows (n, d) of length 1, in float32 or wider; rows of zeros stay as they are."""
    values = features if features.dtype == torch.float64 else features.float()
    # Scaled first: squares of very large or very small values leave the range of float32.
    largest = values.abs().amax(1, keepdim=True)
    tiny = torch.finfo(values.dtype).tiny
    return F.normalize(values / largest.clamp(min=tiny), dim=1)


def nearest(points: Tensor, stored: Tensor, count: int) -> Tensor:
    """Squared distances of points to the nearest of the stored rows, ascending.

    Args:
        points: (n, d).
        stored: (r, d), with r >= count.
        count: how many of the nearest.

    Returns:
        (n, count).
    """
    own = points.square().sum(1, keepdim=True)  # (n, 1)
    best = points.new_zeros(points.shape[0], 0)
    for block in torch.split(stored.to(points.dtype), BLOCK):
        squared = own + block.square().sum(1) - 2 * points @ block.T
        both = torch.cat([best, squared.clamp(min=0)], 1)
        best = both.topk(min(count, both.shape[1]), dim=1, largest=False).values
    return best
