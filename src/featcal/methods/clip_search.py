"""The search for a clipping threshold c: the best of all thresholds in at most ten head passes.

NLL(c) is continuous and piecewise smooth but not guaranteed to have one minimum, so a global look
comes before the local one:

1. The far end is scanned exactly on all rows. A threshold touches only the rows whose largest
   activation exceeds it, and thresholds that touch 1/8, 1/32, ... of the rows cost a sixth of a
   pass together. c = inf, the identity, is the last of them and costs nothing.
2. A scan over quantiles of |x| on few rows finds the valley, and a closer look on more rows its
   shape: two passes' worth.
3. A walk over log c on all rows corrects that shape by a polynomial through the points it has
   seen: about four passes.
4. With a linear head, dz/dc gives the exact logits all around the walk's end for two more passes
   (`clip_linear.Window`), and the lowest point is picked, not modelled.

Small data with a linear head needs no walk: every threshold is looked at (`clip_linear.Path`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count, product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from featcal.core import dist
from featcal.core.batch import Batch, Data, Through, stored_logits, wide
from featcal.core.fitting import Counted, Problem, rows_asked
from featcal.core.loss import Loss, accuracy, measure
from featcal.core.progress import tell, track
from featcal.core.solve import Point, Shape, Walk, best_of, fitted_shape, flat, refine, vertex
from featcal.methods.clip_linear import Path, Window

PASSES = 10  # of the head over all rows, part passes counted in
COARSE_SHARE, COARSE_POINTS = 0.065, 14
CLOSER_SHARE, OFFSETS = 0.2, np.linspace(-0.45, 0.45, 7)
FEWEST, MOST = 64, 4096  # rows of a sample: fewer tell too little, more tell a scan nothing new
ENOUGH = 2048  # rows from which on samples can be trusted
GAIN = 1e-7  # a smaller gain over c = inf is rounding, not clipping
WINDOW, WIDE_WINDOW = 0.02, 0.045  # log thresholds looked at beside a walk that settled or not
ROUGH, FINE = 2e-5, 5e-8  # nats a walk may leave on the table: to the window, and for good


@dataclass(frozen=True)
class Trial:
    """One threshold: the criterion, the fit's loss and the accuracy it gives."""

    threshold: float
    score: float
    loss: float
    accuracy: float


@dataclass(frozen=True)
class Search:
    """How a search ended."""

    best: Trial
    before: Trial
    converged: bool
    evaluations: int


class Clipped:
    """The data with features clipped at c: rows that c does not touch keep their logits."""

    def __init__(self, problem: Problem, peaks: list[Tensor], threshold: float) -> None:
        self.problem, self.peaks, self.threshold = problem, peaks, threshold

    def __iter__(self) -> Iterator[Batch]:
        for peaks, batch in zip(self.peaks, self.problem.data, strict=True):
            yield replace(batch, logits=self._logits(batch, peaks > self.threshold))

    def _logits(self, batch: Batch, touched: Tensor) -> Tensor:
        share = float(touched.sum()) / max(len(batch), 1)
        if share == 0:
            return stored_logits(batch)
        if share > 0.7:  # picking rows would cost more than it saves
            return self._head(batch)
        logits = stored_logits(batch).clone()
        logits[touched] = self._head(batch.rows(touched)).to(logits.dtype)
        return logits

    def _head(self, batch: Batch) -> Tensor:
        assert self.problem.head is not None
        assert batch.features is not None
        return wide(self.problem.head(batch.features.clamp(-self.threshold, self.threshold)))


