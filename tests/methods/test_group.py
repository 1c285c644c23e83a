"""Group calibration as a whole: what it gives out, on which rows it is fitted, and refusals."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import featcal
from featcal import Batch, CalibrationWarning, InputError, Temperature, parse
from featcal.core.calibrator import METHODS
from featcal.methods import group as group_module
from featcal.methods.group import GroupCalibration, half_of


def two_kinds(n=3000, d=6, k=4, seed=0):
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


def nll64(logits, labels):
    return float(torch.nn.functional.cross_entropy(logits.detach().double(), labels))


@pytest.fixture(scope="module")
def kinds():
    return two_kinds()


@pytest.fixture(scope="module")
def fitted(kinds):
    return GroupCalibration(partitions=6).fit(*kinds)


def test_two_kinds_of_rows_get_two_temperatures(kinds, fitted):
    batch, head = kinds
    values = fitted.report.steps[0].values
    assert values["T_min"] < 1.0
    assert values["T_max"] > 2.0
    plain = Temperature().fit(batch, head)
    assert fitted.report.loss_after < plain.report.loss_after - 0.02


def test_the_output_is_the_mean_of_the_partitions(kinds, fitted):
    batch, head = kinds
    x = batch.features.double().numpy()
    units = (x - fitted.centre.numpy()) / fitted.scale.numpy()
    z = batch.logits.double().numpy()
    mean = np.zeros_like(z)
    for gates, inverse in zip(fitted.gates.numpy(), fitted.inverse.numpy(), strict=True):
        b = inverse[(units @ gates.T).argmax(1)][:, None]
        p = np.exp(b * (z - z.max(1, keepdims=True)))
        mean += p / p.sum(1, keepdims=True) / len(fitted.inverse)
    found = fitted(batch.features, head).exp()
    np.testing.assert_allclose(found, mean, atol=1e-5)
    np.testing.assert_allclose(found.sum(1), 1, atol=1e-5)


def test_the_ensemble_output_is_the_mean_of_mixtures(kinds):
    batch, head = kinds
    found = GroupCalibration(partitions=4, base="ensemble").fit(batch, head)
    assert found.weights.shape == (4, 2, 3)
    torch.testing.assert_close(found.weights.sum(2), torch.ones(4, 2))
    group = found.grouped(batch.features)
    plain, mean = batch.logits.softmax(1), 0
    for u in range(4):
        b, w = found.inverse[u][group[:, u]], found.weights[u][group[:, u]]
        scaled = (batch.logits * b[:, None]).softmax(1)
        mean = mean + (w[:, :1] * scaled + w[:, 1:2] * plain + w[:, 2:] / 4) / 4
    torch.testing.assert_close(found(batch.features, head).exp(), mean, rtol=0, atol=1e-5)
    without = GroupCalibration(partitions=4).fit(batch, head)
    assert found.report.loss_after < without.report.loss_after + 0.01


def test_temperatures_come_from_rows_a_partition_was_not_learned_from(kinds, monkeypatch):
    batch, head = kinds
    learned, placed = [], []
    real_learn, real_fit = group_module.learn_partitions, group_module.fit_bases

    def learn(features, logits, labels, plan):
        learned.append((len(plan.seeds), set(map(tuple, logits.tolist()))))
        return real_learn(features, logits, labels, plan)

    def fit(views, *rest):
        placed.extend(
            {tuple(z) for b in view for z in b.logits.double().tolist()} for view in views
        )
        return real_fit(views, *rest)

    monkeypatch.setattr(group_module, "learn_partitions", learn)
    monkeypatch.setattr(group_module, "fit_bases", fit)
    GroupCalibration(partitions=5).fit(batch, head)
    assert [count for count, _ in learned] == [3, 2]
    teachers = [rows for count, rows in learned for _ in range(count)]
    for taught, used in zip(teachers, placed, strict=True):
        assert not taught & used
        assert len(taught) + len(used) == len(batch)
    half = half_of(batch)
    assert len(teachers[0]) == int((half == 0).sum())


def test_all_rows_serve_twice_when_asked(kinds):
    batch, head = kinds
    held, both = (
        GroupCalibration(partitions=2, held_out=h).fit(batch, head) for h in (True, False)
    )
    assert not torch.equal(held.gates, both.gates)
    assert both.report.loss_after < both.report.loss_before


def test_noise_features_gain_nothing_held_out_and_much_when_not():
    """The reason for holding out: a gate on many features tells wrong rows by heart."""
    draw = np.random.default_rng(0)
    batch, head = two_kinds(n=1200, d=4)
    noise = torch.tensor(draw.normal(size=(1200, 400)), dtype=torch.float32)
    wide_head = nn.Linear(404, 4, bias=False).requires_grad_(False)
    wide_head.weight.data = torch.cat([head.weight.data * 0, torch.zeros(4, 400)], 1)
    wide_head.weight.data[:, 1:4] = head.weight.data[:, 1:4]
    features = torch.cat([batch.features, noise], 1)
    fit, test = (
        Batch(None, batch.labels[s], features[s]) for s in (slice(0, 600), slice(600, None))
    )
    losses = {}
    for held_out in (True, False):
        found = GroupCalibration(partitions=6, held_out=held_out).fit(fit, wide_head)
        losses[held_out] = nll64(found(test.features, wide_head), test.labels)
    plain = Temperature().fit(fit, wide_head)
    assert losses[True] < losses[False] - 0.02
    assert losses[True] < nll64(plain(test.features, wide_head), test.labels) + 0.02


def test_identical_groups_are_one_temperature():
    """Symmetric rows: whatever the gates, both sides need the same T."""
    batch, head = two_kinds(n=400, d=4)
    labels = (batch.logits.double().argsort(1)[torch.arange(400), torch.arange(400) % 4]).long()
    found = GroupCalibration(partitions=2, min_rows=10_000).fit(
        Batch(
            batch.logits,
            torch.where(torch.arange(400) % 3 > 0, batch.logits.argmax(1), labels),
            batch.features,
        ),
        head,
    )
    values = found.report.steps[0].values
    assert values["T_min"] == pytest.approx(values["T_max"], rel=1e-6)
    plain = Temperature().fit(
        Batch(batch.logits, torch.where(torch.arange(400) % 3 > 0, batch.logits.argmax(1), labels))
    )
    assert values["T_min"] == pytest.approx(float(plain.temperature), rel=1e-5)
    assert found.report.loss_after == pytest.approx(plain.report.loss_after, abs=1e-6)
    assert "too small" in found.report.steps[0].message
    assert found.report.steps[0].details["groups_left_out"] == 4


@pytest.mark.shared
@pytest.mark.parametrize("name", ["cifar100-wrn16x4", "imagenet5k-efficientnet_lite0"])
def test_real_networks_lose_nothing_against_temperature_scaling(shared_file, name):
    """The second has 1,000 classes and two rows of each to fit."""
    with np.load(shared_file("packs", f"{name}.npz")) as file:
        arrays = {key: torch.from_numpy(file[key]) for key in file.files if key != "meta"}
    head = nn.Linear(*reversed(arrays["weight"].shape)).requires_grad_(False)
    head.weight.data, head.bias.data = arrays["weight"].float(), arrays["bias"].float()
    val, test = (
        Batch(None, arrays[f"{part}_labels"].long(), arrays[f"{part}_features"].float())
        for part in ("val", "test")
    )
    group, plain = GroupCalibration().fit(val, head), Temperature().fit(val, head)
    found = group(test.features, head)
    assert nll64(found, test.labels) < nll64(plain(test.features, head), test.labels) + 0.001
    assert torch.equal(found.argmax(1), head(test.features).argmax(1))


# --- clipped or not ---------------------------------------------------------------------------


def test_grouping_by_clipped_features_differs_after_a_clip_alone(made):
    world = made(n=1500)
    batch = Batch(world.logits, world.labels, world.features)
    alone = [parse(f"group(partitions=3, features={f!r})") for f in ("unclipped", "clipped")]
    one, two = (c.fit(batch, world.head) for c in alone)
    assert torch.equal(one.gates, two.gates)
    after = [parse(f"clip | group(partitions=3, features={f!r})") for f in ("unclipped", "clipped")]
    one, two = (c.fit(batch, world.head) for c in after)
    assert float(one.steps[0].threshold) == float(two.steps[0].threshold) < math.inf
    bound = float(two.steps[0].threshold)
    torch.testing.assert_close(
        one.steps[1].centre, world.features.double().mean(0).float(), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(
        two.steps[1].centre,
        world.features.double().clamp(-bound, bound).mean(0).float(),
        rtol=1e-5,
        atol=1e-6,
    )
    assert not torch.equal(one.steps[1].gates, two.steps[1].gates)
    for found in (one, two):
        logits = found.wrap(world.head)(world.features)
        assert nll64(logits, world.labels) == pytest.approx(found.report.loss_after, abs=1e-6)


def test_temperature_stands_in_for_it_in_a_joint_search(made):
    assert METHODS[GroupCalibration.quick] is Temperature
    world = made(n=800)
    found = parse("clip | group(partitions=2)").fit(
        Batch(world.logits, world.labels, world.features), world.head
    )
    assert found.report.steps[0].details["fitted_with"] == "temperature"


# --- reproducible -----------------------------------------------------------------------------


def test_seeds_are_its_own(kinds):
    batch, head = kinds
    before = torch.get_rng_state()
    one, again, other = (GroupCalibration(partitions=2, seed=s).fit(batch, head) for s in (0, 0, 7))
    assert torch.equal(one.gates, again.gates)
    assert not torch.equal(one.gates, other.gates)
    assert torch.equal(torch.get_rng_state(), before)


def test_order_of_rows_changes_nothing_to_the_bit(kinds):
    batch, head = kinds
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(0))
    one = GroupCalibration(partitions=2).fit(batch, head)
    two = GroupCalibration(partitions=2).fit(batch.rows(order), head)
    assert torch.equal(one.gates, two.gates)
    torch.testing.assert_close(one.inverse, two.inverse, rtol=1e-6, atol=0)


def test_more_rows_than_the_sample_are_all_used_for_temperatures(kinds, monkeypatch):
    batch, head = kinds
    monkeypatch.setattr(group_module, "SAMPLE", 500)
    small = GroupCalibration(partitions=2).fit(batch, head)
    assert small.report.loss_after < Temperature().fit(batch, head).report.loss_after


# --- the published form -----------------------------------------------------------------------


def test_the_published_form_uses_raw_features_and_the_squared_error(kinds):
    batch, head = kinds
    found = GroupCalibration(partitions=2, reference=True).fit(batch, head)
    assert (found.centre == 0).all()
    assert (found.scale == 1).all()
    assert found.weights.shape == (2, 2, 3)
    assert float(found.inverse.min()) >= 1 / 5
    assert float(found.inverse.max()) <= 1 / 0.05 + 1e-6
    assert not found.report.noop


def test_an_empty_group_has_the_common_temperature_even_there():
    batch, head = two_kinds(n=300)
    same = Batch(None, batch.labels, torch.ones(300, 6) * batch.features[:1])
    with pytest.warns(CalibrationWarning, match="at its cap"):
        found = GroupCalibration(partitions=2, reference=True).fit(same, head)
    out = found(same.features, head)
    assert torch.isfinite(out).all()
    assert "too small" in found.report.steps[0].message


# --- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"partitions": 0}, "group: partitions is 0: give a whole number from 1 up"),
        ({"groups": 1}, "group: groups is 1: give a whole number from 2 up"),
        ({"groups": True}, "group: groups is True"),
        ({"min_rows": 2.5}, "group: min_rows is 2.5"),
        ({"seed": -1}, "group: seed is -1"),
        ({"base": "isotonic"}, "group: base is 'isotonic': choose temperature or ensemble"),
        ({"features": "raw"}, "group: features is 'raw': choose unclipped or clipped"),
        ({"held_out": 1}, "group: held_out is 1: give True or False"),
        ({"reference": "yes"}, "group: reference is 'yes': give True or False"),
        ({"reference": True, "base": "ensemble"}, "fixes base, held_out and min_rows"),
        ({"reference": True, "min_rows": 500}, "fixes base, held_out and min_rows"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(InputError, match=message):
        GroupCalibration(**arguments)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("inverse", torch.zeros(6, 2)),
        ("inverse", torch.full((6, 2), math.nan)),
        ("gates", torch.zeros(6, 2, 99)),
        ("weights", torch.zeros(5, 2, 3)),
    ],
)
def test_damaged_files_are_refused(fitted, tmp_path, key, value):
    damaged = parse(repr(fitted))
    damaged.load_state_dict(fitted.state_dict() | {key: value})
    path = featcal.save(damaged, tmp_path / "g.safetensors")
    with pytest.raises(InputError, match="damaged"):
        featcal.load(path)
