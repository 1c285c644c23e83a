"""Densities and bins against scipy, plain loops and closed forms."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from featcal.methods import proximity as proximity_maps
from featcal.methods.proximity import (
    binned,
    density_ratio,
    kernel_sums,
    learn_bins,
    published_ratio,
    widths,
)


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


def test_one_dimension_is_scipys_kernel_density():
    """Along a line of equal proximity the ratio of two places is that of a one-dimensional one."""
    draw = np.random.default_rng(0)
    values = draw.normal(0.4, 0.1, 60)
    centres = torch.tensor(np.stack([values, np.full(60, 0.3)], 1))
    width = torch.tensor([0.05, 0.02], dtype=torch.float64)
    at = torch.tensor([[0.3, 0.3], [0.5, 0.3]], dtype=torch.float64)
    found = kernel_sums(at, centres, width, mirror=False)
    theirs = stats.gaussian_kde(values, bw_method=0.05 / values.std(ddof=1))
    assert float(found[0] / found[1]) == pytest.approx(
        float(theirs(0.3)[0] / theirs(0.5)[0]), rel=1e-9
    )


def test_blocks_change_nothing(monkeypatch):
    centres, at = spots(40), spots(15, seed=1)
    whole = kernel_sums(at, centres, widths(centres, centres), mirror=True)
    monkeypatch.setattr(proximity_maps, "BLOCK", 7)
    parts = kernel_sums(at, centres, widths(centres, centres), mirror=True)
    torch.testing.assert_close(whole, parts)


def test_a_reflected_density_keeps_its_mass():
    centres = torch.tensor([[0.02, 0.5]], dtype=torch.float64)
    width = torch.tensor([0.05, 0.05], dtype=torch.float64)
    u, v = np.meshgrid(np.linspace(0, 1, 801), np.linspace(0, 1, 401), indexing="ij")
    at = torch.tensor(np.stack([u.ravel(), v.ravel()], 1))
    mass = {}
    for mirror in (True, False):
        values = kernel_sums(at, centres, width, mirror=mirror).numpy().reshape(u.shape)
        mass[mirror] = np.trapezoid(np.trapezoid(values, dx=1 / 400, axis=1), dx=1 / 800)
    assert mass[True] == pytest.approx(1, abs=1e-4)
    assert mass[False] < 0.7


def test_bandwidths_are_the_normal_reference_rule():
    centres = spots(50)
    expected = 1.06 * centres.numpy().std(0) * 50 ** (-1 / 6)
    np.testing.assert_allclose(widths(centres, centres), expected, rtol=1e-12)


@pytest.mark.parametrize("rows", [0, 1])
def test_too_few_rows_borrow_everyones_spread(rows):
    everyone = spots(50)
    found = widths(everyone[:rows], everyone)
    np.testing.assert_allclose(found, 1.06 * everyone.numpy().std(0), rtol=1e-12)


def test_rows_all_alike_have_a_narrowest_width():
    same = torch.full((9, 2), 0.25, dtype=torch.float64)
    assert (widths(same, same) == proximity_maps.NARROWEST).all()
    assert (widths(same[:0], same[:0]) == proximity_maps.NARROWEST).all()


# --- ratios -----------------------------------------------------------------------------------


def fitted(n_right=60, n_wrong=20):
    right, wrong = spots(n_right), spots(n_wrong, seed=3)
    everyone = torch.cat([right, wrong])
    return right, wrong, torch.stack([widths(right, everyone), widths(wrong, everyone)])


@pytest.mark.parametrize("mirror", [True, False])
def test_the_ratio_is_bayes_with_one_row_more(mirror):
    right, wrong, width = fitted()
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
    right, wrong, fitted_width = fitted()
    unequal = torch.tensor([[0.02, 0.02], [0.1, 0.1]], dtype=torch.float64)
    doubt = torch.tensor([0.0, 0.3, 0.5, 0.9], dtype=torch.float64)
    at = torch.stack([doubt, torch.full_like(doubt, 99.0)], 1)
    for width in (fitted_width, unequal, unequal.flip(0)):
        found = density_ratio(at, right, wrong, width, mirror=mirror)
        torch.testing.assert_close(found, 1 - doubt, rtol=1e-12, atol=0)


def test_the_published_ratio_is_its_formula():
    right, wrong, width = fitted()
    at = spots(12, seed=5)
    f_right = naive_density(at, right, width[0].tolist(), mirror=False)
    f_wrong = naive_density(at, wrong, width[1].tolist(), mirror=False)
    expected = f_right / np.maximum(f_right + 20 / 60 * f_wrong, 1e-10)
    np.testing.assert_allclose(published_ratio(at, right, wrong, width), expected, rtol=1e-9)
    far = torch.tensor([[0.3, 99.0]], dtype=torch.float64)
    assert float(published_ratio(far, right, wrong, width)) == 0


@pytest.mark.parametrize(("n_right", "n_wrong"), [(0, 20), (20, 0)])
def test_one_sided_rows_give_numbers(n_right, n_wrong):
    right, wrong, width = fitted(n_right, n_wrong)
    at = spots(12, seed=5)
    for found in (
        density_ratio(at, right, wrong, width, mirror=True),
        published_ratio(at, right, wrong, width),
    ):
        assert torch.isfinite(found).all()
        assert ((found >= 0) & (found <= 1)).all()
        assert (found > 0.5).all() == (n_wrong == 0)


# --- bins -------------------------------------------------------------------------------------


def test_bins_are_those_of_a_loop():
    at = spots(400)
    right = torch.rand(400, generator=torch.Generator().manual_seed(0)) < 0.7
    far_edges, edges, shares = learn_bins(at, right, 5, 10)
    found = binned(at, far_edges, edges, shares)
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


def test_equal_confidences_fall_into_one_bin():
    at = torch.full((60, 2), 0.25, dtype=torch.float64)
    right = torch.arange(60) % 3 > 0
    found = binned(at, *learn_bins(at, right, 5, 10))
    np.testing.assert_allclose(found, (40 + 0.75) / 61)
