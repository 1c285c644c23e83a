"""Focal losses against loops, and the Lambert W rule against scipy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.special import lambertw

from featcal import InputError
from featcal.losses import CE, FLSD, FLSc, Focal
from featcal.losses.focal import balancing_gamma, lower_branch


def label_probs(logits, labels):
    return logits.softmax(1).gather(1, labels[:, None])[:, 0].tolist()


def looped(logits, labels, gamma_of):
    rows = [-((1 - p) ** gamma_of(p)) * math.log(p) for p in label_probs(logits, labels)]
    return sum(rows) / len(rows)


@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0, 3.0, 5.0])
def test_focal_of_a_loop(gamma, batch):
    logits, labels = batch(50)
    want = looped(logits, labels, lambda p: gamma)
    assert Focal(gamma=gamma)(logits, labels).item() == pytest.approx(want, rel=1e-12)


def test_no_gamma_is_cross_entropy_bit_for_bit(batch):
    logits, labels = batch(50, scale=8.0)
    for dtype in (torch.float32, torch.float64):
        cast = logits.to(dtype)
        assert torch.equal(Focal(gamma=0)(cast, labels), CE()(cast, labels))


def test_float32_is_accurate_on_both_sides_of_one_half(batch):
    logits, labels = batch(400, scale=4.0)
    got = Focal().rows(logits.float(), labels).double()
    torch.testing.assert_close(got, Focal().rows(logits, labels), rtol=3e-5, atol=1e-12)


def test_flsd_of_a_loop(batch):
    logits, labels = batch(80)
    want = looped(logits, labels, lambda p: 5.0 if p < 0.2 else 3.0)
    assert FLSD()(logits, labels).item() == pytest.approx(want, rel=1e-12)
    want = looped(logits, labels, lambda p: 4.0 if p < 0.35 else 1.5)
    loss = FLSD(low=4, high=1.5, threshold=0.35)
    assert loss(logits, labels).item() == pytest.approx(want, rel=1e-12)


def test_flsd_takes_the_upper_gamma_at_the_threshold():
    probs = torch.tensor([0.19999, 0.2, 0.5, 1.0], dtype=torch.float64)
    assert FLSD().gammas(probs).tolist() == [5.0, 3.0, 3.0, 3.0]


def test_the_closed_form_of_a_loop(batch):
    logits, labels = batch(80)

    def gamma_of(p):
        if p >= 0.2:
            return 3.0
        a, b = 1 - p, p * math.log(p)
        inside = -(a ** (1 - a / b)) / b * math.log(a)
        return a / b + lambertw(inside, -1).real / math.log(a)

    want = looped(logits, labels, gamma_of)
    assert FLSD(closed_form=True)(logits, labels).item() == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_below_the_threshold_the_closed_form_pulls_as_cross_entropy(dtype, batch):
    logits, labels = batch(200, scale=6.0)
    logits = logits.to(dtype).requires_grad_()
    (focal,) = torch.autograd.grad(FLSD(closed_form=True)(logits, labels), logits)
    (plain,) = torch.autograd.grad(CE()(logits, labels), logits)
    low = torch.tensor(label_probs(logits, labels)) < 0.2
    assert 20 < low.sum() < 180
    tight = (
        {"rtol": 1e-4, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 1e-8, "atol": 1e-12}
    )
    torch.testing.assert_close(focal[low], plain[low], **tight)


@given(st.floats(0, 60))
def test_the_lower_branch_is_scipys(excess):
    got = lower_branch(torch.tensor([excess], dtype=torch.float64)).item()
    assert got - math.log(got) == pytest.approx(1 + excess, rel=1e-12)
    if excess > 1e-6:  # scipy loses half of the digits next to the branch point
        assert got == pytest.approx(-lambertw(-math.exp(-1 - excess), -1).real, rel=1e-7)


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


def test_the_balancing_gamma_of_float32_is_computed_in_float64():
    probs = torch.tensor([1e-20, 0.02, 0.2, 0.4, 0.49, 0.499])
    assert torch.equal(balancing_gamma(probs), balancing_gamma(probs.double()).float())


def test_gamma_falls_from_huge_to_none():
    probs = torch.tensor([0.0, 1e-35, 1e-30, 1e-6, 0.1, 0.2, 0.4, 0.5, 0.7, 1.0])
    gamma = balancing_gamma(probs)
    assert gamma.isfinite().all()
    assert (gamma.diff() <= 0).all()
    assert gamma[-3:].tolist() == [0, 0, 0]
    assert not balancing_gamma(torch.full((2,), 0.3, requires_grad=True)).requires_grad


def test_the_published_constants_are_near_the_rule():
    at = balancing_gamma(torch.tensor([0.2, 0.25], dtype=torch.float64)).numpy()
    assert np.round(at).tolist() == [5, 3]


@pytest.mark.parametrize(
    ("epoch", "gamma"), [(0, 5), (99, 5), (100, 3), (249, 3), (250, 1), (349, 1), (350, 1)]
)
def test_flsc_changes_at_the_published_epochs(epoch, gamma):
    assert FLSc().at(epoch / 350) == Focal(gamma=gamma)
    assert FLSc(reduction="sum").at(epoch / 350) == Focal(gamma=gamma, reduction="sum")


@pytest.mark.parametrize("epochs", [7, 35, 70, 140])
def test_flsc_changes_on_the_epoch_of_shorter_schedules(epochs):
    stages = [FLSc().at(epoch / epochs).gamma for epoch in range(epochs)]
    assert [stages.count(gamma) * 7 / epochs for gamma in (5.0, 3.0, 1.0)] == [2, 3, 2]


def test_flsc_is_one_object_a_stage():
    assert FLSc().at(0.3) is FLSc().at(0.4)


def test_flsc_by_itself_is_its_first_stage(batch):
    logits, labels = batch()
    assert torch.equal(FLSc()(logits, labels), Focal(gamma=5)(logits, labels))


@pytest.mark.parametrize("progress", [-0.1, 1.1, float("nan"), "0.5"])
def test_progress_is_checked(progress):
    with pytest.raises(InputError, match=r"flsc: progress is .* from 0 to 1"):
        FLSc().at(progress)


@pytest.mark.parametrize("gammas", [(5, 3), 5, "531", None, (5, 3, -1), (5, 3, "1")])
def test_stages_are_checked(gammas):
    with pytest.raises(InputError, match="flsc: gammas is"):
        FLSc(gammas=gammas)


def test_stages_may_be_a_list():
    assert FLSc(gammas=[4, 2, 1]) == FLSc(gammas=(4.0, 2.0, 1.0))
    assert repr(FLSc(gammas=[4, 2, 1])) == "flsc(gammas=(4.0, 2.0, 1.0))"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"low": -1}, "low is -1: give a number from 0 up"),
        ({"high": None}, "high is None: give a number from 0 up"),
        ({"threshold": 1.1}, "threshold is 1.1: give a number from 0 to 1"),
        ({"threshold": 0.6, "closed_form": True}, "threshold is 0.6: give a number from 0 to 0.5"),
        ({"closed_form": 1}, "closed_form is 1: give True or False"),
    ],
)
def test_flsd_is_checked(arguments, says):
    with pytest.raises(InputError, match=f"flsd: {says}"):
        FLSD(**arguments)
