"""What holds for every loss there is."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from featcal import InputError
from featcal.core.checks import check_choice
from featcal.losses import CE, LOSSES, Focal, RowLoss, TrainingLoss, parse_loss

NAMES = sorted(LOSSES)
FORMS = [
    *NAMES,
    "adafocal(bins=1)",
    "dual_focal(gamma=0.3)",
    "flsd(closed_form=True)",
    "focal(gamma=0.0)",
    "focal(gamma=0.01)",
    "label_smoothing(spread='all')",
    "max_entropy(beta=3.0)",
    "mmce(variant='weighted', form='published')",
    "mmce(variant='weighted')",
    "mmce(form='published')",
    "soft_ece(norm=1)",
    "soft_ece(temperature=1e-05)",
]
every = pytest.mark.parametrize("text", FORMS)


def value_and_slope(loss, logits, labels):
    leaf = logits.detach().clone().requires_grad_()
    value = loss(leaf, labels)
    (slope,) = torch.autograd.grad(value, leaf)
    return value.detach(), slope


def test_the_ids_are_those_promised():
    assert [
        *("adafocal", "brier", "ce", "dual_focal", "flsc", "flsd", "focal", "label_smoothing"),
        *("max_entropy", "mmce", "soft_ece"),
    ] == NAMES


@every
def test_the_gradient_is_that_of_the_value(text, batch):
    if text == "flsd(closed_form=True)":
        pytest.skip("gamma moves with p and has no gradient: see test_focal")
    logits, labels = batch(n=9)
    loss = parse_loss(text)
    assert torch.autograd.gradcheck(lambda z: loss(z, labels), logits.requires_grad_())


@every
@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("truth", ["right", "wrong", "any"])
def test_extremes_have_finite_values_and_slopes(text, classes, rows, truth, batch):
    logits, labels = batch(rows, classes)
    labels = {"right": logits.argmax(1), "wrong": logits.argmin(1), "any": labels}[truth]
    loss = parse_loss(text)
    for scale in (0.0, 1e-8, 17.0, 80.0, 1e4):
        for dtype in (torch.float32, torch.float64):
            value, slope = value_and_slope(loss, (logits * scale).to(dtype), labels)
            assert value.isfinite()
            assert slope.isfinite().all()


@every
def test_one_logit_at_each_end_of_the_range(text):
    logits = torch.tensor([[1e4, -1e4], [-1e4, 1e4], [0.0, 0.0]])
    for labels in ([0, 1, 0], [1, 0, 1], [1, 1, 1]):
        value, slope = value_and_slope(parse_loss(text), logits, torch.tensor(labels))
        assert value.isfinite()
        assert slope.isfinite().all()


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_computed_in_float32(text, dtype, batch):
    logits, labels = batch()
    loss = parse_loss(text)
    narrow, slope = value_and_slope(loss, logits.to(dtype), labels)
    assert (narrow.dtype, slope.dtype) == (torch.float32, dtype)
    assert torch.equal(narrow, loss(logits.to(dtype).float(), labels))
    assert loss(logits, labels).dtype == torch.float64
    assert float(loss(logits.float(), labels)) == pytest.approx(float(loss(logits, labels)), 1e-5)


@every
def test_autocast_changes_nothing(text, batch):
    logits, labels = batch()
    loss, logits = parse_loss(text), logits.float()
    with torch.autocast("cpu", torch.bfloat16):
        inside = loss(logits, labels)
    assert torch.equal(inside, loss(logits, labels))


@every
def test_the_sum_is_n_times_the_mean(text, batch):
    logits, labels = batch(n=11)
    loss = parse_loss(text)
    summed = dataclasses.replace(loss, reduction="sum")
    torch.testing.assert_close(summed(logits, labels), 11 * loss(logits, labels))
    assert "reduction='sum'" in repr(summed)
    if isinstance(loss, RowLoss):
        torch.testing.assert_close(summed(logits, labels), loss.rows(logits, labels).sum())
    else:
        with pytest.raises(InputError, match=f"{loss.name}: it is no mean over rows"):
            loss.rows(logits, labels)


@every
def test_the_order_of_rows_does_not_matter(text, batch):
    logits, labels = batch()
    loss, order = parse_loss(text), torch.randperm(12, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(loss(logits[order], labels[order]), loss(logits, labels))


@every
def test_adding_a_number_to_a_row_changes_nothing(text, batch):
    logits, labels = batch()
    loss = parse_loss(text)
    torch.testing.assert_close(
        loss(logits + torch.arange(12)[:, None], labels), loss(logits, labels)
    )


@every
def test_a_loss_is_a_value(text, batch):
    loss, again = parse_loss(text), parse_loss(text)
    assert loss == again
    assert hash(loss) == hash(again)
    assert repr(loss) == text
    with pytest.raises(dataclasses.FrozenInstanceError):
        loss.reduction = "sum"
    logits, labels = batch()
    for other in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss)), loss.to("cpu")):
        assert other == loss
        assert torch.equal(other(logits, labels), loss(logits, labels))


@pytest.mark.parametrize("text", NAMES)
def test_a_network_learns(text, batch):
    inputs, labels = batch(n=40, k=6, scale=1.0)
    labels = inputs[:, :3].argmax(1)
    torch.manual_seed(0)
    net, loss = nn.Linear(6, 3).double(), parse_loss(text)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    before = (net(inputs).argmax(1) == labels).double().mean()
    for _ in range(60):
        optimizer.zero_grad()
        loss(net(inputs), labels).backward()
        optimizer.step()
    after = (net(inputs).argmax(1) == labels).double().mean()
    assert after >= max(0.85, before)


@pytest.mark.parametrize("name", NAMES)
def test_classes_are_final_and_documented(name):
    loss = LOSSES[name]
    assert loss.__final__
    assert loss.name == name
    assert loss.title
    told = loss.__doc__
    assert all(f"{key}:" in told for key in loss.arguments() if len(loss.arguments()) > 1)


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"flsc", "adafocal"}))
def test_most_losses_never_change(name, batch):
    loss = LOSSES[name]()
    assert loss.at(0.9) is loss
    assert loss.updated(*batch()) is loss
    assert loss.state() == {}
    assert loss.restored({}) is loss
    assert not loss.needs_held_out
    with pytest.raises(InputError, match=f"{name}: state holds edges: this loss has no state"):
        loss.restored({"edges": torch.zeros(2)})


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), True, "3", None, 10**400, [3]])
def test_numbers_are_checked(value):
    with pytest.raises(InputError, match=r"focal: gamma is .*: give a number from 0 up"):
        Focal(gamma=value)


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2), np.int64(2), np.float64(2)])
def test_numbers_of_any_kind_are_one_loss(value):
    assert Focal(gamma=value) == Focal(gamma=2.0)
    assert repr(Focal(gamma=value)) == "focal(gamma=2.0)"


def test_arguments_go_by_name():
    with pytest.raises(TypeError):
        Focal(3.0)


@pytest.mark.parametrize("value", ["none", None, 3, True])
def test_reduction_is_mean_or_sum(value):
    with pytest.raises(InputError, match=r"ce: reduction is .*: choose mean or sum"):
        CE(reduction=value)


def test_headings_tell_what_differs_from_the_title():
    assert CE(reduction="sum").heading == "Cross Entropy"
    assert Focal(gamma=3).heading == "Focal Loss"
    assert Focal(gamma=2, reduction="sum").heading == "focal(gamma=2.0, reduction='sum')"


def test_a_loss_of_ones_own_is_registered_and_a_name_is_taken_once(batch):
    try:

        @dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
        class Halved(RowLoss):
            name = "halved_for_a_test"
            title = "Halved"
            kind: str = "plain"

            def __post_init__(self):
                super().__post_init__()
                check_choice(self.name, "kind", self.kind, ("plain", "fancy"))

            def rows(self, logits, labels):
                return CE().rows(logits, labels) / 2

        found = parse_loss("halved_for_a_test(kind='fancy', reduction='sum')")
        logits, labels = batch()
        torch.testing.assert_close(found(logits, labels), CE()(logits, labels) * 6)
        with pytest.raises(TypeError, match="loss name 'halved_for_a_test' is taken by"):
            type("Other", (RowLoss,), {"name": "halved_for_a_test"})
    finally:
        LOSSES.pop("halved_for_a_test", None)


def test_the_base_classes_are_abstract():
    for base in (TrainingLoss, RowLoss):
        with pytest.raises(TypeError, match="abstract"):
            base()


@every
def test_nothing_reads_a_value_back(text):
    """Meta tensors have no values: what would read one, wait for it or mix devices fails."""
    loss = parse_loss(text).to("meta")
    logits = torch.empty(8, 5, device="meta", requires_grad=True)
    labels = torch.empty(8, dtype=torch.int64, device="meta")
    value = loss(logits, labels)
    value.backward()
    assert (value.shape, value.device.type) == ((), "meta")
    assert logits.grad.shape == (8, 5)
