"""A run that was killed or interrupted goes on where it was, bit for bit, or says why not."""

import json
import os
import signal
from dataclasses import replace

import pytest
from safetensors.torch import load, save, save_file
from tiny import (
    RECIPE,
    made_images,
    made_splits,
    run_until_killed,
    same,
    small,
    trained,
    weights_of,
)

from featcal import InputError
from featcal.core.progress import listen
from featcal.losses import CE, AdaFocal, FLSc, Focal
from featcal.train import loop, run_folder
from featcal.train.loop import write_run

FILE = run_folder.CHECKPOINT


@pytest.fixture(scope="module")
def whole():
    """A run that nothing stops: its weights and what it said."""
    model, history = trained()
    return weights_of(model), history


@pytest.mark.parametrize("stops", [[1], [8], [3, 9, 17], [20]], ids=str)
def test_a_killed_run_goes_on_bit_for_bit(stops, whole, tmp_path):
    for steps in stops:
        run_until_killed(tmp_path, steps)
    assert (tmp_path / FILE).exists() is (stops != [1])
    model, went_on = trained(model=small(seed=0 if stops == [1] else 99), folder=tmp_path)
    assert same(whole[0], weights_of(model))
    assert [(e.loss, e.watched) for e in went_on] == [(e.loss, e.watched) for e in whole[1]]
    again, found = trained(model=small(seed=3), folder=tmp_path)  # every epoch is done
    assert found == went_on
    assert same(whole[0], weights_of(again))


def tied(seed=0):
    model = small(seed, dropout=0.5)
    model.again = model.head  # two names of the same memory, which safetensors refuses
    return model


SHORT = replace(RECIPE, epochs=2)
STATES = {
    "adafocal": (small, AdaFocal(), SHORT),
    "flsc": (small, FLSc(), RECIPE),
    "adamw": (small, CE(), replace(SHORT, optimizer="adamw", lr=1e-2)),
    "mixup": (small, CE(), replace(SHORT, mixup=0.3, schedule="cosine")),
    "published": (small, CE(reduction="sum"), SHORT.published()),
    "dropout and tied weights": (tied, CE(), SHORT),
}


@pytest.mark.parametrize("case", STATES)
def test_every_kind_of_state_survives_a_kill(case, tmp_path):
    make, loss, recipe = STATES[case]
    kept = {"loss": loss, "recipe": recipe, "splits": made_splits(held_out=30)}
    uninterrupted, _ = trained(model=make(), **kept)
    run_until_killed(tmp_path, 9, model=make(), **kept)
    model, history = trained(model=make(seed=5), folder=tmp_path, **kept)
    assert same(weights_of(uninterrupted), weights_of(model))
    write_run(tmp_path, model, history, {})


