"""Minimising over one positive scalar when every evaluation is a pass over the data.

The scalar is handled as its logarithm, so that a search is free of units.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

STEP = 0.15  # the first step away from a starting point, in log units: about 15 %
REACH, BEYOND = 0.4, 0.25  # the longest step between known points, and past the last of them


Array = NDArray[np.float64]


@dataclass(frozen=True)
class Minimum:
    """Where a search ended: the scalar, its score, the evaluations, and whether it settled."""

    at: float
    score: float
    steps: int
    converged: bool


@dataclass(frozen=True, order=True)
class Point:
    """One evaluation: the logarithm of the scalar, and the score there."""

    at: float
    score: float


def best_of(points: Sequence[Point]) -> Point:
    """The lowest score; the smaller scalar among equals."""
    return min(points, key=lambda point: (point.score, point.at))


Shape = Callable[[Array], Array]  # logarithms -> what the score looks like, up to a tilt


def flat(at: Array) -> Array:
    """No assumption about the score's shape."""
    return np.zeros_like(at)


def fitted_shape(points: Sequence[Point], degree: int = 3) -> Shape:
    """A polynomial close to scores seen on other data, continued outwards as a parabola."""
    at = np.array([point.at for point in points])
    score = np.array([point.score for point in points])
    curve = np.polynomial.Polynomial.fit(at, score, min(degree, len(at) - 1))
    slope, bend = curve.deriv(), curve.deriv(2)

    def shape(where: Array) -> Array:
        inner = np.clip(where, at.min(), at.max())
        out = where - inner
        return np.asarray(
            curve(inner) + slope(inner) * out + np.maximum(bend(inner), 0) * out**2 / 2
        )

    return shape


@dataclass(frozen=True)
class Walk:
    """The rules of a downhill walk over logarithms.

    Attributes:
        low: the lowest logarithm allowed.
        high: the highest.
        evaluations: how many scores may be asked for.
        tolerance: stop when the model promises a gain smaller than this.
        shape: what the score is known to look like beforehand, up to corrections.
    """

    low: float
    high: float
    evaluations: int
    tolerance: float
    shape: Shape = flat

    @property
    def close(self) -> float:
        """Points nearer than this are the same point."""
        return 4 * math.sqrt(self.tolerance)


def refine(
    score: Callable[[float], float], known: Sequence[Point], walk: Walk
) -> tuple[list[Point], bool]:
    """Walks downhill from the best known point and settles in its valley.

    Returns:
        All points, and whether the model promised less than the tolerance at the end.
    """
    points = sorted(known)
    for _ in range(walk.evaluations):
        at = next_point(points, walk)
        if at is None:
            return points, True
        points = sorted([*points, Point(at, score(at))])
    return points, next_point(points, walk) is None


def next_point(points: list[Point], walk: Walk) -> float | None:
    """Where to evaluate next; None when nothing is to be gained.

    The model is trusted no further than the points beside the best one, and no further than BEYOND
    where there are none.
    """
    best = best_of(points)
    left = max((p.at for p in points if p.at < best.at), default=None)
    right = min((p.at for p in points if p.at > best.at), default=None)
    if len(points) < (2 if walk.shape is not flat else 3):
        return _first_steps(best.at, left, right, walk)
    low = max(walk.low, best.at - BEYOND if left is None else max(left, best.at - REACH))
    high = min(walk.high, best.at + BEYOND if right is None else min(right, best.at + REACH))
    near = sorted(points, key=lambda point: abs(point.at - best.at))[:4]
    target = model_minimum(near, low, high, walk.shape)
    if best.score - target.score < walk.tolerance:
        tight = len(points) > 2 and max(best.at - low, high - best.at) <= REACH / 2
        return None if tight else _widest(best.at, low, high)
    edge = left if target.at < best.at else right
    return _clear(target.at, best.at, edge, walk)


def _first_steps(best: float, left: float | None, right: float | None, walk: Walk) -> float | None:
    """Until the model can speak: downhill, by steps that grow."""
    up = right is None and best < walk.high
    other = right if left is None else left
    length = STEP if other is None else min(1.6 * abs(best - other), 1.6 * REACH)
    at = best + (length if up else -length)
    at = min(max(at, walk.low), walk.high)
    return at if abs(at - best) >= walk.close else None


def _widest(best: float, low: float, high: float) -> float:
    """A point in the wider of the two gaps, a third of the way from the best point to its end."""
    edge = high if high - best > best - low else low
    return best + (edge - best) / 3


def _clear(at: float, best: float, edge: float | None, walk: Walk) -> float | None:
    """Keeps a target off the neighbour, where it would repeat what is known."""
    if edge is not None and abs(edge - at) < 0.1 * abs(edge - best):
        at = best + 0.6 * (edge - best)
    if abs(at - best) < walk.close:
        at = best + math.copysign(walk.close, at - best)
    return at if edge is None or abs(edge - best) > 2 * walk.close else None


def model_minimum(points: Sequence[Point], low: float, high: float, shape: Shape) -> Point:
    """The minimum on [low, high] of the shape plus a polynomial through what it leaves over."""
    best = best_of(points)
    at = np.array([point.at for point in points])
    rest = np.array([point.score - best.score for point in points]) - shape(at)
    coefficients = np.linalg.lstsq(np.vander(at - best.at, increasing=True), rest)[0]
    grid = np.linspace(low, high, 2001)
    values = shape(grid) + np.polynomial.polynomial.polyval(grid - best.at, coefficients)
    lowest = int(values.argmin())
    return Point(float(grid[lowest]), best.score + float(values[lowest]))


def vertex(points: Sequence[Point]) -> float:
    """Where a parabola through the best point and its neighbours is lowest, near the best point."""
    ordered = sorted(points)
    centre = ordered.index(best_of(ordered))
    if centre in (0, len(ordered) - 1):
        return ordered[centre].at
    left, middle, right = ordered[centre - 1 : centre + 2]
    grid = np.linspace((left.at + middle.at) / 2, (middle.at + right.at) / 2, 101)
    three = (left, middle, right)
    curve = np.polynomial.Polynomial.fit([p.at for p in three], [p.score for p in three], 2)
    return float(grid[curve(grid).argmin()])


def minimize_log(
    score: Callable[[float], float], low: float, high: float, *, points: int = 41
) -> Minimum:
    """The minimum of a score over a positive scalar: a scan in its logarithm, then a walk."""
    grid = np.linspace(math.log(low), math.log(high), points).tolist()
    scan = [Point(u, score(math.exp(u))) for u in grid]
    walk = Walk(grid[0], grid[-1], evaluations=40, tolerance=1e-12)
    seen, settled = refine(lambda u: score(math.exp(u)), scan, walk)
    best = best_of(seen)
    inner = grid[0] < best.at < grid[-1]
    return Minimum(math.exp(best.at), best.score, len(seen), settled and inner)
