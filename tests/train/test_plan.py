"""The plan of an epoch: every row once, the same for the same seed, nothing global touched."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from featcal.train import Recipe
from featcal.train.recipe import MARGIN, Plan


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 300), batch=st.integers(1, 64), epoch=st.integers(0, 400))
def test_every_row_is_seen_once(rows, batch, epoch):
    plan = Plan.of(Recipe(batch=batch), epoch, rows)
    steps = list(plan.steps())
    assert len(steps) == len(plan) == -(-rows // batch)
    assert sorted(torch.cat([step.images for step in steps]).tolist()) == list(range(rows))
    assert all(len(step.images) == batch for step in steps[:-1])


def test_the_same_seed_and_epoch_give_the_same_plan_and_others_others():
    one = Plan.of(Recipe(seed=3), 5, 500).rows
    again = Plan.of(Recipe(seed=3), 5, 500).rows
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    for seed, epoch in ((3, 6), (4, 5), (4, 4), (2, 6)):  # two of them of the same sum
        assert not torch.equal(one.images, Plan.of(Recipe(seed=seed), epoch, 500).rows.images)


def test_a_plan_goes_on_from_any_step():
    plan = Plan.of(Recipe(batch=32), 0, 100)
    late, whole = list(plan.steps(2)), list(plan.steps())
    assert [s.images.tolist() for s in late] == [s.images.tolist() for s in whole[2:]]


def test_shifts_and_mirrors_are_spread_evenly():
    rows = Plan.of(Recipe(), 0, 90_000).rows
    counts = torch.bincount(rows.shift.flatten(), minlength=2 * MARGIN + 1)
    assert len(counts) == 9
    expected = 180_000 / 9
    assert (counts - expected).abs().max() < 5 * expected**0.5
    assert abs(rows.mirror.float().mean() - 0.5) < 0.01


def test_without_augmentation_images_are_as_they_are():
    rows = Plan.of(Recipe(augment=False), 0, 50).rows
    assert (rows.shift == MARGIN).all()
    assert not rows.mirror.any()


def test_no_mixing_means_weights_of_one():
    assert (Plan.of(Recipe(batch=10), 0, 95).rows.weight == 1).all()


def test_mixing_weights_follow_the_beta_distribution():
    weight = Plan.of(Recipe(batch=1, mixup=0.5), 0, 20_000).rows.weight
    assert weight.mean() == pytest.approx(0.5, abs=0.02)
    assert weight.var() == pytest.approx(0.25 / 2, abs=0.01)  # of Beta(a, a): 1 / (8a + 4)


@pytest.mark.parametrize(("seed", "epoch"), [(1, 1), (2, 0)])
def test_mixing_weights_differ_from_epoch_to_epoch_and_from_seed_to_seed(seed, epoch):
    recipe = Recipe(mixup=0.5, batch=10)
    other = Plan.of(replace(recipe, seed=seed), epoch, 100).rows.weight
    assert not torch.equal(Plan.of(recipe, 0, 100).rows.weight, other)


def test_global_random_states_are_left_alone():
    torch_before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    Plan.of(Recipe(mixup=0.2), 3, 100)
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert (np.random.get_state()[1] == numpy_before).all()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_share_a_batch_evenly_and_leave_what_is_over(world):
    step = next(Plan.of(Recipe(batch=20), 0, 20).steps())
    shares = [step.of_rank(rank, world) for rank in range(world)]
    assert {len(share.images) for share in shares} == {20 // world}
    seen = torch.cat([share.images for share in shares]).tolist()
    assert len(set(seen)) == len(seen) == 20 // world * world
