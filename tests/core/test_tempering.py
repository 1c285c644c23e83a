"""Newton for temperatures, against scipy, numerical derivatives and cells fitted one by one."""

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
from featcal.core.loss import brier, measure
from featcal.core.rows import row_curves, row_nll
from featcal.core.scalar import LOGIT_SCALE, Shrinkage, temper, temper_cells


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


# --- rows -------------------------------------------------------------------------------------


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


def test_row_curves_take_an_inverse_for_each_row():
    logits, labels = drawn(n=7)
    each = torch.linspace(0.1, 2, 7, dtype=torch.float64)
    together = row_curves(logits, labels, each)
    for row in range(7):
        alone = row_curves(logits[row : row + 1], labels[row : row + 1], float(each[row]))
        torch.testing.assert_close(together[:, row], alone[:, 0])


def test_row_curves_of_huge_logits_are_finite():
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, 1e4, 5.0]])
    found = row_curves(logits, torch.tensor([1, 1]), 1.0)
    assert torch.isfinite(found).all()
    assert found[0].tolist() == [2e4, 0.0]
    assert (found[2] >= 0).all()


def test_row_nll_has_the_gradient_of_the_full_formula():
    logits, labels = drawn(n=30)
    b = torch.rand(30, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(row_nll(logits, labels, b).sum(), b)
    full = F.cross_entropy(logits * b[:, None], labels, reduction="sum")
    (exact,) = torch.autograd.grad(full, b)
    torch.testing.assert_close(found, exact)
    torch.testing.assert_close(row_nll(logits, labels, b).sum(), full)


@given(st.integers(0, 200), st.floats(0.01, 20))
@settings(max_examples=40, deadline=None)
def test_the_nll_of_a_row_is_convex_in_b(seed, inverse):
    logits, labels = drawn(n=20, seed=seed)
    assert (row_curves(logits, labels, inverse)[2] >= -1e-9).all()


# --- one temperature --------------------------------------------------------------------------


@pytest.mark.parametrize("heat", [0.3, 1.0, 6.0])
def test_temper_agrees_with_scipy(heat):
    logits, labels = drawn(heat=heat)
    found = temper([Batch(logits, labels)])
    assert found.inverse[0] == pytest.approx(scipy_inverse(logits, labels), rel=1e-6)
    assert found.loss == pytest.approx(nll64(logits, labels, found.inverse[0]) / 400, abs=1e-12)
    assert found.converged
    assert found.steps <= 12
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


def test_temper_of_equal_logits_is_none():
    assert temper([Batch(torch.full((5, 3), 2.0), torch.zeros(5, dtype=torch.long))]) is None
    assert temper([Batch(torch.zeros(5, 1), torch.arange(5) % 2)]) is None  # a sigmoid's z = 0


def test_temper_of_one_logit_is_that_of_the_two_it_stands_for():
    draw = torch.Generator().manual_seed(0)
    z = 3 * torch.randn(500, generator=draw)
    labels = torch.rand(500, generator=draw) < (z / 2).sigmoid()
    single = temper([Batch(z, labels)])
    pair = temper([Batch(torch.stack([torch.zeros(500), z], 1), labels.long())])
    assert single.inverse == pair.inverse
    assert single.loss == pair.loss


@pytest.mark.parametrize(("labels", "side"), [("best", 1), ("worst", -1)])
def test_temper_says_at_which_cap_it_stopped(labels, side):
    logits, _ = drawn()
    labels = logits.argmax(1) if labels == "best" else logits.argmin(1)
    found = temper([Batch(logits, labels)])
    assert found.capped.tolist() == [side]
    assert not found.converged


def test_empty_batches_do_no_harm():
    logits, labels = drawn()
    whole = temper([Batch(logits, labels)])
    cuts = ((0, 0), (0, 9), (9, 400))
    cut = temper([Batch(logits[a:b], labels[a:b]) for a, b in cuts])
    assert cut.inverse == pytest.approx(whole.inverse, rel=1e-9)


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


def test_a_scale_that_is_known_saves_a_pass():
    logits, labels = drawn()
    data = [Batch(logits, labels)]
    scale = measure(data, LOGIT_SCALE)[0]
    gaps = logits.amax(1) - logits.mean(1)
    assert scale == pytest.approx(math.exp(float(gaps.log().mean())))
    assert temper(data, scale=scale).inverse == pytest.approx(temper(data).inverse)
    assert temper(data, scale=0.0) is None


# --- one a cell -------------------------------------------------------------------------------


def by_argmax(batch):
    return batch.logits.argmax(1)


def test_cells_are_what_each_would_be_alone():
    logits, labels = drawn(n=1500)
    found = temper_cells([Batch(logits, labels)], by_argmax, 4)
    for cell in range(4):
        rows = logits.argmax(1) == cell
        alone = scipy_inverse(logits[rows], labels[rows])
        assert found.inverse[cell] == pytest.approx(alone, rel=1e-6)
    assert found.converged
    total = nll64(logits, labels, torch.tensor(found.inverse)[logits.argmax(1)][:, None])
    assert found.loss == pytest.approx(total / 1500, abs=1e-10)


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


def test_a_tight_spread_is_the_common_temperature_and_a_wide_one_is_none():
    logits, labels = drawn(n=1500)
    data = [Batch(logits, labels)]
    tight = temper_cells(data, by_argmax, 4, Shrinkage(0.5, 1e-5))
    assert tight.inverse == pytest.approx(0.5, rel=1e-6)
    wide = temper_cells(data, by_argmax, 4, Shrinkage(0.5, 1e5))
    free = temper_cells(data, by_argmax, 4)
    assert wide.inverse == pytest.approx(free.inverse, rel=1e-6)


def test_shrinkage_holds_where_a_cell_alone_would_run_to_its_cap():
    logits, labels = drawn(n=600)
    labels[logits.argmax(1) == 2] = 2  # all right: alone, b would grow without end
    data = [Batch(logits, labels)]
    assert temper_cells(data, by_argmax, 4).capped.tolist() == [0, 0, 1, 0]
    held = temper_cells(data, by_argmax, 4, Shrinkage(0.5, 0.3))
    assert held.capped.tolist() == [0, 0, 0, 0]
    assert 0.5 < held.inverse[2] < 2


def test_cells_do_not_depend_on_the_cut_into_batches():
    logits, labels = drawn(n=500)
    whole = temper_cells([Batch(logits, labels)], by_argmax, 4)
    parts = [Batch(logits[a:b], labels[a:b]) for a, b in ((0, 3), (3, 3), (3, 500))]
    cut = temper_cells(parts, by_argmax, 4)
    assert cut.inverse == pytest.approx(whole.inverse, rel=1e-9)


def test_cells_of_equal_logits_are_none():
    flat = Batch(torch.zeros(6, 3), torch.arange(6) % 3)
    assert temper_cells([flat], by_argmax, 3) is None


@given(st.floats(0.05, 20), st.floats(0.01, 5), st.floats(0.01, 30))
@settings(max_examples=50, deadline=None)
def test_the_penalty_is_its_own_taylor_series(centre, spread, at):
    shrink = Shrinkage(centre, spread)
    value, slope, bend = shrink.at(np.array([at]))[:, 0]
    other = at + 0.1
    moved = shrink.at(np.array([other]))[0, 0]
    expected = (other / centre - 1) ** 2 / (2 * spread**2)
    assert moved == pytest.approx(expected, rel=1e-9)
    assert moved == pytest.approx(value + slope * 0.1 + bend * 0.01 / 2, rel=1e-6, abs=1e-9)
