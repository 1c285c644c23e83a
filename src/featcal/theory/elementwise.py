"""Formulas written for tensors, and given floats as well: every argument checked in one way."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Protocol, cast, overload

import torch
from torch import Tensor

from featcal.core.errors import InputError

Real = float | Tensor


# Each is two signatures, floats to a float and anything else to a tensor. They overlap because a
# float is a Real too; the first one is then the one that counts.
class OfScale(Protocol):
    """A function of the standard deviation s."""

    @overload
    def __call__(self, s: float) -> float: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, s: Real) -> Tensor: ...


class OfThreshold(Protocol):
    """A function of the threshold c."""

    @overload
    def __call__(self, c: float) -> float: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, c: Real) -> Tensor: ...


class OfBoth(Protocol):
    """A function of the threshold c and the standard deviation s."""

    @overload
    def __call__(self, c: float, s: float) -> float: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, c: Real, s: Real) -> Tensor: ...


class OfScaled(Protocol):
    """A function of c, s and the factor by which both are multiplied."""

    @overload
    def __call__(self, c: float, s: float, factor: float) -> float: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, c: Real, s: Real, factor: Real) -> Tensor: ...


class OfPair(Protocol):
    """A function of c and two standard deviations, the smaller one first."""

    @overload
    def __call__(self, c: float, s_low: float, s_high: float) -> float: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, c: Real, s_low: Real, s_high: Real) -> Tensor: ...


def of_scale(formula: Callable[[Tensor], Tensor]) -> OfScale:
    """Makes a formula of s take floats and tensors."""
    return cast(OfScale, _elementwise(formula))


def of_threshold(formula: Callable[[Tensor], Tensor]) -> OfThreshold:
    """Makes a formula of c take floats and tensors."""
    return cast(OfThreshold, _elementwise(formula))


def of_both(formula: Callable[[Tensor, Tensor], Tensor]) -> OfBoth:
    """Makes a formula of c and s take floats and tensors."""
    return cast(OfBoth, _elementwise(formula))


def of_scaled(formula: Callable[[Tensor, Tensor, Tensor], Tensor]) -> OfScaled:
    """Makes a formula of c, s and a factor take floats and tensors."""
    return cast(OfScaled, _elementwise(formula))


def of_pair(formula: Callable[[Tensor, Tensor, Tensor], Tensor]) -> OfPair:
    """Makes a formula of c and two deviations take floats and tensors."""
    return cast(OfPair, _elementwise(formula))


def _elementwise(formula: Callable[..., Tensor]) -> Callable[..., Real]:
    """Floats give a float; tensors broadcast and give a float64 tensor."""
    signature = inspect.signature(formula)

    @functools.wraps(formula)
    def function(*args: Real, **kwargs: Real) -> Real:
        given = signature.bind(*args, **kwargs).arguments
        values = {name: positive(formula.__name__, name, value) for name, value in given.items()}
        found = formula(**values)
        plain = all(isinstance(value, int | float) for value in given.values())
        return float(found) if plain else found

    return function


def positive(function: str, name: str, value: Real) -> Tensor:
    """The value in float64, refused unless it is above 0; only a threshold c may be infinite.

    >>> positive("entropy_gain", "s", 0.0)
    Traceback (most recent call last):
    featcal.core.errors.InputError: entropy_gain: s is 0.0: give finite numbers above 0
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
