import re

import numpy as np
import pytest
import torch
from hypothesis import given
from metric_cases import cases, columns, labelled_logits, quick

from featcal.core.checks import InputError
from featcal.metrics import Predictions, ece, inputs, top_label

HALVES = torch.full((3, 2), 0.5)
LABELS = torch.tensor([0, 1, 0])


def refuses(text, **arguments):
    with pytest.raises(InputError, match=re.escape(text)):
        Predictions.of(**arguments)


def test_fields_from_probabilities():
    p = Predictions.of(torch.tensor([[0.2, 0.8], [0.7, 0.3]]), torch.tensor([1, 1]))
    assert torch.equal(p.confidence, torch.tensor([0.8, 0.7]))
    assert p.correct.tolist() == [True, False]
    assert torch.equal(p.log_true, torch.tensor([0.8, 0.3]).log())
    assert len(p) == 2


@quick
@given(cases())
def test_logits_and_their_probabilities_agree(case):
    logits, labels = case
    a = Predictions.of(logits=logits, labels=labels)
    b = Predictions.of(columns(logits).softmax(1), labels)
    assert torch.equal(a.probs, b.probs)
    assert torch.equal(a.confidence, b.confidence)
    torch.testing.assert_close(a.log_true, b.log_true, atol=1e-5, rtol=1e-5)


@quick
@given(cases())
def test_the_lean_path_is_the_same_to_the_bit(case):
    logits, labels = case
    whole, lean = (
        Predictions.of(logits=logits, labels=labels),
        top_label(logits=logits, labels=labels),
    )
    assert torch.equal(whole.confidence, lean.confidence)
    assert torch.equal(whole.correct, lean.correct)


def test_chunks_change_nothing(monkeypatch):
    logits, labels = labelled_logits(0, 100, 7, dtype=np.float32)
    once = top_label(logits=logits, labels=labels)
    monkeypatch.setattr(inputs, "CHUNK_VALUES", 21)
    parts = top_label(logits=logits, labels=labels)
    assert torch.equal(once.confidence, parts.confidence)
    assert torch.equal(once.correct, parts.correct)
    streamed = list(Predictions.stream(logits=logits, labels=labels))
    assert [len(part) for part in streamed] == [3] * 33 + [1]
    assert torch.equal(torch.cat([part.probs for part in streamed]), logits.softmax(1))


def test_a_chunk_never_has_no_rows_when_classes_are_many(monkeypatch):
    monkeypatch.setattr(inputs, "CHUNK_VALUES", 2)
    assert len(top_label(HALVES, LABELS).confidence) == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_values_are_widened(dtype):
    logits, labels = labelled_logits(1, 50, 200, dtype=np.float32)
    p = Predictions.of(logits=logits.to(dtype), labels=labels)
    assert p.probs.dtype == p.confidence.dtype == torch.float32
    assert torch.equal(p.probs, logits.to(dtype).float().softmax(1))
    assert Predictions.of(logits.softmax(1).to(dtype), labels).probs.dtype == torch.float32


def test_16_bit_rows_may_miss_1_by_more():
    rows = torch.tensor([[0.504, 0.501]])
    assert len(Predictions.of(rows.half(), LABELS[:1])) == 1
    refuses("probs[0] sums to 1.005, not 1", probs=rows, labels=LABELS[:1])


def test_float64_is_kept():
    assert Predictions.of(HALVES.double(), LABELS).log_true.dtype == torch.float64


def test_numpy_arrays_of_every_layout():
    logits, labels = labelled_logits(2, 12, 3)
    expected = Predictions.of(logits=logits, labels=labels).confidence
    array = logits.numpy()
    frozen = array.copy()
    frozen.flags.writeable = False
    for given_logits in (array, frozen, np.asfortranarray(array), array.astype(">f8")):
        got = Predictions.of(logits=given_logits, labels=labels.numpy().astype(np.uint16))
        assert torch.equal(got.confidence, expected)
    assert torch.equal(
        top_label(logits=array[::-1], labels=labels.flip(0)).confidence, expected.flip(0)
    )


def test_input_that_requires_grad_is_read_and_left_alone():
    logits = torch.randn(4, 3, requires_grad=True)
    p = Predictions.of(logits=logits, labels=torch.zeros(4, dtype=torch.int64))
    assert not p.probs.requires_grad
    assert logits.requires_grad


def test_ties_take_the_first_class():
    p = Predictions.of(HALVES, LABELS)
    assert p.correct.tolist() == [True, False, True]


def test_the_logits_decide_where_softmax_rounds_two_classes_together():
    logits = torch.tensor([[0.0, 1e-9]])
    p = Predictions.of(logits=logits, labels=torch.tensor([1]))
    assert p.probs[0, 0] == p.probs[0, 1]
    assert p.correct.item()


def test_extreme_logits_keep_a_finite_exact_log():
    p = Predictions.of(logits=torch.tensor([[200.0, 0.0]]), labels=torch.tensor([1]))
    assert p.log_true.item() == -200
    assert p.confidence.item() == 1


def test_a_given_probability_of_zero_counts_as_1e_12():
    p = Predictions.of(torch.tensor([[1.0, 0.0]], dtype=torch.float64), torch.tensor([1]))
    assert p.log_true.item() == pytest.approx(np.log(1e-12))


