"""A linear head followed along the thresholds, against a product for each of them."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from featcal import Batch
from featcal.analysis import ClipSweep
from featcal.analysis import sweep as sweep_linear
from featcal.analysis.sweep import directions, logits_along
from featcal.heads.head import linear_of

EXACT = torch.float64


def drawn(n, d, k, seed, *, signed=True):
    draw = torch.Generator().manual_seed(seed)
    features = torch.randn(n, d, generator=draw, dtype=EXACT)
    weight = torch.randn(k, d, generator=draw, dtype=EXACT)
    head = linear_of(weight, torch.randn(k, generator=draw, dtype=EXACT))
    return features if signed else features.relu(), head.requires_grad_(False)


@given(
    n=st.integers(1, 40),
    thresholds=st.sets(st.floats(0.01, 5, allow_subnormal=False), min_size=1, max_size=12),
    signed=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_every_threshold_is_a_product_with_clipped_features(n, thresholds, signed, seed):
    features, head = drawn(n, 9, 4, seed, signed=signed)
    grid = [*sorted(thresholds), math.inf]
    found = logits_along(features, head(features), grid, head.weight.T.contiguous())
    for c, logits in zip(grid, found, strict=True):
        torch.testing.assert_close(logits, head(features.clamp(-c, c)), rtol=1e-11, atol=1e-11)


def test_a_threshold_that_is_a_feature_clips_what_is_above_it():
    features = torch.tensor([[1.0, 2.0, -3.0, 0.0]], dtype=EXACT)
    eye = torch.eye(4, dtype=EXACT)
    found = logits_along(features, features.clone(), [1.0, 2.0, 3.0, 4.0], eye)
    assert found[:, 0].tolist() == [
        [1.0, 1.0, -1.0, 0.0], [1.0, 2.0, -2.0, 0.0], [1.0, 2.0, -3.0, 0.0], [1.0, 2.0, -3.0, 0.0],
    ]  # fmt: skip


def test_features_below_every_threshold_keep_the_logits_as_they_are():
    features, head = drawn(5, 6, 3, 0)
    own = head(features)
    found = logits_along(features, own, [100.0, math.inf], head.weight.T.contiguous())
    assert torch.equal(found[0], own)
    assert torch.equal(found[1], own)


def test_a_whole_sweep_of_many_classes_is_the_same_either_way(monkeypatch):
    draw = torch.Generator().manual_seed(2)
    features = torch.randn(300, 16, generator=draw).relu()
    head = linear_of(torch.randn(300, 16, generator=draw), torch.zeros(300)).requires_grad_(False)
    labels = head(features).argmax(1).roll(1)
    val, test = (Batch(None, labels[p], features[p]) for p in (slice(150), slice(150, None)))
    plan = {"then": "temperature", "fitted": 1.0, "points": 9, "confidence": 0.5}
    followed = ClipSweep.of(val, test, head, **plan)
    monkeypatch.setattr(sweep_linear, "MANY", 10**9)
    wanted = ClipSweep.of(val, test, head, **plan)
    torch.testing.assert_close(followed.test.nll, wanted.test.nll, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(followed.val.accuracy, wanted.val.accuracy, rtol=0, atol=0.01)
    torch.testing.assert_close(
        followed.test.entropy, wanted.test.entropy, rtol=1e-4, atol=1e-5, equal_nan=True
    )
    assert followed.best == wanted.best


@pytest.mark.parametrize("kind", ["few classes", "another head", "another precision"])
def test_what_cannot_be_followed_gets_products(kind):
    features, own = torch.randn(4, 6), torch.randn(4, 300)
    head = nn.Linear(6, 300)
    assert directions(head, features, own).shape == (6, 300)
    if kind == "few classes":
        head, own = nn.Linear(6, 5), own[:, :5]
    if kind == "another head":
        head = nn.Sequential(head, nn.ReLU())
    if kind == "another precision":
        features = features.double()
    assert directions(head, features, own) is None
