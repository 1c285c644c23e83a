"""What all analyses share: pictures of their own or on given axes, light and dark, or none."""

import subprocess
import sys

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest
from matplotlib import style

from featcal import InputError
from featcal.analysis import (
    Analysis,
    BandedDiagram,
    BeforeAfter,
    ChangedPredictions,
    ClipSweep,
    ConfidentCounts,
    EntropyGrowth,
    FeatureValues,
    GroupCalibration,
    Groups,
    UnitMeans,
)
from featcal.analysis.base import all_axes


@pytest.fixture(scope="module")
def everything(net):
    rows, test = (net.val, net.head), (net.test, net.clip, net.head)
    return [
        Groups.of_data(*rows),
        UnitMeans.of(*rows),
        FeatureValues.of(*rows),
        EntropyGrowth.of(*test),
        ConfidentCounts.of(*test),
        ChangedPredictions.of(*test),
        GroupCalibration.of(*test),
        ClipSweep.of(net.val, net.test, net.head, points=5),
        BandedDiagram.of(logits=net.test.logits, labels=net.test.labels, resamples=100),
        BeforeAfter.of(*test, resamples=100),
    ]


def test_every_analysis_draws_itself_without_pyplot(everything):
    for thing in everything:
        drawn = thing.plot()
        assert type(drawn) is type(thing)
        assert thing.axes is None
        assert all_axes(drawn.axes)[0].figure.canvas.manager is None
        assert drawn.as_json() == thing.as_json()
    assert plt.get_fignums() == []


def test_every_analysis_draws_on_given_axes(everything):
    for thing in everything:
        figure, axes = plt.subplots(1, 2)
        given = axes if isinstance(thing, (BeforeAfter, UnitMeans)) else axes[0]
        assert thing.plot(given).axes is given
        plt.close(figure)


def test_dark_axes_get_light_ink_whatever_the_style_later_on(everything):
    with style.context("dark_background"):
        figure, axes = plt.subplots()
    entropy = next(thing for thing in everything if isinstance(thing, Groups))
    entropy.plot(axes)
    assert mpl.colors.to_rgb(axes.lines[0].get_color()) == (1, 1, 1)
    plt.close(figure)


def test_the_callers_style_is_left_alone(everything):
    before = mpl.rcParams.copy()
    everything[0].plot()
    assert mpl.rcParams == before


def test_notebooks_get_a_picture_unless_pyplot_shows_it(everything):
    assert everything[3]._repr_png_().startswith(b"\x89PNG")
    figure, axes = plt.subplots()
    assert everything[3].plot(axes)._repr_png_() is None
    plt.close(figure)


def test_without_matplotlib_numbers_remain(everything, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"pictures need matplotlib.*featcal\[report\]"):
        everything[0].plot()
    assert everything[0]._repr_png_() is None
    assert everything[0].as_json()["rows"] == 600


def test_the_repr_is_short(everything):
    assert all(len(repr(thing)) < 600 for thing in everything)


def test_the_base_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        Analysis()


def test_import_featcal_leaves_it_alone_and_it_leaves_matplotlib_alone():
    code = (
        "import sys, featcal; assert 'featcal.analysis' not in sys.modules; "
        "import featcal.analysis; assert 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
