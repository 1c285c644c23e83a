"""Are the stored logits those of the head, and are labels of use? By value, row and remedy."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from featcal import Batch, FeatureClip, InputError, Temperature
from featcal.core.fit import check_batch, check_same

DIFFERS = r"head\(features\) differs from the stored logits by"


@pytest.fixture
def logits():
    return 5 * torch.randn(50, 4, generator=torch.Generator().manual_seed(0))


def test_the_same_logits_pass_in_any_precision(logits):
    check_same(logits, logits)
    check_same(logits, logits + 1e-4)
    check_same(logits, logits.bfloat16())
    check_same(logits[:0], logits[:0])


@pytest.mark.parametrize("size", [0.02, 1e3])
def test_one_entry_that_differs_is_enough(logits, size):
    other = logits.clone()
    other[7, 2] += size
    with pytest.raises(InputError, match=DIFFERS):
        check_same(other, logits)


@pytest.mark.parametrize("masked", [1, 3])
def test_masked_classes_excuse_no_other(logits, masked):
    logits[:, :masked] = -1e9
    check_same(logits, logits)
    check_same(logits * (1 + 1e-5), logits)
    other = logits.clone()
    other[:, 3] += 0.1
    with pytest.raises(InputError, match=f"{DIFFERS} 0.1:"):
        check_same(other, logits)


def test_nan_and_infinity_of_the_head_differ_from_numbers(logits):
    for value in (float("nan"), float("inf"), -float("inf")):
        other = logits.clone()
        other[3, 1] = value
        with pytest.raises(InputError, match=f"{DIFFERS} inf"):
            check_same(other, logits)


def test_stored_values_that_are_not_finite_are_left_to_the_check_that_names_their_row(logits):
    stored = logits.clone()
    stored[3, 1] = float("nan")
    check_same(logits, stored)
    batch = Batch(stored, torch.zeros(50).long(), logits)
    with pytest.raises(InputError, match="logits are NaN or infinite in row 3"):
        Temperature().fit(batch, nn.Identity())


def test_a_top_near_zero_has_the_rounding_of_other_rows():
    stored = torch.tensor([[0.01, -40.0], [35.0, 1.0], [30.0, -3.0]], dtype=torch.bfloat16)
    check_same(stored.float() + 0.2, stored)


def test_a_missing_relu_beside_a_masked_class():
    torch.manual_seed(0)
    head, features = nn.Linear(8, 4), torch.randn(200, 8)
    with torch.no_grad():
        head.bias[3] = -1e9
        logits = head(features.relu())
    with pytest.raises(InputError, match=f"{DIFFERS}.*a missing ReLU"):
        FeatureClip().fit(Batch(logits, torch.arange(200) % 3, features), head)


@pytest.mark.parametrize(
    ("labels", "remedy"),
    [
        (F.one_hot(torch.arange(50) % 4), "take labels.argmax(1)"),
        (F.one_hot(torch.arange(50) % 4).float(), "take labels.argmax(1)"),
        (F.one_hot(torch.arange(50) % 4).bool(), "take labels.argmax(1)"),
        (torch.zeros(50, 1).long(), "take labels[:, 0]"),
        (torch.zeros(50, 1), "take labels[:, 0].long()"),
        (torch.zeros(50), "take labels.long()"),
        (torch.zeros(50).bool(), "take labels.long()"),
        (torch.full((50,), 0.5), "one integer a row"),
        (torch.full((50, 4), 0.25), "one integer a row"),
        (torch.zeros(50, 4, 2), "one integer a row"),
    ],
)
def test_labels_in_another_form_are_refused_with_what_to_take(labels, remedy, logits):
    with pytest.raises(InputError, match="one integer a row") as error:
        check_batch(Batch(logits, labels), classes=4)
    assert str(error.value).endswith(remedy)
