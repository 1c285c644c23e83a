"""Replicates of the smooth calibration error: one product gives the series of every resample.

See `metrics/kernel.py` for the cosine series. Its coefficients are sums over rows, so those of all
resamples are the counts times a table of cosines; the fixed points are then found side by side.
"""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from featcal.metrics import Ordered, smooth_ece_of
from featcal.metrics.kernel import INTERVALS, MAX_TERMS, REACH, SMALLEST_WIDTH
from featcal.report.resample import row_blocks

BLOCK = 2**18  # numbers of one block of curves: 4 MiB of complex ones
CLOSE = 2.0**-34  # the metric itself knows its width to 2^-32
SECANTS = 12  # most resamples need five
BISECTIONS = 40  # for the few that are left


def smooth_replicates(ordered: Ordered, counts: Tensor) -> Tensor:
    """The smooth ECE of each of the b resamples of (n, b) counts, (b,) float64.

    The width s solves smECE_s = s, whose left side never rises with s: a secant inside a bracket,
    started at the width of the rows themselves.
    """
    start = max(smooth_ece_of(ordered), SMALLEST_WIDTH)
    series = _Series(ordered, counts, start)
    # |r_s| integrates to no less than the absolute value of the integral of r_s, which has no s.
    low = series.coefficients[0].abs().clamp(SMALLEST_WIDTH, 1)
    found = _fixed_points(series, low, start)
    small = (found <= SMALLEST_WIDTH + CLOSE).nonzero()[:, 0]
    if len(small):  # too narrow to be resolved: answered as the metric answers it
        found[small] = series.smoothed(found[small].clamp(max=SMALLEST_WIDTH), small)
    return found


def _fixed_points(series: _Series, low: Tensor, start: float) -> Tensor:
    """The width s of each resample at which the integral of |r_s| is s, to 2^-34: (b,)."""
    at, high = low.clamp(min=start), torch.ones_like(low)
    last, last_gap = at.clone(), torch.full_like(at, math.nan)
    left = torch.arange(len(at))  # those not found yet
    for secant in [True] * SECANTS + [False] * BISECTIONS:
        here, known, known_gap = at[left], last[left], last_gap[left]
        gap = series.smoothed(here, left) - here
        low[left], high[left] = (
            torch.where(gap > 0, here, low[left]),
            torch.where(gap > 0, high[left], here),
        )
        slope = (gap - known_gap) / (here - known)
        # With one point only: smECE_s falls by 0 (bias) to 1/2 (noise) where it meets s.
        wanted = here - gap / torch.where(slope < 0, slope, -1.25)
        inside = (wanted > low[left]) & (wanted < high[left])
        wanted = torch.where(inside & secant, wanted, (low[left] + high[left]) / 2)
        at[left], last[left], last_gap[left] = wanted, here, gap
        moved = (wanted - here).abs() > CLOSE
        left = left[moved & (high[left] - low[left] > CLOSE)]
        if len(left) == 0:
            break
    return at


@final
class _Series:
    """The cosine coefficients of b resamples, computed as far as the widths asked for need."""

    def __init__(self, ordered: Ordered, counts: Tensor, width: float) -> None:
        confidence = ordered.confidence.double()
        self.counts, self.angle = counts, confidence * math.pi
        self.weights = (confidence - ordered.correct.double()) / len(ordered)
        self.coefficients = torch.zeros(0, counts.shape[1], dtype=torch.float64)
        self._extend(_terms(0.8 * width))  # most resamples are a little less smooth than the data

    def smoothed(self, width: Tensor, which: Tensor) -> Tensor:
        """The integral of |r_s| of the resamples `which` at their widths, (a,) float64."""
        terms = _terms(float(width.min()))
        self._extend(terms)
        intervals = max(INTERVALS, 1 << (2 * terms - 3).bit_length())
        k = torch.arange(terms, dtype=torch.float64)
        step = max(1, BLOCK // intervals)
        areas = []
        for start in range(0, len(which), step):
            some = slice(start, start + step)
            damping = torch.exp(-0.5 * (math.pi * width[some, None] * k).square())
            areas.append(_area(self.coefficients[:terms, which[some]].T * damping, intervals))
        return torch.cat(areas)

    def _extend(self, terms: int) -> None:
        """Adds coefficients a_k = (2/n) sum_i (f_i - y_i) cos(pi k f_i) until there are `terms`."""
        if terms <= len(self.coefficients):
            return
        k = torch.arange(len(self.coefficients), terms, dtype=torch.float64)[:, None]
        more = torch.zeros(len(k), self.counts.shape[1], dtype=torch.float64)
        for rows in row_blocks(len(self.angle), max(more.shape)):
            table = (k * self.angle[rows]).cos_().mul_(self.weights[rows])
            more.addmm_(table, self.counts[rows].double())
        self.coefficients = torch.cat([self.coefficients, more * (1 + (k > 0).double())])


def _terms(width: float) -> int:
    return min(MAX_TERMS, math.ceil(REACH / max(width, SMALLEST_WIDTH))) + 1


def _area(coefficients: Tensor, intervals: int) -> Tensor:
    """The trapezoidal integral over [0, 1] of |sum_k c_k cos(pi k t)|: (a, terms) -> (a,)."""
    spectrum = torch.zeros(len(coefficients), intervals + 1, dtype=torch.complex128)
    spectrum[:, : coefficients.shape[1]] = coefficients / 2
    spectrum[:, 0] *= 2
    curve: Tensor = torch.fft.irfft(spectrum, n=2 * intervals, norm="forward")
    curve = curve[:, : intervals + 1].abs()
    return (curve.sum(1) - (curve[:, 0] + curve[:, -1]) / 2) / intervals
