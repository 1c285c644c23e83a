"""Rows told apart by their content, so that neither order nor sharding changes who goes where."""

import torch
from torch import Tensor

from featcal.core.batch import Batch, stored_logits


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
