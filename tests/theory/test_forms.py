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
from scipy.special import erfcx, lambertw

from featcal import InputError, theory

THRESHOLDS = (1e-3, 0.23, 1.0, 60.0)
SHARES = (1e-3, 0.3, 1.0, 5.0, 40.0)  # of c: the deviations s
GRID = [(c, c * share) for c in THRESHOLDS for share in SHARES]
REACHES = (1e-9, 0.5, 2.999, 3.0, 3.001, 25.0, 37.5)  # c/s
MEASURES = ("clipped_mass", "energy_removed", "relative_energy_removed")
wide = st.floats(1e-150, 1e150)
common = st.floats(0.01, 50)
few = settings(deadline=None, max_examples=25)


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


def exact_mass(c, s):
    return mp.erfc(mp.mpf(c) / s / mp.sqrt(2)) / 2


def exact_gain(c, s):
    """-v log v minus the tail's share of the entropy, as a formula of erfc in fifty digits."""
    t, v = mp.mpf(c) / s, exact_mass(c, s)
    return -v * mp.log(v) - v * mp.log(s * mp.sqrt(2 * mp.pi)) - (v + t * mp.npdf(t)) / 2


def exact_energy(c, s):
    t = mp.mpf(c) / s
    return s**2 * ((1 + t**2) * exact_mass(c, s) - t * mp.npdf(t))


def mills_share(t):
    """r(t) = m(t)/t, m the Mills ratio, by scipy."""
    return math.sqrt(math.pi / 2) * erfcx(t / math.sqrt(2)) / t


@pytest.fixture(autouse=True)
def _fifty_digits():
    with mp.workdps(50):
        yield


# --- the entropy before and after ------------------------------------------------------------


@pytest.mark.parametrize(("c", "s"), GRID)
def test_entropies_are_the_integrals(c, s):
    whole = 0.5 * math.log(2) + quadrature(s, 0, math.inf)
    assert theory.rectified_entropy(s) == pytest.approx(whole, abs=1e-9)
    half_normal = math.log(2) + 0.5 * float(stats.halfnorm(scale=s).entropy())
    assert theory.rectified_entropy(s) == pytest.approx(half_normal, abs=1e-12)
    clipped = -plogp(0.5) - plogp(stats.norm.sf(c / s)) + quadrature(s, 0, c)
    assert theory.clipped_entropy(c, s) == pytest.approx(clipped, abs=1e-9)
    assert theory.entropy_gain(c, s) == pytest.approx(clipped - whole, abs=1e-9)


@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("s", [1e-4, 2e3])
def test_all_keep_twelve_digits_however_small_they_are(reach, s):
    c, at, step = reach * s, mp.mpf(s), mp.mpf(s) * mp.mpf(10) ** -15
    gain, v = exact_gain(c, s), exact_mass(c, s)
    assert theory.entropy_gain(c, s) == pytest.approx(float(gain), rel=1e-12)
    slope = mp.diff(lambda s: exact_gain(c, s), at, h=step)
    assert theory.entropy_gain_slope(c, s) == pytest.approx(float(slope), rel=1e-11)
    formulas = (exact_mass, exact_energy, lambda c, s: 2 * exact_energy(c, s) / s**2)
    for name, formula in zip(MEASURES, formulas, strict=True):
        assert getattr(theory, name)(c, s) == pytest.approx(float(formula(c, at)), rel=1e-12)
    assert theory.log_clipped_mass(c, s) == pytest.approx(float(mp.log(v)), rel=1e-12)


