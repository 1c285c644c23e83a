"""Weights of mixtures against a solver, a grid and plain EM."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from featcal.core.gradient import likeliest_weights, simplex_minimum


@given(st.integers(0, 200))
@settings(max_examples=40, deadline=None)
def test_the_simplex_minimum_is_that_of_a_fine_grid(seed):
    draw = np.random.default_rng(seed)
    root = draw.normal(size=(3, 3))
    products, hits = root @ root.T, draw.normal(size=3)
    found = simplex_minimum(2 * products, -2 * hits)
    assert found.min() >= 0
    assert found.sum() == pytest.approx(1)

    def value(w):
        return w @ products @ w - 2 * hits @ w

    steps = np.arange(41) / 40
    grid = [np.array([a, b, 1 - a - b]) for a in steps for b in steps if a + b <= 1]
    assert value(found) <= min(map(value, grid)) + 1e-9


@pytest.mark.parametrize("seed", range(4))
def test_long_em_ends_at_the_same_likelihood(seed):
    draw = np.random.default_rng(seed)
    parts = np.log(draw.random(size=(300, 3)) ** 2 + 1e-3)
    value, weights = likeliest_weights(torch.from_numpy(parts), 300)
    chances, em = np.exp(parts), np.full(3, 1 / 3)
    for _ in range(20_000):
        shares = chances * em
        em = (shares / shares.sum(1, keepdims=True)).mean(0)
    assert value == pytest.approx(-np.log(chances @ weights).mean(), abs=1e-12)
    assert value <= -np.log(chances @ em).mean() + 1e-10
    np.testing.assert_allclose(weights, em, atol=1e-3)


def test_a_part_that_is_always_best_takes_all():
    parts = torch.tensor([[0.0, -1.0, -2.0]], dtype=torch.float64).repeat(20, 1)
    value, weights = likeliest_weights(parts, 20)
    assert weights.tolist() == [1, 0, 0]
    assert value == pytest.approx(0)


def test_impossible_parts_do_no_harm():
    parts = torch.tensor([[-1e4, -1.0, -2.0], [0.0, -9e3, -2.0]], dtype=torch.float64)
    value, weights = likeliest_weights(parts, 2)
    assert np.isfinite(weights).all()
    assert np.isfinite(value)
    assert weights.sum() == pytest.approx(1)
