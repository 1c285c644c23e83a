"""One value a row stands for two classes: shapes, labels, digits, and what is refused."""

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from featcal import Batch, InputError, Temperature
from featcal.core.batch import Chunked, is_single, one_logit, two_classes, two_probs, zero_or_one
from featcal.core.fit import survey

Z = torch.tensor([-2.0, 0.0, 0.5, 3.0])
Y = torch.tensor([0, 1, 0, 1])
SHAPES = {"flat": lambda v: v, "column": lambda v: v[:, None]}
LABELS = {
    "int64": lambda y: y,
    "uint8": lambda y: y.to(torch.uint8),
    "bool": lambda y: y.bool(),
    "float32": lambda y: y.float(),
    "float64": lambda y: y.double(),
    "float16": lambda y: y.half(),
}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
every_label_shape = pytest.mark.parametrize("label_shape", SHAPES.values(), ids=SHAPES)
every_label_type = pytest.mark.parametrize("label_type", LABELS.values(), ids=LABELS)


# --- the convention ---------------------------------------------------------------------------


def test_the_shape_alone_tells():
    assert all(is_single(torch.zeros(shape)) for shape in [(4,), (4, 1), (0,), (0, 1), (1, 1)])
    others = [(4, 2), (4, 1, 1), (), (1, 4), (4, 0)]
    assert not any(is_single(torch.zeros(shape)) for shape in others)


@every_shape
def test_softmax_of_the_two_is_the_sigmoid_of_the_one(shape):
    two = two_classes(shape(Z))
    assert two.tolist() == [[0, -2], [0, 0], [0, 0.5], [0, 3]]
    torch.testing.assert_close(two.softmax(1)[:, 1], Z.sigmoid())
    assert torch.equal(one_logit(two), Z[:, None])


def test_more_classes_stay_as_they_are():
    for values in (torch.ones(4, 2), torch.ones(4, 3), torch.ones(4, 1, 1), torch.ones(())):
        assert two_classes(values) is values
        assert two_probs(values) is values


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.floats(-(2.0**90), 2.0**90, width=32), max_size=8))
def test_there_and_back_is_the_same_to_the_bit(values):
    z = torch.tensor(values)[:, None]
    assert torch.equal(one_logit(two_classes(z)), z)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_logits_keep_their_type_and_device(dtype):
    two = two_classes(Z.to(dtype))
    assert (two.dtype, two.device, two.shape) == (dtype, Z.device, (4, 2))


def test_gradients_reach_the_one_logit():
    z = Z.clone().requires_grad_()
    (two_classes(z).log_softmax(1)[range(4), Y]).sum().backward()
    torch.testing.assert_close(z.grad, Y - Z.sigmoid())


# --- probabilities ----------------------------------------------------------------------------


