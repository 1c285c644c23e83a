"""Each row's NLL as a curve in its inverse temperature b: value, slope and curvature."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 2**19  # numbers that go through all the steps of a curve while they are in the cache


def row_curves(logits: Tensor, labels: Tensor, inverse: Tensor | float) -> Tensor:
    """Value, slope and curvature in b of each row's NLL: (3, n).

    Args:
        logits: (n, k).
        labels: (n,).
        inverse: b, one for all or (n,).
    """
    block = max(BLOCK // max(logits.shape[1], 1), 1)
    if len(logits) <= block:
        return _curves(logits, labels, inverse)
    parts = [slice(start, start + block) for start in range(0, len(logits), block)]
    each = [inverse[part] if isinstance(inverse, Tensor) else inverse for part in parts]
    curves = [_curves(logits[part], labels[part], b) for part, b in zip(parts, each, strict=True)]
    return torch.cat(curves, 1)


def _curves(logits: Tensor, labels: Tensor, inverse: Tensor | float) -> Tensor:
    rowwise = inverse[:, None] if isinstance(inverse, Tensor) else inverse
    shifted = logits - logits.amax(1, keepdim=True)  # (n, k), <= 0
    true = shifted.gather(1, labels[:, None])[:, 0]
    weight = (shifted * rowwise).exp_()
    total = weight.sum(1)
    first = torch.linalg.vecdot(weight, shifted) / total  # mean of the shifted logits under p
    second = torch.linalg.vecdot(weight, shifted.square_()) / total
    value = total.log() - inverse * true
    return torch.stack([value, first - true, (second - first.square()).clamp_(min=0)])


def row_nll(logits: Tensor, labels: Tensor, inverse: Tensor) -> Tensor:
    """Each row's NLL at its own b, (n,), differentiable in b alone.

    The gradient needs the slope and nothing else, so no graph over n x k numbers is kept.
    """
    with torch.no_grad():
        value, slope, _ = row_curves(logits, labels, inverse)
    surrogate: Tensor = value + slope * (inverse - inverse.detach())
    return surrogate
