"""Bootstrap bands of reliability diagrams, and diagrams before and after."""

import warnings

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from featcal import Batch, parse
from featcal.analysis import BandedDiagram, BeforeAfter
from featcal.core.checks import InputError
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
    counts = Resamples.draw(300, 100, 5).counts.numpy()
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
    rows = {"logits": net.test.logits, "labels": net.test.labels}
    with pytest.raises(InputError, match="resamples is 0: a band needs some"):
        BandedDiagram.of(**rows, resamples=0)
    with pytest.raises(InputError, match="resamples is 0: a band needs some"):
        BeforeAfter.of(net.test, net.clip, net.head, resamples=0)
    with pytest.raises(InputError, match="of_class is 9"):
        BandedDiagram.of(**rows, of_class=9)


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
