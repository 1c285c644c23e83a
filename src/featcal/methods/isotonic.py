"""Isotonic regression of hits on probabilities (Zadrozny and Elkan, KDD 2002; Zhang et al., 2020).

The ascending function nearest to the hits is constant on blocks. Lines from the centre of a block
to that of the next (centred isotonic regression, Oron and Flournoy, 2017) take its jumps away, so
that rounding cannot carry a row across one and different scores stay different.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import logsigmoid

from featcal.core import dist
from featcal.core.batch import Batch, Data, stored_logits
from featcal.core.calibrator import LogitMap
from featcal.core.checks import InputError, check_choice, check_flags
from featcal.core.fit import Problem, StepReport, settle
from featcal.core.rows import keep_prediction, with_confidence
from featcal.methods.score_tables import (
    class_log_odds,
    halfway,
    lines,
    log_odds,
    odds_of,
    probable_lines,
    sound,
    stacked,
    steps,
)

# --- Pool adjacent violators: the ascending values nearest to given ones, as blocks (Ayer, 1955).

Array = NDArray[np.float64]
Places = NDArray[np.intp]

SHRINKING = 0.8  # a round that leaves more than this share of blocks is left to the stack


def pool(sums: Array, weights: Array) -> Places:
    """The first place of each block of the isotonic fit, whose values are the blocks' means.

    Every descent, however long, ends up in one block, so whole descents are pooled at once while
    that makes the sequence much shorter; a stack finishes what is left.

    Args:
        sums: (l,) summed targets of each place.
        weights: (l,) their weights, above 0.

    >>> pool(np.array([1.0, 3.0, 2.0, 4.0]), np.ones(4)).tolist()
    [0, 1, 3]
    """
    starts: Places = np.arange(len(sums))
    while True:
        means = sums / weights
        first: Places = np.flatnonzero(np.concatenate([[True], means[1:] > means[:-1]]))
        if len(first) == len(starts):
            return starts
        slow = len(first) > SHRINKING * len(starts)
        starts = starts[first]
        sums, weights = np.add.reduceat(sums, first), np.add.reduceat(weights, first)
        if slow:
            return starts[_pool_by_stack(sums, weights)]


def _pool_by_stack(sums: Array, weights: Array) -> list[int]:
    """The same by the classic way: each place joins the blocks before it while they are higher."""
    starts: list[int] = []
    blocks: list[tuple[float, float]] = []
    for place, (total, weight) in enumerate(zip(sums.tolist(), weights.tolist(), strict=True)):
        start = place
        while blocks and blocks[-1][0] / blocks[-1][1] >= total / weight:
            before = blocks.pop()
            start, total, weight = starts.pop(), total + before[0], weight + before[1]
        starts.append(start)
        blocks.append((total, weight))
    return starts


# --- Blocks of the isotonic fit of hits on log-odds, without holding more than n numbers.
#
# Between two neighbouring positives (pairs of a row and its label) the fit is constant, so all it
# needs of the many negatives is how many lie in each gap: one pass gathers the n positives, a
# second
# one counts the rest.


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


READINGS = ("multiclass", "one_vs_rest", "top")
BETWEEN = ("line", "step")
TIE_BREAK = 2.0**-14  # of the log-odds, in the logarithm: enough for float32 to tell classes apart
PUBLISHED_TIE_BREAK = 1e-9  # of the probability, added to the fitted one
ZERO = 100.0  # log-odds whose probability is 0 or 1 beside the published tie break


@final
class Isotonic(LogitMap):
    """An ascending map of probabilities, fitted by pooling adjacent violators on log-odds.

    Beyond the outermost blocks the map is constant. No value is 0 or 1: they end at 1 / ((n + 1) k)
    and (n + 1) / (n + 2), beyond every other value n rows can give.

    Args:
        reading: "multiclass" fits one map to all n k pairs of a row and a class (IRM): the
            predicted class gets its fitted value, the others share the rest in proportion to
            theirs, and the prediction stays. "one_vs_rest" fits one map to each class and divides a
            row by its sum (IROvA); predictions may change, and the map of a rare class is coarse.
            "top" fits one map to the predicted classes alone; the others share the rest as before.
        between: "line" from the centre of a block to that of the next, in log-odds; "step" halfway
            between the blocks.
        reference: as published: the map is flat on each block and linear in the probability from
            one block to the next, 1e-9 p is added to break ties, and a row is divided by its sum.
            float32 cannot hold that tie break, so that predictions may change.
    """

    name = "isotonic"
    keeps_accuracy = True
    quick = "temperature"
    nodes: Tensor
    values: Tensor

    def __init__(
        self, *, reading: str = "multiclass", between: str = "line", reference: bool = False
    ) -> None:
        super().__init__()
        check_choice(self.name, "reading", reading, READINGS)
        check_choice(self.name, "between", between, BETWEEN)
        check_flags(self.name, reference=reference)
        if reference and (reading == "top" or between != "line"):
            raise InputError(
                "isotonic: reference=True is multiclass or one_vs_rest, with lines of its own: "
                "leave between out and choose one of these readings"
            )
        self.reading, self.between, self.reference = reading, between, reference
        self.keeps_accuracy = reading != "one_vs_rest" and not reference
        self.jumps = between == "step"
        self.register_buffer("nodes", torch.empty(0))
        self.register_buffer("values", torch.empty(0))

    def map_logits(self, logits: Tensor) -> Tensor:
        """Looks up the fitted probabilities and makes a row of them."""
        if self.values.numel() == 0 or logits.shape[1] == 1:
            return logits
        if self.reading == "top":
            return with_confidence(logits, self._look_up(log_odds(logits)).sigmoid())
        odds = class_log_odds(logits)
        if self.reference:
            return self._published(odds, logits)
        found = self._look_up(odds)
        fitted = logsigmoid(found).to(logits.dtype)
        if self.reading == "one_vs_rest":
            return fitted
        ranked = keep_prediction(fitted + TIE_BREAK * odds, logits)
        return with_confidence(ranked, found.amax(1).sigmoid())

    def _look_up(self, odds: Tensor) -> Tensor:
        """The fitted log-odds, float32."""
        table = lines if self.between == "line" else steps
        return table(odds, self.nodes, self.values)

    def _published(self, odds: Tensor, logits: Tensor) -> Tensor:
        fitted = probable_lines(odds, self.nodes, self.values.float().sigmoid())
        nudge = logits.log_softmax(1) + math.log(PUBLISHED_TIE_BREAK)
        return torch.logaddexp(fitted.to(logits.dtype).log(), nudge)

    def check(self) -> None:
        """Nodes ascend, and there are as many values as the kind of map needs."""
        dims, more = (2 if self.reading == "one_vs_rest" else 1), int(self.between == "step")
        if not sound(self.nodes, self.values, dims=dims, more=more):
            shapes = f"{tuple(self.nodes.shape)} nodes and {tuple(self.values.shape)} values"
            raise InputError(f"isotonic: {shapes}: nodes must ascend, each with a finite value")

    def learn(self, problem: Problem) -> list[StepReport]:
        """Pools adjacent violators; see `isotonic_blocks`."""
        self.reset()
        fits = fit_blocks(problem.data, self.reading, problem.facts.classes)
        nodes, values = map(stacked, zip(*(self._table(fit, problem) for fit in fits), strict=True))
        if self.reading != "one_vs_rest":
            nodes, values = nodes[0], values[0]
        self.assign(nodes=nodes, values=values)
        counts = [len(fit.share) for fit in fits]
        message = f"blocks of the fit: {counts[0]}"
        if self.reading == "one_vs_rest":
            message = f"one fit a class, of {min(counts)} to {max(counts)} blocks"
        always = self.reference and problem.facts.classes > 1
        return [settle(self, problem, {"blocks": sum(counts)}, message, always=always)]

    def _table(self, fit: Blocks, problem: Problem) -> tuple[Array, Array]:
        """Where the map has its nodes or edges, and its values, in log-odds."""
        if self.reference:
            ends = np.stack([fit.low, fit.high], 1).ravel()
            return ends, odds_of(fit.share).clip(-ZERO, ZERO).repeat(2)
        rows, classes = problem.facts.rows, problem.facts.classes
        low = 1 / (rows + 2) if self.reading == "top" else 1 / ((rows + 1) * classes)
        values = odds_of(fit.share.clip(low, 1 - 1 / (rows + 2)))
        if self.between == "step":
            return halfway(fit.high[:-1], fit.low[1:]), values
        times = 2 if len(values) == 1 else 1  # a line needs two ends
        return fit.centre.repeat(times), values.repeat(times)
