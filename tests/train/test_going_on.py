"""A run that was killed or interrupted goes on where it was, bit for bit, or says why not."""

import os
import signal
import time
from dataclasses import replace

import pytest
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
from featcal.train import loop as loop
from featcal.train import run_folder as checkpoint
from featcal.train.loop import write_run


@pytest.mark.parametrize("steps", [2, 7, 8, 14, 20])
def test_a_killed_run_goes_on_bit_for_bit(steps, tmp_path):
    whole, history = trained()
    run_until_killed(tmp_path, steps)
    model, went_on = trained(model=small(seed=99), folder=tmp_path)
    assert same(weights_of(whole), weights_of(model))
    assert [e.loss for e in went_on] == [e.loss for e in history]
    assert [e.watched for e in went_on] == [e.watched for e in history]


def test_a_run_killed_before_its_first_checkpoint_begins_again(tmp_path):
    run_until_killed(tmp_path, 1)
    assert not list(tmp_path.iterdir())
    assert same(weights_of(trained()[0]), weights_of(trained(folder=tmp_path)[0]))


def test_a_run_killed_again_and_again_goes_on_bit_for_bit(tmp_path):
    whole, _ = trained()
    for steps in (3, 9, 10, 17):
        run_until_killed(tmp_path, steps)
    assert same(weights_of(whole), weights_of(trained(folder=tmp_path)[0]))


@pytest.mark.parametrize(
    ("loss", "recipe"),
    [
        (AdaFocal(), RECIPE),
        (FLSc(), RECIPE),
        (CE(), replace(RECIPE, optimizer="adamw", lr=1e-2)),
        (CE(), replace(RECIPE, mixup=0.3, schedule="cosine")),
        (CE(reduction="sum"), RECIPE.published()),
    ],
    ids=["adafocal", "flsc", "adamw", "mixup", "published"],
)
def test_every_kind_of_state_survives_a_kill(loss, recipe, tmp_path):
    kept = {"loss": loss, "recipe": recipe, "splits": made_splits(held_out=30)}
    whole, _ = trained(**kept)
    run_until_killed(tmp_path, 11, **kept)
    assert same(weights_of(whole), weights_of(trained(folder=tmp_path, **kept)[0]))


def test_dropout_survives_a_kill(tmp_path):
    whole, _ = trained(model=small(dropout=0.5))
    run_until_killed(tmp_path, 9, model=small(dropout=0.5))
    model, _ = trained(model=small(seed=5, dropout=0.5), folder=tmp_path)
    assert same(weights_of(whole), weights_of(model))


def tied(seed=0):
    model = small(seed)
    model.again = model.head  # two names of the same memory, which safetensors refuses
    return model


def test_tied_weights_survive_a_kill_and_are_written(tmp_path):
    whole, _ = trained(model=tied())
    run_until_killed(tmp_path, 9, model=tied())
    model, history = trained(model=tied(seed=5), folder=tmp_path)
    assert same(weights_of(whole), weights_of(model))
    write_run(tmp_path, model, history, {})


def test_how_often_a_checkpoint_is_written_changes_nothing(tmp_path):
    for name in ("often", "never"):
        (tmp_path / name).mkdir()
    often, _ = trained(folder=tmp_path / "often", checkpoint_every=0.0)
    never, _ = trained(folder=tmp_path / "never", checkpoint_every=1e9)
    assert same(weights_of(often), weights_of(never))


def test_a_checkpoint_is_written_when_its_seconds_are_over_and_at_the_end(tmp_path, monkeypatch):
    now, kept = [0.0], []

    def noted(self, model, optimizer, loss, position):
        kept.append(7 * position.epoch + position.step)  # seven steps an epoch

    def ten_seconds_a_step(label, done, of):
        now[0] = 10.0 * done

    monkeypatch.setattr(loop, "monotonic", lambda: now[0])
    monkeypatch.setattr(checkpoint.Checkpoint, "save", noted)
    with listen(ten_seconds_a_step):
        trained(folder=tmp_path, checkpoint_every=40.0)
    assert kept == [4, 8, 12, 16, 20, 21]


def test_a_finished_run_is_not_trained_again(tmp_path):
    model, history = trained(folder=tmp_path)
    told = []
    with listen(lambda *step: told.append(step)):
        again, found = trained(model=small(seed=3), folder=tmp_path)
    assert not [step for step in told if step[0] == "training"]
    assert found == history
    assert same(weights_of(model), weights_of(again))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"recipe": replace(RECIPE, lr=0.05)}, "a run with recipe.lr = 0.1, not 0.05:"),
        ({"loss": Focal()}, "a run with loss = ce, not focal"),
        ({"splits": made_splits(train=90)}, "a run with rows = 100, not 90"),
        ({"about": {"network": "vit"}}, "a run with network = None, not vit"),
    ],
)
def test_the_checkpoint_of_another_run_is_refused(changes, words, tmp_path):
    run_until_killed(tmp_path, 2)
    with pytest.raises(InputError, match=words):
        trained(folder=tmp_path, **changes)


