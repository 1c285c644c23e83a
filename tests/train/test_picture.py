"""The picture of how networks learned holds the numbers it was given, and nothing else."""

import re
import sys
from pathlib import Path

import pytest

from featcal.core.checks import InputError
from featcal.train import Epoch, History, save_history
from featcal.train import history as picture
from featcal.train.history import Watched

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


@pytest.mark.parametrize(("length", "columns"), [(5, 3), (30, 2), (60, 1), (250, 1)])
def test_long_names_have_room(tmp_path, length, columns):
    runs = {f"{number}".rjust(length, "x"): made(2) for number in range(4)}
    figure, axes = panels(runs)
    (legend,) = figure.legends
    assert legend._ncols == columns
    figure.savefig(tmp_path / "h.png")  # the layout is made when it is drawn
    box, page = legend.get_window_extent(), figure.bbox
    assert 0 <= box.x0 < box.x1 <= page.width
    assert box.y0 >= 0
    assert box.y1 < min(ax.get_window_extent().y0 for ax in axes)


def test_a_single_run_has_its_name_in_the_middle():
    figure, _ = panels({"one": made(1)})
    (legend,) = figure.legends
    assert legend._ncols == 1


def test_epochs_are_marked_where_they_are_few():
    few, many = (panels({"run": made(n)})[1][0].get_lines()[0] for n in (picture.FEW, 31))
    assert (few.get_marker(), many.get_marker()) == ("o", "")
    _, axes = panels({"short": made(3), "long": made(31)})
    assert {line.get_marker() for ax in axes for line in ax.get_lines()} == {""}


def test_a_run_that_was_never_watched_has_its_loss_alone_and_no_made_up_scale():
    _, axes = panels({"run": made(3, every=9)})
    assert [len(ax.get_lines()[0].get_xydata()) for ax in axes] == [3, 0, 0, 0]
    for ax, words in zip(axes, (0, 1, 1, 1), strict=True):
        assert [text.get_text() for text in ax.texts] == ["not looked at yet"] * words
        assert bool(len(ax.get_yticks())) == (words == 0)


def test_all_panels_have_the_same_epochs_and_ece_begins_at_zero():
    _, axes = panels({"run": made(40, every=20)})
    assert len({ax.get_xlim() for ax in axes}) == 1
    assert axes[3].get_ylim()[0] == 0
    assert all(tick == round(tick) for tick in panels({"run": made(2)})[1][3].get_xticks())


def test_the_line_in_the_legend_is_that_of_the_run():
    figure, axes = panels({"a": made(2), "b": made(2)})
    shown = [handle.get_color() for handle in figure.legends[0].legend_handles]
    assert shown == [line.get_color() for line in axes[2].get_lines()]


@pytest.mark.parametrize("form", ["png", "svg"])
def test_the_same_numbers_give_the_same_bytes(tmp_path, form):
    first, second = (save_history({"a": made(3)}, tmp_path / f"{name}.{form}") for name in "xy")
    assert first.read_bytes() == second.read_bytes()
    assert first == tmp_path / f"x.{form}"
    other = save_history({"a": made(4)}, str(tmp_path / f"z.{form}"))
    assert other.read_bytes() != first.read_bytes()


def test_names_are_no_formulas(tmp_path):
    names = ["bad $x_{ y$", "_hidden", "x^2 in $x^2$"]
    path = save_history(dict.fromkeys(names, made(2)), tmp_path / "h.svg")
    words = re.findall(r"<!-- (.*?) -->", path.read_text())
    assert set(names) <= set(words)


def test_a_picture_is_large_enough_to_read(tmp_path):
    path = save_history({Path("run"): made(2)}, tmp_path / "H.PNG")
    width, height = (int.from_bytes(path.read_bytes()[at : at + 4]) for at in (16, 20))
    assert (width, height) == (1080, 780)  # 7.2 x 5.2 inches


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
    with pytest.raises(
        InputError, match=r"picture .* ends in neither \.png nor \.svg: give one of"
    ):
        save_history({"a": made(2)}, tmp_path / name)


def test_what_cannot_be_drawn_is_refused(tmp_path):
    path = tmp_path / "h.png"
    with pytest.raises(InputError, match="runs has 0 entries: pass 1 to 21"):
        save_history({}, path)
    with pytest.raises(InputError, match="runs has 22 entries: pass 1 to 21"):
        save_history({str(number): made(1) for number in range(22)}, path)
    with pytest.raises(InputError, match=r"runs\['b'\] has no epochs: leave it out"):
        save_history({"a": made(1), "b": []}, path)
    with pytest.raises(InputError, match=r"runs is a tuple: pass a dict, such as \{'focal': what"):
        save_history(tuple(made(1)), path)
    one = History(tmp_path, "ce", 1, tuple(made(1)))
    for other in (one, [1], "ab"):
        with pytest.raises(
            InputError, match=r"runs\['a'\] holds a \w+: pass what train returned, or"
        ):
            save_history({"a": other}, path)
    assert not list(tmp_path.iterdir())


def test_matplotlib_is_asked_for_by_name(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"pip install 'featcal\[report\]'"):
        save_history({"a": made(2)}, tmp_path / "h.png")
