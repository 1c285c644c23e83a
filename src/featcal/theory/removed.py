"""What clipping removes from a rectified normal feature, in measures that do grow with s.

Two features are put in the same order in every unit: the clipped mass and the relative energy
depend on c/s alone, and the energy is multiplied by the same number for both. All three grow with
s, everywhere, and their slopes show it: each is a product of positive factors.
"""

from __future__ import annotations

from torch import Tensor

from featcal.theory.elementwise import of_both
from featcal.theory.tail import Tail


@of_both
def clipped_mass(c: Tensor, s: Tensor) -> Tensor:
    """P(X > c), from 0 to 1/2.

    >>> round(clipped_mass(1.0, 1.0), 6)
    0.158655
    """
    return Tail.beyond(c / s).mass


@of_both
def log_clipped_mass(c: Tensor, s: Tensor) -> Tensor:
    """The logarithm of P(X > c), finite where the mass itself underflows.

    >>> round(log_clipped_mass(100.0, 1.0), 3)
    -5005.524
    """
    return Tail.beyond(c / s).log_mass


@of_both
def clipped_mass_slope(c: Tensor, s: Tensor) -> Tensor:
    """The slope d P(X > c) / ds = t phi(t) / s, t = c/s."""
    tail = Tail.beyond(c / s)
    return tail.density * tail.at / s


@of_both
def energy_removed(c: Tensor, s: Tensor) -> Tensor:
    """E[(X - c)+^2] = s^2 ((1 + t^2) P(X > c) - t phi(t)), t = c/s.

    The mean squared distance between a feature and its clipped value.

    >>> round(energy_removed(1.0, 1.0), 6)
    0.07534
    """
    tail = Tail.beyond(c / s)
    return s * s * _excess_energy(tail)


@of_both
def energy_removed_slope(c: Tensor, s: Tensor) -> Tensor:
    """The slope d E[(X - c)+^2] / ds = 2 s P(X > c)."""
    return 2 * s * Tail.beyond(c / s).mass


@of_both
def relative_energy_removed(c: Tensor, s: Tensor) -> Tensor:
    """E[(X - c)+^2] / E[X^2], from 0 to 1: the energy removed, of that which was there."""
    return 2 * _excess_energy(Tail.beyond(c / s))


@of_both
def relative_energy_removed_slope(c: Tensor, s: Tensor) -> Tensor:
    """The slope of the relative energy, 4 (t / s) (phi(t) - t P(X > c)), t = c/s."""
    tail = Tail.beyond(c / s)
    return 4 * tail.mass * tail.excess * tail.at / s


def _excess_energy(tail: Tail) -> Tensor:
    """E[(Z - t)+^2] as a product, free of the cancellation of the textbook form."""
    return tail.mass * tail.excess * tail.second