class Trials:
    """Tries thresholds and remembers them; later steps are refitted where fitting is joint.

    An argmax costs as much as the loss itself, so the accuracy is left out (NaN) where nobody asks.
    """

    def __init__(
        self,
        problem: Problem,
        criterion: Loss,
        view: Callable[[float], Data],
        *,
        accuracy: bool = True,
    ) -> None:
        self.problem, self.criterion, self.view = problem, criterion, view
        self.accuracy = accuracy
        self.seen: list[Trial] = []

    @classmethod
    def by_head(
        cls,
        problem: Problem,
        criterion: Loss,
        peaks: list[Tensor] | None = None,
        *,
        accuracy: bool = True,
    ) -> Trials:
        """Trials whose logits come from the head."""
        peaks = [row_peaks(batch) for batch in problem.data] if peaks is None else peaks
        return cls(problem, criterion, lambda c: Clipped(problem, peaks, c), accuracy=accuracy)

    def at(self, threshold: float) -> Trial:
        """Tries one threshold, rounded to float32 as the fitted buffer will hold it."""
        threshold = float(np.float32(threshold))
        data = self._data(threshold)
        losses = dict.fromkeys([self.criterion, self.problem.loss])
        if self.accuracy:
            losses[accuracy] = None
        values = dict(zip(losses, measure(data, *losses), strict=True))
        score, loss = values[self.criterion], values[self.problem.loss]
        self.seen.append(Trial(threshold, score, loss, values.get(accuracy, math.nan)))
        return self.seen[-1]

    def complete(self, trial: Trial) -> Trial:
        """The same trial with its accuracy."""
        return replace(trial, accuracy=measure(self._data(trial.threshold), accuracy)[0])

    def _data(self, threshold: float) -> Data:
        data = self.view(threshold)
        return data if self.problem.then is None else self._refitted(data)

    def point(self, log_threshold: float) -> Point:
        """The criterion at a threshold, both as the walk wants them."""
        return Point(log_threshold, self.at(math.exp(log_threshold)).score)

    def _refitted(self, clipped: Data) -> Data:
        then = self.problem.then
        assert then is not None
        view = Through(clipped, stored_logits, features=then.needs_features)
        then.learn(replace(self.problem, data=view, then=None))
        return Through(view, lambda batch: then(batch.features, lambda _: stored_logits(batch)))


def row_peaks(batch: Batch) -> Tensor:
    """The largest activation of each row, in absolute value."""
    assert batch.features is not None
    return batch.features.abs().amax(1)


def search(problem: Problem, criterion: Loss, guard: float) -> Search:
    """The threshold with the lowest criterion among those that keep `guard` of the accuracy."""
    row_sizes = [row_peaks(batch) for batch in problem.data]
    trials = Trials.by_head(problem, criterion, row_sizes)
    before = trials.at(math.inf)
    peaks = torch.cat([*row_sizes, torch.zeros(1, device=problem.facts.device)]).double()
    if float(dist.largest(peaks.max())) == 0:
        return Search(before, before, True, 1)
    look = look_everywhere if is_small(problem) else look_around
    seen, settled = look(problem, trials, peaks, guard)
    return Search(choose(seen, before, guard), before, settled, len(seen))


def choose(trials: list[Trial], before: Trial, guard: float) -> Trial:
    """The best trial that passes the guard; the identity unless something truly beats it."""
    allowed = [trial for trial in trials if trial.accuracy >= guard * before.accuracy]
    best = min(allowed, key=lambda trial: (trial.score, trial.threshold))
    return best if best.score < before.score - GAIN else before


def look_around(
    problem: Problem, trials: Trials, peaks: Tensor, guard: float
) -> tuple[list[Trial], bool]:
    """The far end, the valley of a sample, a walk on all rows, and a window around its end."""
    before, top = trials.seen[0], math.log(float(dist.largest(peaks.max())))
    ends = [trials.point(log_c) for log_c in track("clip: far end", far_end(peaks, problem))]
    found = valley(problem, trials.criterion)
    starts = [trials.point(min(log_c, top)) for log_c in (found.floor, *found.others)]
    known, shape = starts[:1], found.shape
    if best_of([*starts, *ends]) is not starts[0]:  # the sample was wrong about the valley
        known, shape = sorted({*starts, *ends, Point(top, before.score)}), flat
    window = Window.fits(problem)
    walk = Walk(found.low, top, evaluations(problem, window), ROUGH if window else FINE, shape)
    _, settled = refine(told(trials, walk.evaluations), known, walk)
    best = choose(trials.seen, before, 0)
    if best is before:
        return trials.seen, settled
    if best.accuracy < guard * before.accuracy:
        return towards_guard(trials, guard * before.accuracy, math.exp(top)), settled
    if not window:
        return trials.seen, settled
    return look_closely(trials, best, guard, WINDOW if settled else WIDE_WINDOW)


def told(trials: Trials, evaluations: int) -> Callable[[float], float]:
    """The score a walk asks for, with its progress told."""
    done = count(1)

    def score(log_threshold: float) -> float:
        found = trials.point(log_threshold).score
        tell("clip: walk", next(done), evaluations)
        return found

    return score


def evaluations(problem: Problem, window: bool) -> int:
    """How many thresholds the walk may try, the two passes of the window set aside."""
    used = rows_asked(problem.head) / problem.facts.rows + (2 if window else 0)
    return max(math.floor(PASSES - used), 1)


