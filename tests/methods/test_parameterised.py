"""Parameterised temperature scaling: its network, its rows, its honesty, and the dead reference."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from featcal import Batch, CalibrationWarning, InputError, Temperature, load, metrics, save
from featcal.core.loss import Loss, brier, ece, nll
from featcal.methods import parameterised as parameterised_fit
from featcal.methods.parameterised import (
    MANY,
    PUBLISHED,
    REACH,
    ParameterisedTemperature,
    brier_curves,
    default_start,
    held_back,
    interpolated,
    layers_of,
    length,
    log_change,
    raw_temperature,
    sharpened,
    silent_start,
    standardised,
    tabulated,
    top_gaps,
)


def drawn(n=1200, k=6, *, seed=0, dtype=torch.float32):
    """Rows that are surer than they should be where the gap is wide: T grows with the gap."""
    draw = np.random.default_rng(seed)
    logits = draw.normal(size=(n, k)) * 3
    ordered = np.sort(logits, 1)
    heat = 0.6 + 0.5 * (ordered[:, -1] - ordered[:, -2])[:, None]
    labels = (logits / heat + draw.gumbel(size=logits.shape)).argmax(1)
    return torch.tensor(logits, dtype=dtype), torch.tensor(labels)


def even(n=500, k=4, *, seed=0):
    """Rows that one temperature suits."""
    draw = np.random.default_rng(seed)
    logits = draw.normal(size=(n, k)) * 3
    labels = (logits / 2 + draw.gumbel(size=logits.shape)).argmax(1)
    return torch.tensor(logits, dtype=torch.float32), torch.tensor(labels)


def nll64(logits, labels):
    return float(F.cross_entropy(logits.double(), labels))


@pytest.fixture(scope="module")
def fitted():
    return ParameterisedTemperature().fit(Batch(*drawn()))


# --- anchors ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def paper(shared_file):
    with np.load(shared_file("anchors", "resnet50-cifar10-ce.npz")) as file:
        return {key: torch.from_numpy(file[key]) for key in file.files}


@pytest.mark.shared
def test_the_reference_dies_into_one_temperature(paper):
    """The figures of plain temperature scaling, to every digit of METHODS 0.2."""
    found = ParameterisedTemperature(reference=True)
    found.fit(Batch(paper["val_logits"], paper["val_labels"]))
    values = found.report.steps[0].values
    assert values["T_min"] == values["T_max"] == pytest.approx(2.4975, abs=5e-5)
    assert "the network died" in found.report.steps[0].message
    with torch.no_grad():
        test = {"logits": found.wrap()(paper["test_logits"]), "labels": paper["test_labels"]}
    assert round(100 * metrics.ece(**test), 3) == 1.373
    assert round(metrics.nll(**test), 4) == 0.2038


@pytest.mark.shared
def test_a_network_that_lives_beats_temperature_scaling_on_the_papers_logits(paper):
    data = Batch(paper["val_logits"], paper["val_labels"])
    found, plain = ParameterisedTemperature().fit(data), Temperature().fit(data)
    assert found.report.loss_after < plain.report.loss_after - 0.01
    with torch.no_grad():
        mine, theirs = (c.wrap()(paper["test_logits"]) for c in (found, plain))
    labels = paper["test_labels"]
    assert nll64(mine, labels) < nll64(theirs, labels) - 0.01
    assert metrics.ece(logits=mine, labels=labels) < metrics.ece(logits=theirs, labels=labels)
    assert torch.equal(mine.argmax(1), paper["test_logits"].argmax(1))
    details = found.report.steps[0].details
    assert details["cv"] < details["cv_temperature"] - 0.01
    assert found.report.steps[0].converged


# --- the network ------------------------------------------------------------------------------


def test_the_flat_vector_is_the_layers_in_order():
    sizes = [3, 2, 1]
    network = torch.arange(float(length(sizes)))
    (first, offset), (last, bias) = layers_of(network, sizes)
    assert first.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert offset.tolist() == [6, 7]
    assert last.tolist() == [[8, 9]]
    assert bias.tolist() == [10]


def test_the_network_is_what_torchs_layers_compute():
    sizes = [5, 4, 3, 1]
    network = torch.randn(length(sizes), generator=torch.Generator().manual_seed(0)).double()
    inputs = torch.randn(7, 5, generator=torch.Generator().manual_seed(1)).double()
    modules = []
    for weight, bias in layers_of(network, sizes):
        layer = nn.Linear(weight.shape[1], weight.shape[0]).double()
        layer.load_state_dict({"weight": weight, "bias": bias})
        modules += [layer, nn.Tanh()]
    with torch.no_grad():
        raw = nn.Sequential(*modules[:-1])(inputs)[:, 0]
    expected = REACH * torch.tanh(raw / REACH)
    torch.testing.assert_close(log_change(network, inputs, sizes), expected)


def test_the_published_start_is_torchs_own_at_seed_1():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        widths = [10, *PUBLISHED]
        layers = [nn.Linear(i, o) for i, o in pairwise(widths)]
    flat = torch.cat([part.detach().flatten() for x in layers for part in (x.weight, x.bias)])
    assert torch.equal(default_start(widths, seed=1), flat)


def test_a_silent_start_is_the_common_temperature_for_every_row():
    sizes = [9, 5, 5, 1]
    start = silent_start(sizes, 3)
    inputs = torch.randn(50, 9, dtype=torch.float64)
    assert torch.equal(log_change(start, inputs, sizes), torch.zeros(50, dtype=torch.float64))
    assert torch.equal(start, silent_start(sizes, 3))
    assert not torch.equal(start, silent_start(sizes, 4))
    assert start[: 9 * 5].abs().min() > 0


def test_every_unit_is_held_differently_and_the_last_bias_not_at_all():
    hold = held_back([4, 3, 1])
    (first, offset), (last, bias) = layers_of(hold, [4, 3, 1])
    assert first[:, 0].tolist() == offset.tolist() == [1, 2, 3]
    assert last.tolist() == [[1, 1, 1]]
    assert bias.tolist() == [0]


def test_gaps_do_not_change_with_a_shift_or_the_order_of_classes():
    logits, _ = drawn(n=30)
    gaps = top_gaps(logits.double(), 4)
    assert gaps.shape == (30, 3)
    assert (gaps.diff(dim=1) >= 0).all()
    mixed = (logits.double() + 5)[:, torch.tensor([3, 1, 5, 0, 2, 4])]
    torch.testing.assert_close(top_gaps(mixed, 4), gaps)
    assert top_gaps(logits[:, :2], 10).shape == (30, 1)


def test_inputs_are_cut_off_and_never_nan():
    gaps = torch.tensor([[0.0, 1e38], [1.0, 2.0]])
    found = standardised(gaps, torch.tensor([0.0, 2.0]), torch.tensor([0.0, 1.0]))
    assert found.tolist() == [[0, 8], [8, 0]]


@given(st.integers(0, 100), st.floats(0.1, 100))
@settings(max_examples=40, deadline=None)
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


# --- rows -------------------------------------------------------------------------------------


@pytest.mark.parametrize("inverse", [0.1, 0.7, 2.0])
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


@pytest.mark.parametrize("loss", [nll, brier])
def test_the_table_reads_what_the_logits_give(loss):
    """Value, slope and curvature at any temperature within reach."""
    draw = np.random.default_rng(0)
    logits = torch.tensor(draw.normal(size=(400, 120)) * 4)
    labels = torch.tensor(draw.integers(0, 120, 400))
    batch, inputs = Batch(logits, labels), torch.zeros(400, 1)
    direct, table = tabulated(loss, 0.5, MANY), tabulated(loss, 0.5, MANY + 1)
    assert not direct.in_table
    assert table.in_table
    change = torch.tensor(draw.uniform(-REACH, REACH, 400), requires_grad=True)
    change.data[:3] = torch.tensor([-REACH, 0.0, REACH])
    found = []
    for rows in (direct, table):
        value = rows.loss(rows.keep(batch, inputs), change)
        (slope,) = torch.autograd.grad(value.sum(), change, create_graph=True)
        (bend,) = torch.autograd.grad(slope.sum(), change)
        found.append([value.detach(), slope.detach(), bend])
    for exact, read, allowed in zip(*found, (1e-5, 2e-4, 2e-2), strict=True):
        scale = exact.abs().max()
        torch.testing.assert_close(read / scale, exact / scale, rtol=0, atol=allowed)


def test_interpolation_is_exact_for_a_quintic():
    knots = torch.linspace(-REACH, REACH, 25, dtype=torch.float64)
    step = 2 * REACH / 24
    poly = np.polynomial.Polynomial([0.3, -1.0, 0.5, 0.2, -0.1, 0.03])
    columns = [poly.deriv(order)(knots.numpy()) * step**order for order in (1, 2)]
    table = torch.tensor(np.stack([poly(knots.numpy()), *columns], 1).reshape(1, -1))
    at = torch.linspace(-REACH, REACH, 57, dtype=torch.float64)
    found = interpolated(table.expand(57, -1), at)
    torch.testing.assert_close(found, torch.tensor(poly(at.numpy())), rtol=1e-9, atol=1e-9)


# --- fits -------------------------------------------------------------------------------------


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
    other, truth = drawn(n=4000, seed=7)
    mine, theirs = (nll64(c.wrap()(other), truth) for c in (fitted, plain))
    assert mine < theirs - 0.005


def test_the_temperature_follows_the_gap(fitted):
    logits = torch.zeros(9, 6)
    logits[:, 0] = torch.linspace(0.5, 8, 9)
    rows = fitted.row_temperatures(logits)
    assert (rows.diff() > 0).all()


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
    logits, labels = drawn(n=600)
    data = Batch(logits, labels)
    found = ParameterisedTemperature().fit(data)
    fold, total = parameterised_fit.fold_of(data, parameterised_fit.FOLDS), 0.0
    for number in range(parameterised_fit.FOLDS):
        plain = Temperature().fit(data.rows(fold != number))
        left = data.rows(fold == number)
        total += nll64(plain.wrap()(left.logits), left.labels) * len(left)
    assert found.report.steps[0].details["cv_temperature"] == pytest.approx(total / 600, abs=1e-5)


def test_a_wide_network_reads_the_table_and_agrees_with_the_logits(monkeypatch):
    logits, labels = drawn(n=700)
    direct = ParameterisedTemperature().fit(Batch(logits, labels))
    assert direct.network.numel()
    monkeypatch.setattr("featcal.methods.parameterised.MANY", 1)
    table = ParameterisedTemperature().fit(Batch(logits, labels))
    torch.testing.assert_close(table.wrap()(logits), direct.wrap()(logits), rtol=1e-3, atol=1e-3)
    assert table.report.loss_after == pytest.approx(direct.report.loss_after, abs=1e-6)


def test_brier_is_lowered_when_it_is_the_loss():
    logits, labels = drawn()
    found = ParameterisedTemperature().fit(Batch(logits, labels), loss=brier)
    plain = Temperature().fit(Batch(logits, labels), loss=brier)
    assert found.report.loss_after < plain.report.loss_after - 1e-3
    probs = found.wrap()(logits).softmax(1).double()
    exact = float((probs - F.one_hot(labels, 6)).square().sum(1).mean())
    assert found.report.loss_after == pytest.approx(exact, abs=1e-6)


def test_losses_without_a_gradient_or_a_formula_are_refused():
    data = Batch(*even(n=60))
    with pytest.raises(InputError, match="fitted by gradients, and ece has none"):
        ParameterisedTemperature().fit(data, loss=ece)
    odd = Loss("odd", nll.sums)
    with pytest.raises(InputError, match="cannot be fitted by odd: choose nll or brier"):
        ParameterisedTemperature().fit(data, loss=odd)


def test_seed_and_restarts_change_next_to_nothing(fitted):
    """The penalty leaves one minimum worth speaking of."""
    logits, labels = drawn()
    other = ParameterisedTemperature(seed=11, restarts=1).fit(Batch(logits, labels))
    assert other.report.loss_after == pytest.approx(fitted.report.loss_after, abs=1e-3)


@pytest.mark.parametrize("arguments", [{"layers": 2, "hidden": 3}, {"top": 3}, {"top": 2}])
def test_other_shapes_fit_too(arguments, tmp_path):
    logits, labels = drawn(n=500)
    found = ParameterisedTemperature(**arguments).fit(Batch(logits, labels))
    assert found.report.loss_after < found.report.loss_before
    again = load(save(found, tmp_path / "c.safetensors"))
    assert torch.equal(again.wrap()(logits), found.wrap()(logits))


def test_every_row_is_divided_by_its_own_temperature(fitted):
    logits, _ = drawn(n=50, seed=3)
    rows = fitted.row_temperatures(logits)
    assert torch.equal(fitted.wrap()(logits), logits / rows[:, None])
    assert rows.std() > 0.1
    assert torch.equal(fitted.wrap()(logits).argmax(1), logits.argmax(1))


def test_neighbouring_logits_may_tie_but_never_swap(fitted):
    low = torch.rand(5000, generator=torch.Generator().manual_seed(0)) + 1
    logits = torch.full((5000, 6), -3.0)
    logits[:, 2], logits[:, 4] = low, torch.nextafter(low, torch.tensor(9.0))
    found = fitted.wrap()(logits)
    assert (found[:, 4] >= found[:, 2]).all()


def one_row():
    return [Batch(torch.zeros(1, 1), torch.zeros(1, dtype=torch.long))]


def no_penalty(at):
    return 0 * at.square().sum()


def test_newton_finds_the_bottom_of_a_bent_valley():
    def valley(at, batch):
        return 100 * (at[1] - at[0] ** 2) ** 2 + (1 - at[0]) ** 2

    start = torch.tensor([0.7, 0.5], dtype=torch.float64)
    found, flat = sharpened(valley, start, one_row(), 1, no_penalty)
    assert flat
    assert found.tolist() == pytest.approx([1, 1], abs=1e-9)


def test_newton_leaves_a_saddle_downhill():
    def saddle(at, batch):
        return at[0] ** 2 + (at[1] ** 2 - 1) ** 2

    start = torch.tensor([0.3, 0.05], dtype=torch.float64)
    found, flat = sharpened(saddle, start, one_row(), 1, no_penalty)
    assert flat
    assert found.tolist() == pytest.approx([0, 1], abs=1e-9)


def test_newton_stops_where_every_step_loses():
    def cliff(at, batch):
        return torch.where(at[0] >= 1, at[0] ** 2, 1e6)

    start = torch.tensor([1.0], dtype=torch.float64)
    found, flat = sharpened(cliff, start, one_row(), 1, no_penalty)
    assert not flat
    assert found.tolist() == [1]


# --- edge cases -------------------------------------------------------------------------------


@pytest.mark.parametrize("labels", ["best", "worst"])
def test_ill_posed_labels_stop_at_the_cap_with_a_warning(labels):
    logits, _ = even(n=200)
    labels = logits.argmax(1) if labels == "best" else logits.argmin(1)
    with pytest.warns(CalibrationWarning, match="stopped at its cap"):
        found = ParameterisedTemperature().fit(Batch(logits, labels))
    assert torch.isfinite(found.wrap()(logits)).all()
    assert not found.report.steps[0].converged


@pytest.mark.parametrize("shape", [(20, 3), (20, 2)])
def test_logits_without_a_difference_are_a_noop(shape):
    labels = torch.arange(shape[0]) % shape[1]
    found = ParameterisedTemperature().fit(Batch(torch.full(shape, 7.0), labels))
    assert found.report.noop
    assert found.temperature == 1


def test_two_classes_have_one_gap():
    logits, labels = drawn(n=900, k=2)
    found = ParameterisedTemperature().fit(Batch(logits, labels))
    assert torch.isfinite(found.wrap()(logits)).all()
    assert found.report.loss_after < found.report.loss_before


def test_too_few_different_rows_get_one_temperature():
    logits = torch.tensor([[2.0, 0.0, 1.0]]).repeat(40, 1)
    found = ParameterisedTemperature().fit(Batch(logits, torch.tensor([0, 0, 0, 1] * 10)))
    assert found.network.numel() == 0
    assert "too few different rows" in found.report.steps[0].message


def test_a_thousand_classes_with_two_rows_each():
    draw = np.random.default_rng(0)
    labels = torch.tensor(np.repeat(np.arange(1000), 2))
    logits = torch.tensor(draw.normal(size=(2000, 1000)) * 2, dtype=torch.float32)
    logits[torch.arange(2000), labels] += torch.tensor(draw.uniform(0, 14, 2000)).float()
    found = ParameterisedTemperature(restarts=1).fit(Batch(logits, labels))
    assert found.report.loss_after < found.report.loss_before
    assert torch.isfinite(found.wrap()(logits)).all()
    assert (found.network.numel() == 0) or found.row_temperatures(logits).min() > 0


def test_a_refit_on_rows_without_a_network_forgets_the_first(fitted):
    again = ParameterisedTemperature().fit(Batch(*drawn(n=400)))
    again.fit(Batch(*even()))
    assert again.network.numel() == again.mean.numel() == 0


# --- the reference ----------------------------------------------------------------------------


def test_the_reference_is_torchs_adam_on_torchs_layers():
    """The published loop with modules and backward, 1,000 steps."""
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
        for _ in range(1000):
            adam.zero_grad()
            F.cross_entropy(logits / model(inputs), labels).backward()
            adam.step()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(found.network, flat, rtol=1e-2, atol=1e-2)
    expected = logits / raw_temperature(found.network, inputs, [10, *PUBLISHED])[:, None]
    assert torch.equal(found.wrap()(logits), expected)
    assert not found.keeps_accuracy


def test_the_reference_leaves_the_random_state_alone():
    state = torch.get_rng_state()
    ParameterisedTemperature(reference=True).fit(Batch(*even(n=40)))
    assert torch.equal(torch.get_rng_state(), state)


# --- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"top": 1}, "parameterised: top is 1: give a whole number from 2 up"),
        ({"hidden": 0}, "parameterised: hidden is 0: give a whole number from 1 up"),
        ({"layers": 1.5}, "parameterised: layers is 1.5"),
        ({"restarts": True}, "parameterised: restarts is True"),
        ({"seed": -1}, "parameterised: seed is -1: give a whole number from 0 up"),
        ({"reference": "yes"}, "parameterised: reference is 'yes': give True or False"),
        ({"reference": True, "hidden": 3}, "leave others out"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        ParameterisedTemperature(**arguments)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1.0}, "T is -1.0"),
        ({"network": torch.full((36,), math.nan)}, "NaN or infinite"),
        ({"network": torch.zeros(7)}, "not that of its layers"),
        ({"spread": torch.zeros(5)}, "not that of its layers"),
    ],
)
def test_a_damaged_file_is_refused(fitted, tmp_path, values, message):
    broken = ParameterisedTemperature().assign(
        **{key: getattr(fitted, key) for key in ("temperature", "mean", "spread", "network")}
    )
    broken.assign(**values)
    with pytest.raises(InputError, match=message):
        load(save(broken, tmp_path / "c.safetensors"))


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (torch.ones(22), "not that of its layers"),
        (torch.ones(45), "not that of its layers"),
        (torch.ones(1, 43), "not that of its layers"),
        (torch.cat([torch.ones(42), torch.zeros(1)]), "last offset is 0, and so may T be"),
    ],
)
def test_a_damaged_published_network_is_refused(network, message):
    with pytest.raises(InputError, match=message):
        ParameterisedTemperature(reference=True).assign(network=network).check()
