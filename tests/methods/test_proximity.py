"""Proximity calibration: neighbours by brute force, what is kept, and what it gives out."""

import copy
import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from featcal import Batch, CalibrationWarning, parse
from featcal.methods.neighbours import (
    ProximityCalibration,
    bins_of,
    density_ratio,
    kernel_sums,
    learn_bins,
    published_ratio,
    widths,
)


def sparse_and_dense(n=600, k=4, seed=0):
    """Overconfident where rows are far apart, right where they are close together."""
    draw = np.random.default_rng(seed)
    centre = draw.normal(size=(k, 8)) * 3
    kind = draw.integers(k, size=n)
    lone = draw.random(n) < 0.5
    features = centre[kind] + draw.normal(size=(n, 8)) * np.where(lone, 2.0, 0.2)[:, None]
    head = nn.Linear(8, k, bias=False).requires_grad_(False)
    head.weight.data = torch.tensor(centre, dtype=torch.float32) / 2
    features = torch.tensor(features, dtype=torch.float32)
    logits = head(features)
    labels = torch.where(
        torch.tensor(lone & (draw.random(n) < 0.5)),
        torch.tensor(draw.integers(k, size=n)),
        logits.argmax(1),
    )
    return Batch(logits, labels, features), head


@pytest.fixture(scope="module")
def rows():
    return sparse_and_dense()


@pytest.fixture(scope="module")
def fitted(rows):
    return ProximityCalibration().fit(*rows)


def brute_proximity(points, stored, neighbours, *, leave_out):
    """mean exp(-d^2) by loops over all pairs."""
    points = points / np.linalg.norm(points, axis=1, keepdims=True)
    stored = stored / np.linalg.norm(stored, axis=1, keepdims=True)
    found = []
    for i, point in enumerate(points):
        squared = ((stored - point) ** 2).sum(1)
        if leave_out:
            squared = np.delete(squared, i)
        found.append(np.exp(-np.sort(squared)[:neighbours]).mean())
    return np.array(found)


def test_proximity_is_brute_force_with_the_row_itself_left_out(rows, fitted):
    batch, _ = rows
    at = fitted.coordinates(batch.logits, batch.features)
    expected = brute_proximity(
        batch.features.double().numpy(), batch.features.double().numpy(), 10, leave_out=True
    )
    np.testing.assert_allclose(1 - at[:, 1].double(), expected, atol=2e-6)
    confidence = batch.logits.double().softmax(1).amax(1)
    np.testing.assert_allclose(1 - at[:, 0].double(), confidence, atol=1e-6)


def beside(features, squared):
    """Rows at this squared distance on the sphere from the given ones."""
    draw = np.random.default_rng(5)
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    aside = draw.normal(size=unit.shape)
    aside -= (aside * unit).sum(1, keepdims=True) * unit
    aside /= np.linalg.norm(aside, axis=1, keepdims=True)
    angle = 2 * math.asin(math.sqrt(squared) / 2)
    return math.cos(angle) * unit + math.sin(angle) * aside


def test_a_new_row_close_to_a_stored_one_keeps_it_as_a_neighbour(rows, fitted):
    batch, head = rows
    stored = batch.features.double().numpy()
    new = torch.tensor(beside(stored[:200], 1e-5), dtype=torch.float32)
    at = fitted.coordinates(head(new), new)
    expected = brute_proximity(new.double().numpy(), stored, 10, leave_out=False)
    np.testing.assert_allclose(1 - at[:, 1].double(), expected, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_row_knows_itself_when_both_sides_are_rounded(rows, fitted, dtype):
    batch, _ = rows
    narrow = copy.deepcopy(fitted).to(dtype)
    at = narrow.coordinates(batch.logits, batch.features.to(dtype))
    whole = fitted.coordinates(batch.logits, batch.features)
    torch.testing.assert_close(at[:, 1], whole[:, 1], rtol=0, atol=0.01)


def test_far_rows_lose_confidence_and_near_ones_keep_it(rows, fitted):
    batch, head = rows
    out = fitted(batch.features, head)
    before, after = batch.logits.softmax(1).amax(1), out.softmax(1).amax(1)
    far = fitted.coordinates(batch.logits, batch.features)[:, 1]
    order = far.argsort()
    near, lone = order[:150], order[-150:]
    assert float((before - after)[lone].mean()) > 0.1
    assert abs(float((before - after)[near].mean())) < 0.05
    assert torch.equal(out.argmax(1), batch.logits.argmax(1))


def test_what_is_kept_is_bounded_and_follows_content(rows):
    batch, head = rows
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(0))
    one = ProximityCalibration(references=200).fit(batch, head)
    two = ProximityCalibration(references=200).fit(batch.rows(order), head)
    assert one.stored.shape == (200, 8)
    assert len(one.right) + len(one.wrong) == 200
    for key, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[key]), key
    assert "200 of 600 rows kept" in one.report.steps[0].message
    assert ProximityCalibration.keeps_rows


def test_one_sided_rows_are_warned_about(rows):
    batch, head = rows
    right = Batch(batch.logits, batch.logits.argmax(1), batch.features)
    with pytest.warns(CalibrationWarning, match="all rows kept were right"):
        found = ProximityCalibration().fit(right, head)
    assert found.wrong.shape == (0, 2)
    assert torch.isfinite(found(batch.features, head)).all()


