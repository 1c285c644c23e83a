"""Fitting the network: how strongly to hold it back is left to folds, and so is whether to use it.

A penalty on the weights pulls the network towards plain temperature scaling. Each strength is tried
without each fold and judged on it, beside plain temperature scaling fitted and judged the same way.
The one that wins is fitted to all rows: restarts by L-BFGS, then Newton's method to the last digits
of the best, so that the result does not depend on how sums were rounded on the way. On many rows
the trials use a sample of them, chosen by content.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from featcal.core import dist
from featcal.core.batch import Batch, Chunked, Data, stored_logits
from featcal.core.descend import Descent, Penalty, minimize
from featcal.core.fitting import Problem
from featcal.core.folds import fold_of
from featcal.core.loss import Loss
from featcal.core.progress import tell
from featcal.core.tempering import temper
from featcal.methods.parameterised_network import (
    held_back,
    log_change,
    silent_start,
    standardised,
    top_gaps,
)
from featcal.methods.parameterised_newton import sharpened, summed
from featcal.methods.parameterised_rows import RowLoss, Tabulated, tabulated

FOLDS = 4
SAMPLE = 2**14  # rows, about, on which strengths and restarts are tried; all rows settle the end
STRENGTHS = (5.0, 12.0, 30.0)  # of the penalty, in nats over all rows for weights of length sqrt 2
FIRST, NEXT, LAST = 50, 20, 100  # iterations of L-BFGS: of a start, of a step on, of the end
WORTH = 1e-6  # what a network must save on rows left out, a row, to be kept


@dataclass(frozen=True)
class Wanted:
    """What the network shall look like, and how it is sought."""

    top: int
    hidden: int
    layers: int
    restarts: int
    seed: int

    def sizes(self, inputs: int) -> list[int]:
        """The width of each layer, inputs and output included."""
        return [inputs, *[self.hidden] * self.layers, 1]


def _nothing() -> Tensor:
    return torch.zeros(0)


@dataclass(frozen=True)
class Fitted:
    """What was found; an empty network is plain temperature scaling.

    Attributes:
        temperature: the common one, around which the network moves.
        mean: of each gap, (top - 1,).
        spread: its standard deviation.
        network: the parameters, (p,).
        why_plain: why there is no network, where there is none.
        strength: of the penalty.
        cv: the mean loss of rows left out, with the network.
        cv_plain: the same by temperature scaling.
        steps: evaluations of the loss.
        converged: whether the search ended by its own rule.
        capped: whether the common temperature stopped at its cap.
    """

    temperature: float
    mean: Tensor = field(default_factory=_nothing)
    spread: Tensor = field(default_factory=_nothing)
    network: Tensor = field(default_factory=_nothing)
    why_plain: str = ""
    strength: float | None = None
    cv: float | None = None
    cv_plain: float | None = None
    steps: int = 0
    converged: bool = True
    capped: bool = False


def fit_network(problem: Problem, loss: Loss, wanted: Wanted) -> Fitted | None:
    """The network that pays, or plain temperature scaling; None where no temperature matters."""
    common = temper(problem.data, loss)
    if common is None:
        return None
    plain = Fitted(common.temperature)
    if common.capped.any():
        why = "the common temperature stopped at its cap, so there is no network"
        return replace(plain, why_plain=why, converged=False, capped=True)
    mean, spread = _moments(problem, wanted.top)
    rows = tabulated(loss, 1 / common.temperature, problem.facts.classes)
    parts = _by_fold(problem, rows, wanted.top, (mean, spread))
    trials = _Trials(parts, rows.loss, wanted, wanted.sizes(len(mean)))
    if min(trials.rows[:FOLDS]) == 0:
        return replace(plain, why_plain="too few different rows to judge a network by")
    costs, cv_plain = trials.costs_left_out()
    best = int(np.argmin(costs))
    plain = replace(plain, cv=costs[best], cv_plain=cv_plain, steps=trials.steps)
    if not costs[best] < cv_plain - WORTH:
        return replace(plain, why_plain="on rows left out the network is no better")
    network, settled = trials.fit_all(STRENGTHS[best])
    return replace(
        plain,
        mean=mean,
        spread=spread,
        network=network,
        strength=STRENGTHS[best],
        steps=trials.steps,
        converged=settled,
    )


def _by_fold(
    problem: Problem, rows: Tabulated, top: int, moments: tuple[Tensor, Tensor]
) -> list[list[Batch]]:
    """The rows of each fold, then those beyond the sample, with what a fit needs of them."""
    groups = FOLDS * max(1, round(problem.facts.rows / SAMPLE))
    parts: list[list[Batch]] = [[] for _ in range(FOLDS + 1)]
    for batch in problem.data:
        if len(batch):
            gaps = top_gaps(stored_logits(batch).double(), top)
            kept, group = rows.keep(batch, standardised(gaps, *moments)), fold_of(batch, groups)
            for number, part in enumerate(parts):
                part.append(kept.rows(group.clamp(max=FOLDS) == number))
    return parts


def _moments(problem: Problem, top: int) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each gap over all rows; 1 for a gap that never varies."""
    inputs = min(top, problem.facts.classes) - 1
    sums = torch.zeros(2, inputs, dtype=torch.float64)
    for batch in problem.data:
        gaps = top_gaps(stored_logits(batch).double(), top)
        sums += torch.stack([gaps.sum(0), gaps.square().sum(0)]).cpu()
    mean, square = dist.total(sums) / problem.facts.rows
    spread = (square - mean.square()).clamp(min=0).sqrt()
    spread = torch.where(spread > 1e-6 * mean.abs(), spread, 1.0)
    return mean.to(problem.facts.device), spread.to(problem.facts.device)


