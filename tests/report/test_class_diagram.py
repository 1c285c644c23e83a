"""The diagram of one class: its probability against its share of the rows, over all of [0, 1]."""

import re
from itertools import pairwise

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from sklearn.calibration import calibration_curve

from featcal.core.checks import InputError
from featcal.metrics import Bins
from featcal.report import ReliabilityDiagram, save_comparison
from featcal.report import diagram as drawing
from featcal.report.diagram import TOP_LABEL, wording

M = 10


def rows(n=800, *, seed=0):
    """P(class 1) of a sigmoid model that is too sure, and labels."""
    draw = np.random.default_rng(seed)
    z = draw.normal(-0.5, 2, n)
    return 1 / (1 + np.exp(-z)), draw.uniform(size=n) < 1 / (1 + np.exp(-z / 2))


def of_class_1(**options):
    return ReliabilityDiagram.of(*rows(**options), of_class=1, bins=M, title="before")


def at(share, probability):
    sums = torch.zeros(3, M, dtype=torch.float64)
    sums[:, 5] = torch.tensor([1, probability, share]) * 100
    return ReliabilityDiagram(Bins(*sums), of_class=1)


def test_numbers_equal_a_loop_and_sklearn():
    p, labels = rows()
    found = of_class_1()
    share, mean = calibration_curve(labels, p, n_bins=M)
    np.testing.assert_allclose(found.accuracy, share, rtol=1e-12)  # every bin has rows
    np.testing.assert_allclose(found.mean_confidence, mean, rtol=1e-12)
    total = 0.0
    for low, high in pairwise(np.linspace(0, 1, M + 1)):
        inside = (p > low) & (p <= high)
        total += inside.mean() * abs(p[inside].mean() - labels[inside].mean())
    assert found.ece == pytest.approx(total, rel=1e-12)
    assert found.overall_accuracy == pytest.approx(labels.mean())
    assert found.overall_confidence == pytest.approx(p.mean())


def test_every_form_of_the_same_rows_gives_the_same_diagram():
    p, labels = rows()
    z = torch.tensor(p).logit()
    for found in (
        ReliabilityDiagram.of(np.stack([1 - p, p], 1), labels.astype(int), of_class=1, bins=M),
        ReliabilityDiagram.of(logits=z, labels=labels, of_class=1, bins=M),
        ReliabilityDiagram.of(logits=z[:, None], labels=labels[:, None], of_class=1, bins=M),
    ):
        torch.testing.assert_close(found.accuracy, of_class_1().accuracy)
        torch.testing.assert_close(found.mean_confidence, of_class_1().mean_confidence)


def test_class_0_is_the_mirror_image():
    zero = ReliabilityDiagram.of(*rows(), of_class=0, bins=M)
    torch.testing.assert_close(zero.accuracy.flip(0), 1 - of_class_1().accuracy)
    torch.testing.assert_close(zero.gap.flip(0), -of_class_1().gap)
    assert zero.ece == pytest.approx(of_class_1().ece)


