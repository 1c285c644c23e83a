"""Cross-entropy, Brier, the entropy penalty and label smoothing against loops of plain Python."""

import math

import pytest
import torch
import torch.nn.functional as F

from featcal.losses import CE, Brier, LabelSmoothing, MaxEntropy
from featcal.metrics import brier


def softmax(row):
    powers = [math.exp(z - max(row)) for z in row]
    return [value / sum(powers) for value in powers]


def looped(logits, targets, row):
    """The mean of `row(q, t)` over rows of probabilities and of targets."""
    rows = [row(softmax(z), t) for z, t in zip(logits.tolist(), targets.tolist(), strict=True)]
    return pytest.approx(sum(rows) / len(rows), rel=1e-12)


def cross_entropy(q, t):
    return -sum(b * math.log(a) for a, b in zip(q, t, strict=True))


def squares(q, t):
    return sum((a - b) ** 2 for a, b in zip(q, t, strict=True))


@pytest.mark.parametrize(
    ("loss", "row"),
    [
        (CE(), cross_entropy),
        (Brier(), squares),
        (
            MaxEntropy(beta=0.7),
            lambda q, t: cross_entropy(q, t) + 0.7 * sum(a * math.log(a) for a in q),
        ),
    ],
    ids=["ce", "brier", "max_entropy"],
)
def test_a_loop(loss, row, batch):
    logits, labels = batch()
    assert loss(logits, labels).item() == looped(logits, F.one_hot(labels, 5), row)
    soft = batch(seed=1)[0].softmax(1)
    assert loss(logits, soft).item() == looped(logits, soft, row)


def test_other_libraries_and_the_metric(batch):
    logits, labels = batch(200)
    soft = batch(200, seed=1)[0].softmax(1)
    torch.testing.assert_close(CE()(logits, soft), F.cross_entropy(logits, soft))
    assert Brier()(logits, labels).item() == pytest.approx(brier(logits=logits, labels=labels))


def test_ends():
    sure = torch.tensor([[1e4, 0.0, 0.0]])
    assert Brier()(sure, torch.tensor([0])).item() == 0
    assert Brier()(sure, torch.tensor([1])).item() == 2
    flat, labels = torch.zeros(3, 4, dtype=torch.float64), torch.tensor([0, 1, 2])
    assert MaxEntropy(beta=1)(flat, labels).item() == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize("loss", [MaxEntropy(beta=0), LabelSmoothing(alpha=0)], ids=str)
def test_without_its_extra_it_is_cross_entropy(loss, batch):
    logits, labels = batch()
    torch.testing.assert_close(loss(logits, labels), CE()(logits, labels))


@pytest.mark.parametrize("classes", [2, 10, 100])
@pytest.mark.parametrize("alpha", [0.05, 0.4])
def test_torch_smooths_over_all_classes(classes, alpha, batch):
    logits, labels = batch(k=classes)
    over_all = LabelSmoothing(alpha=alpha, spread="all")(logits, labels)
    torch.testing.assert_close(over_all, F.cross_entropy(logits, labels, label_smoothing=alpha))
    others = LabelSmoothing(alpha=alpha)(logits, labels)
    wider = alpha * classes / (classes - 1)
    torch.testing.assert_close(others, F.cross_entropy(logits, labels, label_smoothing=wider))


def test_soft_targets_are_smoothed_by_the_same_map(batch):
    logits, _ = batch()
    soft = batch(seed=1)[0].softmax(1)
    for spread, moved in {"others": 0.2 * (1 - soft) / 4, "all": 0.2 / 5}.items():
        found = LabelSmoothing(alpha=0.2, spread=spread)(logits, soft)
        torch.testing.assert_close(found, CE()(logits, 0.8 * soft + moved))
