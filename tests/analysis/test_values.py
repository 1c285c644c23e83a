"""Histograms of feature values, their limits, and sums over parts."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from featcal import Batch
from featcal.analysis import FeatureValues, Groups, UnitMeans
from featcal.core.checks import InputError


def values_of(batch, groups):
    return [batch.features[mask].flatten().double().numpy() for mask in (groups.hce, groups.lce)]


@pytest.mark.parametrize("limit", [None, 1.5, float("inf")])
def test_counts_are_those_of_numpy(net, limit):
    found = FeatureValues.of(net.val, net.head, confidence=0.8, bins=50, limit=limit)
    for row, values in enumerate(values_of(net.val, found.groups)):
        counts, _ = np.histogram(values, bins=found.edges.numpy())
        assert found.counts[row].tolist() == counts.tolist()
        assert found.values[row] == len(values)


def test_the_density_is_that_of_numpy_where_all_values_are_shown(net):
    found = FeatureValues.of(net.val, net.head, confidence=0.8, limit=float("inf"))
    for row, values in enumerate(values_of(net.val, found.groups)):
        density, _ = np.histogram(values, bins=found.edges.numpy(), density=True)
        np.testing.assert_allclose(found.density[row], density, rtol=1e-12)


def test_the_limit_shows_nearly_all_values(net):
    found = FeatureValues.of(net.val, net.head, confidence=0.8)
    shares = (found.counts.sum(1) / torch.tensor(found.values)).tolist()
    assert max(shares) > 0.99
    assert min(shares) > 0.98
    assert found.edges[-1] < net.val.features.max()
    assert found.edges[0] == 0


@given(st.integers(1, 300))
@settings(max_examples=20, deadline=None)
def test_parts_equal_the_whole(net, size):
    groups = Groups.of_data(net.val, net.head, 0.8)
    whole = FeatureValues.of(net.val, net.head, groups=groups)
    streamed = FeatureValues.of(net.pieces(net.val, size), net.head, groups=groups)
    assert torch.equal(whole.counts, streamed.counts)
    assert torch.equal(whole.edges, streamed.edges)
    for one, other in zip(whole.fits, streamed.fits, strict=True):
        assert one.sigma == pytest.approx(other.sigma, rel=1e-12)
        assert one.mean == pytest.approx(other.mean, rel=1e-9)


def test_sigmas_are_the_root_mean_square_of_what_is_above_zero(net):
    found = FeatureValues.of(net.val, net.head, confidence=0.8)
    for fit, values in zip(found.fits, values_of(net.val, found.groups), strict=True):
        assert fit.rectified
        assert fit.sigma == pytest.approx(np.sqrt(np.mean(values[values > 0] ** 2)), rel=1e-9)


def rms(features, signed):
    return np.sqrt((features**2).mean() if signed else (features**2).sum() / (features > 0).sum())


@pytest.mark.parametrize("signed", [False, True])
def test_the_errors_are_those_of_drawing_rows_again(made, signed):
    net = made(900, 16, 4, signed=signed)
    batch = Batch(net.logits, net.labels, net.features)
    found = FeatureValues.of(batch, net.head, confidence=0.5)
    draw = np.random.default_rng(0)
    again = []
    for error, mask in zip(found.errors, (found.groups.hce, found.groups.lce), strict=True):
        rows = batch.features[mask].double().numpy()
        drawn = [rms(rows[draw.integers(0, len(rows), len(rows))], signed) for _ in range(1500)]
        again.append(drawn)
        assert error == pytest.approx(np.std(drawn), rel=0.1)
    ends = np.quantile(np.subtract(*again), [0.025, 0.975])
    width = found.interval.high - found.interval.low
    assert found.interval.low < found.gap < found.interval.high
    assert [found.interval.low, found.interval.high] == pytest.approx(ends, abs=0.1 * width)


def test_zeros_are_counted(net):
    found = FeatureValues.of(net.val, net.head, confidence=0.8)
    for share, values in zip(found.zeros, values_of(net.val, found.groups), strict=True):
        assert share == pytest.approx((values == 0).mean())


def test_one_row_has_no_error(net):
    one = Groups(0.8, torch.full((len(net.val),), 0.9), torch.arange(len(net.val)) > 0)
    found = FeatureValues.of(net.val, net.head, groups=one)
    told = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert told["sigma_errors"]["hce"] is None
    assert told["interval"] == [None, None]
    assert told["sigma_errors"]["lce"] > 0


def test_signed_features_have_plain_normals_and_bins_on_both_sides(made):
    net = made(600, 16, 4, signed=True)
    batch = Batch(net.logits, net.labels, net.features)
    found = FeatureValues.of(batch, net.head, confidence=0.5)
    assert found.signed
    assert float(found.edges[0]) == -float(found.edges[-1])
    for fit, values in zip(found.fits, values_of(batch, found.groups), strict=True):
        assert not fit.rectified
        assert fit.mean == pytest.approx(values.mean(), rel=1e-6)
        assert fit.spread == pytest.approx(values.std(), rel=1e-6)
    found.plot()


def test_signed_can_be_told(net):
    found = FeatureValues.of(net.val, net.head, signed=True)
    assert found.edges[0] < 0
    assert not found.fits[0].rectified


def test_a_group_without_rows_has_neither_density_nor_fit(net):
    right = Batch(net.val.logits, net.val.logits.argmax(1), net.val.features)
    found = FeatureValues.of(right, net.head, confidence=0.8).plot()
    told = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert told["fits"]["hce"] == {"sigma": None, "mean": None, "spread": None}
    assert told["values"]["hce"] == sum(told["counts"]["hce"]) == 0


def test_no_confident_rows_at_all(net):
    flat = Batch(None, net.val.labels, torch.zeros_like(net.val.features))
    found = FeatureValues.of(flat, net.head, confidence=0.99).plot()
    assert found.values == (0, 0)
    assert found.counts.sum() == 0


def test_features_that_are_all_zero(net):
    flat = Batch(None, net.val.labels, torch.zeros_like(net.val.features))
    found = FeatureValues.of(flat, net.head, confidence=0.0)
    assert found.counts.sum(1).tolist() == list(found.values)
    assert found.fits[1].sigma == 0


@pytest.mark.parametrize("limit", [0, -1.0, float("nan")])
def test_the_limit_is_checked(net, limit):
    with pytest.raises(InputError, match="limit is"):
        FeatureValues.of(net.val, net.head, limit=limit)


def test_logits_alone_are_refused(net):
    with pytest.raises(InputError, match="a histogram of feature values needs features"):
        FeatureValues.of(Batch(net.val.logits, net.val.labels))


@pytest.mark.shared
@pytest.mark.parametrize("level", [0.80, 0.95])
def test_wrong_rows_have_no_larger_features_in_our_own_network(resnet, level):
    """The paper's premise, which its theorem rests on, is not so here; docs/analysis.md says it."""
    found = FeatureValues.of(resnet.val, resnet.head, confidence=level)
    hce, lce = found.fits
    assert hce.sigma < lce.sigma
    assert hce.spread < lce.spread
    assert UnitMeans.of(resnet.val, resnet.head, confidence=level).higher < 0.5
