"""Means and histograms of features against numpy; normals censored at 0 against scipy."""

import json
import math

import numpy as np
import pytest
import torch
from scipy import optimize, stats

from featcal import Batch
from featcal.analysis import FeatureValues, Groups, UnitMeans
from featcal.analysis.features import NormalFit
from featcal.core.checks import InputError


@pytest.mark.parametrize("absolute", [False, True])
def test_means_equal_those_of_numpy(net, absolute):
    found = UnitMeans.of(net.val, net.head, confidence=0.8, absolute=absolute)
    groups = Groups.of_data(net.val, net.head, 0.8)
    values = (net.val.features.abs() if absolute else net.val.features).double().numpy()
    hce, lce = (values[mask.numpy()].mean(0) for mask in (groups.hce, groups.lce))
    np.testing.assert_allclose(found.hce, hce, rtol=1e-12)
    np.testing.assert_allclose(found.lce, lce, rtol=1e-12)
    assert found.higher == np.mean(hce > lce)


def test_a_row_outside_of_the_groups_tells_that_features_are_signed(net):
    """Units and values decide alike, by all rows: one network has one kind of feature."""
    groups = Groups.of_data(net.val, net.head, 0.8)
    features = net.val.features.clone()
    features[int((~(groups.hce | groups.lce)).nonzero()[0])] -= 10
    signed = Batch(None, net.val.labels, features)
    assert UnitMeans.of(signed, net.head, groups=groups).absolute
    assert FeatureValues.of(signed, net.head, groups=groups).signed
    assert not UnitMeans.of(net.val, net.head).absolute
    assert not UnitMeans.of(signed, net.head, absolute=False).absolute


