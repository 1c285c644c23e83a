"""Group calibration: the soft mixture, the groups' own calibrators, held-out halves, refusals."""

import math

import numpy as np
import pytest
import torch
from method_cases import nll64
from scipy.optimize import minimize, minimize_scalar
from torch import nn

from featcal import Batch, CalibrationWarning, Temperature, parse
from featcal.methods import group as group_module
from featcal.methods.group import (
    GroupCalibration,
    Placed,
    class_counts,
    group_weights,
    learn_partitions,
    mixture,
    published_base,
    read_table,
    tabulated,
)


def two_kinds(n=1500, d=6, k=4, seed=0):
    """A linear classifier too sure where x_0 > 0 and not sure enough elsewhere."""
    draw = np.random.default_rng(seed)
    features = draw.normal(size=(n, d))
    weight = draw.normal(size=(k, d)) * 1.2
    weight[:, 0] = 0
    logits = features @ weight.T
    heat = np.where(features[:, :1] > 0, 3.0, 0.6)
    labels = (logits / heat + draw.gumbel(size=logits.shape)).argmax(1)
    head = nn.Linear(d, k, bias=False).requires_grad_(False)
    head.weight.data = torch.tensor(weight, dtype=torch.float32)
    features = torch.tensor(features, dtype=torch.float32)
    return Batch(head(features), torch.tensor(labels), features), head


@pytest.fixture(scope="module")
def kinds():
    return two_kinds()


@pytest.fixture(scope="module")
def fitted(kinds):
    return GroupCalibration(partitions=5).fit(*kinds)


@pytest.fixture(scope="module")
def plain(kinds):
    return Temperature().fit(*kinds)


def test_two_kinds_of_rows_get_two_temperatures(fitted, plain):
    values = fitted.report.steps[0].values
    assert values["T_min"] < 1.0
    assert values["T_max"] > 2.0
    assert fitted.report.loss_after < plain.report.loss_after - 0.02


@pytest.mark.parametrize("base", ["temperature", "ensemble"])
def test_the_output_is_the_mean_of_the_partitions(kinds, fitted, base):
    batch, head = kinds
    if base == "ensemble":
        fitted = GroupCalibration(partitions=3, base=base).fit(batch, head)
    units = (batch.features.double().numpy() - fitted.centre.numpy()) / fitted.scale.numpy()
    mean = 0
    for u, gates in enumerate(fitted.gates.numpy()):
        group = (units @ gates.T).argmax(1)
        found = (batch.logits * fitted.inverse[u][group][:, None]).softmax(1)
        if base == "ensemble":
            w = fitted.weights[u][group]
            found = w[:, :1] * found + w[:, 1:2] * batch.logits.softmax(1) + w[:, 2:] / 4
        mean = mean + found / len(fitted.gates)
    torch.testing.assert_close(fitted(batch.features, head).exp(), mean, rtol=0, atol=1e-5)


def test_temperatures_come_from_rows_a_partition_was_not_learned_from(kinds, monkeypatch):
    batch, head = kinds
    learned, used = [], []
    real_learn, real_view = group_module.learn_partitions, group_module.Placed

    def learn(rows, seeds, *rest, **options):
        learned.extend([set(map(tuple, rows.logits.tolist()))] * len(seeds))
        return real_learn(rows, seeds, *rest, **options)

    def place(*parts):
        view = real_view(*parts)
        used.append({tuple(z) for b in view for z in b.logits.double().tolist()})
        return view

    monkeypatch.setattr(group_module, "learn_partitions", learn)
    monkeypatch.setattr(group_module, "Placed", place)
    GroupCalibration(partitions=5).fit(batch, head)
    assert len(learned) == 5
    assert [rows == learned[0] for rows in learned] == [True, True, True, False, False]
    for taught, fitted_to in zip(learned, used, strict=True):
        assert not taught & fitted_to
        assert len(taught) + len(fitted_to) == len(batch)


