"""A step equals the same step written out by hand; which devices an engine takes."""

from functools import partial

import pytest
import torch
from tiny import CLASSES, HALF, SIZE, made_images, made_splits, small, trained, weights_of
from torch.nn.functional import cross_entropy, one_hot

from featcal import InputError
from featcal.core import dist
from featcal.losses import CE, Brier
from featcal.train import Engine, Recipe
from featcal.train import engine as engines
from featcal.train.engine import Feed, Step, optimizer_of, set_rate
from featcal.train.recipe import MARGIN, steps_of

CPU = torch.device("cpu")
# torch's compiler warns of parts of its own that it imports.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")


def stepped(recipe, loss, steps=3):
    model = small()
    feed = Feed(made_images(64), HALF, CPU)
    optimizer = optimizer_of(model, recipe)
    step = Step(model, model, feed, loss, optimizer, recipe, torch.float32)
    losses = []
    for rows in steps_of(recipe, 0, 64)[:steps]:
        set_rate(optimizer, recipe.lr)
        losses.append(step(rows).item())
    return model, losses


def by_hand(recipe, targets_of, steps=3):
    """Momentum SGD as in the textbook, on the same batches."""
    model, feed = small(), Feed(made_images(64), HALF, CPU)
    speed = [torch.zeros_like(weight) for weight in model.parameters()]
    losses = []
    for rows in steps_of(recipe, 0, 64)[:steps]:
        images, labels = feed(rows)
        images, loss_of = targets_of(images, labels, rows.weight)
        loss = loss_of(model(images))
        grads = torch.autograd.grad(loss, list(model.parameters()))
        if recipe.clip_norm is not None:
            norm = torch.sqrt(sum(g.square().sum() for g in grads))
            grads = [g * min(1.0, recipe.clip_norm / (norm.item() + 1e-6)) for g in grads]
        with torch.no_grad():
            for i, (weight, grad) in enumerate(zip(model.parameters(), grads, strict=True)):
                speed[i] = recipe.momentum * speed[i] + grad + recipe.weight_decay * weight
                weight -= recipe.lr * speed[i]
        losses.append(loss.item())
    return model, losses


def plain(images, labels, _):
    return images, lambda z: cross_entropy(z, labels)


def summed(images, labels, _):
    return images, lambda z: cross_entropy(z, labels, reduction="sum")


def smoothed(images, labels, _):
    return images, lambda z: cross_entropy(z, labels, label_smoothing=0.1)


def squares(images, labels, _):
    soft = one_hot(labels, CLASSES) * 0.8 + 0.2 / CLASSES
    return images, lambda z: (z.softmax(1) - soft).square().sum(1).mean()


def mixed(images, labels, w):
    """In its two terms; the partner of an image is the one before it."""
    mixed, partners = w * images + (1 - w) * images.roll(1, 0), labels.roll(1, 0)
    return mixed, lambda z: w * cross_entropy(z, labels) + (1 - w) * cross_entropy(z, partners)


STEPS = {
    "plain": (Recipe(batch=16), CE(), plain, 1),
    "published": (Recipe(batch=16).published(), CE(reduction="sum"), summed, 16),
    "mixup": (Recipe(batch=16, mixup=0.4), CE(), mixed, 1),
    "smoothing": (Recipe(batch=16, smoothing=0.1), CE(), smoothed, 1),
    "brier": (Recipe(batch=16, smoothing=0.2), Brier(), squares, 1),
    "short last batch": (Recipe(batch=48), CE(), plain, 1),
}


@pytest.mark.parametrize("case", STEPS)
def test_a_step_is_the_one_of_the_textbook(case):
    recipe, loss, targets_of, rows = STEPS[case]
    (ours, losses), (theirs, expected) = stepped(recipe, loss), by_hand(recipe, targets_of)
    for key, value in ours.state_dict().items():
        torch.testing.assert_close(value, theirs.state_dict()[key], rtol=1e-4, atol=1e-5)
    assert losses == pytest.approx([total / rows for total in expected], rel=1e-5)


@pytest.mark.parametrize("network", ["wrn16x4", "vit"])
def test_the_optimiser_has_what_the_recipe_says(network):
    recipe = Recipe.for_network(network)
    (group,) = optimizer_of(small(), recipe).param_groups
    assert group["weight_decay"] == recipe.weight_decay == {"wrn16x4": 5e-4, "vit": 0.05}[network]
    assert group["lr"] == recipe.lr
    assert not group.get("nesterov")
    assert group.get("momentum", recipe.momentum) == recipe.momentum


