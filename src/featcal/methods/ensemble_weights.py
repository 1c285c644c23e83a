"""The best weights of a mixture for a given t, and the best t with them.

The NLL of a mixture is convex in its weights. Each pass over the rows gives the slope and the
curvature; the step goes to the lowest point of that quadratic on the simplex, which three unknowns
allow to find exactly. The fixed points are those of EM, and so is the promise never to lose; EM
itself creeps wherever a weight goes to 0, as it does on most networks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from featcal.core import dist
from featcal.core.batch import Data, stored_logits
from featcal.core.fitting import Problem
from featcal.core.loss import Loss, nll
from featcal.core.solve import Point, Walk, best_of, refine
from featcal.core.tempering import CAP, temper

Array = NDArray[np.float64]
Weighted = tuple[float, Array]  # a loss, and the weights (3,) that reach it

ENOUGH = 1e-12  # what a step may still promise, in nats a row, when the search ends
STEPS = 100
STEEPEST = 300.0  # log of the largest ratio of a part to the mixture: its square is still finite
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


def likeliest_weights(parts: Tensor, rows: int) -> Weighted:
    """The weights of a mixture that fit best, and the mean NLL they reach.

    Args:
        parts: log-probabilities of what happened under each part, (n, 3), this process's rows.
        rows: of all processes.
    """
    weights = np.full(3, 1 / 3)  # inside, where no part of the mixture has a ratio above 3
    value, slope, bend = _curve(parts, weights, rows)
    for _ in range(STEPS):
        # What is left to gain is at most the steepest descent to a corner: convexity.
        if weights @ slope - slope.min() < ENOUGH:
            break
        step = simplex_minimum(bend, slope - bend @ weights) - weights
        for length in 0.5 ** np.arange(40):
            there = _curve(parts, weights + length * step, rows)
            if there[0] <= value + 1e-4 * length * float(slope @ step):
                break
        else:
            break  # a gain below rounding
        weights = weights + length * step
        value, slope, bend = there
    return value, weights


def _curve(parts: Tensor, weights: Array, rows: int) -> tuple[float, Array, Array]:
    """Mean NLL of a mixture, its slope (3,) and its curvature (3, 3) in the weights."""
    mixed = torch.logsumexp(parts + torch.from_numpy(weights).log(), 1)
    ratios = (parts - mixed[:, None]).clamp(max=STEEPEST).exp()
    sums = torch.cat([-mixed.sum().view(1), -ratios.sum(0), (ratios.T @ ratios).flatten()])
    found = (dist.total(sums) / rows).numpy()
    return float(found[0]), found[1:4], found[4:].reshape(3, 3)


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


def simplex_minimum(bend: Array, slope: Array) -> Array:
    """The w >= 0 with sum 1 that minimises w'Bw / 2 + s'w: the best of all faces' own minima.

    Corners come first and win ties, so that parts that add nothing get no weight.
    """
    best, at = math.inf, np.zeros(3)
    for size in (1, 2, 3):
        for face in combinations(range(3), size):
            weights = _on_face(bend, slope, list(face))
            value = float(weights @ bend @ weights / 2 + slope @ weights)
            if weights.min() >= 0 and value < best - 1e-15 * abs(value):
                best, at = value, weights
    return at


def _on_face(bend: Array, slope: Array, face: list[int]) -> Array:
    """The minimum where only the weights of a face are not 0; some may come out below 0."""
    size = len(face)
    system = np.zeros((size + 1, size + 1))
    system[:size, :size] = bend[np.ix_(face, face)]
    system[size, :size] = system[:size, size] = 1
    weights = np.zeros(3)
    weights[face] = np.linalg.lstsq(system, np.append(-slope[face], 1.0))[0][:size]
    total = weights.sum()
    return weights / total if total > 0 else weights - 1
