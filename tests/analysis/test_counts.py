"""Confident rows, right and wrong, before and after."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from featcal import Batch, parse
from featcal.analysis import ConfidentCounts, Groups
from featcal.core.checks import InputError


def naive(logits, labels, levels):
    counts = [[0] * len(levels), [0] * len(levels)]
    for row, label in zip(logits, labels, strict=True):
        sure, wrong = row.softmax(0).max(), int(row.argmax()) != int(label)
        for place, level in enumerate(levels):
            counts[wrong][place] += bool(sure > level)
    return counts


def test_counts_equal_a_loop(net):
    found = ConfidentCounts.of(net.test, net.clip, net.head)
    assert found.before.tolist() == naive(net.test.logits, net.test.labels, found.levels)
    after = net.clip(net.test.features, net.head)
    assert found.after.tolist() == naive(after, net.test.labels, found.levels)
    assert found.levels == (0.80, 0.90, 0.95, 0.99)


@given(st.integers(1, 250))
@settings(max_examples=20, deadline=None)
def test_parts_equal_the_whole(net, size):
    data = Batch(net.test.logits, net.test.labels)
    warm = parse("temperature").assign(temperature=1.7)
    whole = ConfidentCounts.of(data, warm)
    streamed = ConfidentCounts.of(net.pieces(data, size), warm)
    assert torch.equal(whole.before, streamed.before)
    assert torch.equal(whole.after, streamed.after)


@pytest.mark.shared
def test_the_counts_of_the_paper_are_those_of_its_groups(anchor):
    found = ConfidentCounts.of(anchor)
    assert found.before[:, 2].tolist() == [4718, 165]
    assert found.before[:, 0].tolist() == [4740, 196]
    groups = Groups.of(anchor.logits, anchor.labels, 0.99)
    assert found.before[:, 3].tolist() == list(groups.sizes[::-1])


def test_without_a_calibrator_before_is_after(net):
    found = ConfidentCounts.of(net.test, None, net.head, levels=[0.5])
    assert torch.equal(found.before, found.after)
    assert found.as_json() == {
        "rows": 600,
        "recipe": "none",
        "levels": [0.5],
        "right_before": found.before[0].tolist(),
        "wrong_before": found.before[1].tolist(),
        "right_after": found.before[0].tolist(),
        "wrong_after": found.before[1].tolist(),
    }
    json.dumps(found.as_json(), allow_nan=False)


@pytest.mark.parametrize("levels", [[], [1.0], ["high"]])
def test_levels_are_checked(net, levels):
    with pytest.raises(InputError, match=r"levels is empty|confidence is"):
        ConfidentCounts.of(net.test, None, net.head, levels=levels)


def test_the_picture_writes_every_count(net):
    found = ConfidentCounts.of(net.test, net.clip, net.head).plot()
    written = sorted(int(text.get_text().replace(",", "")) for text in found.axes.texts)
    assert written == sorted(torch.cat([found.before, found.after]).flatten().tolist())
