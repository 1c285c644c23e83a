"""The best weights of a mixture of three parts.

The NLL of a mixture is convex in its weights. Each pass over the rows gives the slope and the
curvature; the step goes to the lowest point of that quadratic on the simplex, which three unknowns
allow to find exactly. The fixed points are those of EM, and so is the promise never to lose; EM
itself creeps wherever a weight goes to 0, as it does on most networks.
"""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from featcal.core import dist

Array = NDArray[np.float64]
Weighted = tuple[float, Array]  # a loss, and the weights (3,) that reach it

ENOUGH = 1e-12  # what a step may still promise, in nats a row, when the search ends
STEPS = 100
STEEPEST = 300.0  # log of the largest ratio of a part to the mixture: its square is still finite


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
