"""The best t of a mixture, with the best weights for every t (see `core.mixture`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from featcal.core import dist
from featcal.core.batch import Data, stored_logits
from featcal.core.fitting import Problem
from featcal.core.loss import Loss, nll
from featcal.core.mixture import Weighted, likeliest_weights, simplex_minimum
from featcal.core.solve import Point, Walk, best_of, refine
from featcal.core.tempering import CAP, temper

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
