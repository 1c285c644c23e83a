"""Density-aware temperatures against brute force and scipy; the published bug."""

import math
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from scipy.optimize import minimize
from torch import nn

import featcal
from featcal import Batch, InputError, Temperature, parse
from featcal.core.loss import brier
from featcal.methods.density import DensityAware


def around(n=1500, k=4, d=5, *, w=(0.5, 3.0), seed=0, rows_seed=1):
    """Labels drawn at T = w0 + w1 s, with s the distance to the 3rd nearest of 200 train rows."""
    draw = np.random.default_rng(seed)
    train = draw.normal(size=(200, d)) + 1
    weight = draw.normal(size=(k, d)) * 2
    draw = np.random.default_rng(rows_seed)
    features = draw.normal(size=(n, d)) + 1
    s = brute(features, train, 3)
    logits = features @ weight.T
    labels = (logits / (w[0] + w[1] * s)[:, None] + draw.gumbel(size=logits.shape)).argmax(1)
    head = nn.Linear(d, k, bias=False).requires_grad_(False)
    head.weight.data = torch.tensor(weight, dtype=torch.float32)
    features = torch.tensor(features, dtype=torch.float32)
    batch = Batch(head(features), torch.tensor(labels), features)
    known = torch.tensor(train, dtype=torch.float32)
    return batch, head, Batch(None, torch.zeros(200, dtype=torch.int64), known)


def brute(points, stored, k):
    points = np.asarray(points, float)
    stored = np.asarray(stored, float)
    points = points / np.linalg.norm(points, axis=1, keepdims=True)
    stored = stored / np.linalg.norm(stored, axis=1, keepdims=True)
    gaps = np.sqrt(((points[:, None] - stored[None]) ** 2).sum(2))
    return np.sort(gaps, 1)[:, k - 1]


def nll64(logits, labels, temperature):
    z = np.asarray(logits, float) / temperature[:, None]
    z = z - z.max(1, keepdims=True)
    return float(np.mean(np.log(np.exp(z).sum(1)) - z[np.arange(len(z)), np.asarray(labels)]))


@pytest.fixture(scope="module")
def world():
    return around()


@pytest.fixture(scope="module")
def fitted(world):
    batch, head, train = world
    return DensityAware(neighbours=3).fit(batch, head, train=train)


def test_distances_are_brute_force(world, fitted):
    batch, _, train = world
    expected = brute(batch.features, train.features, 3)
    np.testing.assert_allclose(fitted.distance(batch.features), expected, atol=1e-4)


def test_scipy_finds_no_better_weights(world, fitted):
    batch, _, train = world
    s = brute(batch.features, train.features, 3)

    def loss(w):
        return nll64(batch.logits, batch.labels, np.maximum(w[0] + w[1] * s, 1e-6))

    starts = [(1.0, 1.0), (0.1, 5.0), (3.0, 0.1)]
    best = min(
        minimize(loss, start, bounds=[(0, None)] * 2, method="L-BFGS-B").fun for start in starts
    )
    w = fitted.weights.tolist()
    assert loss(w) <= best + 1e-6
    assert w[1] == pytest.approx(3.0, rel=0.35)
    assert fitted.report.loss_after == pytest.approx(loss(w), abs=1e-5)


def test_it_beats_one_temperature_on_unseen_rows(world, fitted):
    batch, head, _ = world
    new, _, _ = around(rows_seed=7)
    plain = Temperature().fit(batch, head)
    losses = [
        float(nn.functional.cross_entropy(found(new.features, head).double(), new.labels))
        for found in (fitted, plain)
    ]
    assert losses[0] < losses[1]


def test_distances_that_do_not_matter_leave_temperature_scaling():
    batch, head, train = around(w=(2.0, 0.0))
    draw = np.random.default_rng(3)
    elsewhere = torch.tensor(draw.normal(size=(200, 5)) - 1, dtype=torch.float32)
    found = DensityAware(neighbours=3).fit(batch, head, train=Batch(None, train.labels, elsewhere))
    plain = Temperature().fit(batch, head)
    assert found.report.loss_after <= plain.report.loss_after + 1e-9
    w0, w1 = found.weights.tolist()
    assert min(w0, w1) >= 0


def test_equal_distances_are_one_temperature(world):
    batch, head, train = world
    same = Batch(batch.logits, batch.labels, batch.features)
    point = Batch(None, train.labels[:1], torch.zeros(1, 5))  # at distance 1 from every direction
    found = DensityAware().fit(same, head, train=point)
    plain = Temperature().fit(batch, head)
    assert found.weights[1] == 0
    assert float(found.weights[0]) == pytest.approx(float(plain.temperature), rel=1e-5)


def test_a_pure_multiple_of_the_distance_is_found():
    batch, head, train = around(w=(0.0, 4.0), n=3000)
    found = DensityAware(neighbours=3).fit(batch, head, train=train)
    w0, w1 = found.weights.tolist()
    s = brute(batch.features, train.features, 3)
    assert w0 < 0.3 * w1 * float(np.median(s))


