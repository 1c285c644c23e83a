"""High and low calibration error rows: who belongs to them, by the unclipped logits."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from featcal import Batch
from featcal.analysis import Groups
from featcal.core.checks import InputError


def naive(logits, labels, level):
    hce, lce = [], []
    for row, label in zip(logits, labels, strict=True):
        probs = row.softmax(0)
        sure, right = bool(probs.max() > level), int(row.argmax()) == int(label)
        hce.append(sure and not right)
        lce.append(sure and right)
    return hce, lce


@pytest.mark.parametrize("level", [0.0, 0.5, 0.8, 0.95, 0.99])
def test_groups_equal_a_loop(net, level):
    found = Groups.of(net.val.logits, net.val.labels, level)
    hce, lce = naive(net.val.logits, net.val.labels, level)
    assert found.hce.tolist() == hce
    assert found.lce.tolist() == lce
    assert found.sizes == (sum(hce), sum(lce))


def test_the_level_is_strict():
    logits = torch.tensor([[0.0, 0.0], [0.0, 0.0]])  # a confidence of exactly one half
    found = Groups.of(logits, torch.tensor([0, 1]), 0.5)
    assert found.sizes == (0, 0)
    assert found.at(0.4999).sizes == (1, 1)  # the first of equals is predicted


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 5))
@settings(max_examples=30, deadline=None)
def test_parts_equal_the_whole(rows, size, seed):
    draw = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(rows, 3, generator=draw)
    labels = torch.randint(0, 3, (rows,), generator=draw)
    batch = Batch(logits, labels)
    parts = [batch.rows(slice(start, start + size)) for start in range(0, rows, size)]
    whole, streamed = Groups.of(logits, labels, 0.8), Groups.of_data(parts, None, 0.8)
    assert torch.equal(whole.hce, streamed.hce)
    assert torch.equal(whole.lce, streamed.lce)


@pytest.mark.shared
def test_the_groups_of_the_paper(anchor):
    """METHODS 7.1: 165 and 4,718 rows at .95, and 196 and 4,740 at .80."""
    found = Groups.of(anchor.logits, anchor.labels)
    assert found.sizes == (165, 4718)
    assert found.at(0.80).sizes == (196, 4740)


def test_nobody_wrong_is_no_error():
    logits = torch.tensor([[9.0, 0.0], [0.0, 9.0]])
    found = Groups.of(logits, torch.tensor([0, 1]))
    assert found.as_json() == {
        "confidence": 0.95,
        "rows": 2,
        "hce": 0,
        "lce": 2,
        "wrong_share": 0.0,
    }
    assert found.at(0.99999).as_json()["wrong_share"] is None
    found.plot()


def test_a_single_logit_is_two_classes():
    found = Groups.of_data(Batch(torch.tensor([9.0, -9.0]), torch.tensor([1.0, 1.0])))
    assert found.sizes == (1, 1)


def test_groups_of_other_rows_are_refused(net):
    from featcal.analysis import UnitMeans

    few = Groups.of_data(net.test.rows(slice(0, 9)), net.head)
    with pytest.raises(InputError, match=r"groups are of 9 rows and the data has 600: make them"):
        UnitMeans.of(net.test, net.head, groups=few)


@pytest.mark.parametrize("level", [-0.1, 1, 1.5, "high", True, float("nan")])
def test_levels_are_checked(net, level):
    with pytest.raises(InputError, match="confidence is"):
        Groups.of(net.val.logits, net.val.labels, level)


def test_the_picture_counts_the_rows(net):
    found = Groups.of_data(net.val, net.head, 0.8).plot()
    drawn = [round(sum(bar.get_height() for bar in bars)) for bars in found.axes.containers]
    assert drawn == [int(found.right.sum()), int((~found.right).sum())]
    json.dumps(found.as_json(), allow_nan=False)
