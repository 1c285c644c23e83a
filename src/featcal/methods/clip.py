"""Feature clipping: head(clamp(x, -c, c)), c by validation NLL (Tao, Dong and Xu, AAAI 2025)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, product
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from featcal.core import dist
from featcal.core.batch import (
    KEEP_BYTES,
    Batch,
    Data,
    Head,
    Through,
    raw_logits,
    stored_logits,
    wide,
)
from featcal.core.calibrator import Calibrator, FeatureMap
from featcal.core.checks import InputError, check_choice, check_flags
from featcal.core.fit import Counted, Problem, StepReport, rows_asked
from featcal.core.loss import CRITERIA, Loss, accuracy, confidence, measure
from featcal.core.progress import FEW_LARGE, calm, tell, track
from featcal.core.sample import row_hash
from featcal.core.scalar import Point, Shape, Walk, best_of, fitted_shape, flat, refine, vertex
from featcal.heads.head import linear_view

# --- Trying thresholds: the data clipped at c, and what criterion, loss and accuracy say of it.


@dataclass(frozen=True)
class Trial:
    """One threshold: the criterion, the fit's loss and the accuracy it gives."""

    threshold: float
    score: float
    loss: float
    accuracy: float


class Clipped:
    """The data with features clipped at c: rows that c does not touch keep their logits.

    Where the network's own logits do not fit into memory there is nothing to keep, and every row
    goes through the head: one pass a trial, never two.
    """

    def __init__(self, problem: Problem, peaks: list[Tensor], threshold: float) -> None:
        self.problem, self.peaks, self.threshold = problem, peaks, threshold

    def __iter__(self) -> Iterator[Batch]:
        kept = self.problem.data.kept
        batches = self.problem.data if kept else self.problem.source
        for peaks, batch in zip(self.peaks, batches, strict=True):
            touched = peaks > self.threshold
            logits = self._logits(batch, touched) if kept else self._head(batch)
            yield Batch(logits, batch.labels)

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
        self.best: tuple[Trial, Through] | None = None  # with the logits it gave

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
        peaks = [row_peaks(batch) for batch in problem.source] if peaks is None else peaks
        return cls(problem, criterion, lambda c: Clipped(problem, peaks, c), accuracy=accuracy)

    def at(self, threshold: float) -> Trial:
        """Tries one threshold, rounded to float32 as the fitted buffer will hold it."""
        threshold = float(np.float32(threshold))
        view = Through(self.view(threshold), stored_logits, features=False)
        data = self._refitted(view)
        losses = dict.fromkeys([self.criterion, self.problem.loss])
        if self.accuracy:
            losses[accuracy] = None
        values = dict(zip(losses, measure(data, *losses), strict=True))
        score, loss = values[self.criterion], values[self.problem.loss]
        self.seen.append(Trial(threshold, score, loss, values.get(accuracy, math.nan)))
        if math.isfinite(threshold) and (self.best is None or score < self.best[0].score):
            self.best = self.seen[-1], view
        return self.seen[-1]

    def complete(self, trial: Trial) -> Trial:
        """The same trial with its accuracy."""
        if not math.isnan(trial.accuracy):
            return trial
        view = Through(self.view(trial.threshold), stored_logits, features=False)
        return replace(trial, accuracy=measure(self._refitted(view), accuracy)[0])

    def point(self, log_threshold: float) -> Point:
        """The criterion at a threshold, both as the walk wants them."""
        return Point(log_threshold, self.at(math.exp(log_threshold)).score)

    def _refitted(self, view: Through) -> Data:
        then = self.problem.then
        if then is None:
            return view
        then.learn(replace(self.problem, data=view, then=None, before=None))
        return Through(view, lambda batch: then(None, lambda _: stored_logits(batch)), keep=0)


def row_peaks(batch: Batch) -> Tensor:
    """The largest activation of each row, in absolute value."""
    assert batch.features is not None
    return batch.features.abs().amax(1)


