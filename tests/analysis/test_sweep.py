"""Clipping elsewhere: every number of a sweep and of other layers against doing it by hand."""

import json
import math
from collections import OrderedDict
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import featcal
from featcal import Batch, evaluate, parse
from featcal.analysis import ClipSweep, EntropyGrowth, LayerAblation
from featcal.analysis import sweep as sweep_passes
from featcal.analysis.sweep import logits_at
from featcal.core.checks import InputError
from featcal.heads.head import linear_of
from featcal.methods.temperature import Temperature

BRIER = "temperature(criterion='brier')"


@pytest.fixture(scope="module")
def sweep(net):
    return ClipSweep.of(net.val, net.test, net.head, points=8, confidence=0.8)


@pytest.fixture(scope="module")
def warm(net):
    return ClipSweep.of(net.val, net.test, net.head, then="temperature", points=8, confidence=0.8)


def at(c):
    return parse("clip").assign(threshold=c)


def agree(split, data, net, place, calibrator):
    scores = evaluate(data, calibrator, net.head)
    for name in ("ece", "nll", "accuracy", "confidence"):
        assert float(getattr(split, name)[place]) == pytest.approx(scores.metrics[name], rel=1e-6)
    np.testing.assert_allclose(split.bins(place).count, scores.bins.count)
    np.testing.assert_allclose(split.bins(place).confidence, scores.bins.confidence, rtol=1e-6)
    np.testing.assert_allclose(split.bins(place).correct, scores.bins.correct)
    grown = EntropyGrowth.of(data, calibrator, net.head, confidence=0.8)
    np.testing.assert_allclose(split.entropy[place], grown.after, rtol=1e-5)
    assert split.groups == grown.groups.sizes


def test_every_threshold_is_scored_as_a_clip_would_be(net, sweep):
    for place, c in enumerate(sweep.thresholds.tolist()):
        agree(sweep.val, net.val, net, place, at(c))
        agree(sweep.test, net.test, net, place, at(c))


def test_a_tail_is_refitted_on_val_for_every_threshold(net, warm):
    for place, c in enumerate(warm.thresholds.tolist()):
        clipped = Batch(at(c)(net.val.features, net.head), net.val.labels)
        tail = Temperature().fit(clipped)
        assert warm.values[place]["temperature"] == pytest.approx(float(tail.temperature), rel=1e-4)
        agree(warm.test, net.test, net, place, at(c) | tail)
        agree(warm.val, net.val, net, place, at(c) | tail)
    assert warm.recipe == "clip | temperature"


def test_several_tails_share_one_grid_and_are_what_each_is_alone(net):
    plan = {"confidence": 0.8, "fitted": [0.9, 1.1], "points": 8}
    both = ClipSweep.several(net.val, net.test, net.head, thens=[None, BRIER], **plan)
    assert [one.recipe for one in both] == ["clip", f"clip | {BRIER}"]
    assert [float(one.thresholds[one.fitted]) for one in both] == pytest.approx([0.9, 1.1])
    for then, one in zip((None, BRIER), both, strict=True):
        grid = one.thresholds.tolist()
        alone = ClipSweep.of(
            net.val, net.test, net.head, then=then, thresholds=grid, fitted=grid[one.fitted],
            confidence=0.8,
        )  # fmt: skip
        assert torch.equal(alone.test.sums, one.test.sums)
        assert torch.equal(alone.val.nll, one.val.nll)
        assert alone.best == one.best
        assert alone.values == one.values
    for wrong in ({"fitted": [1.0]}, {"thens": "temperature"}):
        with pytest.raises(InputError, match=r"fitted has 1 entries for 2 recipes|thens is 'temp"):
            ClipSweep.several(net.val, net.test, net.head, **wrong)
    # A tail that comes twice, as where the arguments of the clips differ, is swept once.
    passes = mock.Mock(wraps=sweep_passes.fit_quietly)
    plan = {"thens": [BRIER, BRIER], "fitted": [0.9, 1.1], "points": 8}
    with mock.patch.object(sweep_passes, "fit_quietly", passes):
        first, last = ClipSweep.several(net.val, net.test, net.head, **plan)
    assert passes.call_count == len(first.thresholds)
    assert first.test is last.test
    assert first.fitted < last.fitted


