"""Smooth calibration error without bins (Blasiok and Nakkiran, "Smooth ECE", 2023).

A Gaussian of width s reflected for ever at 0 and 1 is the heat kernel of [0, 1], so the smoothed
residual is a cosine series with a factor exp(-(pi k s)^2 / 2) on term k: a few coefficients of the
data, computed once, give it exactly for every s.
"""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from featcal.metrics.inputs import Values, checked_rows
from featcal.metrics.ordered import Ordered

MAX_TERMS = 8192
NEGLIGIBLE = 1e-12  # the damping below which a term is left out
REACH = math.sqrt(-2 * math.log(NEGLIGIBLE)) / math.pi  # terms needed at width s: REACH / s
SMALLEST_WIDTH = REACH / MAX_TERMS  # 2.9e-4
INTERVALS = 4096  # of the grid |r| is integrated on, at least
BISECTIONS = 32  # the width is known to 2^-32
TURNS = 64  # products before a cosine is computed afresh, so that rounding cannot pile up


def smooth_ece_of(ordered: Ordered) -> float:
    """The width s at which the smoothed residual's integral equals s itself.

        r_s(t) = (1/n) sum_i K_s(t, f_i) (f_i - y_i),   smECE_s = integral of |r_s| over [0, 1]

    smECE_s never rises with s, so the fixed point is found by bisection. A fixed point under
    2.9e-4, the smallest width the terms resolve, is answered by smECE at that width.
    """
    checked_rows(len(ordered))
    residual = _Residual(ordered.confidence, ordered.correct)
    low, high = SMALLEST_WIDTH, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if residual.smoothed(middle) > middle else (low, middle)
    return residual.smoothed(SMALLEST_WIDTH) if low == SMALLEST_WIDTH else low


@final
class _Residual:
    """The cosine coefficients of f - y over f, computed as far as the widths asked for need."""

    def __init__(self, confidence: Tensor, correct: Tensor) -> None:
        self.angle = confidence.double() * math.pi
        self.turn = torch.polar(torch.ones_like(self.angle), self.angle)
        self.weights = (confidence.double() - correct.double()) / len(confidence)
        self.coefficients = self.weights.sum().view(1)

    def smoothed(self, width: float) -> float:
        """The integral of |r_s|, by the trapezoidal rule."""
        terms = min(MAX_TERMS, math.ceil(REACH / width)) + 1
        self._extend(terms)
        k = torch.arange(terms, dtype=torch.float64)
        damping = torch.exp(-0.5 * (math.pi * width * k).square())
        # A power of two, for the FFT, with two intervals or more to the shortest half wave.
        intervals = max(INTERVALS, 1 << (2 * terms - 3).bit_length())
        curve = _cosine_sum(self.coefficients[:terms] * damping, intervals).abs()
        return float(curve.sum() - (curve[0] + curve[-1]) / 2) / intervals

    def _extend(self, terms: int) -> None:
        """Adds a_k = (2/n) sum_i (f_i - y_i) cos(pi k f_i) up to the wanted number of terms."""
        for start in range(len(self.coefficients), terms, TURNS):
            # cos(k x) is the real part of exp(ix)^k: a product costs a tenth of a cosine.
            wave = torch.polar(2 * self.weights, start * self.angle)
            sums = [wave.sum()]
            sums += [wave.mul_(self.turn).sum() for _ in range(min(TURNS, terms - start) - 1)]
            self.coefficients = torch.cat([self.coefficients, torch.stack(sums).real])


def _cosine_sum(coefficients: Tensor, intervals: int) -> Tensor:
    """sum_k c_k cos(pi k t) at t = 0, 1 / intervals, ..., 1, by one inverse FFT.

    >>> _cosine_sum(torch.tensor([1.0, 2.0], dtype=torch.float64), 4).tolist()[::2]
    [3.0, 1.0, -1.0]
    """
    spectrum = torch.zeros(intervals + 1, dtype=torch.complex128)
    spectrum[: len(coefficients)] = coefficients / 2
    spectrum[0] *= 2
    curve: Tensor = torch.fft.irfft(spectrum, n=2 * intervals, norm="forward")
    return curve[: intervals + 1]


def smooth_ece(
    probs: Values | None = None, labels: Values | None = None, *, logits: Values | None = None
) -> float:
    """Smooth calibration error of the confidence, see `smooth_ece_of`.

    >>> round(smooth_ece(torch.tensor([[1.0, 0.0]]), torch.tensor([1])), 6)  # sure and wrong
    1.0
    """
    return smooth_ece_of(Ordered.of(probs, labels, logits=logits))
