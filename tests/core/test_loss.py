"""Losses: sums that add up, against naive float64 loops."""

import math

import numpy as np
import pytest
import torch

from featcal.core.batch import Batch
from featcal.core.loss import CRITERIA, Loss, accuracy, brier, confidence, ece, measure, nll


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


def test_measure_reads_once_whatever_it_is_asked():
    batch = data()
    wide = [nll, brier, ece, accuracy, confidence]
    together = measure([batch], *wide)
    assert together == [measure([batch], loss)[0] for loss in wide]


@pytest.mark.parametrize("loss", [nll, brier, ece, accuracy, confidence], ids=lambda x: x.name)
def test_parts_add_up(loss):
    batch = data()
    parts = [batch.rows(slice(0, 1)), batch.rows(slice(1, 1)), batch.rows(slice(1, 400))]
    assert measure(parts, loss)[0] == pytest.approx(measure([batch], loss)[0], abs=1e-9)


@pytest.mark.parametrize("loss", [nll, brier, ece, accuracy, confidence], ids=lambda x: x.name)
def test_sums_have_the_declared_size_and_type(loss):
    batch = data()
    sums = loss(batch.logits, batch)
    assert sums.shape == (loss.size,)
    assert sums.dtype == torch.float64
    assert torch.equal(loss(batch.logits[:0], batch.rows(slice(0, 0))), torch.zeros_like(sums))


def test_nll_of_huge_logits_is_finite():
    batch = Batch(torch.tensor([[1e4, -1e4], [-1e4, 1e4]]), torch.tensor([1, 1]))
    assert measure([batch], nll)[0] == pytest.approx(1e4)
    assert measure([batch], brier)[0] == pytest.approx(1.0)


def test_ece_puts_the_edges_in_the_right_closed_bin():
    # Two classes, confidences exactly 1: the last bin, perfectly right and perfectly wrong.
    batch = Batch(torch.tensor([[200.0, 0.0], [200.0, 0.0]]), torch.tensor([0, 1]))
    assert measure([batch], ece)[0] == pytest.approx(0.5)


def test_criteria_are_known_by_their_names():
    assert set(CRITERIA) == {"nll", "brier", "ece"}
    assert all(loss.name == name for name, loss in CRITERIA.items())


def test_a_loss_of_ones_own():
    weighted = Loss("rows", lambda z, batch: torch.tensor([float(len(z))], dtype=torch.float64))
    assert measure([data(), data(n=50)], weighted) == [1.0]


def test_float32_sums_do_not_lose_rows():
    # 0.1 in float32 summed a million times in float32 would be off in the third digit.
    ones = Loss("tenth", lambda z, b: torch.full((len(z),), 0.1).sum(dtype=torch.float64).view(1))
    batch = Batch(torch.zeros(1_000_000, 1), torch.zeros(1_000_000, dtype=torch.long))
    assert measure([batch], ones)[0] == pytest.approx(0.1, rel=1e-7)
