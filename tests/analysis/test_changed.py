"""Predictions that a calibrator changed."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from featcal import Batch, parse
from featcal.analysis import ChangedPredictions


@pytest.fixture(scope="module")
def strong():
    return parse("clip").assign(threshold=0.4)


def naive(batch, after):
    """(row, label, before, after) of each changed row."""
    found = []
    for row in range(len(batch)):
        old, new = int(batch.logits[row].argmax()), int(after[row].argmax())
        if old != new:
            found.append((row, int(batch.labels[row]), old, new))
    return found


def test_rows_and_kinds_equal_a_loop(net, strong):
    found = ChangedPredictions.of(net.test, strong, net.head)
    after = strong(net.test.features, net.head)
    wanted = naive(net.test, after)
    columns = (found.rows, found.labels, found.before, found.after)
    assert list(zip(*(c.tolist() for c in columns), strict=True)) == wanted
    assert int(found.fixed.sum()) == sum(new == label for _, label, _, new in wanted)
    assert int(found.broken.sum()) == sum(old == label for _, label, old, _ in wanted)
    assert len(found.rows) == int((found.fixed | found.broken | found.other).sum())
    assert not (found.fixed & found.broken).any()
    assert min(int(kind.sum()) for kind in (found.fixed, found.broken, found.other)) > 0
    sure = after[found.rows].softmax(1).amax(1)
    torch.testing.assert_close(found.sure_after.float(), sure)


def test_the_change_of_accuracy_is_fixed_minus_broken(net, strong):
    found = ChangedPredictions.of(net.test, strong, net.head)
    after = strong(net.test.features, net.head).argmax(1)
    before = net.test.logits.argmax(1)
    wanted = ((after == net.test.labels).double() - (before == net.test.labels).double()).mean()
    assert found.accuracy_change == pytest.approx(float(wanted))


@given(st.integers(1, 250))
@settings(max_examples=15, deadline=None)
def test_parts_equal_the_whole(net, strong, size):
    whole = ChangedPredictions.of(net.test, strong, net.head)
    streamed = ChangedPredictions.of(net.pieces(net.test, size), strong, net.head)
    assert torch.equal(whole.rows, streamed.rows)
    assert torch.equal(whole.after, streamed.after)


def test_a_temperature_changes_nothing(net):
    warm = parse("temperature").assign(temperature=3.0)
    found = ChangedPredictions.of(net.test, warm, net.head).plot()
    assert len(found.rows) == 0
    told = found.as_json()
    assert told["changed"] == told["fixed"] == told["broken"] == told["other"] == 0
    assert told["told"]["rows"] == []


def test_ties_go_to_the_first_class():
    batch = Batch(torch.tensor([[1.0, 2.0], [2.0, 1.0]]), torch.tensor([0, 0]))
    flat = parse("logit_clip(ties='first')").assign(threshold=0.5)
    found = ChangedPredictions.of(batch, flat)
    assert found.rows.tolist() == [0]
    assert found.fixed.tolist() == [True]


def test_the_json_tells_the_surest_rows_first(net, strong):
    found = ChangedPredictions.of(net.test.rows(slice(0, 200)), strong, net.head)
    told = json.loads(json.dumps(found.as_json(), allow_nan=False))
    sure = told["told"]["sure_before"]
    assert sure == sorted(sure, reverse=True)
    kinds = told["told"]["kind"]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {
        kind: told[kind] for kind in ("fixed", "broken", "other")
    }


def test_the_picture_has_a_mark_for_every_row(net, strong):
    found = ChangedPredictions.of(net.test, strong, net.head).plot()
    marks = sum(len(line.get_xdata()) for line in found.axes.lines[:3])
    assert marks == len(found.rows)
