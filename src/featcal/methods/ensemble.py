"""Ensemble temperature scaling: scaled, plain and uniform mixed (Zhang et al., ICML 2020).

Given t, the weights are a convex problem of three numbers that needs no more of a row than the
probabilities of its true class; so t alone is searched, with the best weights at every t.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from featcal.core import dist
from featcal.core.batch import Data, stored_logits
from featcal.core.calibrator import LogitMap
from featcal.core.checks import InputError, check_choice, check_flags
from featcal.core.fit import Problem, StepReport, settle
from featcal.core.gradient import Weighted, likeliest_weights, published_lbfgs, simplex_minimum
from featcal.core.loss import CRITERIA, Loss, measure, nll
from featcal.core.progress import calm
from featcal.core.rows import keep_prediction
from featcal.core.scalar import CAP, Point, Walk, best_of, refine, temper

# --- The best t of a mixture, with the best weights for every t (see `core.mixture`).

Array = NDArray[np.float64]

SCAN = (-1.2, -0.8, -0.4, 0.0, 0.4, 0.8, 1.2)  # logarithms of t around the best single temperature
REACH = 4.0  # how far from it the search may go
CLOSE = 1e-3  # half the width of the parabola that gives the last digits of log t


@dataclass(frozen=True)
class Mixture:
    """Where a search ended: t, w (3,), the loss there, the values of t tried, and how it ended."""

    temperature: float
    weights: Array
    loss: float
    steps: int
    converged: bool
    capped: bool


def best_mixture(problem: Problem, criterion: Loss) -> Mixture | None:
    """The t and w of the lowest loss; None where no temperature matters.

    The best single temperature is among the t tried, so the result is never worse.
    """
    single = temper(problem.data, criterion)
    if single is None:
        return None
    weights_at = (_by_likelihood if criterion is nll else _by_squares)(problem)
    tried: dict[float, Weighted] = {}

    def score(log_t: float) -> float:
        tried[log_t] = weights_at(math.exp(log_t))
        return tried[log_t][0]

    start, side = math.log(single.temperature), float(single.capped[0])
    scan = [start, *_around(start, side)]
    seen, settled = [Point(at, score(at)) for at in scan], False
    best = best_of(seen)
    if best.at != start or not side:
        seen, settled = refine(score, seen, Walk(best.at - REACH, best.at + REACH, 40, 1e-9))
        best = _vertex(score, _vertex(score, best_of(seen)))
    weights, capped = tried[best.at][1], bool(side) and best.at == start
    temperature = math.exp(best.at) if weights[0] > 0 else 1.0  # a part of no weight needs no t
    return Mixture(temperature, weights, best.score, len(tried), settled, capped)


def _around(start: float, side: float) -> list[float]:
    """Where else to look for log t.

    Logits that separate the labels leave nothing to look for. Logits that seem no better than
    guessing may do so for a few rows, which the uniform part can take: the scale of the logits
    themselves, from which the cap is a fixed distance, is the place to start anew.
    """
    if side > 0:
        return []
    centre = start - math.log(CAP) if side < 0 else start
    return [centre + step for step in SCAN if side < 0 or step != 0]


def _vertex(score: Callable[[float], float], best: Point) -> Point:
    """The vertex of a parabola through points close by, where that is lower still."""
    left, right = (score(best.at + side * CLOSE) for side in (-1, 1))
    bend = right - 2 * best.score + left
    if bend <= 0:
        return best
    at = best.at - CLOSE * min(max((right - left) / (2 * bend), -1), 1)
    return best_of([best, Point(at, score(at))])


def _by_likelihood(problem: Problem) -> Callable[[float], Weighted]:
    """The weights of the lowest NLL: log p of the true class under each part is all they need."""
    plain = _true_class(problem.data, 1.0)
    uniform = torch.full_like(plain, -math.log(problem.facts.classes))

    def weights_at(temperature: float) -> Weighted:
        parts = torch.stack([_true_class(problem.data, temperature), plain, uniform], 1)
        return likeliest_weights(parts, problem.facts.rows)

    return weights_at


def _true_class(data: Data, temperature: float) -> Tensor:
    """The log of softmax(z / t) at the label, of this process's rows: (n,) float64 throughout.

    Rounding in float32 roughens the loss enough to hide t beyond its third digit.
    """
    rows = [
        -F.cross_entropy(
            stored_logits(batch).double() / temperature, batch.labels, reduction="none"
        )
        for batch in data
        if len(batch)
    ]
    return torch.cat([torch.zeros(0, dtype=torch.float64), *(row.cpu() for row in rows)])


def _by_squares(problem: Problem) -> Callable[[float], Weighted]:
    """The weights of the lowest squared error, which is a quadratic in them: solved at once."""
    share = 1 / problem.facts.classes

    def weights_at(temperature: float) -> Weighted:
        sums = torch.zeros(5, dtype=torch.float64)
        for batch in problem.data:
            logits = stored_logits(batch).double()
            scaled, plain = (logits / temperature).softmax(1), logits.softmax(1)
            products = torch.stack([scaled * scaled, scaled * plain, plain * plain]).sum(2)
            place = batch.labels[:, None]
            true = torch.stack([part.gather(1, place)[:, 0] for part in (scaled, plain)])
            sums += torch.cat([products, true]).sum(1, dtype=torch.float64).cpu()
        ss, sp, pp, s, p = (dist.total(sums) / problem.facts.rows).tolist()
        bend = np.array([[ss, sp, share], [sp, pp, share], [share, share, share]])
        slope = -np.array([s, p, share])
        weights = simplex_minimum(bend, slope)
        return float(weights @ bend @ weights + 2 * slope @ weights + 1), weights

    return weights_at


SMOOTH = [name for name, loss in CRITERIA.items() if loss.smooth]


@final
class EnsembleTemperature(LogitMap):
    """p = w0 softmax(z / t) + w1 softmax(z) + w2 / k, with w >= 0 and w0 + w1 + w2 = 1.

    Every part keeps the order of a row, so the prediction stays.

    Args:
        criterion: what t and w are chosen by: "nll" or "brier" (the original's squared error).
        reference: the form behind the paper's tables, which mixes logits instead of probabilities:
            w0 z / t + w1 z + w2 / k, t and then w by its L-BFGS. One scale in three parts, so it
            can do no more than temperature scaling.
    """

    name = "ensemble"
    keeps_accuracy = True
    quick = "temperature"
    temperature: Tensor
    weights: Tensor

    def __init__(self, *, criterion: str = "nll", reference: bool = False) -> None:
        super().__init__()
        check_choice(self.name, "criterion", criterion, SMOOTH)
        check_flags(self.name, reference=reference)
        if reference and criterion != "nll":
            raise InputError("ensemble: reference=True is fitted by nll: leave criterion out")
        self.criterion, self.reference = criterion, reference
        self.keeps_accuracy = not reference  # nothing there keeps the scale above 0
        self.register_buffer("temperature", torch.ones(()))
        self.register_buffer("weights", torch.zeros(0))

    def map_logits(self, logits: Tensor) -> Tensor:
        """The logarithm of the mixture."""
        if self.weights.numel() == 0:
            return logits
        temperature, weights = self.temperature.to(logits.dtype), self.weights.to(logits.dtype)
        if self.reference:
            return _mixed_logits(weights, logits / temperature, logits)
        scaled, plain = (logits / temperature).log_softmax(1), logits.log_softmax(1)
        parts = torch.stack([scaled, plain, torch.full_like(plain, -math.log(logits.shape[1]))])
        mixed = torch.logsumexp(parts + weights.log()[:, None, None], 0)  # (3, n, k) -> (n, k)
        return keep_prediction(mixed, logits)

    def check(self) -> None:
        """T is one finite number above 0, and w three that are shares of 1."""
        temperature, weights = self.temperature, self.weights.double()
        lone = float(temperature) if temperature.numel() == 1 else math.nan
        if not 0 < (abs(lone) if self.reference else lone) < math.inf:
            raise InputError(
                f"ensemble: T is {temperature.tolist()}: it must be finite and above 0"
            )
        shares = self.reference or (bool((weights >= 0).all()) and abs(weights.sum() - 1) < 0.01)
        right = tuple(weights.shape) == (3,) and bool(torch.isfinite(weights).all()) and shares
        if weights.numel() and not right:
            raise InputError(f"ensemble: w is {weights.tolist()}: it must be three shares of 1")

    def learn(self, problem: Problem) -> list[StepReport]:
        """Searches t, with the best weights for every t; see `ensemble_weights`."""
        self.reset()
        criterion = CRITERIA[self.criterion]
        with calm(problem.facts.rows * problem.facts.classes):
            found = _published(problem) if self.reference else best_mixture(problem, criterion)
        if found is None:
            return [settle(self, problem, {}, "")]
        self.assign(temperature=found.temperature, weights=torch.from_numpy(found.weights))
        own = criterion is problem.loss
        if not self.reference and not own and not self._lowers(problem, criterion):
            self.reset()
            own = True
        return [self._report(problem, found, always=self.reference or not own)]

    def _lowers(self, problem: Problem, criterion: Loss) -> bool:
        before, now = measure(problem.data, criterion, criterion.after(self.map_logits))
        return now < before

    def _report(self, problem: Problem, found: Mixture, *, always: bool) -> StepReport:
        shares = dict(zip(("w0", "w1", "w2"), found.weights.tolist(), strict=True))
        return settle(
            self,
            problem,
            {"temperature": found.temperature, **shares},
            _what_was_found(found),
            converged=found.converged,
            warning=_doubt(found),
            details={"criterion": self.criterion, "iterations": found.steps},
            always=always,
        )


def _mixed_logits(weights: Tensor, scaled: Tensor, plain: Tensor) -> Tensor:
    return weights[0] * scaled + weights[1] * plain + weights[2] / plain.shape[1]


def _published(problem: Problem) -> Mixture:
    """T with w = (1, 0, 0), then w with t fixed, both as the paper's code does it."""
    data, classes = problem.data, problem.facts.classes
    first = published_lbfgs(lambda at, logits: logits / at, torch.ones(1), data, classes)
    temperature = float(first.at)
    second = published_lbfgs(
        lambda at, logits: _mixed_logits(at, logits / temperature, logits),
        torch.tensor([1.0, 0.0, 0.0]),
        data,
        classes,
    )
    settled = first.converged and second.converged
    weights: Array = second.at.cpu().numpy()
    return Mixture(temperature, weights, second.value, first.steps + second.steps, settled, False)


def _what_was_found(found: Mixture) -> str:
    if found.weights.tolist() == [1, 0, 0]:
        return f"T = {found.temperature:.4g} and no other part: the same as temperature scaling"
    scaled, plain, uniform = found.weights.tolist()
    return (
        f"T = {found.temperature:.4g} for {scaled:.2%} of the mixture, the network's own "
        f"probabilities for {plain:.2%}, the uniform ones for {uniform:.2%}"
    )


def _doubt(found: Mixture) -> str:
    if found.weights[2] == 1:
        return (
            "ensemble gives every row uniform probabilities: the logits are no better than guessing"
        )
    return found.capped * (
        f"ensemble stopped at the cap T = {found.temperature:.4g}: the logits separate the labels "
        "completely or are no better than guessing, so no temperature is best"
    )
