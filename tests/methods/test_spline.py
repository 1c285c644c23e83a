"""Spline calibration: scipy's natural splines, a loop for the published form, and thinning."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from method_cases import drawn, floored, mapped

from featcal import Batch, InputError, metrics
from featcal.methods import Spline
from featcal.methods.score_tables import Levels, top_levels
from featcal.methods.spline import MOST_NODES, fitted_shifts, natural_spline, thinned

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


# --- the spline -------------------------------------------------------------------------------


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


def test_a_constant_gap_is_found():
    # Every row says 0.75 or so and is right half of the time, evenly spread.
    n = 1000
    scores = np.linspace(0.749, 0.751, n)
    odds = torch.tensor(np.log(scores / (1 - scores)))
    levels = Levels.of(odds, torch.arange(n) % 2 == 0)
    shift = fitted_shifts(levels, 6)
    np.testing.assert_allclose(scores + shift, 0.5, atol=5e-3)


def test_rows_of_equal_confidence_count_with_their_mean():
    odds = torch.tensor([1.0] * 50 + [2.0] * 50)
    right = torch.tensor([True] * 25 + [False] * 25 + [True] * 50)
    one = fitted_shifts(Levels.of(odds, right), 6)
    other = fitted_shifts(Levels.of(odds.flip(0), right.flip(0)), 6)
    assert len(one) == 2
    assert np.array_equal(one, other)


def test_one_row_is_its_own_gap():
    levels = Levels.of(torch.tensor([np.log(4.0)]), torch.tensor([True]))
    np.testing.assert_allclose(fitted_shifts(levels, 6), [0.2], atol=1e-6)


# --- the map ----------------------------------------------------------------------------------


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


def test_the_swap_gives_a_score_its_neighbours_value():
    calibrator = Spline(reference=True).assign(
        nodes=torch.tensor([0.0, 1.0, 2.0]), shifts=torch.tensor([0.0, 0.1, -0.1])
    )
    values = torch.tensor([0.0, 1.0, 2.0]).sigmoid() + torch.tensor([0.0, 0.1, -0.1])
    at = torch.tensor([[1e-4, 0.0], [0.9999, 0.0], [1.0001, 0.0], [2.5, 0.0]])
    found = mapped(calibrator, at).softmax(1)[:, 0]
    expected = [values[1], values[0], values[2], values[2]]
    np.testing.assert_allclose(found, expected, atol=1e-3)


# --- thinning ---------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [8, 64, 1024])
def test_thinning_costs_less_than_its_bound(most):
    logits, labels = drawn(n=20_000, heat=3.0)
    levels = top_levels([Batch(logits, labels)])
    shifts = fitted_shifts(levels, 6)
    scores = 1 / (1 + np.exp(-levels.at))
    kept = thinned(levels, most)
    assert len(kept) <= most
    assert (kept[0], kept[-1]) == (0, len(levels.at) - 1)
    short = np.interp(scores, scores[kept], shifts[kept])
    steepest = np.abs(np.gradient(shifts, levels.rows.cumsum() / levels.rows.sum())).max()
    assert np.abs(short - shifts).max() <= 1.01 * steepest / (most - 1)


def test_no_more_nodes_are_kept_than_needed():
    logits, labels = drawn(n=5000)
    calibrator = Spline().fit(Batch(logits, labels))
    assert len(calibrator.nodes) == MOST_NODES
    assert len(Spline().fit(Batch(logits[:50], labels[:50])).nodes) == 50


@given(st.lists(st.integers(1, 30), min_size=1, max_size=50), st.integers(2, 40))
@settings(max_examples=50, deadline=None)
def test_thinning_keeps_first_and_last(rows, most):
    levels = Levels(np.arange(len(rows)) * 1.0, np.array(rows) * 1.0, np.zeros(len(rows)))
    kept = thinned(levels, most)
    assert len(kept) <= most
    assert (kept[0], kept[-1]) == (0, len(rows) - 1)
    assert (np.diff(kept) > 0).all()


# --- results, precision, errors ---------------------------------------------------------------


@pytest.mark.shared
@pytest.mark.parametrize("name", ["ce", "flsd53"])
def test_the_papers_logits_get_better(shared_file, name):
    with np.load(shared_file("anchors", f"resnet50-cifar10-{name}.npz")) as file:
        arrays = {key: torch.from_numpy(file[key]) for key in file.files}
    calibrator = Spline().fit(Batch(arrays["val_logits"], arrays["val_labels"]))
    labels = arrays["test_labels"]
    before, after = arrays["test_logits"], mapped(calibrator, arrays["test_logits"])
    assert torch.equal(before.argmax(1), after.argmax(1))
    for metric in (metrics.ece, metrics.nll, metrics.ks_error):
        assert metric(logits=after, labels=labels) < metric(logits=before, labels=labels)


def test_confidences_end_at_what_n_rows_can_tell():
    logits, _ = drawn(n=98)
    calibrator = Spline().fit(Batch(logits, logits.argmax(1)))
    assert top(mapped(calibrator, logits * 9)).max() == pytest.approx(0.99, abs=1e-6)


def test_half_precision_changes_little():
    logits, labels = drawn(n=3000)
    calibrator = Spline().fit(Batch(logits, labels))
    expected = mapped(calibrator, logits)
    found = mapped(calibrator.half(), logits)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"knots": 1}, "spline: knots is 1: give a whole number from 2 up"),
        ({"knots": 2.5}, "spline: knots is 2.5"),
        ({"knots": True}, "spline: knots is True"),
        ({"reference": 1}, "spline: reference is 1: give True or False"),
    ],
)
def test_arguments_are_refused_by_name(arguments, message):
    with pytest.raises(InputError, match=message):
        Spline(**arguments)


def test_the_published_form_alone_says_that_it_jumps():
    """Just below a node the swapped weights give the value of the node before, at it its own."""
    odds = torch.tensor([0.0, 1.0, 2.0])
    values = {"nodes": odds, "shifts": torch.zeros(3)}
    around = torch.tensor([[1.0 - 1e-4, 0.0], [1.0 + 1e-4, 0.0]])
    for reference in (False, True):
        spline = Spline(reference=reference).assign(**values)
        below, above = spline.map_logits(around).softmax(1)[:, 0]
        assert spline.jumps == (abs(float(below - above)) > 0.1) == reference


@pytest.mark.parametrize(
    "values",
    [
        {"shifts": torch.ones(3)},
        {"nodes": -torch.arange(2.0), "shifts": torch.ones(2)},
        {"bound": torch.tensor(2.0)},
    ],
)
def test_damaged_values_are_refused(values):
    with pytest.raises(InputError, match=r"spline: .* nodes must ascend"):
        Spline().assign(**values).check()
