"""Ensemble temperature scaling: scaled, plain and uniform mixed (Zhang et al., ICML 2020).

Given t, the weights are a convex problem of three numbers that needs no more of a row than the
probabilities of its true class; so t alone is searched, with the best weights at every t.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from featcal.core import dist
from featcal.core.batch import Batch, Data, stored_logits
from featcal.core.calibrator import LogitMap, keep_prediction
from featcal.core.checks import InputError, check_choice, check_flags
from featcal.core.fit import CRITERIA, Loss, Problem, StepReport, nll, settle
from featcal.core.gradient import Weighted, likeliest_weights, published_lbfgs, simplex_minimum
from featcal.core.progress import calm
from featcal.core.scalar import CAP, Array, Point, Walk, best_of, refine, temper

SMOOTH = [name for name, loss in CRITERIA.items() if loss.smooth]
SCAN = (-1.2, -0.8, -0.4, 0.0, 0.4, 0.8, 1.2)  # logarithms of t around the best single temperature
REACH = 4.0  # how far from it the search may go
CLOSE = 1e-3  # half the width of the parabola that gives the last digits of log t


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
    title = "ensemble temperature scaling"
    symbols: ClassVar[dict[str, str]] = {"temperature": "T"}
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
            return mixed_logits(weights, logits / temperature, logits)
        scaled, plain = (logits / temperature).log_softmax(1), logits.log_softmax(1)
        parts = torch.stack([scaled, plain, torch.full_like(plain, -math.log(logits.shape[1]))])
        mixed = torch.logsumexp(parts + weights.log()[:, None, None], 0)  # (3, n, k) -> (n, k)
        return keep_prediction(mixed, logits)

    def learn(self, problem: Problem) -> list[StepReport]:
        """Searches t, with the best weights for every t."""
        self.reset()
        criterion = problem.criterion(self.criterion)
        with calm(problem.facts.rows * problem.facts.classes):
            search = published_mixture if self.reference else best_mixture
            found = search(problem, criterion)
        if found is None:
            return [settle(self, problem, {}, "")]
        self.assign(temperature=found.temperature, weights=torch.from_numpy(found.weights))
        at, (scaled, plain, uniform) = f"T = {found.temperature:.4g}", found.weights.tolist()
        message = (
            f"{at} for {scaled:.2%} of the mixture, the network's own probabilities for "
            f"{plain:.2%}, the uniform ones for {uniform:.2%}"
        )
        if found.weights.tolist() == [1, 0, 0]:
            message = f"{at} and no other part: the same as temperature scaling"
        warning = ""
        if uniform == 1:
            warning = (
                "ensemble gives every row uniform probabilities: the logits are no better than "
                "guessing"
            )
        elif found.capped:
            warning = (
                f"ensemble stopped at the cap {at}: the logits are no better than guessing, so no "
                "temperature is best"
            )
        values = {"temperature": found.temperature, "w0": scaled, "w1": plain, "w2": uniform}
        details = {"criterion": self.criterion, "iterations": found.steps}
        ended, always = (found.converged, warning, details), self.reference
        return [settle(self, problem, values, message, *ended, always=always, criterion=criterion)]


@dataclass(frozen=True)
class Mixture:
    """Where a search ended: t, w (3,), the values of t tried or steps made, and how it ended."""

    temperature: float
    weights: Array
    steps: int
    converged: bool
    capped: bool = False


def best_mixture(problem: Problem, criterion: Loss) -> Mixture | None:
    """The t and w of the lowest loss; None where no temperature matters.

    The best single temperature is among the t tried, so the result is never worse.
    """
    single = temper(problem.data, criterion)
    if single is None:
        return None
    weights_at = (likeliest_at if criterion.base is nll else least_squares_at)(problem)
    tried: dict[float, Weighted] = {}

    def point(log_t: float) -> Point:
        tried[log_t] = weights_at(math.exp(log_t))
        return Point(log_t, tried[log_t][0])

    start, side = math.log(single.temperature), float(single.capped[0])
    scan = [start]
    few = problem.loss.smoothing > 0  # wrong rows: the uniform part would take them, t go anywhere
    if side == 0 and not few:
        scan += [start + step for step in SCAN if step != 0]
    elif side < 0:
        # Logits that seem no better than guessing may do so for a few rows, which the uniform part
        # can take: the scale of the logits themselves, from which the cap is a fixed distance, is
        # the place to start anew. Logits that separate the labels leave nothing to look for.
        scan += [start - math.log(CAP) + step for step in SCAN]
    seen, settled = [point(at) for at in scan], False
    best = best_of(seen)
    capped = bool(side) and best.at == start
    if not capped and not few:
        walk = Walk(best.at - REACH, best.at + REACH, 40, 1e-9)
        seen, settled = refine(lambda log_t: point(log_t).score, seen, walk)
        best = best_of(seen)
        for _ in range(2):  # the vertex of a parabola close by, where that is lower still
            left, right = (point(best.at + side * CLOSE).score for side in (-1, 1))
            bend = right - 2 * best.score + left
            if bend > 0:
                shift = min(max((right - left) / (2 * bend), -1), 1)
                best = best_of([best, point(best.at - CLOSE * shift)])
    weights = tried[best.at][1]
    temperature = math.exp(best.at) if weights[0] > 0 else 1.0  # a part of no weight needs no t
    return Mixture(temperature, weights, len(tried), settled or few, capped)


def likeliest_at(problem: Problem) -> Callable[[float], Weighted]:
    """A temperature -> the weights of the lowest NLL there.

    Log p of the true class under each part is all they need.
    """
    plain = true_class(problem.data, 1.0)
    uniform = torch.full_like(plain, -math.log(problem.facts.classes))

    def weights_at(temperature: float) -> Weighted:
        parts = torch.stack([true_class(problem.data, temperature), plain, uniform], 1)
        return likeliest_weights(parts, problem.facts.rows)

    return weights_at


def true_class(data: Data, temperature: float) -> Tensor:
    """The log of softmax(z / t) at the label, of this process's rows: (n,) float64 throughout.

    Rounding in float32 roughens the loss enough to hide t beyond its third digit.
    """
    found = []
    for batch in data:
        scaled = stored_logits(batch).double() / temperature
        found.append(-F.cross_entropy(scaled, batch.labels, reduction="none"))
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.float64)


def least_squares_at(problem: Problem) -> Callable[[float], Weighted]:
    """A temperature -> the weights of the lowest squared error, a quadratic that is solved."""
    share = 1 / problem.facts.classes

    def weights_at(temperature: float) -> Weighted:
        def sums_of(batch: Batch) -> Tensor:
            logits = stored_logits(batch).double()
            scaled, plain = (logits / temperature).softmax(1), logits.softmax(1)
            products = torch.stack([scaled * scaled, scaled * plain, plain * plain]).sum(2)
            place = batch.labels[:, None]
            true = torch.stack([part.gather(1, place)[:, 0] for part in (scaled, plain)])
            return torch.cat([products, true]).sum(1)

        mean = dist.summed(map(sums_of, problem.data), 5) / problem.facts.rows
        ss, sp, pp, s, p = mean.tolist()
        bend = np.array([[ss, sp, share], [sp, pp, share], [share, share, share]])
        slope = -np.array([s, p, share])
        weights = simplex_minimum(bend, slope)
        return float(weights @ bend @ weights + 2 * slope @ weights + 1), weights

    return weights_at


def mixed_logits(weights: Tensor, scaled: Tensor, plain: Tensor) -> Tensor:
    """The published mixture."""
    return weights[0] * scaled + weights[1] * plain + weights[2] / plain.shape[1]


def published_mixture(problem: Problem, _: Loss) -> Mixture:
    """T with w = (1, 0, 0), then w with t fixed, both as the paper's code does it."""
    data, classes = problem.data, problem.facts.classes
    first = published_lbfgs(lambda at, logits: logits / at, torch.ones(1), data, classes)
    temperature = float(first.at)
    second = published_lbfgs(
        lambda at, logits: mixed_logits(at, logits / temperature, logits),
        torch.tensor([1.0, 0.0, 0.0]),
        data,
        classes,
    )
    settled = first.converged and second.converged
    return Mixture(temperature, second.at.cpu().numpy(), first.steps + second.steps, settled)