def test_a_process_s_share_of_a_batch_is_of_the_usual_size(monkeypatch):
    recipe, model = Recipe(batch=16), small()
    feed, optimizer = Feed(made_images(64), HALF, CPU), optimizer_of(model, recipe)
    step = Step(model, model, feed, CE(), optimizer, recipe, torch.float32)
    monkeypatch.setattr(dist, "world", lambda: 2)
    batches = [steps_of(Recipe(batch=rows), 0, 64)[0] for rows in (8, 4, 16)]
    assert [step.is_usual(batch) for batch in batches] == [True, False, False]


def augmented(images, rows):
    """Pad with zeros, crop, mirror, scale: one image and one pixel row at a time, as published."""
    made = []
    for image, (down, right), mirror in zip(
        rows.images.tolist(), rows.shift.tolist(), rows.mirror.tolist(), strict=True
    ):
        canvas = torch.zeros(SIZE + 2 * MARGIN, SIZE + 2 * MARGIN, 3)
        canvas[MARGIN : MARGIN + SIZE, MARGIN : MARGIN + SIZE] = images.pixels[image].float()
        cut = canvas[down : down + SIZE, right : right + SIZE]
        cut = torch.stack([row.flip(0) for row in cut]) if mirror else cut
        made.append((cut / 255 - 0.5) / 0.25)
    return torch.stack(made).permute(0, 3, 1, 2)


def test_a_batch_is_padded_cut_mirrored_and_normalised():
    images = made_images(30)
    rows = steps_of(Recipe(batch=30), 0, 30)[0]
    found, labels = Feed(images, HALF, CPU)(rows)
    torch.testing.assert_close(found, augmented(images, rows))
    assert torch.equal(labels, images.labels[rows.images])
    assert found.is_contiguous(memory_format=torch.channels_last)
    still = steps_of(Recipe(batch=30, augment=False), 0, 30)[0]
    assert torch.equal(Feed(images, HALF, CPU)(still)[0], HALF(images.pixels[still.images]))
    tall = type(images)(images.pixels[:, :, :7].contiguous(), images.labels)
    assert Feed(tall, HALF, CPU)(rows)[0].shape == (30, 3, SIZE, 7)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"device": "meta"}, "device is 'meta'.*give cpu"),
        ({"device": "toaster"}, "device is 'toaster'"),
        ({"device": "cpu", "graph": True}, "graph needs one process on a GPU"),
        ({"device": "cpu", "precision": "float8"}, "precision is 'float8': choose float32 or"),
    ],
)
def test_what_an_engine_cannot_be_is_refused(given, told):
    with pytest.raises(InputError, match=told):
        Engine.best(**given)


@pytest.mark.parametrize("deterministic", [True, False])
def test_cudnn_tries_its_ways_unless_it_must_repeat_itself(deterministic, monkeypatch):
    cudnn = torch.backends.cudnn
    monkeypatch.setattr(cudnn, "deterministic", deterministic)
    monkeypatch.setattr(cudnn, "benchmark", deterministic)
    with Engine.best("cpu").at_work():
        assert cudnn.benchmark is not deterministic
    assert cudnn.benchmark is deterministic


def test_the_compiler_is_asked_for_what_it_knows(monkeypatch):
    assert engines.known_options() == engines.COMPILER
    monkeypatch.setitem(engines.COMPILER, "of_another_torch", True)
    assert "of_another_torch" not in engines.known_options()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_training_and_watching_are_in_the_precision_asked_for(precision):
    model, seen = small(), set()
    model.conv.register_forward_hook(lambda _, __, out: seen.add((len(out), out.dtype)))
    engine = Engine.best("cpu", precision=precision)
    trained(model, splits=made_splits(val=41), engine=engine)
    assert {dtype for rows, dtype in seen if rows in (16, 41)} == {getattr(torch, precision)}
    assert all(weight.dtype == torch.float32 for weight in model.parameters())


def test_a_compiled_network_trains_as_the_plain_one_does(monkeypatch):
    """Traced by the compiler, but without the C++ that takes minutes."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    found = {}
    for compiled in (False, True):
        engine = Engine.best("cpu", compiled=compiled)
        model, history = trained(small(), splits=made_splits(train=64), engine=engine)
        found[compiled] = weights_of(model), [epoch.loss for epoch in history]
    assert found[True][1] == pytest.approx(found[False][1], rel=1e-4)
    for key, value in found[False][0].items():
        torch.testing.assert_close(found[True][0][key], value, rtol=1e-3, atol=1e-4)
