"""The loop: it learns, it watches, it adapts, it says what cannot be, and what a run leaves."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import CLASSES, HALF, RECIPE, made_images, made_splits, same, small, trained, weights_of
from torch import nn

from featcal import InputError, Pack
from featcal.cli.run import Run
from featcal.core.progress import listen
from featcal.datasets import ImageData, Normalisation, normalisations
from featcal.losses import CE, AdaFocal, FLSc, Focal
from featcal.metrics import accuracy, ece, nll
from featcal.train import Epoch, Recipe, loop, train
from featcal.train.history import Batches, Watched, outputs

ONE = replace(RECIPE, epochs=1)
OTHER = Normalisation((0.4, 0.4, 0.4), (0.2, 0.2, 0.2))


def test_it_learns_and_says_so_of_every_epoch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen, told, splits, fresh = [], [], made_splits(), small(dropout=0.1).eval()
    torch_before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    with listen(lambda *step: told.append(step)):
        model, history = trained(
            fresh,
            recipe=replace(RECIPE, epochs=8),
            splits=splits,
            watch_every=3,
            report=seen.append,
        )
    assert history[-1].loss < history[0].loss / 2
    assert history[-1].watched.accuracy > 0.9
    assert tuple(seen) == history
    assert [epoch.epoch for epoch in history if epoch.watched] == [3, 6, 8]
    assert [step for step in told if step[0] == "training"] == [
        ("training", n, 56) for n in range(1, 57)
    ]
    assert not model.training
    with torch.no_grad():
        logits, labels = model(HALF(splits.val.pixels)), splits.val.labels
    last = history[-1].watched
    for name, metric in {"nll": nll, "accuracy": accuracy, "ece": ece}.items():
        assert getattr(last, name) == pytest.approx(metric(logits=logits, labels=labels), abs=1e-6)
    assert Epoch.of_json(history[-1].as_json()) == history[-1]
    assert not list(tmp_path.iterdir())  # without a folder nothing is written
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert (np.random.get_state()[1] == numpy_before).all()


def test_the_same_seed_gives_the_same_weights_and_another_others():
    one, again = weights_of(trained()[0]), weights_of(trained(model=small().eval())[0])
    assert same(one, again)
    assert not same(one, weights_of(trained(recipe=replace(RECIPE, seed=8))[0]))


def test_every_step_is_taken_at_its_rate(monkeypatch):
    seen, take = [], loop.Step.__call__

    def noted(self, rows):
        seen.append(self.optimizer.param_groups[0]["lr"])
        return take(self, rows)

    monkeypatch.setattr(loop.Step, "__call__", noted)
    recipe = replace(RECIPE, epochs=3, warmup=1)
    _, history = trained(recipe=recipe)
    rates = [recipe.rate_at(epoch + step / 7) for epoch in range(3) for step in range(7)]
    assert seen == rates
    assert [epoch.rate for epoch in history] == [max(rates[at : at + 7]) for at in (0, 7, 14)]


def test_adafocal_adapts_to_held_out_rows_after_every_epoch(monkeypatch):
    seen, updated = [], AdaFocal.updated

    def noted(self, logits, labels):
        seen.append((self.gammas.data_ptr(), self.gammas.clone(), labels))
        return updated(self, logits, labels)

    monkeypatch.setattr(AdaFocal, "updated", noted)
    splits, loss = made_splits(val=30, held_out=30), AdaFocal()
    trained(loss=loss, splits=splits)
    places, gammas, labels = zip(*seen, strict=True)
    assert len(set(places)) == 1  # in place: a captured graph reads it there
    assert len({tuple(found.tolist()) for found in gammas}) == 3
    assert all(torch.equal(found, splits.held_out.labels) for found in labels)
    assert torch.equal(loss.gammas, AdaFocal().gammas)  # the caller's own is as it was


def test_a_scheduled_loss_changes_with_the_epochs(monkeypatch):
    seen, taken = {}, loop.Trainer._taken

    def noted(self, rows):
        seen[self.position.epoch] = self.step.loss.gamma
        return taken(self, rows)

    monkeypatch.setattr(loop.Trainer, "_taken", noted)
    trained(loss=FLSc(), recipe=replace(RECIPE, epochs=7))
    assert list(seen.values()) == [5.0, 5.0, 3.0, 3.0, 3.0, 1.0, 1.0]


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
    train(found, splits, CE(), ONE)
    train(expected, splits, CE(), ONE, normalise=own)
    assert same(weights_of(found), weights_of(expected))


def test_a_last_batch_of_one_row_is_trained_on_where_it_can_be():
    _, history = trained(splits=made_splits(train=97), recipe=ONE)
    assert len(history) == 1
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3, 4))
    with pytest.raises(InputError, match=r"one row.*more than 1 value.*another batch than 16"):
        trained(model=model, splits=made_splits(train=97))


def five_classes():
    splits = made_splits()
    extra = replace(splits.train, labels=splits.train.labels + 1)
    return replace(splits, class_names=tuple("abcde"), train=extra)


IMAGES = made_images(8)
REFUSED = {
    "loss as text": ({"loss": "ce"}, "loss is of type str: give .*parse_loss"),
    "loss of torch": ({"loss": nn.CrossEntropyLoss()}, "loss is of type CrossEntropyLoss"),
    "recipe": ({"recipe": 3}, r"recipe is of type int: give .*Recipe\(epochs=35\)"),
    "not split": (
        {"splits": ImageData("made", tuple("abcd"), IMAGES, IMAGES)},
        r"splits is of type ImageData: give .* split\(load_images",
    ),
    "batch": ({"recipe": Recipe(epochs=1)}, "batch is 128, and train has 100 rows"),
    "smoothing": ({"loss": Focal(), "recipe": replace(RECIPE, smoothing=0.1)}, "smoothing.*focal"),
    "held out": ({"loss": AdaFocal()}, r"adafocal adapts to rows of its own.*held_out such as 10"),
    "watch": ({"watch_every": 0}, "watch_every is 0"),
    "checkpoints": ({"checkpoint_every": float("nan")}, "checkpoint_every is nan"),
    "folder": ({"folder": "nowhere"}, "nowhere does not exist: make it first"),
    "classes": ({"splits": five_classes()}, r"the model gives \(2, 4\).*logits \(n, 5\)"),
    "softmax": ({"model": nn.Sequential(small(), nn.Softmax(1))}, "leave its softmax out"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_trained_is_refused_before_any_step(case):
    given, told = REFUSED[case]
    steps = []
    with pytest.raises(InputError, match=told), listen(lambda *step: steps.append(step)):
        trained(**given)
    assert not steps


class Cast(nn.Module):
    """Outputs of another precision, after another last step."""

    def __init__(self, dtype, last):
        super().__init__()
        self.inner, self.dtype, self.last = small(), dtype, last

    def forward(self, images):
        return self.last(self.inner(images)).to(self.dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_outputs_of_any_precision_are_told_from_probabilities(dtype):
    trained(Cast(dtype, torch.relu), recipe=ONE)  # no number negative, and no sum of 1
    reverse = Cast(dtype, lambda z: z - z.mean(1, keepdim=True) + 1 / CLASSES)
    trained(reverse, recipe=ONE)
    with pytest.raises(InputError, match="leave its softmax out"):
        trained(Cast(dtype, nn.Softmax(1)))


class Doomed(nn.Module):
    """Gives numbers while it learns, and none when it is looked at, as weights far out do."""

    def __init__(self):
        super().__init__()
        self.inner, self.looks = small(), 0

    def forward(self, images):
        self.looks += not self.training and len(images) > 2
        return self.inner(images) * (torch.nan if self.looks else 1.0)


def test_a_diverging_run_is_stopped_with_a_remedy(tmp_path):
    wild = replace(RECIPE, lr=1e30, weight_decay=0.0)
    said = r"the loss is (nan|inf) after epoch \d: lower lr \(1e\+30\), or limit .* with clip_norm"
    with pytest.raises(InputError, match=said):
        trained(recipe=wild)
    said = rf"NaN or infinite after epoch 1: lower lr \(0.1\), or .* remove {tmp_path}, which holds"
    with pytest.raises(InputError, match=said):
        trained(Doomed(), folder=tmp_path, checkpoint_every=0.0)


def test_batches_hold_every_row_once_in_order_each_time():
    images, model = made_images(40), small(dropout=0.5).train()
    for rows in (1, 16, 40, 41):
        batches = Batches(images, HALF, torch.device("cpu"), rows)
        for _ in range(2):
            found = list(batches)
            assert len(found) == len(batches)
            assert torch.equal(torch.cat([pixels for pixels, _ in found]), HALF(images.pixels))
            assert torch.equal(torch.cat([labels for _, labels in found]), images.labels)
    logits, labels = outputs(model, batches, torch.float32)
    assert model.training
    with torch.no_grad():
        torch.testing.assert_close(logits, model.eval()(HALF(images.pixels)))
    assert torch.equal(labels, images.labels)


def test_pack_and_scores_have_each_split_in_its_own_pixels_without_tf32(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)  # as it is outside
    splits, (model, history), seen = made_splits(), trained(recipe=ONE, folder=str(tmp_path)), []
    model.conv.register_forward_hook(lambda *_: seen.append(torch.backends.cudnn.allow_tf32))
    run = {"output": tmp_path, "model": model, "splits": splits, "pixels": (HALF, OTHER)}
    run |= {"network": "n", "no_pack": False, "head": None, "as_json": True}
    Run(**run).finish(history, {"network": "n"})
    record = json.loads((tmp_path / "run.json").read_text())
    assert seen
    assert not any(seen)
    assert torch.backends.cudnn.allow_tf32
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.safetensors", "pack", "run.json"]
    pack = Pack.open(tmp_path / "pack")
    for name, pixels in {"val": HALF, "test": OTHER}.items():
        images, batches = getattr(splits, name), list(pack.split(name))
        with torch.no_grad():
            logits = model(pixels(images.pixels))
            found = pack.head(torch.cat([batch.features for batch in batches]))
        assert torch.equal(torch.cat([batch.labels for batch in batches]), images.labels)
        torch.testing.assert_close(found, logits)
        assert record["scores"][name] == vars(Watched.of(logits, images.labels))
