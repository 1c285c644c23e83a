import numpy as np
import pytest
import torch
from hypothesis import given
from metric_cases import cases, labelled_logits, quick, split_cases, top
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss

from featcal.core.checks import InputError
from featcal.metrics import Predictions, ProperSums, accuracy, brier, inputs, nll


def values(sums):
    return [sums.count, sums.log_loss, sums.squared_error, sums.correct]


def test_against_sklearn():
    logits, labels = labelled_logits(9, 300, 5)
    _, _, probs = top(logits, labels)
    given_logits = {"logits": logits, "labels": labels}
    assert nll(**given_logits) == pytest.approx(log_loss(labels, probs, labels=range(5)))
    assert accuracy(**given_logits) == accuracy_score(labels, probs.argmax(1))
    one_hot = np.eye(5)[labels.numpy()]
    assert brier(**given_logits) == pytest.approx(((probs - one_hot) ** 2).sum(1).mean())


def test_two_classes_score_twice_sklearns_binary_brier():
    logits, labels = labelled_logits(10, 100, 2)
    probs = logits.softmax(1)
    binary = brier_score_loss(labels.numpy(), probs[:, 1].numpy())
    assert brier(probs, labels) == pytest.approx(2 * binary)


def test_probabilities_and_logits_agree():
    logits, labels = labelled_logits(11, 100, 4)
    for metric in (nll, brier, accuracy):
        assert metric(logits.softmax(1), labels) == pytest.approx(
            metric(logits=logits, labels=labels)
        )


def test_a_certain_mistake():
    probs, labels = torch.tensor([[1.0, 0.0]], dtype=torch.float64), torch.tensor([1])
    assert nll(probs, labels) == pytest.approx(-np.log(1e-12))
    assert (brier(probs, labels), accuracy(probs, labels)) == (2, 0)
    assert nll(logits=torch.tensor([[900.0, 0.0]]), labels=labels) == 900


@quick
@given(split_cases())
def test_parts_add_up_to_the_whole(case):
    logits, labels, i, j = case
    a, b, c = (
        ProperSums.of(logits=logits[part], labels=labels[part])
        for part in (slice(0, i), slice(i, j), slice(j, None))
    )
    whole = ProperSums.of(logits=logits, labels=labels)
    assert values(a + b + c) == pytest.approx(values(whole), rel=1e-6, abs=1e-6)
    assert values(a + (b + c)) == pytest.approx(values(whole), rel=1e-6, abs=1e-6)
    assert whole + ProperSums.of(logits=logits[:0], labels=labels[:0]) == whole


@quick
@given(cases(min_rows=1))
def test_ranges_and_order(case):
    logits, labels = case
    whole = ProperSums.of(logits=logits, labels=labels)
    assert values(ProperSums.of(logits=logits.flip(0), labels=labels.flip(0))) == pytest.approx(
        values(whole), rel=1e-6, abs=1e-6
    )
    assert whole.nll >= 0
    assert -1e-6 <= whole.brier <= 2 + 1e-6
    assert 0 <= whole.accuracy <= 1


def test_chunks_and_reading_once_give_the_same(monkeypatch):
    logits, labels = labelled_logits(12, 50, 3)
    once = ProperSums.of_predictions(Predictions.of(logits=logits, labels=labels))
    monkeypatch.setattr(inputs, "CHUNK_VALUES", 12)
    assert values(ProperSums.of(logits=logits, labels=labels)) == pytest.approx(values(once))
    assert once.reduced() == once


def test_a_single_probability_is_that_of_class_1():
    certain = ProperSums.of(torch.ones(4, 1), torch.ones(4, dtype=torch.int64))
    assert (certain.nll, certain.brier, certain.accuracy) == (0, 0, 1)
    mistaken = ProperSums.of(torch.ones(4, 1), torch.zeros(4, dtype=torch.int64))
    assert mistaken.nll == pytest.approx(-np.log(1e-12))
    assert (mistaken.brier, mistaken.accuracy) == (2, 0)


def test_no_rows_have_no_value():
    empty = ProperSums.of(torch.empty(0, 3), torch.empty(0, dtype=torch.int64))
    for name in ("nll", "brier", "accuracy"):
        with pytest.raises(InputError, match="no rows"):
            getattr(empty, name)
