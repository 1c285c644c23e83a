"""What a run said of its epochs, read back at any moment, and the picture of its numbers."""

import json
import re
import sys

import pytest
import torch
from safetensors.torch import save_file
from tiny import Killed, killed_after, small, trained

from featcal.core.checks import InputError
from featcal.core.progress import listen
from featcal.losses import Focal
from featcal.train import Epoch, History, Recipe, history, save_history
from featcal.train.history import Watched, looks
from featcal.train.loop import write_run
from featcal.train.run_folder import CHECKPOINT, KEY, RECORD, made_folder

RECIPE = Recipe(epochs=3, batch=50, seed=7)  # two steps per epoch


@pytest.fixture(scope="module")
def whole():
    return trained(recipe=RECIPE, loss=Focal(gamma=2.0), watch_every=2)[1]


def kill(folder, steps):
    options = {"loss": Focal(gamma=2.0), "watch_every": 2, "checkpoint_every": 0}
    with pytest.raises(Killed), listen(killed_after(steps)):
        trained(recipe=RECIPE, folder=folder, **options)


def test_a_finished_run_tells_what_train_returned(whole, tmp_path):
    facts = {"loss": "focal(gamma=2)", "recipe": RECIPE.as_json()}
    write_run(tmp_path, small(), whole, facts)
    found = History.read(str(tmp_path))
    assert found == History(tmp_path, "focal(gamma=2)", 3, whole)
    assert json.loads(json.dumps(found.as_json())) == {
        "run": str(tmp_path),
        "loss": "focal(gamma=2)",
        "planned": 3,
        "epochs": [epoch.as_json() for epoch in whole],
    }
    assert looks(found.epochs) == [(epoch.epoch, epoch.watched) for epoch in whole[1:]]
    (tmp_path / "few").mkdir()
    write_run(tmp_path / "few", small(), whole, {})
    found = History.read(tmp_path / "few")
    assert (found.loss, found.planned) == ("?", 3)


def test_a_killed_run_tells_of_the_epochs_that_are_over(whole, tmp_path, monkeypatch):
    kill(tmp_path, 2)
    with pytest.raises(InputError, match="has no epoch that is over"):
        History.read(tmp_path)
    kill(tmp_path, 6)
    found = History.read(tmp_path)
    assert (found.loss, found.planned) == ("focal(gamma=2.0)", 3)
    assert [epoch.loss for epoch in found.epochs] == [epoch.loss for epoch in whole[:2]]
    kept = (tmp_path / CHECKPOINT).read_bytes()

    def ends(path):
        write_run(tmp_path, small(), whole, {})
        raise FileNotFoundError(path)

    monkeypatch.setattr(history, "said_in", ends)  # a run that ends between two looks
    assert History.read(tmp_path).epochs == whole
    (tmp_path / CHECKPOINT).write_bytes(kept)  # as a kill in between leaves it
    assert History.read(tmp_path).epochs == whole


def test_a_run_before_its_first_checkpoint_is_told_from_no_run(tmp_path):
    with pytest.raises(InputError, match=rf"holds no run: .* with {RECORD} or {CHECKPOINT}"):
        History.read(tmp_path)
    with made_folder(tmp_path), pytest.raises(InputError, match="has kept no checkpoint yet: look"):
        History.read(tmp_path)
    for name in ("missing", "x" * 300):
        with pytest.raises(InputError, match="is no folder"):
            History.read(tmp_path / name)


EPOCH = '{"epochs": [{"epoch": 1, "rate": 1, "loss": %s, "seconds": 1}]}'
POSITION = '"position": {"history": []}}'


def checkpoint(about):
    def write(folder):
        save_file({"w": torch.zeros(1)}, folder / CHECKPOINT, about and {KEY: about})

    return write


