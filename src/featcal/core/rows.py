"""Arithmetic on rows of logits: bins of confidence, the predicted class, the NLL in 1 / T."""

from __future__ import annotations

import torch
from torch import Tensor

NUDGE = 2.0**-20  # the relative distance by which a prediction is kept ahead of the next class
BLOCK = 2**19  # numbers that go through all the steps of a curve while they are in the cache


def bin_edges(bins: int, dtype: torch.dtype) -> Tensor:
    """The m + 1 edges of m equal-width bins on [0, 1], in the precision they are compared in.

    A float32 confidence is compared with float32 edges: read as float64, float32(0.2) lies above
    0.2 and would change bins.
    """
    return torch.linspace(0, 1, bins + 1, dtype=dtype)


def bin_index(confidence: Tensor, bins: int) -> Tensor:
    """The bin of each confidence, 0 to m - 1: right-closed, 0 in the first bin, 1 in the last.

    One binning for every number and every diagram.

    >>> bin_index(torch.tensor([0.0, 0.2, 0.2000001, 1.0]), 5).tolist()
    [0, 0, 1, 4]
    """
    inner = bin_edges(bins, confidence.dtype)[1:-1].to(confidence.device)
    return torch.bucketize(confidence, inner)


def bin_sums(confidence: Tensor, correct: Tensor, bins: int) -> Tensor:
    """Per bin the count, the summed confidence and the summed correctness: (3, m) float64."""
    index = bin_index(confidence, bins)
    weights = torch.stack([torch.ones_like(confidence), confidence, correct.to(confidence.dtype)])
    sums = torch.zeros(3, bins, dtype=torch.float64, device=confidence.device)
    return sums.index_add_(1, index, weights.double())


def predicted(values: Tensor) -> Tensor:
    """The class of the largest value of each row (n, k), the first of equal ones: (n,) int64.

    For measuring, not for a forward pass: on a CPU numpy finds it several times faster than torch.
    """
    if values.device.type != "cpu" or values.dtype.itemsize < 4 or values.requires_grad:
        return values.argmax(1)
    return torch.from_numpy(values.numpy().argmax(1))


def with_confidence(logits: Tensor, confidence: Tensor) -> Tensor:
    """Log-probabilities (n, k) whose predicted class has the given probability (n,).

    The other classes share what is left as they did before. The prediction stays: a confidence that
    would fall below the runner-up's new share ends just above it, at s / (1 + s) with s the
    runner-up's share among the others. Confidences of 0 and 1 end just inside.
    """
    if logits.shape[1] == 1:
        return logits
    top = logits.argmax(1, keepdim=True)
    others = logits.scatter(1, top, -torch.inf)
    share = others - others.logsumexp(1, keepdim=True)  # log, (n, k); exact where p_top rounds to 1
    lowest = share.amax(1).sigmoid() * (1 + NUDGE)
    highest = 1 - torch.finfo(logits.dtype).eps
    sure = torch.maximum(confidence.to(logits.dtype), lowest).clamp(max=highest)
    mapped = (share + torch.log1p(-sure)[:, None]).scatter(1, top, sure.log()[:, None])
    return keep_prediction(mapped, logits)


def keep_prediction(mapped: Tensor, logits: Tensor) -> Tensor:
    """The mapped logits with the prediction of the given ones.

    For maps that keep the order of a row in exact arithmetic: rounding may tie or swap neighbours.
    Where another class is predicted then, the one of the given logits is put just ahead of all.
    """
    if logits.shape[1] == 1:
        return mapped
    top = logits.argmax(1, keepdim=True)
    best = mapped.amax(1, keepdim=True)
    ahead = best + NUDGE * best.abs().clamp(min=NUDGE)
    same = mapped.argmax(1, keepdim=True) == top
    return mapped.scatter(1, top, torch.where(same, best, ahead))


def row_curves(logits: Tensor, labels: Tensor, inverse: Tensor | float) -> Tensor:
    """Value, slope and curvature of each row's NLL in its inverse temperature b = 1/T: (3, n).

    Args:
        logits: (n, k).
        labels: (n,).
        inverse: b, one for all or (n,).
    """
    block = max(BLOCK // max(logits.shape[1], 1), 1)
    if len(logits) > block:
        parts = [slice(start, start + block) for start in range(0, len(logits), block)]
        each = [inverse[part] if isinstance(inverse, Tensor) else inverse for part in parts]
        pairs = zip(parts, each, strict=True)
        return torch.cat([row_curves(logits[part], labels[part], b) for part, b in pairs], 1)
    shifted = logits - logits.amax(1, keepdim=True)  # (n, k), <= 0
    true = shifted.gather(1, labels[:, None])[:, 0]
    weight = (shifted * (inverse[:, None] if isinstance(inverse, Tensor) else inverse)).exp_()
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
