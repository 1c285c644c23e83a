"""The weights of a temperature that grows with distance: two numbers, both at least 0."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from featcal.core import dist
from featcal.core.batch import Batch, Data, stored_logits
from featcal.core.curves import row_nll
from featcal.core.descend import minimize
from featcal.core.fitting import Problem
from featcal.core.loss import Loss, brier, measure, nll
from featcal.core.tempering import temper

TINY = 1e-20  # the lowest temperature
REACH = 30.0  # how far w may go from its start, in logarithms
GAIN = 1e-9  # what a second number must lower the loss by to be worth having


@dataclass(frozen=True)
class Scored:
    """Data in which each row's distance stands where the features stood.

    Attributes:
        data: the batches, with logits.
        scores: (n,) of each batch, in the order of the batches.
        divided: divide the logits by the distance.
    """

    data: Data
    scores: list[Tensor]
    divided: bool = False

    def __iter__(self) -> Iterator[Batch]:
        for batch, score in zip(self.data, self.scores, strict=True):
            logits = stored_logits(batch)
            if self.divided:
                logits = logits.double() / score[:, None]
            yield Batch(logits, batch.labels, score)

    def range(self) -> tuple[float, float, float]:
        """The shortest, mean and longest distance, over all processes."""
        all_scores = torch.cat([torch.zeros(0, dtype=torch.float64), *map(Tensor.cpu, self.scores)])
        sums = dist.total(torch.stack([all_scores.sum(), torch.tensor(float(len(all_scores)))]))
        ends = torch.full((2,), -torch.inf, dtype=torch.float64)
        if len(all_scores):
            ends = torch.stack([-all_scores.min(), all_scores.max()])
        shortest, longest = dist.largest(ends).tolist()
        return -shortest, float(sums[0] / sums[1]), longest


@dataclass(frozen=True)
class Found:
    """Where the search for w ended."""

    w0: float
    w1: float
    converged: bool = True
    warning: str = ""


def temperature_at(weights: Tensor, distance: Tensor) -> Tensor:
    """T = w0 + w1 s, (n,), above 0."""
    return (weights[0] + weights[1] * distance).clamp(min=TINY)


def _loss_at(data: Scored, loss: Loss, found: Found) -> float:
    """The loss at given weights."""
    weights = torch.tensor([found.w0, found.w1], dtype=torch.float64)

    def changed(logits: Tensor, batch: Batch) -> Tensor:
        assert batch.features is not None
        scaled = logits / temperature_at(weights.to(batch.features), batch.features)[:, None]
        return loss.sums(scaled, batch)

    return measure(data, replace(loss, sums=changed))[0]


def best_weights(data: Scored, problem: Problem, loss: Loss) -> Found | None:
    """One temperature for all, one proportional to the distance, or the best sum of both."""
    single = temper(data, loss)
    if single is None:
        return None
    alone = Found(single.temperature, 0.0)
    if single.capped.any():
        return replace(alone, converged=False, warning=f"density: T = {alone.w0:.4g} is at its cap")
    shortest, mean, longest = data.range()
    if longest - shortest <= 1e-6 * longest:
        return alone
    choices = [alone]
    if shortest > 0:
        other = temper(replace(data, divided=True), loss)
        assert other is not None
        choices.append(Found(0.0, other.temperature))
    choices.append(_inside(data, problem, loss, alone.w0, mean))
    best, lowest = alone, math.inf
    for choice in choices:
        value = _loss_at(data, loss, choice)
        if value < lowest - GAIN:
            best, lowest = choice, value
    return best


def _inside(data: Scored, problem: Problem, loss: Loss, start: float, mean: float) -> Found:
    """The best w0 and w1 above 0, as logarithms, from the one temperature halved between them."""
    first = math.log(start / 2)

    def objective(at: Tensor, batch: Batch) -> Tensor:
        assert batch.features is not None
        parts = at.clamp(first - REACH, first + REACH).exp()
        return _summed(loss, batch, parts[0] + parts[1] * batch.features / mean)

    found = minimize(objective, torch.full((2,), first), data, problem.facts.rows)
    w0, w1 = found.at.clamp(first - REACH, first + REACH).exp().tolist()
    return Found(w0, w1 / mean, found.converged)


def published_weights(data: Scored, problem: Problem) -> Found:
    """From w = 1, by the squared error, within the published bounds."""

    def objective(at: Tensor, batch: Batch) -> Tensor:
        assert batch.features is not None
        temperature = at[0].clamp(-100, 100) + at[1].clamp(0, 1e4) * batch.features
        return _summed(brier, batch, temperature.clamp(min=TINY))

    found = minimize(objective, torch.ones(2), data, problem.facts.rows)
    w0, w1 = found.at.tolist()
    return Found(min(max(w0, -100.0), 100.0), min(max(w1, 0.0), 1e4), found.converged)


def _summed(loss: Loss, batch: Batch, temperature: Tensor) -> Tensor:
    """The summed loss of a batch at a temperature for each row, differentiable in these."""
    logits = stored_logits(batch)
    if loss is nll:
        return row_nll(logits, batch.labels, 1 / temperature).sum()
    return loss.sums(logits / temperature[:, None], batch)[0]
