"""A sigmoid model met as two classes: its one logit z is the pair (0, z) of a softmax.

softmax(0, z) = (1 - sigmoid(z), sigmoid(z)), so that every method, metric and picture for k classes
serves a model with a single output, whose class 1 is the positive one. The shape alone tells such
a model: one value a row, (n,) or (n, 1).
"""

from __future__ import annotations

import torch
from torch import Tensor


def is_single(values: Tensor) -> bool:
    """Whether there is one value a row, as (n,) or (n, 1)."""
    return values.ndim == 1 or (values.ndim == 2 and values.shape[1] == 1)


def two_classes(logits: Tensor) -> Tensor:
    """(n,) or (n, 1) logits of class 1 -> (n, 2); logits of more classes stay as they are.

    >>> two_classes(torch.tensor([3.0])).tolist()
    [[0.0, 3.0]]
    """
    if not is_single(logits):
        return logits
    column = logits.reshape(-1, 1)
    return torch.cat([torch.zeros_like(column), column], 1)


def one_logit(logits: Tensor) -> Tensor:
    """(n, 2) -> (n, 1): the logit whose sigmoid is the probability of class 1."""
    return logits[:, 1:] - logits[:, :1]


def two_probs(probs: Tensor) -> Tensor:
    """(n,) or (n, 1) probabilities of class 1 -> (n, 2); those of more classes stay as they are.

    16-bit values come out in float32: 1 - p in 16 bits would lose the digits of a small p.
    """
    if not is_single(probs):
        return probs
    column = probs.reshape(-1, 1)
    column = column.float() if column.dtype.itemsize < 4 else column
    return torch.cat([1 - column, column], 1)


def zero_or_one(labels: Tensor) -> Tensor:
    """Labels as a binary loss takes them, (n,) or (n, 1), bool or float 0 and 1, as (n,) integers.

    Labels that are neither 0 nor 1 stay as they are, for the checks to refuse them.
    """
    if not is_single(labels):
        return labels
    flat = labels.reshape(-1)
    if flat.dtype == torch.bool or (flat.is_floating_point() and _binary(flat)):
        return flat.long()
    return flat


def _binary(labels: Tensor) -> bool:
    return bool(((labels == 0) | (labels == 1)).all())
