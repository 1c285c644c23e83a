"""Single answers before and after a calibrator: how sure, how undecided, and which changed."""

import json
import math

import numpy as np
import pytest
import torch
from scipy import stats

from featcal import Batch, parse
from featcal.analysis import ChangedPredictions, ConfidentCounts, EntropyGrowth, Groups
from featcal.core.checks import InputError


def naive_counts(logits, labels, levels):
    counts = [[0] * len(levels), [0] * len(levels)]
    for row, label in zip(logits, labels, strict=True):
        sure, wrong = row.softmax(0).max(), int(row.argmax()) != int(label)
        for place, level in enumerate(levels):
            counts[wrong][place] += bool(sure > level)
    return counts


def test_counts_equal_a_loop(net):
    found = ConfidentCounts.of(net.test, net.clip, net.head)
    assert found.levels == (0.80, 0.90, 0.95, 0.99)
    assert found.before.tolist() == naive_counts(net.test.logits, net.test.labels, found.levels)
    after = net.clip(net.test.features, net.head)
    assert found.after.tolist() == naive_counts(after, net.test.labels, found.levels)
    written = sorted(int(text.get_text().replace(",", "")) for text in found.plot().axes.texts)
    assert written == sorted(torch.cat([found.before, found.after]).flatten().tolist())


def test_without_a_calibrator_before_is_after(net):
    found = ConfidentCounts.of(net.test, None, net.head, levels=[0.5])
    right, wrong = found.before.tolist()
    assert found.as_json() == {
        **{"rows": 600, "recipe": "none", "levels": [0.5], "right_before": right},
        **{"right_after": right, "wrong_before": wrong, "wrong_after": wrong},
    }
    for levels in ([], [1.0], ["high"]):
        with pytest.raises(InputError, match=r"levels is empty|confidence is"):
            ConfidentCounts.of(net.test, None, net.head, levels=levels)


def test_entropies_and_their_interval_equal_a_loop(net):
    found = EntropyGrowth.of(net.test, net.clip, net.head, confidence=0.8)
    groups = Groups.of_data(net.test, net.head, 0.8)
    after = net.clip(net.test.features, net.head)
    growths = []
    for row, mask in enumerate((groups.hce, groups.lce)):
        old, new = (
            np.array([stats.entropy(p) for p in logits[mask].double().softmax(1).numpy()])
            for logits in (net.test.logits, after)
        )
        assert float(found.before[row]) == pytest.approx(old.mean(), rel=1e-6)
        assert float(found.after[row]) == pytest.approx(new.mean(), rel=1e-6)
        growths.append(new - old)
    gap = growths[0].mean() - growths[1].mean()
    error = math.sqrt(sum(g.var(ddof=1) / len(g) for g in growths))
    assert found.gap == pytest.approx(gap, rel=1e-5)
    low, high = stats.norm.interval(0.95, gap, error)
    assert (found.interval.low, found.interval.high) == pytest.approx((low, high), rel=1e-5)
    written = {text.get_text() for text in found.plot().axes.texts}
    assert {f"before {value:.4f}" for value in found.before.tolist()} <= written
    assert {f"after {value:.4f}" for value in found.after.tolist()} <= written


def test_groups_are_those_of_the_unclipped_logits(net):
    """After a strong clip hardly a row is confident, and the groups are still the same rows."""
    strong = parse("clip").assign(threshold=0.05)
    found = EntropyGrowth.of(net.test, strong, net.head, confidence=0.8)
    assert found.groups.sizes == Groups.of_data(net.test, net.head, 0.8).sizes
    assert Groups.of(strong(net.test.features, net.head), net.test.labels, 0.8).sizes == (0, 0)
    idle = EntropyGrowth.of(net.test, parse("clip"), net.head, confidence=0.8)
    assert idle.growth.abs().max() < 1e-6