class _Trials:
    """The rows split by fold, and networks fitted to some of the folds."""

    def __init__(
        self, parts: list[list[Batch]], row_loss: RowLoss, wanted: Wanted, sizes: list[int]
    ) -> None:
        self.parts, self.row_loss, self.wanted, self.sizes = parts, row_loss, wanted, sizes
        self.hold = held_back(self.sizes)
        counts = torch.tensor([float(sum(map(len, part))) for part in parts])
        self.rows = [int(count) for count in dist.total(counts)]
        self.steps, self.done = 0, 0

    def objective(self, network: Tensor, batch: Batch) -> Tensor:
        """The summed loss of a batch under a network."""
        assert batch.features is not None
        return self.row_loss(batch, log_change(network, batch.features, self.sizes)).sum()

    def shifted(self, shift: Tensor, batch: Batch) -> Tensor:
        """The summed loss under one change of the temperature for all rows, (1,)."""
        return self.row_loss(batch, shift.expand(len(batch))).sum()

    def of(self, numbers: Iterable[int]) -> tuple[list[Batch], int]:
        """The rows of some parts, and how many they are."""
        chosen = list(numbers)
        batches = list(chain.from_iterable(self.parts[number] for number in chosen))
        return list(Chunked(batches)), sum(self.rows[number] for number in chosen)

    def penalty(self, strength: float, rows: int) -> Penalty:
        """The pull towards small weights, a row."""
        return lambda network: strength / (2 * rows) * (self.hold * network.square()).sum()

    def costs_left_out(self) -> tuple[list[float], float]:
        """The mean loss on each fold of what was fitted to the others.

        For each strength of the penalty, and without a network.
        """
        costs, plain, judged = [0.0] * len(STRENGTHS), 0.0, sum(self.rows[:FOLDS])
        for fold, part in enumerate(self.parts[:FOLDS]):
            data, rows = self.of(number for number in range(FOLDS) if number != fold)
            at = silent_start(self.sizes, self.wanted.seed)
            for number, strength in enumerate(STRENGTHS):  # the next starts where the last ended
                at = self._descend(at, data, rows, strength, FIRST if number == 0 else NEXT).at
                costs[number] += summed(self.objective, at, part) / judged
            shift = minimize(self.shifted, torch.zeros(1), data, rows).at
            plain += summed(self.shifted, shift, part) / judged
        return costs, plain

    def fit_all(self, strength: float) -> tuple[Tensor, bool]:
        """The best of several restarts, then all rows and the last digits."""
        data, rows = self.of(range(FOLDS))
        seeds = range(self.wanted.seed, self.wanted.seed + self.wanted.restarts)
        starts = (silent_start(self.sizes, seed) for seed in seeds)
        tried = [self._descend(start, data, rows, strength, FIRST) for start in starts]
        best = min(tried, key=lambda found: found.value)
        data, rows = self.of(range(FOLDS + 1))
        last = self._descend(best.at, data, rows, strength, LAST)
        penalty = self.penalty(strength, rows)
        sharp, flat = sharpened(self.objective, last.at, data, rows, penalty)
        return sharp, flat or last.converged

    def _descend(
        self, start: Tensor, data: Data, rows: int, strength: float, iterations: int
    ) -> Descent:
        """L-BFGS from a start; counts and tells."""
        penalty = self.penalty(strength, rows)
        found = minimize(self.objective, start, data, rows, penalty=penalty, iterations=iterations)
        self.steps, self.done = self.steps + found.steps, self.done + 1
        tell("parameterised", self.done, FOLDS * len(STRENGTHS) + self.wanted.restarts + 1)
        return found
