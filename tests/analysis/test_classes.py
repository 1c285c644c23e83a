"""Calibration by predicted class and by any group."""

import json
import math

import numpy as np
import pytest
import torch

from featcal import Batch
from featcal.analysis import GroupCalibration
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


def test_classes_and_groups_equal_a_loop(net):
    found = GroupCalibration.of(net.test, None, net.head)
    agree(found, naive(net.test.logits, net.test.labels, net.test.logits.argmax(1), 5))
    assert found.by == "predicted class"
    group = torch.arange(600) % 7
    group[group == 3] = 4  # one group stays empty
    found = GroupCalibration.of(net.test, net.clip, net.head, groups=group, names=list("abcdefg"))
    logits = net.clip(net.test.features, net.head)
    agree(found, naive(logits, net.test.labels, group, 7))
    told = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert told["groups"][3]["accuracy"] is None
    assert 3 not in told["worst"]
    assert told["recipe"] == "clip"


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


def test_groups_are_checked(net):
    for groups in (torch.zeros(3, dtype=torch.int64), torch.zeros(600), torch.full((600,), -1)):
        with pytest.raises(
            InputError, match=r"groups are .* one integer from 0 up for each of the"
        ):
            GroupCalibration.of(net.test, None, net.head, groups=groups)
    for names in ("abcde", ["a", "b"]):
        with pytest.raises(InputError, match="names has"):
            GroupCalibration.of(net.test, None, net.head, names=names)


def test_the_picture_names_the_groups(net):
    names = [f"class_{i}" for i in range(5)]
    found = GroupCalibration.of(net.test, None, net.head, names=names).plot()
    labels = [text.get_text() for text in found.axes.get_yticklabels()]
    assert [label.partition(" ")[0] for label in labels] == [names[g] for g in found.worst()]