def test_one_class_of_many():
    logits = torch.randn(500, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = (logits * 0.5).argmax(1)
    found = ReliabilityDiagram.of(logits=2 * logits, labels=labels, of_class=3, bins=M)
    share, mean = calibration_curve(labels == 3, (2 * logits).softmax(1)[:, 3], n_bins=M)
    filled = found.share > 0
    np.testing.assert_allclose(found.accuracy[filled], share, rtol=1e-12)
    np.testing.assert_allclose(found.mean_confidence[filled], mean, rtol=1e-12)
    assert found.wording.x == "probability of class 3"


def test_the_predicted_class_covers_the_upper_half_alone():
    """Why a sigmoid user may ask for the other view."""
    top = ReliabilityDiagram.of(*rows(), bins=M)
    assert float(top.share[: M // 2].sum()) == 0
    assert (of_class_1().share > 0).all()
    assert top.wording is TOP_LABEL


def test_the_words_say_what_is_drawn():
    found = of_class_1().plot()
    top, low = found.axes
    assert top.get_ylabel() == "share of class 1"
    assert low.get_xlabel() == "probability of class 1"
    assert re.fullmatch(
        r"class 1: ECE \d+\.\d %\nshare \d+\.\d %  probability \d+\.\d %", found.caption
    )
    texts = [text.get_text() for text in top.figure.legends[0].get_texts()]
    assert texts[:3] == [
        "share of class 1",
        "too high: from share up to probability",
        "too low: from probability up to share",
    ]
    assert [text.get_text().split()[0] for text in low.texts] == ["share", "probability"]
    assert not any("confiden" in text or "accuracy" in text for text in [*texts, found.caption])


def test_given_axes_are_labelled():
    single = Figure().subplots()
    of_class_1().plot(single)
    assert single.get_xlabel() == "probability of class 1"
    assert [text.get_text() for text in single.get_legend().get_texts()][:3] == [
        "share of class 1",
        "too high",
        "too low",
    ]


def test_bars_and_gaps_are_the_numbers():
    found = of_class_1().plot()
    bars, over, under = found.axes[0].containers
    assert [bar.get_height() for bar in bars] == found.accuracy.tolist()
    assert len(over) + len(under) == M
    assert {bar.get_x() for bar in over} == set(found.edges[:-1][found.gap > 0].tolist())


# The drawing is that of test_diagram.py, where all pairs are tried: here the corners, labels that
# nearly coincide, and labels far apart.
@pytest.mark.parametrize(
    ("share", "probability"),
    [
        (0.0, 0.01),
        (0.0, 1.0),
        (1.0, 0.01),
        (1.0, 1.0),
        (0.5, 0.51),
        (0.75, 0.76),
        (0.2, 0.4),
        (0.34, 0.4),
    ],
)
def test_labels_of_the_means_neither_meet_nor_leave_the_axes(share, probability):
    _, low = at(share, probability).plot().axes
    low.figure.draw_without_rendering()
    first, second = (text.get_window_extent() for text in low.texts)
    assert not first.overlaps(second)
    frame = low.get_window_extent()
    for box in (first, second):
        assert frame.x0 <= box.x0
        assert box.x1 <= frame.x1


def test_text_is_inside_the_figure_and_captions_do_not_meet():
    with drawing.own_style():
        figure, pairs = drawing.figure([of_class_1(seed=seed) for seed in range(4)])
        figure.draw_without_rendering()
    for text in figure.findobj(mpl.text.Text):
        box = text.get_window_extent()
        assert not text.get_text() or (0 <= box.x0 <= box.x1 <= figure.bbox.x1), text
    captions = [top.texts[0].get_window_extent() for top, _ in pairs]
    assert not any(a.overlaps(b) for a, b in pairwise(captions))


def test_before_and_after_in_one_picture(tmp_path):
    paths = save_comparison([of_class_1(), of_class_1(seed=1)], tmp_path / "class")
    assert [path.suffix for path in paths] == [".png", ".svg"]
    assert "probability of class 1" in paths[1].read_text()


def test_views_do_not_mix(tmp_path):
    plain = ReliabilityDiagram.of(*rows(), bins=M)
    zero = ReliabilityDiagram.of(*rows(), of_class=0, bins=M)
    for other in (plain, zero):
        with pytest.raises(InputError, match="of different classes: give all of them the same"):
            save_comparison([of_class_1(), other], tmp_path / "picture")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("label", [2, -1, 0.5, "yes", True])
def test_a_class_that_is_not_there_is_refused(label):
    text = f"of_class is {label!r}: pass one of the classes 0..1"
    with pytest.raises(InputError, match=re.escape(text)):
        ReliabilityDiagram.of(*rows(), of_class=label)


def test_no_class_is_the_predicted_one():
    assert wording(None) is TOP_LABEL
    assert wording(0).y == "share of class 0"
