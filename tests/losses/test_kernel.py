"""MMCE as intended and as published, against loops over pairs."""

import math

import pytest
import torch

from featcal import InputError
from featcal.losses import CE, MMCE


def parts(logits, labels):
    q = logits.softmax(1)
    return q.amax(1).tolist(), (q.argmax(1) == labels).tolist()


def kernel(a, b):
    return math.exp(-abs(a - b) / 0.4)


def plain_square(logits, labels):
    r, c = parts(logits, labels)
    n = len(r)
    pairs = [(i, j) for i in range(n) for j in range(n)]
    return sum((c[i] - r[i]) * (c[j] - r[j]) * kernel(r[i], r[j]) for i, j in pairs) / n**2


def three_sums(logits, labels):
    """A, B and C of the weighted form as sums over pairs, and the two counts."""
    r, c = parts(logits, labels)
    right = [x for x, hit in zip(r, c, strict=True) if hit]
    wrong = [x for x, hit in zip(r, c, strict=True) if not hit]
    a = sum((1 - x) * (1 - y) * kernel(x, y) for x in right for y in right)
    b = sum(x * y * kernel(x, y) for x in wrong for y in wrong)
    c = sum((1 - x) * y * kernel(x, y) for x in right for y in wrong)
    return a, b, c, len(right), len(wrong)


def test_plain_as_intended_is_the_root(batch):
    logits, labels = batch(20)
    want = math.sqrt(plain_square(logits, labels))
    assert MMCE().penalty(logits, labels).item() == pytest.approx(want, rel=1e-12)


def test_plain_as_published_is_the_square(batch):
    logits, labels = batch(20)
    found = MMCE(form="published").penalty(logits, labels)
    assert found.item() == pytest.approx(plain_square(logits, labels), rel=1e-12)


def test_weighted_as_intended_takes_means_once(batch):
    logits, labels = batch(20)
    a, b, c, m, n = three_sums(logits, labels)
    assert m > 0
    assert n > 0
    want = math.sqrt(a / m**2 + b / n**2 - 2 * c / (m * n))
    assert MMCE(variant="weighted").penalty(logits, labels).item() == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_weighted_as_published_divides_twice(seed, batch):
    logits, labels = batch(20, seed=seed)
    a, b, c, m, n = three_sums(logits, labels)
    means = a / m**2 / (m**2 + 1e-5) + b / n**2 / (n**2 + 1e-5) - 2 * c / (m * n) / (m * n + 1e-5)
    found = MMCE(variant="weighted", form="published").penalty(logits, labels).item()
    assert found == pytest.approx(math.sqrt(means + 1e-10), rel=1e-9)


@pytest.mark.parametrize("variant", ["weighted", "plain"])
@pytest.mark.parametrize("form", ["intended", "published"])
def test_the_loss_is_cross_entropy_plus_the_weighted_penalty(variant, form, batch):
    logits, labels = batch()
    loss = MMCE(weight=0.7, variant=variant, form=form)
    want = CE()(logits, labels) + 0.7 * loss.penalty(logits, labels)
    torch.testing.assert_close(loss(logits, labels), want)


def test_no_weight_is_cross_entropy(batch):
    logits, labels = batch()
    torch.testing.assert_close(MMCE(weight=0)(logits, labels), CE()(logits, labels))


@pytest.mark.parametrize("truth", [True, False])
def test_a_batch_all_right_or_all_wrong(truth, batch):
    logits, _ = batch()
    labels = logits.argmax(1) if truth else logits.argmin(1)
    plain = MMCE().penalty(logits, labels)
    torch.testing.assert_close(MMCE(variant="weighted").penalty(logits, labels), plain)
    assert plain > 0.1
    leaf = logits.requires_grad_()
    published = MMCE(variant="weighted", form="published").penalty(leaf, labels)
    assert published.item() == 0
    (slope,) = torch.autograd.grad(published, leaf)
    assert (slope == 0).all()


def test_a_perfect_batch_has_no_penalty_and_no_slope():
    logits = (torch.eye(4) * 1e4).requires_grad_()
    for variant in ("weighted", "plain"):
        value = MMCE(variant=variant).penalty(logits, torch.arange(4))
        assert value.item() == 0
        (slope,) = torch.autograd.grad(value, logits)
        assert (slope == 0).all()


def test_the_root_keeps_its_slope_next_to_zero(batch):
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
    a, b, c, m, n = three_sums(logits, labels)
    means = a / m**2 / (m**2 + 1e-5) + b / n**2 / (n**2 + 1e-5) - 2 * c / (m * n) / (m * n + 1e-5)
    assert means + 1e-10 < 0
    leaf = logits.requires_grad_()
    value = MMCE(variant="weighted", form="published").penalty(leaf, labels)
    assert value.item() == pytest.approx(1e-5)
    (slope,) = torch.autograd.grad(value, leaf)
    assert slope.isfinite().all()


def test_published_divides_away_the_right_rows():
    """With 121 right and 7 wrong rows the wrong pairs are what is left (METHODS 4.3)."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.zeros(128, 2, dtype=torch.float64)
    logits[:, 0] = torch.rand(128, generator=draw, dtype=torch.float64) * 3 + 0.2
    labels = torch.zeros(128, dtype=torch.int64)
    labels[:7] = 1
    _, b, _, _, n = three_sums(logits, labels)
    found = MMCE(variant="weighted", form="published").penalty(logits, labels).item()
    assert found == pytest.approx(math.sqrt(b / n**2) / n, rel=0.05)


def test_the_penalty_vanishes_where_confidence_is_accuracy():
    logits = torch.full((8, 2), 0.0, dtype=torch.float64)
    logits[:, 0] = math.log(3)  # p = 3/4, and six of eight are right
    labels = torch.tensor([0] * 6 + [1] * 2)
    assert MMCE().penalty(logits, labels).item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"weight": -1}, "weight is -1: give a number from 0 up"),
        ({"variant": "m"}, "variant is 'm': choose weighted or plain"),
        ({"form": "right"}, "form is 'right': choose intended or published"),
    ],
)
def test_hyperparameters_are_checked(arguments, says):
    with pytest.raises(InputError, match=f"mmce: {says}"):
        MMCE(**arguments)


def test_at_calibration_the_plain_one_vanishes_and_the_weighted_one_does_not():
    # Rows of one confidence r, of which the share r is right: nothing is to be mended.
    logits = torch.zeros(10, 2, dtype=torch.float64)
    logits[:, 0] = math.log(0.8 / 0.2)
    labels = torch.tensor([0] * 8 + [1] * 2)
    assert MMCE().penalty(logits, labels).item() == pytest.approx(0, abs=1e-6)
    # sqrt(sum v_i v_j e_i e_j) = |mean of 1 - r over right rows - mean of r over wrong rows|
    weighted = MMCE(variant="weighted").penalty(logits, labels).item()
    assert weighted == pytest.approx(abs(0.2 - 0.8))
