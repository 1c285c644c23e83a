"""The entropy of a rectified normal feature before and after clipping, corrected.

Z ~ N(0, s^2) is what enters the ReLU, X = max(Z, 0) the feature and min(X, c) the clipped one. Both
are mixed variables: atoms of mass p count -p log p, the density f counts -integral f log f (natural
logarithms). The model is that of the paper this package follows, "Feature Clipping for Uncertainty
Calibration"; what the paper printed is in `featcal.theory.printed`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from featcal.core.errors import InputError
from featcal.theory.elementwise import of_both, of_pair, of_scale, of_scaled
from featcal.theory.tail import LOG_ROOT_2PI, Tail, half_mass

HALF_LOG_2 = 0.5 * math.log(2)


@of_scale
def rectified_entropy(s: Tensor) -> Tensor:
    """H(X) = (1/2) log 2 + (1/2) log(s sqrt(2 pi)) + 1/4.

    >>> round(rectified_entropy(1.0), 6)
    1.056043
    """
    return HALF_LOG_2 + 0.5 * (s.log() + LOG_ROOT_2PI) + 0.25


@of_both
def clipped_entropy(c: Tensor, s: Tensor) -> Tensor:
    """H(min(X, c)), with u = P(0 < X < c), v = P(X > c) and t = c/s.

    (1/2) log 2 - v log v + u log(s sqrt(2 pi)) + (u - t phi(t)) / 2. It tends to log 2, that of two
    equal atoms, as c goes to 0; at c = 0 itself the atoms are one and the entropy is 0.

    >>> round(clipped_entropy(1.0, 1.0), 6)
    1.002023
    """
    tail = Tail.beyond(c / s)
    inside = half_mass(tail.at)
    atoms = HALF_LOG_2 - tail.mass * tail.log_mass
    return atoms + inside * (s.log() + LOG_ROOT_2PI) + 0.5 * (inside - tail.at * tail.density)


@of_both
def tail_entropy(c: Tensor, s: Tensor) -> Tensor:
    """h(X | X > c), the differential entropy of what clipping takes away, in closed form.

    log(s m) + 1/2 + t a / 2, with the Mills ratio m and the mean excess a of a standard normal at
    t = c/s. Like every differential entropy it changes with the unit of X.
    """
    return s.log() + Tail.beyond(c / s).entropy


@of_both
def entropy_gain(c: Tensor, s: Tensor) -> Tensor:
    """Delta-H = H(min(X, c)) - H(X) = -P(X > c) h(X | X > c).

    The atom at c stands in for the tail beyond it, and nothing else changes. As clipping is a
    function of X, -Delta-H is the differential entropy h(X | min(X, c)) of what it forgets.

    >>> round(entropy_gain(1.0, 0.5), 6), round(entropy_gain(1.0, 1.0), 6)
    (0.015565, -0.05402)
    """
    tail = Tail.beyond(c / s)
    return -tail.mass * (s.log() + tail.entropy)


@of_both
def entropy_gain_slope(c: Tensor, s: Tensor) -> Tensor:
    """The slope d Delta-H / ds = -(phi(t) / s) (t (log(s m(t)) + 1) + m(t)), t = c/s.

    m is the Mills ratio. Positive below `turning_point(c)` and negative above it.

    >>> round(entropy_gain_slope(1.0, 1.0), 6)
    -0.298494
    """
    tail = Tail.beyond(c / s)
    bracket = tail.at * (s.log() + tail.mills.log() + 1) + tail.mills
    return -tail.density / s * bracket


@of_scaled
def rescaled_entropy_gain(c: Tensor, s: Tensor, factor: Tensor) -> Tensor:
    """Delta-H of the same features in other units: both c and s times a factor.

    Delta-H - P(X > c) log(factor). The clipped mass stays as it is, so a unit can give Delta-H
    either sign and any size.

    >>> metres, millimetres = 1.0, 1000.0
    >>> round(rescaled_entropy_gain(0.5, 0.4, metres), 6)
    0.070201
    >>> round(rescaled_entropy_gain(0.5, 0.4, millimetres), 6)
    -0.659602
    """
    tail = Tail.beyond(c / s)
    return -tail.mass * (s.log() + tail.entropy + factor.log())


@of_pair
def tipping_factor(c: Tensor, s_low: Tensor, s_high: Tensor) -> Tensor:
    """The unit at which the order of two deviations s_low < s_high turns.

    With features multiplied by less than this factor, Delta-H(s_low) < Delta-H(s_high); by more,
    the other way round. There is one such factor for every pair, so that the order says something
    about the unit and nothing about the features. Infinite or 0 only beyond float64.

    >>> k = tipping_factor(1.0, 0.5, 1.0)
    >>> below, above = 0.99 * k, 1.01 * k
    >>> [rescaled_entropy_gain(1.0, 0.5, f) < rescaled_entropy_gain(1.0, 1.0, f)
    ...  for f in (below, above)]
    [True, False]
    """
    low, high = Tail.beyond(c / s_low), Tail.beyond(c / s_high)
    log_ratio = low.log_mass - high.log_mass  # the masses themselves may underflow
    if not bool((log_ratio < 0).all()):
        raise InputError(
            "tipping_factor: s_low does not clip less than s_high: give an s_low below s_high, and "
            "a finite c"
        )
    h_low, h_high = s_low.log() + low.entropy, s_high.log() + high.entropy
    difference = h_high - log_ratio.exp() * h_low
    return torch.exp(difference / torch.expm1(log_ratio))
