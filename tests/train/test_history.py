"""What a run said of its epochs, read back while it is under way, after a kill and at the end."""

import json

import pytest
import torch
from safetensors.torch import save_file
from tiny import HALF, made_splits, small

from featcal.core.checks import InputError
from featcal.core.progress import listen
from featcal.losses import CE, Focal
from featcal.train import History, Recipe, history, train
from featcal.train.history import looks
from featcal.train.loop import write_run
from featcal.train.run_folder import FILE as CHECKPOINT
from featcal.train.run_folder import KEY, RECORD, made_folder

RECIPE = Recipe(epochs=3, batch=50, seed=7)
NO_RUN = r"holds no run: give a folder that featcal train made, with run\.json or checkpoint\."


def trained(folder, loss=None, **options):
    loss = CE() if loss is None else loss
    return train(small(), made_splits(), loss, RECIPE, normalise=HALF, folder=folder, **options)


class Stopped(Exception):
    """What stands for a kill."""


def killed_after(steps, folder):
    def stop(what, done, _total):
        if what == "training" and done == steps:
            raise Stopped

    with pytest.raises(Stopped), listen(stop):
        trained(folder, checkpoint_every=0)


def test_a_finished_run_tells_what_train_returned(tmp_path):
    history = trained(tmp_path, Focal(gamma=2.0))
    facts = {"loss": "focal(gamma=2)", "recipe": RECIPE.as_json()}
    write_run(tmp_path, small(), history, facts)
    found = History.read(str(tmp_path))
    assert found == History(tmp_path, "focal(gamma=2)", 3, history)
    assert json.loads(json.dumps(found.as_json())) == {
        "run": str(tmp_path),
        "loss": "focal(gamma=2)",
        "planned": 3,
        "epochs": [epoch.as_json() for epoch in history],
    }


def test_a_record_of_few_facts_is_enough(tmp_path):
    history = trained(tmp_path, watch_every=2)
    write_run(tmp_path, small(), history, {})
    found = History.read(tmp_path)
    assert (found.loss, found.planned) == ("?", 3)
    assert looks(found.epochs) == [(epoch.epoch, epoch.watched) for epoch in history[1:]]


def test_a_killed_run_tells_of_the_epochs_that_are_over(tmp_path):
    killed_after(6, tmp_path)  # two steps an epoch; kept is what was done before
    found = History.read(tmp_path)
    assert (found.loss, found.planned) == ("ce", 3)
    assert [epoch.epoch for epoch in found.epochs] == [1, 2]
    whole = trained(None)
    assert [epoch.loss for epoch in found.epochs] == [epoch.loss for epoch in whole[:2]]


def test_a_run_in_its_first_epoch_has_nothing_to_tell_yet(tmp_path):
    killed_after(2, tmp_path)
    with pytest.raises(InputError, match="has no epoch that is over: there is nothing to show yet"):
        History.read(tmp_path)


def test_a_run_before_its_first_checkpoint_is_told_from_no_run(tmp_path):
    with pytest.raises(InputError, match=NO_RUN):
        History.read(tmp_path)
    with made_folder(tmp_path), pytest.raises(InputError, match="has kept no checkpoint yet: look"):
        History.read(tmp_path)


@pytest.mark.parametrize("name", ["missing", RECORD, "x" * 300])
def test_what_is_no_folder_is_refused(tmp_path, name):
    (tmp_path / RECORD).write_text("{}")
    with pytest.raises(InputError, match="is no folder: give that of a run of featcal train"):
        History.read(tmp_path / name)


def test_a_run_that_ends_between_two_looks_is_found(tmp_path, monkeypatch):
    killed_after(6, tmp_path)
    whole = trained(None)

    def ends(path):
        write_run(tmp_path, small(), whole, {"loss": "ce"})
        assert not path.exists()
        raise FileNotFoundError(path)

    monkeypatch.setattr(history, "said_in", ends)
    assert History.read(tmp_path).epochs == whole


def test_the_record_is_believed_where_a_checkpoint_is_left(tmp_path):
    killed_after(6, tmp_path)
    kept = (tmp_path / CHECKPOINT).read_bytes()
    write_run(tmp_path, small(), trained(None), {"loss": "ce"})
    (tmp_path / CHECKPOINT).write_bytes(kept)  # as a kill in between leaves it
    assert len(History.read(tmp_path).epochs) == 3


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "null", "{}", '{"epochs": 3}', '{"epochs": [{}]}', '{"epochs": [1]}'),
        *('{"epochs": [], "recipe": null}', '{"epochs": [], "recipe": []}'),
        '{"epochs": [{"epoch": 1, "rate": 1, "loss": null, "seconds": 1}]}',
        '{"epochs": [{"epoch": 1, "rate": 1, "loss": NaN, "seconds": 1}]}',
        '{"epochs": [{"epoch": 1, "rate": 1, "loss": 1, "seconds": 1, "ece": 0.5}]}',
    ],
)
def test_a_record_that_is_none_is_refused_by_name(tmp_path, text):
    (tmp_path / RECORD).write_text(text)
    with pytest.raises(
        InputError, match=r"run\.json cannot be read \(\w+: .*\): it is damaged, or"
    ):
        History.read(tmp_path)


def test_a_record_without_epochs_has_nothing_to_show(tmp_path):
    (tmp_path / RECORD).write_text('{"epochs": []}')
    with pytest.raises(InputError, match="has no epoch that is over"):
        History.read(tmp_path)


def checkpoint_of(path, metadata):
    save_file({"w": torch.zeros(1)}, path, metadata)


@pytest.mark.parametrize(
    "about",
    [
        *(None, "{", "null", "{}", '{"format": 1}', '{"format": 2, "settings": {}}'),
        '{"format": 2, "settings": {"loss": "ce", "recipe": {"epochs": "x"}}, '
        '"position": {"history": []}}',
    ],
)
def test_a_checkpoint_that_is_none_is_refused_by_name(tmp_path, about):
    checkpoint_of(tmp_path / CHECKPOINT, None if about is None else {KEY: about})
    with pytest.raises(
        InputError, match=r"checkpoint\.safetensors cannot be read \(\w+: .*\): it is damaged"
    ):
        History.read(tmp_path)


def test_a_torn_checkpoint_is_refused_by_name(tmp_path):
    (tmp_path / CHECKPOINT).write_bytes(b"\x10\x00")
    with pytest.raises(
        InputError, match=r"checkpoint\.safetensors cannot be read \(\w+: .*\): it is damaged"
    ):
        History.read(tmp_path)
