"""Pool adjacent violators: scikit-learn, the conditions of the projection, and a naive loop."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from featcal.methods import isotonic as pav
from featcal.methods.isotonic import pool

places = st.lists(st.tuples(st.floats(-100, 100), st.floats(0.125, 50)), min_size=1, max_size=80)
counts = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 6)).map(lambda p: (min(p), p[1])),
    min_size=1,
    max_size=80,
)


def fitted(values, weights):
    values, weights = np.asarray(values, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    starts = pool(values * weights, weights)
    lengths = np.diff([*starts, len(values)])
    means = np.add.reduceat(values * weights, starts) / np.add.reduceat(weights, starts)
    return np.repeat(means, lengths), starts


def scikit(values, weights):
    isotonic = pytest.importorskip("sklearn.isotonic")
    return isotonic.isotonic_regression(values, sample_weight=weights)


def naive(values, weights):
    """The min-max formula: max over i <= j of min over k >= j of the mean from i to k."""
    n = len(values)

    def mean(i, k):
        return np.average(values[i : k + 1], weights=weights[i : k + 1])

    return [max(min(mean(i, k) for k in range(j, n)) for i in range(j + 1)) for j in range(n)]


@given(places)
@settings(max_examples=100, deadline=None)
def test_scikit_learn_agrees(pairs):
    values, weights = map(np.array, zip(*pairs, strict=True))
    np.testing.assert_allclose(fitted(values, weights)[0], scikit(values, weights), atol=1e-9)


@given(st.lists(st.tuples(st.floats(-9, 9), st.floats(0.5, 3)), min_size=1, max_size=12))
@settings(max_examples=40, deadline=None)
def test_the_min_max_formula_agrees(pairs):
    values, weights = map(np.array, zip(*pairs, strict=True))
    np.testing.assert_allclose(fitted(values, weights)[0], naive(values, weights), atol=1e-9)


@given(places)
@settings(max_examples=100, deadline=None)
def test_it_is_the_projection_on_ascending_sequences(pairs):
    values, weights = map(np.array, zip(*pairs, strict=True))
    fit, starts = fitted(values, weights)
    assert (np.diff(fit) >= 0).all()
    assert (np.diff(fit[starts]) > 0).all()  # blocks differ, or they would be one
    residual = weights * (values - fit)
    scale = 1e-9 * (1 + np.abs(weights * values).sum())
    assert abs(residual.sum()) <= scale  # the mean is kept
    # Kuhn and Tucker: no head of a block is below the block's mean, and nothing is left at its end.
    for start, end in zip(starts, [*starts[1:], len(values)], strict=True):
        heads = residual[start:end].cumsum()
        assert (heads >= -scale).all()
        assert abs(heads[-1]) <= scale


@given(counts)
@settings(max_examples=60, deadline=None)
def test_hits_and_rows_are_pooled_exactly(pairs):
    hits, rows = (np.array(part, dtype=np.float64) for part in zip(*pairs, strict=True))
    starts = pool(hits, rows)
    assert starts.tolist() == pav._pool_by_stack(hits, rows)  # integers: no rounding to hide in


def test_ascending_values_stay_and_descending_ones_become_one_block():
    up = np.arange(50.0)
    assert pool(up, np.ones(50)).tolist() == list(range(50))
    assert pool(up[::-1].copy(), np.ones(50)).tolist() == [0]
    assert pool(np.ones(7), np.ones(7)).tolist() == [0]
    assert pool(np.ones(1), np.ones(1)).tolist() == [0]


def test_the_worst_case_for_rounds_is_left_to_the_stack():
    """Ascending values with one very low one at the end: a round pools two places and no more."""
    values = np.append(np.arange(20_000.0), -1e9)
    assert pool(values, np.ones(len(values))).tolist() == [0]


def test_many_places():
    draw = np.random.default_rng(0)
    at = np.linspace(0, 1, 300_000)
    hits = (draw.uniform(size=len(at)) < at).astype(np.float64)
    fit, _ = fitted(hits, np.ones_like(hits))
    np.testing.assert_allclose(fit, scikit(hits, np.ones_like(hits)), atol=1e-12)
