"""Losses: sums that add up, against naive float64 loops."""

import math

import numpy as np
import pytest
import torch

from featcal.core.batch import Batch
from featcal.core.loss import accuracy, brier, confidence, ece, measure, nll


def data(n=400, k=4, seed=0):
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, k, generator=draw) * 3
    labels = torch.randint(k, (n,), generator=draw)
    return Batch(logits, labels)


def naive(batch):
    """Every loss by plain loops over rows."""
    z = batch.logits.double().numpy()
    y = batch.labels.numpy()
    sums = {"nll": 0.0, "brier": 0.0, "accuracy": 0.0, "confidence": 0.0}
    bins = {}
    for row, label in zip(z, y, strict=True):
        e = np.exp(row - row.max())
        p = e / e.sum()
        target = np.eye(len(p))[label]
        sums["nll"] -= math.log(p[label])
        sums["brier"] += float(((p - target) ** 2).sum())
        right = float(p.argmax() == label)
        sums["accuracy"] += right
        sums["confidence"] += float(p.max())
        where = min(max(math.ceil(p.max() * 15) - 1, 0), 14)
        conf, corr = bins.get(where, (0.0, 0.0))
        bins[where] = (conf + float(p.max()), corr + right)
    found = {key: value / len(y) for key, value in sums.items()}
    found["ece"] = sum(abs(a - b) for a, b in bins.values()) / len(y)
    return found


@pytest.mark.parametrize("loss", [nll, brier, ece, accuracy, confidence], ids=lambda x: x.name)
def test_losses_equal_naive_loops(loss):
    batch = data()
    assert measure([batch], loss)[0] == pytest.approx(naive(batch)[loss.name], abs=1e-6)


@pytest.mark.parametrize("loss", [nll, brier, ece, accuracy, confidence], ids=lambda x: x.name)
def test_sums_have_the_declared_size_and_type(loss):
    batch = data()
    sums = loss(batch.logits, batch)
    assert sums.shape == (loss.size,)
    assert sums.dtype == torch.float64
    assert torch.equal(loss(batch.logits[:0], batch.rows(slice(0, 0))), torch.zeros_like(sums))
