"""The closed forms against quadrature, scipy and fifty digits of mpmath."""

import itertools
import math

import mpmath as mp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from featcal import InputError, theory

THRESHOLDS = (1e-3, 0.05, 0.23, 1.0, 4.0, 60.0, 1e3)
SHARES = (1e-3, 0.02, 0.3, 1.0, 1.7, 5.0, 40.0)  # of c: the deviations s
GRID = [(c, c * share) for c in THRESHOLDS for share in SHARES]
REACHES = (1e-9, 0.01, 0.5, 1.0, 2.999, 3.0, 3.001, 8.0, 25.0, 37.5)  # c/s
wide = st.floats(1e-150, 1e150)
common = st.floats(0.01, 50)


def plogp(p):
    return p * math.log(p) if p > 0 else 0.0


def quadrature(s, low, high):
    """-integral f log f of N(0, s^2), in units of s so that quad sees the bump."""

    def integrand(z):
        return -stats.norm.pdf(z) * (stats.norm.logpdf(z) - math.log(s))

    cuts = [cut for cut in (0.5, 1, 2, 4, 8) if low / s < cut < high / s]
    edges = [low / s, *cuts, min(high / s, 39)]
    pieces = itertools.pairwise(edges)
    return sum(integrate.quad(integrand, a, b, epsabs=1e-13, epsrel=1e-13)[0] for a, b in pieces)


def exact_gain(c, s):
    """-v log v minus the tail's share of the entropy, as a formula of erfc in fifty digits."""
    t, s = mp.mpf(c) / s, mp.mpf(s)
    v, phi = mp.erfc(t / mp.sqrt(2)) / 2, mp.npdf(t)
    return -v * mp.log(v) - v * mp.log(s * mp.sqrt(2 * mp.pi)) - (v + t * phi) / 2


@pytest.fixture(autouse=True)
def _fifty_digits():
    with mp.workdps(50):
        yield


@pytest.mark.parametrize("s", [1e-3, 0.252, 1.0, 30.0, 1e4])
def test_rectified_entropy_is_the_integral(s):
    expected = 0.5 * math.log(2) + quadrature(s, 0, math.inf)
    assert theory.rectified_entropy(s) == pytest.approx(expected, abs=1e-9)
    half_normal = math.log(2) + 0.5 * float(stats.halfnorm(scale=s).entropy())
    assert theory.rectified_entropy(s) == pytest.approx(half_normal, abs=1e-12)


@pytest.mark.parametrize(("c", "s"), GRID)
def test_clipped_entropy_is_the_integral(c, s):
    atoms = -plogp(0.5) - plogp(stats.norm.sf(c / s))
    expected = atoms + quadrature(s, 0, c)
    assert theory.clipped_entropy(c, s) == pytest.approx(expected, abs=1e-9)
    expected -= 0.5 * math.log(2) + quadrature(s, 0, math.inf)
    assert theory.entropy_gain(c, s) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("c", "s"), [(c, s) for c, s in GRID if c / s < 8])
def test_clipped_entropy_is_a_mixture_with_the_truncated_normal_of_scipy(c, s):
    u, v = stats.norm.cdf(c / s) - 0.5, stats.norm.sf(c / s)
    inside = float(stats.truncnorm(0, c / s, scale=s).entropy())
    expected = -plogp(0.5) - plogp(u) - plogp(v) + u * inside
    assert theory.clipped_entropy(c, s) == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("s", [1e-4, 0.5, 2e3])
def test_gain_tail_and_slope_keep_twelve_digits_however_small_they_are(reach, s):
    c = reach * s
    expected = exact_gain(c, s)
    assert theory.entropy_gain(c, s) == pytest.approx(float(expected), rel=1e-12)
    v = mp.erfc(mp.mpf(c) / s / mp.sqrt(2)) / 2
    assert theory.tail_entropy(c, s) == pytest.approx(float(-expected / v), rel=1e-12)
    slope = mp.diff(lambda at: exact_gain(c, at), mp.mpf(s), h=mp.mpf(s) * mp.mpf(10) ** -15)
    assert theory.entropy_gain_slope(c, s) == pytest.approx(float(slope), rel=1e-11)


def test_gain_is_minus_mass_times_the_entropy_of_the_tail():
    c, s = torch.tensor([[0.2], [1.0]]), torch.linspace(0.1, 3, 30)
    expected = -theory.clipped_mass(c, s) * theory.tail_entropy(c, s)
    assert torch.allclose(theory.entropy_gain(c, s), expected, rtol=1e-13, atol=0)
    difference = theory.clipped_entropy(c, s) - theory.rectified_entropy(s)
    assert torch.allclose(theory.entropy_gain(c, s), difference, rtol=0, atol=1e-14)


