"""The comparison of a file with its model: what is measured, forgiven and refused."""

import math

import pytest
import torch
from torch import nn

from featcal import InputError, parse
from featcal.export.inputs import Inputs, Output
from featcal.export.onnx_file import Parity, compare

ROWS = torch.tensor([[2.0, 0.0, 1.0], [0.0, 20.0, 1.0], [0.5, 0.4, 0.0]])


def compared(theirs, *, rows=ROWS, model=None, **options):
    """The comparison of the rows themselves, as a model's logits, with others."""
    model = nn.Identity() if model is None else model
    options = {"tolerance": 1e-4, "output": Output(), **options}
    return compare(model, lambda batch: theirs, [Inputs.of(model, rows)], **options)


def test_differences_are_the_largest_of_all_rows():
    theirs = ROWS.clone()
    theirs[2, 1] = 0.6
    parity = compared(theirs, tolerance=1.0)
    assert parity.max_difference == pytest.approx(0.2)
    expected = (theirs.softmax(1) - ROWS.softmax(1)).abs().max()
    assert parity.max_probability_difference == pytest.approx(float(expected))
    assert parity.predictions_changed == 1
    assert str(parity).endswith("0.2, 1 prediction changed")


def test_the_tolerance_is_in_parts_of_the_logits_and_never_less_than_itself():
    theirs = ROWS.clone()
    theirs[1, 0] += 0.0015  # the row's top logit is 20
    theirs[2, 2] += 0.00005  # below 1
    assert compared(theirs).holds
    theirs[2, 2] += 0.0001
    parity = compared(theirs)
    assert not parity.holds
    assert parity.rows_beyond == 1
    assert parity.as_json()["holds"] is False


@pytest.mark.parametrize("mask", [-1e9, -torch.inf])
def test_a_masked_class_excuses_no_other(mask):
    masked = ROWS.clone()
    masked[:, 0] = mask
    theirs = masked.clone()
    theirs[2, 1] += 0.01
    equal = compared(masked.clone(), rows=masked)
    assert equal == Parity(3, 0.0, 0.0, 0, 1e-4)
    assert str(equal).endswith("logits differ by at most 0, no prediction changed")
    assert compared(theirs, rows=masked).rows_beyond == 1
    if mask == -torch.inf:
        assert compared(ROWS, rows=masked).as_json()["max_difference"] is None  # JSON has no inf


def test_nan_of_the_file_alone_does_not_hold_and_nan_of_the_model_is_refused():
    broken = ROWS.clone()
    broken[0, 0] = torch.nan
    assert compared(broken).rows_beyond == 1
    with pytest.raises(InputError, match="the model gives NaN"):
        compared(ROWS, rows=broken)


def test_other_shapes_are_refused():
    with pytest.raises(InputError, match=r"gives \(2, 3\), the model \(3, 3\)"):
        compared(ROWS[:2])


def test_a_single_logit_is_predicted_by_its_sign():
    ours, theirs = torch.tensor([1.0, -1e-8, 2.0]), torch.tensor([1.0, 1e-8, 2.0])
    parity = compared(theirs, rows=ours)
    assert parity.holds
    assert parity.predictions_changed == 1
    assert parity.max_probability_difference < 1e-7


def test_probabilities_are_compared_as_they_are():
    probs = ROWS.softmax(1)
    theirs = probs.clone()
    theirs[2] = torch.tensor([0.3, 0.5, 0.2])
    parity = compared(theirs, rows=probs, output=Output(0, "probabilities"))
    assert parity.max_difference == parity.max_probability_difference
    assert parity.max_difference == pytest.approx(float((theirs - probs).abs().max()))
    assert (parity.rows_beyond, parity.predictions_changed) == (1, 1)
    assert "; " not in str(parity)
    assert "ONNX Runtime: probabilities differ by at most" in str(parity)
    assert parity.as_json()["output"] == "probabilities"


def test_one_probability_is_predicted_by_the_half():
    ours, theirs = torch.tensor([0.4, 0.49999, 0.9]), torch.tensor([0.4, 0.50001, 0.9])
    parity = compared(theirs, rows=ours, output=Output(0, "probabilities"))
    assert (parity.holds, parity.predictions_changed) == (True, 1)


@pytest.fixture(scope="module")
def steps():
    """A histogram's head, and a row just below and one just above its one edge."""
    head = parse("histogram").wrap().eval()
    head.calibrator.assign(edges_at=torch.tensor([1.0]), values=torch.tensor([0.5, 2.0]))
    edge = 1 + math.log1p(math.exp(-9))
    low, high = (torch.tensor([[edge + by, -9.0, 0.0]]) for by in (-2e-6, 2e-6))
    return head, low, high


def test_a_row_at_an_edge_may_fall_on_either_side(steps):
    head, low, high = steps
    with torch.no_grad():
        below, above = head(low), head(high)
    assert (below - above).abs().max() > 0.01
    for rows, theirs in ((low, above), (high, below)):
        parity = compared(theirs, rows=rows, model=head)
        assert parity.holds
        assert parity.rows_at_edges == 1
        assert str(parity).endswith("; 1 row at an edge left out")
    assert not any(module._forward_pre_hooks for module in head.modules())


def test_only_the_other_side_of_that_edge_is_forgiven(steps):
    head, low, high = steps
    with torch.no_grad():
        above = head(high)
    assert not compared(above + 0.01, rows=low, model=head).holds
    assert not compared(above, rows=low - torch.tensor([[0.1, 0.0, 0.0]]), model=head).holds


def test_a_map_without_steps_has_no_edges():
    model = parse("temperature").wrap()
    assert compared(ROWS + 0.01, model=model).rows_at_edges == 0
