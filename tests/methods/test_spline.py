"""Spline calibration: scipy's natural splines, a loop for the published form, and thinning."""

import numpy as np
import pytest
from method_cases import drawn, floored, mapped

from featcal import Batch
from featcal.methods import Spline
from featcal.methods.score_maps import fitted_shifts, natural_spline, thinned
from featcal.methods.score_tables import top_levels

interpolate = pytest.importorskip("scipy.interpolate")


def top(logits):
    return logits.double().softmax(1).amax(1).numpy()


def scipy_basis(t, knots):
    """The natural spline that is 1 at one knot and 0 at the others, for each knot."""
    at = np.linspace(0, 1, knots)
    ends = "natural" if knots > 2 else "not-a-knot"  # two knots: a line either way
    curves = [interpolate.CubicSpline(at, unit, bc_type=ends) for unit in np.eye(knots)]
    return np.stack([c(t) for c in curves], 1), np.stack([c(t, 1) for c in curves], 1)


def published_shifts(scores, right, knots=6):
    """h' at each sorted score, with n steps from 0 to 1, by scipy and the normal equations."""
    t = np.linspace(0, 1, len(scores))
    value, slope = scipy_basis(t, knots)
    h = np.cumsum(right - scores) / len(scores)
    return slope @ np.linalg.solve(value.T @ value, value.T @ h)


def published_map(scores, values, new):
    """The published interpolation, weights swapped, by a loop."""
    found = []
    for x in new:
        if x >= scores[-1]:
            found.append(values[-1])
        elif x <= scores[0]:
            found.append(values[0])
        else:
            j = next(j for j, s in enumerate(scores) if s >= x)
            to_left, to_right = x - scores[j - 1], scores[j] - x
            found.append((to_right * values[j] + to_left * values[j - 1]) / (to_left + to_right))
    return np.clip(found, 0, 1)


@pytest.mark.parametrize("knots", [2, 3, 4, 6, 11])
def test_scipy_has_the_same_natural_spline(knots):
    t = np.linspace(0, 1, 201)
    value, slope = natural_spline(t, knots)
    theirs = scipy_basis(t, knots)
    np.testing.assert_allclose(value, theirs[0], atol=1e-12)
    np.testing.assert_allclose(slope, theirs[1], atol=1e-10)


def test_the_default_is_a_least_squares_spline_through_the_origin():
    logits, labels = drawn()
    order = np.argsort(top(logits))
    scores, right = top(logits)[order], (logits.argmax(1) == labels).numpy()[order]
    n = len(scores)
    h = np.concatenate([[0], np.cumsum(right - scores) / n])
    value, _ = scipy_basis(np.arange(n + 1) / n, 6)
    _, slope = scipy_basis((np.arange(n) + 0.5) / n, 6)
    expected = slope @ np.linalg.solve(value.T @ value, value.T @ h)
    found = fitted_shifts(top_levels([Batch(logits, labels)]), 6)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_between_confidences_the_shift_is_linear_and_beyond_them_constant():
    logits, labels = drawn()
    new, _ = drawn(n=400, seed=1, scale=4)
    levels = top_levels([Batch(logits, labels)])
    scores = 1 / (1 + np.exp(-levels.at))
    wanted = top(new) + np.interp(top(new), scores, fitted_shifts(levels, 6))
    bound = 1 / 602
    found = top(mapped(Spline().fit(Batch(logits, labels)), new))
    np.testing.assert_allclose(found, floored(new, wanted.clip(bound, 1 - bound)), atol=1e-5)


def test_the_published_form():
    logits, labels = drawn(n=300)
    new, _ = drawn(n=200, seed=1, scale=4)
    order = np.argsort(top(logits))
    scores, right = top(logits)[order], (logits.argmax(1) == labels).numpy()[order]
    values = scores + published_shifts(scores, right)
    expected = published_map(scores, values, top(new))
    calibrator = Spline(reference=True).fit(Batch(logits, labels))
    assert len(calibrator.nodes) == 300
    np.testing.assert_allclose(top(mapped(calibrator, new)), floored(new, expected), atol=2e-5)


@pytest.mark.parametrize("most", [8, 64])
def test_thinning_costs_less_than_its_bound(most):
    logits, labels = drawn(n=5000, heat=3.0)
    levels = top_levels([Batch(logits, labels)])
    shifts = fitted_shifts(levels, 6)
    scores = 1 / (1 + np.exp(-levels.at))
    kept = thinned(levels, most)
    assert len(kept) <= most
    assert (kept[0], kept[-1]) == (0, len(levels.at) - 1)
    short = np.interp(scores, scores[kept], shifts[kept])
    steepest = np.abs(np.gradient(shifts, levels.rows.cumsum() / levels.rows.sum())).max()
    assert np.abs(short - shifts).max() <= 1.01 * steepest / (most - 1)