def look_closely(
    trials: Trials, best: Trial, guard: float, reach: float
) -> tuple[list[Trial], bool]:
    """Exact trials around the best: across the window, then between its two lowest."""
    problem, centre = trials.problem, best.threshold
    low, high = (centre * math.exp(side * 1.2 * reach) for side in (-1, 1))
    window = Window(problem, centre, low=low, high=high)
    close = Trials(problem, trials.criterion, window.at, accuracy=bool(guard))
    for shift in track("clip: window", np.linspace(-reach, reach, 9).tolist()):
        close.at(centre * math.exp(shift))
    lowest = min(close.seen, key=lambda trial: trial.score).threshold
    for shift in track("clip: finer window", np.linspace(-reach / 6, reach / 6, 9).tolist()):
        close.at(lowest * math.exp(shift))
    inside = abs(math.log(lowest / centre)) < 0.99 * reach
    if guard:
        return [*trials.seen, *close.seen], inside
    return [*trials.seen, close.complete(min(close.seen, key=lambda trial: trial.score))], inside


def is_small(problem: Problem) -> bool:
    """Whether a sample would be too small to trust, and the whole path cheap enough to build."""
    return problem.facts.rows < ENOUGH and Path.fits(problem)


def look_everywhere(
    problem: Problem, trials: Trials, peaks: Tensor, guard: float
) -> tuple[list[Trial], bool]:
    """All thresholds on a fine log grid, then ever finer around the best three that are allowed."""
    assert isinstance(problem.head, Counted)
    path = Trials(problem, trials.criterion, Path(problem.source, problem.head).at)
    floor = guard * trials.seen[0].accuracy
    low, high = smallest_scale(problem) - math.log(64), math.log(float(dist.largest(peaks.max())))
    grid = np.linspace(low, high, 1200 if problem.then is None else 240)
    step = float(grid[1] - grid[0])
    for log_c in track("clip: every threshold", grid.tolist()):
        path.point(log_c)
    for _ in range(2):
        allowed = [trial for trial in path.seen if trial.accuracy >= floor] or path.seen
        starts = sorted(allowed, key=lambda trial: trial.score)[:3]
        for trial, shift in product(starts, np.linspace(-step, step, 17)):
            path.point(math.log(trial.threshold) + shift)
        step /= 8
    # The best once more by the head itself: sums along a path round off.
    best = choose(path.seen, trials.seen[0], guard)
    trials.at(best.threshold)
    return trials.seen, True


def towards_guard(trials: Trials, floor: float, peak: float) -> list[Trial]:
    """Halves the way from the best threshold, which costs too much, to one that does not."""
    best = min(trials.seen, key=lambda trial: trial.score).threshold
    fine = [t.threshold for t in trials.seen if t.accuracy >= floor and t.threshold > best]
    low, high = best, min([*fine, peak])
    for _ in range(evaluations(trials.problem, window=False)):
        if high / low < 1.001:
            break
        trial = trials.at(math.sqrt(low * high))
        passed = trial.accuracy >= floor
        low, high = (low, trial.threshold) if passed else (trial.threshold, high)
    return trials.seen


def far_end(peaks: Tensor, problem: Problem) -> list[float]:
    """Log thresholds that touch 1/8, 1/32, 1/128, ... of the rows."""
    peaks = dist.gather(peaks)
    if float(dist.largest(torch.tensor(float(not problem.data.kept)))):
        return []  # without the raw logits at hand every row would be recomputed
    shares = np.array([0.5**j for j in range(3, math.floor(math.log2(len(peaks))) + 1, 2)])
    peak = float(peaks.max())
    return sorted({math.log(value) for value in quantiles(peaks, shares) if 0 < value < peak})


