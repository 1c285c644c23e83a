"""Printed against correct: the numbers, their JSON and the picture of exactly those numbers."""

import json
import math
import sys

import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from featcal import InputError, theory
from featcal.theory import PrintedAgainstCorrect, printed


@pytest.fixture
def pair():
    return tuple(Figure().subplots(1, 2))


def test_the_numbers_are_those_of_the_functions():
    shown = PrintedAgainstCorrect.of(c=0.23, sigmas=[0.4, 0.1, 0.25])
    s = torch.tensor([0.1, 0.25, 0.4], dtype=torch.float64)
    assert torch.equal(shown.sigmas, s)
    assert torch.equal(shown.gain, theory.entropy_gain(0.23, s))
    assert torch.equal(shown.printed_gain, printed.entropy_gain(0.23, s))
    assert torch.equal(shown.slope, theory.entropy_gain_slope(0.23, s))
    assert torch.equal(shown.slope_of_printed, printed.entropy_gain_slope(0.23, s))
    assert torch.equal(shown.plotted_slope, printed.plotted_slope(0.23, s))
    assert shown.turning_point == theory.turning_point(0.23)


@pytest.mark.parametrize("c", [1e-3, 1.0, 40.0])
def test_the_default_deviations_show_both_sides_of_the_turn(c):
    shown = PrintedAgainstCorrect.of(c=c)
    assert shown.sigmas[0].item() == pytest.approx(0.1 * c)
    assert shown.sigmas[-1].item() == pytest.approx(3 * c)
    assert (shown.plotted_slope > 0).all()
    if c == 1.0:
        assert (shown.slope[shown.sigmas > shown.turning_point] < 0).all()


def test_json_is_plain_and_whole():
    shown = PrintedAgainstCorrect.of(c=1.0, sigmas=(0.01, 1.0))
    found = json.loads(json.dumps(shown.as_json(), allow_nan=False))
    assert found["c"] == 1.0
    assert found["sigmas"] == [0.01, 1.0]
    assert found["turning_point"] == shown.turning_point
    assert found["gain"] == {
        "correct": shown.gain.tolist(),
        "printed": shown.printed_gain.tolist(),
    }
    assert sorted(found["slope"]) == ["correct", "of_printed", "plotted"]


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
        styles = [line.get_linestyle() for line in ax.get_lines() if len(line.get_ydata()) > 2]
        assert "-" in styles


def test_lines_differ_without_their_hue(pair):
    PrintedAgainstCorrect.of(c=1.0).plot(pair)
    looks = {
        line.get_label(): repr(line._dash_pattern)
        for line in pair[1].get_lines()
        if not line.get_label().startswith("_")
    }
    assert len(set(looks.values())) == len(looks) == 3


def test_a_figure_of_its_own_is_unknown_to_pyplot():
    before = plt.get_fignums()
    shown = PrintedAgainstCorrect.of(c=0.23).plot()
    assert plt.get_fignums() == before
    assert shown.axes[0].figure is shown.axes[1].figure


def test_a_dark_style_keeps_its_ink():
    with plt.style.context("dark_background"):
        pair = Figure().subplots(1, 2)
        PrintedAgainstCorrect.of(c=1.0).plot(pair)
        assert {note.get_color() for ax in pair for note in ax.texts} == {"white"}
        inks = [to_hex(text.get_color()) for text in pair[1].get_legend().get_texts()]
        assert set(inks) == {"#ffffff"}


def test_one_deviation_far_below_the_turn_can_be_drawn(pair):
    PrintedAgainstCorrect.of(c=1.0, sigmas=[0.01]).plot(pair)
    assert pair[0].get_xlim() == (0, 0.01)


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        ({"c": 0.0}, "PrintedAgainstCorrect: c is 0.0: give numbers above 0"),
        ({"c": math.inf}, "PrintedAgainstCorrect: c is inf: give a finite number above 0"),
        (
            {"sigmas": [1.0, -1.0]},
            "PrintedAgainstCorrect: sigmas is -1.0: give finite numbers above 0",
        ),
        ({"sigmas": []}, "PrintedAgainstCorrect: sigmas is empty: give at least one deviation"),
    ],
)
def test_what_cannot_be_shown_is_refused(request_, text):
    with pytest.raises(InputError) as caught:
        PrintedAgainstCorrect.of(**request_)
    assert str(caught.value) == text


def test_one_pair_of_axes_is_needed(pair):
    with pytest.raises(InputError, match="ax has 1 axes: give a pair"):
        PrintedAgainstCorrect.of(c=1.0).plot(pair[0])


def test_without_matplotlib_the_numbers_remain(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    shown = PrintedAgainstCorrect.of(c=1.0)
    with pytest.raises(InputError, match=r"pip install 'featcal\[report\]'"):
        shown.plot()
