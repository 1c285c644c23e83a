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


def cases():
    features, labels, head = ordinary()
    few, few_labels, few_head = ordinary(n=20)
    single, _, one = ordinary(k=1)
    wide, _, wide_head = ordinary(n=600, d=12, k=300)
    nine, nine_labels, nine_head = ordinary(k=9)
    one = as_head(one)
    return {
        "ordinary": (features, labels, head),
        "all right": (features, head(features).argmax(1), head),
        "constant features": (torch.ones_like(features), labels, head),
        "no features at all": (torch.zeros_like(features), labels, head),
        "one logit": (single, one(single).argmax(1), one),
        "one row": (features[:1], labels[:1], head),
        "copies": (few.repeat(10, 1), few_labels.repeat(10), few_head),
        "huge logits": ordinary(scale=1e4),
        "absent classes": (nine, nine_labels % 2, nine_head),
        "two rows a class": (wide, torch.arange(600) % 300, wide_head),
    }


CASES = cases()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("case", CASES)
def test_a_sound_result(recipe, case):
    features, labels, head = CASES[case]
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
