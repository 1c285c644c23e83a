"""Spline calibration: the slope of the summed gap between hits and scores (Gupta et al., 2021).

With scores in ascending order, h(t) is the sum of (hit - score) over the first share t of the rows,
divided by n. Its slope at t is how far the score there is from the truth, so a spline fitted to h
needs no bins: the recalibrated score is s + h'(t).
"""

from __future__ import annotations

from typing import final

import numpy as np
import torch
from torch import Tensor

from featcal.core.calibrator import LogitMap
from featcal.core.checks import check_flags, check_whole
from featcal.core.fit import Problem, StepReport, settle
from featcal.core.rows import with_confidence
from featcal.methods import score_tables as tables
from featcal.methods.score_tables import Array, Levels, Places

MOST_NODES = 1024


@final
class Spline(LogitMap):
    """Adds h'(t) to the predicted class's confidence; the other classes share the rest as before.

    h is a natural cubic spline in t, fitted by least squares. Between the confidences of the fit
    split the shift is linear in the confidence, and constant beyond them; at most 1,024 of them
    are kept, at equal steps of t. Confidences end at 1 / (n + 2) and (n + 1) / (n + 2). The map
    need not ascend; the prediction stays. Rows of equal confidence count with their mean.

    Args:
        knots: of the spline, equally spaced over t from 0 to 1.
        reference: as published: all confidences are kept, the two weights of the interpolation are
            swapped, and results end at 0 and 1.
    """

    name = "spline"
    title = "spline calibration"
    keeps_accuracy = True
    quick = "temperature"
    nodes: Tensor
    shifts: Tensor
    bound: Tensor

    def __init__(self, *, knots: int = 6, reference: bool = False) -> None:
        super().__init__()
        check_whole(self.name, 2, knots=knots)
        check_flags(self.name, reference=reference)
        self.knots, self.reference = knots, reference
        self.jumps = reference  # swapped weights: the two sides of a node do not meet
        self.register_buffer("nodes", torch.empty(0))  # log-odds, ascending
        self.register_buffer("shifts", torch.empty(0))  # of the confidence
        self.register_buffer("bound", torch.zeros(()))

    def map_logits(self, logits: Tensor) -> Tensor:
        """Shifts the confidence."""
        if self.shifts.numel() == 0:
            return logits
        odds, bound = tables.log_odds(logits).float(), self.bound.float()
        if self.reference:
            # Between a and b the published code gives the value of a at b, and that of b at a.
            nodes = self.nodes.float()
            values = nodes.sigmoid() + self.shifts.float()
            right = torch.bucketize(odds, nodes).clamp(1, len(nodes) - 1)
            here = tables.lines(odds, nodes, values, probable=True)
            inside = (odds > nodes[0]) & (odds < nodes[-1])
            found = torch.where(inside, values[right] + values[right - 1] - here, here)
        else:
            found = odds.sigmoid() + tables.lines(odds, self.nodes, self.shifts, probable=True)
        return with_confidence(logits, torch.minimum(torch.maximum(found, bound), 1 - bound))

    def sound(self) -> bool:
        """Whether nodes ascend, each with a finite shift."""
        bounded = self.bound.numel() == 1 and 0 <= float(self.bound) < 1
        return bounded and tables.is_table(self.nodes, self.shifts, more=0)

    def learn(self, problem: Problem) -> list[StepReport]:
        """Fits the spline and keeps its slope at the confidences of the fit split."""
        self.reset()
        levels = tables.top_levels(problem.data)
        shifts = fitted_shifts(levels, self.knots, published=self.reference)
        kept = slice(None) if self.reference else thinned(levels, MOST_NODES)
        nodes, shifts = levels.at[kept], shifts[kept]
        times = 2 if len(nodes) == 1 else 1  # a line needs two ends
        self.assign(
            nodes=torch.tensor(nodes.repeat(times)),
            shifts=torch.tensor(shifts.repeat(times)),
            bound=0.0 if self.reference else 1 / (problem.facts.rows + 2),
        )
        low, high = float(shifts.min()), float(shifts.max())
        message = f"confidences move by {low:+.4g} to {high:+.4g}"
        values = {"shift_min": low, "shift_max": high}
        always = self.reference and problem.facts.classes > 1
        return [settle(self, problem, values, message, always=always)]


def fitted_shifts(levels: Levels, knots: int, *, published: bool = False) -> Array:
    """h'(t) of each level, the mean over its rows.

    The i-th row stands between t = (i - 1) / n and i / n: h is known at these ends, its slope is
    taken halfway. The published code has n equal steps from 0 to 1 and takes both at them.
    """
    rows = levels.rows.astype(np.int64)
    count = int(rows.sum())
    scores = torch.from_numpy(levels.at).sigmoid().numpy()
    sums = (levels.hits / levels.rows - scores).repeat(rows).cumsum() / count
    known = halfway = np.linspace(0, 1, count)
    if not published:
        known, halfway = np.arange(count + 1) / count, (np.arange(count) + 0.5) / count
        sums = np.concatenate([[0.0], sums])
    knots = max(2, min(knots, len(known)))
    at_knots = np.linalg.lstsq(natural_spline(known, knots)[0], sums, rcond=None)[0]
    slopes = natural_spline(halfway, knots)[1] @ at_knots
    return np.asarray(np.add.reduceat(slopes, rows.cumsum() - rows) / rows)


def natural_spline(t: Array, knots: int) -> tuple[Array, Array]:
    """Value and slope at t of the natural cubic spline through given values at its knots.

    Both are linear in the values: (n, knots) matrices to multiply them with. `bends` are the second
    derivatives at the knots, times width^2 / 6: continuous slopes ask for m[j-1] + 4 m[j] + m[j+1]
    = y[j-1] - 2 y[j] + y[j+1], and a natural spline has none at either end.
    """
    width = 1 / (knots - 1)
    left = np.clip((t / width).astype(np.int64), 0, knots - 2)
    b = (t / width - left)[:, None]  # the part of the way to the next knot
    a = 1 - b
    inner = knots - 2
    unit, bends = np.eye(knots), np.zeros((knots, knots))
    if inner:
        system = 4 * np.eye(inner) + np.eye(inner, k=1) + np.eye(inner, k=-1)
        second = np.eye(inner, knots) - 2 * np.eye(inner, knots, 1) + np.eye(inner, knots, 2)
        bends[1:-1] = np.linalg.solve(system, second)
    start, end, bend_start, bend_end = unit[left], unit[left + 1], bends[left], bends[left + 1]
    value = a * start + b * end
    value += (a**3 - a) * bend_start + (b**3 - b) * bend_end
    slope = end - start + (1 - 3 * a**2) * bend_start + (3 * b**2 - 1) * bend_end
    return value, slope / width


def thinned(levels: Levels, most: int) -> Places:
    """Levels at equal steps of t, first and last among them.

    What is left out lies within max |h''| / (most - 1) of the line that takes its place.
    """
    ends = levels.rows.cumsum()
    ranks = np.linspace(0, ends[-1] - 1, most).round()
    return np.unique(np.searchsorted(ends, ranks, side="right"))