def test_units_are_drawn_once_each_by_seed(net):
    state, width = torch.get_rng_state(), net.val.features.shape[1]
    one, same, other = (UnitMeans.of(net.val, net.head, units=20, seed=s).chosen for s in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert len(one.unique()) == 20
    assert torch.equal(state, torch.get_rng_state())
    few, every = (UnitMeans.of(net.val, net.head, units=units) for units in (5, 1000))
    assert few.which == f"5 of {width} units, drawn at random"
    assert every.which == f"all {width} units, in no order"
    published = UnitMeans.of(net.val, net.head, units=100, reference=True)
    assert len(published.chosen) == 100 > len(published.chosen.unique())


def test_both_panels_show_the_means(net):
    found = UnitMeans.of(net.val, net.head, confidence=0.8, units=10).plot()
    first, second = found.axes
    heights = [[bar.get_height() for bar in bars] for bars in first.containers]
    np.testing.assert_allclose(heights[0], found.hce[found.chosen])
    np.testing.assert_allclose(heights[1], found.lce[found.chosen])
    np.testing.assert_allclose(second.lines[0].get_ydata(), found.hce[found.order])
    order = found.as_json()["all"]
    assert order["unit"] == found.order.tolist()
    assert order["lce"] == sorted(order["lce"], reverse=True)


def test_a_group_without_rows_has_neither_means_nor_density_nor_fit(net):
    right = Batch(net.val.logits, net.val.logits.argmax(1), net.val.features)
    means = UnitMeans.of(right, net.head, confidence=0.8).plot()
    told = json.loads(json.dumps(means.as_json(), allow_nan=False))
    assert told["mean"]["hce"] is told["higher_share"] is told["chosen"]["hce"][0] is None
    found = FeatureValues.of(right, net.head, confidence=0.8).plot()
    told = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert told["fits"]["hce"] == {"sigma": None, "mean": None, "spread": None}
    assert told["values"]["hce"] == sum(told["counts"]["hce"]) == 0


def test_arguments_are_checked(net):
    for units, limit in ((0, 0), (2.5, -1.0), (True, math.nan)):
        with pytest.raises(InputError, match="units is"):
            UnitMeans.of(net.val, net.head, units=units)
        with pytest.raises(InputError, match="limit is"):
            FeatureValues.of(net.val, net.head, limit=limit)


def values_of(batch, groups):
    return [batch.features[mask].flatten().double().numpy() for mask in (groups.hce, groups.lce)]


@pytest.mark.parametrize("limit", [None, 1.5, math.inf])
def test_counts_density_and_zeros_are_those_of_numpy(net, limit):
    found = FeatureValues.of(net.val, net.head, confidence=0.8, bins=50, limit=limit)
    for row, values in enumerate(values_of(net.val, found.groups)):
        counts, edges = np.histogram(values, bins=found.edges.numpy())
        assert found.counts[row].tolist() == counts.tolist()
        assert found.values[row] == len(values)
        density = counts / len(values) / np.diff(edges)
        np.testing.assert_allclose(found.density[row], density, rtol=1e-12)
        assert found.zeros[row] == pytest.approx((values == 0).mean())
        assert found.fits[row].sigma == pytest.approx(np.sqrt(np.mean(values[values > 0] ** 2)))
        assert found.fits[row].rectified
    if limit is None:  # nearly all values are shown
        assert min(found.counts.sum(1) / torch.tensor(found.values)) > 0.98
        assert found.edges[-1] < net.val.features.max()


def rms(features, signed):
    return np.sqrt((features**2).mean() if signed else (features**2).sum() / (features > 0).sum())


@pytest.mark.parametrize("signed", [False, True])
def test_the_errors_are_those_of_drawing_rows_again(made, signed):
    net = made(900, 16, 4, signed=signed)
    batch = Batch(net.logits, net.labels, net.features)
    found = FeatureValues.of(batch, net.head, confidence=0.5)
    draw, again = np.random.default_rng(0), []
    for error, mask in zip(found.errors, (found.groups.hce, found.groups.lce), strict=True):
        rows = batch.features[mask].double().numpy()
        drawn = [rms(rows[draw.integers(0, len(rows), len(rows))], signed) for _ in range(1000)]
        again.append(drawn)
        assert error == pytest.approx(np.std(drawn), rel=0.1)
    ends, known = np.quantile(np.subtract(*again), [0.025, 0.975]), found.interval.as_json()
    assert known == pytest.approx(ends, abs=0.1 * (known[1] - known[0]))
    assert found.signed == signed
    for fit, values in zip(found.fits, values_of(batch, found.groups), strict=True):
        assert fit.rectified != signed
        if signed:
            assert (fit.mean, fit.spread) == pytest.approx((values.mean(), values.std()), rel=1e-6)
    assert (float(found.edges[0]) == -float(found.edges[-1])) == signed


def test_few_rows_and_zeros_alone(net):
    one = Groups(0.8, torch.full((len(net.val),), 0.9), torch.arange(len(net.val)) > 0)
    told = FeatureValues.of(net.val, net.head, groups=one).as_json()
    assert told["sigma_errors"]["hce"] is None
    assert told["interval"] == [None, None]
    flat = Batch(None, net.val.labels, torch.zeros_like(net.val.features))
    nobody = FeatureValues.of(flat, net.head, confidence=0.99).plot()
    assert (nobody.values, int(nobody.counts.sum())) == ((0, 0), 0)
    zeros = FeatureValues.of(flat, net.head, confidence=0.0)
    assert zeros.counts.sum(1).tolist() == list(zeros.values)
    assert zeros.fits[1].sigma == 0


@pytest.mark.shared
def test_wrong_rows_have_no_larger_features_in_our_own_network(resnet):
    """The paper's premise, which its theorem rests on, is not so here; docs/analysis.md says it."""
    hce, lce = FeatureValues.of(resnet.val, resnet.head, confidence=0.8).fits
    assert hce.sigma < lce.sigma
    assert hce.spread < lce.spread
    assert UnitMeans.of(resnet.val, resnet.head, confidence=0.8).higher < 0.5


def fit(values, *, rectified=True):
    values = np.asarray(values, dtype=float)
    zeros = int((values == 0).sum())
    sums = float(values.sum()), float((values**2).sum())
    return NormalFit.of_sums(len(values) - zeros, zeros, *sums, rectified=rectified)


def loss(at, values):
    """Minus the log-likelihood of a normal sample of which zeros are only known to be below 0."""
    mean, spread = at[0], math.exp(at[1])
    above = values[values > 0]
    tail = (values == 0).sum() * stats.norm.logcdf(-mean / spread)
    return -(stats.norm.logpdf(above, mean, spread).sum() + tail)


@pytest.mark.parametrize(("mean", "spread"), [(0.0, 1.0), (-1.0, 0.5), (0.7, 0.3), (-2.0, 2.0)])
def test_fits_are_the_maximum_of_the_likelihood(mean, spread):
    values = np.maximum(np.random.default_rng(0).normal(mean, spread, 2000), 0)
    found, exact = fit(values), {"xatol": 1e-10, "fatol": 1e-10}
    start = [mean, math.log(spread)]
    best = optimize.minimize(loss, start, args=(values,), method="Nelder-Mead", options=exact)
    assert found.mean == pytest.approx(best.x[0], abs=1e-5)
    assert found.spread == pytest.approx(math.exp(best.x[1]), rel=1e-5)
    centred = optimize.minimize_scalar(lambda log: loss((0.0, log), values))
    assert found.sigma == pytest.approx(math.exp(centred.x), rel=1e-6)
    assert found.density(1.0) == pytest.approx(stats.norm.pdf(1, 0, found.sigma))


def test_closed_forms_and_extremes():
    values = np.array([1.0, 2.0, 4.0])
    assert (fit(values).mean, fit(values).spread) == pytest.approx((values.mean(), values.std()))
    signed = fit([-1.0, 0.0, 1.0], rectified=False)
    assert (signed.mean, signed.spread, signed.sigma) == pytest.approx((0, *[math.sqrt(2 / 3)] * 2))
    assert math.isnan(fit([]).sigma)
    assert fit([0.0, 0.0]) == NormalFit(0.0, 0.0, 0.0, True)
    assert math.isnan(fit([0.0]).density(1.0))
    for extreme in ([0.0] * 999 + [3.0], [1.0] * 999 + [0.0], [1e-30, 0.0]):
        found = fit(extreme)
        assert all(map(math.isfinite, (found.sigma, found.mean, found.spread)))
        assert found.spread > 0