def test_clipped_features_differ_after_a_clip_alone(made):
    world = made(n=600)
    batch = Batch(world.logits, world.labels, world.features)
    alone = [parse(f"proximity(features={f!r})") for f in ("unclipped", "clipped")]
    one, two = (c.fit(batch, world.head) for c in alone)
    assert torch.equal(one.stored, two.stored)
    after = [parse(f"clip | proximity(features={f!r})") for f in ("unclipped", "clipped")]
    one, two = (c.fit(batch, world.head) for c in after)
    assert float(two.steps[0].threshold) < math.inf
    assert not torch.equal(one.steps[1].stored, two.steps[1].stored)
    for found in (one, two):
        logits = found.wrap(world.head)(world.features).detach().double()
        loss = float(nn.functional.cross_entropy(logits, world.labels))
        assert loss == pytest.approx(found.report.loss_after, abs=1e-6)


def spots(n, seed=0):
    draw = np.random.default_rng(seed)
    return torch.tensor(np.stack([draw.beta(1, 6, n), draw.beta(2, 3, n)], 1))


def naive_density(at, centres, width, *, mirror):
    """The mean of Gaussian products, one pair at a time."""
    total = np.zeros(len(at))
    for i, (u, v) in enumerate(np.asarray(at)):
        for a, b in np.asarray(centres):
            across = stats.norm.pdf(v, b, width[1])
            along = stats.norm.pdf(u, a, width[0])
            along += stats.norm.pdf(u, -a, width[0]) if mirror else 0
            total[i] += along * across / len(centres)
    return total


@pytest.mark.parametrize("mirror", [True, False])
def test_kernel_sums_are_those_of_a_loop(mirror):
    centres, at = spots(40), spots(15, seed=1)
    width = widths(centres, centres)
    found = kernel_sums(at, centres, width, mirror=mirror) / 40
    expected = naive_density(at, centres, width.tolist(), mirror=mirror)
    np.testing.assert_allclose(found, expected, rtol=1e-10)


@pytest.mark.parametrize("rows", [0, 1, 50])
def test_bandwidths_are_the_normal_reference_rule_and_few_rows_borrow_everyones_spread(rows):
    everyone = spots(50)
    found = widths(everyone[:rows], everyone)
    rule = 1.06 * everyone.numpy().std(0) * max(rows, 1) ** (-1 / 6)
    np.testing.assert_allclose(found, rule, rtol=1e-12)


def densities(n_right=60, n_wrong=20):
    right, wrong = spots(n_right), spots(n_wrong, seed=3)
    everyone = torch.cat([right, wrong])
    return right, wrong, torch.stack([widths(right, everyone), widths(wrong, everyone)])


@pytest.mark.parametrize("mirror", [True, False])
def test_the_ratio_is_bayes_with_one_row_more(mirror):
    right, wrong, width = densities()
    at = spots(12, seed=5)
    found = density_ratio(at, right, wrong, width, mirror=mirror)
    peak = 1 / (2 * math.pi * math.sqrt(math.prod(width.flatten().tolist())))
    for i, row in enumerate(at):
        sums = []
        for centres, h, own in ((right, width[0], 1 - row[0]), (wrong, width[1], row[0])):
            dens = naive_density(at[i : i + 1], centres, h.tolist(), mirror=mirror)[0]
            sums.append(len(centres) * dens + float(own) * peak)
        assert float(found[i]) == pytest.approx(sums[0] / sum(sums), rel=1e-9)


@pytest.mark.parametrize("mirror", [True, False])
def test_far_from_everything_the_confidence_stays(mirror):
    right, wrong, own_width = densities()
    unequal = torch.tensor([[0.02, 0.02], [0.1, 0.1]], dtype=torch.float64)
    doubt = torch.tensor([0.0, 0.3, 0.5, 0.9], dtype=torch.float64)
    at = torch.stack([doubt, torch.full_like(doubt, 99.0)], 1)
    for width in (own_width, unequal, unequal.flip(0)):
        found = density_ratio(at, right, wrong, width, mirror=mirror)
        torch.testing.assert_close(found, 1 - doubt, rtol=1e-12, atol=0)


def test_the_published_ratio_is_its_formula():
    right, wrong, width = densities()
    at = spots(12, seed=5)
    f_right = naive_density(at, right, width[0].tolist(), mirror=False)
    f_wrong = naive_density(at, wrong, width[1].tolist(), mirror=False)
    expected = f_right / np.maximum(f_right + 20 / 60 * f_wrong, 1e-10)
    np.testing.assert_allclose(published_ratio(at, right, wrong, width), expected, rtol=1e-9)
    far = torch.tensor([[0.3, 99.0]], dtype=torch.float64)
    assert float(published_ratio(far, right, wrong, width)) == 0


def test_bins_are_those_of_a_loop():
    at = spots(400)
    right = torch.rand(400, generator=torch.Generator().manual_seed(0)) < 0.7
    far_edges, edges, shares = learn_bins(at, right, 5, 10)
    found = shares[bins_of(at, far_edges, edges)]
    cuts = np.quantile(at[:, 1].numpy(), np.arange(1, 5) / 5)
    np.testing.assert_allclose(far_edges, cuts)
    for part in range(5):
        low = -np.inf if part == 0 else cuts[part - 1]
        high = np.inf if part == 4 else cuts[part]
        inside = (at[:, 1] > low) & (at[:, 1] <= high)
        doubt = at[inside, 0].numpy()
        inner = np.quantile(doubt, np.arange(1, 10) / 10)
        bin_of = (doubt[:, None] > inner).sum(1)
        for which in range(10):
            rows = bin_of == which
            hits = right[inside].numpy()[rows]
            expected = (hits.sum() + (1 - doubt[rows]).mean()) / (len(hits) + 1)
            np.testing.assert_allclose(found[inside].numpy()[rows], expected)
