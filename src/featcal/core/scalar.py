"""Minimising over one positive scalar when every evaluation is a pass over the data.

Two searches. A walk over the logarithm of the scalar serves any score: a polynomial model of the
scores seen so far says where to look next. Newton's method serves the NLL in the inverse
temperature b = 1/T, for all rows or for every cell of rows at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from featcal.core import dist
from featcal.core.batch import BLOCK, Batch, Data, stored_logits, thinned
from featcal.core.fit import Loss, measure, nll
from featcal.core.progress import spread

Array = NDArray[np.float64]
Shape = Callable[[Array], Array]  # logarithms -> what the score looks like, up to a tilt
CellOf = Callable[[Batch], Tensor]  # (n,) int64, the cell of each row

STEP = 0.15  # the first step away from a starting point, in log units: about 15 %
REACH, BEYOND = 0.4, 0.25  # the longest step between known points, and past the last of them

CAP = 1000.0  # the scaled logits' spread a temperature may reach, up or down
STEPS = 60
PROBE = 12  # Newton from T = 1 has settled by then wherever there is a minimum
SURE = 1e-6  # nats per row: with less than this to lose, rows may be right and sure for ever
THINNED, MANY = (64, 8), 2**18  # every so many rows are asked first, where logits are as many
ROUNDS, TRUSTED = 30, 0.25  # of an expansion: to its minimum, and the longest step in b'/b
ENOUGH, ROUGHLY = 3e-8, 0.01  # relative error of b at the end, and where a start is wanted
NOTHING = 1e-12  # nats per row: a step that gains less is the last
LN2 = math.log(2)  # 2^x takes a CPU a quarter of the time of e^x


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
    close = 4 * math.sqrt(walk.tolerance)  # points nearer than this are the same point
    if len(points) < (2 if walk.shape is not flat else 3):
        # Until the model can speak: downhill, by steps that grow.
        other = right if left is None else left
        length = STEP if other is None else min(1.6 * abs(best.at - other), 1.6 * REACH)
        up = right is None and best.at < walk.high
        at = min(max(best.at + (length if up else -length), walk.low), walk.high)
        return at if abs(at - best.at) >= close else None
    low = max(walk.low, best.at - BEYOND if left is None else max(left, best.at - REACH))
    high = min(walk.high, best.at + BEYOND if right is None else min(right, best.at + REACH))
    near = sorted(points, key=lambda point: abs(point.at - best.at))[:4]
    target = model_minimum(near, low, high, walk.shape)
    if best.score - target.score < walk.tolerance:
        if len(points) > 2 and max(best.at - low, high - best.at) <= REACH / 2:
            return None
        # A look into the wider of the two gaps, a third of the way to its end.
        end = high if high - best.at > best.at - low else low
        return best.at + (end - best.at) / 3
    # Off the neighbour, where an evaluation would repeat what is known.
    at, edge = target.at, left if target.at < best.at else right
    if edge is not None and abs(edge - at) < 0.1 * abs(edge - best.at):
        at = best.at + 0.6 * (edge - best.at)
    if abs(at - best.at) < close:
        at = best.at + math.copysign(close, at - best.at)
    return at if edge is None or abs(edge - best.at) > 2 * close else None


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
    three = left, middle, right = ordered[centre - 1 : centre + 2]
    grid = np.linspace((left.at + middle.at) / 2, (middle.at + right.at) / 2, 101)
    curve = np.polynomial.Polynomial.fit([p.at for p in three], [p.score for p in three], 2)
    return float(grid[curve(grid).argmin()])


@dataclass(frozen=True)
class Tempered:
    """Where a search for temperatures ended.

    Attributes:
        inverse: b = 1/T of each cell, (c,) float64.
        loss: the mean loss there, over all rows.
        steps: passes over the data.
        converged: whether every cell settled inside its bracket.
        capped: -1 where a cell ended at the lowest b allowed, 1 at the highest, 0 otherwise, (c,).
    """

    inverse: Array
    loss: float
    steps: int
    converged: bool
    capped: Array

    @property
    def temperature(self) -> float:
        """T, where there is one cell."""
        return 1 / float(self.inverse[0])


@dataclass(frozen=True)
class Shrinkage:
    """A pull towards a common b0: each cell's b / b0 - 1 is taken as drawn from N(0, spread^2).

    The penalty (b / b0 - 1)^2 / (2 spread^2), in nats and not per row, keeps every cell's problem
    convex. For small deviations it is the same as log T ~ N(log T0, spread^2).
    """

    centre: float
    spread: float

    def at(self, inverse: Array) -> Array:
        """Value, slope and curvature of the penalty: (3, c)."""
        weight = 1 / (self.centre * self.spread) ** 2
        gap = inverse - self.centre
        return np.stack([weight * gap**2 / 2, weight * gap, np.full_like(gap, weight)])


def _geometric(name: str, size_of: Callable[[Tensor], Tensor]) -> Loss:
    """The geometric mean of a size of each row, so that no single row decides; 0 where all are."""

    def sums(logits: Tensor, _: object) -> Tensor:
        size = size_of(logits).double()
        there = size > 0
        return torch.stack([size.where(there, 1.0).log().sum(), there.sum(dtype=torch.float64)])

    def value(sums: Tensor, _: float) -> float:
        return math.exp(float(sums[0] / sums[1])) if sums[1] else 0.0

    return Loss(name, sums, value, size=2)


SPREAD = _geometric("top above mean", lambda z: z.amax(1) - z.mean(1))
GAP = _geometric("top above second", lambda z: -z.topk(2).values.diff(dim=1)[:, 0])


def caps_of(data: Data) -> tuple[float, float] | None:
    """The least and the largest b to look at; None where all logits of each row are equal.

    Where the spread is that of masked classes, such as -1e9, T = 1 is within them all the same.
    """
    spread = measure(data, SPREAD)[0]
    if spread == 0:
        return None
    if spread < CAP:
        return 1 / (CAP * spread), CAP / spread
    return 1 / (CAP * max(measure(data, GAP)[0], 1.0)), CAP


def temper(
    data: Data,
    loss: Loss = nll,
    *,
    start: float | None = None,
    enough: float = ENOUGH,
) -> Tempered | None:
    """The temperature that minimises a loss; None where no temperature matters.

    Newton for the NLL; for any other loss no convexity is promised, so a scan in log b comes before
    a walk.

    Args:
        data: rows with logits.
        loss: what to minimise.
        start: a b that is close, where one is known: one or two passes are left then.
        enough: how far off b may be, as a share of it.
    """
    search = partial(_newton, data, None, 1, smoothing=loss.smoothing, enough=enough)
    if loss.base is nll:
        near = _near(data, loss) if start is None and enough == ENOUGH else start
        if near is not None:
            found = search((near / 4, near * 4), start=near)
            if not found.capped.any():
                return found
    caps = caps_of(data)
    if caps is None:
        return None
    if loss.base is nll:
        return search(caps)
    low, high = caps

    def score(inverse: float) -> float:
        # A smooth loss is flat at its minimum, and float32 would hide T beyond its fourth digit.
        return measure(data, loss.after(lambda z: (z.double() if loss.smooth else z) * inverse))[0]

    end = minimize_log(score, low, high)
    capped = float(end.at >= high * (1 - 1e-9)) - float(end.at <= low * (1 + 1e-9))
    at, side = np.array([end.at]), np.array([capped])
    return Tempered(at, end.score, end.steps, end.converged, side)


def _near(data: Data, loss: Loss) -> float | None:
    """B of a few rows, then of more; None where rows are too few to ask some.

    One pass over all rows then does the work of five. Which rows were asked cannot be told from
    the answer: the search over all of them ends at the same minimum.
    """
    near = None
    for every in THINNED:
        part = thinned(data, every)
        numbers = float(sum(stored_logits(batch).numel() for batch in part))
        if float(dist.total(torch.tensor(numbers, dtype=torch.float64))) >= MANY:
            found = temper(part, loss, start=near, enough=ROUGHLY)
            near = None if found is None or found.capped.any() else float(found.inverse[0])
    return near


def temper_cells(
    data: Data,
    cell_of: CellOf,
    cells: int,
    shrink: Shrinkage | None = None,
    *,
    smoothing: float = 0.0,
) -> Tempered | None:
    """One temperature per cell, by NLL; None where no temperature matters at all.

    Cells, such as predicted classes or groups, are independent problems that share every pass over
    the data. One without rows stays at the centre of the shrinkage, or at T = 1 without one.
    """
    caps = caps_of(data)
    if caps is None:
        return None
    start = 1.0 if shrink is None else shrink.centre
    return _newton(data, cell_of, cells, caps, shrink, start=start, smoothing=smoothing)


def _newton(
    data: Data,
    cell_of: CellOf | None,
    cells: int,
    caps: tuple[float, float],
    shrink: Shrinkage | None = None,
    *,
    start: float = 1.0,
    smoothing: float = 0.0,
    enough: float = ENOUGH,
) -> Tempered:
    """Every cell's search, one step each per pass, until all have settled.

    The NLL is convex in b. With p = softmax(b z), the slope of a row is E_p[z] - z_y and the
    curvature Var_p[z]: Newton's method inside a bracket finds the one minimum without a learning
    rate, a seed or a negative T. Without `cell_of` all rows are one cell, whose third and fourth
    derivative, at a fifth of the price of a pass, make two passes one.
    """
    floor, ceiling = caps
    start = float(min(max(start, floor), ceiling))
    searches = [_Search(start, floor, ceiling, enough) for _ in range(cells)]
    for step in range(1, STEPS + 1):
        inverse = np.array([search.inverse for search in searches])
        curves, rows = _sums(data, inverse, cell_of, smoothing)
        if shrink is not None:
            curves[:3] += shrink.at(inverse) / rows
        for search, curve in zip(searches, curves.T.tolist(), strict=True):
            search.see(curve, probe=step == PROBE)
        if all(search.done for search in searches):
            break
    best = np.array([search.inverse for search in searches])
    values = np.array([search.value for search in searches])
    if shrink is not None:
        values = values - shrink.at(best)[0] / rows
    capped = np.array([float(search.capped) for search in searches])
    settled = all(search.done and not search.capped for search in searches)
    return Tempered(best, float(values.sum()), step, settled, capped)


def _sums(
    data: Data, inverse: Array, cell_of: CellOf | None, smoothing: float
) -> tuple[Array, float]:
    """What each cell adds to the mean NLL, and its derivatives in b: one pass, one reduction.

    Returns:
        (3, c), or (5, 1) where there is one cell; and the number of rows.
    """
    cells = len(inverse)
    order = 4 if cells == 1 else 2

    def sums_of(batch: Batch) -> Tensor:
        logits, labels = stored_logits(batch), batch.labels
        sums = logits.new_zeros(order + 1, cells, dtype=torch.float64)
        if cells == 1:
            curves = relative_curves(logits, labels, float(inverse[0]), smoothing, order)
            sums[:, 0] = curves.sum(1, dtype=torch.float64)
        elif cell_of is not None:
            cell = cell_of(batch).to(logits.device)
            b = torch.from_numpy(inverse).to(logits)[cell]
            curves = relative_curves(logits, labels, b, smoothing)
            sums.index_add_(1, cell, curves.double())
        return torch.cat([sums.flatten(), sums.new_full((1,), len(batch))])

    sums = dist.summed(map(sums_of, data), (order + 1) * cells + 1)
    total = max(float(sums[-1]), 1.0)
    found = sums[:-1].view(order + 1, cells).numpy() / inverse ** np.arange(order + 1)[:, None]
    return found / total, total


class _Search:
    """One cell's search for the root of the slope, inside a bracket that shrinks."""

    def __init__(self, start: float, low: float, high: float, enough: float) -> None:
        self.inverse, self.low, self.high, self.enough = start, low, high, enough
        self.floor, self.ceiling = low, high
        self.value, self.done, self.capped = math.nan, False, 0
        self.settled: tuple[float, float] | None = None  # b and value, while the cap is probed

    def see(self, curve: list[float], *, probe: bool) -> None:
        """Takes in the NLL and its derivatives at the present b and moves on, or ends."""
        value, slope, bend = curve[:3]
        if self.done:
            return
        if self.settled is not None and slope > 0:  # a minimum before the cap after all
            self.inverse, self.value = self.settled
            self.done = True
            return
        self.value = value
        self.capped = (self.inverse == self.ceiling and slope <= 0) - (
            self.inverse == self.floor and slope > 0
        )
        if slope == 0 and bend == 0:  # no rows, or rows that no temperature changes
            self.done = True
            return
        if slope > 0:
            self.high = self.inverse
        else:
            self.low = self.inverse
        if self.capped:
            self.done = True
            return
        target, lower, off = _minimum(curve, self.inverse)
        if not off < self.enough:
            # Where the likelihood keeps growing, Newton creeps towards the cap by equal steps: one
            # probe of the cap settles whether there is a minimum before it.
            outward = self.high if slope < 0 else self.low
            if probe:
                target = outward
            elif not self.low < target < self.high:
                target = math.sqrt(self.inverse * outward)
            self.inverse = target
        elif slope < 0 and value < SURE:
            # Next to nothing is left to gain upwards: the labels may be separated completely.
            self.settled = target, lower
            self.inverse = self.ceiling
        else:
            self.inverse, self.value = target, lower
            self.done = True


