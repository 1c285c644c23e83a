"""A function of one score kept as a table: steps between edges, or lines between nodes.

The score is the log-odds log p - log(1 - p): it sorts rows as the confidence does, is exact where p
rounds to 1, and half precision keeps it to a part in a thousand, where it would round a confidence
of 0.9998 to 1. A fit sees the rows as `Levels`; what it learns is a small table of log-odds, either
(m,), one for all, or (k, m), one for each column of the scores (n, k). The look-up is in float32
whatever the buffers and scores come in, so that a row falls into the same bin in every precision,
and uses what torch.export and ONNX know.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import logsigmoid

from featcal.core import dist
from featcal.core.batch import Data, stored_logits

Array = NDArray[np.float64]
Places = NDArray[np.intp]

FARTHEST = 2.0**14  # beyond it p is 0 or 1 in any precision; within it half precision is finite


def log_odds(logits: Tensor) -> Tensor:
    """The log-odds (n,) of each row's predicted class, from logits (n, k).

    >>> log_odds(torch.tensor([[0.0, 0.0], [1000.0, 0.0]]))
    tensor([   0., 1000.])
    """
    return _lead(logits, logits.argmax(1, keepdim=True))[:, 0].clamp(-FARTHEST, FARTHEST)


def class_log_odds(logits: Tensor) -> Tensor:
    """The log-odds (n, k) of every class."""
    log_p = logits.log_softmax(1)
    top = logits.argmax(1, keepdim=True)
    # 1 - p cancels for the predicted class alone: no other class has more than half.
    odds = log_p - torch.log1p(-log_p.exp().clamp(max=0.5))
    return odds.scatter(1, top, _lead(logits, top)).clamp(-FARTHEST, FARTHEST)


def _lead(logits: Tensor, top: Tensor) -> Tensor:
    """How far the predicted class (n, 1) is ahead of all others together."""
    return logits.gather(1, top) - logits.scatter(1, top, -torch.inf).logsumexp(1, keepdim=True)


def odds_of(share: Array) -> Array:
    """The log-odds of probabilities; 0 and 1 end at the farthest values.

    >>> odds_of(np.array([0.0, 0.5, 1.0])).tolist()
    [-16384.0, 0.0, 16384.0]
    """
    with np.errstate(divide="ignore"):
        return np.asarray((np.log(share) - np.log1p(-share)).clip(-FARTHEST, FARTHEST))


@dataclass(frozen=True)
class Levels:
    """The distinct scores in ascending order, and what happened there.

    Rows of equal score are one level and are never torn apart, so neither the order of rows nor
    the process that holds them matters.

    Attributes:
        at: (l,) the scores, float32 values.
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


def top_levels(data: Data) -> Levels:
    """The levels of the predicted classes' log-odds, over all processes."""
    parts = [torch.zeros(0, 2)]
    for batch in data:
        logits = stored_logits(batch)
        right = logits.argmax(1) == batch.labels
        parts.append(torch.stack([log_odds(logits).float(), right.float()], 1).cpu())
    scores, right = dist.gather(torch.cat(parts)).unbind(1)
    return Levels.of(scores, right)


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


def halfway(low: Array, high: Array) -> Array:
    """Float32 edges e with low <= e < high: halfway, where rounding moves no row across.

    >>> halfway(np.array([1.0]), np.array([2.0]))
    array([1.5])
    """
    middle = (low + (high - low) / 2).astype(np.float32).astype(np.float64)
    return np.where(middle < high, middle, low)


def steps(at: Tensor, edges: Tensor, values: Tensor) -> Tensor:
    """values[j] where edge j - 1 < score <= edge j: one value more than edges.

    >>> steps(torch.tensor([0.0, 1.0, 1.5]), torch.tensor([1.0]), torch.tensor([5.0, 7.0]))
    tensor([5., 5., 7.])
    """
    return _pick(values.float(), locate(at, edges))


def lines(at: Tensor, nodes: Tensor, values: Tensor, *, probable: bool = False) -> Tensor:
    """Linear between two or more nodes, constant beyond them; equal nodes make a step.

    With `probable`, scores and nodes are log-odds and the lines straight in the probability. The
    part of the way is then (p - p0) / (p1 - p0), without differences of probabilities, which would
    cancel near 0 and 1.

    >>> lines(torch.tensor([0.5, 9.0]), torch.tensor([0.0, 1.0]), torch.tensor([5.0, 7.0]))
    tensor([6., 7.])
    """
    at, nodes, values = at.float(), nodes.float(), values.float()
    left = locate(at, nodes).clamp(1, nodes.shape[-1] - 1) - 1
    start, first = _pick(nodes, left), _pick(values, left)
    length = (_pick(nodes, left + 1) - start).clamp(min=torch.finfo(torch.float32).tiny)
    way = (at - start) / length
    if probable:
        gone = torch.minimum((at - start).clamp(min=0), length)
        scale = logsigmoid(start + gone) - logsigmoid(start + length)
        way = torch.expm1(-gone) / torch.expm1(-length) * scale.exp()
    return first + way.clamp(0, 1) * (_pick(values, left + 1) - first)


def locate(at: Tensor, edges: Tensor) -> Tensor:
    """How many edges lie below each score."""
    at, edges = at.float(), edges.float()
    if edges.ndim == 1:
        return torch.bucketize(at, edges)
    # Each column has its own edges, and ONNX has no searchsorted: bisection, all scores at once.
    most = edges.shape[1]
    place = torch.zeros_like(at, dtype=torch.int64)
    for step in (2**power for power in reversed(range(most.bit_length()))):
        reach = place + step
        edge = _pick(edges, reach.clamp(max=most) - 1)
        place = torch.where((reach <= most) & (edge < at), reach, place)
    return place


def _pick(table: Tensor, place: Tensor) -> Tensor:
    """The entries at these places, of each column's own row where there is one."""
    if table.ndim == 1:
        return table[place]
    rows = torch.arange(len(table), device=table.device) * table.shape[1]
    return table.flatten()[place + rows]


def stacked(tables: Iterable[Array]) -> Tensor:
    """Tables of different lengths as one (g, m): the last entry is repeated, which adds nothing.

    >>> stacked([np.array([1.0, 2.0]), np.array([3.0]), np.array([])]).tolist()
    [[1.0, 2.0], [3.0, 3.0], [0.0, 0.0]]
    """
    rows = list(tables)
    most = max(len(row) for row in rows)
    filled = [row if len(row) else np.zeros(1) for row in rows] if most else rows
    return torch.tensor(np.stack([np.pad(row, (0, most - len(row)), "edge") for row in filled]))
