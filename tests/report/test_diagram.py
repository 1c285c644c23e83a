import subprocess
import sys
from itertools import pairwise
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from featcal.core.checks import InputError
from featcal.metrics import Bins
from featcal.report import ReliabilityDiagram, save_comparison
from featcal.report import diagram as module

M = 15


def predictions(*, rows=700, scale=2.0, seed=0):
    """Overconfident rows in the upper bins; with 4 classes the lowest three bins stay empty."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, 4, generator=generator, dtype=torch.float64) * scale
    noise = torch.rand(rows, 4, generator=generator, dtype=torch.float64)
    return logits, (logits / 2 - (-noise.log()).log()).argmax(1)


def drawn(**options):
    logits, labels = predictions(**options)
    return ReliabilityDiagram.of(logits=logits, labels=labels, bins=M, title="before")


def at(accuracy, confidence, rows=100):
    """A diagram with this overall accuracy and this overall confidence, all in one bin."""
    sums = torch.zeros(3, M, dtype=torch.float64)
    sums[:, 5] = torch.tensor([1, confidence, accuracy]) * rows
    return ReliabilityDiagram(Bins(*sums))


def mixed():
    """Empty, exact, over- and underconfident bins."""
    count = torch.tensor([0, 400, 100, 25, 1], dtype=torch.float64)
    confidence = torch.tensor([0, 0.25, 0.5, 0.7, 0.9]).double() * count
    correct = torch.tensor([0, 100, 80, 10, 1], dtype=torch.float64)
    return ReliabilityDiagram(Bins(count, confidence, correct), "mixed")


def bars(ax):
    """Left edge, bottom and signed height of every bar, a list for each call of `bar`."""
    return [
        [(bar.get_x(), bar.get_y(), bar.get_height()) for bar in container]
        for container in ax.containers
    ]


def naive(logits, labels):
    """Share, accuracy and mean confidence of each bin, NaN where it is empty, by a loop."""
    confidence, predicted = logits.softmax(1).max(1)
    confidence, right = confidence.numpy(), (predicted == labels).numpy()
    edges = np.linspace(0, 1, M + 1)
    rows = []
    for low, high in pairwise(edges):
        inside = (confidence > low) & (confidence <= high)
        means = (right[inside].mean(), confidence[inside].mean()) if inside.any() else (np.nan,) * 2
        rows.append((inside.mean(), *means))
    return np.array(rows).T, right.mean(), confidence.mean()


def test_numbers_equal_a_loop():
    diagram = drawn()
    (share, accuracy, confidence), right, sure = naive(*predictions())
    assert np.isnan(accuracy).any()
    np.testing.assert_allclose(diagram.edges, np.linspace(0, 1, M + 1), atol=1e-15)
    np.testing.assert_allclose(diagram.share, share, atol=1e-12)
    np.testing.assert_allclose(diagram.accuracy, accuracy, atol=1e-12)
    np.testing.assert_allclose(diagram.mean_confidence, confidence, atol=1e-12)
    np.testing.assert_allclose(diagram.gap, confidence - accuracy, atol=1e-12)
    assert diagram.ece == pytest.approx(np.nansum(share * abs(confidence - accuracy)), abs=1e-12)
    assert diagram.overall_accuracy == pytest.approx(right, abs=1e-12)
    assert diagram.overall_confidence == pytest.approx(sure, abs=1e-12)


def test_probabilities_and_logits_give_the_same_diagram():
    logits, labels = predictions()
    from_probs = ReliabilityDiagram.of(logits.softmax(1).numpy(), labels.numpy(), bins=M)
    np.testing.assert_allclose(from_probs.accuracy, drawn().accuracy, atol=1e-12)


def test_no_rows_are_refused():
    with pytest.raises(InputError, match="no rows"):
        ReliabilityDiagram(Bins(*torch.zeros(3, M, dtype=torch.float64)))


def test_the_axes_show_exactly_the_numbers():
    diagram = drawn().plot()
    top, low = diagram.axes
    accuracy, over, under = bars(top)
    (share,) = bars(low)
    edges, gap = diagram.edges.tolist(), diagram.gap.tolist()
    filled = [i for i in range(M) if diagram.share[i] > 0]
    assert 0 < len(filled) < M
    assert accuracy == [(edges[i], 0, float(diagram.accuracy[i])) for i in filled]
    assert share == [(edges[i], 0, float(diagram.share[i])) for i in filled]
    for drawn_gaps, sign in ((over, 1), (under, -1)):
        chosen = [i for i in filled if gap[i] * sign > 0]
        wanted = np.array([(edges[i], float(diagram.accuracy[i]), gap[i]) for i in chosen])
        np.testing.assert_allclose(drawn_gaps, wanted, atol=1e-12)
    widths = [bar.get_width() for container in top.containers for bar in container]
    assert widths == pytest.approx([1 / M] * len(widths))


def test_over_and_underconfident_bins_differ_by_more_than_colour():
    top, _ = mixed().plot().axes
    accuracy, over, under = top.containers
    assert [len(accuracy), len(over), len(under)] == [4, 1, 2]  # an exact bin has no gap to draw
    assert over[0].get_hatch() != under[0].get_hatch()
    assert over[0].get_y() + over[0].get_height() == pytest.approx(0.7)
    assert under[0].get_y() + under[0].get_height() == pytest.approx(0.5)


def test_bins_of_few_rows_are_fainter_and_the_legend_says_so():
    diagram = mixed().plot()
    darkness = [3 - sum(bar.get_facecolor()[:3]) for bar in diagram.axes[0].containers[0]]
    assert darkness[0] == darkness[1] > darkness[2] > darkness[3] > 0
    labels = [text.get_text() for text in diagram.axes[0].figure.legends[0].get_texts()]
    assert labels[-1].startswith("few samples")
    plenty = at(0.5, 0.6, rows=1000).plot().axes[0].figure.legends[0].get_texts()
    assert len(plenty) == len(labels) - 1


@pytest.mark.parametrize("accuracy", [0.0, 0.2, 0.34, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("confidence", [0.01, 0.4, 0.51, 0.76, 1.0])
def test_labels_of_the_means_neither_meet_nor_leave_the_axes(accuracy, confidence):
    _, low = at(accuracy, confidence).plot().axes
    low.figure.draw_without_rendering()
    first, second = (text.get_window_extent() for text in low.texts)
    assert not first.overlaps(second)
    frame = low.get_window_extent()
    for box in (first, second):
        assert frame.x0 <= box.x0
        assert box.x1 <= frame.x1
        assert box.y0 >= frame.y0 + frame.height / 1.6  # above the tallest bar


def test_text_is_readable_and_inside_the_figure():
    title = "a name with $dollars_1$ that is far too long to fit above one panel of a figure"
    figure = ReliabilityDiagram(drawn().bins, title).plot().axes[0].figure
    figure.draw_without_rendering()
    texts = [text for text in figure.findobj(mpl.text.Text) if text.get_text()]
    assert min(text.get_size() for text in texts) >= 8
    for text in texts:
        box = text.get_window_extent()
        assert box.x0 >= 0, text
        assert box.y0 >= 0, text
        assert box.x1 <= figure.bbox.x1, text
        assert box.y1 <= figure.bbox.y1, text


def test_given_axes_are_used():
    axes = Figure().subplots(2, 1)
    one, both = drawn().plot(axes[0]), drawn().plot(axes)
    assert one.axes == (axes[0], None)
    assert both.axes == tuple(axes)
    assert both.title == "before"
    assert axes[0].get_xlabel() == axes[1].get_xlabel() == "confidence"
    assert axes[0].get_aspect() == 1
    with pytest.raises(InputError, match="ax has 3 axes"):
        drawn().plot(Figure().subplots(3, 1))


def test_a_shared_axis_is_labelled_once():
    top, low = Figure().subplots(2, 1, sharex=True)
    drawn().plot((top, low))
    assert (top.get_xlabel(), low.get_xlabel()) == ("", "confidence")


def test_nothing_global_changes(tmp_path):
    from matplotlib import pyplot

    before = dict(mpl.rcParams)
    drawn().plot()
    save_comparison([drawn()], tmp_path / "picture")
    assert pyplot.get_fignums() == []
    assert dict(mpl.rcParams) == before


def test_a_notebook_shows_the_picture_once():
    from matplotlib import pyplot

    assert drawn().plot()._repr_png_().startswith(b"\x89PNG")
    figure, ax = pyplot.subplots()
    assert drawn().plot(ax)._repr_png_() is None
    pyplot.close(figure)


def test_both_formats_are_written(tmp_path):
    paths = save_comparison([drawn(), mixed()], tmp_path / "T1.4")
    assert paths == [tmp_path / "T1.4.png", tmp_path / "T1.4.svg"]
    assert sorted(tmp_path.iterdir()) == paths
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    assert b"Software" not in paths[0].read_bytes()
    assert ElementTree.parse(paths[1]).getroot().tag.endswith("svg")


def test_same_numbers_give_the_same_bytes(tmp_path):
    first = save_comparison([drawn(), mixed()], tmp_path / "a")
    with mpl.rc_context({"font.size": 20, "axes.facecolor": "black"}):
        second = save_comparison([drawn(), mixed()], tmp_path / "b")
    other = save_comparison([drawn(seed=1), mixed()], tmp_path / "c")
    for a, b, c in zip(first, second, other, strict=True):
        assert a.read_bytes() == b.read_bytes() != c.read_bytes()


@pytest.mark.parametrize(
    ("panels", "rows", "columns"), [(1, 1, 1), (4, 1, 4), (5, 2, 3), (6, 2, 3)]
)
def test_panels_wrap_and_share_their_scales(panels, rows, columns):
    figure, pairs = module.drawing.figure([drawn(seed=seed) for seed in range(panels)])
    corners = [top.get_position() for top, _ in pairs]
    assert len({round(box.x0, 9) for box in corners}) == columns
    assert len({round(box.y0, 9) for box in corners}) == rows
    assert len({low.get_ylim() for _, low in pairs}) == 1
    width, height = figure.get_size_inches()
    for (_, low), box in zip(pairs, corners, strict=True):
        assert box.width * width == pytest.approx(box.height * height)
        assert low.get_position().x0 == box.x0
        assert low.get_position().width == box.width


def test_an_existing_path_is_refused_unless_asked(tmp_path):
    (tmp_path / "picture.svg").write_text("mine")
    with pytest.raises(InputError, match=r"picture\.svg exists"):
        save_comparison([drawn()], tmp_path / "picture")
    assert [path.name for path in tmp_path.iterdir()] == ["picture.svg"]
    assert (tmp_path / "picture.svg").read_text() == "mine"
    save_comparison([drawn()], tmp_path / "picture", overwrite=True)
    assert (tmp_path / "picture.svg").read_text() != "mine"


def test_an_error_while_drawing_leaves_nothing(tmp_path, monkeypatch):
    save = Figure.savefig

    def fails_at_svg(figure, *args, **options):
        if options["format"] == "svg":
            raise OSError("disk full")
        save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", fails_at_svg)
    with pytest.raises(OSError, match="disk full"):
        save_comparison([drawn()], tmp_path / "picture")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("count", "formats", "message"),
    [
        (0, ("png",), "diagrams has 0 entries"),
        (7, ("png",), "pass 1 to 6"),
        (1, (), "formats is"),
        (1, "png", "formats is 'png'"),
        (1, ("png", "gif"), "one or more of 'png' and 'svg'"),
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path, count, formats, message):
    with pytest.raises(InputError, match=message):
        save_comparison([drawn()] * count, tmp_path / "picture", formats=formats)
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_numbers_stay_and_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    diagram = drawn()
    assert diagram.ece > 0
    assert diagram._repr_png_() is None
    for draw in (diagram.plot, lambda: save_comparison([diagram], tmp_path / "picture")):
        with pytest.raises(InputError, match=r"pip install 'featcal\[report\]'"):
            draw()
    assert list(tmp_path.iterdir()) == []


def test_importing_the_report_does_not_import_matplotlib():
    code = "import sys, featcal.report; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