def test_the_slope_is_that_of_autograd():
    s = torch.logspace(-1.5, 3, 60, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(theory.entropy_gain(1.0, s).sum(), s)
    assert torch.allclose(theory.entropy_gain_slope(1.0, s), expected, rtol=1e-10, atol=1e-300)


@settings(deadline=None, max_examples=60)
@given(common)
def test_the_gain_goes_to_zero_as_nothing_is_clipped(s):
    assert theory.entropy_gain(math.inf, s) == 0
    assert theory.clipped_entropy(math.inf, s) == theory.rectified_entropy(s)
    gains = theory.entropy_gain(s * torch.tensor([4.0, 6, 9, 14, 40]), s).abs()
    assert (gains.diff() <= 0).all()
    assert gains[-1] == 0


@settings(deadline=None, max_examples=60)
@given(common)
def test_two_equal_atoms_are_left_as_c_goes_to_zero(s):
    assert theory.clipped_entropy(1e-14 * s, s) == pytest.approx(math.log(2), abs=1e-11)
    expected = math.log(2) - theory.rectified_entropy(s)
    assert theory.entropy_gain(1e-14 * s, s) == pytest.approx(expected, abs=1e-11)


@settings(deadline=None, max_examples=60)
@given(common)
def test_small_s_gain_a_little_and_large_s_lose_without_bound(c):
    assert theory.entropy_gain(c, 0.03 * c) >= 0
    small = theory.entropy_gain(c, 0.02 * c)
    assert small == pytest.approx(0, abs=1e-300)
    assert theory.entropy_gain(c, 1e100 * c) < -100
    assert theory.entropy_gain_slope(c, 1e8 * c) == pytest.approx(-0.5 / (1e8 * c), rel=1e-6)


@settings(deadline=None, max_examples=60)
@given(wide, wide)
def test_nothing_is_ever_nan_or_infinite(c, s):
    one = [theory.rectified_entropy(s), theory.turning_point(c)]
    names = ("clipped_entropy", "entropy_gain", "entropy_gain_slope", "tail_entropy")
    both = [getattr(theory, name)(c, s) for name in names]
    assert all(math.isfinite(value) for value in one + both)
    assert theory.clipped_entropy(c, s) == pytest.approx(
        theory.rectified_entropy(s) + theory.entropy_gain(c, s), rel=1e-9, abs=1e-9
    )


@settings(deadline=None, max_examples=60)
@given(common, common, st.floats(1e-6, 1e6))
def test_a_unit_moves_the_gain_by_the_clipped_mass_times_its_logarithm(c, s, factor):
    found = theory.rescaled_entropy_gain(c, s, factor)
    assert found == pytest.approx(theory.entropy_gain(factor * c, factor * s), rel=1e-9, abs=1e-12)
    moved = theory.entropy_gain(c, s) - theory.clipped_mass(c, s) * math.log(factor)
    assert found == pytest.approx(moved, rel=1e-12, abs=1e-12)


@settings(deadline=None, max_examples=60)
@given(st.floats(0.05, 10), st.floats(0.1, 3), st.floats(1.05, 5))
def test_every_pair_has_a_unit_in_which_its_order_turns(c, share, ratio):
    low, high = share * c, ratio * share * c
    turn = theory.tipping_factor(c, low, high)

    def ordered(factor):
        gains = [theory.rescaled_entropy_gain(c, s, factor) for s in (low, high)]
        return gains[0] < gains[1]

    assert ordered(turn / 1.001)
    assert not ordered(turn * 1.001)


def test_the_tipping_factor_is_known_where_both_masses_underflow():
    found = theory.tipping_factor(100.0, 1.0, 1.5)
    low, high = exact_gain(100, 1.0), exact_gain(100, 1.5)
    low_mass, high_mass = (mp.erfc(100 / mp.mpf(s) / mp.sqrt(2)) / 2 for s in (1.0, 1.5))
    expected = mp.exp((high - low) / (high_mass - low_mass))
    assert found == pytest.approx(float(expected), rel=1e-11)


@pytest.mark.parametrize(("low", "high"), [(1.0, 1.0), (2.0, 1.0)])
def test_the_smaller_deviation_comes_first(low, high):
    with pytest.raises(InputError, match="give an s_low below s_high"):
        theory.tipping_factor(1.0, low, high)


@pytest.mark.parametrize("s", [0.3, 0.4, 2.0])
def test_minus_the_gain_is_what_a_finely_rounded_feature_loses(s):
    """Shannon's own entropy of X rounded to cells, before and after clipping: no densities."""
    c, cell = 0.25, 1e-3
    edges = c + cell * np.arange(int(12 * s / cell))
    cells = -np.diff(stats.norm.sf(edges / s))
    tail = stats.norm.sf(c / s)
    lost = -np.sum(cells * np.log(cells)) + tail * math.log(tail)
    assert -theory.rescaled_entropy_gain(c, s, 1 / cell) == pytest.approx(lost, rel=1e-5)


def test_floats_give_floats_and_tensors_broadcast_in_float64():
    assert isinstance(theory.entropy_gain(1, 2), float)
    assert isinstance(theory.turning_point(1.0), float)
    many = theory.entropy_gain(torch.tensor([[0.5], [1.0]]), torch.tensor([0.1, 0.2, 0.3]))
    assert many.shape == (2, 3)
    assert many.dtype == torch.float64
    assert theory.entropy_gain(c=1.0, s=torch.tensor(0.5)).shape == ()
    assert many[1, 2].item() == pytest.approx(theory.entropy_gain(1.0, 0.3), rel=1e-6)
    assert theory.turning_point(torch.empty(0)).shape == (0,)


@pytest.mark.parametrize(
    ("c", "s", "text"),
    [
        (0.0, 1.0, "entropy_gain: c is 0.0: give numbers above 0"),
        (math.nan, 1.0, "entropy_gain: c is nan: give numbers above 0"),
        (1.0, -2.0, "entropy_gain: s is -2.0: give finite numbers above 0"),
        (1.0, math.inf, "entropy_gain: s is inf: give finite numbers above 0"),
        (1.0, torch.tensor([1.0, -3.0]), "entropy_gain: s is -3.0: give finite numbers above 0"),
        ("wide", 1.0, "entropy_gain: c is 'wide': give a number or a tensor"),
    ],
)
def test_what_is_no_deviation_and_no_threshold_is_refused(c, s, text):
    with pytest.raises(InputError) as caught:
        theory.entropy_gain(c, s)
    assert str(caught.value) == text
