"""The picture of how networks learned holds the numbers it was given, and nothing else."""

import re
import sys

import pytest

from featcal.core.errors import InputError
from featcal.train import Epoch, picture, save_history
from featcal.train.watch import Watched

TITLES = ["training loss", "val accuracy, %", "val NLL", "val ECE, %"]


def made(epochs, every=1, start=2.0):
    """A run that halves its loss every epoch."""
    return [
        Epoch(
            number,
            rate=0.1,
            loss=start / 2**number,
            seconds=1.0,
            watched=Watched(nll=start / number, accuracy=1 - 0.5 / number, ece=0.1 / number)
            if number % every == 0
            else None,
        )
        for number in range(1, epochs + 1)
    ]


def panels(runs):
    figure = picture._drawn(runs)
    return figure, figure.axes


def test_every_number_is_drawn_where_its_title_says():
    run = made(6, every=2)
    _, axes = panels({"run": run})
    assert [ax.get_title(loc="left") for ax in axes] == TITLES
    seen = [epoch for epoch in run if epoch.watched]
    expected = [
        [(epoch.epoch, epoch.loss) for epoch in run],
        [(epoch.epoch, 100 * epoch.watched.accuracy) for epoch in seen],
        [(epoch.epoch, epoch.watched.nll) for epoch in seen],
        [(epoch.epoch, 100 * epoch.watched.ece) for epoch in seen],
    ]
    for ax, points in zip(axes, expected, strict=True):
        (line,) = ax.get_lines()
        assert line.get_xydata().tolist() == [pytest.approx(point) for point in points]


def test_runs_are_told_apart_and_named_in_their_order():
    runs = {f"run {number}": made(2) for number in range(picture.MAX_RUNS)}
    figure, axes = panels(runs)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == list(runs)
    for ax in axes:
        looks = {(line.get_color(), line.get_linestyle()) for line in ax.get_lines()}
        assert len(looks) == picture.MAX_RUNS


@pytest.mark.parametrize(("length", "columns"), [(5, 3), (44, 2), (200, 1)])
def test_long_names_have_lines_of_their_own(length, columns):
    runs = {f"{number}".rjust(length, "x"): made(2) for number in range(4)}
    figure, _ = panels(runs)
    assert figure.legends[0]._ncols == columns
    assert len(panels({"one": made(1)})[0].legends[0].get_texts()) == 1


def test_epochs_are_marked_where_they_are_few():
    few, many = (panels({"run": made(n)})[1][0].get_lines()[0] for n in (picture.FEW, 31))
    assert (few.get_marker(), many.get_marker()) == ("o", "None")


def test_a_run_that_was_never_watched_has_its_loss_alone():
    _, axes = panels({"run": made(3, every=9)})
    assert [len(ax.get_lines()[0].get_xydata()) for ax in axes] == [3, 0, 0, 0]


@pytest.mark.parametrize("form", ["png", "svg"])
def test_the_same_numbers_give_the_same_bytes(tmp_path, form):
    first, second = (save_history({"a": made(3)}, tmp_path / f"{name}.{form}") for name in "xy")
    assert first.read_bytes() == second.read_bytes()
    assert first == tmp_path / f"x.{form}"
    other = save_history({"a": made(4)}, str(tmp_path / f"z.{form}"))
    assert other.read_bytes() != first.read_bytes()


def test_names_are_no_formulas(tmp_path):
    path = save_history({"cost in $ and $": made(2), "_hidden": made(2)}, tmp_path / "h.svg")
    words = re.findall(r"<!-- (.*?) -->", path.read_text())
    assert "cost in $ and $" in words
    assert "_hidden" in words


def test_a_file_is_replaced_only_when_asked(tmp_path):
    path = tmp_path / "h.png"
    path.write_bytes(b"mine")
    with pytest.raises(InputError, match=r"h\.png"):
        save_history({"a": made(2)}, path)
    assert path.read_bytes() == b"mine"
    save_history({"a": made(2)}, path, overwrite=True)
    assert path.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("name", ["h.pdf", "h", "h.PNGS", "png"])
def test_another_ending_is_refused(tmp_path, name):
    with pytest.raises(InputError, match=r"picture .* ends in '.*': give \.png or \.svg"):
        save_history({"a": made(2)}, tmp_path / name)


def test_what_cannot_be_drawn_is_refused(tmp_path):
    path = tmp_path / "h.png"
    with pytest.raises(InputError, match="runs has 0 entries: pass 1 to 21"):
        save_history({}, path)
    with pytest.raises(InputError, match="runs has 22 entries: pass 1 to 21"):
        save_history({str(number): made(1) for number in range(22)}, path)
    with pytest.raises(InputError, match=r"runs\['b'\] has no epochs: leave it out"):
        save_history({"a": made(1), "b": []}, path)
    assert not list(tmp_path.iterdir())


def test_matplotlib_is_asked_for_by_name(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"pip install 'featcal\[report\]'"):
        save_history({"a": made(2)}, tmp_path / "h.png")
