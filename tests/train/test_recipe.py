"""The recipe: the published rates, the budget, what is refused."""

import math

import pytest
import torch
from torch import nn

from featcal import InputError
from featcal.losses import CE, Brier, Focal
from featcal.train import Recipe, published_loss


def published_rates(epochs=350, drops=(150, 250)):
    """The rates of MultiStepLR stepped at the start of every epoch, by torch itself."""
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, list(drops), 0.1)
    rates = []
    for _ in range(epochs):
        optimizer.step()
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def test_the_published_rates_are_those_of_the_published_loop():
    ours = [Recipe().published().rate_at(epoch) for epoch in range(350)]
    assert ours == pytest.approx(published_rates())
    assert ours.count(ours[0]) == 149


def test_what_the_published_code_never_trained_is_refused():
    with pytest.raises(InputError, match="by SGD, and this recipe has adamw: leave published out"):
        Recipe.for_network("vit").published()


def test_a_rate_is_constant_within_an_epoch_of_the_published_recipe():
    recipe = Recipe().published()
    for epoch in (0, 148, 149, 248, 249, 349):
        assert recipe.rate_at(epoch) == recipe.rate_at(epoch + 0.99)


def test_the_budget_keeps_the_shape():
    short = Recipe().scaled(0.1)
    assert short.epochs == 35
    rates = [round(short.rate_at(epoch), 6) for epoch in range(1, 35)]
    assert rates == [0.1] * 14 + [0.01] * 10 + [0.001] * 10


def test_a_budget_is_rounded_to_the_nearest_epoch():
    assert [Recipe().scaled(budget).epochs for budget in (0.0999, 0.1, 0.1011)] == [35, 35, 35]


def test_a_tiny_budget_is_one_epoch_that_still_trains():
    tiny = Recipe().scaled(1e-9)
    assert tiny.epochs == 1
    assert tiny.rate_at(0) == tiny.lr


@pytest.mark.parametrize(
    ("epochs", "rates"),
    [(1, [0.1]), (2, [0.1, 0.01]), (3, [0.1, 0.01, 0.001]), (4, [0.1, 0.1, 0.01, 0.001])],
)
def test_the_shortest_runs_hold_the_full_rate_and_no_two_drops_coincide(epochs, rates):
    for recipe in (Recipe(epochs=epochs), Recipe().lasting(epochs)):
        assert recipe.warmup == 0
        assert [recipe.rate_at(epoch) for epoch in range(epochs)] == pytest.approx(rates)


@pytest.mark.parametrize("epochs", [5, 12, 30, 60, 350])
def test_from_five_epochs_on_there_is_one_of_warm_up(epochs):
    recipe = Recipe(epochs=epochs)
    assert recipe.warmup == Recipe().lasting(epochs).warmup == 1
    drops = [round(part * epochs) for part in (149 / 350, 249 / 350)]
    full, low = drops[0] - 1, drops[1] - drops[0]
    rates = [recipe.rate_at(epoch) for epoch in range(1, epochs)]
    lowest = epochs - drops[1]
    assert rates == pytest.approx([0.1] * full + [0.01] * low + [0.001] * lowest)
    assert recipe.rate_at(0.5) == pytest.approx(0.05)


def test_a_warm_up_that_is_asked_for_is_kept_and_scaled_down_with_the_run():
    assert Recipe(epochs=2, warmup=1).rate_at(0.5) == pytest.approx(0.05)
    vit = Recipe.for_network("vit")
    assert [vit.lasting(epochs).warmup for epochs in (3, 12, 25, 350)] == [0, 2, 5, 5]


@pytest.mark.parametrize("budget", [0, -1, 1.5, math.nan])
def test_a_budget_that_is_no_part_is_refused(budget):
    with pytest.raises(InputError, match=r"budget is .*: give a part above 0 and at most 1"):
        Recipe().scaled(budget)


def test_warm_up_rises_to_the_rate_without_a_step_of_zero():
    recipe = Recipe(epochs=10, warmup=2)
    rates = [recipe.rate_at(e / 10) for e in range(20)]
    assert 0 < rates[0] < rates[1]
    assert rates == sorted(rates)
    assert recipe.rate_at(2) == recipe.lr


def test_cosine_falls_from_the_end_of_the_warm_up():
    recipe = Recipe(epochs=11, warmup=1, schedule="cosine")
    assert recipe.rate_at(1) == recipe.lr
    assert recipe.rate_at(6) == pytest.approx(recipe.lr / 2)


def test_cosine_ends_near_zero_and_is_half_at_half():
    recipe = Recipe(epochs=100, warmup=0, schedule="cosine")
    assert recipe.rate_at(50) == pytest.approx(recipe.lr / 2)
    assert recipe.rate_at(100) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epochs": 0}, "epochs is 0"),
        ({"batch": 1.5}, "batch is 1.5"),
        ({"lr": 0.0}, r"lr is 0.0: give a number above 0"),
        ({"lr": math.nan}, "lr is nan"),
        ({"lr": "0.1"}, "lr is '0.1'"),
        ({"momentum": 1.0}, "momentum is 1.0: give a number from 0 up and below 1"),
        ({"weight_decay": -1e-4}, "weight_decay is -0.0001"),
        ({"clip_norm": 0}, "clip_norm is 0: give a number above 0"),
        ({"schedule": "step"}, "schedule is 'step': choose steps or cosine"),
        ({"optimizer": "adam"}, "optimizer is 'adam': choose sgd or adamw"),
        ({"drops": (0.5, 2.0)}, "drops is"),
        ({"drops": (0.0, 0.5)}, "drops is"),
        ({"smoothing": 1.0}, "smoothing is 1.0"),
        ({"mixup": True}, "mixup is True"),
        ({"seed": -1}, "seed is -1"),
        ({"warmup": -2}, "warmup is -2"),
        ({"seed": 2**40}, "seed is 1099511627776: give one below"),
        ({"drops": 0.5}, "drops is 0.5: give a tuple"),
        ({"augment": "no"}, "augment is 'no': give True or False"),
    ],
)
def test_what_cannot_be_is_refused(changes, words):
    with pytest.raises(InputError, match=words):
        Recipe(**changes)


def test_published_losses_are_sums_but_for_brier():
    assert published_loss(CE()).reduction == "sum"
    assert published_loss(Focal(gamma=2.0)) == Focal(gamma=2.0, reduction="sum")
    assert published_loss(Brier()).reduction == "mean"
    assert published_loss(Brier(reduction="sum")).reduction == "mean"


def test_the_published_recipe_clips_gradients_and_does_not_warm_up():
    assert (Recipe().published().clip_norm, Recipe().published().warmup) == (2.0, 0)
    assert Recipe().clip_norm is None


def test_json_of_a_recipe_makes_it_again():
    recipe = Recipe(epochs=7, drops=(0.5,), clip_norm=1.0)
    found = recipe.as_json()
    assert Recipe(**{**found, "drops": tuple(found["drops"])}) == recipe