@few
@given(common)
def test_limits_of_the_gain(s):
    assert theory.entropy_gain(math.inf, s) == 0
    assert theory.clipped_entropy(math.inf, s) == theory.rectified_entropy(s)
    gains = theory.entropy_gain(s * torch.tensor([4.0, 6, 9, 14, 40]), s).abs()
    assert (gains.diff() <= 0).all()
    assert gains[-1] == 0
    # Two equal atoms are left as c goes to 0.
    assert theory.clipped_entropy(1e-14 * s, s) == pytest.approx(math.log(2), abs=1e-11)
    c = s
    assert theory.entropy_gain(c, 0.03 * c) >= 0
    assert theory.entropy_gain(c, 0.02 * c) == pytest.approx(0, abs=1e-300)
    assert theory.entropy_gain(c, 1e100 * c) < -100
    assert theory.entropy_gain_slope(c, 1e8 * c) == pytest.approx(-0.5 / (1e8 * c), rel=1e-6)


@few
@given(wide, wide)
def test_nothing_is_ever_nan_or_infinite(c, s):
    names = ("clipped_entropy", "entropy_gain", "entropy_gain_slope", "log_clipped_mass", *MEASURES)
    both = [getattr(theory, name)(c, s) for name in names]
    assert all(map(math.isfinite, [theory.rectified_entropy(s), theory.turning_point(c), *both]))
    assert theory.clipped_entropy(c, s) == pytest.approx(
        theory.rectified_entropy(s) + theory.entropy_gain(c, s), rel=1e-9, abs=1e-9
    )


# --- units -----------------------------------------------------------------------------------


@few
@given(common, common, st.floats(1e-6, 1e6))
def test_a_unit_moves_the_gain_by_the_clipped_mass_times_its_logarithm(c, s, factor):
    found = theory.rescaled_entropy_gain(c, s, factor)
    assert found == pytest.approx(theory.entropy_gain(factor * c, factor * s), rel=1e-9, abs=1e-12)
    moved = theory.entropy_gain(c, s) - theory.clipped_mass(c, s) * math.log(factor)
    assert found == pytest.approx(moved, rel=1e-12, abs=1e-12)


@few
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
    gains, masses = ([f(100, mp.mpf(s)) for s in (1.0, 1.5)] for f in (exact_gain, exact_mass))
    expected = mp.exp((gains[1] - gains[0]) / (masses[1] - masses[0]))
    assert theory.tipping_factor(100.0, 1.0, 1.5) == pytest.approx(float(expected), rel=1e-11)
    for low in (1.0, 2.0):
        with pytest.raises(InputError, match="give an s_low below s_high"):
            theory.tipping_factor(1.0, low, 1.0)


@pytest.mark.parametrize("s", [0.3, 2.0])
def test_minus_the_gain_is_what_a_finely_rounded_feature_loses(s):
    """Shannon's own entropy of X rounded to cells, before and after clipping: no densities."""
    c, cell = 0.25, 1e-3
    edges = c + cell * np.arange(int(12 * s / cell))
    cells = -np.diff(stats.norm.sf(edges / s))
    tail = stats.norm.sf(c / s)
    lost = -np.sum(cells * np.log(cells)) + tail * math.log(tail)
    assert -theory.rescaled_entropy_gain(c, s, 1 / cell) == pytest.approx(lost, rel=1e-5)


# --- where the gain turns, and what that leaves of the paper's theorem -----------------------


def test_the_turn_is_the_inverse_of_an_explicit_curve_and_its_share_falls():
    """At reach t = c/s the turning threshold is e^(-1 - r) / r, r = m(t)/t."""
    t = np.logspace(-2, 3, 400)
    share = mills_share(t)
    c = np.exp(-1 - share) / share
    found = theory.turning_point(torch.from_numpy(c)).numpy()
    np.testing.assert_allclose(found, c / t, rtol=1e-12)
    assert (np.diff(found / c) < 0).all()  # the share of the threshold depends on the unit


@few
@given(st.floats(1e-6, 1e6), st.floats(1e-9, 3))
def test_the_gain_rises_below_the_turn_and_falls_above_it(c, distance):
    turn = theory.turning_point(c)
    assert mills_share(c / turn) == pytest.approx(lambertw(1 / (math.e * c)).real, rel=1e-11)
    below, above = turn / (1 + distance), turn * (1 + distance)
    # Far below, at c/s > 38, both underflow to 0.
    assert theory.entropy_gain_slope(c, below) >= 0
    assert theory.entropy_gain_slope(c, below) > 0 or c / below > 38
    assert theory.entropy_gain_slope(c, above) < 0 or c / above > 38


