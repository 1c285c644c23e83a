"""Softmax entropy of the groups before and after a calibrator."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from featcal import Batch, parse
from featcal.analysis import EntropyGrowth, Groups
from featcal.core.checks import InputError


def naive(logits, mask):
    probs = logits[mask].double().softmax(1).numpy()
    return np.array([stats.entropy(row) for row in probs])


def test_means_growth_and_interval_equal_a_loop(net):
    found = EntropyGrowth.of(net.test, net.clip, net.head, confidence=0.8)
    groups = Groups.of_data(net.test, net.head, 0.8)
    after = net.clip(net.test.features, net.head)
    growths = []
    for row, mask in enumerate((groups.hce, groups.lce)):
        old, new = naive(net.test.logits, mask), naive(after, mask)
        assert float(found.before[row]) == pytest.approx(old.mean(), rel=1e-6)
        assert float(found.after[row]) == pytest.approx(new.mean(), rel=1e-6)
        growths.append(new - old)
    gap = growths[0].mean() - growths[1].mean()
    error = math.sqrt(sum(g.var(ddof=1) / len(g) for g in growths))
    assert found.gap == pytest.approx(gap, rel=1e-5)
    low, high = stats.norm.interval(0.95, gap, error)
    assert (found.interval.low, found.interval.high) == pytest.approx((low, high), rel=1e-5)


@given(st.integers(1, 250))
@settings(max_examples=20, deadline=None)
def test_parts_equal_the_whole(net, size):
    whole = EntropyGrowth.of(net.test, net.clip, net.head, confidence=0.8)
    parts = net.pieces(net.test, size)
    streamed = EntropyGrowth.of(parts, net.clip, net.head, confidence=0.8)
    np.testing.assert_allclose(streamed.after, whole.after, rtol=1e-5)
    assert streamed.gap == pytest.approx(whole.gap, rel=1e-4)


def test_groups_are_those_of_the_unclipped_logits(net):
    """After a strong clip hardly a row is confident, and the groups are still the same rows."""
    strong = parse("clip").assign(threshold=0.05)
    found = EntropyGrowth.of(net.test, strong, net.head, confidence=0.8)
    assert found.groups.sizes == Groups.of_data(net.test, net.head, 0.8).sizes
    assert Groups.of(strong(net.test.features, net.head), net.test.labels, 0.8).sizes == (0, 0)


@pytest.mark.shared
def test_the_entropies_of_the_paper(anchor):
    """METHODS 0.1 (8): the table was made at .80; at .95 it would have been another."""
    at_80 = EntropyGrowth.of(anchor, None, confidence=0.80)
    assert [round(float(x), 4) for x in at_80.before] == [0.0824, 0.0032]
    at_95 = EntropyGrowth.of(anchor, None)
    assert [round(float(x), 4) for x in at_95.before] == [0.0271, 0.0016]
    assert at_80.growth.tolist() == [0, 0]


@pytest.mark.shared
@pytest.mark.parametrize("level", [0.80, 0.95])
@pytest.mark.parametrize("split", ["val", "test"])
def test_the_entropy_of_wrong_rows_grows_more(resnet, split, level):
    """The claim of the paper, on a network of our own; test rows had no part in the fit."""
    data = getattr(resnet, split)
    found = EntropyGrowth.of(data, resnet.clip, resnet.head, confidence=level)
    assert float(found.growth[0]) > float(found.growth[1]) > 0
    assert found.interval.low > 0
    assert not found.few


def test_no_wrong_rows(net):
    right = Batch(net.test.logits, net.test.logits.argmax(1), net.test.features)
    found = EntropyGrowth.of(right, net.clip, net.head, confidence=0.8)
    told = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert told["hce"] == {"before": None, "after": None, "growth": None}
    assert told["gap"] is None
    assert told["interval"] == [None, None]
    assert told["few"]
    assert found.plot().axes.get_title(loc="left") == "clip: a group has no rows"


def test_one_wrong_row_has_a_mean_and_no_interval():
    logits = torch.tensor([[9.0, 0], [0, 8.0], [7.0, 0]])
    found = EntropyGrowth.of(Batch(logits, torch.tensor([0, 0, 0])), None)
    assert found.gap == 0
    assert math.isnan(found.interval.low)
    found.plot()


def test_an_infinite_threshold_changes_nothing(net):
    found = EntropyGrowth.of(net.test, parse("clip"), net.head, confidence=0.8)
    assert found.growth.abs().max() < 1e-6


def test_logit_methods_need_no_features(net):
    logits = Batch(net.test.logits, net.test.labels)
    warm = parse("temperature").assign(temperature=2.0)
    found = EntropyGrowth.of(logits, warm, confidence=0.8)
    assert (found.growth > 0).all()
    with pytest.raises(InputError, match="clip works on features"):
        EntropyGrowth.of(logits, net.clip)


def test_a_recipe_is_no_calibrator(net):
    with pytest.raises(InputError, match=r"calibrator is a str: pass a fitted one"):
        EntropyGrowth.of(net.test, "clip", net.head)


def test_the_picture_writes_the_numbers(net):
    found = EntropyGrowth.of(net.test, net.clip, net.head, confidence=0.8).plot()
    written = {text.get_text() for text in found.axes.texts}
    for when in ("before", "after"):
        for value in getattr(found, when).tolist():
            assert f"{when} {value:.4f}" in written
