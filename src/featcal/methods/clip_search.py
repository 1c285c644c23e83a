"""The search for a clipping threshold c: the best of all thresholds in at most ten head passes.

NLL(c) is continuous and piecewise smooth but not guaranteed to have one minimum, so a global look
comes before the local one:

1. The far end is scanned exactly on all rows. A threshold touches only the rows whose largest
   activation exceeds it, and thresholds that touch 1/8, 1/32, ... of the rows cost a sixth of a
   pass together. c = inf, the identity, is the last of them and costs nothing.
2. A scan on a sample of the rows finds the valleys and the shape of the deepest one
   (`clip_sample`): about two passes' worth. All rows are asked about each valley.
3. A walk over log c on all rows corrects that shape by a polynomial through the points it has
   seen: about four passes.
4. With a linear head, dz/dc gives the exact logits all around the walk's end for one more pass
   (`clip_linear.Window`), and the lowest point is picked, not modelled.

Small data with a linear head needs no walk: every threshold is looked at (`clip_linear.Path`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count, product

import numpy as np
import torch
from torch import Tensor

from featcal.core import dist
from featcal.core.batch import Data, Through, stored_logits
from featcal.core.fitting import Counted, Problem, rows_asked
from featcal.core.loss import Loss
from featcal.core.progress import tell, track
from featcal.core.solve import Point, Walk, best_of, flat, refine
from featcal.methods.clip_linear import Path, Window
from featcal.methods.clip_sample import Valley, quantiles, smallest_scale, valley
from featcal.methods.clip_trials import Trial, Trials, row_peaks

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
