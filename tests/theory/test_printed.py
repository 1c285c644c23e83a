"""The paper's formulas: typed a second time from its source, and shown to be wrong one by one."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from featcal import theory
from featcal.theory import printed

CASES = [(c, s) for c in (0.23, 1.0, 3.0) for s in (0.1, 1.0, 4.0)]
pairs = pytest.mark.parametrize(("c", "s"), CASES)
Phi, phi, log = norm.cdf, norm.pdf, math.log


def equation_3(c, s):
    alpha, beta = 0.0, c / s
    z = Phi(beta) - Phi(alpha)
    return log(math.sqrt(2 * math.pi * math.e * s * z)) + (
        alpha * phi(alpha) - beta * phi(beta)
    ) / (2 * z)


def equation_5(s):
    return -log(1 / 2) - 1 / 2 * log(math.sqrt(math.pi * math.e * s))


def equation_8(c, s):
    p, q = Phi(c / s), 1.5 - Phi(c / s)
    return (
        -q * log(q)
        - (p - 0.5) * log(p - 0.5)
        - 0.5 * log(0.5 / q)
        - (norm.sf(c / s) * log(norm.sf(c / s) / q) if norm.sf(c / s) > 0 else 0)
        + (p - 0.5) * equation_3(c, s)
    )


def equation_12(c, s):
    p, density = Phi(c / s), phi(c / s)
    return (
        log((p - 0.5) / norm.sf(c / s)) * density * c / s**2
        + 5 / (4 * s)
        - c * density / (2 * s**2 * p)
        + -density / (2 * p**2) * (c * (c**2 - s**2) / s**4 * p + c**2 / s**3 * density)
    )


def richardson(function, s):
    """The derivative by central differences of four steps, extrapolated."""
    rows = [
        (function(s + h) - function(s - h)) / (2 * h) for h in (s * 0.02 / 2**k for k in range(4))
    ]
    for order in (1, 2, 3):
        rows = [(4**order * b - a) / (4**order - 1) for a, b in itertools.pairwise(rows)]
    return rows[0]


@pairs
def test_every_formula_is_the_one_in_the_source(c, s):
    assert printed.truncated_entropy(c, s) == pytest.approx(equation_3(c, s), rel=1e-9, abs=1e-9)
    assert printed.rectified_entropy(s) == pytest.approx(equation_5(s), rel=1e-12)
    assert printed.clipped_entropy(c, s) == pytest.approx(equation_8(c, s), rel=1e-9, abs=1e-9)
    gain = equation_8(c, s) - equation_5(s)
    assert printed.entropy_gain(c, s) == pytest.approx(gain, rel=1e-9, abs=1e-9)
    p = Phi(c / s)  # the appendix takes it for P(0 < Z < c), as if Phi(0) were 0
    stated = math.log(math.sqrt(2 * math.pi * math.e * s**2 * p)) - c / s * phi(c / s) / (2 * p)
    assert printed.appendix_truncated_entropy(c, s) == pytest.approx(stated, rel=1e-9, abs=1e-9)
    if c / s < 30:  # 1 - Phi underflows in the line as printed
        assert printed.plotted_slope(c, s) == pytest.approx(equation_12(c, s), rel=1e-9)


@pairs
def test_the_slopes_are_those_of_the_printed_gains(c, s):
    for gain, slope in (
        (printed.entropy_gain, printed.entropy_gain_slope),
        (printed.appendix_entropy_gain, printed.appendix_entropy_gain_slope),
        (printed.appendix_truncated_entropy, printed.appendix_truncated_entropy_slope),
    ):
        expected = richardson(lambda at, gain=gain: gain(c, at), s)
        assert slope(c, s) == pytest.approx(expected, rel=1e-6, abs=1e-7)
    for slope in (printed.entropy_gain_slope, printed.appendix_entropy_gain_slope):
        assert printed.plotted_slope(c, s) - slope(c, s) > 0.1 / s


@pairs
def test_errors_a_and_b_squares_under_the_root_and_a_sign_mended_give_the_correct_gain(c, s):
    z = Phi(c / s) - 0.5
    root_in_clipped = z * 0.5 * math.log(s * z)
    # -(-(1/2) H_c) becomes -(1/2) H_c, with H_c = log sqrt(pi e s^2 / 2) in place of sqrt(pi e s).
    printed_half, half = (0.5 * math.log(math.sqrt(math.pi * math.e * x)) for x in (s, s * s / 2))
    mended = printed.entropy_gain(c, s) + root_in_clipped - printed_half - half
    assert mended == pytest.approx(theory.entropy_gain(c, s), rel=1e-9, abs=1e-9)


@pairs
def test_error_d_the_product_rule(c, s):
    """Both lost pieces put back, Eq. (12) is the derivative of the appendix's Delta-H."""
    u, pull = Phi(c / s) - 0.5, phi(c / s) * c / s**2
    inner = printed.appendix_truncated_entropy_slope(c, s)
    mended = printed.plotted_slope(c, s) - (1 - u) * inner
    mended -= pull * printed.appendix_truncated_entropy(c, s)
    assert mended == pytest.approx(printed.appendix_entropy_gain_slope(c, s), rel=1e-9, abs=1e-12)


@settings(deadline=None, max_examples=25)
@given(st.floats(0.05, 20))
def test_the_printed_gain_is_not_zero_when_nothing_is_clipped(s):
    expected = 0.5 * math.log(math.pi * math.e * s)
    assert printed.entropy_gain(math.inf, s) == pytest.approx(expected, abs=1e-12)
    assert theory.entropy_gain(math.inf, s) == 0


def test_the_theorem_fails_for_the_printed_gain_too():
    """Eq. (9) at its word, c = 5: the larger deviation has the smaller gain."""
    assert printed.entropy_gain(5.0, 6.0) > printed.entropy_gain(5.0, 15.0)
    assert printed.entropy_gain_slope(5.0, 10.0) < 0
    assert printed.appendix_entropy_gain_slope(5.0, 10.0) < 0
    assert printed.plotted_slope(5.0, 10.0) > 0


@settings(deadline=None, max_examples=25)
@given(st.floats(1e-100, 1e100), st.floats(1e-100, 1e100))
def test_the_print_is_evaluated_without_rounding_it_to_nan(c, s):
    truncated = ("truncated_entropy", "appendix_truncated_entropy", "clipped_entropy")
    gains = ("entropy_gain", "appendix_entropy_gain", "plotted_slope")
    slopes = ("entropy_gain_slope", "appendix_entropy_gain_slope")
    for name in (*truncated, *gains, *slopes, "appendix_truncated_entropy_slope"):
        assert math.isfinite(getattr(printed, name)(c, s))
    if 0.02 < c / s < 100:  # positive as the paper says
        assert printed.plotted_slope(c, s) > 0