def test_brier_is_a_loss_too(world):
    batch, head, train = world
    found = DensityAware(neighbours=3).fit(batch, head, train=train, loss=brier)
    assert found.report.loss_after < found.report.loss_before
    plain = Temperature().fit(batch, head, loss=brier)
    assert found.report.loss_after <= plain.report.loss_after + 1e-9


# --- what is kept -----------------------------------------------------------------------------


def test_training_rows_are_bounded_and_picked_by_content(world):
    batch, head, train = world
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    one, two = (
        DensityAware(references=50).fit(batch, head, train=rows)
        for rows in (train, train.rows(order))
    )
    assert one.stored.shape == (50, 5)
    assert torch.equal(one.stored, two.stored)
    assert torch.equal(one.weights, two.weights)


def test_more_neighbours_than_rows_are_the_farthest_row():
    batch, head, train = around(w=(3.0, 0.0))
    few = train.rows(slice(0, 7))
    found = DensityAware(neighbours=50).fit(batch, head, train=few)
    assert not found.report.noop
    np.testing.assert_allclose(
        found.distance(batch.features), brute(batch.features, few.features, 7), atol=1e-4
    )


# --- the published form -----------------------------------------------------------------------


def test_the_published_form_takes_the_nearest_whatever_k(world):
    batch, head, train = world
    found = DensityAware(reference=True).fit(batch, head, train=train)
    np.testing.assert_allclose(
        found.distance(batch.features), brute(batch.features, train.features, 1) ** 2, atol=1e-5
    )


def test_the_published_form_minimises_the_squared_error(world):
    batch, head, train = world
    found = DensityAware(reference=True).fit(batch, head, train=train)
    s = brute(batch.features, train.features, 1) ** 2
    true = np.eye(4)[batch.labels.numpy()]

    def error(w):
        z = batch.logits.double().numpy() / np.maximum(w[0] + w[1] * s, 1e-20)[:, None]
        p = np.exp(z - z.max(1, keepdims=True))
        return float(((p / p.sum(1, keepdims=True) - true) ** 2).sum(1).mean())

    exact = minimize(error, (1.0, 1.0), bounds=[(-100, 100), (0, 1e4)], method="L-BFGS-B")
    assert error(found.weights.tolist()) <= exact.fun + 1e-5


# --- refusals ---------------------------------------------------------------------------------


def test_training_rows_are_asked_for(world):
    batch, head, _ = world
    with pytest.raises(InputError, match="pass train="):
        DensityAware().fit(batch, head)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (Batch(torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64)), "train holds logits alone"),
        (
            Batch(None, torch.zeros(3, dtype=torch.int64), torch.zeros(3, 9)),
            "train has 9 features a row and the data 5: pass rows of the same layer",
        ),
        (
            Batch(None, torch.zeros(3, dtype=torch.int64), torch.full((3, 5), math.nan)),
            "train holds NaN or infinite features",
        ),
        (Batch(None, torch.zeros(0, dtype=torch.int64), torch.zeros(0, 5)), "train is empty"),
    ],
)
def test_training_rows_that_cannot_be_used_are_named(world, train, message):
    batch, head, _ = world
    with pytest.raises(InputError, match=f"density: {message}"):
        DensityAware().fit(batch, head, train=train)


def refused_on_rank(rank, folder):
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=30),
    )
    batch, head, train = around(n=60)
    if rank == 1:
        train.features[5] = math.nan
    told = "NaN or infinite features" if rank == 1 else "another process found train rows"
    with pytest.raises(InputError, match=f"density: .*{told}"):
        DensityAware().fit(batch, head, train=train)
    dist.destroy_process_group()


def test_all_processes_leave_when_one_has_rows_it_cannot_use(tmp_path):
    mp.spawn(refused_on_rank, args=(str(tmp_path),), nprocs=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"neighbours": 0}, "density: neighbours is 0: give a whole number from 1 up"),
        ({"references": "all"}, "density: references is 'all'"),
        ({"features": "both"}, "density: features is 'both': choose unclipped or clipped"),
        ({"reference": 1}, "density: reference is 1: give True or False"),
        ({"reference": True, "neighbours": 7}, "takes the nearest row: leave neighbours out"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(InputError, match=message):
        DensityAware(**arguments)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("weights", torch.tensor([1.0, -1.0]), "must not be below 0"),
        ("weights", torch.tensor([math.nan, 1.0]), "damaged"),
        ("weights", torch.ones(3), "damaged"),
        ("stored", torch.zeros(0), "damaged"),
        ("stored", torch.zeros(0, 5), "damaged"),
        ("stored", torch.ones(200, 5), "damaged"),
    ],
)
def test_damaged_files_are_refused(fitted, tmp_path, key, value, message):
    damaged = parse(repr(fitted))
    damaged.load_state_dict(fitted.state_dict() | {key: value})
    path = featcal.save(damaged, tmp_path / "d.safetensors")
    with pytest.raises(InputError, match=message):
        featcal.load(path)
