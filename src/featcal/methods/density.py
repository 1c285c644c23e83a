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
from featcal.core.batch import Batch, Data, Head, stored_logits
from featcal.core.calibrator import Calibrator, seen_features
from featcal.core.checks import InputError, check_choice, check_flags, check_whole
from featcal.core.fit import Problem, StepReport, settle
from featcal.core.gradient import minimize
from featcal.core.loss import Loss, brier, measure, nll
from featcal.core.rows import row_nll
from featcal.core.sample import hashed_sample, nearest, on_sphere
from featcal.core.scalar import temper
from featcal.heads.head import head_logits

# --- The weights of a temperature that grows with distance: two numbers, both at least 0.

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


VIEWS = ("unclipped", "clipped")
NEIGHBOURS = 50


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
        distance = self.distance(self._seen(features, head)).to(logits.dtype)
        temperature = temperature_at(self.weights.to(logits.dtype), distance)
        return logits / temperature[:, None]

    def distance(self, features: Tensor) -> Tensor:
        """To the k-th nearest stored row, (n,)."""
        count = 1 if self.reference else min(self.neighbours, self.stored.shape[0])
        squared = nearest(on_sphere(features), self.stored, count)[:, -1]
        return squared if self.reference else squared.sqrt()

    def _seen(self, features: Tensor, head: Head) -> Tensor:
        return seen_features(features, head) if self.features == "clipped" else features

    def check(self) -> None:
        """Rows of length 1, and two finite weights; never below 0 but for the published w0."""
        if self.weights.numel() == 0:
            return
        weights = self.weights.double()
        sound = weights.shape == (2,) and bool(torch.isfinite(weights).all())
        if not sound or not self._rows_fit():
            raise InputError("density: the stored values do not fit it: the file is damaged")
        if bool((weights < 0).any()) and not self.reference:
            raise InputError(f"density: w is {weights.tolist()}: it must not be below 0")

    def _rows_fit(self) -> bool:
        """Whether there are stored rows, each of length 1 or 0."""
        stored = self.stored
        if stored.ndim != 2 or stored.numel() == 0:
            return False
        return torch.allclose(on_sphere(stored), stored.float(), atol=0.01)

    def learn(self, problem: Problem) -> list[StepReport]:
        """Stores training rows, measures every fit row's distance once, and searches w."""
        self.reset()
        loss = brier if self.reference else problem.smooth_loss(self.name)
        self._store(problem)
        data = Scored(problem.data, self._distances(problem))
        found = (
            published_weights(data, problem)
            if self.reference
            else best_weights(data, problem, loss)
        )
        if found is None:
            return [settle(self, problem, {}, "each row's logits are all equal")]
        self.assign(weights=torch.tensor([found.w0, found.w1]))
        return [self._report(problem, data, found)]

    def _store(self, problem: Problem) -> None:
        facts = problem.facts
        assert problem.train is not None
        assert problem.head is not None
        rows = Usable(problem.train, facts.width)
        train = hashed_sample(rows, self.references, width=facts.width, device=facts.device)
        rows.leave_together()
        assert train.features is not None
        if not len(train):
            raise InputError("density: train is empty: pass rows the network was trained on")
        self.assign(stored=on_sphere(self._seen(train.features, problem.head)))

    def _distances(self, problem: Problem) -> list[Tensor]:
        """Of each batch, in the order of the batches: too dear to be measured again in a search."""
        found = []
        for batch in problem.data:
            assert batch.features is not None
            assert problem.head is not None
            found.append(self.distance(self._seen(batch.features, problem.head)).double())
        return found

    def _report(self, problem: Problem, data: Scored, found: Found) -> StepReport:
        low, mean, high = (max(found.w0 + found.w1 * s, TINY) for s in data.range())
        return settle(
            self,
            problem,
            {"w0": found.w0, "w1": found.w1},
            f"T = {found.w0:.4g} + {found.w1:.4g} s, from {low:.4g} to {high:.4g}",
            converged=found.converged,
            warning=found.warning,
            details={"T_mean": mean, "T_min": low, "T_max": high, "rows_kept": len(self.stored)},
            always=self.reference,
        )


@final
class Usable:
    """Training rows up to the first batch that cannot be used; why not is told afterwards.

    A process that raised while it reads would leave the others waiting for its rows.
    """

    def __init__(self, train: Data, width: int) -> None:
        self.train, self.width = train, width
        self.refused: InputError | None = None

    def __iter__(self) -> Iterator[Batch]:
        try:
            yield from _checked(self.train, self.width)
        except InputError as error:
            self.refused = error

    def leave_together(self) -> None:
        """Raises on every process where one of them met rows it cannot use."""
        anywhere = bool(dist.largest(torch.tensor(int(self.refused is not None))))
        if self.refused is not None:
            raise self.refused
        if anywhere:
            raise InputError("density: another process found train rows it cannot use: see there")


def _checked(train: Data, width: int) -> Iterator[Batch]:
    """The training rows, refused by name where they cannot be used."""
    for batch in train:
        if batch.features is None:
            raise InputError("density: train holds logits alone: pass rows with features")
        if batch.features.shape[1] != width:
            raise InputError(
                f"density: train has {batch.features.shape[1]} features a row and the data "
                f"{width}: pass rows of the same layer"
            )
        if not bool(torch.isfinite(batch.features.sum(dtype=torch.float64))):
            raise InputError("density: train holds NaN or infinite features: remove those rows")
        yield batch
