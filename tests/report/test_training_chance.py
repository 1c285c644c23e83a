"""The tests of chance against naive loops, and against what is known without computing."""

import itertools
import statistics

import made_training
import pytest
import torch

SEEDS = [1, 2, 3, 4, 5, 6, 7]


@pytest.fixture(scope="module")
def tests(imported):
    return imported("training_chance")


def made(seed, rows=7, epochs=3, shift=0.0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, epochs, generator=g, dtype=torch.float64) + shift


def share(worst):
    return sum(found > worst[0] - 1e-9 for found in worst) / len(worst)


@pytest.mark.parametrize("seed", range(4))
def test_signs_are_flipped_in_every_pattern(tests, seed):
    between = made(seed, shift=0.4)

    def by_epoch(signs):
        for epoch in between.T.tolist():
            rows = [sign * value for sign, value in zip(signs, epoch, strict=True)]
            yield statistics.mean(rows) / (statistics.stdev(rows) / len(rows) ** 0.5)

    found = [list(by_epoch(signs)) for signs in itertools.product((1, -1), repeat=7)]
    largest = max(found[0], key=abs)
    told = f"{largest:+.1f} in epoch {found[0].index(largest) + 1}"
    p = share([max(map(abs, epochs)) for epochs in found])
    assert tests.flipped(between) == f"{told}, p = {p:.3f}"


@pytest.mark.parametrize("seed", range(4))
def test_the_planned_seeds_are_put_beside_every_choice_of_others(tests, seed):
    between = made(seed)
    between[:4] += 1.0

    def worst(places):
        found = []
        for epoch in between.T.tolist():
            sides = [epoch[i] for i in places], [x for i, x in enumerate(epoch) if i not in places]
            within = sum(statistics.pvariance(side) * len(side) for side in sides)
            error = (within / 5 * (1 / 4 + 1 / 3)) ** 0.5
            found.append(abs(statistics.mean(sides[0]) - statistics.mean(sides[1])) / error)
        return max(found)

    p = share([worst(places) for places in itertools.combinations(range(7), 4)])
    assert tests.moved(SEEDS, between) == f"p = {p:.3f}"
    order = [6, 1, 4, 0, 2, 5, 3]  # the seeds say which are planned, not their places
    shuffled = [SEEDS[place] for place in order]
    assert tests.moved(shuffled, between[order]) == f"p = {p:.3f}"


def test_differences_of_one_sign_are_as_rare_as_can_be(tests):
    between = torch.tensor([[0.1], [0.2], [0.3], [0.2], [0.15]], dtype=torch.float64)
    assert tests.flipped(between).endswith("p = 0.062")  # 2 of 32
    assert tests.flipped(-between).startswith("-")
    assert tests.flipped(between).startswith("+")


def test_loops_that_are_equal_are_no_rare_case(tests):
    """An epoch without any difference divides nothing by nothing."""
    assert tests.flipped(torch.zeros(5, 2, dtype=torch.float64)) == "+0.0 in epoch 1, p = 1.000"
    assert tests.moved(SEEDS, torch.zeros(7, 2, dtype=torch.float64)) == "p = 1.000"
    beside = torch.cat([torch.zeros(7, 1, dtype=torch.float64), made(0)], 1)
    assert tests.flipped(beside).split(", ")[1] == tests.flipped(made(0)).split(", ")[1]


def test_a_difference_without_spread_is_the_surest(tests):
    assert tests.flipped(torch.full((5, 1), 0.1, dtype=torch.float64)).endswith("p = 0.062")


def test_seeds_that_both_loops_have_are_compared_in_full_precision(tests):
    one = {"seeds": [3, 1, 2], "losses": [[1.0 + 1e-12], [5.0], [2.0]]}
    other = {"seeds": [2, 3, 9], "losses": [[1.0], [1.0], [7.0]]}
    seeds, between = tests.differences(one, other)
    assert seeds == [2, 3]
    assert between.tolist() == [[1.0], [pytest.approx(1e-12, rel=1e-3)]]


def test_networks_with_planned_seeds_alone_have_no_rows(tests):
    assert tests.chance(made_training.bench()).rows == ()
