"""Label smoothing, both conventions of where the mass goes."""

import math

import pytest
import torch
import torch.nn.functional as F

from featcal import InputError
from featcal.losses import CE, LabelSmoothing


@pytest.mark.parametrize("spread", ["others", "all"])
@pytest.mark.parametrize("classes", [2, 5])
def test_the_targets_of_a_loop(spread, classes, batch):
    logits, labels = batch(k=classes)
    alpha, rows = 0.1, []
    for z, y in zip(logits.tolist(), labels.tolist(), strict=True):
        norm = math.log(sum(math.exp(value) for value in z))
        if spread == "others":
            targets = [1 - alpha if k == y else alpha / (classes - 1) for k in range(classes)]
        else:
            targets = [(1 - alpha) * (k == y) + alpha / classes for k in range(classes)]
        assert sum(targets) == pytest.approx(1)
        rows.append(-sum(t * (value - norm) for t, value in zip(targets, z, strict=True)))
    loss = LabelSmoothing(alpha=alpha, spread=spread)
    assert loss(logits, labels).item() == pytest.approx(sum(rows) / 12, rel=1e-12)


@pytest.mark.parametrize("classes", [2, 3, 10, 100])
@pytest.mark.parametrize("alpha", [0.0, 0.05, 0.4])
def test_torch_smooths_over_all_classes(classes, alpha, batch):
    logits, labels = batch(k=classes)
    over_all = LabelSmoothing(alpha=alpha, spread="all")(logits, labels)
    torch.testing.assert_close(over_all, F.cross_entropy(logits, labels, label_smoothing=alpha))
    others = LabelSmoothing(alpha=alpha)(logits, labels)
    wider = alpha * classes / (classes - 1)
    torch.testing.assert_close(others, F.cross_entropy(logits, labels, label_smoothing=wider))


def test_ten_classes_at_the_published_alpha_are_one_eighteenth_in_torch(batch):
    logits, labels = batch(k=10)
    torch.testing.assert_close(
        LabelSmoothing()(logits, labels), F.cross_entropy(logits, labels, label_smoothing=1 / 18)
    )


@pytest.mark.parametrize("spread", ["others", "all"])
def test_soft_targets_are_smoothed_by_the_same_map(spread, batch):
    logits, _ = batch()
    soft = batch(seed=1)[0].softmax(1)
    moved = 0.8 * soft + (0.2 * (1 - soft) / 4 if spread == "others" else 0.2 / 5)
    torch.testing.assert_close(
        LabelSmoothing(alpha=0.2, spread=spread)(logits, soft), CE()(logits, moved)
    )


def test_none_is_cross_entropy(batch):
    logits, labels = batch()
    torch.testing.assert_close(LabelSmoothing(alpha=0)(logits, labels), CE()(logits, labels))


@pytest.mark.parametrize("alpha", [-0.1, 1, 1.5])
def test_alpha_is_checked(alpha):
    with pytest.raises(InputError, match=r"label_smoothing: alpha is .* from 0 to below 1"):
        LabelSmoothing(alpha=alpha)


def test_spread_is_checked():
    with pytest.raises(InputError, match="spread is 'both': choose others or all"):
        LabelSmoothing(spread="both")
