"""Normal distributions fitted to feature values by maximum likelihood, from sums alone.

After a ReLU a feature is taken as max(Z, 0) with Z normal: a 0 says only that Z was not above 0,
which is a normal sample censored at 0 (Tobin, "Estimation of relationships for limited dependent
variables", 1958). Signed features are taken as Z itself.

With the mean at 0, as the paper's theory has it, the estimator is sigma^2 = sum of x^2 over the
values above 0, divided by their number: a 0 has probability 1/2 whatever sigma is. With a free mean
the likelihood is concave in 1/sigma and mean/sigma (Olsen, 1978), and its one maximum is found by
halving an interval.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

FARTHEST = 37.0  # standard deviations, beyond which a float64 tail is 0
HALVINGS = 80


@final
@dataclass(frozen=True)
class NormalFit:
    """A fitted normal distribution; NaN where there are no values.

    Attributes:
        sigma: the standard deviation with the mean held at 0.
        mean: the mean, where it is free.
        spread: the standard deviation beside it.
        rectified: whether values of 0 were read as "not above 0".
    """

    sigma: float
    mean: float
    spread: float
    rectified: bool

    @classmethod
    def of_sums(
        cls, above: int, zeros: int, total: float, squares: float, *, rectified: bool
    ) -> NormalFit:
        """The fit to values of which these sums are known.

        Args:
            above: how many are not 0.
            zeros: how many are 0.
            total: their sum.
            squares: the sum of their squares.
            rectified: whether they come after a ReLU.

        >>> NormalFit.of_sums(2, 2, 4.0, 8.0, rectified=True).sigma
        2.0
        """
        known = above if rectified else above + zeros
        if above + zeros == 0:
            return cls(math.nan, math.nan, math.nan, rectified)
        if above == 0 or squares == 0:
            return cls(0.0, 0.0, 0.0, rectified)
        sigma = math.sqrt(squares / known)
        if rectified and zeros:
            return cls(sigma, *_censored(above, zeros, total, squares), rectified)
        mean = total / known
        return cls(sigma, mean, math.sqrt(max(squares / known - mean**2, 0)), rectified)

    def density(self, x: float) -> float:
        """The density at x of the fit with mean 0; the mass a ReLU puts on 0 is not in it."""
        if not self.sigma > 0:
            return math.nan
        return math.exp(-0.5 * (x / self.sigma) ** 2) / (self.sigma * math.sqrt(2 * math.pi))

    def as_json(self) -> dict[str, Any]:
        """The public form."""
        return {"sigma": self.sigma, "mean": self.mean, "spread": self.spread}


def sigma_error(sigma: float, rows: int, above: int, products: tuple[float, float, float]) -> float:
    """The standard error of `sigma` over rows; values of one row need not be independent.

    sigma^2 is the ratio of two sums over rows: q, a row's sum of squares, by a, its values above 0.
    To first order it errs as the sum of q - sigma^2 a does (Cochran, "Sampling Techniques", 1977).

    Args:
        sigma: of the fit with mean 0.
        rows: how many there are.
        above: the sum of a.
        products: the sums of q^2, q a and a^2.
    """
    if rows < 2 or not sigma > 0:
        return math.nan
    qq, qa, aa = products
    left = max(qq - 2 * sigma**2 * qa + sigma**4 * aa, 0.0)
    return math.sqrt(left * rows / (rows - 1)) / (2 * sigma * above)


def _censored(above: int, zeros: int, total: float, squares: float) -> tuple[float, float]:
    """Mean and standard deviation of a normal sample of which `zeros` are known to be below 0.

    With e = mean / s and h = 1 / s the log-likelihood is zeros log Phi(-e) + above log h
    - sum (h x - e)^2 / 2. The best h for an e is the root of a quadratic; what is left is one
    equation in e whose left side grows.
    """

    def inverse_spread(e: float) -> float:
        return (e * total + math.sqrt((e * total) ** 2 + 4 * squares * above)) / (2 * squares)

    def slope(e: float) -> float:
        return zeros * _hazard(e) - inverse_spread(e) * total + above * e

    low, high = -FARTHEST, FARTHEST
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if slope(middle) > 0 else (middle, high)
    spread = 1 / inverse_spread(high)
    return high * spread, spread


def _hazard(e: float) -> float:
    """phi(e) / Phi(-e)."""
    tail = math.erfc(e / math.sqrt(2)) / 2
    return math.exp(-0.5 * e * e) / (math.sqrt(2 * math.pi) * tail)