def test_noise_features_gain_nothing_held_out_and_much_when_not():
    """The reason for holding out: a gate on many features tells wrong rows by heart."""
    draw = np.random.default_rng(0)
    batch, head = two_kinds(n=1200, d=4)
    noise = torch.tensor(draw.normal(size=(1200, 400)), dtype=torch.float32)
    wide_head = nn.Linear(404, 4, bias=False).requires_grad_(False)
    wide_head.weight.data = torch.cat([head.weight.data, torch.zeros(4, 400)], 1)
    features = torch.cat([batch.features, noise], 1)
    fit, test = (
        Batch(None, batch.labels[s], features[s]) for s in (slice(0, 600), slice(600, None))
    )
    losses = {}
    for held_out in (True, False):
        found = GroupCalibration(partitions=4, held_out=held_out).fit(fit, wide_head)
        losses[held_out] = nll64(found(test.features, wide_head), test.labels)
    plain = Temperature().fit(fit, wide_head)
    assert losses[True] < losses[False] - 0.02
    assert losses[True] < nll64(plain(test.features, wide_head), test.labels) + 0.02


def test_groups_that_are_all_too_small_are_temperature_scaling(kinds, plain):
    found = GroupCalibration(partitions=2, min_rows=10_000).fit(*kinds)
    values = found.report.steps[0].values
    assert values["T_min"] == pytest.approx(values["T_max"], rel=1e-6)
    assert values["T_min"] == pytest.approx(float(plain.temperature), rel=1e-5)
    assert "too small" in found.report.steps[0].message
    assert found.report.steps[0].details["groups_left_out"] == 4


def test_after_a_clip_rows_are_grouped_by_clipped_features_where_asked(made):
    world = made(n=1500)
    batch = Batch(world.logits, world.labels, world.features)
    for view in ("unclipped", "clipped"):
        found = parse(f"clip | group(partitions=2, features={view!r})").fit(batch, world.head)
        bound = float(found.steps[0].threshold) if view == "clipped" else math.inf
        assert float(found.steps[0].threshold) < math.inf
        mean = world.features.double().clamp(-bound, bound).mean(0).float()
        torch.testing.assert_close(found.steps[1].centre, mean, rtol=1e-5, atol=1e-6)
        logits = found.wrap(world.head)(world.features)
        assert nll64(logits, world.labels) == pytest.approx(found.report.loss_after, abs=1e-6)
    assert found.report.steps[0].details["fitted_with"] == "temperature"


def test_the_published_form_uses_raw_features_and_bounds(kinds):
    found = GroupCalibration(partitions=2, reference=True).fit(*kinds)
    assert (found.centre == 0).all()
    assert (found.scale == 1).all()
    assert found.weights.shape == (2, 2, 3)
    assert 1 / 5 <= float(found.inverse.min()) <= float(found.inverse.max()) <= 1 / 0.05 + 1e-6
    assert not found.report.noop


def test_an_empty_group_has_the_common_temperature_even_there():
    batch, head = two_kinds(n=300)
    same = Batch(None, batch.labels, torch.ones(300, 6) * batch.features[:1])
    with pytest.warns(CalibrationWarning, match="at its cap"):
        found = GroupCalibration(partitions=2, reference=True).fit(same, head)
    assert torch.isfinite(found(same.features, head)).all()
    assert "too small" in found.report.steps[0].message


NODES = torch.linspace(-4, 3, 200, dtype=torch.float64)  # fine: the table is tested apart