def test_a_checkpoint_is_written_when_its_seconds_are_over_and_at_the_end(tmp_path, monkeypatch):
    now, kept = [0.0], []

    def noted(self, model, optimizer, loss, position):
        kept.append(7 * position.epoch + position.step)  # seven steps per epoch

    def ten_seconds_per_step(label, done, of):
        now[0] = 10.0 * done

    monkeypatch.setattr(loop, "monotonic", lambda: now[0])
    monkeypatch.setattr(run_folder.Checkpoint, "save", noted)
    with listen(ten_seconds_per_step):
        trained(folder=tmp_path, checkpoint_every=40.0)
    assert kept == [4, 8, 12, 16, 20, 21]


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The checkpoint of a run that was killed in its second step."""
    folder = tmp_path_factory.mktemp("killed")
    run_until_killed(folder, 3, splits=made_splits(held_out=30))
    return (folder / FILE).read_bytes()


def other_images(part, what):
    splits = made_splits(held_out=30)
    ours = getattr(splits, part)
    others = getattr(made_images(len(ours), seed=9), what)
    return replace(splits, **{part: replace(ours, **{what: others})})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"recipe": replace(RECIPE, lr=0.05)}, "a run with recipe.lr = 0.1, not 0.05:"),
        ({"loss": Focal()}, "a run with loss = ce, not focal"),
        ({"splits": made_splits(train=90)}, "a run with rows = 100, not 90"),
        ({"about": {"network": "vit"}}, "a run with network = None, not vit"),
        ({"model": small(norm=False)}, "is of another network"),
        ({"splits": other_images("train", "pixels")}, "other images in train"),
        ({"splits": other_images("val", "labels")}, "other images in val"),
        ({"splits": other_images("held_out", "pixels")}, "other images in held out"),
    ],
)
def test_the_checkpoint_of_another_run_is_refused(changes, words, killed, tmp_path):
    (tmp_path / FILE).write_bytes(killed)
    begun = []
    given = {"splits": made_splits(held_out=30), **changes}
    with pytest.raises(InputError, match=words):
        trained(folder=tmp_path, begun=begun.append, **given)
    assert not begun


def test_a_file_that_is_no_checkpoint_is_refused(killed, tmp_path):
    flipped = (killed[:at] + bytes([killed[at] ^ 1]) + killed[at + 1 :] for at in (900, -1, -3000))
    for content in (b"", b"not a safetensors file", killed[:-100], *flipped):
        (tmp_path / FILE).write_bytes(content)
        with pytest.raises(InputError, match=rf"{FILE} cannot be read.*remove this one"):
            trained(folder=tmp_path)
    save_file(small().state_dict(), tmp_path / FILE)
    with pytest.raises(InputError, match="is no checkpoint"):
        trained(folder=tmp_path)


def test_a_checkpoint_of_an_earlier_version_has_no_sha256_and_is_gone_on_with(killed, tmp_path):
    texts = json.loads(killed[8 : 8 + int.from_bytes(killed[:8], "little")])["__metadata__"]
    assert len(texts.pop("sha256")) == 64
    (tmp_path / FILE).write_bytes(save(load(killed), texts))
    begun = []
    trained(folder=tmp_path, begun=begun.append, splits=made_splits(held_out=30))
    assert begun[0] is not None


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": 7},
        {"step": -1},
        {"total": "x"},
        {"history": [{"epoch": 1}]},
        {"seconds": None},
    ],
)
def test_a_position_that_cannot_be_is_refused(change, killed, tmp_path):
    texts = json.loads(killed[8 : 8 + int.from_bytes(killed[:8], "little")])["__metadata__"]
    about = json.loads(texts["featcal.train"])
    about["position"].update(change)
    texts = {"featcal.train": json.dumps(about)}
    (tmp_path / FILE).write_bytes(save(load(killed), texts))
    with pytest.raises(InputError, match=rf"{FILE} cannot be read"):
        trained(folder=tmp_path, splits=made_splits(held_out=30))


def test_images_are_told_apart_by_every_pixel_and_many_by_a_sample(monkeypatch):
    splits = made_splits()
    found = run_folder.fingerprints(splits)
    for row in (0, 7, 99):
        other = made_splits()
        other.train.pixels[row, 3, 5, 1] += 1
        assert run_folder.fingerprints(other)["train"] != found["train"]
    monkeypatch.setattr(run_folder, "HASHED", splits.train.pixels.numel() // 4)
    sample = run_folder.fingerprints(splits)
    assert sample["train"] != found["train"]
    assert sample == run_folder.fingerprints(made_splits())


def interrupted(steps, times=1, number=signal.SIGINT, **options):
    """Ctrl-C, or another signal, in the middle of a step, after so many whole ones."""
    model, seen = small(), []

    def press(*_):
        if model.training:
            seen.append(1)
        if len(seen) == steps + 1:
            for _ in range(times):
                os.kill(os.getpid(), number)

    model.head.register_forward_hook(press)
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        trained(model=model, **options)
    assert signal.getsignal(number) is before
    return len(seen)


@pytest.mark.parametrize(
    ("number", "steps"), [(signal.SIGINT, 0), (signal.SIGINT, 20), (signal.SIGTERM, 6)]
)
def test_a_signal_waits_for_the_end_of_the_step_and_keeps_it(number, steps, whole, tmp_path):
    assert interrupted(steps, number=number, folder=tmp_path) == steps + 1
    told = []
    with listen(lambda *step: told.append(step)):
        model, _ = trained(model=small(seed=99), folder=tmp_path)
    assert [t[1] for t in told if t[0] == "training"] == list(range(steps + 2, 22))
    assert same(weights_of(model), whole[0])


def test_a_second_ctrl_c_does_not_wait_and_without_a_folder_none_does(tmp_path):
    interrupted(3, times=2, folder=tmp_path)
    assert not list(tmp_path.iterdir())
    interrupted(3)


def test_a_finished_run_is_never_written_over(whole, tmp_path):
    write_run(tmp_path, small(), whole[1], {"loss": "ce"})
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(InputError, match=r"holds a finished run \(run.json\): choose another name"):
        trained(folder=tmp_path)
    with pytest.raises(InputError, match="holds a finished run"):
        write_run(tmp_path, small(seed=8), whole[1], {"loss": "ce"})
    kept = sorted(path.name for path in tmp_path.iterdir())
    (tmp_path / FILE).write_bytes(b"of the run that ended")  # killed between the last two steps
    (tmp_path / f".{run_folder.RECORD}.featcal-abcdefgh").mkdir()
    (tmp_path / ".lock").touch()
    with pytest.raises(InputError, match="holds a finished run"):
        trained(folder=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == kept
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == written
