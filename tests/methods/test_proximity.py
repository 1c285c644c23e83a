"""Proximity calibration: neighbours by brute force, what is kept, and what it gives out."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

import featcal
from featcal import Batch, CalibrationWarning, InputError, parse
from featcal.methods.proximity import ProximityCalibration


def sparse_and_dense(n=1200, k=4, seed=0):
    """Overconfident where rows are far apart, right where they are close together."""
    draw = np.random.default_rng(seed)
    centre = draw.normal(size=(k, 8)) * 3
    kind = draw.integers(k, size=n)
    lone = draw.random(n) < 0.5
    features = centre[kind] + draw.normal(size=(n, 8)) * np.where(lone, 2.0, 0.2)[:, None]
    head = nn.Linear(8, k, bias=False).requires_grad_(False)
    head.weight.data = torch.tensor(centre, dtype=torch.float32) / 2
    features = torch.tensor(features, dtype=torch.float32)
    logits = head(features)
    labels = torch.where(
        torch.tensor(lone & (draw.random(n) < 0.5)),
        torch.tensor(draw.integers(k, size=n)),
        logits.argmax(1),
    )
    return Batch(logits, labels, features), head


@pytest.fixture(scope="module")
def rows():
    return sparse_and_dense()


@pytest.fixture(scope="module")
def fitted(rows):
    return ProximityCalibration().fit(*rows)


def brute_proximity(points, stored, neighbours, *, leave_out):
    """mean exp(-d^2) by loops over all pairs."""
    points = points / np.linalg.norm(points, axis=1, keepdims=True)
    stored = stored / np.linalg.norm(stored, axis=1, keepdims=True)
    found = []
    for i, point in enumerate(points):
        squared = ((stored - point) ** 2).sum(1)
        if leave_out:
            squared = np.delete(squared, i)
        found.append(np.exp(-np.sort(squared)[:neighbours]).mean())
    return np.array(found)


def test_proximity_is_brute_force_with_the_row_itself_left_out(rows, fitted):
    batch, _ = rows
    at = fitted.coordinates(batch.logits, batch.features)
    expected = brute_proximity(
        batch.features.double().numpy(), batch.features.double().numpy(), 10, leave_out=True
    )
    np.testing.assert_allclose(1 - at[:, 1].double(), expected, atol=2e-6)
    confidence = batch.logits.double().softmax(1).amax(1)
    np.testing.assert_allclose(1 - at[:, 0].double(), confidence, atol=1e-6)


def test_rounding_does_not_hide_a_row_from_itself():
    """Thousands of positive units: the products round most."""
    generator = torch.Generator().manual_seed(0)
    features = torch.rand(300, 4096, generator=generator) + torch.rand(300, 1, generator=generator)
    head = nn.Linear(4096, 3, bias=False).requires_grad_(False)
    head.weight.data = torch.randn(3, 4096, generator=generator) / 64
    batch = Batch(None, torch.arange(300) % 3, features)
    found = ProximityCalibration(reference=True).fit(batch, head)
    at = found.coordinates(head(features), features)
    expected = brute_proximity(
        features.double().numpy(), features.double().numpy(), 10, leave_out=True
    )
    np.testing.assert_allclose(1 - at[:, 1].double(), expected, atol=1e-5)


def test_new_rows_have_all_their_neighbours(rows, fitted):
    batch, head = rows
    new, _ = sparse_and_dense(50, seed=1)
    at = fitted.coordinates(head(new.features), new.features)
    expected = brute_proximity(
        new.features.double().numpy(), batch.features.double().numpy(), 10, leave_out=False
    )
    np.testing.assert_allclose(1 - at[:, 1].double(), expected, atol=2e-6)


def beside(features, squared):
    """Rows at this squared distance on the sphere from the given ones."""
    draw = np.random.default_rng(5)
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    aside = draw.normal(size=unit.shape)
    aside -= (aside * unit).sum(1, keepdims=True) * unit
    aside /= np.linalg.norm(aside, axis=1, keepdims=True)
    angle = 2 * math.asin(math.sqrt(squared) / 2)
    return math.cos(angle) * unit + math.sin(angle) * aside


def test_a_new_row_close_to_a_stored_one_keeps_it_as_a_neighbour(rows, fitted):
    batch, head = rows
    stored = batch.features.double().numpy()
    new = torch.tensor(beside(stored[:200], 1e-5), dtype=torch.float32)
    at = fitted.coordinates(head(new), new)
    expected = brute_proximity(new.double().numpy(), stored, 10, leave_out=False)
    np.testing.assert_allclose(1 - at[:, 1].double(), expected, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_row_knows_itself_when_both_sides_are_rounded(rows, fitted, dtype):
    batch, _ = rows
    narrow = copy.deepcopy(fitted).to(dtype)
    at = narrow.coordinates(batch.logits, batch.features.to(dtype))
    whole = fitted.coordinates(batch.logits, batch.features)
    torch.testing.assert_close(at[:, 1], whole[:, 1], rtol=0, atol=0.01)


def test_far_rows_lose_confidence_and_near_ones_keep_it(rows, fitted):
    batch, head = rows
    out = fitted(batch.features, head)
    before, after = batch.logits.softmax(1).amax(1), out.softmax(1).amax(1)
    far = fitted.coordinates(batch.logits, batch.features)[:, 1]
    order = far.argsort()
    near, lone = order[:300], order[-300:]
    assert float((before - after)[lone].mean()) > 0.1
    assert abs(float((before - after)[near].mean())) < 0.05
    assert torch.equal(out.argmax(1), batch.logits.argmax(1))


def test_the_other_classes_share_the_rest_as_before(rows, fitted):
    batch, head = rows
    plain, out = batch.logits.double().softmax(1), fitted(batch.features, head).double().softmax(1)
    top = plain.argmax(1, keepdim=True)
    rest = [p.scatter(1, top, 0) for p in (plain, out)]
    shares = [p / p.sum(1, keepdim=True) for p in rest]
    torch.testing.assert_close(shares[0], shares[1], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("how", ["density_ratio", "bin_mean_shift"])
def test_unseen_rows_gain_too(rows, how):
    batch, head = rows
    new, same_head = sparse_and_dense(2000)
    assert torch.equal(same_head.weight, head.weight)
    assert not torch.equal(new.features[:1200], batch.features)
    found = ProximityCalibration(how=how).fit(batch, head)
    before, after = (
        float(nn.functional.cross_entropy(logits.double(), new.labels))
        for logits in (new.logits, found(new.features, head))
    )
    assert after < before - 0.05


def test_what_is_kept_is_bounded_and_follows_content(rows):
    batch, head = rows
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(0))
    one = ProximityCalibration(references=200).fit(batch, head)
    two = ProximityCalibration(references=200).fit(batch.rows(order), head)
    assert one.stored.shape == (200, 8)
    assert len(one.right) + len(one.wrong) == 200
    for key, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[key]), key
    assert "200 of 1200 rows kept" in one.report.steps[0].message
    assert ProximityCalibration.keeps_rows


def test_fewer_rows_than_neighbours(rows):
    batch, head = rows
    few = batch.rows(slice(0, 6))
    found = ProximityCalibration(neighbours=10, reference=True).fit(few, head)
    at = found.coordinates(few.logits, few.features)
    expected = brute_proximity(
        few.features.double().numpy(), few.features.double().numpy(), 5, leave_out=True
    )
    np.testing.assert_allclose(1 - at[:, 1].double(), expected, atol=2e-6)


def test_one_sided_rows_are_warned_about(rows):
    batch, head = rows
    right = Batch(batch.logits, batch.logits.argmax(1), batch.features)
    with pytest.warns(CalibrationWarning, match="all rows kept were right"):
        found = ProximityCalibration().fit(right, head)
    assert found.wrong.shape == (0, 2)
    assert torch.isfinite(found(batch.features, head)).all()


def test_one_sided_rows_can_be_kept_in_a_file(rows, tmp_path):
    batch, head = rows
    right = Batch(batch.logits, batch.logits.argmax(1), batch.features)
    with pytest.warns(CalibrationWarning):
        found = ProximityCalibration().fit(right, head)
    again = featcal.load(featcal.save(found, tmp_path / "p.safetensors"))
    assert torch.equal(again(batch.features, head), found(batch.features, head))


def test_reflection_and_the_published_form_differ(rows):
    batch, head = rows
    outs = [
        ProximityCalibration(**arguments).fit(batch, head)(batch.features, head)
        for arguments in ({}, {"mirror": False}, {"reference": True})
    ]
    assert not torch.allclose(outs[0], outs[1])
    assert not torch.allclose(outs[1], outs[2])


def test_clipped_features_differ_after_a_clip_alone(made):
    world = made(n=600)
    batch = Batch(world.logits, world.labels, world.features)
    alone = [parse(f"proximity(features={f!r})") for f in ("unclipped", "clipped")]
    one, two = (c.fit(batch, world.head) for c in alone)
    assert torch.equal(one.stored, two.stored)
    after = [parse(f"clip | proximity(features={f!r})") for f in ("unclipped", "clipped")]
    one, two = (c.fit(batch, world.head) for c in after)
    assert float(two.steps[0].threshold) < math.inf
    assert not torch.equal(one.steps[1].stored, two.steps[1].stored)
    for found in (one, two):
        logits = found.wrap(world.head)(world.features).detach().double()
        loss = float(nn.functional.cross_entropy(logits, world.labels))
        assert loss == pytest.approx(found.report.loss_after, abs=1e-6)


# --- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"neighbours": 0}, "proximity: neighbours is 0: give a whole number from 1 up"),
        ({"references": 2.0}, "proximity: references is 2.0"),
        ({"how": "kde"}, "proximity: how is 'kde': choose density_ratio or bin_mean_shift"),
        ({"features": None}, "proximity: features is None: choose unclipped or clipped"),
        ({"mirror": 1}, "proximity: mirror is 1: give True or False"),
        ({"reference": 0}, "proximity: reference is 0: give True or False"),
        ({"reference": True, "how": "bin_mean_shift"}, "reference=True fixes how and mirror"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(InputError, match=message):
        ProximityCalibration(**arguments)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("width", torch.zeros(2, 2)),
        ("width", torch.ones(3)),
        ("stored", torch.full((3, 8), math.nan)),
        ("shares", torch.ones(5, 10)),
        ("right", torch.zeros(0)),
        ("right", torch.zeros(3, 2)),
        ("wrong", torch.zeros(3)),
        ("wrong", torch.zeros(0, 2)),
        ("stored", torch.ones(1200, 8)),
    ],
)
def test_damaged_files_are_refused(fitted, tmp_path, key, value):
    damaged = ProximityCalibration()
    damaged.load_state_dict(fitted.state_dict() | {key: value})
    path = featcal.save(damaged, tmp_path / "p.safetensors")
    with pytest.raises(InputError, match="damaged"):
        featcal.load(path)
