"""Where the entropy gain turns, and what that leaves of the paper's theorem."""

import math

import mpmath as mp
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import lambertw

from featcal import InputError, theory
from featcal.theory.forms import mills_ratio

thresholds = st.floats(1e-6, 1e6)
# As METHODS.md lists them, found by a grid of numeric derivatives.
LISTED = {0.2: 0.231, 0.23: 0.252, 0.5: 0.400, 0.6: 0.444, 1: 0.588, 2: 0.847, 5: 1.35}


@pytest.mark.parametrize(("c", "s"), LISTED.items())
def test_the_listed_turning_points(c, s):
    assert theory.turning_point(c) == pytest.approx(s, abs=5e-3 if c == 5 else 6e-4)


@pytest.mark.parametrize("c", [1e-8, 0.02, 0.23, 1.0, 7.0, 1e5])
def test_it_is_the_root_of_the_slope_in_sixty_digits(c):
    def slope(s):
        def gain(at):
            t = c / at
            v = mp.erfc(t / mp.sqrt(2)) / 2
            return -v * mp.log(v * at * mp.sqrt(2 * mp.pi * mp.e)) - t * mp.npdf(t) / 2

        return mp.diff(gain, s, h=s * mp.mpf(10) ** -18) * s / mp.npdf(c / s)

    with mp.workdps(60):
        found = theory.turning_point(c)
        root = mp.findroot(slope, (found * (1 - 1e-4), found * (1 + 1e-4)), solver="anderson")
    assert found == pytest.approx(float(root), rel=1e-11)


def test_it_is_the_inverse_of_an_explicit_curve():
    """At reach t = c/s the turning threshold is e^(-1 - r) / r, r = m(t)/t."""
    t = torch.logspace(-2, 3, 400, dtype=torch.float64)
    share = mills_ratio(t) / t
    c = torch.exp(-1 - share) / share
    assert torch.allclose(theory.turning_point(c), c / t, rtol=1e-12, atol=0)


@settings(deadline=None, max_examples=60)
@given(thresholds)
def test_its_share_is_lamberts_function(c):
    t = torch.tensor(c / theory.turning_point(c), dtype=torch.float64)
    assert float(mills_ratio(t) / t) == pytest.approx(lambertw(1 / (math.e * c)).real, rel=1e-11)


@settings(deadline=None, max_examples=60)
@given(thresholds, st.floats(1e-9, 3))
def test_the_gain_rises_below_it_and_falls_above_it(c, distance):
    turn = theory.turning_point(c)
    below, above = turn / (1 + distance), turn * (1 + distance)
    # Far below, at c/s > 38, both underflow to 0.
    assert theory.entropy_gain_slope(c, below) >= 0
    assert theory.entropy_gain_slope(c, below) > 0 or c / below > 38
    assert theory.entropy_gain_slope(c, above) < 0 or c / above > 38


@settings(deadline=None, max_examples=60)
@given(st.floats(1e-3, 100), st.floats(0.2, 1), st.floats(0.2, 1))
def test_the_theorem_holds_when_both_deviations_lie_below_it(c, one, other):
    low, high = sorted(share * theory.turning_point(c) for share in (one, other))
    assert theory.entropy_gain(c, low) <= theory.entropy_gain(c, high) + 1e-15


@settings(deadline=None, max_examples=60)
@given(st.floats(1e-3, 100), st.floats(1, 50), st.floats(1, 50))
def test_the_theorem_is_reversed_when_both_deviations_lie_above_it(c, one, other):
    low, high = sorted(share * theory.turning_point(c) for share in (one, other))
    gains = theory.entropy_gain(c, low), theory.entropy_gain(c, high)
    assert gains[0] >= gains[1] - 1e-14 * abs(gains[1])


def test_counterexample_to_the_theorem_as_stated():
    """The threshold is the paper's own; sigma_LCE < sigma_HCE, and yet Delta-H falls."""
    c, sigma_lce, sigma_hce = 0.23, 0.3, 0.4
    assert sigma_lce < sigma_hce
    assert theory.entropy_gain(c, sigma_lce) > theory.entropy_gain(c, sigma_hce)
    assert theory.turning_point(c) < sigma_lce


def test_the_share_of_the_threshold_depends_on_the_unit():
    c = torch.logspace(-6, 6, 100, dtype=torch.float64)
    share = theory.turning_point(c) / c
    assert (share.diff() < 0).all()
    assert share[0] > 5
    assert share[-1] < 1e-3


def test_limits_of_small_and_large_thresholds():
    large = 1e12
    assert theory.turning_point(large) == pytest.approx(math.sqrt(large / math.e), rel=1e-5)
    shares = []
    for c in (1e-10, 1e-100, 1e-300):
        shares.append(theory.turning_point(c) / (c * math.sqrt(2 / math.pi) * math.log(1 / c)))
    assert shares == sorted(shares)  # the approach is slow: log log (1/c) / log (1/c)
    assert shares[-1] == pytest.approx(1, abs=0.02)


@settings(deadline=None, max_examples=60)
@given(st.floats(1e-300, 1e300))
def test_every_threshold_has_one(c):
    found = theory.turning_point(c)
    assert math.isfinite(found)
    assert found > 0


def test_a_threshold_that_clips_nothing_has_none():
    with pytest.raises(InputError, match="c is inf: nothing is clipped"):
        theory.turning_point(math.inf)


@pytest.mark.parametrize(("c", "within"), [(1e-2, 0.06), (1e-4, 0.02), (1e-12, 0.002)])
def test_the_approximation_for_small_thresholds(c, within):
    about = c * math.sqrt(2 / math.pi) * (1 + lambertw(1 / (math.e * c)).real)
    assert theory.turning_point(c) == pytest.approx(about, rel=within)


@pytest.mark.parametrize(("c", "within"), [(5.0, 1 / 300), (1e3, 1e-6)])
def test_the_approximation_for_large_thresholds(c, within):
    assert theory.turning_point(c) == pytest.approx(math.sqrt(c / math.e), rel=within)


def test_the_leading_order_for_small_thresholds_is_reached_slowly():
    leading = 1e-6 * math.sqrt(2 / math.pi) * math.log(1e6)
    assert leading / theory.turning_point(1e-6) == pytest.approx(1.2, abs=0.02)
