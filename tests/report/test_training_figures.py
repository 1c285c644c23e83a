"""The pictures of the networks we trained are drawn from the result file, and the page is true."""

import re
from pathlib import Path

import pytest

from featcal.report.paper import TrainingRuns

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def figures(imported):
    return imported("training_figures")


@pytest.fixture(scope="module")
def ours():
    return TrainingRuns.read(ROOT / "results")


def points(svg):
    """Where the marks are, in points of the page."""
    marks = re.findall(r'<use xlink:href="#m[^"]*" x="([-\d.]+)" y="([-\d.]+)"', svg)
    return [float(number) for mark in marks for number in mark]


def test_the_pictures_are_those_of_today(figures, tmp_path, monkeypatch, capsys):
    names = ("LOSSES", "EPOCHS")
    kept = {name: points(getattr(figures, name).read_text()) for name in names}
    for name in names:
        monkeypatch.setattr(figures, name, tmp_path / f"{name}.svg")
    figures.main()
    assert "Wrote" in capsys.readouterr().out
    for name in names:
        assert len(kept[name]) > 200
        drawn = points((tmp_path / f"{name}.svg").read_text())
        assert drawn == pytest.approx(kept[name], abs=2)  # fonts may move the axes a little


def test_every_network_of_the_paper_has_three_marks(figures, ours):
    from matplotlib.figure import Figure

    for network, count in zip(figures.PANELS, (8, 14, 14), strict=True):
        runs = list(figures.of_paper(ours, network))
        assert len(runs) == count
        assert {name for name, _ in runs} == set(figures.NAMES)
        ax = Figure().subplots()
        figures.draw_panel(ax, runs)
        marks = [line for line in ax.get_lines() if line.get_marker() != "None"]
        for line, (recipe, *_) in zip(marks, figures.LOOKS, strict=True):
            ece = [100 * run.row(recipe)["metrics"]["ece"] for _, run in runs]
            assert list(line.get_xdata()) == pytest.approx(ece)
            names = [figures.NAMES[round(float(y))] for y in line.get_ydata()]
            assert names == [name for name, _ in runs]


def test_what_the_page_says_of_learning_is_what_the_file_holds(figures, ours):
    found = figures.of_paper(ours, figures.LEARNED)
    curves = {name: run.content["curve"] for name, run in found if run.seed == figures.SEED}
    last = {name: curve[-1] for name, curve in curves.items()}
    assert all([point["epoch"] for point in c] == list(range(5, 65, 5)) for c in curves.values())
    plain, mmce = last.pop("Cross Entropy"), last.pop("MMCE")
    assert (round(100 * plain["ece"]), round(100 * mmce["ece"])) == (9, 8)
    for name, told in {"Cross Entropy": (8, 13), "MMCE": (5, 15)}.items():
        before = [round(100 * point["ece"]) for point in curves[name][:-1]]
        assert (min(before), max(before)) == told
    assert round(100 * (plain["accuracy"] - mmce["accuracy"])) == 3
    assert max(point["ece"] for point in last.values()) < 0.03
    short = {name: plain["accuracy"] - point["accuracy"] for name, point in last.items()}
    assert round(100 * short.pop("Brier Loss")) == 7
    assert max(short.values()) < 0.02
    slow = curves["Brier Loss"]
    assert slow[0]["accuracy"] < 0.5 * curves["Cross Entropy"][0]["accuracy"]
