"""The soft-binned error against a loop, and against ECE where its bins are hard."""

import math

import pytest
import torch

from featcal import InputError
from featcal.losses import CE, SoftECE
from featcal.metrics import ece


def looped(logits, labels, bins, temperature, norm):
    q = logits.softmax(1)
    rows = list(zip(q.amax(1).tolist(), (q.argmax(1) == labels).tolist(), strict=True))
    centres = [(b + 0.5) / bins for b in range(bins)]
    total = 0.0
    for at in range(bins):
        mass = hits = sure = 0.0
        for r, c in rows:
            weights = [math.exp(-((r - x) ** 2) / temperature) for x in centres]
            share = weights[at] / sum(weights)
            mass, hits, sure = mass + share, hits + share * c, sure + share * r
        total += mass / len(rows) * abs(hits / mass - sure / mass) ** norm
    return total ** (1 / norm)


@pytest.mark.parametrize("norm", [1, 2])
@pytest.mark.parametrize(("bins", "temperature"), [(15, 0.01), (5, 0.1), (1, 0.01)])
def test_a_loop(norm, bins, temperature, batch):
    logits, labels = batch(30)
    loss = SoftECE(bins=bins, temperature=temperature, norm=norm)
    want = looped(logits, labels, bins, temperature, norm)
    assert loss.penalty(logits, labels).item() == pytest.approx(want, rel=1e-10)


def test_hard_bins_give_the_metric(batch):
    logits, labels = batch(300)
    loss = SoftECE(bins=10, temperature=1e-7, norm=1)
    want = ece(logits=logits, labels=labels, bins=10)
    assert loss.penalty(logits, labels).item() == pytest.approx(want, abs=1e-4)


def test_the_loss_is_cross_entropy_plus_the_weighted_error(batch):
    logits, labels = batch()
    loss = SoftECE(weight=0.4)
    want = CE()(logits, labels) + 0.4 * loss.penalty(logits, labels)
    torch.testing.assert_close(loss(logits, labels), want)
    torch.testing.assert_close(SoftECE(weight=0)(logits, labels), CE()(logits, labels))


def test_rows_are_shared_out_whole():
    shares = SoftECE().shares(torch.linspace(0, 1, 50))
    assert shares.shape == (50, 15)
    torch.testing.assert_close(shares.sum(1), torch.ones(50))


def test_a_perfect_batch_has_no_error_and_no_slope():
    logits = (torch.eye(4) * 1e4).requires_grad_()
    value = SoftECE().penalty(logits, torch.arange(4))
    assert value.item() == 0
    (slope,) = torch.autograd.grad(value, logits)
    assert (slope == 0).all()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"weight": -1}, "weight is -1: give a number from 0 up"),
        ({"bins": 0}, "bins is 0: give a whole number from 1 up"),
        ({"temperature": 0}, "temperature is 0: give a number above 0"),
        ({"norm": 0}, "norm is 0: give a whole number from 1 up"),
        ({"norm": 3}, "norm is 3: choose 1 or 2"),
    ],
)
def test_hyperparameters_are_checked(arguments, says):
    with pytest.raises(InputError, match=f"soft_ece: {says}"):
        SoftECE(**arguments)