def rows_of(n=60, d=5, k=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(n, d, generator=generator, dtype=torch.float64)
    logits = 3 * torch.randn(n, k, generator=generator, dtype=torch.float64)
    return Batch(logits, torch.randint(k, (n,), generator=generator), features)


@pytest.mark.parametrize("groups", [2, 3])
def test_value_and_slope_of_the_mixture_are_what_autograd_says(groups):
    rows, generator = rows_of(), torch.Generator().manual_seed(1)
    gates = torch.randn(3, groups, 5, generator=generator, dtype=torch.float64)
    inverse = torch.randn(3, groups, generator=generator, dtype=torch.float64) / 2
    curves = tabulated(rows.logits, rows.labels, NODES)
    value, slope = mixture(gates, rows.features, *read_table(NODES, curves, inverse.flatten()))
    gates.requires_grad_()
    inverse.requires_grad_()
    gate = torch.einsum("nd,ugd->nug", rows.features, gates).log_softmax(2)
    scaled = (rows.logits[:, None, None] * inverse.exp()[:, :, None]).log_softmax(3)
    true = scaled[torch.arange(60), :, :, rows.labels]
    expected = (gate + true).logsumexp(2).sum(0).neg()
    expected.sum().backward()
    torch.testing.assert_close(value, expected.detach(), rtol=0, atol=1e-5)
    torch.testing.assert_close(slope[: gates.numel()], gates.grad.flatten(), rtol=0, atol=1e-5)
    torch.testing.assert_close(slope[gates.numel() :], inverse.grad.flatten(), rtol=0, atol=1e-4)


def test_groups_that_are_there_are_found_and_no_rows_do_no_harm():
    """Rows with x_0 > 0 need T = 4, the others T = 0.5."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(800, 3, generator=generator, dtype=torch.float64)
    logits = 2 * torch.randn(800, 4, generator=generator, dtype=torch.float64)
    heat = torch.where(features[:, :1] > 0, 4.0, 0.5)
    gumbel = -torch.rand(800, 4, generator=generator, dtype=torch.float64).log()
    rows = Batch(logits, (logits / heat - gumbel.log()).argmax(1), features)
    gates = learn_partitions(rows, range(3), [0.7, 2.0], 100)
    assert gates.shape == (3, 2, 3)
    for partition in gates:
        side = (features @ partition.T).argmax(1).bool()
        share = float((side == (features[:, 0] > 0)).double().mean())
        assert max(share, 1 - share) > 0.9
    none = learn_partitions(rows.rows(slice(0, 0)), range(2), [1.0, 1.0], 5)
    assert none.shape == (2, 2, 3)
    assert torch.isfinite(none).all()


YES = torch.ones(2, dtype=torch.bool)


def heated(n=400, k=4, heats=(2.0, 0.6), seed=0):
    """Logits whose rows need the heat of their group; groups alternate."""
    draw = np.random.default_rng(seed)
    logits = draw.normal(size=(n, k)) * 3
    group = np.arange(n) % len(heats)
    heat = np.array(heats)[group][:, None]
    labels = (logits / heat + draw.gumbel(size=logits.shape)).argmax(1)
    return torch.tensor(logits), torch.tensor(labels), torch.tensor(group)


def placed(logits, labels, group, used=None):
    used = torch.ones(len(labels), dtype=torch.bool) if used is None else used
    cuts = [slice(0, 100), slice(100, 100), slice(100, None)]
    data = [Batch(logits[c], labels[c]) for c in cuts]
    return Placed(data, [group[c][:, None] for c in cuts], [used[c] for c in cuts], 0)


def test_weights_reach_the_maximum_a_solver_finds():
    logits, labels, group = heated(n=1000)
    noise = torch.rand(1000, generator=torch.Generator().manual_seed(0)) < 0.3
    labels = torch.where(noise, torch.arange(1000) % 4, labels)
    inverse, view = np.array([0.5, 1.6]), placed(logits, labels, group)
    counts = class_counts(view, 2, 4)
    found = group_weights(view, inverse, counts, YES)
    for side in (0, 1):
        rows = group == side
        true = labels[rows][:, None]
        chances = [(logits[rows] * b).softmax(1).gather(1, true) for b in (inverse[side], 1, 0)]
        parts = torch.cat(chances, 1).numpy()

        def loss(w, parts=parts):
            return -np.log(parts @ w).sum()

        whole = {"type": "eq", "fun": lambda w: w.sum() - 1}
        exact = minimize(loss, [0.4, 0.3, 0.3], bounds=[(1e-9, 1)] * 3, constraints=whole)
        assert loss(found[side]) <= exact.fun + 1e-6
        assert found[side].sum() == pytest.approx(1)
    small = group_weights(view, inverse, counts, torch.tensor([True, False]))
    assert small[1].tolist() == [1, 0, 0]


def test_the_published_base_minimises_the_squared_error():
    logits, labels, group = heated(n=600)
    inverse, weights = published_base(placed(logits, labels, group), 3, 0.8)
    assert (inverse[2], weights[2].tolist()) == (0.8, [1, 0, 0])  # a group without rows
    for side in (0, 1):
        z = logits[group == side]
        true = torch.eye(4, dtype=torch.float64)[labels[group == side]]

        def error(b, z=z, true=true):
            return float(((z * b).softmax(1) - true).square().sum())

        exact = minimize_scalar(error, bounds=(0.2, 20), method="bounded")
        assert error(float(inverse[side])) <= exact.fun + 1e-6
        w = weights[side]
        mixed = w[0] * (z * inverse[side]).softmax(1) + w[1] * z.softmax(1) + w[2] / 4
        assert float((mixed - true).square().sum()) <= exact.fun + 1e-6
