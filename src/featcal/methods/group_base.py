"""The calibrator of each group: a temperature, or one mixed with the plain and uniform outputs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from featcal.core import dist
from featcal.core.batch import Batch, Data, stored_logits
from featcal.core.curves import row_curves
from featcal.core.folds import row_hash
from featcal.core.loss import brier
from featcal.core.mixture import Array, likeliest_weights, simplex_minimum
from featcal.core.progress import track
from featcal.core.tempering import Shrinkage, temper, temper_cells

SPREAD = 0.5  # how far a group's 1 / T is expected to lie from the common one, in parts of it


@dataclass(frozen=True)
class Placed:
    """Data seen through one partition: the group of each row stands where the features stood.

    Attributes:
        data: the batches, with logits.
        groups: (n, u) of each batch, in the order of the batches.
        used: (n,) of each batch: which rows count.
        partition: which of the u.
    """

    data: Data
    groups: list[Tensor]
    used: list[Tensor]
    partition: int

    def __iter__(self) -> Iterator[Batch]:
        for batch, groups, used in zip(self.data, self.groups, self.used, strict=True):
            group = groups[used, self.partition].long()
            yield Batch(stored_logits(batch)[used], batch.labels[used], group)


@dataclass(frozen=True)
class Bases:
    """Every group's calibrator.

    Attributes:
        inverse: 1 / T, (u, g).
        weights: of softmax(z / T), softmax(z) and 1 / k, (u, g, 3); None for the first alone.
        left_out: groups that have the common temperature for want of rows or classes.
    """

    inverse: Tensor
    weights: Tensor | None
    left_out: int


def half_of(batch: Batch) -> Tensor:
    """0 or 1 for each row, (n,), by its features: equal rows stay together.

    The lowest bit, because a sample of rows is picked by the highest ones.
    """
    assert batch.features is not None
    return row_hash(batch.features) & 1


def fit_bases(
    views: list[Placed], form: str, groups: int, classes: int, common: float, min_rows: int
) -> Bases:
    """Fits the groups of every partition.

    Args:
        views: the data through each partition.
        form: "temperature", "ensemble" or "published".
        groups: g.
        classes: k.
        common: 1 / T of all rows.
        min_rows: groups of fewer rows have the common T.
    """
    inverse, weights, left_out = [], [], 0
    mixed: Array | None
    for view in track("group: temperatures", views):
        counts = class_counts(view, groups, classes)
        usable = (counts.sum(1) >= min_rows) & ((counts > 0).sum(1) > 1)
        if form == "published":
            usable = counts.sum(1) > 0
            own, mixed = published_base(view, groups, common)
        else:
            own = group_inverses(view, groups, common, usable)
            mixed = group_weights(view, own, counts, usable) if form == "ensemble" else None
        inverse.append(torch.from_numpy(own))
        weights.append(None if mixed is None else torch.from_numpy(mixed))
        left_out += int((~usable).sum())
    known = [part for part in weights if part is not None]
    return Bases(torch.stack(inverse), torch.stack(known) if known else None, left_out)


def group_of(batch: Batch) -> Tensor:
    """The group of each row of placed data, (n,)."""
    assert batch.features is not None
    return batch.features


def one_group(data: Data, group: int) -> list[Batch]:
    """The rows of one group, held in memory."""
    return [batch.rows(group_of(batch) == group) for batch in data]


def class_counts(data: Data, groups: int, classes: int) -> Tensor:
    """Rows of each group and class, (g, k) int64."""
    counts = torch.zeros(groups * classes, dtype=torch.int64)
    for batch in data:
        cell = group_of(batch) * classes + batch.labels
        counts += torch.bincount(cell, minlength=len(counts)).cpu()
    return dist.total(counts).view(groups, classes)


def group_inverses(data: Data, groups: int, common: float, usable: Tensor) -> Array:
    """1 / T of each group, pulled towards the common one; that itself where a group is unusable."""
    found = temper_cells(data, group_of, groups, Shrinkage(common, SPREAD))
    if found is None:
        return np.full(groups, common)
    return np.where(usable.numpy(), found.inverse, common)


def group_weights(data: Data, inverse: Array, counts: Tensor, usable: Tensor) -> Array:
    """Weights of softmax(z / T), softmax(z) and 1 / k in each group, (g, 3), by the NLL."""
    parts, group = _true_class_parts(data, inverse, counts.shape[1])
    weights = np.tile([1.0, 0.0, 0.0], (len(inverse), 1))
    for which in usable.nonzero().flatten().tolist():
        weights[which] = likeliest_weights(parts[group == which], int(counts[which].sum()))[1]
    return weights


def _true_class_parts(data: Data, inverse: Array, classes: int) -> tuple[Tensor, Tensor]:
    """The log p of the label under each part, (n, 3) float64, and the group of each row, (n,)."""
    parts, groups = [torch.zeros(0, 3, dtype=torch.float64)], [torch.zeros(0, dtype=torch.int64)]
    for batch in data:
        logits, group = stored_logits(batch).double(), group_of(batch)
        own = torch.from_numpy(inverse).to(logits.device)[group]
        scaled, plain = (row_curves(logits, batch.labels, b)[0] for b in (own, 1.0))
        uniform = torch.full_like(plain, math.log(classes))
        parts.append(-torch.stack([scaled, plain, uniform], 1).cpu())
        groups.append(group.cpu())
    return torch.cat(parts), torch.cat(groups)


def published_base(data: Data, groups: int, common: float) -> tuple[Array, Array]:
    """T within 0.05 and 5 and then the weights of each group, both by the squared error.

    The weights are the exact minimum; the published solver often stays at its start, (1, 0, 0). A
    group without rows gets the common temperature: there is nothing to fit.
    """
    inverse, weights = np.full(groups, common), np.tile([1.0, 0.0, 0.0], (groups, 1))
    for group in range(groups):
        rows = one_group(data, group)
        found = temper(rows, brier)
        if found is not None:
            inverse[group] = min(max(float(found.inverse[0]), 1 / 5), 1 / 0.05)
            weights[group] = _least_squares(rows, inverse[group])
    return inverse, weights


def _least_squares(data: Data, inverse: float) -> Array:
    """The weights on the simplex with the lowest squared error."""
    sums = torch.zeros(3, 4, dtype=torch.float64)
    for batch in data:
        logits = stored_logits(batch).double()
        even = torch.full_like(logits, 1 / logits.shape[1])
        parts = torch.stack([(logits * inverse).softmax(1), logits.softmax(1), even]).flatten(1)
        true = torch.zeros_like(logits).scatter(1, batch.labels[:, None], 1.0).view(-1, 1)
        sums += (parts @ torch.cat([parts.T, true], 1)).cpu()
    found: Array = dist.total(sums).numpy()
    return simplex_minimum(found[:, :3], -found[:, 3])
