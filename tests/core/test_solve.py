"""The scalar searches, against functions whose minimum is known."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from featcal.core.scalar import (
    Point,
    Walk,
    best_of,
    fitted_shape,
    minimize_log,
    model_minimum,
    refine,
    vertex,
)
from featcal.core.scalar import flat as no_shape


def parabola(centre, scale=1.0):
    return lambda u: scale * (u - centre) ** 2


@given(st.floats(-3, 3), st.floats(0.01, 100))
@settings(max_examples=50, deadline=None)
def test_minimize_log_finds_a_parabola(centre, scale):
    found = minimize_log(lambda x: parabola(centre, scale)(math.log(x)), 1e-3, 1e3)
    assert found.converged
    assert math.log(found.at) == pytest.approx(centre, abs=1e-3)
    assert found.score <= 1e-5 * scale


def test_minimize_log_finds_the_global_one_of_many_minima():
    def score(x):
        u = math.log(x)
        return math.cos(5 * u) + 0.05 * (u - 2) ** 2

    grid = np.linspace(math.log(1e-2), math.log(1e2), 200_001)
    truth = (np.cos(5 * grid) + 0.05 * (grid - 2) ** 2).min()
    assert minimize_log(score, 1e-2, 1e2).score == pytest.approx(truth, abs=1e-6)


@pytest.mark.parametrize(("slope", "end"), [(1.0, 1e-2), (-1.0, 1e2)])
def test_minimize_log_at_a_cap_has_not_converged(slope, end):
    found = minimize_log(lambda x: slope * math.log(x), 1e-2, 1e2)
    assert found.at == pytest.approx(end)
    assert not found.converged


def test_minimize_log_of_a_constant_stays_inside():
    found = minimize_log(lambda x: 1.0, 1e-2, 1e2)
    assert 1e-2 <= found.at <= 1e2 * (1 + 1e-12)
    assert found.score == 1.0


@given(st.floats(-2, 2), st.floats(-1.5, 1.5), st.sampled_from([1e-4, 1e-6, 1e-8]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_walk_settles_in_its_valley_within_the_tolerance(centre, start, tolerance, skewed):
    def score(u):
        out = u - centre
        return math.cosh(out) - 1 + (0.2 * (math.exp(out) - out - 1) if skewed else 0.0)

    walk = Walk(-4, 4, evaluations=40, tolerance=tolerance)
    points, settled = refine(score, [Point(start, score(start))], walk)
    assert settled
    assert best_of(points).score <= 50 * tolerance
    assert all(-4 <= point.at <= 4 for point in points)


@given(st.floats(-2, 2), st.integers(0, 6))
@settings(max_examples=40, deadline=None)
def test_a_walk_keeps_to_its_evaluations_and_never_loses_its_start(start, evaluations):
    asked = []

    def score(u):
        asked.append(u)
        return math.sin(7 * u) + u**2

    first = Point(start, math.sin(7 * start) + start**2)
    walk = Walk(-3, 3, evaluations=evaluations, tolerance=1e-9)
    points, _ = refine(score, [first], walk)
    assert len(asked) <= evaluations
    assert best_of(points).score <= first.score
    assert len(points) == len(asked) + 1


def test_a_walk_from_the_edge_stays_inside():
    walk = Walk(0.0, 1.0, evaluations=30, tolerance=1e-8)
    points, _ = refine(lambda u: -u, [Point(0.0, 0.0)], walk)
    assert best_of(points).at == pytest.approx(1.0, abs=1e-3)
    assert all(0 <= point.at <= 1 for point in points)


def test_a_walk_helped_by_a_shape_needs_few_steps():
    def truth(u):
        return math.cosh(u - 0.2)

    seen = [Point(u, truth(u) + 0.01 * u) for u in np.linspace(-1, 1, 9)]  # tilted by a sample
    walk = Walk(-4, 4, evaluations=6, tolerance=1e-8, shape=fitted_shape(seen))
    points, settled = refine(truth, [Point(0.4, truth(0.4))], walk)
    assert settled
    assert best_of(points).at == pytest.approx(0.2, abs=5e-3)


def test_fitted_shape_follows_its_points_and_does_not_fall_outside():
    points = [Point(u, (u - 1) ** 2) for u in np.linspace(0, 2, 7)]
    shape = fitted_shape(points)
    inside = np.linspace(0, 2, 21)
    assert shape(inside) == pytest.approx((inside - 1) ** 2, abs=1e-9)
    assert shape(np.array([4.0]))[0] == pytest.approx(9.0, abs=1e-6)
    capped = fitted_shape([Point(u, -(u**2)) for u in (-1.0, 0.0, 1.0)])
    assert capped(np.array([3.0]))[0] == pytest.approx(-5.0, abs=1e-6)  # a line, no parabola down


def test_best_of_prefers_the_smaller_scalar_among_equals():
    points = [Point(2.0, 1.0), Point(1.0, 1.0), Point(0.0, 3.0)]
    assert best_of(points) == Point(1.0, 1.0)


def test_model_minimum_of_a_parabola_is_exact():
    points = [Point(u, (u - 0.3) ** 2) for u in (-0.5, 0.1, 0.9)]
    found = model_minimum(points, -1, 1, no_shape)
    assert found.at == pytest.approx(0.3, abs=1e-3)
    assert found.score == pytest.approx(0.0, abs=1e-6)


def test_vertex_lies_between_the_neighbours():
    points = [Point(u, (u - 0.4) ** 2) for u in (-1.0, 0.0, 1.0, 2.0)]
    assert vertex(points) == pytest.approx(0.4, abs=0.02)
    rising = [Point(u, u) for u in (0.0, 1.0, 2.0)]
    assert vertex(rising) == 0.0
    assert vertex([Point(1.5, 0.0)]) == 1.5
