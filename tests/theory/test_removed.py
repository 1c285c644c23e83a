"""What clipping removes: against quadrature and mpmath, and monotone as it is said to be."""

import math

import mpmath as mp
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from featcal import theory

reaches = st.floats(0.01, 30)  # c/s
scales = st.floats(1e-3, 1e3)
CASES = [(c, c / t) for c in (1e-3, 0.23, 1.0, 500.0) for t in (0.01, 0.4, 1.0, 3.0, 6.0, 20.0)]
MEASURES = ("clipped_mass", "energy_removed", "relative_energy_removed")


def slope_of(name):
    return getattr(theory, f"{name}_slope")


@pytest.mark.parametrize(("c", "s"), CASES)
def test_energy_removed_is_the_integral(c, s):
    def integrand(z):
        return (z - c / s) ** 2 * stats.norm.pdf(z)

    expected, _ = integrate.quad(integrand, c / s, c / s + 12, epsabs=0, epsrel=1e-12, limit=200)
    assert theory.energy_removed(c, s) == pytest.approx(s * s * expected, rel=1e-9)
    assert theory.relative_energy_removed(c, s) == pytest.approx(2 * expected, rel=1e-9)
    assert theory.clipped_mass(c, s) == pytest.approx(stats.norm.sf(c / s), rel=1e-12)
    assert theory.log_clipped_mass(c, s) == pytest.approx(stats.norm.logsf(c / s), rel=1e-12)


@pytest.mark.parametrize("t", [0.01, 1.0, 3.0, 12.0, 37.0])
def test_all_and_their_slopes_keep_twelve_digits_far_out(t):
    c, s = 0.7, 0.7 / t

    def mass(at):
        return mp.erfc(c / at / mp.sqrt(2)) / 2

    def energy(at):
        reach = c / at
        return at**2 * ((1 + reach**2) * mass(at) - reach * mp.npdf(reach))

    formulas = (mass, energy, lambda at: 2 * energy(at) / at**2)
    with mp.workdps(60):
        at, step = mp.mpf(s), mp.mpf(s) * mp.mpf(10) ** -18
        for name, formula in zip(MEASURES, formulas, strict=True):
            assert getattr(theory, name)(c, s) == pytest.approx(float(formula(at)), rel=1e-12)
            slope = float(mp.diff(formula, at, h=step))
            assert slope_of(name)(c, s) == pytest.approx(slope, rel=1e-11)


@pytest.mark.parametrize("name", MEASURES)
@settings(deadline=None, max_examples=60)
@given(c=scales, reach=reaches, ratio=st.floats(1.01, 10))
def test_each_grows_with_s_everywhere(name, c, reach, ratio):
    measure = getattr(theory, name)
    s = c / reach
    assert slope_of(name)(c, s) > 0
    assert measure(c, s) < measure(c, ratio * s)


@settings(deadline=None, max_examples=60)
@given(scales, reaches, st.floats(1e-3, 1e3))
def test_units_change_nothing_but_the_unit_of_energy(c, reach, factor):
    s = c / reach
    for name, power in zip(MEASURES, (0, 2, 0), strict=True):
        measure = getattr(theory, name)
        assert measure(factor * c, factor * s) == pytest.approx(
            factor**power * measure(c, s), rel=1e-9
        )


@pytest.mark.parametrize("name", ["clipped_mass", "relative_energy_removed"])
def test_limits(name):
    measure = getattr(theory, name)
    most = {"clipped_mass": 0.5, "relative_energy_removed": 1.0}[name]
    assert measure(1e-12, 1.0) == pytest.approx(most, abs=1e-11)
    assert measure(math.inf, 1.0) == 0
    assert measure(1.0, 0.02) == pytest.approx(0, abs=1e-300)


@settings(deadline=None, max_examples=60)
@given(st.floats(1e-150, 1e150), st.floats(1e-150, 1e150))
def test_nothing_is_ever_nan(c, s):
    for name in MEASURES:
        assert math.isfinite(getattr(theory, name)(c, s))
        assert math.isfinite(slope_of(name)(c, s))
    assert math.isfinite(theory.log_clipped_mass(c, s))


def test_the_mass_is_that_of_samples_of_a_grid():
    """Midpoints of equal slices of probability: no random numbers, and no formula of ours."""
    z = stats.norm.ppf((torch.arange(200_000).double() + 0.5).numpy() / 200_000)
    x = torch.from_numpy(z).clamp(min=0) * 0.6
    excess = (x - 0.5).clamp(min=0)
    mass, energy = float((x > 0.5).double().mean()), float(excess.square().mean())
    assert theory.clipped_mass(0.5, 0.6) == pytest.approx(mass, abs=1e-5)
    assert theory.energy_removed(0.5, 0.6) == pytest.approx(energy, rel=1e-3)
