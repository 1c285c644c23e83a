"""AdaFocal: rows by bin, and the update against a loop."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from featcal import InputError
from featcal.losses import AdaFocal, Focal
from featcal.losses.focal import equal_mass_edges


def looped(logits, labels, edges, gammas):
    rows = []
    for q, y in zip(logits.softmax(1).tolist(), labels.tolist(), strict=True):
        gamma = gammas[sum(q[y] > edge for edge in edges)]
        base = 1 - q[y] if gamma >= 0 else 1 + q[y]
        rows.append(-(base ** abs(gamma)) * math.log(q[y]))
    return rows


def stepped(gamma, gap, *, rate=1.0, switch=0.2, smallest=-2.0, largest=20.0):
    new = gamma * math.exp(rate * gap) if gamma > 0 else gamma * math.exp(-rate * gap)
    if abs(new) < switch:
        new = -switch if gamma > 0 else switch
    return min(max(new, smallest), largest)


def test_at_first_it_is_focal_loss_with_gamma_one(batch):
    logits, labels = batch(40)
    torch.testing.assert_close(AdaFocal()(logits, labels), Focal(gamma=1)(logits, labels))


def test_each_row_has_the_gamma_of_its_own_probability(batch):
    logits, labels = batch(60)
    edges, gammas = torch.tensor([0.1, 0.3, 0.6]), torch.tensor([4.0, -0.5, 0.2, -2.0])
    loss = AdaFocal(bins=4, edges=edges, gammas=gammas)
    want = looped(logits, labels, edges.tolist(), gammas.tolist())
    assert loss.rows(logits, labels).tolist() == pytest.approx(want, rel=1e-6)


def test_a_negative_gamma_has_a_checked_gradient(batch):
    logits, labels = batch(10)
    loss = AdaFocal(bins=2, edges=torch.tensor([0.35]), gammas=torch.tensor([1.3, -1.7]))
    assert torch.autograd.gradcheck(lambda z: loss(z, labels), logits.requires_grad_())


def test_the_update_of_a_loop(batch):
    logits, labels = batch(90, scale=3.0)
    loss = AdaFocal(bins=6).updated(*batch(70, seed=5)).updated(*batch(80, seed=6))
    found = loss.updated(logits, labels)

    confidence = logits.softmax(1).amax(1).tolist()
    right = (logits.argmax(1) == labels).tolist()
    ordered = sorted(range(90), key=lambda i: confidence[i])
    want = []
    for part, gamma in zip(np.array_split(ordered, 6), loss.gammas.tolist(), strict=True):
        gap = sum(confidence[i] - right[i] for i in part) / len(part)
        want.append(stepped(gamma, gap))
    assert found.gammas.tolist() == pytest.approx(want, rel=1e-6)
    for edge, j in zip(found.edges.tolist(), range(15, 90, 15), strict=True):
        assert confidence[ordered[j - 1]] < edge < confidence[ordered[j]]


def test_the_update_leaves_the_loss_as_it_was(batch):
    loss = AdaFocal()
    edges, gammas = loss.edges.clone(), loss.gammas.clone()
    found = loss.updated(*batch(60))
    assert torch.equal(loss.edges, edges)
    assert torch.equal(loss.gammas, gammas)
    assert not torch.equal(found.gammas, gammas)
    assert found == loss  # one loss, at two points of training
    assert repr(found) == "adafocal"


def test_too_sure_raises_gamma_and_not_sure_enough_lowers_it():
    logits = torch.tensor([[3.0, 0.0]]).repeat(20, 1)
    wrong, right = torch.ones(20, dtype=torch.int64), torch.zeros(20, dtype=torch.int64)
    assert AdaFocal(bins=1).updated(logits, wrong).gammas.item() > 1
    assert AdaFocal(bins=1).updated(logits, right).gammas.item() < 1


def test_gamma_switches_sign_both_ways_and_stays_in_its_range():
    unsure, sure = torch.tensor([[0.1, 0.0]]), torch.tensor([[9.0, 0.0]])
    right, wrong = torch.tensor([0]), torch.tensor([1])
    loss = AdaFocal(bins=1, start=0.3)
    seen = [loss.gammas.item()]
    for _ in range(12):
        loss = loss.updated(unsure, right)
        seen.append(loss.gammas.item())
    assert seen[1] == pytest.approx(-0.2)
    assert seen[-1] == pytest.approx(-2.0)
    for _ in range(12):
        loss = loss.updated(sure, wrong)
    assert loss.gammas.item() == pytest.approx(20.0)


@settings(max_examples=40, deadline=None)
@given(st.floats(-2, 20).filter(lambda g: abs(g) >= 0.2), st.floats(0.05, 0.95), st.booleans())
def test_one_step_of_one_bin(gamma, confidence, right):
    confidence = max(confidence, 1 - confidence)
    logit = math.log(confidence / (1 - confidence))
    loss = AdaFocal(bins=1, gammas=torch.tensor([gamma]))
    held_out = torch.tensor([[logit, 0.0]], dtype=torch.float64), torch.tensor([int(not right)])
    if logit == 0:
        return
    old = loss.gammas.item()
    want = stepped(old, confidence - right)
    if abs(abs(old) * math.exp(math.copysign(1, old) * (confidence - right)) - 0.2) > 1e-6:
        assert loss.updated(*held_out).gammas.item() == pytest.approx(want, rel=1e-5)


def test_bins_without_rows_keep_their_gamma():
    logits, labels = torch.tensor([[2.0, 0.0]]).repeat(9, 1), torch.zeros(9, dtype=torch.int64)
    found = AdaFocal(bins=4).updated(logits, labels)  # equal confidences share the lowest bin
    assert found.gammas[0] < 1
    assert found.gammas[1:].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("switch", [0.2, 0.25, 0.35])  # float32 holds more, the same, less
def test_a_gamma_at_the_switch_stays_where_no_row_moves_it(switch):
    logits, labels = torch.tensor([[2.0, 0.0]]).repeat(9, 1), torch.zeros(9, dtype=torch.int64)
    loss = AdaFocal(bins=4, switch=switch, start=switch)
    assert torch.equal(loss.updated(logits, labels).gammas[1:], loss.gammas[1:])


@pytest.mark.parametrize("rows", [1, 2, 14])
def test_fewer_rows_than_bins_are_enough(rows, batch):
    found = AdaFocal().updated(*batch(rows))
    assert found.gammas.isfinite().all()
    assert found.edges.shape == (14,)
    assert (found.edges.diff() >= 0).all()


def test_the_order_of_held_out_rows_does_not_matter(batch):
    logits, labels = batch(60)
    one, two = (
        AdaFocal().updated(logits, labels),
        AdaFocal().updated(logits.flip(0), labels.flip(0)),
    )
    assert torch.equal(one.edges, two.edges)
    torch.testing.assert_close(one.gammas, two.gammas)


def test_sixteen_bit_outputs_and_no_gradient(batch):
    logits, labels = batch(60)
    found = AdaFocal().updated(logits.bfloat16().requires_grad_(), labels)
    assert (found.edges.dtype, found.gammas.dtype) == (torch.float32, torch.float32)
    assert not found.gammas.requires_grad


def test_state_is_given_back_by_a_checkpoint(batch):
    loss = AdaFocal(reduction="sum").updated(*batch(60))
    again = AdaFocal(reduction="sum").restored({k: v.clone() for k, v in loss.state().items()})
    logits, labels = batch(seed=4)
    assert torch.equal(again(logits, labels), loss(logits, labels))
    assert again.reduction == "sum"
    held_out = batch(50, seed=9)
    assert torch.equal(again.updated(*held_out).gammas, loss.updated(*held_out).gammas)


def test_state_names_the_tensors_themselves(batch):
    loss = AdaFocal()
    other = loss.updated(*batch(60))
    for key, value in other.state().items():
        loss.state()[key].copy_(value)
    logits, labels = batch()
    assert torch.equal(loss(logits, labels), other(logits, labels))


def test_its_state_goes_with_it_to_a_device():
    moved = AdaFocal().to("meta")
    assert [kept.device.type for kept in moved.state().values()] == ["meta", "meta"]


def test_it_asks_for_rows_of_its_own():
    assert AdaFocal.needs_held_out


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({}, "state holds nothing: give edges and gammas"),
        ({"edges": torch.zeros(14)}, "state holds edges: give edges and gammas"),
        (
            {"edges": torch.zeros(3), "gammas": torch.zeros(15)},
            r"edges is a tensor of shape \(3,\): 15 bins need a tensor of shape \(14,\)",
        ),
        ({"edges": torch.zeros(14), "gammas": torch.zeros(2)}, r"gammas is .*shape \(15,\)"),
        ({"edges": [0.5] * 14, "gammas": torch.zeros(15)}, "edges is .* need a tensor"),
    ],
)
def test_foreign_state_is_refused(state, says):
    with pytest.raises(InputError, match=f"adafocal: {says}"):
        AdaFocal().restored(state)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_diverged_network_is_told(bad, batch):
    logits, labels = batch(20)
    logits[3, 1] = bad
    with pytest.raises(InputError, match="adafocal: logits hold NaN or infinity"):
        AdaFocal().updated(logits, labels)


@pytest.mark.parametrize("label", [-100, -1, 5])
def test_the_update_refuses_labels_without_a_class(label, batch):
    logits, labels = torch.randn(8, 5), torch.zeros(8, dtype=torch.int64)
    labels[3] = label
    with pytest.raises(
        InputError, match=r"labels hold -?\d+ to \d: give class numbers from 0 to 4"
    ):
        AdaFocal().updated(logits, labels)


def test_the_update_checks_shapes(batch):
    logits, labels = batch(20)
    with pytest.raises(InputError, match=r"adafocal: labels are torch.int64 of shape"):
        AdaFocal().updated(logits, labels[:3])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"bins": 0}, "bins is 0: give a whole number from 1 up"),
        ({"rate": 0}, "rate is 0: give a number above 0"),
        ({"switch": 0}, "switch is 0: give a number above 0"),
        ({"smallest": 1}, r"smallest is 1: give a number up to -0.2 \(-switch\)"),
        ({"largest": 0.1}, r"largest is 0.1: give a number from 0.2 \(switch\) up"),
        ({"start": 0.1}, "start is 0.1: give a number from 0.2 to 20"),
        ({"start": 30}, "start is 30: give a number from 0.2 to 20"),
    ],
)
def test_hyperparameters_are_checked(arguments, says):
    with pytest.raises(InputError, match=f"adafocal: {says}"):
        AdaFocal(**arguments)


def test_edges_lie_halfway_between_groups_of_equal_size():
    values = torch.tensor([0.9, 0.1, 0.2, 0.6, 0.5, 0.3], dtype=torch.float64)
    assert equal_mass_edges(values, 3).tolist() == pytest.approx([0.25, 0.55])
    assert equal_mass_edges(values, 1).tolist() == []
