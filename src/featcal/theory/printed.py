"""The formulas of the paper exactly as printed, so that they can be held against the correct ones.

"Feature Clipping for Uncertainty Calibration" (AAAI 2025), numbered as its LaTeX source counts.
They are evaluated without rounding errors: what differs from `featcal.theory` is the formula.
None of them should be used for anything else; docs/theory.md lists the errors.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from featcal.theory import Tail, elementwise, half_mass

LOG_2PIE = math.log(2 * math.pi * math.e)
LOG_PIE = math.log(math.pi * math.e)


@elementwise
def truncated_entropy(c: Tensor, s: Tensor) -> Tensor:
    """H_c(x; 0, s, 0, c) of Eq. (3): log sqrt(2 pi e s Z) - t phi(t) / (2 Z), Z = Phi(t) - 1/2.

    Correct would be s^2 Z^2 under the root.
    """
    tail = Tail.beyond(c / s)
    z = half_mass(tail.at)
    return 0.5 * (LOG_2PIE + s.log() + z.log()) - tail.at * tail.density / (2 * z)


@elementwise
def appendix_truncated_entropy(c: Tensor, s: Tensor) -> Tensor:
    """H_c as the appendix differentiates it: log sqrt(2 pi e s^2 Z) - t phi(t) / (2 Z), Z = Phi(t).

    There Phi(0) is set to 0; it is 1/2.
    """
    tail = Tail.beyond(c / s)
    z = 1 - tail.mass
    return 0.5 * (LOG_2PIE + z.log()) + s.log() - tail.at * tail.density / (2 * z)


@elementwise
def appendix_truncated_entropy_slope(c: Tensor, s: Tensor) -> Tensor:
    """The slope d H_c / ds of the appendix, before Eq. (12): right for the appendix's own H_c."""
    tail = Tail.beyond(c / s)
    t, phi, z = tail.at, tail.density, 1 - tail.mass
    quotient = t * phi / (2 * z * z) * ((t * t - 1) * z + t * phi)
    return (1 - t * phi / (2 * z) - quotient) / s


@elementwise
def rectified_entropy(s: Tensor) -> Tensor:
    """H(x) of Eq. (5): -log(1/2) - (1/2) log sqrt(pi e s).

    Its first line adds (1 - q) H_c, its second line subtracts it.
    """
    return math.log(2) - 0.25 * (LOG_PIE + s.log())


@elementwise
def clipped_entropy(c: Tensor, s: Tensor) -> Tensor:
    """The entropy of the clipped feature, Eq. (8), with H_c of Eq. (3)."""
    tail = Tail.beyond(c / s)
    inside = half_mass(tail.at)
    discrete = 1.5 - (0.5 + inside)
    return (
        -torch.xlogy(discrete, discrete)
        - torch.xlogy(inside, inside)
        - 0.5 * torch.log(0.5 / discrete)
        - tail.mass * (tail.log_mass - discrete.log())
        + inside * truncated_entropy(c, s)
    )


@elementwise
def entropy_gain(c: Tensor, s: Tensor) -> Tensor:
    """Delta-H of Eq. (9), printed again as Eq. (11), with H_c of Eq. (3)."""
    return _gain(c, s, truncated_entropy(c, s))


@elementwise
def entropy_gain_slope(c: Tensor, s: Tensor) -> Tensor:
    """The derivative in s of Eq. (9) with Eq. (3), by the product rule; the paper has no such line.

    >>> round(entropy_gain_slope(1.0, 1.0), 3)
    0.272
    """
    tail = Tail.beyond(c / s)
    t, phi, z = tail.at, tail.density, half_mass(tail.at)
    # u times the slope of H_c; the slope of Z is -t phi / s.
    inner = (z - t * phi + t * phi * (1 - t * t) - (t * phi) ** 2 / z) / (2 * s)
    return _log_odds_slope(c, s) - t * phi / s * truncated_entropy(c, s) + inner + 0.25 / s


@elementwise
def appendix_entropy_gain(c: Tensor, s: Tensor) -> Tensor:
    """Delta-H of Eq. (11) read with the appendix's own H_c."""
    return _gain(c, s, appendix_truncated_entropy(c, s))


@elementwise
def appendix_entropy_gain_slope(c: Tensor, s: Tensor) -> Tensor:
    """The derivative of `appendix_entropy_gain`: Eq. (12) with the product rule put back.

    >>> round(appendix_entropy_gain_slope(1.0, 1.0), 3)
    0.426
    """
    tail = Tail.beyond(c / s)
    product = half_mass(tail.at) * appendix_truncated_entropy_slope(c, s)
    lost = tail.at * tail.density / s * appendix_truncated_entropy(c, s)
    return _log_odds_slope(c, s) - lost + product + 0.25 / s


@elementwise
def plotted_slope(c: Tensor, s: Tensor) -> Tensor:
    """Eq. (12), the derivative the appendix plots and calls positive for every s.

    It is the derivative of no Delta-H in the paper: of the product rule for u H_c, the factor u and
    the term -(t phi(t) / s) H_c are lost.

    >>> round(plotted_slope(1.0, 1.0), 3)
    1.25
    """
    return _log_odds_slope(c, s) + appendix_truncated_entropy_slope(c, s) + 0.25 / s


def _gain(c: Tensor, s: Tensor, truncated: Tensor) -> Tensor:
    tail = Tail.beyond(c / s)
    inside = half_mass(tail.at)
    return (
        -torch.xlogy(inside, inside)
        + 0.5 * math.log(0.5)
        - tail.mass * tail.log_mass
        + inside * truncated
        + 0.25 * (LOG_PIE + s.log())
    )


def _log_odds_slope(c: Tensor, s: Tensor) -> Tensor:
    """log((Phi - 1/2) / (1 - Phi)) phi(t) t / s, the first line of Eq. (12)."""
    tail = Tail.beyond(c / s)
    return (half_mass(tail.at).log() - tail.log_mass) * tail.density * tail.at / s