def _minimum(curve: list[float], b: float) -> tuple[float, float, float]:
    """Where a curve of the NLL has its minimum, the value there, and how far off that b may be.

    With four derivatives by their expansion, where it is good for the way: off by what the next
    term would move, as much smaller as the last is than the one before. Else by Newton's step, off
    by its square and more: in b below the minimum, in log b above it. There the NLL grows like a
    straight line in b with nearly no curvature, and Newton in b would jump below zero; in log b the
    same line is convex.
    """
    value, slope, bend, *higher = curve
    if higher and bend > 0:
        third, fourth = higher
        step, most = 0.0, TRUSTED * b
        for _ in range(ROUNDS):
            step = -(slope + third * step**2 / 2 + fourth * step**3 / 6) / bend
            step = min(max(step, -most), most)
        if abs(step) < most:
            terms = slope * step, bend * step**2 / 2, third * step**3 / 6, fourth * step**4 / 24
            smaller = max(abs(step / b), abs(terms[3] / terms[2]) if terms[2] else 0.0)
            off = abs(terms[3]) * smaller * 5 / (bend * b * abs(step)) if step else 0.0
            return b + step, value + sum(terms), off
    if slope > 0:
        target = b * math.exp(-slope / (b * bend + slope))
    else:
        target = b - slope / bend if bend > 0 else math.inf
    gain = slope**2 / (2 * bend) if bend > 0 else math.inf
    return target, value - gain, 0.0 if gain < NOTHING else 100 * (target / b - 1) ** 2