def quantiles(values: Tensor, tail: NDArray[np.float64]) -> list[float]:
    """The values that these shares of all values exceed."""
    thinned = values[:: max(len(values) // 2**18, 1)]  # torch.quantile sorts, and has a size limit
    found: list[float] = torch.quantile(thinned, torch.from_numpy(1 - tail).to(thinned)).tolist()
    return found


@dataclass(frozen=True)
class Valley:
    """What samples of the rows say, in logarithms of the threshold.

    Attributes:
        floor: where the deepest valley has its floor.
        others: where further valleys lie, the deepest two.
        low: the lowest threshold to consider.
        shape: what the deepest valley looks like.
    """

    floor: float
    others: list[float]
    low: float
    shape: Shape


def valley(problem: Problem, criterion: Loss) -> Valley:
    """A scan on few rows, and a closer look on more rows where it is lowest."""
    part = sample(problem, COARSE_SHARE)
    trials = Trials.by_head(part, criterion, accuracy=False)
    candidates = spread_candidates(part, COARSE_POINTS)
    coarse = [Point(math.log(c), trials.at(c).loss) for c in track("clip: scan", candidates)]
    trials = Trials.by_head(sample(problem, CLOSER_SHARE), criterion, accuracy=False)
    around: list[Point] = []
    centre = vertex(coarse)
    for _ in range(2):  # the second time only if the first look missed the floor
        missing = [u for u in centre + OFFSETS if all(abs(u - p.at) > 0.1 for p in around)]
        look = track("clip: valley", missing)
        around += [Point(u, trials.at(math.exp(u)).loss) for u in look]
        centre = best_of(around).at
        if min(around).at < centre < max(around).at:
            break
    near = sorted(point for point in around if abs(point.at - centre) <= 0.7)
    shape = fitted_shape(near)
    grid = np.linspace(near[0].at, near[-1].at, 501)
    floor = float(grid[shape(grid).argmin()])
    others = [point.at for point in valleys(coarse) if abs(point.at - floor) > 0.6]
    return Valley(floor, others[:2], min(coarse).at - math.log(64), shape)


def valleys(points: list[Point]) -> list[Point]:
    """The points lower than both of their neighbours, the lowest first."""
    middle = zip(points, points[1:], points[2:], strict=False)
    return sorted((b for a, b, c in middle if b.score < min(a.score, c.score)), key=by_score)


def by_score(point: Point) -> float:
    """The score, to sort by."""
    return point.score


def sample(problem: Problem, share: float) -> Problem:
    """The problem on a share of the rows, held in memory.

    Rows are picked by their content, so that neither the order of the rows nor their split into
    batches or ranks changes the sample.
    """
    rows = problem.facts.rows
    share = min(max(share, FEWEST / rows), MOST / rows, 1.0)
    parts = [batch.rows(_picked(batch, share)) for batch in problem.data]
    if not dist.total(torch.tensor(sum(map(len, parts)))):  # few rows, and none of them picked
        parts = list(problem.data)
    return replace(problem, source=parts, data=Through(parts, stored_logits))


def _picked(batch: Batch, share: float) -> Tensor:
    assert batch.features is not None
    bits = batch.features.float().contiguous().view(torch.int32).sum(1, dtype=torch.int64)
    mixed = bits * -7046029254386353131  # Fibonacci hashing: the high bits come out well mixed
    return ((mixed >> 32) & 0xFFFFFFFF) < share * 2**32


def activation_sizes(problem: Problem) -> Tensor:
    """The sizes of the activations that are not zero, thinned out where there are very many."""
    parts = [batch.features for batch in problem.data if batch.features is not None]
    sizes = torch.cat([part.abs().flatten() for part in parts] or [torch.zeros(0)])
    sizes = sizes[sizes > 0]
    sizes = dist.gather(sizes[:: max(len(sizes) // 2**17, 1)].double())
    # A sample of silent rows has no scale: any will do, since the far end knows the truth.
    return sizes if len(sizes) else torch.ones(1, dtype=torch.float64)


def smallest_scale(problem: Problem) -> float:
    """The logarithm of the threshold that clips 4/5 of the activations."""
    return math.log(quantiles(activation_sizes(problem), np.array([0.8]))[0])


def spread_candidates(problem: Problem, points: int) -> list[float]:
    """Thresholds from those that clip 4/5 of the activations to where the far end takes over."""
    shares = np.geomspace(0.8, 0.25 / problem.facts.width, points // 2)
    upper = quantiles(activation_sizes(problem), shares)
    # Steps of equal share where the activations lie, and of equal ratio across any gap in them.
    even = np.geomspace(upper[0], upper[-1], points - len(upper))[1:-1].tolist()
    return sorted({c for c in [upper[0] / 16, upper[0] / 4, *upper, *even] if c > 0})


def published_grid(problem: Problem, criterion: Loss, guard: float) -> Search:
    """The published search: 2,000 absolute steps of 0.01, strict comparisons, smallest c first."""
    trials = Trials.by_head(problem, criterion)
    before = trials.at(math.inf)
    best, lowest = before, math.inf
    for step in track("clip: published grid", range(1, 2001)):
        trial = trials.at(step / 100)
        if trial.score < lowest and trial.accuracy > guard * before.accuracy:
            best, lowest = trial, trial.score
    return Search(best, before, True, len(trials.seen))
