"""Ill-posed data for the methods that look beside the logits: a sound result, never a NaN."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

from featcal import Batch, CalibrationWarning, parse
from featcal.heads.head import as_head

RECIPES = [
    "group(partitions=3)",
    "group(partitions=3, base='ensemble')",
    "group(partitions=2, reference=True)",
    "proximity",
    "proximity(how='bin_mean_shift')",
    "proximity(reference=True)",
    "density",
    "density(reference=True)",
    "logit_clip",
    "logit_clip(ties='first')",
]


def linear(weight):
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=False).requires_grad_(False)
    head.weight.data = torch.as_tensor(weight, dtype=torch.float32)
    return head


def ordinary(n=200, d=6, k=4, scale=1.0):
    draw = np.random.default_rng(0)
    features = torch.tensor(np.maximum(draw.normal(size=(n, d)), 0), dtype=torch.float32)
    head = linear(draw.normal(size=(k, d)) * scale)
    logits = head(features)
    noise = torch.tensor(draw.gumbel(size=logits.shape), dtype=torch.float32)
    return features, (logits / 2 / scale + noise).argmax(1), head


def all_right():
    features, _, head = ordinary()
    return features, head(features).argmax(1), head


def all_wrong():
    features, _, head = ordinary()
    return features, head(features).argmin(1), head


def constant_features():
    features, labels, head = ordinary()
    return torch.ones_like(features), labels, head


def no_features_at_all():
    features, labels, head = ordinary()
    return torch.zeros_like(features), labels, head


def one_logit():
    features, _, head = ordinary(k=1)
    head = as_head(head)
    return features, head(features).argmax(1), head


def one_row():
    features, labels, head = ordinary()
    return features[:1], labels[:1], head


def three_rows():
    features, labels, head = ordinary()
    return features[:3], labels[:3], head


def copies():
    features, labels, head = ordinary(n=20)
    return features.repeat(10, 1), labels.repeat(10), head


def huge_logits():
    features, labels, head = ordinary(scale=1e4)
    return features, labels, head


def absent_classes():
    features, labels, head = ordinary(k=9)
    return features, labels % 2, head


def two_rows_a_class():
    features, _, head = ordinary(n=2000, d=12, k=1000)
    return features, torch.arange(2000) % 1000, head


CASES = [
    ordinary, all_right, all_wrong, constant_features, no_features_at_all, one_logit, one_row,
    three_rows, copies, huge_logits, absent_classes, two_rows_a_class,
]  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_sound_result(recipe, case):
    features, labels, head = case()
    batch = Batch(None, labels, features)
    calibrator = parse(recipe)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        calibrator.fit(batch, head, train=batch)
    out = calibrator(features, head)
    plain = head(features)
    assert torch.isfinite(out).all()
    assert torch.isfinite(calibrator(features * 3 + 1, head)).all()
    if not calibrator.reference:
        assert calibrator.report.noop == torch.equal(out, plain)
        assert calibrator.report.loss_after <= calibrator.report.loss_before
    if calibrator.keeps_accuracy:
        assert torch.equal(out.argmax(1), plain.argmax(1))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_fit_on_hopeless_data_forgets_the_one_before(recipe):
    features, labels, head = ordinary()
    batch = Batch(None, labels, features)
    calibrator = parse(recipe).fit(batch, head, train=batch)
    flat = linear(np.zeros((4, 6)))
    calibrator.fit(batch, flat, train=batch)
    fresh = parse(recipe).fit(batch, flat, train=batch)
    assert torch.equal(calibrator(features, head), fresh(features, head))
