"""What lies beyond t in a standard normal, exact far out, where 1 - Phi(t) has long underflowed.

Everything is written with the Mills ratio m(t) = P(Z > t) / phi(t), which never underflows, and
with the mean excess a(t) = E[Z - t | Z > t] = 1/m - t. Far out that difference cancels, and
Laplace's continued fraction gives it as a sum of positive terms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

ROOT_HALF = math.sqrt(0.5)
LOG_ROOT_2PI = 0.5 * math.log(2 * math.pi)
NEAREST, FARTHEST = 1e-300, 1e154  # t > 0, and t^2 is finite
# From FAR on, DEPTH terms of the continued fraction are exact to the last bit.
FAR, DEPTH = 3.0, 60


@final
@dataclass(frozen=True, slots=True, eq=False)
class Tail:
    """A standard normal Z beyond t, elementwise, in float64.

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
        mills = mills_ratio(near)
        excess = 1 / mills - near
        second = 1 / excess - near
        far_second = _continued(t.clamp(min=FAR))
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


def mills_ratio(t: Tensor) -> Tensor:
    """m(t) = P(Z > t) / phi(t) = sqrt(pi / 2) erfcx(t / sqrt 2), from sqrt(pi / 2) at 0 to 1/t."""
    scaled: Tensor = torch.special.erfcx(ROOT_HALF * t)
    return math.sqrt(math.pi / 2) * scaled


def half_mass(t: Tensor) -> Tensor:
    """P(0 < Z < t), without the cancellation of Phi(t) - 1/2."""
    return 0.5 * torch.erf(ROOT_HALF * t)


def _continued(t: Tensor) -> Tensor:
    """b(t) = 2 / (t + 3 / (t + 4 / ...)), where m = 1 / (t + a) and a = 1 / (t + b)."""
    fraction = torch.zeros_like(t)
    for term in range(DEPTH, 1, -1):
        fraction = term / (t + fraction)
    return fraction
