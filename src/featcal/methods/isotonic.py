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
from torch import Tensor
from torch.nn.functional import logsigmoid

from featcal.core import dist
from featcal.core.batch import Batch, Data, stored_logits
from featcal.core.calibrator import LogitMap
from featcal.core.checks import InputError, check_choice, check_flags
from featcal.core.fit import Problem, StepReport, settle
from featcal.core.rows import keep_prediction, with_confidence
from featcal.methods import score_tables as tables
from featcal.methods.score_tables import Array, Levels, Places

READINGS = ("multiclass", "one_vs_rest", "top")
BETWEEN = ("line", "step")
TIE_BREAK = 2.0**-14  # of the log-odds, in the logarithm: enough for float32 to tell classes apart
PUBLISHED_TIE_BREAK = 1e-9  # of the probability, added to the fitted one
ZERO = 100.0  # log-odds whose probability is 0 or 1 beside the published tie break
ROUNDS = 8  # of pooling whole descents before a stack takes what is left


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
    title = "isotonic regression"
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
        look_up = tables.lines if self.between == "line" else tables.steps
        if self.reading == "top":
            found = look_up(tables.log_odds(logits), self.nodes, self.values)
            return with_confidence(logits, found.sigmoid())
        odds = tables.class_log_odds(logits)
        if self.reference:
            fitted = tables.lines(odds, self.nodes, self.values.float().sigmoid(), probable=True)
            nudge = logits.log_softmax(1) + math.log(PUBLISHED_TIE_BREAK)
            return torch.logaddexp(fitted.to(logits.dtype).log(), nudge)
        found = look_up(odds, self.nodes, self.values)
        fitted = logsigmoid(found).to(logits.dtype)
        if self.reading == "one_vs_rest":
            return fitted
        ranked = keep_prediction(fitted + TIE_BREAK * odds, logits)
        return with_confidence(ranked, found.amax(1).sigmoid())

    def sound(self) -> bool:
        """Whether nodes ascend, with as many values as the kind of map needs."""
        columns, more = self.reading == "one_vs_rest", int(self.between == "step")
        return tables.is_table(self.nodes, self.values, columns=columns, more=more)

    def learn(self, problem: Problem) -> list[StepReport]:
        """Pools adjacent violators and keeps the blocks as a table."""
        self.reset()
        fits = fit_blocks(problem.data, self.reading, problem.facts.classes)
        parts = zip(*(self._table(fit, problem) for fit in fits), strict=True)
        nodes, values = map(tables.stacked, parts)
        counts = [len(fit.share) for fit in fits]
        message = f"one fit a class, of {min(counts)} to {max(counts)} blocks"
        if self.reading != "one_vs_rest":
            nodes, values = nodes[0], values[0]
            message = f"blocks of the fit: {counts[0]}"
        self.assign(nodes=nodes, values=values)
        always = self.reference and problem.facts.classes > 1
        return [settle(self, problem, {"blocks": sum(counts)}, message, always=always)]

    def _table(self, fit: Blocks, problem: Problem) -> tuple[Array, Array]:
        """Where the map has its nodes or edges, and its values, in log-odds."""
        if self.reference:
            ends = np.stack([fit.low, fit.high], 1).ravel()
            return ends, tables.odds_of(fit.share).clip(-ZERO, ZERO).repeat(2)
        rows, classes = problem.facts.rows, problem.facts.classes
        low = 1 / (rows + 2) if self.reading == "top" else 1 / ((rows + 1) * classes)
        values = tables.odds_of(fit.share.clip(low, 1 - 1 / (rows + 2)))
        if self.between == "step":
            return tables.halfway(fit.high[:-1], fit.low[1:]), values
        times = 2 if len(values) == 1 else 1  # a line needs two ends
        return fit.centre.repeat(times), values.repeat(times)


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
    """One isotonic fit, or one per class, without holding more than n numbers.

    Between two neighbouring positives (pairs of a row and its label) the fit is constant, so all it
    needs of the many negatives is how many lie in each gap: one pass gathers the n positives, a
    second one counts the rest. Slot 2j + 1 of a fit is its j-th positive, slot 2j the gap before.

    Args:
        data: the batches, read twice.
        reading: "top" for pairs of predicted class and whether it is right, "multiclass" for all
            pairs of a row and a class, "one_vs_rest" for the pairs of each class by themselves.
        classes: k.
    """
    parts = [torch.zeros(0, 2, dtype=torch.float64)]
    for batch in data:
        scores, hit = _pairs(batch, reading)
        parts.append(torch.stack([scores[hit].double(), hit.nonzero()[:, 1].double()], 1))
    found, fit_of = dist.gather(torch.cat(parts)).unbind(1)
    every = [found[fit_of == fit] for fit in range(classes if reading == "one_vs_rest" else 1)]
    positives = [Levels.of(scores, torch.ones_like(scores)) for scores in every]
    known = [torch.from_numpy(np.append(levels.at, np.inf)).float() for levels in positives]
    *starts, slots = np.cumsum([0, *(2 * len(at) - 1 for at in known)]).tolist()
    sums = torch.zeros(2, slots, dtype=torch.float64)  # negatives: count, summed p
    ends = torch.full((2, slots), -torch.inf)  # the largest of score and of -score
    for batch in data:
        scores, hit = _pairs(batch, reading)
        for column, (at, start) in enumerate(zip(known, starts, strict=True)):
            misses = scores[:, column][~hit[:, column]]
            place = torch.searchsorted(at, misses)
            slot = start + 2 * place + (at[place] == misses)
            sums[0].index_add_(0, slot, torch.ones_like(misses, dtype=torch.float64))
            sums[1].index_add_(0, slot, misses.double().sigmoid())
            ends.scatter_reduce_(1, slot.expand(2, -1), torch.stack([misses, -misses]), "amax")
    counted = torch.cat([dist.total(sums), dist.largest(ends)]).numpy()
    parts_of = np.split(counted, starts[1:], axis=1)
    return [_blocks(*pair) for pair in zip(positives, parts_of, strict=True)]


