"""Reliability diagrams: the numbers of a loop, drawn exactly, of the prediction or of one class."""

import sys
from itertools import pairwise
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib import pyplot
from matplotlib.figure import Figure
from sklearn.calibration import calibration_curve

from featcal.core.checks import InputError
from featcal.metrics import Bins
from featcal.report import ReliabilityDiagram, save_comparison
from featcal.report.diagram import figure, own_style

M = 15


@pytest.fixture(autouse=True)
def _closed():
    """Figures of pyplot live until they are closed."""
    yield
    pyplot.close("all")


def predictions(*, seed=0):
    """Overconfident rows in the upper bins; with 4 classes the lowest three bins stay empty."""
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(700, 4, generator=draw, dtype=torch.float64) * 2
    noise = torch.rand(700, 4, generator=draw, dtype=torch.float64)
    return logits, (logits / 2 - (-noise.log()).log()).argmax(1)


def drawn(**options):
    logits, labels = predictions(**options)
    return ReliabilityDiagram.of(logits=logits, labels=labels, bins=M, title="before")


def binary(*, seed=0):
    """P(class 1) of a sigmoid model that is too sure, and labels."""
    draw = np.random.default_rng(seed)
    z = draw.normal(-0.5, 2, 800)
    return 1 / (1 + np.exp(-z)), draw.uniform(size=800) < 1 / (1 + np.exp(-z / 2))


def of_class_1(**options):
    return ReliabilityDiagram.of(*binary(**options), of_class=1, bins=10, title="before")


def at(accuracy, confidence, rows=100, **options):
    """A diagram with this overall accuracy and this overall confidence, all in one bin."""
    sums = torch.zeros(3, M, dtype=torch.float64)
    sums[:, 5] = torch.tensor([1, confidence, accuracy]) * rows
    return ReliabilityDiagram(Bins(*sums), **options)


def mixed():
    """Empty, exact, over- and underconfident bins."""
    count = torch.tensor([0, 400, 100, 25, 1], dtype=torch.float64)
    confidence = torch.tensor([0, 0.25, 0.5, 0.7, 0.9]).double() * count
    correct = torch.tensor([0, 100, 80, 10, 1], dtype=torch.float64)
    return ReliabilityDiagram(Bins(count, confidence, correct), "mixed")


# --- numbers ---


def test_numbers_equal_a_loop():
    logits, labels = predictions()
    confidence, predicted = logits.softmax(1).max(1)
    confidence, right = confidence.numpy(), (predicted == labels).numpy()
    rows = []
    for low, high in pairwise(np.linspace(0, 1, M + 1)):
        inside = (confidence > low) & (confidence <= high)
        means = (right[inside].mean(), confidence[inside].mean()) if inside.any() else (np.nan,) * 2
        rows.append((inside.mean(), *means))
    share, accuracy, mean = np.array(rows).T
    diagram = drawn()
    assert np.isnan(accuracy).any()
    np.testing.assert_allclose(diagram.share, share, atol=1e-12)
    np.testing.assert_allclose(diagram.accuracy, accuracy, atol=1e-12)
    np.testing.assert_allclose(diagram.mean_confidence, mean, atol=1e-12)
    np.testing.assert_allclose(diagram.gap, mean - accuracy, atol=1e-12)
    assert diagram.ece == pytest.approx(np.nansum(share * abs(mean - accuracy)), abs=1e-12)
    assert diagram.overall_accuracy == pytest.approx(right.mean(), abs=1e-12)
    assert diagram.overall_confidence == pytest.approx(confidence.mean(), abs=1e-12)
    from_probs = ReliabilityDiagram.of(logits.softmax(1).numpy(), labels.numpy(), bins=M)
    np.testing.assert_allclose(from_probs.accuracy, diagram.accuracy, atol=1e-12)


def test_one_class_equals_sklearn():
    p, labels = binary()
    share, mean = calibration_curve(labels, p, n_bins=10)
    z = torch.tensor(p).logit()
    for found in (
        of_class_1(),
        ReliabilityDiagram.of(np.stack([1 - p, p], 1), labels.astype(int), of_class=1, bins=10),
        ReliabilityDiagram.of(logits=z[:, None], labels=labels[:, None], of_class=1, bins=10),
    ):
        np.testing.assert_allclose(found.accuracy, share, rtol=1e-9)  # every bin has rows
        np.testing.assert_allclose(found.mean_confidence, mean, rtol=1e-9)
    zero = ReliabilityDiagram.of(p, labels, of_class=0, bins=10)
    torch.testing.assert_close(zero.gap.flip(0), -of_class_1().gap)  # the mirror image
    top = ReliabilityDiagram.of(p, binary()[1], bins=10)
    assert float(top.share[:5].sum()) == 0  # the prediction covers the upper half alone
    assert (top.wording.x, of_class_1().wording.x) == ("confidence", "probability of class 1")


def test_no_rows_are_refused():
    with pytest.raises(InputError, match="no rows"):
        ReliabilityDiagram(Bins(*torch.zeros(3, M, dtype=torch.float64)))


# --- the picture ---


def test_the_axes_show_exactly_the_numbers():
    diagram = drawn().plot()
    top, low = diagram.axes
    accuracy, over, under, share = (
        [(bar.get_x(), bar.get_y(), bar.get_height()) for bar in container]
        for container in (*top.containers, *low.containers)
    )
    edges, gap = diagram.edges.tolist(), diagram.gap.tolist()
    filled = [i for i in range(M) if diagram.share[i] > 0]
    assert 0 < len(filled) < M
    assert accuracy == [(edges[i], 0, float(diagram.accuracy[i])) for i in filled]
    assert share == [(edges[i], 0, float(diagram.share[i])) for i in filled]
    for gaps, sign in ((over, 1), (under, -1)):
        chosen = [i for i in filled if gap[i] * sign > 0]
        wanted = np.array([(edges[i], float(diagram.accuracy[i]), gap[i]) for i in chosen])
        np.testing.assert_allclose(gaps, wanted, atol=1e-12)
    assert {round(bar.get_width(), 12) for bar in top.containers[0]} == {round(1 / M, 12)}


