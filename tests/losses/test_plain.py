"""Cross-entropy, Brier and the entropy penalty against loops of plain Python."""

import math

import pytest
import torch
import torch.nn.functional as F

from featcal import InputError
from featcal.losses import CE, Brier, MaxEntropy


def softmax(row):
    top = max(row)
    powers = [math.exp(z - top) for z in row]
    return [value / sum(powers) for value in powers]


def test_cross_entropy_of_a_loop(batch):
    logits, labels = batch()
    rows = [-math.log(softmax(z)[y]) for z, y in zip(logits.tolist(), labels.tolist(), strict=True)]
    assert CE()(logits, labels).item() == pytest.approx(sum(rows) / 12, rel=1e-12)
    assert CE().rows(logits, labels).tolist() == pytest.approx(rows, rel=1e-12)


def test_cross_entropy_of_soft_targets_is_torchs(batch):
    logits, _ = batch()
    soft = batch(seed=1)[0].softmax(1)
    torch.testing.assert_close(CE()(logits, soft), F.cross_entropy(logits, soft))


def test_brier_of_a_loop(batch):
    logits, labels = batch()
    rows = [
        sum((q - (k == y)) ** 2 for k, q in enumerate(softmax(z)))
        for z, y in zip(logits.tolist(), labels.tolist(), strict=True)
    ]
    assert Brier()(logits, labels).item() == pytest.approx(sum(rows) / 12, rel=1e-12)
    assert Brier(reduction="sum")(logits, labels).item() == pytest.approx(sum(rows), rel=1e-12)


def test_brier_is_the_metric(batch):
    from featcal.metrics import brier

    logits, labels = batch(200)
    assert Brier()(logits, labels).item() == pytest.approx(brier(logits=logits, labels=labels))


def test_brier_ends_at_zero_and_two():
    logits = torch.tensor([[1e4, 0.0, 0.0]])
    assert Brier()(logits, torch.tensor([0])).item() == 0
    assert Brier()(logits, torch.tensor([1])).item() == 2


def test_brier_of_soft_targets_of_a_loop(batch):
    logits, _ = batch()
    soft = batch(seed=1)[0].softmax(1)
    rows = [
        sum((q - t) ** 2 for q, t in zip(softmax(z), target, strict=True))
        for z, target in zip(logits.tolist(), soft.tolist(), strict=True)
    ]
    assert Brier()(logits, soft).item() == pytest.approx(sum(rows) / 12, rel=1e-12)


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_the_entropy_penalty_of_a_loop(beta, batch):
    logits, labels = batch()
    rows = []
    for z, y in zip(logits.tolist(), labels.tolist(), strict=True):
        q = softmax(z)
        rows.append(-math.log(q[y]) + beta * sum(value * math.log(value) for value in q))
    assert MaxEntropy(beta=beta)(logits, labels).item() == pytest.approx(sum(rows) / 12, rel=1e-12)


def test_no_entropy_penalty_is_cross_entropy(batch):
    logits, labels = batch()
    assert torch.equal(MaxEntropy(beta=0)(logits, labels), CE()(logits, labels))


def test_entropy_of_uniform_rows_is_log_k():
    logits, labels = torch.zeros(3, 4, dtype=torch.float64), torch.tensor([0, 1, 2])
    assert MaxEntropy(beta=1)(logits, labels).item() == pytest.approx(0, abs=1e-15)


def test_beta_is_checked():
    with pytest.raises(InputError, match=r"max_entropy: beta is -0.1: give a number from 0 up"):
        MaxEntropy(beta=-0.1)
