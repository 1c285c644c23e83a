"""Mean feature values, unit by unit."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from featcal import Batch
from featcal.analysis import FeatureValues, Groups, UnitMeans
from featcal.core.checks import InputError


def naive(batch, groups, *, absolute):
    values = batch.features.abs() if absolute else batch.features
    means = []
    for mask in (groups.hce, groups.lce):
        rows = [row.double().numpy() for row, keep in zip(values, mask, strict=True) if keep]
        means.append(np.mean(rows, axis=0))
    return means


@pytest.mark.parametrize("absolute", [False, True])
def test_means_equal_a_loop(net, absolute):
    found = UnitMeans.of(net.val, net.head, confidence=0.8, absolute=absolute)
    hce, lce = naive(net.val, Groups.of_data(net.val, net.head, 0.8), absolute=absolute)
    np.testing.assert_allclose(found.hce, hce, rtol=1e-12)
    np.testing.assert_allclose(found.lce, lce, rtol=1e-12)
    assert found.higher == np.mean(hce > lce)


@given(st.integers(1, 200))
@settings(max_examples=20, deadline=None)
def test_parts_equal_the_whole(net, size):
    groups = Groups.of_data(net.val, net.head, 0.8)
    whole = UnitMeans.of(net.val, net.head, groups=groups)
    streamed = UnitMeans.of(net.pieces(net.val, size), net.head, groups=groups)
    np.testing.assert_allclose(streamed.hce, whole.hce, rtol=1e-12)
    np.testing.assert_allclose(streamed.lce, whole.lce, rtol=1e-12)


def test_signed_features_are_seen_from_the_data(net):
    signed = Batch(None, net.val.labels, net.val.features - 0.5)
    assert not UnitMeans.of(net.val, net.head).absolute
    assert UnitMeans.of(signed, net.head).absolute
    assert not UnitMeans.of(signed, net.head, absolute=False).absolute


def test_a_row_outside_of_the_groups_tells_that_features_are_signed(net):
    """Units and values decide alike, by all rows: one network has one kind of feature."""
    groups = Groups.of_data(net.val, net.head, 0.8)
    features = net.val.features.clone()
    features[int((~(groups.hce | groups.lce)).nonzero()[0])] -= 10
    signed = Batch(None, net.val.labels, features)
    assert UnitMeans.of(signed, net.head, groups=groups).absolute
    assert FeatureValues.of(signed, net.head, groups=groups).signed


def test_units_are_drawn_once_each_by_seed(net):
    one, same, other = (UnitMeans.of(net.val, net.head, units=20, seed=s).chosen for s in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert len(one.unique()) == 20
    assert len(UnitMeans.of(net.val, net.head, units=1000).chosen) == 24  # all there are


def test_the_draw_is_free_of_the_global_seed(net):
    state = torch.get_rng_state()
    UnitMeans.of(net.val, net.head)
    assert torch.equal(state, torch.get_rng_state())


def test_the_published_draw_repeats_units(net):
    drawn = UnitMeans.of(net.val, net.head, units=100, reference=True).chosen
    assert len(drawn) == 100 > len(drawn.unique())


def test_without_wrong_rows_there_is_no_mean_of_them(net):
    right = Batch(net.val.logits, net.val.logits.argmax(1), net.val.features)
    found = UnitMeans.of(right, net.head, confidence=0.8)
    assert found.hce.isnan().all()
    told = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert told["mean"]["hce"] is None
    assert told["higher_share"] is None
    assert told["chosen"]["hce"][0] is None
    found.plot()


def test_logits_alone_are_refused_with_the_remedy(net):
    with pytest.raises(InputError, match=r"needs features.*logits alone.*featcal\.collect"):
        UnitMeans.of(Batch(net.val.logits, net.val.labels))


@pytest.mark.parametrize("units", [0, -1, 2.5, True])
def test_units_are_checked(net, units):
    with pytest.raises(InputError, match="units is"):
        UnitMeans.of(net.val, net.head, units=units)


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


def test_the_picture_says_which_units_it_shows(net):
    width = net.val.features.shape[1]
    few = UnitMeans.of(net.val, net.head, units=5)
    assert few.which == f"5 of {width} units, drawn at random"
    for plan in ({}, {"units": width}):
        assert UnitMeans.of(net.val, net.head, **plan).which == f"all {width} units, in no order"
    twice = UnitMeans.of(net.val, net.head, units=width, reference=True)
    assert "drawn at random" in twice.which