# --- What a linear head gives away: the logits of many thresholds for the price of a few
# products.
#
# With logits W x + b, the logits at c are W clamp(x, -c, c) + b, a piecewise linear function of c
# whose kinks lie at the |x_j|.

SMALL = 2**24  # n d k up to which the whole path is kept: 256 MiB in float64


def linear(head: Head | None) -> nn.Linear | None:
    """The plain linear layer a head consists of, in float32 or wider; None for any other head."""
    return linear_view(head.head if isinstance(head, Counted) else head)


@dataclass(frozen=True)
class _Near:
    """One batch around a threshold: its logits there, their slope, and the units in the window."""

    labels: Tensor  # (n,)
    logits: Tensor  # (n, k)
    slope: Tensor  # (n, k)
    row: Tensor  # (e,)
    unit: Tensor  # (e,)
    size: Tensor  # (e,)
    sign: Tensor  # (e,)


@final
class Window:
    """The exact logits of every threshold near c0, for one product of the head's size.

    Given the logits at c0, dz/dc = W s, with s = sign(x) where |x| > c0, moves all clipped units
    together; only the few units with |x| inside the window need a correction. NLL(c) is rough on
    the scale of single units, so that no smooth model of it finds its lowest point: looking at all
    of it does.
    """

    def __init__(
        self, problem: Problem, centre: float, at_centre: Data, *, low: float, high: float
    ) -> None:
        layer = linear(problem.head)
        assert layer is not None
        self.centre, self.directions = centre, layer.weight.detach().T.contiguous()
        self.parts = [
            _near(batch, stored_logits(there), problem.head, (low, centre, high))
            for batch, there in zip(problem.source, at_centre, strict=True)
        ]

    @staticmethod
    def fits(problem: Problem) -> bool:
        """Whether the head is linear and two logits a row and class fit into memory."""
        facts = problem.facts
        small = facts.rows * facts.classes * 8 <= KEEP_BYTES
        return linear(problem.head) is not None and small

    def at(self, threshold: float) -> list[Batch]:
        """The batches with the logits of this threshold."""
        return [Batch(self._logits(part, threshold), part.labels) for part in self.parts]

    def _logits(self, part: _Near, threshold: float) -> Tensor:
        logits = torch.add(part.logits, part.slope, alpha=threshold - self.centre)
        # A unit between the two thresholds stays itself instead of moving with the clipped ones.
        if threshold > self.centre:
            moved = ((part.size > self.centre) & (part.size < threshold)).nonzero()[:, 0]
            amount = part.sign[moved] * (part.size[moved] - threshold)
        else:
            moved = ((part.size > threshold) & (part.size <= self.centre)).nonzero()[:, 0]
            amount = part.sign[moved] * (threshold - part.size[moved])
        where = torch.stack([part.row[moved], part.unit[moved]])
        shape = (len(logits), len(self.directions))
        # Sorted and in range by construction: nonzero() gave the indices.
        with torch.sparse.check_sparse_tensor_invariants(enable=False):  # type: ignore[no-untyped-call]
            few = torch.sparse_coo_tensor(where, amount, shape, is_coalesced=True)
        corrected: Tensor = torch.sparse.addmm(logits, few, self.directions)
        return corrected


def _near(
    batch: Batch, logits: Tensor, head: Head | None, places: tuple[float, float, float]
) -> _Near:
    low, centre, high = places
    layer = linear(head)
    assert layer is not None
    assert batch.features is not None
    assert isinstance(head, Counted)
    weight = layer.weight.detach()
    features = batch.features.to(weight.dtype)
    slope = (features - features.clamp(-centre, centre)).sign_() @ weight.T
    head.rows += len(features)  # the slope is a product of the head's size
    size = features.abs()
    row, unit = ((size - (low + high) / 2).abs_() < (high - low) / 2).nonzero(as_tuple=True)
    sign = features[row, unit].sign()
    return _Near(batch.labels, logits, slope, row, unit, size[row, unit], sign)


