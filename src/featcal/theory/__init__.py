"""The theory of feature clipping for rectified normal features: what holds, and what does not.

Closed forms of c, the threshold, and s, the standard deviation before the ReLU; each takes floats
or tensors, computes in float64 and broadcasts. docs/theory.md tells the story.

Z ~ N(0, s^2) is what enters the ReLU, X = max(Z, 0) the feature and min(X, c) the clipped one. Both
are mixed variables: atoms of mass p count -p log p, the density f counts -integral f log f (natural
logarithms). The model is that of the paper this package follows, "Feature Clipping for Uncertainty
Calibration"; what the paper printed is in `featcal.theory.printed`.

Everything is written with what lies beyond t in a standard normal, `Tail`: exact far out, where
1 - Phi(t) has long underflowed.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast, final, overload

import torch
from torch import Tensor

from featcal.core.checks import InputError

__all__ = [
    *("clipped_entropy", "clipped_mass", "energy_removed", "entropy_gain", "entropy_gain_slope"),
    *("log_clipped_mass", "rectified_entropy", "relative_energy_removed", "rescaled_entropy_gain"),
    *("tipping_factor", "turning_point"),
]

ROOT_HALF = math.sqrt(0.5)
HALF_LOG_2 = 0.5 * math.log(2)
LOG_ROOT_2PI = 0.5 * math.log(2 * math.pi)
NEAREST, FARTHEST = 1e-300, 1e154  # t > 0, and t^2 is finite
FAR, DEPTH = 3.0, 60  # from FAR on, DEPTH terms of the continued fraction are exact to the last bit
STEPS = 100  # of Newton's method; a handful is enough, bisection alone would need about 60
PRECISE = 1e-15

Real = float | Tensor


class Formula(Protocol):
    """A function of positive numbers: floats give a float, anything else a float64 tensor."""

    # They overlap because a float is a Real too; the first one is then the one that counts.
    @overload
    def __call__(self, *args: float, **kwargs: float) -> float: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, *args: Real, **kwargs: Real) -> Tensor: ...


def elementwise(formula: Callable[..., Tensor]) -> Formula:
    """Makes a formula written for tensors take floats as well, and checks its arguments."""
    signature = inspect.signature(formula)

    @functools.wraps(formula)
    def function(*args: Real, **kwargs: Real) -> Real:
        given = signature.bind(*args, **kwargs).arguments
        values = {name: positive(formula.__name__, name, value) for name, value in given.items()}
        found = formula(**values)
        plain = all(isinstance(value, int | float) for value in given.values())
        return float(found) if plain else found

    return cast(Formula, function)


def positive(function: str, name: str, value: Real) -> Tensor:
    """The value in float64, refused unless it is above 0; only a threshold c may be infinite.

    >>> positive("entropy_gain", "s", 0.0)
    Traceback (most recent call last):
    featcal.core.checks.InputError: entropy_gain: s is 0.0: give finite numbers above 0
    """
    try:
        numbers = torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{function}: {name} is {value!r}: give a number or a tensor") from error
    good = numbers > 0 if name == "c" else (numbers > 0) & numbers.isfinite()
    if not bool(good.all()):
        kind = "numbers" if name == "c" else "finite numbers"
        wrong = float(numbers[~good].flatten()[0])
        raise InputError(f"{function}: {name} is {wrong!r}: give {kind} above 0")
    return numbers


@final
@dataclass(frozen=True, slots=True, eq=False)
class Tail:
    """A standard normal Z beyond t, elementwise, in float64.

    The Mills ratio m(t) = P(Z > t) / phi(t) never underflows. The mean excess is a = 1/m - t; far
    out that difference cancels, and Laplace's continued fraction gives it as a sum of positive
    terms: m = 1 / (t + a), a = 1 / (t + b) and b = 2 / (t + 3 / (t + 4 / ...)).

    Attributes:
        at: t.
        density: phi(t), which underflows to 0 from about t = 38.6 on.
        mills: m(t) = P(Z > t) / phi(t).
        excess: a(t) = E[Z - t | Z > t].
        second: b(t), by which E[(Z - t)^2 | Z > t] = a b.
    """

    at: Tensor
    density: Tensor
    mills: Tensor
    excess: Tensor
    second: Tensor

    @classmethod
    def beyond(cls, t: Tensor) -> Tail:
        """The tail beyond t > 0."""
        t = t.clamp(NEAREST, FARTHEST)
        near = t.clamp(max=FAR)
        mills = math.sqrt(math.pi / 2) * torch.special.erfcx(ROOT_HALF * near)
        excess = 1 / mills - near
        second = 1 / excess - near
        far_second, away = torch.zeros_like(t), t.clamp(min=FAR)
        for term in range(DEPTH, 1, -1):
            far_second = term / (away + far_second)
        far_excess = 1 / (t + far_second)
        far = t > FAR
        return cls(
            at=t,
            density=torch.exp(-0.5 * t * t - LOG_ROOT_2PI),
            mills=torch.where(far, 1 / (t + far_excess), mills),
            excess=torch.where(far, far_excess, excess),
            second=torch.where(far, far_second, second),
        )

    @property
    def mass(self) -> Tensor:
        """P(Z > t)."""
        return self.density * self.mills

    @property
    def log_mass(self) -> Tensor:
        """The logarithm of P(Z > t), finite however far out."""
        return self.mills.log() - 0.5 * self.at * self.at - LOG_ROOT_2PI

    @property
    def entropy(self) -> Tensor:
        """The differential entropy of Z given Z > t; that of an exponential variable far out."""
        return self.mills.log() + 0.5 + 0.5 * self.at * self.excess


def half_mass(t: Tensor) -> Tensor:
    """P(0 < Z < t), without the cancellation of Phi(t) - 1/2."""
    return 0.5 * torch.erf(ROOT_HALF * t)


@elementwise
def rectified_entropy(s: Tensor) -> Tensor:
    """H(X) = (1/2) log 2 + (1/2) log(s sqrt(2 pi)) + 1/4.

    >>> round(rectified_entropy(1.0), 6)
    1.056043
    """
    return HALF_LOG_2 + 0.5 * (s.log() + LOG_ROOT_2PI) + 0.25


@elementwise
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


@elementwise
def entropy_gain(c: Tensor, s: Tensor) -> Tensor:
    """Delta-H = H(min(X, c)) - H(X) = -P(X > c) h(X | X > c).

    The atom at c stands in for the tail beyond it, and nothing else changes. As clipping is a
    function of X, -Delta-H is the differential entropy h(X | min(X, c)) of what it forgets.

    >>> round(entropy_gain(1.0, 0.5), 6), round(entropy_gain(1.0, 1.0), 6)
    (0.015565, -0.05402)
    """
    tail = Tail.beyond(c / s)
    return -tail.mass * (s.log() + tail.entropy)


@elementwise
def entropy_gain_slope(c: Tensor, s: Tensor) -> Tensor:
    """The slope d Delta-H / ds = -(phi(t) / s) (t (log(s m(t)) + 1) + m(t)), t = c/s.

    m is the Mills ratio. Positive below `turning_point(c)` and negative above it.

    >>> round(entropy_gain_slope(1.0, 1.0), 6)
    -0.298494
    """
    tail = Tail.beyond(c / s)
    bracket = tail.at * (s.log() + tail.mills.log() + 1) + tail.mills
    return -tail.density / s * bracket


@elementwise
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


@elementwise
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


@elementwise
def turning_point(c: Tensor) -> Tensor:
    """s*(c): Delta-H increases in s below it and decreases above it, for every c.

    With t = c/s, m the Mills ratio and r(t) = m(t)/t, the slope of Delta-H has the sign of
    -(log c + log r + 1 + r). As r falls from infinity to 0, there is one root: r e^r = 1 / (e c).

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


