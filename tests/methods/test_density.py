"""Density-aware temperatures against brute force and scipy; the published bug."""

import math

import numpy as np
import pytest
import torch
from method_cases import nll64
from scipy.optimize import minimize
from torch import nn

from featcal import Batch, InputError, Temperature
from featcal.methods.neighbours import DensityAware


def around(n=800, k=4, d=5, *, w=(0.5, 3.0), seed=0, rows_seed=1):
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
    np.testing.assert_allclose(fitted.distance(batch.features, None), expected, atol=1e-4)


def test_scipy_finds_no_better_weights(world, fitted):
    batch, _, train = world
    s, z = brute(batch.features, train.features, 3), batch.logits.double().numpy()

    def loss(w):
        return nll64(z / np.maximum(w[0] + w[1] * s, 1e-6)[:, None], batch.labels)

    starts = [(1.0, 1.0), (0.1, 5.0), (3.0, 0.1)]
    best = min(
        minimize(loss, start, bounds=[(0, None)] * 2, method="L-BFGS-B").fun for start in starts
    )
    w = fitted.weights.tolist()
    assert loss(w) <= best + 1e-6
    assert w[1] == pytest.approx(3.0, rel=0.35)
    assert fitted.report.loss_after == pytest.approx(loss(w), abs=1e-5)


def test_equal_distances_are_one_temperature(world):
    batch, head, train = world
    same = Batch(batch.logits, batch.labels, batch.features)
    point = Batch(None, train.labels[:1], torch.zeros(1, 5))  # at distance 1 from every direction
    found = DensityAware().fit(same, head, train=point)
    plain = Temperature().fit(batch, head)
    assert found.weights[1] == 0
    assert float(found.weights[0]) == pytest.approx(float(plain.temperature), rel=1e-5)


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
        found.distance(batch.features, None), brute(batch.features, few.features, 7), atol=1e-4
    )


def test_the_published_form_takes_the_nearest_and_minimises_the_squared_error(world):
    batch, head, train = world
    found = DensityAware(reference=True).fit(batch, head, train=train)
    s = brute(batch.features, train.features, 1) ** 2
    np.testing.assert_allclose(found.distance(batch.features, None), s, atol=1e-5)
    true = np.eye(4)[batch.labels.numpy()]

    def error(w):
        z = batch.logits.double().numpy() / np.maximum(w[0] + w[1] * s, 1e-20)[:, None]
        p = np.exp(z - z.max(1, keepdims=True))
        return float(((p / p.sum(1, keepdims=True) - true) ** 2).sum(1).mean())

    exact = minimize(error, (1.0, 1.0), bounds=[(-100, 100), (0, 1e4)], method="L-BFGS-B")
    assert error(found.weights.tolist()) <= exact.fun + 1e-5


def rows_of(features, logits=None):
    return Batch(logits, torch.zeros(3, dtype=torch.int64), features)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (None, "pass train="),
        (rows_of(None, torch.zeros(3, 4)), "5 finite features"),
        (rows_of(torch.zeros(3, 9)), "5 finite features"),
        (rows_of(torch.full((3, 5), math.nan)), "5 finite features"),
        (rows_of(torch.zeros(3, 5)).rows(slice(0)), "train is empty"),
    ],
)
def test_training_rows_that_cannot_be_used_are_refused(world, train, message):
    batch, head, _ = world
    with pytest.raises(InputError, match=f"density.*{message}"):
        DensityAware().fit(batch, head, train=train)