def test_rounding_above_1_is_no_error_and_no_confidence_above_1():
    above = torch.tensor([[1 + 2e-7, 0.0]])
    assert above[0, 0] > 1
    p = Predictions.of(above, torch.tensor([0]))
    assert p.confidence.item() == 1
    assert p.log_true.item() == 0


def test_logits_between_0_and_1_are_logits():
    """Reading them by their range, as torchmetrics does, would give another number."""
    logits = torch.tensor([[0.9, 0.1], [0.2, 0.8]])
    confidence = 1 / (1 + np.exp([-0.8, -0.6]))
    assert ece(logits=logits, labels=torch.tensor([0, 1])) == pytest.approx(1 - confidence.mean())
    assert ece(logits, torch.tensor([0, 1])) == pytest.approx(0.15)


def test_no_rows_and_one_logit():
    p = Predictions.of(logits=torch.empty(0, 3), labels=torch.empty(0, dtype=torch.int64))
    assert (len(p), p.probs.shape) == (0, (0, 3))
    none = Predictions.of(torch.empty(0), torch.empty(0))
    assert (len(none), none.probs.shape, none.labels.dtype) == (0, (0, 2), torch.int64)
    one = Predictions.of(logits=torch.tensor([[4.0]]), labels=torch.tensor([0]))
    sure = 1 / (1 + np.exp(-4))
    assert one.confidence.item() == pytest.approx(sure)
    assert one.log_true.item() == pytest.approx(np.log(1 - sure))
    assert not one.correct.item()


def test_what_is_given_must_be_said():
    refuses("probs and logits are both None", labels=LABELS)
    refuses("probs and logits are both given", probs=HALVES, logits=HALVES, labels=LABELS)
    refuses("labels is None", probs=HALVES)


def test_logits_given_as_probabilities_are_refused_with_the_remedy():
    logits = torch.tensor([[0.5, 0.5], [-1.0, 2.0], [0.5, 0.5]])
    refuses(
        "probs[1, 0] is -1, outside 0..1: if these are logits pass logits=",
        probs=logits,
        labels=LABELS,
    )
    refuses("probs[0] sums to 1.4, not 1 (rows 0, 1, 2)", probs=HALVES + 0.2, labels=LABELS)
    over = torch.tensor([[1.0005, 0.0]])
    refuses("probs[0, 0] is 1.0005", probs=over, labels=LABELS[:1])


def test_messages_count_rows_over_chunks(monkeypatch):
    monkeypatch.setattr(inputs, "CHUNK_VALUES", 2)
    wrong = HALVES.clone()
    wrong[2] = 0.1
    refuses("probs[2] sums to 0.2, not 1 (row 2)", probs=wrong, labels=LABELS)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["probs", "logits"])
def test_values_that_are_not_finite_are_refused_by_row(name, value):
    values = torch.full((9, 2), 0.5)
    values[1:8, 0] = value
    labels = torch.zeros(9, dtype=torch.int64)
    text = f"{name} is NaN or infinite in rows 1, 2, 3, 4, 5 and 2 more"
    refuses(text, **{name: values}, labels=labels)


def test_a_sum_that_overflows_is_no_infinity():
    logits = torch.full((4, 2), 3e38)
    p = Predictions.of(logits=logits, labels=torch.zeros(4, dtype=torch.int64))
    assert torch.equal(p.confidence, torch.full((4,), 0.5))


@pytest.mark.parametrize(
    ("labels", "text"),
    [
        (torch.tensor([0, 1, 2]), "labels[2] is 2, outside 0..1 (row 2)"),
        (torch.tensor([-1, 1, 0]), "labels[0] is -1, outside 0..1"),
        (torch.tensor([0, 1]), "labels has 2 rows and the predictions 3"),
        (torch.tensor([0.0, 1, 1]), "labels has type torch.float32"),
        (torch.tensor([True, False, True]), "labels has type torch.bool"),
        (torch.tensor([[0, 1], [1, 0], [0, 1]]), "labels has shape (3, 2): pass one class a row"),
        (torch.tensor([[0, 1], [1, 0], [0, 1]]), "labels.argmax(1) if one-hot"),
        (torch.tensor([[0], [1], [0]]), "labels has shape (3, 1): pass one class a row, labels["),
        ([0, 1, 0], "labels is a list: pass a torch tensor or a numpy array"),
        (np.array([0, 1, None]), "labels has type object"),
    ],
)
def test_labels_are_checked(labels, text):
    refuses(text, probs=HALVES, labels=labels)


@pytest.mark.parametrize(
    ("probs", "text"),
    [
        (torch.full((3, 1, 1), 0.5), "probs has shape (3, 1, 1): pass (rows, classes), or (rows,)"),
        (torch.tensor(0.5), "probs has shape (): pass (rows, classes), or (rows,) for class 1"),
        (torch.empty(3, 0), "probs has shape (3, 0)"),
        (torch.tensor([[1, 0], [0, 1], [1, 0]]), "probs has type torch.int64"),
    ],
)
def test_values_are_a_floating_point_matrix(probs, text):
    refuses(text, probs=probs, labels=LABELS)
