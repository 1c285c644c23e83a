"""The soft mixture: value and slope against plain loops, the table, and the standardised units."""

import math

import numpy as np
import pytest
import torch

from featcal import Batch
from featcal.core.fit import Facts
from featcal.methods import group as group_partition
from featcal.methods.group import (
    Plan,
    Table,
    learn_partitions,
    mixture,
    standardised,
    tabulated,
    unit_scales,
)

NODES = torch.linspace(
    -4, 3, 200, dtype=torch.float64
)  # fine: the table's own error is tested apart


def drawn(n=60, d=5, k=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(n, d, generator=generator, dtype=torch.float64)
    logits = 3 * torch.randn(n, k, generator=generator, dtype=torch.float64)
    return features, logits, torch.randint(k, (n,), generator=generator)


def naive_nll(gates, inverse, features, logits, labels):
    """Summed NLL of one partition by plain loops: gates (g, d), inverse temperatures (g,)."""
    total = 0.0
    for x, z, y in zip(features.numpy(), logits.numpy(), labels.tolist(), strict=True):
        scores = gates @ x
        share = np.exp(scores - scores.max())
        share /= share.sum()
        chance = 0.0
        for group, b in enumerate(inverse):
            p = np.exp(b * (z - z.max()))
            chance += share[group] * p[y] / p.sum()
        total -= math.log(chance)
    return total


def parameters(partitions=3, groups=2, d=5, seed=1):
    generator = torch.Generator().manual_seed(seed)
    gates = torch.randn(partitions, groups, d, generator=generator, dtype=torch.float64)
    return gates, torch.randn(partitions, groups, generator=generator, dtype=torch.float64) / 2


@pytest.mark.parametrize("groups", [2, 3])
def test_the_mixture_is_what_a_loop_says(groups):
    features, logits, labels = drawn()
    gates, inverse = parameters(groups=groups)
    table = Table(NODES, tabulated(logits, labels, NODES))
    value, _ = mixture((gates, inverse), features, table)
    for u in range(3):
        expected = naive_nll(gates[u].numpy(), inverse[u].exp().numpy(), features, logits, labels)
        assert float(value[u]) == pytest.approx(expected, abs=1e-5)


def test_the_slope_is_the_finite_difference_of_the_value():
    features, logits, labels = drawn()
    gates, inverse = parameters()
    table = Table(NODES, tabulated(logits, labels, NODES))
    flat = torch.cat([gates.flatten(), inverse.flatten()])

    def value(at):
        parts = at[:30].view(3, 2, 5), at[30:].view(3, 2)
        return float(mixture(parts, features, table)[0].sum())

    slope = mixture((gates, inverse), features, table)[1]
    for i in range(len(flat)):
        step = torch.zeros_like(flat)
        step[i] = 1e-5
        assert (value(flat + step) - value(flat - step)) / 2e-5 == pytest.approx(
            float(slope[i]), abs=2e-6
        )


def test_the_slope_is_what_autograd_says():
    features, logits, labels = drawn()
    gates, inverse = parameters()
    table = Table(NODES, tabulated(logits, labels, NODES))
    slope = mixture((gates, inverse), features, table)[1]
    gates.requires_grad_()
    inverse.requires_grad_()
    gate = torch.einsum("nd,ugd->nug", features, gates).log_softmax(2)
    scaled = (logits[:, None, None] * inverse.exp()[:, :, None]).log_softmax(3)
    true = scaled[torch.arange(60), :, :, labels]
    (gate + true).logsumexp(2).sum().neg().backward()
    torch.testing.assert_close(slope[:30], gates.grad.flatten(), rtol=0, atol=1e-5)
    torch.testing.assert_close(slope[30:], inverse.grad.flatten(), rtol=0, atol=1e-4)


# --- the table --------------------------------------------------------------------------------


def test_the_table_is_exact_at_its_nodes_and_close_between_them():
    _, logits, labels = drawn()
    nodes = group_partition._nodes([1.0, 2.0])
    table = Table(nodes, tabulated(logits, labels, nodes))
    at = torch.cat([nodes, (nodes[1:] + nodes[:-1]) / 2])
    value, slope = table.at(at)
    for column, u in enumerate(at.tolist()):
        rows = -(logits * math.exp(u)).log_softmax(1).gather(1, labels[:, None])[:, 0]
        close = 1e-12 if column < len(nodes) else 2e-3
        torch.testing.assert_close(value[:, column], rows, rtol=0, atol=close)
    assert torch.isfinite(slope).all()


def test_beyond_its_ends_the_table_is_flat():
    _, logits, labels = drawn()
    nodes = group_partition._nodes([1.0])
    table = Table(nodes, tabulated(logits, labels, nodes))
    value, slope = table.at(torch.stack([nodes[0] - 3, nodes[0], nodes[-1], nodes[-1] + 3]))
    assert torch.equal(value[:, 0], value[:, 1])
    assert torch.equal(value[:, 2], value[:, 3])
    assert (slope[:, [0, 3]] == 0).all()


# --- learning ---------------------------------------------------------------------------------


def two_kinds(n=800, seed=0):
    """Rows with x_0 > 0 need T = 4, the others T = 0.5."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    logits = 2 * torch.randn(n, 4, generator=generator, dtype=torch.float64)
    heat = torch.where(features[:, :1] > 0, 4.0, 0.5)
    gumbel = -torch.rand(n, 4, generator=generator, dtype=torch.float64).log()
    return features, logits, (logits / heat - gumbel.log()).argmax(1)


def test_groups_that_are_there_are_found():
    features, logits, labels = two_kinds()
    gates = learn_partitions(features, logits, labels, Plan(range(3), [0.7, 2.0], 100))
    assert gates.shape == (3, 2, 3)
    for partition in gates:
        side = (features @ partition.T).argmax(1).bool()
        share = float((side == (features[:, 0] > 0)).double().mean())
        assert max(share, 1 - share) > 0.9


def test_seeds_decide_and_the_global_generator_is_left_alone():
    features, logits, labels = two_kinds(200)
    before = torch.get_rng_state()
    one = learn_partitions(features, logits, labels, Plan(range(2, 4), [0.7, 2.0], 5))
    again = learn_partitions(features, logits, labels, Plan(range(2, 4), [0.7, 2.0], 5))
    other = learn_partitions(features, logits, labels, Plan(range(5, 7), [0.7, 2.0], 5))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), before)


def test_no_rows_give_gates_all_the_same():
    nothing = torch.zeros(0, 3, dtype=torch.float64)
    labels = torch.zeros(0, dtype=torch.int64)
    gates = learn_partitions(nothing, torch.zeros(0, 4), labels, Plan(range(2), [1.0, 1.0], 5))
    assert gates.shape == (2, 2, 3)
    assert torch.isfinite(gates).all()


# --- units ------------------------------------------------------------------------------------


def scales_of(features):
    facts = Facts(len(features), 2, features.shape[1], torch.device("cpu"))
    parts = [Batch(None, torch.zeros(len(p), dtype=torch.int64), p) for p in features.split(7)]
    return unit_scales(parts, lambda x: x, facts)


def test_means_and_deviations_are_numpys():
    features = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)) * 5 + 2
    mean, scale = scales_of(features)
    np.testing.assert_allclose(mean, features.double().numpy().mean(0), rtol=1e-12)
    np.testing.assert_allclose(scale, features.double().numpy().std(0), rtol=1e-10)


@pytest.mark.parametrize("value", [0.0, 1.0, 1000.1, -3e7])
def test_units_that_never_move_stay_at_zero_whatever_comes(value):
    features = torch.randn(40, 3)
    features[:, 1] = value
    mean, scale = scales_of(features)
    assert scale[1] == 0
    later = torch.tensor([[0.0, 123.0, 0.0]])
    assert standardised(later, mean, scale)[0, 1] == 0
    assert torch.isfinite(standardised(later, mean, scale)).all()