def test_counterexample_to_the_theorem_as_stated():
    """The threshold is the paper's own; sigma_LCE < sigma_HCE, and yet Delta-H falls."""
    c, sigma_lce, sigma_hce = 0.23, 0.3, 0.4
    assert theory.entropy_gain(c, sigma_lce) > theory.entropy_gain(c, sigma_hce)
    assert theory.turning_point(c) < sigma_lce


def test_limits_of_small_and_large_thresholds():
    for c, within in ((5.0, 1 / 300), (1e3, 1e-6), (1e300, 1e-6)):
        assert theory.turning_point(c) == pytest.approx(math.sqrt(c / math.e), rel=within)
    for c, within in ((1e-2, 0.06), (1e-4, 0.02), (1e-12, 0.002)):
        about = c * math.sqrt(2 / math.pi) * (1 + lambertw(1 / (math.e * c)).real)
        assert theory.turning_point(c) == pytest.approx(about, rel=within)
    shares = [
        theory.turning_point(c) / (c * math.sqrt(2 / math.pi) * math.log(1 / c))
        for c in (1e-6, 1e-10, 1e-100, 1e-300)
    ]
    assert shares == sorted(shares)  # the approach is slow: log log (1/c) / log (1/c)
    assert shares[0] == pytest.approx(1 / 1.2, abs=0.02)
    assert shares[-1] == pytest.approx(1, abs=0.02)


# --- what clipping removes -------------------------------------------------------------------


@few
@given(st.floats(1e-3, 1e3), st.floats(0.01, 30), st.floats(1.01, 10), st.floats(1e-3, 1e3))
def test_each_grows_with_s_everywhere_and_units_change_nothing_but_that_of_energy(
    c, reach, ratio, factor
):
    s = c / reach
    for name, power in zip(MEASURES, (0, 2, 0), strict=True):
        measure = getattr(theory, name)
        assert measure(c, s) < measure(c, ratio * s)
        scaled = measure(factor * c, factor * s)
        assert scaled == pytest.approx(factor**power * measure(c, s), rel=1e-9)
    for measure, most in ((theory.clipped_mass, 0.5), (theory.relative_energy_removed, 1.0)):
        assert measure(1e-12 * c, c) == pytest.approx(most, abs=1e-11)
        assert measure(math.inf, s) == 0


# --- arguments -------------------------------------------------------------------------------


def test_floats_give_floats_and_tensors_broadcast_in_float64():
    assert isinstance(theory.entropy_gain(1, 2), float)
    many = theory.entropy_gain(torch.tensor([[0.5], [1.0]]), torch.tensor([0.1, 0.2, 0.3]))
    assert many.shape == (2, 3)
    assert many.dtype == torch.float64
    assert theory.entropy_gain(c=1.0, s=torch.tensor(0.5)).shape == ()
    assert many[1, 2].item() == pytest.approx(theory.entropy_gain(1.0, 0.3), rel=1e-6)
    assert theory.turning_point(torch.empty(0)).shape == (0,)


def test_what_is_no_deviation_and_no_threshold_is_refused():
    for c, s, text in [
        (0.0, 1.0, "c is 0.0: give numbers above 0"),
        (math.nan, 1.0, "c is nan"),
        (1.0, math.inf, "s is inf: give finite numbers above 0"),
        (1.0, torch.tensor([1.0, -3.0]), "s is -3.0"),
        ("wide", 1.0, "c is 'wide': give a number or a tensor"),
    ]:
        with pytest.raises(InputError, match=f"entropy_gain: {text}"):
            theory.entropy_gain(c, s)
    with pytest.raises(InputError, match="c is inf: nothing is clipped"):
        theory.turning_point(math.inf)
