"""A step equals the same step written out by hand."""

import pytest
import torch
from tiny import CLASSES, HALF, made_images, same, small, weights_of
from torch.nn.functional import cross_entropy, one_hot

from featcal import InputError
from featcal.core import dist
from featcal.losses import CE, Brier, Focal
from featcal.train import Recipe
from featcal.train.recipe import Plan
from featcal.train.step import Feed, Step, mixed_images, optimizer_of, set_rate

CPU = torch.device("cpu")


def stepped(recipe, loss, steps=3, model=None):
    model = small() if model is None else model
    feed = Feed(made_images(64), HALF, CPU)
    optimizer = optimizer_of(model, recipe)
    step = Step(model, model, feed, loss, optimizer, recipe, torch.float32)
    losses = []
    for rows in list(Plan.of(recipe, 0, 64).steps())[:steps]:
        set_rate(optimizer, recipe.lr)
        losses.append(step(rows).item())
    return model, losses


def by_hand(recipe, targets_of, steps=3):
    """Momentum SGD as in the textbook, on the same batches."""
    model, feed = small(), Feed(made_images(64), HALF, CPU)
    speed = [torch.zeros_like(weight) for weight in model.parameters()]
    losses = []
    for rows in list(Plan.of(recipe, 0, 64).steps())[:steps]:
        images, labels = feed(rows)
        images, loss_of = targets_of(images, labels, rows)
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


def assert_alike(one, other):
    for key, value in one.state_dict().items():
        torch.testing.assert_close(value, other.state_dict()[key], rtol=1e-4, atol=1e-5)


def test_plain_cross_entropy():
    recipe = Recipe(batch=16)
    ours, losses = stepped(recipe, CE())
    theirs, expected = by_hand(recipe, lambda x, y, _: (x, lambda z: cross_entropy(z, y)))
    assert_alike(ours, theirs)
    assert losses == pytest.approx(expected, rel=1e-5)


def test_summed_and_clipped_as_published():
    recipe = Recipe(batch=16).published()
    ours, losses = stepped(recipe, CE(reduction="sum"))
    theirs, sums = by_hand(
        recipe, lambda x, y, _: (x, lambda z: cross_entropy(z, y, reduction="sum"))
    )
    assert_alike(ours, theirs)
    assert losses == pytest.approx([total / 16 for total in sums], rel=1e-5)


def test_the_clip_is_felt():
    free, _ = stepped(Recipe(batch=16, clip_norm=1e9), CE(reduction="sum"))
    clipped, _ = stepped(Recipe(batch=16, clip_norm=2.0), CE(reduction="sum"))
    assert not same(weights_of(free), weights_of(clipped))


def test_mixup_in_its_two_terms():
    recipe = Recipe(batch=16, mixup=0.4)

    def both(images, labels, rows):
        w = rows.weight
        mixed = mixed_images(images, w)
        partners = labels.roll(1, 0)
        return mixed, lambda z: w * cross_entropy(z, labels) + (1 - w) * cross_entropy(z, partners)

    ours, losses = stepped(recipe, CE())
    theirs, expected = by_hand(recipe, both)
    assert_alike(ours, theirs)
    assert losses == pytest.approx(expected, rel=1e-5)


def test_smoothed_targets_are_torch_label_smoothing():
    recipe = Recipe(batch=16, smoothing=0.1)
    ours, _ = stepped(recipe, CE())
    theirs, _ = by_hand(
        recipe, lambda x, y, _: (x, lambda z: cross_entropy(z, y, label_smoothing=0.1))
    )
    assert_alike(ours, theirs)


def test_smoothed_targets_of_brier():
    recipe = Recipe(batch=16, smoothing=0.2)

    def squares(images, labels, _):
        soft = one_hot(labels, CLASSES) * 0.8 + 0.2 / CLASSES
        return images, lambda z: (z.softmax(1) - soft).square().sum(1).mean()

    assert_alike(stepped(recipe, Brier())[0], by_hand(recipe, squares)[0])


def test_a_loss_that_takes_no_probabilities_says_so_under_smoothing():
    with pytest.raises(InputError, match="focal"):
        stepped(Recipe(batch=16, smoothing=0.1), Focal())


def test_the_short_last_batch_is_taken_too():
    model, losses = stepped(Recipe(batch=48), CE(), steps=2)
    once, _ = stepped(Recipe(batch=48), CE(), steps=1)
    assert len(losses) == 2
    assert not same(weights_of(model), weights_of(once))


@pytest.mark.parametrize(("rows", "usual"), [(8, True), (4, False), (16, False)])
def test_a_process_s_share_of_a_batch_is_of_the_usual_size(rows, usual, monkeypatch):
    recipe, model = Recipe(batch=16), small()
    feed = Feed(made_images(64), HALF, CPU)
    optimizer = optimizer_of(model, recipe)
    step = Step(model, model, feed, CE(), optimizer, recipe, torch.float32)
    monkeypatch.setattr(dist, "world", lambda: 2)
    assert step.is_usual(next(Plan.of(Recipe(batch=rows), 0, 64).steps())) is usual


def test_adamw_moves_every_weight():
    before = weights_of(small())
    after = weights_of(stepped(Recipe(batch=16, optimizer="adamw", lr=1e-2), CE())[0])
    assert all(not torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("network", ["wrn16x4", "vit"])
def test_the_optimiser_has_what_the_recipe_says(network):
    recipe = Recipe.for_network(network)
    (group,) = optimizer_of(small(), recipe).param_groups
    assert group["weight_decay"] == recipe.weight_decay == {"wrn16x4": 5e-4, "vit": 0.05}[network]
    assert group["lr"] == recipe.lr
    assert not group.get("nesterov")
    assert group.get("momentum", recipe.momentum) == recipe.momentum