def _pairs(batch: Batch, reading: str) -> tuple[Tensor, Tensor]:
    """Scores and hits of all pairs, one column per fit: float32 and bool."""
    logits = stored_logits(batch)
    if reading == "top":
        scores, hit = tables.log_odds(logits)[:, None], (logits.argmax(1) == batch.labels)[:, None]
    else:
        scores = tables.class_log_odds(logits)
        hit = batch.labels[:, None] == torch.arange(logits.shape[1], device=logits.device)
        if reading == "multiclass":
            scores, hit = scores.reshape(-1, 1), hit.reshape(-1, 1)
    return scores.float().cpu(), hit.cpu()


def _blocks(positives: Levels, negatives: Array) -> Blocks:
    """The isotonic fit of positives and negatives (4, slots) together."""
    rows, mass, high, low = negatives.copy()
    at, hits = positives.at, np.zeros_like(rows)
    hits[1::2] = positives.rows
    rows += hits
    mass[1::2] += positives.rows * torch.from_numpy(at).sigmoid().numpy()
    high[1::2], low[1::2] = at, -at
    rows, hits, mass, high, low = (part[rows > 0] for part in (rows, hits, mass, high, low))
    starts = pool(hits, rows)
    last = np.append(starts[1:], len(rows)) - 1
    rows, hits, mass = (np.add.reduceat(part, starts) for part in (rows, hits, mass))
    low, high = -low[starts], high[last]
    centre = tables.odds_of(mass / rows).clip(low, high)  # the mean, and never outside by rounding
    return Blocks(low, high, centre, hits / rows)


def pool(sums: Array, weights: Array) -> Places:
    """The first place of each block of the isotonic fit, whose values are the blocks' means.

    Pool adjacent violators (Ayer et al., 1955). Every descent, however long, ends up in one block:
    a few rounds pool whole descents, then a stack joins each place with the blocks before it while
    they are higher.

    Args:
        sums: (l,) summed targets of each place.
        weights: (l,) their weights, above 0.

    >>> pool(np.array([1.0, 3.0, 2.0, 4.0]), np.ones(4)).tolist()
    [0, 1, 3]
    """
    firsts: Places = np.arange(len(sums))
    for _ in range(ROUNDS):
        means = sums / weights
        first = np.flatnonzero(np.append(True, means[1:] > means[:-1]))
        firsts = firsts[first]
        sums, weights = np.add.reduceat(sums, first), np.add.reduceat(weights, first)
    blocks: list[tuple[int, float, float]] = []  # first place, sum, weight
    for place, total, weight in zip(firsts.tolist(), sums.tolist(), weights.tolist(), strict=True):
        block = place, total, weight
        while blocks and blocks[-1][1] / blocks[-1][2] >= block[1] / block[2]:
            before = blocks.pop()
            block = before[0], before[1] + block[1], before[2] + block[2]
        blocks.append(block)
    return np.array([block[0] for block in blocks])
