"""The loop: it learns, it watches, it says what cannot be."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import HALF, RECIPE, made_images, made_splits, same, small, trained, weights_of

from featcal import InputError
from featcal.core.progress import listen
from featcal.datasets import Normalisation, normalisations
from featcal.losses import CE, AdaFocal, FLSc, Focal, parse_loss
from featcal.metrics import accuracy, ece, nll
from featcal.train import Epoch, Recipe, train
from featcal.train import loop as loop


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


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained()
    assert not list(tmp_path.iterdir())


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
    _, history = trained(recipe=Recipe(epochs=1, batch=100))  # all of them is no more than all
    assert len(history) == 1


def test_a_last_batch_of_one_row_is_trained_on_where_it_can_be():
    _, history = trained(splits=made_splits(train=97), recipe=replace(RECIPE, epochs=1))
    assert len(history) == 1
    model = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.BatchNorm2d(3))
    model.extend([torch.nn.Flatten(), torch.nn.Linear(3, 4)])
    with pytest.raises(InputError, match=r"one row.*more than 1 value.*another batch than 16"):
        trained(model=model, splits=made_splits(train=97))


def test_adafocal_wants_rows_of_its_own():
    with pytest.raises(InputError, match=r"adafocal adapts to rows of its own.*held_out=10"):
        trained(loss=AdaFocal())


def test_adafocal_adapts_after_every_epoch(monkeypatch):
    seen = []
    kept = loop.Trainer._adapt

    def noted(self):
        gammas, before = self.loss.gammas, self.loss.gammas.clone()
        kept(self)
        assert self.loss.gammas is gammas  # which a captured graph reads
        seen.append(not torch.equal(gammas, before))

    monkeypatch.setattr(loop.Trainer, "_adapt", noted)
    loss = AdaFocal()
    trained(loss=loss, splits=made_splits(held_out=30))
    assert seen == [True, True, True]
    assert torch.equal(loss.gammas, AdaFocal().gammas)  # the caller's own is as it was


def test_adafocal_looks_at_held_out_rows_alone(monkeypatch):
    seen, updated = [], AdaFocal.updated

    def noted(self, logits, labels):
        seen.append(labels)
        return updated(self, logits, labels)

    monkeypatch.setattr(AdaFocal, "updated", noted)
    splits = made_splits(val=30, held_out=30)
    trained(loss=AdaFocal(), splits=splits)
    assert len(seen) == 3
    assert all(torch.equal(labels, splits.held_out.labels) for labels in seen)


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


def test_the_model_is_left_in_eval_mode():
    assert not trained()[0].training


def test_a_look_every_zero_epochs_is_refused():
    with pytest.raises(InputError, match="watch_every is 0"):
        trained(watch_every=0)


def test_a_diverging_run_is_stopped_with_a_remedy():
    wild = replace(RECIPE, lr=1e30, weight_decay=0.0)
    said = r"the loss is (nan|inf) after epoch \d: lower lr \(1e\+30\), or limit .* with clip_norm$"
    with pytest.raises(InputError, match=said):
        trained(recipe=wild)
    with pytest.raises(InputError, match=r"or lower clip_norm \(1e\+30\)$"):
        trained(recipe=replace(wild, clip_norm=1e30))


def test_soft_labels_for_a_loss_that_takes_none_are_refused():
    with pytest.raises(InputError, match=r"smoothing is 0.1.*focal takes class numbers.*ce"):
        trained(loss=Focal(), recipe=replace(RECIPE, smoothing=0.1))


@pytest.mark.parametrize("schedule", ["steps", "cosine"])
def test_the_rate_of_an_epoch_is_its_highest(schedule):
    recipe = replace(RECIPE, epochs=5, warmup=1, schedule=schedule)
    _, history = trained(recipe=recipe)
    rates = [epoch.rate for epoch in history]
    assert rates[0] == recipe.rate_at(6 / 7)  # seven steps, the last the highest
    assert rates[1:] == [recipe.rate_at(epoch) for epoch in range(1, 5)]


def test_every_step_is_taken_at_its_rate(monkeypatch):
    seen, take = [], loop.Step.__call__

    def noted(self, rows):
        seen.append(self.optimizer.param_groups[0]["lr"])
        return take(self, rows)

    monkeypatch.setattr(loop.Step, "__call__", noted)
    recipe = replace(RECIPE, epochs=5, warmup=1)
    trained(recipe=recipe)
    assert seen == [recipe.rate_at(epoch + step / 7) for epoch in range(5) for step in range(7)]


def test_a_model_in_eval_mode_is_trained_like_any_other():
    assert same(weights_of(trained(model=small().eval())[0]), weights_of(trained()[0]))


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("cifar100", normalisations("cifar100")[0]),
        ("made", Normalisation.measured(made_splits().train)),
    ],
)
def test_pixels_are_normalised_as_published_or_as_measured(name, own):
    splits = replace(made_splits(), name=name)
    found, expected = small(), small()
    train(found, splits, CE(), RECIPE)
    train(expected, splits, CE(), RECIPE, normalise=own)
    assert same(weights_of(found), weights_of(expected))


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
