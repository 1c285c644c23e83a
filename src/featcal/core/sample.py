"""A bounded sample of rows, the same whatever their order, their batches and their processes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from featcal.core import dist
from featcal.core.batch import Batch, Data, stored_logits

# --- Rows told apart by their content, so that neither order nor sharding changes who goes where.


def row_hash(values: Tensor) -> Tensor:
    """A well mixed number from 0 to 2^32 - 1 for each row of values (n, ...), (n,) int64."""
    bits = values.float().contiguous().view(torch.int32).sum(1, dtype=torch.int64)
    mixed = bits * -7046029254386353131  # Fibonacci hashing: the high bits come out well mixed
    return (mixed >> 32) & 0xFFFFFFFF


def fold_of(batch: Batch, folds: int) -> Tensor:
    """The fold of each row by its logits, 0 to folds - 1, (n,) int64; equal rows stay together.

    The logits are rounded to bfloat16 first: their last digits depend on the device and the chunk
    a head computed them in, and must move no row.
    """
    return row_hash(stored_logits(batch).bfloat16()) * folds >> 32


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


# --- Distances to the nearest of many stored rows, in blocks of bounded memory.

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