# What clipping removes, in measures that do grow with s. Two features are put in the same order in
# every unit: the clipped mass and the relative energy depend on c/s alone, and the energy is
# multiplied by the same number for both. All three grow with s, everywhere, for their slopes
# are products of positive factors.


@elementwise
def clipped_mass(c: Tensor, s: Tensor) -> Tensor:
    """P(X > c), from 0 to 1/2.

    >>> round(clipped_mass(1.0, 1.0), 6)
    0.158655
    """
    return Tail.beyond(c / s).mass


@elementwise
def log_clipped_mass(c: Tensor, s: Tensor) -> Tensor:
    """The logarithm of P(X > c), finite where the mass itself underflows.

    >>> round(log_clipped_mass(100.0, 1.0), 3)
    -5005.524
    """
    return Tail.beyond(c / s).log_mass


@elementwise
def energy_removed(c: Tensor, s: Tensor) -> Tensor:
    """E[(X - c)+^2] = s^2 ((1 + t^2) P(X > c) - t phi(t)), t = c/s.

    The mean squared distance between a feature and its clipped value.

    >>> round(energy_removed(1.0, 1.0), 6)
    0.07534
    """
    tail = Tail.beyond(c / s)
    return s * s * _excess_energy(tail)


@elementwise
def relative_energy_removed(c: Tensor, s: Tensor) -> Tensor:
    """E[(X - c)+^2] / E[X^2], from 0 to 1: the energy removed, of that which was there."""
    return 2 * _excess_energy(Tail.beyond(c / s))


def _excess_energy(tail: Tail) -> Tensor:
    """E[(Z - t)+^2] as a product, free of the cancellation of the textbook form."""
    return tail.mass * tail.excess * tail.second
