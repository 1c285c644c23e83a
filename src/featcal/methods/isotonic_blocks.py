"""Blocks of the isotonic fit of hits on log-odds, without holding more than n numbers.

Between two neighbouring positives (pairs of a row and its label) the fit is constant, so all it
needs of the many negatives is how many lie in each gap: one pass gathers the n positives, a second
one counts the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from featcal.core import dist
from featcal.core.batch import Batch, Data, stored_logits
from featcal.core.odds import class_log_odds, log_odds, odds_of
from featcal.core.pav import pool

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Blocks:
    """The blocks of one isotonic fit, ascending.

    Attributes:
        low: (b,) the lowest log-odds in each block.
        high: (b,) the highest.
        centre: (b,) the log-odds of the block's mean probability.
        share: (b,) its share of hits.
    """

    low: Array
    high: Array
    centre: Array
    share: Array


def fit_blocks(data: Data, reading: str, classes: int) -> list[Blocks]:
    """One isotonic fit, or one for each class; every process gets all of them.

    Args:
        data: the batches, read twice.
        reading: "top" for pairs of predicted class and whether it is right, "multiclass" for all
            pairs of a row and a class, "one_vs_rest" for the pairs of each class by themselves.
        classes: k.
    """
    groups = _positives(data, reading, classes if reading == "one_vs_rest" else 1)
    gaps = [_Gaps(positives) for positives in groups]
    for batch in data:
        scores, hit, _ = _pairs(batch, reading)
        for column, gap in enumerate(gaps):
            gap.add(scores[:, column][~hit[:, column]])
    _reduce(gaps)
    return [gap.blocks() for gap in gaps]


def _pairs(batch: Batch, reading: str) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, hits and groups of all pairs: (pairs, g) float32 and bool, and (pairs, g) int64."""
    logits = stored_logits(batch)
    if reading == "top":
        scores, hit = log_odds(logits)[:, None], (logits.argmax(1) == batch.labels)[:, None]
    else:
        scores = class_log_odds(logits)
        columns = torch.arange(logits.shape[1], device=logits.device)
        hit = batch.labels[:, None] == columns
        if reading == "multiclass":
            scores, hit = scores.reshape(-1, 1), hit.reshape(-1, 1)
    group = torch.arange(scores.shape[1], device=logits.device).expand_as(scores)
    return scores.float().cpu(), hit.cpu(), group.cpu()


def _positives(data: Data, reading: str, groups: int) -> list[Tensor]:
    """The hits' scores of each group, over all processes."""
    parts = [torch.zeros(0, 2, dtype=torch.float64)]
    for batch in data:
        scores, hit, group = _pairs(batch, reading)
        parts.append(torch.stack([scores[hit].double(), group[hit].double()], 1))
    scores, group = dist.gather(torch.cat(parts)).unbind(1)
    return [scores[group == g].float() for g in range(groups)]


class _Gaps:
    """What lies at and between the distinct positives of one group.

    Slot 2j + 1 is the j-th positive itself, slot 2j the gap before it.
    """

    def __init__(self, positives: Tensor) -> None:
        self.at, self.hits = torch.unique(positives, return_counts=True)  # (p,) ascending
        slots = 2 * len(self.at) + 1
        self.sums = torch.zeros(2, slots, dtype=torch.float64)  # negatives: count, summed p
        self.ends = torch.full((2, slots), -torch.inf)  # the largest of score and of -score

    def add(self, scores: Tensor) -> None:
        """Counts negatives (n,)."""
        if not len(scores):
            return
        place = torch.searchsorted(self.at, scores)
        met = torch.zeros(len(scores), dtype=torch.bool)
        if len(self.at):
            met = self.at[place.clamp(max=len(self.at) - 1)] == scores
        slot = 2 * place + met
        weight = torch.stack([torch.ones_like(scores), scores]).double()
        weight[1].sigmoid_()
        self.sums.index_add_(1, slot, weight)
        both = torch.stack([scores, -scores])
        self.ends.scatter_reduce_(1, slot.expand(2, -1), both, "amax")

    def blocks(self) -> Blocks:
        """The isotonic fit of positives and negatives together."""
        rows, mass, high, low = (part.double().numpy() for part in (*self.sums, *self.ends))
        hits, at = self.hits.double().numpy(), self.at.double().numpy()
        every = np.zeros_like(rows)
        every[1::2] = hits
        rows, mass = rows + every, mass.copy()
        mass[1::2] += hits * self.at.double().sigmoid().numpy()
        high[1::2], low[1::2] = at, -at
        here = rows > 0
        return _pooled(rows[here], every[here], mass[here], -low[here], high[here])


def _pooled(rows: Array, hits: Array, mass: Array, low: Array, high: Array) -> Blocks:
    starts = pool(hits, rows)
    ends = np.concatenate([starts[1:], [len(rows)]]) - 1
    rows, hits, mass = (np.add.reduceat(part, starts) for part in (rows, hits, mass))
    low, high = low[starts], high[ends]
    centre = np.clip(odds_of(mass / rows), low, high)  # the mean, and never outside by rounding
    return Blocks(low, high, centre, hits / rows)


def _reduce(gaps: list[_Gaps]) -> None:
    """Adds up all processes' counts: one reduction of each kind for all groups."""
    sizes = [gap.sums.shape[1] for gap in gaps]
    sums = torch.split(dist.total(torch.cat([gap.sums for gap in gaps], 1)), sizes, 1)
    ends = torch.split(dist.largest(torch.cat([gap.ends for gap in gaps], 1)), sizes, 1)
    for gap, total, largest in zip(gaps, sums, ends, strict=True):
        gap.sums, gap.ends = total, largest
