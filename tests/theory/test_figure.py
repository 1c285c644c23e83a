"""Printed against correct: the numbers, their JSON and the picture of exactly those numbers."""

import json
import math
import sys

import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.figure import Figure

from featcal import InputError, theory
from featcal.theory import PrintedAgainstCorrect, printed


@pytest.fixture
def pair():
    return tuple(Figure().subplots(1, 2))


def test_the_numbers_are_those_of_the_functions():
    shown = PrintedAgainstCorrect.of(c=0.23, sigmas=[0.4, 0.1, 0.25])
    s = torch.tensor([0.1, 0.25, 0.4], dtype=torch.float64)
    gains = {"correct": theory.entropy_gain, "printed": printed.entropy_gain}
    slopes = {"correct": theory.entropy_gain_slope, "of_printed": printed.entropy_gain_slope}
    slopes["plotted"] = printed.plotted_slope
    assert json.loads(json.dumps(shown.as_json(), allow_nan=False)) == {
        "c": 0.23,
        "turning_point": theory.turning_point(0.23),
        "sigmas": s.tolist(),
        "gain": {name: formula(0.23, s).tolist() for name, formula in gains.items()},
        "slope": {name: formula(0.23, s).tolist() for name, formula in slopes.items()},
    }
    assert len(PrintedAgainstCorrect.of(c=2.0).sigmas) == 291


def curves(ax):
    return {line.get_label(): list(line.get_ydata()) for line in ax.get_lines()}


def test_the_picture_is_of_these_numbers(pair):
    shown = PrintedAgainstCorrect.of(c=1.0)
    drawn = shown.plot(pair)
    assert drawn.axes == pair
    gains, slopes = map(curves, pair)
    assert gains["correct"] == shown.gain.tolist()
    assert gains["as printed, Eq. (9)"] == shown.printed_gain.tolist()
    assert slopes["correct"] == shown.slope.tolist()
    assert slopes["of Eq. (9), taken correctly"] == shown.slope_of_printed.tolist()
    assert slopes["as plotted, Eq. (12)"] == shown.plotted_slope.tolist()
    for ax in pair:
        assert [note.get_text() for note in ax.texts] == ["s* = 0.588"]
        dashes = [repr(line._dash_pattern) for line in ax.get_lines() if len(line.get_ydata()) > 2]
        assert len(set(dashes)) == len(dashes)  # told apart without their hue


def test_a_figure_of_its_own_is_unknown_to_pyplot_and_a_dark_style_keeps_its_ink():
    before = plt.get_fignums()
    shown = PrintedAgainstCorrect.of(c=0.23).plot()
    assert plt.get_fignums() == before
    assert shown.axes[0].figure is shown.axes[1].figure
    with plt.style.context("dark_background"):
        pair = Figure().subplots(1, 2)
        PrintedAgainstCorrect.of(c=1.0).plot(pair)
        assert {note.get_color() for ax in pair for note in ax.texts} == {"white"}
    PrintedAgainstCorrect.of(c=1.0, sigmas=[0.01]).plot(pair)  # far below the turn
    assert pair[0].get_xlim() == (0, 0.01)


def test_what_cannot_be_shown_is_refused(pair):
    for given, culprit in [
        ({"c": 0.0}, "c is 0.0"),
        ({"c": math.inf}, "c is inf"),
        ({"sigmas": [1.0, -1.0]}, "sigmas is -1.0"),
        ({"sigmas": []}, "sigmas is empty"),
    ]:
        with pytest.raises(InputError, match=culprit):
            PrintedAgainstCorrect.of(**given)
    with pytest.raises(InputError, match="ax has 1 axes: give a pair"):
        PrintedAgainstCorrect.of(c=1.0).plot(pair[0])


def test_without_matplotlib_the_numbers_remain(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    shown = PrintedAgainstCorrect.of(c=1.0)
    with pytest.raises(InputError, match=r"pip install 'featcal\[report\]'"):
        shown.plot()
