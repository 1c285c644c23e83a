"""Focal losses against loops, and the Lambert W rule against scipy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.special import lambertw

from featcal import InputError
from featcal.losses import CE, FLSD, AdaFocal, DualFocal, FLSc, Focal, balancing_gamma


def label_probs(logits, labels):
    return logits.softmax(1).gather(1, labels[:, None])[:, 0].tolist()


def looped(logits, labels, gamma_of):
    rows = [-((1 - p) ** gamma_of(p)) * math.log(p) for p in label_probs(logits, labels)]
    return pytest.approx(sum(rows) / len(rows), rel=1e-9)


# --- one gamma, two gammas, three stages -----------------------------------------------------


def test_focal_and_flsd_of_a_loop(batch):
    rows = batch(80)
    for gamma in (0.5, 2.0, 5.0):
        assert Focal(gamma=gamma)(*rows).item() == looped(*rows, lambda p, gamma=gamma: gamma)
    assert FLSD()(*rows).item() == looped(*rows, lambda p: 5.0 if p < 0.2 else 3.0)
    loss = FLSD(low=4, high=1.5, threshold=0.35)
    assert loss(*rows).item() == looped(*rows, lambda p: 4.0 if p < 0.35 else 1.5)
    probs = torch.tensor([0.19999, 0.2, 0.5, 1.0], dtype=torch.float64)
    assert FLSD().gammas(probs).tolist() == [5.0, 3.0, 3.0, 3.0]


def test_no_gamma_is_cross_entropy(batch):
    logits, labels = batch(50, scale=8.0)
    for cast in (logits.float(), logits):
        assert torch.equal(Focal(gamma=0)(cast, labels), CE()(cast, labels))
        torch.testing.assert_close(DualFocal(gamma=0)(cast, labels), CE()(cast, labels))


@pytest.mark.parametrize("epochs", [7, 35, 350])
def test_flsc_changes_at_the_published_epochs(epochs):
    stages = [FLSc().at(epoch / epochs).gamma for epoch in range(epochs)]
    assert stages == sorted(stages, reverse=True)
    assert [stages.count(gamma) * 7 / epochs for gamma in (5.0, 3.0, 1.0)] == [2, 3, 2]


def test_flsc_is_one_object_per_stage_and_by_itself_its_first(batch):
    assert FLSc().at(0.3) is FLSc().at(0.4)
    assert FLSc(reduction="sum").at(1) == Focal(gamma=1, reduction="sum")
    assert torch.equal(FLSc()(*batch()), Focal(gamma=5)(*batch()))
    for progress in (-0.1, 1.1, float("nan"), "0.5"):
        with pytest.raises(InputError, match="flsc: progress is"):
            FLSc().at(progress)


# --- the gamma that pulls as cross-entropy ---------------------------------------------------


def test_the_closed_form_of_a_loop(batch):
    def gamma_of(p):
        if p >= 0.2:
            return 3.0
        a, b = 1 - p, p * math.log(p)
        inside = -(a ** (1 - a / b)) / b * math.log(a)
        return a / b + lambertw(inside, -1).real / math.log(a)

    rows = batch(80)
    assert FLSD(closed_form=True)(*rows).item() == looped(*rows, gamma_of)
    with pytest.raises(InputError, match=r"threshold from 0 to 0\.5"):
        FLSD(closed_form=True, threshold=0.6)


@pytest.mark.parametrize(
    ("dtype", "rtol", "atol"), [(torch.float32, 1e-4, 1e-7), (torch.float64, 1e-8, 1e-12)]
)
def test_below_the_threshold_the_closed_form_pulls_as_cross_entropy(dtype, rtol, atol, batch):
    logits, labels = batch(200, scale=6.0)
    logits = logits.to(dtype).requires_grad_()
    (focal,) = torch.autograd.grad(FLSD(closed_form=True)(logits, labels), logits)
    (plain,) = torch.autograd.grad(CE()(logits, labels), logits)
    low = torch.tensor(label_probs(logits, labels)) < 0.2
    assert 20 < low.sum() < 180
    torch.testing.assert_close(focal[low], plain[low], rtol=rtol, atol=atol)


@settings(max_examples=50)
@given(st.floats(1e-5, 0.49))
def test_the_balancing_gamma_is_the_root_of_its_equation(p):
    got = balancing_gamma(torch.tensor([p], dtype=torch.float64)).item()

    def excess(gamma):
        return gamma * math.log1p(-p) + math.log1p(-gamma * p * math.log(p) / (1 - p))

    assert got > 0
    assert excess(got) == pytest.approx(0, abs=1e-9)
    # gamma = 0 is a root too: the other lies beyond the maximum between the two.
    a = -p * math.log(p) / (1 - p)
    peak = -1 / math.log1p(-p) - 1 / a
    assert got == pytest.approx(brentq(excess, peak, 50 / p, xtol=1e-13), rel=1e-6)


def test_the_balancing_gamma_falls_from_huge_to_none():
    probs = torch.tensor([0.0, 1e-35, 1e-30, 1e-6, 0.1, 0.2, 0.4, 0.499, 0.5, 0.7, 1.0])
    gamma = balancing_gamma(probs)
    assert gamma.isfinite().all()
    assert (gamma.diff() <= 0).all()
    assert gamma[-3:].tolist() == [0, 0, 0]
    assert torch.equal(gamma, balancing_gamma(probs.double()).float())
    assert not balancing_gamma(torch.full((2,), 0.3, requires_grad=True)).requires_grad
    published = balancing_gamma(torch.tensor([0.2, 0.25]))
    assert published.round().tolist() == [5, 3]


# --- dual focal: the class strictly below, and ties ------------------------------------------


@pytest.mark.parametrize("gamma", [1.0, 2.3])
@pytest.mark.parametrize("classes", [2, 30])
def test_dual_focal_of_a_loop(gamma, classes, batch):
    logits, labels = batch(60, classes)
    want = []
    for q, y in zip(logits.softmax(1).tolist(), labels.tolist(), strict=True):
        below = max((value for value in q if value < q[y]), default=0.0)
        want.append(-((1 - q[y] + below) ** gamma) * math.log(q[y]))
    found = DualFocal(gamma=gamma).rows(logits, labels)
    assert found.tolist() == pytest.approx(want, rel=1e-11)


@pytest.mark.parametrize(
    ("row", "label", "below"),
    [([2.0, 2.0, 1.0, 0.0], 0, 2), ([2.0, 2.0, 1.0, 0.0], 1, 2), ([0.0, 0.0, 0.0], 1, None)],
)
def test_a_tied_class_is_passed_over(row, label, below):
    logits = torch.tensor([row], dtype=torch.float64, requires_grad=True)
    p = logits.detach().softmax(1)[0]
    value = DualFocal()(logits, torch.tensor([label]))
    next_class = 0 if below is None else p[below]
    torch.testing.assert_close(value.detach(), -((1 - p[label] + next_class) ** 5) * p[label].log())
    value.backward()
    assert logits.grad.isfinite().all()


def test_logits_tell_ties_that_rounded_probabilities_would_not():
    logits = torch.tensor([[-200.0, -201.0, 0.0]])  # both probabilities are 0 in float32
    assert DualFocal()(logits, torch.tensor([0])).item() == pytest.approx(200)


# --- AdaFocal: rows by bin, and the update against a loop ------------------------------------

SURE, UNSURE = torch.tensor([[9.0, 0.0]]), torch.tensor([[0.1, 0.0]])
RIGHT, WRONG = torch.tensor([0]), torch.tensor([1])


def stepped(gamma, gap, *, rate=1.0, switch=0.2, smallest=-2.0, largest=20.0):
    new = gamma * math.exp(rate * gap) if gamma > 0 else gamma * math.exp(-rate * gap)
    if abs(new) < switch:
        new = -switch if gamma > 0 else switch
    return min(max(new, smallest), largest)


def test_each_row_has_the_gamma_of_its_own_probability(batch):
    logits, labels = batch(60)
    torch.testing.assert_close(AdaFocal()(logits, labels), Focal(gamma=1)(logits, labels))
    edges, gammas = torch.tensor([0.1, 0.3, 0.6]), torch.tensor([4.0, -0.5, 0.2, -2.0])
    loss = AdaFocal(bins=4, edges=edges, gammas=gammas)
    want = []
    for p in label_probs(logits, labels):
        gamma = gammas.tolist()[sum(p > edge for edge in edges.tolist())]
        base = 1 - p if gamma >= 0 else 1 + p
        want.append(-(base ** abs(gamma)) * math.log(p))
    assert loss.rows(logits, labels).tolist() == pytest.approx(want, rel=1e-6)
    some = logits[:10].requires_grad_()
    assert torch.autograd.gradcheck(lambda z: loss(z, labels[:10]), some)


def test_the_update_of_a_loop(batch):
    logits, labels = batch(90, scale=3.0)
    loss = AdaFocal(bins=6).updated(*batch(70, seed=5)).updated(*batch(80, seed=6))
    gammas = loss.gammas.clone()
    found = loss.updated(logits, labels)

    confidence = logits.softmax(1).amax(1).tolist()
    right = (logits.argmax(1) == labels).tolist()
    ordered = sorted(range(90), key=lambda i: confidence[i])
    want = []
    for part, gamma in zip(np.array_split(ordered, 6), gammas.tolist(), strict=True):
        gap = sum(confidence[i] - right[i] for i in part) / len(part)
        want.append(stepped(gamma, gap))
    assert found.gammas.tolist() == pytest.approx(want, rel=1e-6)
    for edge, j in zip(found.edges.tolist(), range(15, 90, 15), strict=True):
        assert confidence[ordered[j - 1]] < edge < confidence[ordered[j]]

    assert torch.equal(loss.gammas, gammas)  # the loss itself stays as it was
    assert found == loss  # one loss, at two points of training
    assert repr(found) == "adafocal(bins=6)"
    turned = loss.updated(logits.flip(0), labels.flip(0))
    assert torch.equal(turned.edges, found.edges)
    torch.testing.assert_close(turned.gammas, found.gammas)


def test_gamma_switches_sign_both_ways_and_stays_in_its_range():
    loss = AdaFocal(bins=1, start=0.3).updated(UNSURE, RIGHT)
    assert loss.gammas.item() == pytest.approx(-0.2)
    for _ in range(12):
        loss = loss.updated(UNSURE, RIGHT)
    assert loss.gammas.item() == pytest.approx(-2.0)
    for _ in range(12):
        loss = loss.updated(SURE, WRONG)
    assert loss.gammas.item() == pytest.approx(20.0)


@pytest.mark.parametrize("switch", [0.2, 0.25, 0.35])  # float32 holds more, the same, less
def test_bins_without_rows_keep_their_gamma(switch):
    logits, labels = SURE.repeat(9, 1), RIGHT.repeat(9)
    loss = AdaFocal(bins=4, switch=switch, start=switch)
    found = loss.updated(logits, labels)  # equal confidences share the lowest bin
    assert found.gammas[0] != loss.gammas[0]
    assert torch.equal(found.gammas[1:], loss.gammas[1:])


@pytest.mark.parametrize("rows", [1, 2, 14])
def test_fewer_rows_than_bins_are_enough_at_any_precision(rows, batch):
    logits, labels = batch(rows)
    found = AdaFocal().updated(logits.bfloat16().requires_grad_(), labels)
    assert found.gammas.isfinite().all()
    assert not found.gammas.requires_grad
    assert (found.edges.dtype, found.gammas.dtype) == (torch.float32, torch.float32)
    assert found.edges.shape == (14,)
    assert (found.edges.diff() >= 0).all()


def test_state_is_given_back_by_a_checkpoint_or_copied_into_place(batch):
    loss, rows = AdaFocal(reduction="sum").updated(*batch(60)), batch(seed=4)
    again = AdaFocal(reduction="sum").restored({k: v.clone() for k, v in loss.state().items()})
    copied = AdaFocal(reduction="sum")
    for key, value in loss.state().items():
        copied.state()[key].copy_(value)
    for other in (again, copied):
        assert torch.equal(other(*rows), loss(*rows))
        assert torch.equal(other.updated(*rows).gammas, loss.updated(*rows).gammas)
    assert AdaFocal.needs_held_out
    moved = AdaFocal().to("meta").state().values()
    assert [kept.device.type for kept in moved] == ["meta", "meta"]


def test_foreign_state_and_useless_held_out_rows_are_refused(batch):
    for state, culprit in [
        ({}, "state holds"),
        ({"edges": torch.zeros(14)}, "state holds .*edges"),
        ({"edges": torch.zeros(3), "gammas": torch.zeros(15)}, r"edges has shape \(3,\).*\(14,\)"),
        ({"edges": torch.zeros(14), "gammas": torch.zeros(2)}, r"gammas has shape .*\(15,\)"),
    ]:
        with pytest.raises(InputError, match=f"adafocal: {culprit}"):
            AdaFocal().restored(state)
    logits, labels = batch(20)
    for bad in (float("nan"), float("inf")):
        diverged = logits.clone()
        diverged[3, 1] = bad
        with pytest.raises(InputError, match="adafocal: logits hold NaN or infinity"):
            AdaFocal().updated(diverged, labels)
    for label in (-1, 5):
        with pytest.raises(InputError, match=r"adafocal: labels .* from 0 to 4"):
            AdaFocal().updated(logits, torch.full_like(labels, label))
    with pytest.raises(InputError, match="adafocal: labels are"):
        AdaFocal().updated(logits, labels[:3])
