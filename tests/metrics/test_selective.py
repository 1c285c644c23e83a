import math
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given
from metric_cases import binary, cases, labelled_logits, quick, top
from sklearn.metrics import roc_auc_score

from featcal.core.checks import InputError
from featcal.metrics import Ordered, aurc, aurc_of, auroc, auroc_of, e_aurc, e_aurc_of


def naive_aurc(correct_by_confidence):
    """The mean over k of the error among the first k, for one given order."""
    risks = [np.mean(~correct_by_confidence[: k + 1]) for k in range(len(correct_by_confidence))]
    return np.mean(risks)


@pytest.mark.parametrize("step", [None, 1.0, 3.0])
def test_auroc_against_sklearn(step):
    logits, labels = labelled_logits(13, 300, 3, step=step)
    p = Ordered.of(logits=logits, labels=labels)
    expected = roc_auc_score(p.correct.numpy(), p.confidence.numpy())
    assert auroc(logits=logits, labels=labels) == pytest.approx(expected)


def test_auroc_of_one_kind_is_not_a_number():
    assert math.isnan(auroc(*binary([0.7, 0.8], [1, 1])))
    assert math.isnan(auroc(*binary([0.7, 0.8], [0, 0])))


def test_auroc_of_equal_confidences_is_one_half():
    assert auroc(*binary([0.7] * 4, [1, 0, 1, 1])) == 0.5


def test_aurc_against_a_loop():
    logits, labels = labelled_logits(14, 80, 4)
    confidence, correct, _ = top(logits, labels)
    expected = naive_aurc(correct[np.argsort(-confidence)])
    assert aurc(logits=logits, labels=labels) == pytest.approx(expected)


def test_aurc_is_the_mean_over_all_orders_of_tied_rows():
    confidence = np.array([0.6, 0.8, 0.8, 0.8, 0.9, 0.9])
    correct = np.array([True, False, True, False, True, False])
    values = []
    for order in permutations(range(6)):
        p = np.array(order)
        values.append(naive_aurc(correct[p][np.argsort(-confidence[p], kind="stable")]))
    assert aurc(*binary(confidence, correct)) == pytest.approx(np.mean(values))


def test_e_aurc_subtracts_the_perfect_order():
    confidence, correct = np.array([0.9, 0.8, 0.7, 0.6]), np.array([True, False, True, True])
    oracle = 0.25 + 0.75 * math.log(0.75)
    assert e_aurc(*binary(confidence, correct)) == pytest.approx(naive_aurc(correct) - oracle)


def test_a_perfect_order_of_many_rows_has_no_excess():
    confidence = np.linspace(0.99, 0.51, 20000)
    assert e_aurc(*binary(confidence, [True] * 15000 + [False] * 5000)) == pytest.approx(
        0, abs=1e-4
    )


def test_all_right_and_all_wrong():
    right, wrong = binary([0.7, 0.8], [1, 1]), binary([0.7, 0.8], [0, 0])
    assert aurc(*right) == e_aurc(*right) == e_aurc(*wrong) == 0
    assert aurc(*wrong) == 1


@quick
@given(cases(min_rows=1))
def test_the_order_of_rows_changes_nothing(case):
    logits, labels = case
    one = Ordered.of(logits=logits, labels=labels)
    two = Ordered.of(logits=logits.flip(0), labels=labels.flip(0))
    for metric in (auroc_of, aurc_of, e_aurc_of):
        assert metric(one) == pytest.approx(metric(two), nan_ok=True)
    assert 0 <= aurc_of(one) <= 1 + 1e-12


def test_no_rows_have_no_value():
    empty = Ordered.of(torch.empty(0, 3), torch.empty(0, dtype=torch.int64))
    for metric in (auroc_of, aurc_of, e_aurc_of):
        with pytest.raises(InputError, match="no rows"):
            metric(empty)
