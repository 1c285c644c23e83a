"""The recipe: published rates, the budget, what is refused; the plan: every row once, by seed."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from featcal import InputError
from featcal.losses import CE, Brier, Focal
from featcal.train import Recipe, published_loss
from featcal.train.recipe import MARGIN, Rows, steps_of


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
    recipe = Recipe().published()
    ours = [recipe.rate_at(epoch) for epoch in range(350)]
    assert ours == pytest.approx(published_rates())
    assert ours == [recipe.rate_at(epoch + 0.99) for epoch in range(350)]
    assert (recipe.clip_norm, recipe.warmup, Recipe().clip_norm) == (2.0, 0, None)


@pytest.mark.parametrize("epochs", [5, 12, 35, 350])
def test_the_budget_keeps_the_shape(epochs):
    recipe = Recipe(epochs=epochs)
    assert recipe.warmup == Recipe().lasting(epochs).warmup == 1
    first, second = (round(part * epochs) for part in (149 / 350, 249 / 350))
    rates = [recipe.rate_at(epoch) for epoch in range(1, epochs)]
    falls = [0.1] * (first - 1) + [0.01] * (second - first) + [0.001] * (epochs - second)
    assert rates == pytest.approx(falls)
    assert recipe.rate_at(0.5) == pytest.approx(0.05)
    assert [Recipe().scaled(budget).epochs for budget in (1e-9, 0.0999, 0.1011)] == [1, 35, 35]


@pytest.mark.parametrize(
    ("epochs", "rates"),
    [(1, [0.1]), (2, [0.1, 0.01]), (3, [0.1, 0.01, 0.001]), (4, [0.1, 0.1, 0.01, 0.001])],
)
def test_the_shortest_runs_hold_the_full_rate_and_no_two_drops_coincide(epochs, rates):
    for recipe in (Recipe(epochs=epochs), Recipe().lasting(epochs)):
        assert recipe.warmup == 0
        assert [recipe.rate_at(epoch) for epoch in range(epochs)] == pytest.approx(rates)


def test_warm_up_rises_to_the_rate_and_is_scaled_with_the_run():
    recipe = Recipe(epochs=10, warmup=2)
    rates = [recipe.rate_at(e / 10) for e in range(20)]
    assert 0 < rates[0] < rates[1]
    assert rates == sorted(rates)
    assert recipe.rate_at(2) == recipe.lr
    vit = Recipe.for_network("vit")
    assert [vit.lasting(epochs).warmup for epochs in (3, 12, 25, 350)] == [0, 2, 5, 5]


def test_cosine_falls_from_the_end_of_the_warm_up_to_zero():
    recipe = Recipe(epochs=11, warmup=1, schedule="cosine")
    rates = [recipe.rate_at(epoch) / recipe.lr for epoch in (1, 6, 11)]
    assert rates == pytest.approx([1, 0.5, 0], abs=1e-12)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epochs": 0}, "epochs is 0"),
        ({"batch": 1.5}, "batch is 1.5"),
        ({"lr": 0.0}, r"lr is 0.0: give a number above 0"),
        ({"lr": math.nan}, "lr is nan"),
        ({"momentum": 1.0}, "momentum is 1.0: give a number from 0 up and below 1"),
        ({"clip_norm": 0}, "clip_norm is 0"),
        ({"schedule": "step"}, "schedule is 'step'"),
        ({"drops": (0.0, 0.5)}, "drops is"),
        ({"smoothing": 1.0}, "smoothing is 1.0"),
        ({"mixup": True}, "mixup is True"),
        ({"warmup": -2}, "warmup is -2"),
        ({"seed": 2**40}, "seed is 1099511627776"),
        ({"augment": "no"}, "augment is 'no'"),
    ],
)
def test_what_cannot_be_is_refused(changes, words):
    with pytest.raises(InputError, match=words):
        Recipe(**changes)


def test_parts_that_cannot_be_are_refused():
    for budget in (0, 1.5, math.nan):
        with pytest.raises(InputError, match="budget is"):
            Recipe().scaled(budget)
    with pytest.raises(InputError, match="by SGD, and this recipe has adamw"):
        Recipe.for_network("vit").published()


def test_published_losses_are_sums_but_for_brier():
    assert published_loss(CE()).reduction == "sum"
    assert published_loss(Focal(gamma=2.0)) == Focal(gamma=2.0, reduction="sum")
    assert published_loss(Brier(reduction="sum")).reduction == "mean"


def test_json_of_a_recipe_makes_it_again():
    recipe = Recipe(epochs=7, drops=(0.5,), clip_norm=1.0)
    found = recipe.as_json()
    assert Recipe(**{**found, "drops": tuple(found["drops"])}) == recipe


def whole_of(recipe, epoch, rows):
    """All rows of an epoch, and the weight of each of its steps."""
    *parts, weight = zip(*steps_of(recipe, epoch, rows), strict=True)
    return Rows(*map(torch.cat, parts), torch.stack(weight))


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 300), batch=st.integers(1, 64), epoch=st.integers(0, 400))
def test_every_row_is_seen_once(rows, batch, epoch):
    steps = steps_of(Recipe(batch=batch), epoch, rows)
    assert len(steps) == -(-rows // batch)
    assert sorted(torch.cat([step.images for step in steps]).tolist()) == list(range(rows))
    assert all(len(step.images) == batch for step in steps[:-1])


def test_the_same_seed_and_epoch_give_the_same_plan_and_others_others():
    recipe = Recipe(seed=3, mixup=0.5, batch=10)
    torch_before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    one, again = (whole_of(recipe, 5, 500) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    for seed, epoch in ((3, 6), (4, 5), (4, 4), (2, 6)):  # two of them of the same sum
        other = whole_of(replace(recipe, seed=seed), epoch, 500)
        assert not torch.equal(one.images, other.images)
        assert not torch.equal(one.weight, other.weight)
    assert torch.equal(torch.get_rng_state(), torch_before)  # global states are left alone
    assert (np.random.get_state()[1] == numpy_before).all()


def test_shifts_mirrors_and_mixing_are_distributed_as_they_should_be():
    rows = whole_of(Recipe(), 0, 90_000)
    counts = torch.bincount(rows.shift.flatten(), minlength=2 * MARGIN + 1)
    expected = 180_000 / 9
    assert len(counts) == 9
    assert (counts - expected).abs().max() < 5 * expected**0.5
    assert abs(rows.mirror.float().mean() - 0.5) < 0.01
    assert (rows.weight == 1).all()
    weight = whole_of(Recipe(batch=1, mixup=0.5), 0, 20_000).weight
    assert weight.mean() == pytest.approx(0.5, abs=0.02)
    assert weight.var() == pytest.approx(0.25 / 2, abs=0.01)  # of Beta(a, a): 1 / (8a + 4)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_share_a_batch_evenly_and_leave_what_is_over(world):
    (step,) = steps_of(Recipe(batch=20), 0, 20)
    shares = [step.of_rank(rank, world) for rank in range(world)]
    assert {len(share.images) for share in shares} == {20 // world}
    seen = torch.cat([share.images for share in shares]).tolist()
    assert len(set(seen)) == len(seen) == 20 // world * world