def test_the_fitted_threshold_is_among_them_and_is_that_of_a_fit(net, sweep):
    fitted = float(sweep.thresholds[sweep.fitted])
    assert fitted == float(net.clip.threshold)
    assert len(sweep.thresholds) == 8
    joint = parse("clip | temperature").fit(net.val, net.head)
    found = ClipSweep.of(net.val, net.test, net.head, then="temperature", points=5)
    assert float(found.thresholds[found.fitted]) == float(joint.steps[0].threshold)
    known = float(joint.steps[0].threshold)
    told = ClipSweep.of(net.val, net.test, net.head, then="temperature", points=5, fitted=known)
    assert torch.equal(told.thresholds, found.thresholds)


def test_the_best_threshold_is_chosen_on_val_alone(net, sweep):
    assert sweep.best == int(sweep.val.nll.argmin()) == sweep.fitted
    # With other rows as test nothing that is chosen moves.
    shuffled = Batch(None, net.test.labels.flip(0), net.test.features)
    other = ClipSweep.of(net.val, shuffled, net.head, points=8, confidence=0.8)
    assert torch.equal(other.thresholds, sweep.thresholds)
    assert (other.best, other.fitted) == (sweep.best, sweep.fitted)
    assert not torch.equal(other.test.nll, sweep.test.nll)
    by_ece = ClipSweep.of(net.val, net.test, net.head, points=8, criterion="ece")
    assert float(by_ece.val.ece[by_ece.best]) == float(by_ece.val.ece.min())


def test_little_memory_gives_the_same_numbers(net, warm):
    small = {"BLOCK": 24 * 50, "PART": 5 * 12 * 100, "KEEP": 600 * 5 * 3}
    with mock.patch.multiple(sweep_passes, **small):
        found = ClipSweep.of(
            net.val, net.test, net.head, then="temperature", points=8, confidence=0.8
        )
    np.testing.assert_allclose(found.test.nll, warm.test.nll, rtol=1e-6)
    np.testing.assert_allclose(found.val.nll, warm.val.nll, rtol=1e-6)
    np.testing.assert_array_equal(found.test.sums[:, 0], warm.test.sums[:, 0])


def test_a_head_that_gives_back_its_input():
    """Blocks share one buffer, which such a head returns as its logits."""
    draw = torch.Generator().manual_seed(1)
    features = 3 * torch.randn(300, 4, generator=draw)
    batch = Batch(None, features.argmax(1), features)
    with mock.patch.object(sweep_passes, "BLOCK", 4 * 32):
        found = ClipSweep.of(batch, batch, nn.Identity(), thresholds=[0.5, 1.0], fitted=2.0)
    for place, c in enumerate((0.5, 1.0, 2.0)):
        nll = nn.functional.cross_entropy(features.clamp(-c, c), batch.labels)
        assert float(found.test.nll[place]) == pytest.approx(float(nll), rel=1e-6)


def test_thresholds_are_sorted_and_completed(net):
    found = ClipSweep.of(net.val, net.test, net.head, thresholds=[2.0, 0.5, 2.0], fitted=1.0)
    assert found.thresholds.tolist() == [0.5, 1.0, 2.0, math.inf]
    flat = Batch(None, net.val.labels, torch.zeros_like(net.val.features))
    assert ClipSweep.of(flat, flat, net.head).thresholds.tolist() == [math.inf]
    # No clipping wins where no threshold helps: who is always right cannot be too sure.
    right = Batch(net.val.logits, net.val.logits.argmax(1), net.val.features)
    found = ClipSweep.of(right, net.test, net.head, thresholds=[0.1, 0.2], fitted=math.inf).plot()
    assert found.best == found.fitted == len(found.thresholds) - 1
    found.plot_trade()


def test_the_json_is_compact_and_whole(warm):
    text = json.dumps(warm.as_json(), allow_nan=False)
    told = json.loads(text)
    assert told["thresholds"][-1] is None
    assert len(text) < 1000 * len(warm.thresholds)
    bins = told["test"]["bins"]
    gaps = np.abs(np.subtract(bins["confidence"], bins["correct"])).sum(1)
    assert gaps / told["test"]["rows"] == pytest.approx(told["test"]["ece"], abs=1e-6)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"then": "clip"}, "then is 'clip', which needs features"),
        ({"then": "group"}, "needs features"),
        ({"thresholds": [0.0]}, "every threshold must be above 0"),
        ({"fitted": -1.0}, "every threshold must be above 0"),
        ({"points": 2}, "points is 2"),
        ({"criterion": "brier"}, "criterion is 'brier'"),
        ({"bins": 0}, "bins is 0"),
        ({"head": None}, "head is None"),
        ({"test": None}, "test is None"),
    ],
)
def test_arguments_are_checked(net, options, text):
    with pytest.raises(InputError, match=text):
        ClipSweep.of(net.val, **{"test": net.test, "head": net.head, **options})
    logits = Batch(net.val.logits, net.val.labels)
    with pytest.raises(InputError, match=r"a sweep of thresholds needs features.*collect"):
        ClipSweep.of(logits, logits, net.head)