def row_curves(
    logits: Tensor,
    labels: Tensor,
    inverse: Tensor | float,
    smoothing: float = 0.0,
) -> Tensor:
    """Value, slope and curvature of each row's NLL in its inverse temperature b = 1/T: (3, n).

    Args:
        logits: (n, k).
        labels: (n,).
        inverse: b, one for all or (n,).
        smoothing: the share of each label that is spread over all classes.
    """
    value, slope, bend = relative_curves(logits, labels, inverse, smoothing)
    return torch.stack([value, slope / inverse, bend / inverse**2])


def relative_curves(
    logits: Tensor,
    labels: Tensor,
    inverse: Tensor | float,
    smoothing: float = 0.0,
    order: int = 2,
) -> Tensor:
    """The same with two or four derivatives in b'/b, which are those of b times b, b^2, ...

    They are the cumulants of b z under p = softmax(b z), but for the label in the first.

    Returns:
        (order + 1, n).
    """
    sums = logits.new_empty(order + 2, len(logits))

    def moments(rows: slice) -> None:  # of b z / ln 2
        some = logits[rows]
        scaled = some - some.amax(1, keepdim=True)
        scaled *= (inverse[rows, None] if isinstance(inverse, Tensor) else inverse) / LN2
        true = scaled.gather(1, labels[rows, None])[:, 0]
        if smoothing:
            true = (1 - smoothing) * true + smoothing * scaled.mean(1)
        weight = scaled.exp2()
        powers = (weight.sum(1), *(weight.mul_(scaled).sum(1) for _ in range(order)))
        # In its place at once: small results between large ones would keep freed memory from reuse.
        sums[:, rows] = torch.stack([true, *powers])

    step = len(logits) if logits.is_cuda else max(BLOCK // max(logits.shape[1], 1), 1)
    parts = [slice(start, start + step) for start in range(0, max(len(logits), 1), max(step, 1))]
    # What is left takes many steps on few numbers: once, and not for every block.
    spread(moments, parts)
    true, total, *powers = sums
    true *= LN2
    one, two, *more = (part / total * LN2**power for power, part in enumerate(powers, start=1))
    found = [total.log() - true, one - true, (two - one.square()).clamp_(min=0)]
    if more:
        three, four = more
        found.append(three - 3 * one * two + 2 * one**3)
        found.append(four - 4 * one * three - 3 * two**2 + 12 * one**2 * two - 6 * one**4)
    return torch.stack(found)


def row_nll(logits: Tensor, labels: Tensor, inverse: Tensor, smoothing: float = 0.0) -> Tensor:
    """Each row's NLL at its own b, (n,), differentiable in b alone.

    The gradient needs the slope and nothing else, so no graph over n x k numbers is kept.
    """
    with torch.no_grad():
        value, slope, _ = row_curves(logits, labels, inverse, smoothing)
    surrogate: Tensor = value + slope * (inverse - inverse.detach())
    return surrogate
