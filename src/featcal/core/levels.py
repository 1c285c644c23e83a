"""Distinct scores in ascending order: all that a binning needs to know of the rows.

Rows of equal score are one level and are never torn apart, so neither the order of rows nor the
process that holds them matters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from featcal.core import dist
from featcal.core.batch import Data, stored_logits
from featcal.core.odds import log_odds

Array = NDArray[np.float64]
Places = NDArray[np.intp]


@dataclass(frozen=True)
class Levels:
    """Scores that occur, and what happened there.

    Attributes:
        at: (l,) ascending and distinct, float32 values.
        rows: (l,) how many rows have the score.
        hits: (l,) how many of them were right.
    """

    at: Array
    rows: Array
    hits: Array

    @classmethod
    def of(cls, scores: Tensor, right: Tensor) -> Self:
        """The levels of scores (n,) and whether each row was right (n,).

        >>> Levels.of(torch.tensor([2.0, 1.0, 2.0]), torch.tensor([True, False, False]))
        Levels(at=array([1., 2.]), rows=array([1., 2.]), hits=array([0., 1.]))
        """
        at, place = np.unique(scores.float().cpu().numpy(), return_inverse=True)
        rows = np.bincount(place, minlength=len(at)).astype(np.float64)
        hits = np.bincount(place, right.double().cpu().numpy(), len(at)).astype(np.float64)
        return cls(at.astype(np.float64), rows, hits)

    def parts(self, cuts: Places) -> tuple[Array, Array]:
        """Rows and hits of the parts that end after the levels `cuts`: (c + 1,) each."""
        starts = np.concatenate([[0], cuts + 1])
        return np.add.reduceat(self.rows, starts), np.add.reduceat(self.hits, starts)

    def edges(self, cuts: Places) -> Array:
        """The edges between the levels `cuts` and the next ones: (c,)."""
        return halfway(self.at[cuts], self.at[cuts + 1])


def halfway(low: Array, high: Array) -> Array:
    """Float32 edges e with low <= e < high: halfway, where rounding moves no row across.

    >>> halfway(np.array([1.0]), np.array([2.0]))
    array([1.5])
    """
    middle = (low + (high - low) / 2).astype(np.float32).astype(np.float64)
    return np.where(middle < high, middle, low)


def equal_mass(levels: Levels, bins: int) -> Places:
    """Levels after which to cut for bins of nearly equal mass: at the quantiles 1/m, 2/m, ...

    A quantile that falls on a level leaves the level below the cut; cuts that coincide are one.

    >>> equal_mass(Levels.of(torch.arange(6), torch.ones(6)), 3).tolist()
    [1, 3]
    """
    ends = levels.rows.cumsum()
    ranks = np.arange(1, bins) * (int(ends[-1]) - 1) // bins
    cuts = np.unique(np.searchsorted(ends, ranks, side="right"))
    return cuts[cuts < len(ends) - 1]


def top_levels(data: Data) -> Levels:
    """The levels of the predicted classes' log-odds, over all processes."""
    parts = [torch.zeros(0, 2)]
    for batch in data:
        logits = stored_logits(batch)
        right = logits.argmax(1) == batch.labels
        parts.append(torch.stack([log_odds(logits).float(), right.float()], 1).cpu())
    scores, right = dist.gather(torch.cat(parts)).unbind(1)
    return Levels.of(scores, right)
