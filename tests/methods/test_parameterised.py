"""Parameterised temperature scaling: its network, its rows, its honesty, and the dead reference."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from method_cases import drawn as even  # rows that one temperature suits
from method_cases import nll64, paper
from torch import nn

from featcal import Batch, InputError, Temperature, metrics
from featcal.core.fit import Loss, brier, ece, nll
from featcal.core.sample import fold_of
from featcal.core.scalar import row_curves
from featcal.methods import parameterised
from featcal.methods.parameterised import (
    FOLDS,
    PUBLISHED,
    REACH,
    ParameterisedTemperature,
    RowLoss,
    brier_curves,
    held_back,
    length,
    log_change,
    output,
    sharpened,
    top_gaps,
)


def drawn(n=800, k=6, *, seed=0, dtype=torch.float32):
    """Rows that are surer than they should be where the gap is wide: T grows with the gap."""
    draw = np.random.default_rng(seed)
    logits = draw.normal(size=(n, k)) * 3
    ordered = np.sort(logits, 1)
    heat = 0.6 + 0.5 * (ordered[:, -1] - ordered[:, -2])[:, None]
    labels = (logits / heat + draw.gumbel(size=logits.shape)).argmax(1)
    return torch.tensor(logits, dtype=dtype), torch.tensor(labels)


@pytest.fixture(scope="module")
def fitted():
    return ParameterisedTemperature().fit(Batch(*drawn()))


@pytest.mark.shared
def test_the_reference_dies_into_one_temperature(shared_file):
    """The figures of plain temperature scaling, to every digit of METHODS 0.2."""
    arrays, found = paper(shared_file), ParameterisedTemperature(reference=True)
    found.fit(Batch(arrays["val_logits"], arrays["val_labels"]))
    values = found.report.steps[0].values
    assert values["T_min"] == values["T_max"] == pytest.approx(2.4975, abs=5e-5)
    assert "the network died" in found.report.steps[0].message
    with torch.no_grad():
        test = {"logits": found.wrap()(arrays["test_logits"]), "labels": arrays["test_labels"]}
    assert round(100 * metrics.ece(**test), 3) == 1.373
    assert round(metrics.nll(**test), 4) == 0.2038


@given(st.integers(0, 100), st.floats(0.1, 100))
@settings(max_examples=20, deadline=None)
def test_t_is_above_0_and_within_reach_for_any_network(seed, size):
    generator = torch.Generator().manual_seed(seed)
    network = torch.randn(56, generator=generator) * size
    calibrator = ParameterisedTemperature().assign(
        temperature=2.0, mean=torch.zeros(9), spread=torch.ones(9), network=network
    )
    logits = torch.randn(20, 12, generator=generator) * 30
    rows = calibrator.row_temperatures(logits)
    assert (rows >= 0.1999).all()
    assert (rows <= 20.001).all()
    assert torch.isfinite(calibrator.wrap()(logits)).all()


@pytest.mark.parametrize("inverse", [0.1, 2.0])
def test_brier_curves_are_value_slope_and_curvature(inverse):
    logits, labels = drawn(n=40, dtype=torch.float64)

    def rows(b):
        return ((logits * b).softmax(1) - F.one_hot(labels, 6)).square().sum(1)

    step = 1e-4
    value, slope, bend = brier_curves(logits, labels, inverse)
    torch.testing.assert_close(value, rows(inverse))
    numeric = (rows(inverse + step) - rows(inverse - step)) / (2 * step)
    torch.testing.assert_close(slope, numeric, rtol=1e-5, atol=1e-6)
    second = (rows(inverse + step) - 2 * rows(inverse) + rows(inverse - step)) / step**2
    torch.testing.assert_close(bend, second, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("curves", [row_curves, brier_curves])
def test_the_table_reads_what_the_logits_give(curves):
    """Value, slope and curvature at any temperature within reach."""
    draw = np.random.default_rng(0)
    logits = torch.tensor(draw.normal(size=(400, 120)) * 4)
    labels = torch.tensor(draw.integers(0, 120, 400))
    batch, inputs = Batch(logits, labels), torch.zeros(400, 1)
    direct, table = (RowLoss(curves, 0.5, in_table) for in_table in (False, True))
    change = torch.tensor(draw.uniform(-REACH, REACH, 400), requires_grad=True)
    change.data[:3] = torch.tensor([-REACH, 0.0, REACH])
    found = []
    for rows in (direct, table):
        value = rows.at(rows.keep(batch, inputs), change)
        (slope,) = torch.autograd.grad(value.sum(), change, create_graph=True)
        (bend,) = torch.autograd.grad(slope.sum(), change)
        found.append([value.detach(), slope.detach(), bend])
    for exact, read, allowed in zip(*found, (1e-5, 2e-4, 2e-2), strict=True):
        scale = exact.abs().max()
        torch.testing.assert_close(read / scale, exact / scale, rtol=0, atol=allowed)


def test_a_network_pays_where_the_temperature_depends_on_the_gap(fitted):
    logits, labels = drawn()
    plain = Temperature().fit(Batch(logits, labels))
    step = fitted.report.steps[0]
    assert fitted.report.loss_after < plain.report.loss_after - 0.01
    assert step.converged
    assert step.details["cv"] < step.details["cv_temperature"]
    assert list(step.values) == ["temperature", "T_min", "T_max"]
    assert step.values["T_min"] < step.values["temperature"] < step.values["T_max"]
    assert step.values["temperature"] == pytest.approx(float(plain.temperature), rel=1e-5)
    other, truth = drawn(n=3000, seed=7)
    mine, theirs = (nll64(c.wrap()(other), truth) for c in (fitted, plain))
    assert mine < theirs - 0.005


def test_rows_that_one_temperature_suits_get_one():
    logits, labels = even()
    found, plain = ParameterisedTemperature().fit(Batch(logits, labels)), Temperature()
    plain.fit(Batch(logits, labels))
    step = found.report.steps[0]
    assert found.network.numel() == 0
    assert torch.equal(found.wrap()(logits), plain.wrap()(logits))
    assert "on rows left out the network is no better" in step.message
    assert step.details["cv"] >= step.details["cv_temperature"] - 1e-6
    assert step.values == {"temperature": pytest.approx(float(plain.temperature))}


def test_the_result_is_a_minimum_of_the_penalised_loss(fitted):
    """By an independent formula: the gradient vanishes, and every random step costs."""
    logits, labels = drawn()
    strength = fitted.report.steps[0].details["penalty"]
    sizes = [5, 5, 1]
    gaps = top_gaps(logits.double(), 10)
    mean, spread = gaps.mean(0), gaps.std(0, correction=0)
    inputs = ((gaps - mean) / spread).clamp(-8, 8)
    hold = held_back(sizes)

    def score(network):
        t = float(fitted.temperature) * log_change(network, inputs, sizes).exp()
        data = F.cross_entropy(logits.double() / t[:, None], labels)
        return data + strength / (2 * len(labels)) * (hold * network.square()).sum()

    torch.testing.assert_close(fitted.mean.double(), mean, rtol=1e-5, atol=1e-6)
    network = fitted.network.double().requires_grad_()
    value = score(network)
    (gradient,) = torch.autograd.grad(value, network)
    assert float(gradient.abs().max()) < 1e-6  # what float32 storage leaves
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        step = torch.randn(len(network), generator=generator, dtype=torch.float64) * 1e-2
        assert float(score(network.detach() + step)) > float(value.detach())


def test_left_out_costs_are_those_of_refits():
    """Temperature scaling judged by the folds, against scipy-free refits of plain temperature."""
    logits, labels = drawn(n=400)
    data = Batch(logits, labels)
    found = ParameterisedTemperature().fit(data)
    fold, total = fold_of(data, FOLDS), 0.0
    for number in range(FOLDS):
        plain = Temperature().fit(data.rows(fold != number))
        left = data.rows(fold == number)
        total += nll64(plain.wrap()(left.logits), left.labels) * len(left)
    assert found.report.steps[0].details["cv_temperature"] == pytest.approx(total / 400, abs=1e-5)


def test_many_classes_are_read_from_a_table_and_brier_is_lowered(monkeypatch):
    logits, labels = drawn(n=500)
    direct = ParameterisedTemperature(restarts=1).fit(Batch(logits, labels), loss=brier)
    assert direct.network.numel()
    monkeypatch.setattr("featcal.methods.parameterised.MANY", 1)
    table = ParameterisedTemperature(restarts=1).fit(Batch(logits, labels), loss=brier)
    torch.testing.assert_close(table.wrap()(logits), direct.wrap()(logits), rtol=1e-3, atol=1e-3)
    plain = Temperature().fit(Batch(logits, labels), loss=brier)
    assert table.report.loss_after < plain.report.loss_after - 1e-3
    probs = table.wrap()(logits).softmax(1).double()
    exact = float((probs - F.one_hot(labels, 6)).square().sum(1).mean())
    assert table.report.loss_after == pytest.approx(exact, abs=1e-6)


def test_losses_without_a_gradient_or_a_formula_are_refused():
    data = Batch(*even(n=60))
    with pytest.raises(InputError, match="ece"):
        ParameterisedTemperature().fit(data, loss=ece)
    odd = Loss("odd", nll.sums)
    with pytest.raises(InputError, match="odd"):
        ParameterisedTemperature().fit(data, loss=odd)


def test_other_shapes_fit_too_and_end_close_by(fitted):
    """The penalty leaves one minimum worth speaking of."""
    data = Batch(*drawn())
    for arguments in ({"layers": 2, "hidden": 3}, {"top": 2, "seed": 11}):
        found = ParameterisedTemperature(restarts=1, **arguments).fit(data)
        assert found.report.loss_after == pytest.approx(fitted.report.loss_after, abs=0.03)
        assert found.network.numel() == length(found.sizes(found.mean.numel()))
    found.fit(Batch(*even()))  # a refit without a network forgets the first
    assert found.network.numel() == found.mean.numel() == 0


def test_newton_stops_where_every_step_loses():
    def cliff(at, batch):
        return torch.where(at[0] >= 1, at[0] ** 2, 1e6)

    start = torch.tensor([1.0], dtype=torch.float64)
    row = Batch(torch.zeros(1, 1), torch.zeros(1, dtype=torch.long))
    found, flat = sharpened(cliff, start, [row], 1, lambda at: 0 * at.square().sum())
    assert not flat
    assert found.tolist() == [1]


def test_too_few_different_rows_get_one_temperature():
    logits = torch.tensor([[2.0, 0.0, 1.0]]).repeat(40, 1)
    found = ParameterisedTemperature().fit(Batch(logits, torch.tensor([0, 0, 0, 1] * 10)))
    assert found.network.numel() == 0
    assert "too few different rows" in found.report.steps[0].message


def test_the_reference_is_torchs_adam_on_torchs_layers(monkeypatch):
    """The published loop with modules and backward, its first steps."""
    monkeypatch.setattr(parameterised, "ROUNDS", 150)
    logits, labels = drawn(n=150, k=12)
    found = ParameterisedTemperature(reference=True).fit(Batch(logits, labels))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        parts = [nn.Linear(10, 2), nn.ReLU()]
        for _ in range(3):
            parts += [nn.Linear(2, 2), nn.ReLU()]
        model = nn.Sequential(*parts, nn.Linear(2, 1))
    adam = torch.optim.Adam(model.parameters(), lr=0.02)
    inputs = logits.sort(descending=True).values[:, :10]
    with torch.enable_grad():
        for _ in range(150):
            adam.zero_grad()
            F.cross_entropy(logits / model(inputs), labels).backward()
            adam.step()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(found.network, flat, rtol=1e-2, atol=1e-2)
    expected = logits / output(found.network, inputs, [10, *PUBLISHED], torch.relu)[:, None]
    assert torch.equal(found.wrap()(logits), expected)
    assert not found.keeps_accuracy
