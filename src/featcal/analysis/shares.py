"""Intervals of a share: k of n rows."""

from __future__ import annotations

import torch
from torch import Tensor

Z = 1.959963984540054  # of the standard normal, 95 % lie within


def wilson(hits: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Both ends of Wilson's 95 % interval of a share (1927), float64; NaN for no rows.

    Unlike the plain normal interval it has a width where all rows or none are hits.

    >>> low, high = wilson(torch.tensor([10]), torch.tensor([10]))
    >>> round(float(low), 3), float(high)
    (0.722, 1.0)
    """
    n, share = rows.double(), hits.double() / rows.double()
    middle = (share + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z * (share * (1 - share) / n + Z**2 / (4 * n**2)).sqrt() / (1 + Z**2 / n)
    # Rounding must not put an end beyond the share itself, which may be 0 or 1.
    return torch.minimum(middle - half, share).clamp(min=0), torch.maximum(middle + half, share)