@final
class Path:
    """The logits of a linear head at any threshold, by sums along each row sorted by size.

    For data so small that the sums fit into memory; building them costs one pass of the head.
    """

    def __init__(self, data: Data, head: Counted) -> None:
        layer = linear(head)
        assert layer is not None
        weight = layer.weight.detach()
        self.parts = [(batch.labels, *_prefix_sums(batch, weight)) for batch in data]
        self.bias = 0.0 if layer.bias is None else layer.bias.detach()
        head.rows += sum(len(part[0]) for part in self.parts)

    @staticmethod
    def fits(problem: Problem) -> bool:
        """Whether the head is linear and the data small."""
        facts = problem.facts
        size = facts.rows * facts.classes * facts.width
        return linear(problem.head) is not None and size <= SMALL

    def at(self, threshold: float) -> list[Batch]:
        """The batches with the logits of this threshold."""
        return [Batch(self._logits(threshold, *sums), labels) for labels, *sums in self.parts]

    def _logits(self, threshold: float, size: Tensor, whole: Tensor, cut: Tensor) -> Tensor:
        row = torch.arange(len(size), device=size.device)
        edge = torch.full((len(size), 1), threshold, dtype=size.dtype, device=size.device)
        kept = torch.searchsorted(size, edge, right=True)[:, 0]
        beyond = 0.0 if threshold == float("inf") else threshold * cut[row, kept]
        return (whole[row, kept] + beyond + self.bias).float()