@every_shape
def test_class_0_has_the_rest(shape):
    p = torch.tensor([0.25, 1.0, 0.0])
    assert two_probs(shape(p)).tolist() == [[0.75, 0.25], [0, 1], [1, 0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_rest_of_a_16_bit_probability_loses_no_digits(dtype):
    """In bfloat16 1 - 0.01 would be 0.98828, and the confidence wrong by 0.2 points."""
    p = torch.tensor([0.01, 0.003, 0.6], dtype=dtype)
    two = two_probs(p)
    assert two.dtype == torch.float32
    assert torch.equal(two.sum(1), torch.ones(3))
    assert torch.equal(two[:, 1], p.float())


@every_shape
@every_label_type
def test_a_batch_of_probabilities_of_class_1(shape, label_type):
    p = torch.tensor([0.25, 0.5, 0.999, 1e-6])
    found = Batch.from_probs(shape(p), label_type(Y))
    torch.testing.assert_close(found.logits.softmax(1)[:, 1], p, rtol=1e-5, atol=0)
    torch.testing.assert_close(one_logit(found.logits)[:, 0], p.logit(), rtol=1e-4, atol=1e-6)
    assert found.labels.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_certain_probabilities_stay_finite(dtype):
    found = Batch.from_probs(torch.tensor([0.0, 1.0], dtype=dtype), torch.tensor([0.0, 1.0]))
    assert torch.isfinite(found.logits).all()
    assert found.logits.argmax(1).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [([0.2, 1.5], "0.2", "1.5"), ([-0.1, 0.5], "-0.1", "0.5"), ([0.5, math.nan], "nan", "nan")],
)
@every_shape
def test_what_is_no_probability_is_refused_with_its_range(values, low, high, shape):
    text = f"probs of class 1 lie between {low} and {high}: they must lie in 0..1; logits go into"
    with pytest.raises(InputError, match=re.escape(text)):
        Batch.from_probs(shape(torch.tensor(values)), torch.tensor([0, 1]))


# --- labels -----------------------------------------------------------------------------------


@every_label_shape
@every_label_type
def test_labels_as_a_binary_loss_takes_them(label_shape, label_type):
    found = zero_or_one(label_shape(label_type(Y)))
    assert found.tolist() == [0, 1, 0, 1]
    assert not found.is_floating_point()


@pytest.mark.parametrize("labels", [[0.0, 0.5], [0.9, 1.0], [2.0, 0.0], [-1.0, 1.0], [math.nan, 0]])
def test_other_floats_stay_floats_for_the_checks(labels):
    assert zero_or_one(torch.tensor(labels)).is_floating_point()


def test_one_hot_labels_are_not_flattened():
    assert zero_or_one(torch.eye(4)).shape == (4, 4)


# --- batches ----------------------------------------------------------------------------------


@every_shape
@every_label_shape
@every_label_type
def test_a_batch_keeps_two_columns_and_integers(shape, label_shape, label_type):
    batch = Batch(shape(Z), label_shape(label_type(Y)), torch.ones(4, 3))
    assert torch.equal(batch.logits, torch.stack([torch.zeros(4), Z], 1))
    assert batch.labels.tolist() == [0, 1, 0, 1]
    assert len(batch) == 4
    facts = survey(Chunked([batch]), None)
    assert (facts.rows, facts.classes, facts.width) == (4, 2, 3)


def test_every_cut_of_a_batch_stays_of_two_classes():
    batch = Batch(Z, Y.bool())
    for part in (batch.rows(slice(1, 2)), batch.rows(slice(0, 0)), batch.rows(Y == 1)):
        assert part.logits.shape[1] == 2
        assert part.labels.dtype == torch.int64
    (joined,) = Chunked([batch.rows(slice(0, 1)), batch.rows(slice(1, 4))])
    assert torch.equal(joined.logits, batch.logits)


def test_singles_and_pairs_may_come_in_turns():
    pairs = Batch(two_classes(Z), Y)
    mixed = [Batch(Z, Y.float()), pairs, Batch(Z[:, None], Y[:, None].bool())]
    found = Temperature().fit(mixed)
    assert torch.equal(found.temperature, Temperature().fit([pairs] * 3).temperature)


def test_the_given_tensors_are_left_alone():
    z, y = Z[:, None].clone(), Y.float()
    Batch(z, y)
    assert torch.equal(z, Z[:, None])
    assert y.dtype == torch.float32


@pytest.mark.parametrize(
    ("logits", "labels", "text"),
    [
        (Z, torch.tensor([0.0, 1, 0.9, 1]), "and type torch.float32, 0.9 in row 2: they must be"),
        (Z, torch.tensor([0, 1, math.nan, 1]), "and type torch.float32, nan in row 2"),
        (Z, torch.tensor([0.0, 2, 1, 1]), "labels have shape (4,) and type torch.float32: they"),
        (Z, torch.tensor([0, 2, 1, 1]), "labels are outside 0..1 in row 1: correct them first"),
        (Z, torch.tensor([-1, 1, -1, 1]), "labels are outside 0..1 in 2 rows (0, 2)"),
        (Z, torch.eye(4), "labels have shape (4, 4) and type torch.float32"),
        (Z, Y[:3], "they must be floating point, (3, ...), one row a label"),
        (Z[:, None, None], Y, "logits have shape (4, 1, 1) and type torch.float32"),
        (Z.long(), Y, "logits have shape (4, 2) and type torch.int64: they must be floating"),
        (two_classes(Z), Y.bool(), "labels have shape (4,) and type torch.bool"),
        (two_classes(Z), Y.float(), "labels have shape (4,) and type torch.float32: they must"),
        (two_classes(Z), Y[:, None], "labels have shape (4, 1) and type torch.int64"),
        (torch.tensor([0.0, math.nan, 1, 1]), Y, "logits are NaN or infinite in row 1: remove"),
    ],
)
def test_what_is_refused_is_named(logits, labels, text):
    with pytest.raises(InputError, match=re.escape(text)):
        Temperature().fit(Batch(logits, labels))


def test_rows_are_counted_over_batches():
    odd = Batch(Z, torch.tensor([0.0, 1, 1, 0.25]))
    with pytest.raises(InputError, match=r"type torch\.float32, 0\.25 in row 7: they must be one"):
        survey([Batch(Z, Y), odd], None)
