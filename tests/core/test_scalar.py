"""Searches for one number, against scipy, closed forms and cells fitted one by one."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from featcal import Batch
from featcal.core import scalar as tempering
from featcal.core.batch import Through, stored_logits
from featcal.core.fit import brier, nll
from featcal.core.scalar import (
    Point,
    Shrinkage,
    Walk,
    best_of,
    caps_of,
    fitted_shape,
    flat,
    minimize_log,
    model_minimum,
    next_point,
    refine,
    row_curves,
    row_nll,
    temper,
    temper_cells,
    vertex,
)


def parabola(centre, scale=1.0):
    return lambda u: scale * (u - centre) ** 2


@given(st.floats(-3, 3), st.floats(0.01, 100))
@settings(max_examples=25, deadline=None)
def test_minimize_log_finds_a_parabola(centre, scale):
    found = minimize_log(lambda x: parabola(centre, scale)(math.log(x)), 1e-3, 1e3)
    assert found.converged
    assert math.log(found.at) == pytest.approx(centre, abs=1e-3)
    assert found.score <= 1e-5 * scale


@given(st.floats(-2, 2), st.floats(-1.5, 1.5), st.sampled_from([1e-4, 1e-6, 1e-8]), st.booleans())
@settings(max_examples=25, deadline=None)
def test_a_walk_settles_in_its_valley_within_the_tolerance(centre, start, tolerance, skewed):
    def score(u):
        out = u - centre
        return math.cosh(out) - 1 + (0.2 * (math.exp(out) - out - 1) if skewed else 0.0)

    walk = Walk(-4, 4, evaluations=40, tolerance=tolerance)
    points, settled = refine(score, [Point(start, score(start))], walk)
    assert settled
    assert best_of(points).score <= 50 * tolerance
    assert all(-4 <= point.at <= 4 for point in points)


WALK = Walk(-4, 4, evaluations=40, tolerance=1e-8)


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(0, 1)], 0.15),  # up, where nothing is known
        ([(4, 1)], 3.85),  # unless there is a wall
        ([(0, 1), (0.15, 0.9)], 0.39),  # on, by steps that grow by 1.6
        ([(0, 1), (0.15, 1.1)], -0.24),  # or back
        ([(0, 1), (2, 0.5)], 2.64),  # but not without bound
        ([(3.9, 1), (3.95, 0.5)], 4),
        ([(3.9, 1), (4, 0.5)], 3.84),
        ([(-4, 0.4), (-3.9, 0.5)], None),  # the wall is lowest
        ([(u, (u - 0.3) ** 2) for u in (0, 0.2, 0.5)], 0.3),  # three points make a parabola
        ([(u, u) for u in (0, 0.2, 0.5)], -0.25),  # which is trusted so far and no further
        ([(u, -u) for u in (0, 0.2, 0.5)], 0.75),
        ([(u, u**2) for u in (-0.2, 0, 0.2)], None),  # nothing to gain
        ([(u, u**2) for u in (-0.1, 0, 0.4)], 0.4 / 3),  # but a wide gap deserves a look
        ([(u, u**2) for u in (-0.3, 0, 0.1)], -0.1),
        ([(u, 1e3 * (u - 1e-4) ** 2) for u in (-0.1, 0, 0.1)], 4e-4),  # never too near
        ([(u, 1e3 * (u + 1e-4) ** 2) for u in (-0.1, 0, 0.1)], -4e-4),
        ([(u, 1e3 * (u - 4.5e-4) ** 2) for u in (-0.1, 0, 1e-3)], 4.5e-4),
        ([(u, 1e3 * (u - 3.5e-4) ** 2) for u in (-0.1, 0, 7.5e-4)], None),  # nor between such
        ([*((u, (u - 0.3) ** 2) for u in (0, 0.2, 0.5, 0.7)), (3, 50)], 0.3),  # the nearest four
    ],
)
def test_where_a_walk_looks_next(points, expected):
    found = next_point([Point(*point) for point in points], WALK)
    assert found == (expected if expected is None else pytest.approx(expected, abs=1.1e-4))


@pytest.mark.parametrize("start", [-1.5, 0.0, 1.2])
@pytest.mark.parametrize("centre", np.linspace(-2, 2, 9))
def test_a_walk_is_short_and_repeats_nothing(centre, start):
    seen = [start]

    def score(u):
        if len(seen) > 2:  # no further than past the last known point, and never to a known one
            assert min(seen) - 0.3 <= u <= max(seen) + 0.3
        assert min(abs(u - other) for other in seen) >= 3.9e-4
        seen.append(u)
        return math.cosh(u - centre) - 1

    points, settled = refine(score, [Point(start, math.cosh(start - centre) - 1)], WALK)
    assert settled
    assert [point.at for point in points] == sorted(seen)
    assert len(seen) <= 7 + abs(start - centre) / 0.25  # a quarter at a time, and seven to settle
    assert best_of(points).score <= 5e-8


def test_a_walk_that_may_look_no_more_says_whether_it_had_settled():
    def score(u):
        return (u - 3) ** 2

    one = [Point(0.0, 9.0)]
    points, settled = refine(score, one, Walk(-4, 4, evaluations=3, tolerance=1e-8))
    assert (len(points), settled) == (4, False)
    near = [Point(u, score(u)) for u in (2.9, 3.0, 3.1)]
    assert refine(score, near, Walk(-4, 4, evaluations=0, tolerance=1e-8)) == (near, True)


def test_a_known_shape_is_followed_from_two_points_on():
    def score(u):
        return math.cosh(u - 1.1)

    shaped = Walk(-4, 4, evaluations=9, tolerance=1e-8, shape=lambda u: np.cosh(u - 1.1))
    points, settled = refine(score, [Point(1.0, score(1.0))], shaped)
    assert settled
    assert points[1].at == pytest.approx(1.1, abs=0.06)
    assert len(points) <= 4
    assert best_of(points).score <= 1 + 5e-8


def test_the_lowest_score_wins_and_the_smaller_of_equals():
    assert best_of([Point(2, 1.0), Point(0, 1.0), Point(1, 0.5)]) == Point(1, 0.5)
    assert best_of([Point(2, 1.0), Point(0, 1.0), Point(1, 1.0)]) == Point(0, 1.0)


def test_the_model_is_exact_for_a_polynomial_through_its_points():
    def cubic(u):
        return u**3 - 3 * u + 2  # lowest at 1, and at the low end below -2

    points = [Point(u, cubic(u)) for u in (-0.5, 0.3, 0.8, 2.0)]
    found = model_minimum(points, -1.0, 3.0, flat)
    assert (found.at, found.score) == pytest.approx((1.0, 0.0), abs=2e-3)
    edge = model_minimum(points, -2.5, 3.0, flat)
    assert (edge.at, edge.score) == pytest.approx((-2.5, cubic(-2.5)), abs=1e-9)
    shaped = model_minimum(points[:2], -1.0, 3.0, cubic)  # the shape leaves nothing over
    assert (shaped.at, shaped.score) == pytest.approx((1.0, 0.0), abs=2e-3)


def test_a_scan_ends_at_an_edge_where_the_score_falls_all_the_way():
    for power, end in ((1, 1e-3), (-1, 1e3)):
        found = minimize_log(lambda x, p=power: x**p, 1e-3, 1e3)
        assert found.at == pytest.approx(end)
        assert found.score == pytest.approx(1e-3)
        assert not found.converged
    seen = []
    found = minimize_log(lambda x: seen.append(x) or math.log(x) ** 2, 0.1, 10, points=5)
    assert found.steps == len(seen) < 20
    np.testing.assert_allclose(seen[:5], np.geomspace(0.1, 10, 5))
    minimize_log(lambda x: seen.append(x) or math.log(x) ** 2, 0.1, 10)
    assert len(seen) - found.steps >= 41


@pytest.mark.parametrize("end", [900.0, 1 / 900])
def test_a_minimum_next_to_an_edge_is_inside(end):
    found = minimize_log(lambda x: parabola(math.log(end))(math.log(x)), 1e-3, 1e3)
    assert found.at == pytest.approx(end, rel=1e-4)
    assert found.converged


def test_of_two_valleys_the_scan_takes_the_deeper():
    def score(x):
        u = math.log(x)
        return min((u + 2) ** 2, (u - 2) ** 2 - 0.1)

    assert math.log(minimize_log(score, 1e-2, 1e2).at) == pytest.approx(2, abs=1e-3)


def test_fitted_shape_follows_its_points_and_does_not_fall_outside():
    points = [Point(u, (u - 1) ** 2) for u in np.linspace(0, 2, 7)]
    shape = fitted_shape(points)
    inside = np.linspace(0, 2, 21)
    assert shape(inside) == pytest.approx((inside - 1) ** 2, abs=1e-9)
    assert shape(np.array([4.0]))[0] == pytest.approx(9.0, abs=1e-6)
    cubic = fitted_shape([Point(u, u**3) for u in np.linspace(0, 2, 7)])
    assert cubic(inside) == pytest.approx(inside**3, abs=1e-9)
    out = cubic(np.array([-1.0, 3.0]))  # tangent and curvature at 0 and at 2
    assert out == pytest.approx([0.0, 8 + 12 + 12 / 2], abs=1e-6)
    line = fitted_shape([Point(0.0, 1.0), Point(1.0, 3.0)])
    assert line(np.array([-1.0, 0.5, 2.0])) == pytest.approx([-1.0, 2.0, 5.0])
    capped = fitted_shape([Point(u, -(u**2)) for u in (-1.0, 0.0, 1.0)])
    assert capped(np.array([3.0]))[0] == pytest.approx(-5.0, abs=1e-6)  # a line, no parabola down


def test_vertex_lies_between_the_neighbours():
    points = [Point(u, (u - 0.4) ** 2) for u in (-1.0, 0.0, 1.0, 2.0)]
    assert vertex(points) == pytest.approx(0.4, abs=0.02)
    near = [Point(u, (u - 0.26) ** 2) for u in (-3.0, -0.5, 0.0, 0.6, 5.0)]
    assert vertex(near) == pytest.approx(0.26, abs=0.006)
    steep = [Point(-1.0, 9.0), Point(0.0, 0.0), Point(1.0, 0.001), Point(2.0, 9.0)]
    assert vertex(steep) == pytest.approx(0.5, abs=0.01)  # no further than half way to a neighbour
    assert vertex([Point(-p.at, p.score) for p in steep]) == pytest.approx(-0.5, abs=0.01)
    rising = [Point(u, u) for u in (0.0, 1.0, 2.0)]
    assert vertex(rising) == 0.0
    assert vertex([Point(1.5, 0.0)]) == 1.5


def drawn(n=400, k=4, *, scale=3.0, heat=2.0, seed=0):
    draw = np.random.default_rng(seed)
    logits = draw.normal(size=(n, k)) * scale
    labels = (logits / heat + draw.gumbel(size=logits.shape)).argmax(1)
    return torch.tensor(logits), torch.tensor(labels)


def nll64(logits, labels, inverse):
    return float(F.cross_entropy(logits.double() * inverse, labels, reduction="sum"))


def scipy_inverse(logits, labels, penalty=lambda b: 0.0):
    found = minimize_scalar(
        lambda u: nll64(logits, labels, math.exp(u)) + penalty(math.exp(u)),
        bounds=(-6, 6),
        method="bounded",
        options={"xatol": 1e-10},
    )
    return math.exp(found.x)


@pytest.mark.parametrize("inverse", [0.2, 1.0, 3.0])
def test_row_curves_are_value_slope_and_curvature(inverse):
    logits, labels = drawn(n=50)
    value, slope, bend = row_curves(logits, labels, inverse)
    step = 1e-4
    at = [
        F.cross_entropy(logits * (inverse + side * step), labels, reduction="none")
        for side in (-1, 0, 1)
    ]
    torch.testing.assert_close(value, at[1])
    torch.testing.assert_close(slope, (at[2] - at[0]) / (2 * step), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(bend, (at[2] - 2 * at[1] + at[0]) / step**2, rtol=1e-3, atol=1e-5)


def test_row_nll_has_the_gradient_of_the_full_formula():
    logits, labels = drawn(n=30)
    b = torch.rand(30, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(row_nll(logits, labels, b).sum(), b)
    full = F.cross_entropy(logits * b[:, None], labels, reduction="sum")
    (exact,) = torch.autograd.grad(full, b)
    torch.testing.assert_close(found, exact)
    torch.testing.assert_close(row_nll(logits, labels, b).sum(), full)


def test_caps_lie_at_a_thousand_times_the_size_of_the_logits_and_at_a_thousandth():
    logits, labels = drawn(n=60)
    logits[5] = 2.0  # a row of equal logits has no size
    tops = (logits.amax(1) - logits.mean(1)).numpy()
    size = np.exp(np.log(tops[tops > 0]).mean())
    for parts in ([60], [20, 40]):
        batches = map(Batch, logits.split(parts), labels.split(parts))
        assert caps_of(list(batches)) == pytest.approx((1e-3 / size, 1e3 / size))


@pytest.mark.parametrize("masked", [-1e4, -1e9])
def test_masked_classes_change_no_temperature(masked):
    logits, labels = drawn(n=400, k=5)
    labels = labels.clamp(min=1)
    bare = temper([Batch(logits[:, 1:], labels - 1)])
    logits[:, 0] = masked
    assert temper([Batch(logits, labels)]).temperature == pytest.approx(bare.temperature, rel=1e-6)
    only = torch.full((400, 5), masked).double()  # and rows of a single class have no say
    only[:, 1] = 0.0
    both = Batch(torch.cat([logits, only]), torch.cat([labels, torch.ones(400).long()]))
    assert temper([both]).temperature == pytest.approx(bare.temperature, rel=1e-6)


def test_the_pull_has_its_own_slope_and_curvature():
    b, step = np.array([0.2, 0.5, 1.3]), 1e-4
    low, here, high = (Shrinkage(0.5, 0.3).at(b + side * step) for side in (-1, 0, 1))
    np.testing.assert_allclose(here[0], (b / 0.5 - 1) ** 2 / (2 * 0.3**2))
    np.testing.assert_allclose(here[1], (high[0] - low[0]) / (2 * step), atol=1e-6)
    np.testing.assert_allclose(here[2], (high[1] - low[1]) / (2 * step), rtol=1e-6)


@pytest.mark.parametrize(("heat", "most"), [(0.3, 9), (1.0, 5), (6.0, 9), (40.0, 13)])
def test_temper_agrees_with_scipy_within_few_passes(heat, most):
    logits, labels = drawn(heat=heat)
    found = temper([Batch(logits, labels)])
    assert found.inverse[0] == pytest.approx(scipy_inverse(logits, labels), rel=1e-6)
    assert found.loss == pytest.approx(nll64(logits, labels, found.inverse[0]) / 400, abs=1e-12)
    assert found.converged
    assert found.steps <= most
    assert found.temperature == 1 / found.inverse[0]


def test_temper_by_another_loss_scans_and_walks():
    logits, labels = drawn(n=900, heat=2.5)

    def score(u):
        p = (logits * math.exp(u)).softmax(1)
        return float((p - F.one_hot(labels, 4)).square().sum(1).mean())

    exact = minimize_scalar(score, bounds=(-4, 4), method="bounded", options={"xatol": 1e-9})
    found = temper([Batch(logits, labels)], brier)
    assert math.log(found.inverse[0]) == pytest.approx(exact.x, abs=1e-4)
    assert found.loss == pytest.approx(exact.fun, abs=1e-9)


@pytest.mark.parametrize(("labels", "side"), [("best", 1), ("worst", -1)])
def test_temper_says_at_which_cap_it_stopped(labels, side):
    logits, _ = drawn()
    labels = logits.argmax(1) if labels == "best" else logits.argmin(1)
    found = temper([Batch(logits, labels)])
    assert found.capped.tolist() == [side]
    assert not found.converged


def test_rows_that_are_right_and_sure_from_the_start_end_at_the_cap_too():
    data = [Batch(30 * torch.eye(4).double().repeat(5, 1), torch.arange(4).repeat(5))]
    for found in (temper(data), temper_cells(data, by_argmax, 4)):
        assert set(found.capped) == {1}
        np.testing.assert_allclose(found.inverse, 1000 / 22.5)  # the top above the mean


@pytest.mark.parametrize("unit", [1e-3, 1e3])
@pytest.mark.parametrize("start", [0.3, 0.5, 0.9])
def test_the_unit_of_the_logits_makes_no_search_longer_or_shorter(unit, start):
    logits, labels = drawn()
    one, other = (
        temper([Batch(logits * by, labels)], start=start / by, enough=1e-4) for by in (1, unit)
    )
    assert other.steps == one.steps
    assert other.inverse[0] * unit == pytest.approx(one.inverse[0], rel=1e-9)


@pytest.mark.parametrize("loss", [nll, brier], ids=lambda loss: loss.name)
def test_a_search_ends_at_its_caps(loss, monkeypatch):
    data = [Batch(*drawn())]
    # The best is near one half; the narrower caps end two thirds of the way, and half as far again.
    for caps, side in (
        *(((0.33, 330.0), 0), ((7.7e-7, 0.77), 0)),
        *(((1e-7, 0.1), 1), ((10.0, 1e7), -1)),
    ):
        monkeypatch.setattr(tempering, "caps_of", lambda data, caps=caps: caps)
        found = temper(data, loss)
        assert found.capped.tolist() == [side]
        if side:
            assert found.inverse[0] == pytest.approx(caps[side == 1])
            assert not found.converged
            assert loss is brier or found.steps <= 3  # the cap is seen and ends it


@pytest.mark.parametrize(("name", "value"), [("SURE", 10.0), ("PROBE", 1), ("PROBE", 2)])
@pytest.mark.parametrize("heat", [0.3, 2.0, 6.0])
def test_a_look_at_the_cap_changes_no_minimum(monkeypatch, name, value, heat):
    """Rows that are nearly all right and sure make the search look, as these names say when."""
    logits, labels = drawn(heat=heat)
    expected = scipy_inverse(logits, labels)
    monkeypatch.setattr(tempering, name, value)
    found = temper([Batch(logits, labels)])
    assert found.inverse[0] == pytest.approx(expected, rel=1e-6)
    assert found.loss == pytest.approx(nll64(logits, labels, expected) / 400, abs=1e-10)
    assert found.converged
    assert found.steps <= 25


def test_a_start_from_every_eighth_row_ends_at_the_same_minimum(monkeypatch):
    logits, labels = drawn(n=2000, heat=3.0)
    view = Through([Batch(logits, labels)], stored_logits)
    cold = temper(view)
    list(view)  # the logits now lie in memory
    assert view.kept
    monkeypatch.setattr(tempering, "MANY", 1)
    warm = temper(view)
    assert warm.inverse == pytest.approx(cold.inverse, rel=1e-9)
    assert warm.steps < cold.steps
    # A sample that has no minimum of its own says nothing about where to start.
    labels[::8] = logits[::8].argmax(1)
    lucky = temper(Through([Batch(logits, labels)], stored_logits))
    assert lucky.inverse[0] == pytest.approx(scipy_inverse(logits, labels), rel=1e-6)
    view = Through([Batch(logits, labels)], stored_logits)
    list(view)
    assert temper(view).inverse == pytest.approx(lucky.inverse, rel=1e-9)


def by_argmax(batch):
    return batch.logits.argmax(1)


@pytest.mark.parametrize("spread", [0.03, 0.3, 3.0])
def test_shrunk_cells_minimise_the_penalised_loss(spread):
    logits, labels = drawn(n=300)
    shrink = Shrinkage(0.6, spread)
    found = temper_cells([Batch(logits, labels)], by_argmax, 4, shrink)
    for cell in range(4):
        rows = logits.argmax(1) == cell
        alone = scipy_inverse(
            logits[rows], labels[rows], lambda b: (b / 0.6 - 1) ** 2 / (2 * spread**2)
        )
        assert found.inverse[cell] == pytest.approx(alone, rel=1e-6)
    own = nll64(logits, labels, torch.tensor(found.inverse)[logits.argmax(1)][:, None]) / 300
    assert found.loss == pytest.approx(own, abs=1e-10)  # the penalty is not part of it


def test_a_cell_without_rows_stays_where_it_starts():
    logits, labels = drawn()

    def halves(batch):
        return (batch.logits[:, 0] > 0).long() * 2

    free = temper_cells([Batch(logits, labels)], halves, 5)
    assert free.inverse[[1, 3, 4]].tolist() == [1, 1, 1]
    shrunk = temper_cells([Batch(logits, labels)], halves, 5, Shrinkage(0.4, 0.2))
    assert shrunk.inverse[[1, 3, 4]] == pytest.approx(0.4)
    assert shrunk.converged
    assert max(free.steps, shrunk.steps) <= 12


def test_equal_logits_have_no_temperature_and_long_data_is_cut_into_blocks(monkeypatch):
    same = [Batch(torch.full((5, 3), 2.0), torch.zeros(5, dtype=torch.long))]
    assert temper(same) is None
    assert temper_cells(same, by_argmax, 3) is None
    logits, labels = drawn(n=50)
    each = torch.linspace(0.1, 2, 50, dtype=torch.float64)
    whole = row_curves(logits, labels, each)
    monkeypatch.setattr(tempering, "BLOCK", 40)
    torch.testing.assert_close(row_curves(logits, labels, each), whole)
    torch.testing.assert_close(
        row_curves(logits, labels, 0.5), row_curves(logits, labels, torch.full((50,), 0.5))
    )