def test_the_panels_show_the_numbers(sweep):
    axes = sweep.plot().axes
    finite = sweep.thresholds[:-1]
    for ax, name, scale in zip(axes, ("ece", "nll", "accuracy"), (100, 1, 100), strict=False):
        curves = [line for line in ax.lines if len(line.get_xdata()) == len(finite)]
        for line, split in zip(curves, (sweep.val, sweep.test), strict=True):
            np.testing.assert_allclose(line.get_ydata(), scale * getattr(split, name)[:-1])
    words = [text.get_text() for text in axes[0].get_legend().get_texts()]
    assert words[-1] == "lowest NLL on val"
    star = sweep.plot_trade().axes.collections[1].get_offsets()[0]
    np.testing.assert_allclose(star, [100 * sweep.test.accuracy[-1], 100 * sweep.test.ece[-1]])


EXACT = torch.float64


def drawn(n, d, k, seed, *, signed=True):
    draw = torch.Generator().manual_seed(seed)
    features = torch.randn(n, d, generator=draw, dtype=EXACT)
    weight = torch.randn(k, d, generator=draw, dtype=EXACT)
    head = linear_of(weight, torch.randn(k, generator=draw, dtype=EXACT))
    return features if signed else features.relu(), head.requires_grad_(False)


@given(
    n=st.integers(1, 40),
    thresholds=st.sets(st.floats(0.01, 5, allow_subnormal=False), min_size=1, max_size=12),
    signed=st.booleans(),
    many=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_logits_at_every_threshold_are_those_of_clipped_features(n, thresholds, signed, many, seed):
    """Followed along the thresholds of a linear head, or by a product for each of them."""
    features, head = drawn(n, 9, 4, seed, signed=signed)
    grid = [*sorted(thresholds), math.inf]
    with mock.patch.object(sweep_passes, "MANY", 0 if many else 10**9):
        found = logits_at(grid, features, head(features), head)
    for c, logits in zip(grid, found, strict=True):
        torch.testing.assert_close(logits, head(features.clamp(-c, c)), rtol=1e-11, atol=1e-11)


@pytest.fixture(scope="module")
def layered():
    torch.manual_seed(0)
    parts = {"first": nn.Sequential(nn.Linear(6, 16), nn.ReLU())}
    parts["second"] = nn.Sequential(nn.Linear(16, 12), nn.ReLU())
    model = nn.Sequential(OrderedDict(**parts, fc=nn.Linear(12, 3)))
    with torch.no_grad():
        model.fc.weight *= 6
        x = 2 * torch.randn(600, 6)
        y = (model(x) / 3 + 1.5 * torch.randn(600, 3)).argmax(1)
    return model, [(x[:300], y[:300])], [(x[300:], y[300:])]


def test_rows_are_those_of_calibrate(layered):
    model, val, test = layered
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = LayerAblation.of(model, val, test, {"early": "first"})
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert [row.layer for row in found.rows] == [None, "logits", "features", "first"]
    assert [row.label for row in found.rows][-1] == "early"
    for row, (recipe, layer) in zip(
        found.rows[1:], [("logit_clip", None), ("clip", None), ("clip", "first")], strict=True
    ):
        clip = parse(recipe)
        calibrated = featcal.calibrate(model, val, clip, layer=layer)
        scores = evaluate(featcal.collect(calibrated, test)).metrics
        assert row.threshold == float(clip.threshold)
        assert row.metrics == {name: scores[name] for name in ("accuracy", "ece", "nll", "brier")}
    baseline = evaluate(featcal.collect(model, test)).metrics
    assert found.rows[0].metrics["ece"] == baseline["ece"]
    assert math.isinf(found.rows[0].threshold)
    told = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert told["rows"][0]["threshold"] is None
    assert set(told["rows"][0]) == {"label", "layer", "threshold", "metrics"}
    widths = [bar.get_width() for bar in found.plot().axes.patches]
    assert widths == pytest.approx([100 * row.metrics["ece"] for row in found.rows])


def test_layers_are_checked(layered):
    with pytest.raises(InputError, match=r"layers is the text 'first': pass a list of paths"):
        LayerAblation.of(*layered, "first")
    with pytest.raises(InputError, match="a loader is missing"):
        LayerAblation.of(layered[0])
