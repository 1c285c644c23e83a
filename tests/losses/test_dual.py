"""Dual focal loss: the class strictly below, and ties."""

import math

import pytest
import torch

from featcal import InputError
from featcal.losses import CE, DualFocal


def looped(logits, labels, gamma):
    rows = []
    for q, y in zip(logits.softmax(1).tolist(), labels.tolist(), strict=True):
        below = max((value for value in q if value < q[y]), default=0.0)
        rows.append(-((1 - q[y] + below) ** gamma) * math.log(q[y]))
    return rows


@pytest.mark.parametrize("gamma", [1.0, 2.3, 5.0])
@pytest.mark.parametrize("classes", [2, 5, 30])
def test_a_loop(gamma, classes, batch):
    logits, labels = batch(60, classes)
    rows = DualFocal(gamma=gamma).rows(logits, labels)
    assert rows.tolist() == pytest.approx(looped(logits, labels, gamma), rel=1e-11)


def test_no_gamma_is_cross_entropy(batch):
    logits, labels = batch()
    torch.testing.assert_close(DualFocal(gamma=0)(logits, labels), CE()(logits, labels))


def test_a_tied_class_is_passed_over():
    logits = torch.tensor([[2.0, 2.0, 1.0, 0.0]], dtype=torch.float64)
    p = logits.softmax(1)[0]
    for label in (0, 1):
        want = -((1 - p[0] + p[2]) ** 5) * p[0].log()
        torch.testing.assert_close(DualFocal()(logits, torch.tensor([label])), want)


def test_the_lowest_class_has_none_below():
    logits = torch.tensor([[2.0, 1.0, -1.0]], dtype=torch.float64)
    p = logits.softmax(1)[0, 2]
    torch.testing.assert_close(DualFocal()(logits, torch.tensor([2])), -((1 - p) ** 5) * p.log())


def test_all_tied_has_none_below():
    logits = torch.zeros(1, 4, dtype=torch.float64, requires_grad=True)
    value = DualFocal()(logits, torch.tensor([1]))
    assert value.item() == pytest.approx(0.75**5 * math.log(4))
    value.backward()
    assert logits.grad.isfinite().all()


def test_logits_tell_ties_that_rounded_probabilities_would_not():
    logits = torch.tensor([[-200.0, -201.0, 0.0]])  # both probabilities are 0 in float32
    assert DualFocal()(logits, torch.tensor([0])).item() == pytest.approx(200)


def test_gamma_is_checked():
    with pytest.raises(InputError, match="dual_focal: gamma is -2: give a number from 0 up"):
        DualFocal(gamma=-2)
