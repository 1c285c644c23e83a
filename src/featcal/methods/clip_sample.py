"""A look at the valley of NLL(c) on a sample of the rows, before all rows are asked."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from featcal.core import dist
from featcal.core.batch import Batch, Through, raw_logits
from featcal.core.fitting import Problem
from featcal.core.folds import row_hash
from featcal.core.progress import track
from featcal.core.solve import Point, Shape, best_of, fitted_shape, flat, vertex
from featcal.core.threads import FEW_LARGE, calm
from featcal.methods.clip_trials import Trials

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
