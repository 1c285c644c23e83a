"""Bands of reliability diagrams, before and after; calibration by class and by any group."""

import json
import math
import warnings

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from featcal import Batch, parse
from featcal.analysis import BandedDiagram, BeforeAfter, GroupCalibration
from featcal.core.checks import InputError
from featcal.metrics import ece
from featcal.report import ReliabilityDiagram
from featcal.report.bootstrap import Resamples


def naive_band(sure, right, bins, counts):
    """Each resample built row by row, each bin's accuracy taken, then the quantiles."""
    index = np.clip(np.ceil(sure * bins).astype(int) - 1, 0, bins - 1)
    accuracies = []
    for drawn in counts.T:
        rows = np.repeat(np.arange(len(sure)), drawn)
        chosen = [right[rows][index[rows] == place] for place in range(bins)]
        accuracies.append([some.mean() if len(some) else np.nan for some in chosen])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a bin may be empty in every resample
        return np.nanquantile(np.array(accuracies), [0.025, 0.975], axis=0)


def test_bands_equal_resamples_built_row_by_row(net):
    logits, labels = net.test.logits[:300].double(), net.test.labels[:300]
    found = BandedDiagram.of(logits=logits, labels=labels, bins=6, resamples=100, seed=5)
    sure, predicted = (part.numpy() for part in logits.softmax(1).max(1))
    counts = Resamples.draw(300, 100, 5).counts[:, 1:].int().numpy()
    low, high = naive_band(sure, (predicted == labels.numpy()).astype(float), 6, counts)
    correct, count = found.diagram.bins.correct, found.diagram.bins.count
    chosen = ((correct > 0) & (correct < count)).numpy()
    assert chosen.sum() >= 3
    np.testing.assert_allclose(found.low.numpy()[chosen], low[chosen], atol=1e-12)
    np.testing.assert_allclose(found.high.numpy()[chosen], high[chosen], atol=1e-12)


@pytest.mark.parametrize("of_class", [None, 2])
def test_the_diagram_is_the_plain_one(net, of_class):
    probs = net.test.logits.softmax(1)
    found = BandedDiagram.of(probs, net.test.labels, of_class=of_class, resamples=100)
    plain = ReliabilityDiagram.of(probs, net.test.labels, of_class=of_class)
    for name in ("count", "correct", "confidence"):
        np.testing.assert_allclose(getattr(found.diagram.bins, name), getattr(plain.bins, name))
    inside = (found.low <= plain.accuracy) & (plain.accuracy <= found.high)
    assert inside[plain.bins.count > 0].all()


def test_a_bin_all_right_still_has_a_band():
    probs = torch.tensor([[0.95, 0.05]] * 12)
    found = BandedDiagram.of(probs, torch.zeros(12, dtype=torch.int64), bins=10, resamples=100)
    assert 0.7 < float(found.low[9]) < 0.8  # Wilson's interval of 12 of 12
    assert float(found.high[9]) == 1
    assert found.low[:9].isnan().all()


def test_arguments_are_checked(net):
    for wrong in ({"resamples": 0}, {"of_class": 9}):
        with pytest.raises(InputError, match=r"resamples is 0: a band needs some|of_class is 9"):
            BandedDiagram.of(logits=net.test.logits, labels=net.test.labels, **wrong)


def test_before_and_after_are_those_of_the_logits(net):
    found = BeforeAfter.of(net.pieces(net.test, 97), net.clip, net.head, resamples=100)
    after = net.clip(net.test.features, net.head)
    for side, logits in ((found.before, net.test.logits), (found.after, after)):
        whole = BandedDiagram.of(logits=logits, labels=net.test.labels, resamples=100)
        np.testing.assert_allclose(side.diagram.bins.count, whole.diagram.bins.count)
        np.testing.assert_allclose(side.low, whole.low, atol=1e-12)
        np.testing.assert_allclose(side.high, whole.high, atol=1e-12)
    assert found.after.diagram.title == "after clip"
    batch, warm = Batch(torch.linspace(-4, 4, 200), torch.arange(200) % 2), parse("temperature")
    binary = BeforeAfter.of(batch, warm.assign(temperature=2.0), of_class=1, resamples=100)
    assert binary.before.diagram.of_class == 1
    assert int(binary.before.diagram.bins.count.sum()) == 200


def test_bands_are_drawn_where_there_are_rows_enough(net):
    found = BandedDiagram.of(logits=net.test.logits, labels=net.test.labels, resamples=100).plot()
    top, low = found.axes
    areas = [c for c in top.collections if c.get_alpha() == pytest.approx(0.3)]
    assert len(areas) == int((found.diagram.bins.count >= 10).sum())
    assert [text.get_text() for text in top.get_legend().get_texts()] == ["95 % band"]
    assert low.get_xlabel() == "confidence"
    figure, axes = plt.subplots(1, 2)
    pair = BeforeAfter.of(net.test, net.clip, net.head, resamples=100).plot(axes)
    for ax in axes:
        words = [text.get_text() for text in ax.get_legend().get_texts()]
        assert words[-1] == "95 % band"
        assert "perfect calibration" in words
    with pytest.raises(InputError, match="ax is not a pair of axes"):
        pair.plot(axes[0])
    plt.close(figure)


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


def agree(found, *of):
    count, accuracy, confidence, error = naive(*of)
    np.testing.assert_array_equal(found.count, count)
    np.testing.assert_allclose(found.accuracy, accuracy, rtol=1e-12)
    np.testing.assert_allclose(found.confidence, confidence, rtol=1e-12)
    np.testing.assert_allclose(found.overconfidence, confidence - accuracy, atol=1e-12)
    np.testing.assert_allclose(found.ece, error, atol=1e-12)


def test_classes_and_groups_equal_a_loop(net):
    found = GroupCalibration.of(net.test, None, net.head)
    agree(found, net.test.logits, net.test.labels, net.test.logits.argmax(1), 5)
    assert found.by == "predicted class"
    group = torch.arange(600) % 7
    group[group == 3] = 4  # one group stays empty
    found = GroupCalibration.of(net.test, net.clip, net.head, groups=group, names=list("abcdefg"))
    agree(found, net.clip(net.test.features, net.head), net.test.labels, group, 7)
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


def test_groups_are_checked_and_the_picture_names_them(net):
    for groups in (torch.zeros(3, dtype=torch.int64), torch.zeros(600), torch.full((600,), -1)):
        with pytest.raises(
            InputError, match=r"groups are .* one integer from 0 up for each of the"
        ):
            GroupCalibration.of(net.test, None, net.head, groups=groups)
    for wrong in ("abcde", ["a", "b"]):
        with pytest.raises(InputError, match="names has"):
            GroupCalibration.of(net.test, None, net.head, names=wrong)
    names = [f"class_{i}" for i in range(5)]
    found = GroupCalibration.of(net.test, None, net.head, names=names).plot()
    labels = [text.get_text() for text in found.axes.get_yticklabels()]
    assert [label.partition(" ")[0] for label in labels] == [names[g] for g in found.worst()]
