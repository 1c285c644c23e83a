"""Density-aware calibration: a temperature that grows with the distance to training rows.

After Tomani et al., ICML 2023, who add up several layers; this is the last layer's features alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from featcal.core import dist
from featcal.core.batch import Batch, Data, Head, Through, features_of, stored_logits
from featcal.core.calibrator import VIEWS, Calibrator, seen_features
from featcal.core.checks import InputError, check_choice, check_flags, check_whole
from featcal.core.fit import Problem, StepReport, settle
from featcal.core.gradient import minimize
from featcal.core.loss import Loss, brier, measure, nll
from featcal.core.rows import row_nll
from featcal.core.sample import hashed_sample, nearest, on_sphere
from featcal.core.scalar import temper
from featcal.heads.head import head_logits

NEIGHBOURS = 50
TINY = 1e-20  # the lowest temperature
REACH = 30.0  # how far w may go from its start, in logarithms
GAIN = 1e-9  # what a second number must lower the loss by to be worth having


@final
class DensityAware(Calibrator):
    """z / T(x) with T(x) = w0 + w1 s(x), w >= 0, and s a distance to what the network has seen.

    s is the distance to the k-th nearest training row, by features scaled to length 1. Pass rows
    the network was trained on, fit(..., train=...): some of them become part of the calibrator.
    w0 = 0 and w1 = 0 are candidates of their own, and the second is temperature scaling.

    Args:
        neighbours: k; at most as many as there are rows.
        references: training rows kept, at most; picked by content where there are more.
        features: "unclipped", or "clipped" for what the head gets after a clip.
        reference: what the published code does: the nearest neighbour whatever k, squared
            distances, the squared error instead of the NLL, w0 without a lower bound.
    """

    name = "density"
    title = "density-aware calibration"
    keeps_accuracy = True
    keeps_rows = True
    needs_train = True
    quick = "temperature"
    stored: Tensor
    weights: Tensor

    def __init__(
        self,
        *,
        neighbours: int = NEIGHBOURS,
        references: int = 5000,
        features: str = "unclipped",
        reference: bool = False,
    ) -> None:
        super().__init__()
        check_whole(self.name, 1, neighbours=neighbours, references=references)
        check_choice(self.name, "features", features, VIEWS)
        check_flags(self.name, reference=reference)
        if reference and neighbours != NEIGHBOURS:
            raise InputError("density: reference=True takes the nearest row: leave neighbours out")
        self.neighbours, self.references = neighbours, references
        self.features, self.reference = features, reference
        self.register_buffer("stored", torch.zeros(0))
        self.register_buffer("weights", torch.zeros(0))

    def forward(self, features: Tensor, head: Head) -> Tensor:
        """Divides each row by its own temperature."""
        logits = head_logits(features, head)
        if self.weights.numel() == 0:
            return logits
        distance = self.distance(features, head).to(logits.dtype)
        return logits / temperature_at(self.weights.to(logits.dtype), distance)[:, None]

    def distance(self, features: Tensor, head: Head) -> Tensor:
        """To the k-th nearest stored row, (n,)."""
        points = on_sphere(seen_features(self.features, features, head))
        count = 1 if self.reference else min(self.neighbours, self.stored.shape[0])
        squared = nearest(points, self.stored, count)[:, -1]
        return squared if self.reference else squared.sqrt()

    def sound(self) -> bool:
        """Whether rows have length 1, and weights are two, not below 0 but for the published w0."""
        return self.weights.numel() == 0 or (
            self.weights.shape == (2,)
            and bool(torch.isfinite(self.weights).all())
            and (self.reference or bool((self.weights >= 0).all()))
            and self.stored.ndim == 2
            and self.stored.numel() > 0
            and torch.allclose(on_sphere(self.stored), self.stored.float(), atol=0.01)
        )

    def learn(self, problem: Problem) -> list[StepReport]:
        """Stores training rows, measures every fit row's distance once, and searches w."""
        self.reset()
        head, rows = problem.head, problem.facts.rows
        assert head is not None
        assert problem.train is not None
        loss = brier if self.reference else problem.smooth_loss(self.name)
        train = self._usable(problem.train, problem)
        self.assign(stored=on_sphere(seen_features(self.features, features_of(train), head)))
        # Too expensive to be measured again in a search.
        scores = [self.distance(features_of(b), head).double() for b in problem.data]
        data = Scored(problem.data, scores)
        found = published_weights(data, rows) if self.reference else best_weights(data, rows, loss)
        if found is None:
            return [settle(self, problem, {}, "each row's logits are all equal")]
        w0, w1 = found.w0, found.w1
        self.assign(weights=torch.tensor([w0, w1]))
        low, mean, high = (max(w0 + w1 * s, TINY) for s in data.range())
        values, message = {"w0": w0, "w1": w1}, f"T = {w0:.4g} + {w1:.4g} s"
        message += f", from {low:.4g} to {high:.4g}"
        details = {"T_mean": mean, "T_min": low, "T_max": high, "rows_kept": len(train)}
        ended = found.converged, found.warning, details
        return [settle(self, problem, values, message, *ended, always=self.reference)]

    def _usable(self, train: Data, problem: Problem) -> Batch:
        """The training rows to keep.

        A process that raised while it reads would leave the others waiting for its rows, so it
        stops reading and all of them raise afterwards.
        """
        width, unusable = problem.facts.width, False

        def checked() -> Iterator[Batch]:
            nonlocal unusable
            for batch in train:
                values = batch.features
                fits = values is not None and values.shape[1] == width
                unusable = not fits or not bool(torch.isfinite(features_of(batch)).all())
                if unusable:
                    return
                yield batch

        kept = hashed_sample(checked(), self.references, width=width, device=problem.facts.device)
        if bool(dist.largest(torch.tensor(int(unusable)))):
            raise InputError(f"density: every row of train must hold {width} finite features")
        if not len(kept):
            raise InputError("density: train is empty: pass rows the network was trained on")
        return kept


