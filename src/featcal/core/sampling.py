"""A bounded sample of rows, the same whatever their order, their batches and their processes."""

from __future__ import annotations

import torch
from torch import Tensor

from featcal.core import dist
from featcal.core.batch import Batch, Data
from featcal.core.folds import row_hash


def hashed_sample(
    data: Data, most: int, *, width: int, classes: int = 0, device: torch.device | None = None
) -> Batch:
    """The rows with the lowest hashes of their features, at most so many, in the order of these.

    Every process gets the same rows in the same order, so that what is computed from them needs no
    reduction and comes out equal to the bit. One pass; besides the sample one chunk is held.

    Args:
        data: batches with features, and with logits where classes are asked for.
        most: rows to keep.
        width: features a row, which a process without rows cannot know.
        classes: logits a row; 0 to leave them out.
        device: where a process without rows puts the result.

    Returns:
        Features in float32, logits in float64 or None, labels.
    """
    pool = _empty(width, classes, device)
    for batch in data:
        if len(batch):
            part = _picked(_plain(batch, classes), most)
            pool = _picked(_joined(pool.to(part.labels.device), part), most)
    parts = (pool.features, pool.labels, pool.logits)
    features, labels, logits = (None if part is None else dist.gather(part) for part in parts)
    assert labels is not None
    return _picked(Batch(logits, labels, features), most)


def _empty(width: int, classes: int, device: torch.device | None) -> Batch:
    logits = torch.zeros(0, classes, dtype=torch.float64, device=device) if classes else None
    labels = torch.zeros(0, dtype=torch.int64, device=device)
    return Batch(logits, labels, torch.zeros(0, width, device=device))


def _plain(batch: Batch, classes: int) -> Batch:
    """The batch in the types every process agrees on."""
    assert batch.features is not None
    logits = None
    if classes:
        assert batch.logits is not None
        logits = batch.logits.double()
    return Batch(logits, batch.labels.long(), batch.features.float())


def _joined(one: Batch, other: Batch) -> Batch:
    assert one.features is not None
    assert other.features is not None
    logits = None
    if one.logits is not None and other.logits is not None:
        logits = torch.cat([one.logits, other.logits])
    labels = torch.cat([one.labels, other.labels])
    return Batch(logits, labels, torch.cat([one.features, other.features]))


def _picked(batch: Batch, most: int) -> Batch:
    """The first rows in the order of their hashes; copies, so that the chunk can go."""
    return batch.rows(_order(batch)[:most])


def _order(batch: Batch) -> Tensor:
    """By hash, then by label: rows alike in both are taken for copies."""
    assert batch.features is not None
    by_label = batch.labels.argsort(stable=True)
    return by_label[row_hash(batch.features)[by_label].argsort(stable=True)]