def test_kinds_of_bins_differ_by_more_than_colour_and_few_rows_are_fainter():
    top, _ = mixed().plot().axes
    accuracy, over, under = top.containers
    assert [len(accuracy), len(over), len(under)] == [4, 1, 2]  # an exact bin has no gap to draw
    assert over[0].get_hatch() != under[0].get_hatch()
    darkness = [3 - sum(bar.get_facecolor()[:3]) for bar in accuracy]
    assert darkness[0] == darkness[1] > darkness[2] > darkness[3] > 0
    labels = [text.get_text() for text in top.figure.legends[0].get_texts()]
    assert labels[-1].startswith("few samples")
    plenty = at(0.5, 0.6, rows=1000).plot().axes[0].figure.legends[0].get_texts()
    assert len(plenty) == len(labels) - 1


def test_text_is_readable_and_inside_the_figure():
    title = "a name with $dollars_1$ that is far too long to fit above one panel of a figure"
    with own_style():
        several, pairs = figure([of_class_1(seed=seed) for seed in range(4)])
    captions = [top.texts[0].get_window_extent() for top, _ in pairs]
    assert not any(a.overlaps(b) for a, b in pairwise(captions))
    for one in (ReliabilityDiagram(drawn().bins, title).plot().axes[0].figure, several):
        one.draw_without_rendering()
        for text in (text for text in one.findobj(mpl.text.Text) if text.get_text()):
            box = text.get_window_extent()
            assert text.get_size() >= 8
            assert 0 <= box.x0 <= box.x1 <= one.bbox.x1, text
            assert 0 <= box.y0 <= box.y1 <= one.bbox.y1, text


def test_given_axes_are_used():
    axes = Figure().subplots(2, 1)
    one, both = drawn().plot(axes[0]), drawn().plot(axes)
    assert one.axes == (axes[0], None)
    assert both.axes == tuple(axes)
    assert axes[0].get_xlabel() == axes[1].get_xlabel() == "confidence"
    top, low = Figure().subplots(2, 1, sharex=True)
    drawn().plot((top, low))
    assert (top.get_xlabel(), low.get_xlabel()) == ("", "confidence")  # labelled once
    with pytest.raises(InputError, match="ax has 3 axes"):
        drawn().plot(Figure().subplots(3, 1))


@pytest.mark.parametrize(("panels", "rows", "columns"), [(1, 1, 1), (5, 2, 3)])
def test_panels_wrap_and_share_their_scales(panels, rows, columns):
    whole, pairs = figure([drawn(seed=seed) for seed in range(panels)])
    corners = [top.get_position() for top, _ in pairs]
    assert len({round(box.x0, 9) for box in corners}) == columns
    assert len({round(box.y0, 9) for box in corners}) == rows
    assert len({low.get_ylim() for _, low in pairs}) == 1
    width, height = whole.get_size_inches()
    for (_, low), box in zip(pairs, corners, strict=True):
        assert box.width * width == pytest.approx(box.height * height)
        assert (low.get_position().x0, low.get_position().width) == (box.x0, box.width)


# --- files ---


def test_same_numbers_give_the_same_bytes_and_nothing_global_changes(tmp_path):
    before = dict(mpl.rcParams)
    first = save_comparison([drawn(), mixed()], tmp_path / "T1.4")
    assert dict(mpl.rcParams) == before
    known = [path.read_bytes() for path in first]
    with mpl.rc_context({"font.size": 20, "axes.facecolor": "black"}):
        save_comparison([drawn(), mixed()], tmp_path / "T1.4", overwrite=True)
    assert [path.read_bytes() for path in first] == known
    assert first == [tmp_path / "T1.4.png", tmp_path / "T1.4.svg"]
    assert first[0].read_bytes().startswith(b"\x89PNG")
    assert b"Software" not in first[0].read_bytes()
    assert ElementTree.parse(first[1]).getroot().tag.endswith("svg")
    shown, ax = pyplot.subplots()
    assert pyplot.get_fignums() == [shown.number]
    assert drawn()._repr_png_().startswith(b"\x89PNG")
    assert drawn().plot(ax)._repr_png_() is None  # a notebook shows it once
    pyplot.close(shown)


@pytest.mark.parametrize(
    ("diagrams", "formats", "message"),
    [
        ([], ("png",), "diagrams has 0 entries"),
        ([mixed()] * 7, ("png",), "pass 1 to 6"),
        ([of_class_1(), mixed()], ("png",), "of different classes"),
        ([mixed()], ("png", "gif"), "one or more of 'png' and 'svg'"),
        ([mixed()], ("png", "svg"), r"picture\.svg exists"),
    ],
)
def test_what_cannot_be_drawn_is_refused_and_nothing_written(tmp_path, diagrams, formats, message):
    (tmp_path / "picture.svg").write_text("mine")
    with pytest.raises(InputError, match=message):
        save_comparison(diagrams, tmp_path / "picture", formats=formats)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_without_matplotlib_the_numbers_stay_and_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    diagram = mixed()
    assert diagram.ece > 0
    assert diagram._repr_png_() is None
    for draw in (diagram.plot, lambda: save_comparison([diagram], tmp_path / "picture")):
        with pytest.raises(InputError, match=r"pip install 'featcal\[report\]'"):
            draw()
