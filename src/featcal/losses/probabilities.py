"""What every loss computes first, in forms whose gradients stay finite when p is 0 or 1."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

# torch leaves rows out whose label is `ignore_index`, -100 by default: here no label means that.
NO_LABEL = -(2**62)
# Below this a square counts as 0: the root of 1e-12 is the rounding of a float32 near 1.
FLAT = 1e-12


def widened(logits: Tensor) -> Tensor:
    """float32 logits of 16-bit ones; others as they are."""
    return logits.float() if logits.dtype.itemsize < 4 else logits


def label_logs(logits: Tensor, labels: Tensor) -> Tensor:
    """The log p of each row's own class: (n, k), (n,) -> (n,), at most 0."""
    return -F.cross_entropy(logits, labels, reduction="none", ignore_index=NO_LABEL)


def target_logs(logits: Tensor, labels: Tensor) -> Tensor:
    """sum_k t_k log q_k of each row: (n,); log p where labels are class numbers."""
    if not labels.is_floating_point():
        return label_logs(logits, labels)
    return (labels.to(logits.dtype) * logits.log_softmax(1)).sum(1)


def log_rest(log_p: Tensor) -> Tensor:
    """log(1 - p) without cancellation: log1p(-p) for small p, log(-expm1(log p)) for large.

    At p = 1 the slope of log(1 - p) is infinite and would meet a factor of 0: NaN. The smallest
    normal number stands in for 1 - p there, and no gradient flows.
    """
    half = -math.log(2)
    small = torch.log1p(-log_p.clamp(max=half).exp())
    large = (-torch.expm1(log_p)).clamp_min(torch.finfo(log_p.dtype).tiny).log()
    return torch.where(log_p < half, small, large)


def top_label(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The confidence of each row, and 1 where its prediction is right, else 0: (n,) each.

    Only the confidence has a gradient: being right is constant but for jumps.
    """
    confidence = logits.softmax(1).amax(1)
    return confidence, (logits.detach().argmax(1) == labels).to(logits.dtype)


def root(square: Tensor) -> Tensor:
    """The square root where it has a finite slope, and 0 with no slope from `FLAT` down.

    The squares here are squared norms of residuals. At 0 a norm has a kink, where 0 is a
    subgradient; the chain rule through sqrt would give 0 / 0 instead.
    """
    return torch.where(square > FLAT, square.clamp_min(FLAT).sqrt(), 0.0)
