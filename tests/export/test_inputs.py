"""Inputs by name, and which tensor of the output is exported: proved, or refused."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from featcal import InputError, attach, parse
from featcal.export.inputs import Inputs, Output, proved_output

# --- inputs -----------------------------------------------------------------------------------

ROWS = torch.arange(12.0).view(4, 3)


class Two(nn.Module):
    def forward(self, left, right=None):
        return left if right is None else left + right


class Any(nn.Module):
    def forward(self, first, *rest):
        return first + sum(rest)


def test_inputs_have_the_names_of_forward_and_are_called_by_them():
    assert list(Inputs.of(Two(), ROWS).values) == ["left"]
    assert list(Inputs.of(Any(), [ROWS, ROWS, ROWS]).values) == ["first", "input_1", "input_2"]
    for example in ((ROWS, -ROWS), {"right": -ROWS, "left": ROWS}):
        inputs = Inputs.of(Two(), example)
        assert set(inputs.values) == {"left", "right"}
        assert not inputs.call(Two()).any()


def test_the_first_axis_of_every_input_is_free_unless_told_otherwise():
    assert Inputs.of(Two(), (ROWS, ROWS)).axes == {"left": {0: "batch"}, "right": {0: "batch"}}
    assert Inputs.of(Two(), ROWS, {"left": {1: "tokens"}}).axes == {"left": {1: "tokens"}}
    assert Inputs.of(Two(), ROWS, {}).axes == {}


def test_rows_are_chosen_in_the_inputs_that_have_them():
    table = torch.ones(5, 3)
    inputs = Inputs.of(Two(), (ROWS, table), {"left": {0: "batch"}})
    assert inputs.rows == 4
    assert torch.equal(inputs.repeated(6).values["left"], ROWS[[0, 1, 2, 3, 0, 1]])
    assert inputs.at(slice(1, 2)).values["right"] is table
    fixed = Inputs.of(Two(), ROWS, {})
    assert (fixed.rows, fixed.repeated(6), list(fixed.chunks())) == (0, fixed, [fixed])
    many = Inputs.of(Two(), torch.arange(600.0).view(-1, 1))
    assert [part.rows for part in many.chunks()] == [256, 256, 88]
    parts = [part.values["left"] for part in many.chunks()]
    assert torch.equal(torch.cat(parts), many.values["left"])


def test_other_rows_take_the_place_of_the_example_and_are_made_portable():
    whole = torch.ones(4, 1, dtype=torch.int32)
    inputs = Inputs.of(Two(), (ROWS.half(), whole))
    other = inputs.like(Two(), {"right": whole[:2], "left": -ROWS[:2].half()})
    assert (other.rows, float(other.values["left"].sum())) == (2, -15)
    assert [v.dtype for v in other.portable().values.values()] == [torch.float32, torch.int32]


@pytest.mark.parametrize(
    ("model", "example", "dynamic", "text"),
    [
        (Two(), None, None, "example is NoneType"),
        (Two(), (), None, "example is tuple"),
        (Two(), (ROWS, 3), None, "example is tuple"),
        (Two(), (ROWS, ROWS[:2]), None, "same number of rows.*say with dynamic="),
        (Two(), torch.tensor(1.0), None, "same number of rows, at least one"),
        (Two(), ROWS[:0], None, "at least one"),
        (Two(), ROWS, {"middle": {0: "batch"}}, "middle: .* the inputs are left"),
        (Two(), ROWS, {"left": {2: "batch"}}, "left: .*2: 'batch'.* must name axes"),
        (Two(), ROWS, {"left": {0: 5}}, "left: .*0: 5.* must name axes"),
        (parse("temperature"), ROWS, None, r"Temperature is no model.*calibrator\.wrap\(head\)"),
        (lambda x: x, ROWS, None, "function is no model: give an nn.Module"),
        (nn.DataParallel(Two()), ROWS, None, "model.module"),
    ],
)
def test_what_cannot_be_read_is_refused(model, example, dynamic, text):
    with pytest.raises(InputError, match=text):
        Inputs.of(model, example, dynamic)


def test_rows_must_be_of_the_kind_of_the_example():
    inputs = Inputs.of(Two(), (ROWS, ROWS))
    for rows in (ROWS, {"left": ROWS, "middle": ROWS}, (ROWS, ROWS[:, :2]), (ROWS, ROWS.int())):
        with pytest.raises(InputError, match="give rows of the same kind"):
            inputs.like(Two(), rows)
    with pytest.raises(InputError, match="same number of rows"):
        inputs.like(Two(), (ROWS, ROWS[:2]))


# --- outputs ----------------------------------------------------------------------------------

SAMPLES = torch.randn(7, 6, generator=torch.Generator().manual_seed(3))
LOGITS, PROBABILITIES = Output(0, "logits"), Output(0, "probabilities")


class Net(nn.Module):
    """Two heads of the same shape; gives whatever it is told to make of features and logits."""

    def __init__(self, give, classes=3):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.body, self.a, self.b = nn.Linear(6, 8), nn.Linear(8, classes), nn.Linear(8, classes)
        for weight in self.parameters():
            weight.data = torch.randn(weight.shape, generator=generator)
        self.give = give

    def forward(self, x):
        h = self.body(x).relu()
        return self.give(h, self.a(h), self.b(h))


def calibrated(give, head="b", classes=3):
    calibrator = parse("temperature").assign(temperature=torch.tensor(1.7))
    return attach(Net(give, classes), calibrator, head=head)


def found(model, rows=SAMPLES):
    output = proved_output(model.eval(), Inputs.of(model, rows))
    assert not any(module._forward_hooks for module in model.modules())
    return output


PLAIN_TOO = [  # of a model with and without a calibrated head
    (lambda h, a, b: (h, b), Output(1)),
    (lambda h, a, b: {"h": h, "scores": b}, Output(1)),
    (lambda h, a, b: (h.sum(), b.argmax(1), 2 * b), Output(2)),
    (lambda h, a, b: b.half(), LOGITS),
    (lambda h, a, b: b.log_softmax(1), LOGITS),
    (lambda h, a, b: b.bfloat16().softmax(1), PROBABILITIES),
    (lambda h, a, b: b[..., None, None].softmax(1), PROBABILITIES),
]


@pytest.mark.parametrize(("give", "expected"), PLAIN_TOO)
def test_the_output_is_what_stands_behind_the_last_layer(give, expected):
    assert found(Net(give)) == found(calibrated(give)) == expected


@pytest.mark.parametrize(
    ("give", "expected"),
    [
        (lambda h, a, b: (a, b), Output(1)),
        (lambda h, a, b: (b.softmax(1), b), Output(1)),  # logits before their probabilities
        (lambda h, a, b: (b.softmax(1), h), PROBABILITIES),
        (lambda h, a, b: 2 * b, LOGITS),  # made by no layer: told by its numbers
        (lambda h, a, b: (a.softmax(1) + b.softmax(1)) / 2, PROBABILITIES),
        (lambda h, a, b: b.sigmoid_().neg_(), LOGITS),  # a change in place is no proof
    ],
)
def test_the_output_of_a_calibrated_model(give, expected):
    assert found(calibrated(give)) == expected


@pytest.mark.parametrize("make", [Net, calibrated])
@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
def test_one_value_per_row_is_a_logit_or_its_sigmoid(make, shape):
    assert found(make(lambda h, a, b: b.reshape(shape), classes=1)) == LOGITS
    assert found(make(lambda h, a, b: b.sigmoid().reshape(shape), classes=1)) == PROBABILITIES


def second_head():
    """By hand: a calibrator on the other head too."""
    model = calibrated(lambda h, a, b: (a, b), head="a")
    model.b = parse("temperature").wrap(model.b)
    return model


def uncalled():
    model = calibrated(lambda h, a, b: b)
    model.forward = lambda x: model.a(model.body(x))
    return model


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (Net(lambda h, a, b: (a, b)), r"several tensors .* \(7, 3\), \(7, 3\)\): let it give"),
        (second_head(), "several tensors"),
        (calibrated(lambda h, a, b: (2 * a, 2 * b)), "several tensors that may be its logits"),
        (calibrated(lambda h, a, b: functional.logsigmoid(b), classes=1), "log-sigmoid"),
        (calibrated(lambda h, a, b: b.sigmoid()), "a sample may be of several classes"),
        (Net(lambda h, a, b: functional.logsigmoid(b)), "a sample may be of several classes"),
        (calibrated(lambda h, a, b: b.sigmoid() ** 2), "values from 0 to 1.* some logit"),
        (Net(lambda h, a, b: None), "a NoneType without logits: let it give"),
        (Net(lambda h, a, b: {"class": b.argmax(1)}), "a dict without logits"),
        (Net(lambda h, a, b: torch.stack([a, b], 2).softmax(1) / 2), r"of shape \(7, 3, 2\)"),
        (uncalled(), "does not call its calibrated layer 'b'"),
        (calibrated(lambda h, a, b: {"logits": a, "b": b}), "do not come from .* layer 'b'"),
        (calibrated(lambda h, a, b: 2 * a), "do not come from its calibrated layer 'b'"),
        (nn.Linear(5, 2), r"does not take the example \(input: float32 \(7, 6\)\)"),
    ],
)
def test_outputs_that_cannot_be_told_are_refused(model, text):
    with pytest.raises(InputError, match=text):
        found(model)


def test_a_single_row_one_position_and_a_mapped_layer():
    one = calibrated(lambda h, a, b: b.softmax(1).squeeze(0))
    assert found(one, SAMPLES[:1]) == PROBABILITIES

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.score = parse("temperature").wrap(nn.Linear(2, 3))

        def forward(self, x):
            return self.score(x.reshape(-1, 3, 2))[:, 1]

    assert found(Last()) == LOGITS
    clip = parse("clip").assign(threshold=torch.tensor(0.5))
    model = attach(Net(lambda h, a, b: (h, b.softmax(1))), clip, head="b", layer="body")
    assert found(model) == Output(1, "probabilities")
