"""Calibrators of groups: temperatures, mixture weights, and the published squared error."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize, minimize_scalar

from featcal import Batch
from featcal.methods.group import (
    Placed,
    class_counts,
    fit_bases,
    group_inverses,
    group_weights,
    half_of,
    published_base,
)

YES = torch.ones(2, dtype=torch.bool)


def drawn(n=400, k=4, heats=(2.0, 0.6), seed=0):
    """Logits whose rows need the heat of their group; groups alternate."""
    draw = np.random.default_rng(seed)
    logits = draw.normal(size=(n, k)) * 3
    group = np.arange(n) % len(heats)
    heat = np.array(heats)[group][:, None]
    labels = (logits / heat + draw.gumbel(size=logits.shape)).argmax(1)
    return torch.tensor(logits), torch.tensor(labels), torch.tensor(group)


def placed(logits, labels, group, used=None):
    used = torch.ones(len(labels), dtype=torch.bool) if used is None else used
    cuts = [slice(0, 100), slice(100, 100), slice(100, None)]
    data = [Batch(logits[c], labels[c]) for c in cuts]
    return Placed(data, [group[c][:, None] for c in cuts], [used[c] for c in cuts], 0)


def nll64(logits, labels, b):
    z = np.asarray(logits) * b
    z = z - z.max(1, keepdims=True)
    return float(np.sum(np.log(np.exp(z).sum(1)) - z[np.arange(len(z)), np.asarray(labels)]))


def test_each_group_has_its_own_temperature_pulled_a_little():
    logits, labels, group = drawn()
    found = group_inverses(placed(logits, labels, group), 2, 0.8, YES)
    for side in (0, 1):
        rows = group == side

        def penalised(b, rows=rows):
            return nll64(logits[rows], labels[rows], b) + (b / 0.8 - 1) ** 2 / (2 * 0.5**2)

        exact = minimize_scalar(penalised, bounds=(0.01, 20), method="bounded")
        assert found[side] == pytest.approx(exact.x, rel=1e-4)
    assert found[0] < 0.7 < 1.2 < found[1]


def test_rows_that_are_not_used_do_not_count():
    logits, labels, group = drawn()
    used = torch.arange(400) % 3 > 0
    some = group_inverses(placed(logits, labels, group, used), 2, 0.8, YES)
    alone = group_inverses(placed(logits[used], labels[used], group[used]), 2, 0.8, YES)
    np.testing.assert_allclose(some, alone, rtol=1e-9)


def test_groups_alike_have_the_common_temperature():
    logits, labels, _ = drawn(heats=(1.7,))
    both, twice = torch.cat([logits, logits]), torch.cat([labels, labels])
    group = torch.arange(800) // 400
    common = minimize_scalar(lambda b: nll64(logits, labels, b), bounds=(0.01, 9), method="bounded")
    found = group_inverses(placed(both, twice, group), 2, float(common.x), YES)
    np.testing.assert_allclose(found, common.x, rtol=1e-4)


def test_small_and_one_class_groups_fall_back():
    logits, labels, _ = drawn()
    group = (torch.arange(400) >= 370).long()  # 30 rows in the second group
    few = fit_bases([placed(logits, labels, group)], "temperature", 2, 4, 0.8, 50)
    assert few.left_out == 1
    assert float(few.inverse[0, 1]) == 0.8
    assert float(few.inverse[0, 0]) != 0.8
    labels[200:] = 1
    one_class = (torch.arange(400) >= 200).long()
    found = fit_bases([placed(logits, labels, one_class)], "temperature", 2, 4, 0.8, 50)
    assert found.left_out == 1
    assert float(found.inverse[0, 1]) == 0.8


def test_a_group_that_is_always_right_is_held_by_the_common_temperature():
    logits, labels, group = drawn()
    labels = torch.where(group == 1, logits.argmax(1), labels)
    found = group_inverses(placed(logits, labels, group), 2, 0.8, YES)
    assert 0.8 < found[1] < 8


@pytest.mark.parametrize("form", ["temperature", "ensemble", "published"])
def test_an_empty_group_does_no_harm(form):
    logits, labels, group = drawn()
    found = fit_bases([placed(logits, labels, group * 0)], form, 2, 4, 0.8, 50)
    assert found.left_out == 1
    assert float(found.inverse[0, 1]) == 0.8
    assert torch.isfinite(found.inverse).all()
    if found.weights is not None:
        assert found.weights[0, 1].tolist() == [1, 0, 0]
        assert torch.isfinite(found.weights).all()


def test_counts_are_those_of_a_loop():
    logits, labels, group = drawn()
    counts = class_counts(placed(logits, labels, group), 2, 4)
    for side in (0, 1):
        for label in range(4):
            assert counts[side, label] == int(((group == side) & (labels == label)).sum())


# --- the ensemble -----------------------------------------------------------------------------


def test_weights_reach_the_maximum_a_solver_finds():
    logits, labels, group = drawn(n=2000, heats=(2.0, 0.6))
    noise = torch.rand(2000, generator=torch.Generator().manual_seed(0)) < 0.3
    labels = torch.where(noise, torch.arange(2000) % 4, labels)
    inverse, view = np.array([0.5, 1.6]), placed(logits, labels, group)
    found = group_weights(view, inverse, class_counts(view, 2, 4), YES)
    np.testing.assert_allclose(found.sum(1), 1, rtol=1e-12)
    for side in (0, 1):
        rows = (group == side).numpy()
        z, y = logits.numpy()[rows], labels.numpy()[rows]

        def chances(b, z=z, y=y):
            p = np.exp(b * (z - z.max(1, keepdims=True)))
            return (p / p.sum(1, keepdims=True))[np.arange(len(y)), y]

        parts = np.stack([chances(inverse[side]), chances(1.0), np.full(len(y), 0.25)], 1)

        def loss(w, parts=parts):
            return -np.log(parts @ w).sum()

        exact = minimize(
            loss,
            [0.4, 0.3, 0.3],
            bounds=[(1e-9, 1)] * 3,
            constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
        )
        assert loss(found[side]) <= exact.fun + 1e-6


def test_groups_too_small_keep_their_temperature_alone():
    logits, labels, group = drawn()
    usable = torch.tensor([True, False])
    view = placed(logits, labels, group)
    found = group_weights(view, np.array([0.5, 0.8]), class_counts(view, 2, 4), usable)
    assert found[1].tolist() == [1, 0, 0]


def test_the_published_base_minimises_the_squared_error():
    logits, labels, group = drawn(n=600)
    inverse, weights = published_base(placed(logits, labels, group), 2, 0.8)
    for side in (0, 1):
        rows = group == side
        z, y = logits[rows], labels[rows]
        true = torch.eye(4, dtype=torch.float64)[y]

        def error(b, z=z, true=true):
            return float(((z * b).softmax(1) - true).square().sum())

        exact = minimize_scalar(error, bounds=(0.2, 20), method="bounded")
        assert error(float(inverse[side])) <= exact.fun + 1e-6
        mixed = (
            weights[side, 0] * (z * inverse[side]).softmax(1)
            + weights[side, 1] * z.softmax(1)
            + weights[side, 2] / 4
        )
        assert float((mixed - true).square().sum()) <= exact.fun + 1e-6


# --- halves -----------------------------------------------------------------------------------


def test_halves_are_even_and_follow_the_features_alone():
    features = torch.randn(4000, 6, generator=torch.Generator().manual_seed(0))
    half = half_of(Batch(None, torch.zeros(4000, dtype=torch.int64), features))
    assert set(half.tolist()) == {0, 1}
    assert float(half.double().mean()) == pytest.approx(0.5, abs=0.03)
    order = torch.randperm(4000, generator=torch.Generator().manual_seed(1))
    moved = half_of(Batch(None, torch.ones(4000, dtype=torch.int64), features[order]))
    assert torch.equal(moved, half[order])
