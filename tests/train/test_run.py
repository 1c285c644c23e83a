"""The loop: it learns, it watches, it goes on where it was killed, bit for bit."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import HALF, made_images, made_splits, same, small, weights_of

from featcal import InputError
from featcal.core.progress import listen
from featcal.losses import CE, AdaFocal, FLSc, Focal, parse_loss
from featcal.metrics import accuracy, ece, nll
from featcal.train import Epoch, Recipe, train
from featcal.train import run as loop

RECIPE = Recipe(epochs=3, batch=16, seed=7)


def trained(model=None, loss=None, recipe=RECIPE, splits=None, **options):
    model = small() if model is None else model
    splits = made_splits() if splits is None else splits
    loss = CE() if loss is None else loss
    return model, train(model, splits, loss, recipe, normalise=HALF, **options)


class Killed(BaseException):
    """What a kill is to the loop: it ends between two lines."""


def killed_after(steps):
    """A listener that ends the run when so many steps are done."""

    def tell(label, done, of):
        if label == "training" and done == steps:
            raise Killed

    return tell


def run_until_killed(folder, steps, **options):
    with pytest.raises(Killed), listen(killed_after(steps)):
        trained(folder=folder, checkpoint_every=0.0, **options)


def test_it_learns():
    _, history = trained(recipe=replace(RECIPE, epochs=8))
    assert history[-1].loss < history[0].loss / 2
    assert history[-1].watched.accuracy > 0.9


def test_what_is_said_of_an_epoch():
    splits = made_splits()
    model, history = trained(splits=splits, watch_every=2)
    assert [epoch.epoch for epoch in history] == [1, 2, 3]
    assert [epoch.watched is None for epoch in history] == [True, False, False]
    with torch.no_grad():
        logits, labels = model.eval()(HALF(splits.val.pixels)), splits.val.labels
    last = history[-1].watched
    assert last.nll == pytest.approx(nll(logits=logits, labels=labels), abs=1e-6)
    assert last.accuracy == accuracy(logits=logits, labels=labels)
    assert last.ece == pytest.approx(ece(logits=logits, labels=labels), abs=1e-6)
    assert Epoch.of_json(json.loads(json.dumps(history[-1].as_json()))) == history[-1]


def test_every_epoch_is_reported_when_it_is_done():
    seen = []
    _, history = trained(report=seen.append)
    assert tuple(seen) == history


def test_the_same_seed_gives_the_same_weights_and_another_others():
    one, again = weights_of(trained()[0]), weights_of(trained()[0])
    assert same(one, again)
    assert not same(one, weights_of(trained(recipe=replace(RECIPE, seed=8))[0]))


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


def test_how_often_a_checkpoint_is_written_changes_nothing(tmp_path):
    for name in ("often", "never"):
        (tmp_path / name).mkdir()
    often, _ = trained(folder=tmp_path / "often", checkpoint_every=0.0)
    never, _ = trained(folder=tmp_path / "never", checkpoint_every=1e9)
    assert same(weights_of(often), weights_of(never))


def test_a_finished_run_is_not_trained_again(tmp_path):
    model, history = trained(folder=tmp_path)
    told = []
    with listen(lambda *step: told.append(step)):
        again, found = trained(model=small(seed=3), folder=tmp_path)
    assert not [step for step in told if step[0] == "training"]
    assert found == history
    assert same(weights_of(model), weights_of(again))


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"recipe": replace(RECIPE, lr=0.05)}, "a run with recipe.lr = 0.1, not 0.05:"),
        ({"loss": Focal()}, "a run with loss = ce, not focal"),
        ({"splits": made_splits(train=90)}, "a run with rows = 100, not 90"),
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


def test_random_states_outside_are_left_alone():
    torch.manual_seed(0)
    model = small(dropout=0.3)
    torch_before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    trained(model=model)
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert (np.random.get_state()[1] == numpy_before).all()


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(InputError, match="batch is 128, and train has 100 rows"):
        trained(recipe=Recipe(epochs=1))


def test_a_last_batch_of_one_row_is_trained_on_where_it_can_be():
    _, history = trained(splits=made_splits(train=97), recipe=replace(RECIPE, epochs=1))
    assert len(history) == 1
    model = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.BatchNorm2d(3))
    model.extend([torch.nn.Flatten(), torch.nn.Linear(3, 4)])
    with pytest.raises(InputError, match=r"one row.*more than 1 value.*another batch than 16"):
        trained(model=model, splits=made_splits(train=97))


def test_adafocal_wants_rows_of_its_own():
    with pytest.raises(InputError, match=r"adafocal adapts to rows of its own.*held_out=5000"):
        trained(loss=AdaFocal())


def test_adafocal_adapts_after_every_epoch(monkeypatch):
    seen = []
    kept = loop.Trainer._adapt

    def noted(self):
        before = self.loss.gammas.clone()
        kept(self)
        seen.append(not torch.equal(self.loss.gammas, before))

    monkeypatch.setattr(loop.Trainer, "_adapt", noted)
    loss = AdaFocal()
    trained(loss=loss, splits=made_splits(held_out=30))
    assert seen == [True, True, True]
    assert torch.equal(loss.gammas, AdaFocal().gammas)  # the caller's own is as it was


def test_a_scheduled_loss_changes_with_the_epochs(monkeypatch):
    seen = []
    kept = loop.Trainer._epoch

    def noted(self):
        found = kept(self)
        seen.append(self.step.loss.gamma)
        return found

    monkeypatch.setattr(loop.Trainer, "_epoch", noted)
    trained(loss=FLSc(), recipe=replace(RECIPE, epochs=7))
    assert seen == [5.0, 5.0, 3.0, 3.0, 3.0, 1.0, 1.0]


def test_a_folder_that_is_not_there_is_said_before_anything_is_trained(tmp_path):
    with pytest.raises(InputError, match="run does not exist: make it first"):
        trained(folder=tmp_path / "run")


def test_the_checkpoint_of_another_network_is_refused(tmp_path):
    run_until_killed(tmp_path, 3)
    with pytest.raises(InputError, match="is of another network"):
        trained(model=small(norm=False), folder=tmp_path)


def test_the_model_is_left_in_eval_mode():
    assert not trained()[0].training


def test_a_look_every_zero_epochs_is_refused():
    with pytest.raises(InputError, match="watch_every is 0"):
        trained(watch_every=0)


def test_a_diverging_run_is_stopped_with_a_remedy():
    with pytest.raises(InputError, match=r"the loss is (nan|inf) after epoch \d: lower lr"):
        trained(recipe=replace(RECIPE, lr=1e30, weight_decay=0.0, warmup=0))


def test_progress_counts_the_steps_of_all_epochs():
    told = []
    with listen(lambda label, done, of: told.append((label, done, of))):
        trained()
    assert [t for t in told if t[0] == "training"] == [("training", n, 21) for n in range(1, 22)]


@pytest.mark.parametrize("text", ["ce", "mmce", "soft_ece", "max_entropy", "dual_focal"])
def test_other_losses_lower_themselves(text):
    _, history = trained(loss=parse_loss(text), recipe=replace(RECIPE, epochs=6))
    assert history[-1].loss < history[0].loss


def test_labels_the_network_has_no_class_for_are_refused():
    splits = made_splits()
    images = made_images(100, 1)
    extra = type(images)(images.pixels, images.labels + 1)
    five = replace(splits, class_names=("a", "b", "c", "d", "e"), train=extra)
    with pytest.raises(InputError, match="the model gives 4 logits, and there are 5 classes"):
        trained(splits=five)