@pytest.mark.parametrize(
    "damage",
    [
        *("", "{", "null", '{"epochs": 3}', '{"epochs": [1]}', '{"epochs": [], "recipe": []}'),
        *(EPOCH % "null", EPOCH % "NaN", EPOCH % '1, "ece": 0.5'),
        *map(checkpoint, (None, "{", '{"format": 1}', '{"format": 2, "settings": {}}')),
        lambda folder: (folder / CHECKPOINT).write_bytes(b"\x10\x00"),
    ],
)
def test_a_file_that_is_damaged_is_refused_by_name(tmp_path, damage):
    (tmp_path / RECORD).write_text(damage) if isinstance(damage, str) else damage(tmp_path)
    (file,) = tmp_path.iterdir()
    with pytest.raises(InputError, match=rf"{file} cannot be read \(.*\): it is damaged"):
        History.read(tmp_path)


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


def test_every_number_is_drawn_where_its_title_says():
    run = made(6, every=2)
    axes = history._drawn({"run": run}).axes
    titles = ["training loss", "val accuracy, %", "val NLL", "val ECE, %"]
    assert [ax.get_title(loc="left") for ax in axes] == titles
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
    assert len({ax.get_xlim() for ax in axes}) == 1
    assert axes[3].get_ylim()[0] == 0
    assert all(tick == round(tick) for tick in axes[3].get_xticks())


def test_runs_are_told_apart_and_named_in_their_order():
    runs = {f"run {number}": made(2) for number in range(history.MAX_RUNS)}
    figure = history._drawn(runs)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == list(runs)
    for ax in figure.axes:
        seen = [(line.get_color(), line.get_linestyle()) for line in ax.get_lines()]
        assert len(set(seen)) == history.MAX_RUNS
    assert [handle.get_color() for handle in legend.legend_handles] == [look[0] for look in seen]


def test_a_panel_of_val_that_was_never_watched_says_so():
    axes = history._drawn({"run": made(3, every=9)}).axes
    for ax, words in zip(axes, (0, 1, 1, 1), strict=True):
        assert [text.get_text() for text in ax.texts] == ["not looked at yet"] * words
        assert bool(len(ax.get_yticks())) == (words == 0)  # no made-up scale


@pytest.mark.parametrize("form", ["png", "svg"])
def test_the_same_numbers_give_the_same_bytes(tmp_path, form):
    names = ["bad $x_{ y$", "_hidden"]  # which are no formulas
    runs = dict.fromkeys(names, made(3))
    first, second = (save_history(runs, tmp_path / f"{name}.{form}") for name in "xy")
    assert first.read_bytes() == second.read_bytes()
    with pytest.raises(InputError, match=rf"x\.{form}"):
        save_history({"a": made(4)}, first)
    assert first.read_bytes() == second.read_bytes()
    save_history({"a": made(4)}, str(first), overwrite=True)
    assert first.read_bytes() != second.read_bytes()
    if form == "svg":
        assert set(names) <= set(re.findall(r"<!-- (.*?) -->", second.read_text()))
    else:
        width, height = (int.from_bytes(first.read_bytes()[at : at + 4]) for at in (16, 20))
        assert (width, height) == (1080, 780)  # 7.2 x 5.2 inches


def test_what_cannot_be_drawn_is_refused(tmp_path, monkeypatch):
    one = History(tmp_path, "ce", 1, tuple(made(1)))
    too_many = {str(number): made(1) for number in range(22)}
    for runs in ({}, too_many, tuple(made(1)), {"b": []}, {"a": [one]}, {"a": [1]}):
        with pytest.raises(InputError, match="runs"):
            save_history(runs, tmp_path / "h.png")
    for name in ("h.pdf", "h", "png"):
        with pytest.raises(InputError, match=r"ends in neither \.png nor \.svg"):
            save_history({"a": made(2)}, tmp_path / name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"pip install 'featcal\[report\]'"):
        save_history({"a": made(2)}, tmp_path / "h.png")
    assert not list(tmp_path.iterdir())
