"""Where Delta-H stops growing with s: the true place of the paper's ordering.

With t = c/s, m the Mills ratio and r(t) = m(t)/t, the slope of Delta-H has the sign of
-(log c + log r + 1 + r). As r falls from infinity to 0, there is exactly one root: r e^r = 1/(e c).
Delta-H grows with s up to there and falls beyond, for every c.
"""

from __future__ import annotations

import torch
from torch import Tensor

from featcal.core.errors import InputError
from featcal.theory.elementwise import of_threshold
from featcal.theory.tail import Tail

STEPS = 100  # a handful is enough; bisection alone would need about 60
PRECISE = 1e-15


@of_threshold
def turning_point(c: Tensor) -> Tensor:
    """s*(c): Delta-H increases in s below it and decreases above it.

    About sqrt(c / e) for large c, and for small c about c sqrt(2 / pi) (1 + W(1 / (e c))), where W
    is Lambert's function; to leading order c sqrt(2 / pi) log(1 / c). The share s*/c falls
    with c: it depends on the unit.

    >>> round(turning_point(0.23), 3), round(turning_point(1.0), 3)
    (0.252, 0.588)
    """
    if not bool(c.isfinite().all()):
        raise InputError("turning_point: c is inf: nothing is clipped, give finite numbers above 0")
    log_share = _log_lambert(-1 - c.log())
    return c * torch.exp(-_log_reach(log_share))


def _log_lambert(target: Tensor) -> Tensor:
    """The w with w + e^w = target: the logarithm of Lambert's W(e^target).

    The function is convex and increasing, and Newton's method started above the root falls towards
    it without ever passing it.
    """
    at = torch.where(target > 1, target.clamp(min=1).log(), target)
    for _ in range(STEPS):
        step = (at + at.exp() - target) / (1 + at.exp())
        at = at - step
        if bool((step.abs() <= PRECISE * (1 + at.abs())).all()):
            break
    return at


def _log_reach(log_share: Tensor) -> Tensor:
    """The x = log t with log(m(t)/t) = log_share, by Newton's method inside a bracket.

    The slope in x is -1 - t a(t), between -2 and -1, so that the value at x = 0 brackets the root.
    """
    at = torch.zeros_like(log_share)
    value, _ = _log_ratio(at, log_share)
    low, high = torch.minimum(0.5 * value, value), torch.maximum(0.5 * value, value)
    at = 0.75 * value
    for _ in range(STEPS):
        value, slope = _log_ratio(at, log_share)
        low, high = torch.where(value >= 0, at, low), torch.where(value <= 0, at, high)
        newton = at - value / slope
        inside = (newton >= low) & (newton <= high)
        step = torch.where(inside, newton, 0.5 * (low + high)) - at
        at = at + step
        if bool((step.abs() <= PRECISE * (1 + at.abs())).all()):
            break
    return at


def _log_ratio(at: Tensor, log_share: Tensor) -> tuple[Tensor, Tensor]:
    """log(m(t)/t) - log_share and its slope, at t = e^at."""
    tail = Tail.beyond(at.exp())
    return tail.mills.log() - at - log_share, -1 - tail.at * tail.excess