@pytest.mark.parametrize("content", [b"", b"not a safetensors file", None])
def test_a_checkpoint_that_cannot_be_read_is_said(content, tmp_path):
    run_until_killed(tmp_path, 2)
    path = tmp_path / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:-100] if content is None else content)
    with pytest.raises(InputError, match=r"checkpoint.safetensors cannot be read.*remove this one"):
        trained(folder=tmp_path)


def test_a_weights_file_is_no_checkpoint(tmp_path):
    from safetensors.torch import save_file

    save_file(small().state_dict(), tmp_path / "checkpoint.safetensors")
    with pytest.raises(InputError, match="is no checkpoint"):
        trained(folder=tmp_path)


def test_the_checkpoint_of_another_network_is_refused(tmp_path):
    run_until_killed(tmp_path, 3)
    with pytest.raises(InputError, match="is of another network"):
        trained(model=small(norm=False), folder=tmp_path)


@pytest.mark.parametrize("part", ["train", "val", "held_out"])
@pytest.mark.parametrize("what", ["pixels", "labels"])
def test_other_images_of_the_same_number_are_refused(part, what, tmp_path):
    splits = made_splits(held_out=30)
    run_until_killed(tmp_path, 2, splits=splits)
    ours = getattr(splits, part)
    others = replace(ours, **{what: getattr(made_images(len(ours), seed=9), what)})
    words = f"is of a run with other images in {part.replace('_', ' ')}: choose another folder"
    with pytest.raises(InputError, match=words):
        trained(folder=tmp_path, splits=replace(splits, **{part: others}))
    trained(folder=tmp_path, splits=splits)


def test_many_images_are_told_apart_by_a_sample(monkeypatch):
    images = made_images(100)
    whole = checkpoint._fingerprint(images)
    monkeypatch.setattr(checkpoint, "HASHED", images.pixels.numel() // 4)
    sample = checkpoint._fingerprint(images)
    assert sample != whole
    assert sample == checkpoint._fingerprint(made_images(100))
    assert sample != checkpoint._fingerprint(made_images(100, seed=1))


@pytest.mark.parametrize("row", [0, 7, 8, 99])
def test_a_single_changed_pixel_is_noticed(row):
    images, other = made_images(100), made_images(100)
    other.pixels[row, 3, 5, 1] += 1
    assert checkpoint._fingerprint(images) != checkpoint._fingerprint(other)


def test_the_seconds_before_a_kill_count(tmp_path):
    def slow(label, done, of):
        if label == "training":
            time.sleep(0.1)
        if done == 5:
            raise SystemExit

    with pytest.raises(SystemExit), listen(slow):
        trained(folder=tmp_path, checkpoint_every=0.0)
    _, history = trained(folder=tmp_path)
    assert history[0].seconds > 0.4  # four steps were kept
    assert history[1].seconds < 0.4


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


@pytest.mark.parametrize("steps", [0, 3, 6, 20])  # of 7 an epoch, 21 in all
def test_ctrl_c_keeps_the_step_under_way(steps, tmp_path):
    assert interrupted(steps, folder=tmp_path) == steps + 1
    told = []
    with listen(lambda *step: told.append(step)):
        model, _ = trained(model=small(seed=99), folder=tmp_path)
    assert [t[1] for t in told if t[0] == "training"] == list(range(steps + 2, 22))
    assert same(weights_of(model), weights_of(trained()[0]))


def test_what_slurm_and_docker_send_keeps_the_step_under_way(tmp_path):
    assert interrupted(3, number=signal.SIGTERM, folder=tmp_path) == 4
    assert (tmp_path / checkpoint.FILE).exists()


def test_a_second_ctrl_c_does_not_wait(tmp_path):
    interrupted(3, times=2, folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_without_a_folder_ctrl_c_is_as_ever():
    interrupted(3)


def test_a_folder_with_a_finished_run_is_refused_before_anything_is_trained(tmp_path):
    (tmp_path / "run.json").touch()
    told = []
    with (
        pytest.raises(InputError, match=r"holds a finished run \(run.json\): choose another name"),
        listen(lambda *step: told.append(step)),
    ):
        trained(folder=tmp_path)
    assert not told


def test_weights_are_never_written_beside_the_record_of_another_run(tmp_path):
    model, history = trained()
    write_run(tmp_path, model, history, {"loss": "ce"})
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    other, history = trained(recipe=replace(RECIPE, seed=8))
    with pytest.raises(InputError, match="holds a finished run"):
        write_run(tmp_path, other, history, {"loss": "ce"})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == written


def test_begun_is_called_once_nothing_is_left_to_refuse(tmp_path):
    said = []
    run_until_killed(tmp_path, 3, begun=said.append)
    with pytest.raises(InputError, match=r"recipe.lr = 0.1, not 0.2"):
        trained(folder=tmp_path, recipe=replace(RECIPE, lr=0.2), begun=said.append)
    trained(folder=tmp_path, begun=said.append)
    new, killed = said
    assert new is None
    assert (killed.epoch, killed.step) == (0, 2)


def test_a_diverged_run_says_that_its_folder_is_in_the_way(tmp_path):
    wild = replace(RECIPE, lr=1e30, weight_decay=0.0)
    said = rf"or limit the gradients with clip_norm; and remove {tmp_path}, which holds this run"
    with pytest.raises(InputError, match=said):
        trained(recipe=wild, folder=tmp_path, checkpoint_every=0.0)