@pytest.mark.shared
def test_the_entropies_of_the_paper(anchor):
    """METHODS 0.1 (8): the table was made at .80; at .95 it would have been another."""
    at_80 = EntropyGrowth.of(anchor, None, confidence=0.80)
    assert [round(float(x), 4) for x in at_80.before] == [0.0824, 0.0032]
    at_95 = EntropyGrowth.of(anchor, None)
    assert [round(float(x), 4) for x in at_95.before] == [0.0271, 0.0016]
    assert at_80.growth.tolist() == [0, 0]


@pytest.mark.shared
def test_the_entropy_of_wrong_rows_grows_more(resnet):
    """The claim of the paper, on a network of our own; test rows had no part in the fit."""
    for data, level in ((resnet.val, 0.95), (resnet.test, 0.80)):
        found = EntropyGrowth.of(data, resnet.clip, resnet.head, confidence=level)
        assert float(found.growth[0]) > float(found.growth[1]) > 0
        assert found.interval.low > 0
        assert not found.few


def test_no_wrong_rows_and_one(net):
    right = Batch(net.test.logits, net.test.logits.argmax(1), net.test.features)
    found = EntropyGrowth.of(right, net.clip, net.head, confidence=0.8)
    told = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert told["hce"] == {"before": None, "after": None, "growth": None}
    assert (told["gap"], told["interval"], told["few"]) == (None, [None, None], True)
    assert found.plot().axes.get_title(loc="left") == "clip: a group has no rows"
    logits = torch.tensor([[9.0, 0], [0, 8.0], [7.0, 0]])
    one = EntropyGrowth.of(Batch(logits, torch.tensor([0, 0, 0])), None).plot()
    assert one.gap == 0
    assert math.isnan(one.interval.low)


def test_changed_rows_and_kinds_equal_a_loop_and_the_surest_are_told_first(net):
    strong = parse("clip").assign(threshold=0.4)
    found = ChangedPredictions.of(net.test, strong, net.head)
    after = strong(net.test.features, net.head)
    wanted = [
        (row, int(label), int(old), int(new))
        for row, (label, old, new) in enumerate(
            zip(net.test.labels, net.test.logits.argmax(1), after.argmax(1), strict=True)
        )
        if old != new
    ]
    columns = (found.rows, found.labels, found.before, found.after)
    assert list(zip(*(c.tolist() for c in columns), strict=True)) == wanted
    fixed, broken = (int(kind.sum()) for kind in (found.fixed, found.broken))
    assert fixed == sum(new == label for _, label, _, new in wanted) > 0
    assert broken == sum(old == label for _, label, old, _ in wanted) > 0
    assert len(wanted) == fixed + broken + int(found.other.sum())
    assert found.accuracy_change == pytest.approx((fixed - broken) / 600)
    torch.testing.assert_close(found.sure_after.float(), after[found.rows].softmax(1).amax(1))
    marks = sum(len(line.get_xdata()) for line in found.plot().axes.lines[:3])
    assert marks == len(found.rows)
    told = json.loads(json.dumps(found.as_json(), allow_nan=False))
    sure, kinds = told["told"]["sure_before"], told["told"]["kind"]
    assert sure == sorted(sure, reverse=True)
    assert len(kinds) == min(200, told["changed"])
    rows = zip(*(told["told"][key] for key in ("labels", "before", "after")), strict=True)
    for kind, (label, before, after) in zip(kinds, rows, strict=True):
        assert kind == ("fixed" if after == label else "broken" if before == label else "other")


def test_ties_go_to_the_first_class_and_a_temperature_changes_nothing(net):
    batch = Batch(torch.tensor([[1.0, 2.0], [2.0, 1.0]]), torch.tensor([0, 0]))
    flat = parse("logit_clip(ties='first')").assign(threshold=0.5)
    found = ChangedPredictions.of(batch, flat)
    assert (found.rows.tolist(), found.fixed.tolist()) == ([0], [True])
    warm = parse("temperature").assign(temperature=3.0)
    told = ChangedPredictions.of(net.test, warm, net.head).plot().as_json()
    assert told["changed"] == told["fixed"] == told["broken"] == told["other"] == 0
