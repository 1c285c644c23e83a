"""MMCE as intended and as published against loops over pairs, and the soft-binned error."""

import math

import pytest
import torch

from featcal.losses import CE, MMCE, SoftECE
from featcal.metrics import ece

PUBLISHED = MMCE(variant="weighted", form="published")


def parts(logits, labels):
    q = logits.softmax(1)
    return q.amax(1).tolist(), (q.argmax(1) == labels).tolist()


def kernel(a, b):
    return math.exp(-abs(a - b) / 0.4)


def plain_square(logits, labels):
    r, c = parts(logits, labels)
    pairs = [(i, j) for i in range(len(r)) for j in range(len(r))]
    return sum((c[i] - r[i]) * (c[j] - r[j]) * kernel(r[i], r[j]) for i, j in pairs) / len(r) ** 2


def three_sums(logits, labels):
    """A, B and C of the weighted form as sums over pairs, and the two counts."""
    r, c = parts(logits, labels)
    right = [x for x, hit in zip(r, c, strict=True) if hit]
    wrong = [x for x, hit in zip(r, c, strict=True) if not hit]
    a = sum((1 - x) * (1 - y) * kernel(x, y) for x in right for y in right)
    b = sum(x * y * kernel(x, y) for x in wrong for y in wrong)
    c = sum((1 - x) * y * kernel(x, y) for x in right for y in wrong)
    return a, b, c, len(right), len(wrong)


def published_square(logits, labels):
    a, b, c, m, n = three_sums(logits, labels)
    return a / m**2 / (m**2 + 1e-5) + b / n**2 / (n**2 + 1e-5) - 2 * c / (m * n) / (m * n + 1e-5)


def soft_error(logits, labels, bins, temperature, norm):
    rows = list(zip(*parts(logits, labels), strict=True))
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


def test_mmce_of_loops(batch):
    for seed in range(3):
        rows = batch(20, seed=seed)
        square = plain_square(*rows)
        assert MMCE().penalty(*rows).item() == pytest.approx(math.sqrt(square), rel=1e-12)
        assert MMCE(form="published").penalty(*rows).item() == pytest.approx(square, rel=1e-12)
        a, b, c, m, n = three_sums(*rows)
        want = math.sqrt(a / m**2 + b / n**2 - 2 * c / (m * n))
        assert MMCE(variant="weighted").penalty(*rows).item() == pytest.approx(want, rel=1e-12)
        want = math.sqrt(published_square(*rows) + 1e-10)
        assert PUBLISHED.penalty(*rows).item() == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("norm", [1, 2])
@pytest.mark.parametrize(("bins", "temperature"), [(15, 0.01), (5, 0.1), (1, 0.01)])
def test_soft_ece_of_a_loop(norm, bins, temperature, batch):
    rows = batch(30)
    loss = SoftECE(bins=bins, temperature=temperature, norm=norm)
    want = soft_error(*rows, bins, temperature, norm)
    assert loss.penalty(*rows).item() == pytest.approx(want, rel=1e-10)


def test_hard_bins_give_the_metric(batch):
    logits, labels = batch(300)
    loss = SoftECE(bins=10, temperature=1e-7, norm=1)
    want = ece(logits=logits, labels=labels, bins=10)
    assert loss.penalty(logits, labels).item() == pytest.approx(want, abs=1e-4)
    shares = SoftECE().shares(torch.linspace(0, 1, 50))
    assert shares.shape == (50, 15)
    torch.testing.assert_close(shares.sum(1), torch.ones(50))


@pytest.mark.parametrize("kind", [MMCE, SoftECE])
def test_the_loss_is_cross_entropy_plus_the_weighted_penalty(kind, batch):
    logits, labels = batch()
    plain, loss = CE()(logits, labels), kind(weight=0.7)
    torch.testing.assert_close(loss(logits, labels), plain + 0.7 * loss.penalty(logits, labels))
    torch.testing.assert_close(kind(weight=0)(logits, labels), plain)


@pytest.mark.parametrize("loss", [MMCE(), MMCE(variant="weighted"), SoftECE()], ids=str)
def test_a_perfect_batch_has_no_penalty_and_no_slope(loss):
    logits = (torch.eye(4) * 1e4).requires_grad_()
    value = loss.penalty(logits, torch.arange(4))
    assert value.item() == 0
    (slope,) = torch.autograd.grad(value, logits)
    assert (slope == 0).all()


@pytest.mark.parametrize("truth", [True, False])
def test_a_batch_all_right_or_all_wrong(truth, batch):
    logits, _ = batch()
    labels = logits.argmax(1) if truth else logits.argmin(1)
    plain = MMCE().penalty(logits, labels)
    torch.testing.assert_close(MMCE(variant="weighted").penalty(logits, labels), plain)
    assert plain > 0.1
    leaf = logits.requires_grad_()
    published = PUBLISHED.penalty(leaf, labels)
    assert published.item() == 0
    (slope,) = torch.autograd.grad(published, leaf)
    assert (slope == 0).all()


def test_the_root_keeps_its_slope_next_to_zero():
    """A norm has a slope of one residual's size right up to its kink."""
    for gap in (3.0, 6.0, 9.0):
        logits = torch.tensor([[gap, 0.0]], dtype=torch.float64, requires_grad=True)
        value = MMCE(variant="weighted").penalty(logits, torch.tensor([0]))
        (slope,) = torch.autograd.grad(value, logits)
        p = 1 / (1 + math.exp(-gap))
        assert value.item() == pytest.approx(1 - p, rel=1e-9)
        assert slope[0, 0].item() == pytest.approx(-p * (1 - p), rel=1e-9)


def test_where_the_published_root_gave_nan_it_stops_at_zero():
    """One right row and two wrong ones, all at 2/3: the three terms cancel but for the 1e-5."""
    logits = torch.zeros(3, 2, dtype=torch.float64)
    logits[:, 0] = math.log(2)
    labels = torch.tensor([0, 1, 1])
    assert published_square(logits, labels) + 1e-10 < 0
    leaf = logits.requires_grad_()
    value = PUBLISHED.penalty(leaf, labels)
    assert value.item() == pytest.approx(1e-5)
    (slope,) = torch.autograd.grad(value, leaf)
    assert slope.isfinite().all()


def test_at_calibration_the_plain_one_vanishes_and_the_weighted_one_does_not():
    # Rows of one confidence r, of which the share r is right: nothing is to be mended.
    logits = torch.zeros(10, 2, dtype=torch.float64)
    logits[:, 0] = math.log(0.8 / 0.2)
    labels = torch.tensor([0] * 8 + [1] * 2)
    assert MMCE().penalty(logits, labels).item() == pytest.approx(0, abs=1e-6)
    # sqrt(sum v_i v_j e_i e_j) = |mean of 1 - r over right rows - mean of r over wrong rows|
    weighted = MMCE(variant="weighted").penalty(logits, labels).item()
    assert weighted == pytest.approx(abs(0.2 - 0.8))
