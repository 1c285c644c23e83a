"""Calibration by predicted class and by any group."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from featcal import Batch
from featcal.analysis import GroupCalibration
from featcal.analysis.base import wilson
from featcal.core.checks import InputError
from featcal.metrics import ece


def naive(logits, labels, group, count):
    rows = []
    for own in range(count):
        chosen = torch.tensor([int(g) == own for g in group])
        if not chosen.any():
            rows.append((0, math.nan, math.nan, math.nan))
            continue
        sure, predicted = logits[chosen].softmax(1).max(1)
        right = (predicted == labels[chosen]).double()
        error = ece(logits=logits[chosen], labels=labels[chosen])
        rows.append((int(chosen.sum()), float(right.mean()), float(sure.double().mean()), error))
    return np.array(rows).T


def agree(found, wanted):
    count, accuracy, confidence, error = wanted
    np.testing.assert_array_equal(found.count, count)
    np.testing.assert_allclose(found.accuracy, accuracy, rtol=1e-12)
    np.testing.assert_allclose(found.confidence, confidence, rtol=1e-12)
    np.testing.assert_allclose(found.overconfidence, confidence - accuracy, atol=1e-12)
    np.testing.assert_allclose(found.ece, error, atol=1e-12)


def test_classes_equal_a_loop(net):
    found = GroupCalibration.of(net.test, None, net.head)
    agree(found, naive(net.test.logits, net.test.labels, net.test.logits.argmax(1), 5))
    assert found.by == "predicted class"


def test_groups_equal_a_loop_also_after_a_clip(net):
    group = torch.arange(600) % 7
    group[group == 3] = 4  # one group stays empty
    found = GroupCalibration.of(net.test, net.clip, net.head, groups=group, names=list("abcdefg"))
    logits = net.clip(net.test.features, net.head)
    agree(found, naive(logits, net.test.labels, group, 7))
    told = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert told["groups"][3]["accuracy"] is None
    assert 3 not in told["worst"]
    assert told["recipe"] == "clip"


@given(st.integers(1, 250))
@settings(max_examples=15, deadline=None)
def test_parts_equal_the_whole(net, size):
    group = (torch.arange(600) // 13) % 4
    whole = GroupCalibration.of(net.test, None, net.head, groups=group)
    streamed = GroupCalibration.of(net.pieces(net.test, size), None, net.head, groups=group)
    np.testing.assert_allclose(streamed.sums, whole.sums, rtol=1e-9)


def test_the_groups_together_are_the_whole(net):
    found = GroupCalibration.of(net.test, None, net.head)
    bins = [found.bins(group) for group in range(5)]
    assert sum(bins[1:], bins[0]).ece == pytest.approx(
        ece(logits=net.test.logits, labels=net.test.labels)
    )


@given(st.integers(0, 40), st.integers(1, 40))
def test_wilson_is_that_of_scipy(hits, more):
    rows = hits + more
    low, high = wilson(torch.tensor([hits]), torch.tensor([rows]))
    wanted = stats.binomtest(hits, rows).proportion_ci(method="wilson")
    assert float(low) == pytest.approx(wanted.low, abs=1e-9)
    assert float(high) == pytest.approx(wanted.high, abs=1e-9)


def test_small_groups_are_flagged_and_come_last(net):
    group = torch.zeros(600, dtype=torch.int64)
    group[:5] = 1
    wrong = Batch(net.test.logits, net.test.labels.clone(), net.test.features)
    wrong.labels[:5] = (wrong.logits[:5].argmax(1) + 1) % 5
    found = GroupCalibration.of(wrong, None, net.head, groups=group)
    assert found.few.tolist() == [False, True]
    assert abs(float(found.overconfidence[1])) > abs(float(found.overconfidence[0]))
    assert found.worst() == [0, 1]
    low, high = found.interval[1].tolist()
    assert high - low > 0.3


def test_worst_orders_by_what_the_interval_leaves(net):
    found = GroupCalibration.of(net.test, None, net.head)
    low, high = found.interval.T
    sure = torch.maximum(low, -high).clamp(min=0)[found.worst()]
    enough = [float(s) for s, g in zip(sure, found.worst(), strict=True) if not found.few[g]]
    assert enough == sorted(enough, reverse=True)
    assert len(found.worst(2)) == 2


def test_two_classes_of_a_single_logit():
    batch = Batch(torch.tensor([2.0, -1.0, 3.0]), torch.tensor([1, 0, 0]))
    found = GroupCalibration.of(batch, names=["no", "yes"])
    assert found.count.tolist() == [1, 2]
    assert found.accuracy.tolist() == [1, 0.5]


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        (torch.zeros(3, dtype=torch.int64), "one integer for each of the 600 rows"),
        (torch.zeros(600), "one integer for each"),
        (torch.full((600,), -1), r"groups\[0\] is -1: number the groups from 0 on"),
    ],
)
def test_groups_are_checked(net, groups, text):
    with pytest.raises(InputError, match=text):
        GroupCalibration.of(net.test, None, net.head, groups=groups)


@pytest.mark.parametrize("names", ["abcde", ["a", "b"]])
def test_names_are_checked(net, names):
    with pytest.raises(InputError, match="names has"):
        GroupCalibration.of(net.test, None, net.head, names=names)


def test_the_picture_names_the_groups(net):
    names = [f"class_{i}" for i in range(5)]
    found = GroupCalibration.of(net.test, None, net.head, names=names).plot()
    labels = [text.get_text() for text in found.axes.get_yticklabels()]
    assert [label.partition(" ")[0] for label in labels] == [names[g] for g in found.worst()]