def _prefix_sums(batch: Batch, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sorted sizes (n, d); sums of units kept whole and of directions cut, both (n, d + 1, k).

    In float64: one huge activation must not swallow the digits of the others.
    """
    assert batch.features is not None
    features = batch.features.double()
    size, order = features.abs().sort(1)
    signed = features.gather(1, order)
    directions = weight.double().T[order]  # (n, d, k)
    none = directions.new_zeros(len(features), 1, weight.shape[0])
    whole = torch.cat([none, (signed[..., None] * directions).cumsum(1)], 1)
    steps = (signed.sign()[..., None] * directions).flip(1).cumsum(1).flip(1)
    return size, whole, torch.cat([steps, none], 1)


# --- A look at the valley of NLL(c) on a sample of the rows, before all rows are asked.

SHARE = 0.16  # of the rows
MOST = 4096  # rows: more tell a scan nothing new
POINTS = 8  # of the scan across all thresholds
OFFSETS = np.linspace(-0.45, 0.45, 5)  # of the closer look, in log c
DEAREST = POINTS + 2 * len(OFFSETS)  # trials, when the closer look has to move


@dataclass(frozen=True)
class Valley:
    """What a sample says, in logarithms of the threshold.

    Attributes:
        floor: where the deepest valley has its floor.
        shape: what it looks like there.
        others: where further valleys lie, the deepest two.
        rest: every other threshold of the scan, the most promising first.
        low: the lowest threshold to consider.
    """

    floor: float
    shape: Shape
    others: list[float]
    rest: list[float]
    low: float


def valley(problem: Problem) -> Valley:
    """A scan across all thresholds, and a closer look where it is lowest.

    By the fit's loss, whatever the criterion: the ECE of so few rows would be noise.
    """
    part = sample(problem, SHARE)
    trials = Trials.by_head(part, problem.loss, accuracy=False)
    candidates = spread_candidates(part, POINTS)
    sampled = int(dist.total(torch.tensor(sum(map(len, part.source)))))
    if sampled * DEAREST > 4 * problem.facts.rows:  # a handful of rows: ask all of them at once
        logs = [math.log(c) for c in candidates]
        return Valley(logs[len(logs) // 2], flat, [], logs[::-1], logs[0] - math.log(64))
    with calm(SHARE * problem.facts.work, FEW_LARGE):
        coarse = [Point(math.log(c), trials.at(c).loss) for c in track("clip: scan", candidates)]
        around = look_closer(trials, vertex(coarse))
    floor, shape = floor_and_shape(around)
    others = [point.at for point in valleys(coarse) if abs(point.at - floor) > 0.6][:2]
    rest = [p.at for p in sorted(coarse, key=by_score) if p.at not in others]
    return Valley(floor, shape, others, rest, min(coarse).at - math.log(64))


def look_closer(trials: Trials, centre: float) -> list[Point]:
    """Points around a threshold; around a second one where the first look missed the floor."""
    around: list[Point] = []
    for _ in range(2):
        missing = [u for u in centre + OFFSETS if all(abs(u - p.at) > 0.1 for p in around)]
        look = track("clip: valley", missing)
        around += [Point(u, trials.at(math.exp(u)).loss) for u in look]
        centre = best_of(around).at
        if min(around).at < centre < max(around).at:
            break
    return around


def floor_and_shape(around: list[Point]) -> tuple[float, Shape]:
    """The polynomial close to the points near the lowest one, and where it is lowest."""
    centre = best_of(around).at
    near = sorted(point for point in around if abs(point.at - centre) <= 0.7)
    shape = fitted_shape(near)
    grid = np.linspace(near[0].at, near[-1].at, 501)
    return float(grid[shape(grid).argmin()]), shape


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
    batches or ranks changes the sample. Where that picks none or far too many, as among copies of
    a few rows, rows are taken at equal distances instead: the cost of a scan must stay bounded.
    """
    share = min(share, MOST / problem.facts.rows)
    data = problem.data if problem.data.kept else problem.source
    parts = [batch.rows(_picked(batch, share)) for batch in data]
    found = int(dist.total(torch.tensor(sum(map(len, parts)))))
    if not 0 < found <= 1.3 * share * problem.facts.rows + 10:
        every = slice(None, None, math.ceil(1 / share))
        parts = [batch.rows(every) for batch in data]
    logits = partial(raw_logits, head=problem.head)
    return replace(problem, source=parts, data=Through(parts, logits))


def _picked(batch: Batch, share: float) -> Tensor:
    assert batch.features is not None
    return row_hash(batch.features) < share * 2**32


def activation_sizes(problem: Problem) -> Tensor:
    """The sizes of the activations that are not zero, thinned out where there are very many."""
    parts = [batch.features for batch in problem.data if batch.features is not None]
    sizes = torch.cat([part.abs().flatten() for part in parts] or [torch.zeros(0)])
    sizes = sizes[sizes > 0]
    sizes = dist.gather(sizes[:: max(len(sizes) // 2**15, 1)].double())
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


def quantiles(values: Tensor, tail: NDArray[np.float64]) -> list[float]:
    """The values that these shares of all values exceed."""
    thinned = values[:: max(len(values) // 2**18, 1)]  # torch.quantile sorts, and has a size limit
    found: list[float] = torch.quantile(thinned, torch.from_numpy(1 - tail).to(thinned)).tolist()
    return found


# --- The search for a clipping threshold c: the best of all thresholds in at most ten head
# passes.
#
# NLL(c) is continuous and piecewise smooth but not guaranteed to have one minimum, so a global look
# comes before the local one:
#
# 1. The far end is scanned exactly on all rows. A threshold touches only the rows whose largest
#    activation exceeds it, and thresholds that touch 1/8, 1/32, ... of the rows cost a sixth of a
#    pass together. c = inf, the identity, is the last of them and costs nothing.
# 2. A scan on a sample of the rows finds the valleys and the shape of the deepest one
#    (`clip_sample`): about two passes' worth. All rows are asked about each valley.
# 3. A walk over log c on all rows corrects that shape by a polynomial through the points it has
#    seen: about four passes.
# 4. With a linear head, dz/dc gives the exact logits all around the walk's end for one more pass
#    (`clip_linear.Window`), and the lowest point is picked, not modelled.
#
# Small data with a linear head needs no walk: every threshold is looked at (`clip_linear.Path`).

PASSES = 10  # of the head over all rows, part passes counted in
ENOUGH = 2048  # rows from which on samples can be trusted
CHEAP = 2**22  # n d k up to which looking everywhere costs less than thinking
GAIN = 1e-7  # a smaller gain over c = inf is rounding, not clipping
WINDOW, WIDE_WINDOW = 0.02, 0.045  # log thresholds looked at beside a walk that settled or not
ROUGH, FINE = 2e-5, 5e-8  # nats a walk may leave on the table: to the window, and for good


@dataclass(frozen=True)
class Search:
    """How a search ended."""

    best: Trial
    before: Trial
    converged: bool


def search(problem: Problem, criterion: Loss, guard: float) -> Search:
    """The threshold with the lowest criterion among those that keep `guard` of the accuracy."""
    row_sizes = [row_peaks(batch) for batch in problem.source]
    # Where a window will follow, only its best trial needs an accuracy, and gets it for free.
    needs_accuracy = bool(guard) or not Window.fits(problem)
    trials = Trials.by_head(problem, criterion, row_sizes, accuracy=needs_accuracy)
    before = trials.seen[0] = trials.complete(trials.at(math.inf))
    peaks = torch.cat([*row_sizes, torch.zeros(1, device=problem.facts.device)]).double()
    if float(dist.largest(peaks.max())) == 0:
        return Search(before, before, True)
    look = look_everywhere if is_small(problem) else look_around
    seen, settled = look(problem, trials, peaks, guard)
    return Search(choose(seen, before, guard), before, settled)


def choose(trials: list[Trial], before: Trial, guard: float) -> Trial:
    """The best trial that passes the guard; the identity unless something truly beats it."""
    best = lowest_allowed(trials, before, guard)
    return best if best.score < before.score - GAIN else before


def look_around(
    problem: Problem, trials: Trials, peaks: Tensor, guard: float
) -> tuple[list[Trial], bool]:
    """The far end, the valley of a sample, a walk on all rows, and a window around its end."""
    before, top = trials.seen[0], math.log(float(dist.largest(peaks.max())))
    ends = [trials.point(log_c) for log_c in track("clip: far end", far_end(peaks, problem))]
    window = Window.fits(problem)
    found = valley(problem)
    starts = starting_points(trials, found, ends, top)
    known, shape = starts[:1], found.shape
    if best_of([*starts, *ends]) is not starts[0]:  # the sample was wrong about the valley
        known, shape = sorted({*starts, *ends, Point(top, before.score)}), flat
    steps = evaluations(problem, window)
    if guard and choose(trials.seen, before, guard) is not choose(trials.seen, before, 0):
        steps = min(steps, 2)  # the guard will bind: keep passes for finding where
    walk = Walk(found.low, top, steps, ROUGH if window else FINE, shape)
    _, settled = refine(told(trials, walk.evaluations), known, walk)
    best = choose(trials.seen, before, 0)
    if best is before:
        return trials.seen, settled
    if best.accuracy < guard * before.accuracy:
        return towards_guard(trials, guard, math.exp(top))
    if not window:
        return trials.seen, settled
    assert trials.best is not None
    reach = WINDOW if settled else WIDE_WINDOW
    close, lowest = look_closely(trials, *trials.best, guard, reach)
    return [before, close], abs(math.log(lowest / best.threshold)) < 0.99 * reach


def starting_points(trials: Trials, found: Valley, ends: list[Point], top: float) -> list[Point]:
    """What all rows say of the sample's valleys, and of the rest of its scan if none helps."""
    problem, enough = trials.problem, trials.seen[0].score - GAIN
    starts = [trials.point(min(found.floor, top))]
    for log_c in (*found.others, *found.rest):
        helps = best_of([*starts, *ends]).score < enough
        if evaluations(problem, Window.fits(problem)) < 2 or (helps and log_c not in found.others):
            break
        if min(abs(log_c - start.at) for start in starts) > 0.2:
            starts.append(trials.point(min(log_c, top)))
    return starts


def told(trials: Trials, evaluations: int) -> Callable[[float], float]:
    """The score a walk asks for, with its progress told."""
    done = count(1)

    def score(log_threshold: float) -> float:
        found = trials.point(log_threshold).score
        tell("clip: walk", next(done), evaluations)
        return found

    return score


def evaluations(problem: Problem, window: bool) -> int:
    """How many thresholds the walk may try, the pass of the window set aside."""
    used = rows_asked(problem.head) / problem.facts.rows + (1 if window else 0)
    return max(math.floor(PASSES - used), 0)


def look_closely(
    trials: Trials, middle: Trial, there: Data, guard: float, reach: float
) -> tuple[Trial, float]:
    """Exact trials across a window of thresholds, then closer around the best of them.

    Args:
        trials: what was tried so far.
        middle: the trial in the middle of the window.
        there: the data with the logits of that trial.
        guard: the share of the accuracy that must remain.
        reach: how far to look on either side, in log thresholds.

    Returns:
        The best allowed trial, and the threshold the first look across the window liked best.
    """
    problem, centre = trials.problem, middle.threshold
    low, high = (centre * math.exp(side * 1.2 * reach) for side in (-1, 1))
    window = Window(problem, centre, there, low=low, high=high)
    close = Trials(problem, trials.criterion, window.at, accuracy=bool(guard))
    for shift in track("clip: window", np.linspace(-reach, reach, 9).tolist()):
        close.at(centre * math.exp(shift))
    lowest = lowest_allowed(close.seen, trials.seen[0], guard).threshold
    for shift in track("clip: finer window", np.linspace(-reach / 6, reach / 6, 9).tolist()):
        close.at(lowest * math.exp(shift))
    return close.complete(lowest_allowed(close.seen, trials.seen[0], guard)), lowest


def lowest_allowed(trials: list[Trial], before: Trial, guard: float) -> Trial:
    """The lowest score among the trials that keep enough accuracy; among all if none does."""
    floor = guard * before.accuracy
    allowed = [trial for trial in trials if not guard or trial.accuracy >= floor] or trials
    return min(allowed, key=lambda trial: (trial.score, trial.threshold))


def is_small(problem: Problem) -> bool:
    """Whether the whole path can be built: it is cheap, or a sample would be too small to trust."""
    facts = problem.facts
    cheap = facts.rows * facts.width * facts.classes <= CHEAP
    return (cheap or facts.rows < ENOUGH) and Path.fits(problem)


def look_everywhere(
    problem: Problem, trials: Trials, peaks: Tensor, guard: float
) -> tuple[list[Trial], bool]:
    """All thresholds on a fine log grid, then ever finer around the best three that are allowed."""
    assert isinstance(problem.head, Counted)
    path = Trials(problem, trials.criterion, Path(problem.source, problem.head).at)
    floor = guard * trials.seen[0].accuracy
    low, high = smallest_scale(problem) - math.log(64), math.log(float(dist.largest(peaks.max())))
    # The fewer the rows, the rougher NLL(c); and every point of a joint fit is a fit of its own.
    points = (1200 if problem.facts.rows < 512 else 400) // (1 if problem.then is None else 4)
    grid = np.linspace(low, high, points)
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
    return [trials.seen[0], trials.complete(trials.at(best.threshold))], True


def towards_guard(trials: Trials, guard: float, peak: float) -> tuple[list[Trial], bool]:
    """From the best threshold, which costs too much accuracy, to where the guard just holds.

    Accuracy(c) is a ragged staircase: halving the way finds its edge, and a window around the edge
    the step that is best.
    """
    problem, window = trials.problem, Window.fits(trials.problem)
    floor = guard * trials.seen[0].accuracy
    best = min(trials.seen, key=lambda trial: trial.score).threshold
    fine = [t.threshold for t in trials.seen if t.accuracy >= floor and t.threshold > best]
    low, high = best, min([*fine, peak])
    while evaluations(problem, window) > (1 if window else 0) and high / low > 1.001:
        trial = trials.at(math.sqrt(low * high))
        passed = trial.accuracy >= floor
        low, high = (low, trial.threshold) if passed else (trial.threshold, high)
    if not window or evaluations(problem, window) < 1:
        return trials.seen, high / low <= 1.001
    edge = next((t for t in trials.seen if t.threshold == high), trials.seen[0])
    there = Through(trials.view(high), stored_logits, features=False)
    close, lowest = look_closely(trials, replace(edge, threshold=high), there, guard, WIDE_WINDOW)
    return [*trials.seen, close], abs(math.log(lowest / high)) < 0.99 * WIDE_WINDOW


def far_end(peaks: Tensor, problem: Problem) -> list[float]:
    """Log thresholds that touch 1/8, 1/32, 1/128, ... of the rows."""
    peaks = dist.gather(peaks)
    if float(dist.largest(torch.tensor(float(not problem.data.kept)))):
        return []  # without the raw logits at hand every row would be recomputed
    shares = np.array([0.5**j for j in range(3, math.floor(math.log2(len(peaks))) + 1, 2)])
    peak = float(peaks.max())
    return sorted({math.log(value) for value in quantiles(peaks, shares) if 0 < value < peak})


def published_grid(problem: Problem, criterion: Loss, guard: float) -> Search:
    """The published search: 2,000 absolute steps of 0.01, strict comparisons, smallest c first."""
    trials = Trials.by_head(problem, criterion)
    before = trials.at(math.inf)
    best, lowest = before, math.inf
    for step in track("clip: published grid", range(1, 2001)):
        trial = trials.at(step / 100)
        if trial.score < lowest and trial.accuracy > guard * before.accuracy:
            best, lowest = trial, trial.score
    return Search(best, before, True)


CLIP_SHARE = 0.99  # the accuracy guard of the published code


@final
class FeatureClip(FeatureMap):
    """x.clamp(-c, c) before the head, with one c for the whole network.

    For features after a ReLU the lower bound never acts. c = inf is the identity; it is always a
    candidate, and a fit that ends there is reported as a no-op. Clipping is not accuracy
    preserving: `min_accuracy` keeps it from costing too much.

    Args:
        criterion: what c is chosen by: "nll", "brier" or "ece".
        min_accuracy: the share of the unclipped accuracy that must remain, such as 0.99; None for
            no guard.
        reference: the published search instead: c = 0.01, 0.02, ..., 20.00, the accuracy above
            0.99 of the unclipped one, the smallest c among equals.
    """

    name = "clip"
    threshold: Tensor

    def __init__(
        self,
        *,
        criterion: str = "nll",
        min_accuracy: float | None = None,
        reference: bool = False,
    ) -> None:
        super().__init__()
        check_choice(self.name, "criterion", criterion, CRITERIA)
        check_flags(self.name, reference=reference)
        if min_accuracy is not None and not _is_share(min_accuracy):
            raise InputError(
                f"clip: min_accuracy is {min_accuracy!r}: give a share of the unclipped accuracy, "
                "above 0 and at most 1, such as 0.99"
            )
        self.criterion = criterion
        plain = min_accuracy is None or type(min_accuracy) in (int, float)
        self.min_accuracy = min_accuracy if plain else float(min_accuracy)  # type: ignore[arg-type]
        self.reference = reference
        self.register_buffer("threshold", torch.tensor(math.inf))

    def map_features(self, features: Tensor) -> Tensor:
        """clamp(x, -c, c)."""
        bound = self.threshold.to(features.dtype)
        return torch.clamp(features, -bound, bound)

    def check(self) -> None:
        """C is one number above 0, or infinite."""
        if self.threshold.numel() != 1 or not float(self.threshold) > 0:
            raise InputError(f"clip: threshold is {self.threshold.tolist()}: it must be above 0")

    def learn(self, problem: Problem) -> list[StepReport]:
        """Searches c; see `clip_search`."""
        criterion = CRITERIA[self.criterion]
        problem = replace(problem, then=_refittable(problem))
        find = published_grid if self.reference else search
        guard = self.min_accuracy or (CLIP_SHARE if self.reference else 0.0)
        found = find(problem, criterion, guard)
        self.assign(threshold=found.best.threshold)
        return [self._report(problem, found)]

    def _report(self, problem: Problem, found: Search) -> StepReport:
        best, before = found.best, found.before
        noop = math.isinf(best.threshold)
        sure, right = measure(problem.data, confidence, accuracy) if noop else (0.0, 0.0)
        clipped, touched = (0.0, 0.0) if noop else clipped_share(problem.source, best.threshold)
        return StepReport(
            self.name,
            {"threshold": best.threshold},
            noop=noop,
            loss_before=before.loss,
            loss_after=best.loss,
            converged=found.converged,
            message=self._why_noop(sure, right, problem)
            if noop
            else _what_changed(best, before, clipped, problem.then),
            details={
                "criterion": self.criterion,
                "criterion_before": before.score,
                "criterion_after": best.score,
                "accuracy_before": before.accuracy,
                "accuracy_after": best.accuracy,
                "clipped_share": clipped,
                "rows_touched": touched,
                "fitted_with": None if problem.then is None else repr(problem.then),
            },
        )

    def _why_noop(self, sure: float, right: float, problem: Problem) -> str:
        if problem.then is not None:
            return (
                f"no-op: no threshold helps once {problem.then!r} is refitted: nothing is clipped"
            )
        if sure < right:
            return (
                "no-op: no threshold helps; on the whole clipping lowers confidence, and this "
                "network is underconfident on the fit split "
                f"(mean confidence {sure:.3f}, accuracy {right:.3f})"
            )
        guard = f" and keeps {self.min_accuracy} of the accuracy" if self.min_accuracy else ""
        return f"no-op: no threshold improves {self.criterion}{guard}, so nothing is clipped"


def _refittable(problem: Problem) -> Calibrator | None:
    """The later steps, where refitting them for every threshold costs no product of the head.

    Steps that act on logits, while the logits of a threshold fit into memory; any others are fitted
    after the clip has been chosen for itself.
    """
    dear = float(dist.largest(torch.tensor(float(not problem.data.kept))))
    then = problem.then
    return None if then is None or then.needs_features or dear else then


def _is_share(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1


def clipped_share(data: Data, threshold: float) -> tuple[float, float]:
    """The share of activations beyond the threshold, and of rows with at least one."""
    sums = torch.zeros(4, dtype=torch.float64)
    for batch in data:
        assert batch.features is not None
        sizes = batch.features.abs()
        clipped, touched = (sizes > threshold).count_nonzero(), sizes.amax(1) > threshold
        counts = (clipped, touched.sum(), sizes.numel(), len(batch))
        sums += torch.tensor([float(count) for count in counts], dtype=torch.float64)
    beyond, rows_beyond, activations, rows = dist.total(sums).tolist()
    return beyond / activations, rows_beyond / rows


def _what_changed(best: Trial, before: Trial, clipped: float, then: Calibrator | None) -> str:
    refitted = "" if then is None else f", with {then!r} refitted for every threshold"
    return (
        f"c = {best.threshold:.4g} clips {clipped:.2%} of the activations; "
        f"accuracy {before.accuracy:.4f} -> {best.accuracy:.4f}{refitted}"
    )
