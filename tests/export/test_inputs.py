"""Inputs: names, axes of any size, and what is refused."""

import pytest
import torch
from torch import nn

from featcal import InputError, parse
from featcal.export.inputs import Inputs


class Two(nn.Module):
    def forward(self, left, right=None):
        return left if right is None else left + right


class Any(nn.Module):
    def forward(self, first, *rest):
        return first + sum(rest)


ROWS = torch.arange(12.0).view(4, 3)


def test_inputs_have_the_names_of_forward():
    assert list(Inputs.of(Two(), ROWS).values) == ["left"]
    assert list(Inputs.of(Two(), (ROWS, ROWS)).values) == ["left", "right"]
    assert list(Inputs.of(Two(), {"right": ROWS, "left": ROWS}).values) == ["right", "left"]
    assert list(Inputs.of(Any(), [ROWS, ROWS, ROWS]).values) == ["first", "input_1", "input_2"]


def test_the_first_axis_of_every_input_is_free_unless_told_otherwise():
    assert Inputs.of(Two(), (ROWS, ROWS)).axes == {"left": {0: "batch"}, "right": {0: "batch"}}
    assert Inputs.of(Two(), ROWS, {"left": {1: "tokens"}}).axes == {"left": {1: "tokens"}}
    assert Inputs.of(Two(), ROWS, {}).axes == {}


def test_they_are_called_by_position_or_by_name():
    assert torch.equal(Inputs.of(Two(), (ROWS, ROWS)).call(Two()), 2 * ROWS)
    assert torch.equal(Inputs.of(Two(), {"right": ROWS, "left": ROWS}).call(Two()), 2 * ROWS)


def test_rows_are_chosen_in_the_inputs_that_have_them():
    table = torch.ones(5, 3)
    inputs = Inputs.of(Two(), (ROWS, table), {"left": {0: "batch"}})
    assert inputs.rows == 4
    assert torch.equal(inputs.repeated(6).values["left"], ROWS[[0, 1, 2, 3, 0, 1]])
    assert inputs.at(slice(1, 2)).values["right"] is table
    assert Inputs.of(Two(), ROWS, {}).rows == 0
    assert Inputs.of(Two(), ROWS, {}).repeated(6).values["left"] is ROWS


def test_chunks_are_all_rows_in_order():
    inputs = Inputs.of(Two(), torch.arange(600.0).view(-1, 1))
    assert [part.rows for part in inputs.chunks()] == [256, 256, 88]
    assert torch.equal(
        torch.cat([part.values["left"] for part in inputs.chunks()]), inputs.values["left"]
    )
    assert len(list(Inputs.of(Two(), ROWS, {}).chunks())) == 1


def test_portable_inputs_are_wide():
    inputs = Inputs.of(Two(), (ROWS.bfloat16(), torch.ones(4, 1, dtype=torch.int32))).portable()
    assert [value.dtype for value in inputs.values.values()] == [torch.float32, torch.int32]


@pytest.mark.parametrize(
    ("model", "example", "dynamic", "text"),
    [
        (Two(), None, None, "example is NoneType: give a tensor, a tuple of them, or a dict"),
        (Two(), (), None, "example is tuple"),
        (Two(), (ROWS, 3), None, "right is int: every input is a tensor"),
        (Two(), (ROWS, ROWS[:2]), None, "same number of rows.*say with dynamic="),
        (Two(), torch.tensor(1.0), None, "same number of rows, at least one"),
        (Two(), ROWS[:0], None, "at least one"),
        (Two(), ROWS, {"middle": {0: "batch"}}, "'middle' is no input; there are left"),
        (Two(), ROWS, {"left": {2: "batch"}}, "left has 2 axes, and 2: 'batch' is no name"),
        (Two(), ROWS, {"left": {0: 5}}, "0: 5 is no name of a size"),
        (parse("temperature"), ROWS, None, r"Temperature is no model.*calibrator\.wrap\(head\)"),
        (lambda x: x, ROWS, None, "function is no model: give an nn.Module"),
        (nn.DataParallel(Two()), ROWS, None, "model.module"),
    ],
)
def test_what_cannot_be_read_is_refused(model, example, dynamic, text):
    with pytest.raises(InputError, match=text):
        Inputs.of(model, example, dynamic)


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (ROWS, "rows must hold what the example holds: left, right"),
        ({"left": ROWS, "middle": ROWS}, "rows must hold what the example holds"),
        ((ROWS, ROWS.double()), "right is float64 .* the example has float32"),
        ((ROWS, ROWS[:, :2]), r"right is float32 \(4, 2\), the example has float32 \(4, 3\)"),
        ((ROWS, ROWS[:2]), "same number of rows"),
        ((ROWS, [1]), "right is list"),
    ],
)
def test_rows_must_be_of_the_kind_of_the_example(rows, text):
    with pytest.raises(InputError, match=text):
        Inputs.of(Two(), (ROWS, ROWS)).like(rows)


def test_other_rows_take_the_place_of_the_example():
    inputs = Inputs.of(Two(), (ROWS, ROWS)).like({"right": ROWS[:2], "left": -ROWS[:2]})
    assert torch.equal(inputs.values["left"], -ROWS[:2])
    assert inputs.rows == 2


def test_a_model_that_does_not_take_the_example_says_what_it_was_given():
    with pytest.raises(InputError, match=r"does not take the example \(input: float32 \(4, 3\)\)"):
        Inputs.of(nn.Linear(5, 2), ROWS).call(nn.Linear(5, 2))
