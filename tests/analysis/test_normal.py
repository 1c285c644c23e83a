"""Normals censored at zero: against scipy's optimiser on the full likelihood, and closed forms."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from featcal.analysis.features import NormalFit


def fit(values, *, rectified=True):
    values = np.asarray(values, dtype=float)
    zeros = int((values == 0).sum())
    sums = float(values.sum()), float((values**2).sum())
    return NormalFit.of_sums(len(values) - zeros, zeros, *sums, rectified=rectified)


def loss(at, values):
    """Minus the log-likelihood of a normal sample of which zeros are only known to be below 0."""
    mean, spread = at[0], math.exp(at[1])
    above = values[values > 0]
    tail = (values == 0).sum() * stats.norm.logcdf(-mean / spread)
    return -(stats.norm.logpdf(above, mean, spread).sum() + tail)


@pytest.mark.parametrize(("mean", "spread"), [(0.0, 1.0), (-1.0, 0.5), (0.7, 0.3), (-2.0, 2.0)])
def test_the_free_fit_is_the_maximum_of_the_likelihood(mean, spread):
    draw = np.random.default_rng(0)
    values = np.maximum(draw.normal(mean, spread, 4000), 0)
    found = fit(values)
    best = optimize.minimize(
        loss, [mean, math.log(spread)], args=(values,), method="Nelder-Mead",
        options={"xatol": 1e-10, "fatol": 1e-10},
    )  # fmt: skip
    assert found.mean == pytest.approx(best.x[0], abs=1e-5)
    assert found.spread == pytest.approx(math.exp(best.x[1]), rel=1e-5)


@given(st.floats(0.05, 20), st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_sigma_is_found_again(sigma, seed):
    values = np.maximum(np.random.default_rng(seed).normal(0, sigma, 20_000), 0)
    found = fit(values)
    assert found.sigma == pytest.approx(sigma, rel=0.06)
    assert found.spread == pytest.approx(sigma, rel=0.12)


def test_sigma_is_the_maximum_of_the_likelihood_with_mean_zero():
    values = np.maximum(np.random.default_rng(1).normal(0.2, 1, 3000), 0)
    best = optimize.minimize_scalar(lambda log: loss((0.0, log), values))
    assert fit(values).sigma == pytest.approx(math.exp(best.x), rel=1e-6)


def test_without_zeros_it_is_the_plain_normal():
    values = np.array([1.0, 2.0, 4.0])
    found = fit(values)
    assert found.mean == pytest.approx(values.mean())
    assert found.spread == pytest.approx(values.std())


def test_signed_values_count_their_zeros():
    found = fit([-1.0, 0.0, 1.0], rectified=False)
    assert (found.mean, found.spread) == pytest.approx((0, math.sqrt(2 / 3)))
    assert found.sigma == pytest.approx(math.sqrt(2 / 3))


def test_no_values_and_only_zeros():
    assert math.isnan(fit([]).sigma)
    assert fit([0.0, 0.0]) == NormalFit(0.0, 0.0, 0.0, True)
    assert math.isnan(fit([0.0]).density(1.0))


@pytest.mark.parametrize("values", [[0.0] * 999 + [3.0], [1.0] * 999 + [0.0], [1e-30, 0.0]])
def test_extreme_shares_of_zeros_stay_finite(values):
    found = fit(values)
    assert all(map(math.isfinite, (found.sigma, found.mean, found.spread)))
    assert found.spread > 0


def test_the_density_is_that_of_a_normal():
    assert fit([0.0, 2.0]).density(1.0) == pytest.approx(stats.norm.pdf(1, 0, 2))