def temperature_at(weights: Tensor, distance: Tensor) -> Tensor:
    """T = w0 + w1 s, (n,), above 0."""
    return (weights[0] + weights[1] * distance).clamp(min=TINY)


@dataclass(frozen=True)
class Scored:
    """Data in which each row's distance stands where the features stood.

    Attributes:
        data: the batches, with logits.
        scores: (n,) of each batch, in the order of the batches.
    """

    data: Data
    scores: list[Tensor]

    def __iter__(self) -> Iterator[Batch]:
        for batch, score in zip(self.data, self.scores, strict=True):
            yield Batch(stored_logits(batch), batch.labels, score)

    def range(self) -> tuple[float, float, float]:
        """The shortest, mean and longest distance, over all processes."""
        scores = torch.cat([torch.zeros(0, dtype=torch.float64), *map(Tensor.cpu, self.scores)])
        total, rows = dist.total(torch.stack([scores.sum(), torch.tensor(float(len(scores)))]))
        ends = torch.full((2,), -torch.inf, dtype=torch.float64)
        if len(scores):
            ends = torch.stack([-scores.min(), scores.max()])
        shortest, longest = dist.largest(ends).tolist()
        return -shortest, float(total / rows), longest


@dataclass(frozen=True)
class Found:
    """Where the search for w ended."""

    w0: float
    w1: float
    converged: bool = True
    warning: str = ""


def best_weights(data: Scored, rows: int, loss: Loss) -> Found | None:
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
        divided = Through(
            data, lambda b: stored_logits(b).double() / features_of(b)[:, None], keep=0
        )
        other = temper(divided, loss)
        assert other is not None
        choices.append(Found(0.0, other.temperature))

    # Both above 0, as logarithms, from the one temperature halved between them.
    first = math.log(alone.w0 / 2)

    def objective(at: Tensor, batch: Batch) -> Tensor:
        parts = at.clamp(first - REACH, first + REACH).exp()
        return _summed(loss, batch, parts[0] + parts[1] * features_of(batch) / mean)

    both = minimize(objective, torch.full((2,), first), data, rows)
    w0, w1 = both.at.clamp(first - REACH, first + REACH).exp().tolist()
    choices.append(Found(w0, w1 / mean, both.converged))

    best, lowest = alone, math.inf
    for choice in choices:
        weights = torch.tensor([choice.w0, choice.w1], dtype=torch.float64)

        def changed(logits: Tensor, batch: Batch, weights: Tensor = weights) -> Tensor:
            score = features_of(batch)
            return loss.sums(logits / temperature_at(weights.to(score), score)[:, None], batch)

        value = measure(data, replace(loss, sums=changed))[0]
        if value < lowest - GAIN:
            best, lowest = choice, value
    return best


def published_weights(data: Scored, rows: int) -> Found:
    """From w = 1, by the squared error, within the published bounds."""

    def objective(at: Tensor, batch: Batch) -> Tensor:
        temperature = at[0].clamp(-100, 100) + at[1].clamp(0, 1e4) * features_of(batch)
        return _summed(brier, batch, temperature.clamp(min=TINY))

    found = minimize(objective, torch.ones(2), data, rows)
    w0, w1 = found.at.tolist()
    return Found(min(max(w0, -100.0), 100.0), min(max(w1, 0.0), 1e4), found.converged)


def _summed(loss: Loss, batch: Batch, temperature: Tensor) -> Tensor:
    """The summed loss of a batch at a temperature for each row, differentiable in these."""
    logits = stored_logits(batch)
    if loss is nll:
        return row_nll(logits, batch.labels, 1 / temperature).sum()
    return loss.sums(logits / temperature[:, None], batch)[0]
