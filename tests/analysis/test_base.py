"""What all analyses share: groups of rows, parts, packs, pictures, and the page about them."""

import json
import math
import re
import sys
from collections import OrderedDict
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib import style
from scipy import stats
from torch import nn

from featcal import Batch, InputError, analysis, parse, write_pack
from featcal.analysis import (
    Analysis,
    BandedDiagram,
    BeforeAfter,
    ChangedPredictions,
    ClipSweep,
    ConfidentCounts,
    EntropyGrowth,
    FeatureValues,
    GroupCalibration,
    Groups,
    LayerAblation,
    UnitMeans,
)
from featcal.analysis.base import reading, wilson
from featcal.core.sample import size_counts, size_quantile
from featcal.report.diagram import STYLE, all_axes

ANALYSIS = Path(__file__).parents[2] / "docs" / "analysis.md"
SWEEP = {"points": 5, "fitted": 1.0}


def test_groups_equal_a_loop_and_the_level_is_strict(net):
    for level in (0.0, 0.8, 0.99):
        hce, lce = [], []
        for row, label in zip(net.val.logits, net.val.labels, strict=True):
            sure, right = bool(row.softmax(0).max() > level), int(row.argmax()) == int(label)
            hce.append(sure and not right)
            lce.append(sure and right)
        found = Groups.of(net.val.logits, net.val.labels, level)
        assert (found.hce.tolist(), found.lce.tolist()) == (hce, lce)
    logits = torch.tensor([[0.0, 0.0], [0.0, 0.0]])  # a confidence of exactly one half
    found = Groups.of(logits, torch.tensor([0, 1]), 0.5)
    assert found.sizes == (0, 0)
    assert found.at(0.4999).sizes == (1, 1)  # the first of equals is predicted
    single = Groups.of_data(Batch(torch.tensor([9.0, -9.0]), torch.tensor([1.0, 1.0])))
    assert single.sizes == (1, 1)


@pytest.mark.shared
def test_the_groups_of_the_paper(anchor):
    """METHODS 7.1: 165 and 4,718 rows at .95, and 196 and 4,740 at .80."""
    found = Groups.of(anchor.logits, anchor.labels)
    assert found.sizes == (165, 4718)
    assert found.at(0.80).sizes == (196, 4740)


def test_levels_rows_calibrators_and_groups_are_checked(net):
    for level in (-0.1, 1, "high", True, math.nan):
        with pytest.raises(InputError, match="confidence is"):
            Groups.of(net.val.logits, net.val.labels, level)
    few = Groups.of_data(net.test.rows(slice(0, 9)), net.head)
    with pytest.raises(InputError, match=r"groups are of 9 rows and the data has 600: make them"):
        UnitMeans.of(net.test, net.head, groups=few)
    with pytest.raises(InputError, match=r"calibrator is a str: pass a fitted one"):
        EntropyGrowth.of(net.test, "clip", net.head)
    logits = Batch(net.test.logits, net.test.labels)
    with pytest.raises(InputError, match="clip works on features"):
        EntropyGrowth.of(logits, net.clip)
    for kind in (UnitMeans, FeatureValues):
        with pytest.raises(InputError, match=r"needs features.*logits alone.*featcal\.collect"):
            kind.of(logits)


CALLS = {
    Groups: lambda data, net: Groups.of_data(data, net.head, 0.8),
    UnitMeans: lambda data, net: UnitMeans.of(data, net.head, confidence=0.8),
    FeatureValues: lambda data, net: FeatureValues.of(data, net.head, confidence=0.8),
    ConfidentCounts: lambda data, net: ConfidentCounts.of(data, net.clip, net.head),
    EntropyGrowth: lambda data, net: EntropyGrowth.of(data, net.clip, net.head, confidence=0.8),
    ChangedPredictions: lambda data, net: ChangedPredictions.of(data, net.clip, net.head),
    GroupCalibration: lambda data, net: GroupCalibration.of(data, net.clip, net.head),
    BeforeAfter: lambda data, net: BeforeAfter.of(data, net.clip, net.head, resamples=100),
    ClipSweep: lambda data, net: ClipSweep.of(net.val, data, net.head, **SWEEP),
}


@pytest.fixture(scope="module")
def everything(net):
    """Every analysis of the same rows."""
    return {kind: call(net.test, net) for kind, call in CALLS.items()}


def close(one, other):
    """Whether two pieces of JSON agree but for rounding."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(close(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(close, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-5)
    return one == other


@given(st.integers(1, 250))
@settings(max_examples=3, deadline=None)
def test_parts_equal_the_whole(net, everything, size):
    parts = net.pieces(net.test, size)
    for kind, whole in everything.items():
        assert close(CALLS[kind](parts, net).as_json(), whole.as_json()), kind


def test_rows_that_are_kept_equal_rows_that_are_read(net, everything):
    """As a page keeps them: checked once, with the logits of the last calibrator."""
    with reading(net.test, net.head) as rows:
        kept = rows.kept()
    warm = parse("temperature").assign(temperature=2.0)
    for _ in range(2):
        for kind, whole in everything.items():
            assert close(CALLS[kind](kept, net).as_json(), whole.as_json()), kind
        other = EntropyGrowth.of(kept, warm, confidence=0.8).as_json()
        assert close(other, EntropyGrowth.of(net.test, warm, net.head, confidence=0.8).as_json())


@pytest.fixture(scope="module")
def pack(net, tmp_path_factory):
    splits = {"val": net.val, "test": net.test}
    bare = {name: Batch(None, one.labels, one.features) for name, one in splits.items()}
    return write_pack(tmp_path_factory.mktemp("packs") / "pack", bare, head=net.head)


def told(found):
    return json.dumps(found.as_json(), sort_keys=True, allow_nan=False)


def test_a_pack_is_its_rows_and_its_head(net, pack):
    for kind in (UnitMeans, FeatureValues, ConfidentCounts, GroupCalibration):
        wanted = told(kind.of(pack.split("test"), head=net.head))
        assert told(kind.of(pack)) == told(kind.of(pack.split("test"))) == wanted
        assert told(kind.of(pack, split="val")) != wanted
    for kind in (EntropyGrowth, ChangedPredictions, BeforeAfter):
        wanted = told(kind.of(pack.split("test"), net.clip, net.head))
        assert told(kind.of(pack, net.clip)) == wanted
        assert told(kind.of(pack, net.clip, split="val")) != wanted
    assert told(Groups.of(pack)) == told(Groups.of_data(pack.split("test"), net.head))
    wanted = BandedDiagram.of(logits=net.test.logits, labels=net.test.labels)
    assert close(BandedDiagram.of(pack).as_json(), wanted.as_json())
    wanted = told(ClipSweep.of(pack.split("val"), pack.split("test"), net.head, **SWEEP))
    assert told(ClipSweep.of(pack, **SWEEP)) == wanted
    assert told(ClipSweep.of(pack, splits=("test", "val"), **SWEEP)) != wanted
    with pytest.raises(InputError, match="has no split 'train'"):
        UnitMeans.of(pack, split="train")


def test_a_pack_serves_the_ablation_of_its_last_layers(net, pack):
    found = LayerAblation.of(pack)
    assert [row.layer for row in found.rows] == [None, "logits", "features"]
    assert found.rows[2].threshold == pytest.approx(float(net.clip.threshold), rel=1e-6)
    assert found.rows[2].metrics["ece"] < found.rows[0].metrics["ece"]
    with pytest.raises(InputError, match="a pack does not hold the outputs of layer3"):
        LayerAblation.of(pack, layers=["layer3"])


def test_pictures_are_drawn_without_pyplot_or_on_given_axes(everything):
    style_of, before = [mpl.rcParams[name] for name in STYLE], plt.get_fignums()
    for thing in everything.values():
        drawn = thing.plot()
        assert type(drawn) is type(thing)
        assert thing.axes is None
        assert all_axes(drawn.axes)[0].figure.canvas.manager is None
        assert drawn.as_json() == thing.as_json()
        assert len(repr(thing)) < 600
    assert plt.get_fignums() == before
    assert [mpl.rcParams[name] for name in STYLE] == style_of
    for thing in everything.values():
        figure, axes = plt.subplots(1, 2)
        given = axes if isinstance(thing, (BeforeAfter, UnitMeans)) else axes[0]
        assert thing.plot(given).axes is given
        plt.close(figure)


def test_dark_axes_get_light_ink_and_notebooks_a_picture(everything):
    groups = everything[Groups]
    with style.context("dark_background"):
        figure, axes = plt.subplots()
    shown = groups.plot(axes)
    assert mpl.colors.to_rgb(axes.lines[0].get_color()) == (1, 1, 1)
    assert shown._repr_png_() is None  # pyplot shows it already
    assert groups._repr_png_().startswith(b"\x89PNG")
    plt.close(figure)
    drawn = [round(sum(bar.get_height() for bar in bars)) for bars in axes.containers]
    assert drawn == [int(groups.right.sum()), int((~groups.right).sum())]


def test_without_matplotlib_numbers_remain(everything, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"pictures need matplotlib.*featcal\[report\]"):
        everything[Groups].plot()
    assert everything[Groups]._repr_png_() is None
    assert everything[Groups].as_json()["rows"] == 600
    with pytest.raises(TypeError, match="abstract"):
        Analysis()


@given(st.integers(0, 40), st.integers(1, 40))
def test_wilson_is_that_of_scipy(hits, more):
    low, high = wilson(torch.tensor([hits]), torch.tensor([hits + more]))
    wanted = stats.binomtest(hits, hits + more).proportion_ci(method="wilson")
    assert (float(low), float(high)) == pytest.approx((wanted.low, wanted.high), abs=1e-9)


floats = st.lists(st.floats(-1e6, 1e6, width=32), max_size=40)


@given(floats, floats, st.floats(0, 1))
def test_quantiles_of_sizes_lie_within_a_cell_of_the_exact_ones(one, other, share):
    parts = [torch.tensor(part, dtype=torch.float32) for part in (one, other)]
    counts = size_counts(parts[0]) + size_counts(parts[1])
    assert torch.equal(counts, size_counts(torch.cat(parts)))
    found = size_quantile(counts, share)
    sizes = np.sort(np.abs(np.float32(one + other)))
    if not len(sizes):
        assert math.isnan(found)
        return
    exact = sizes[max(math.ceil(share * len(sizes)) - 1, 0)]
    assert found <= exact
    assert exact <= found * (1 + 1 / 128) or exact < 1e-37


def test_sizes_of_any_precision_with_and_without_zeros():
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        counts = size_counts(torch.tensor([0.0, 0.0, 0.0, 1.0, -2.0], dtype=dtype))
        assert (size_quantile(counts, 0.5), size_quantile(counts, 0.5, zeros=False)) == (0, 1)
        assert size_quantile(counts, 1.0) == 2


def test_every_snippet_of_the_page_runs(capsys, monkeypatch):
    monkeypatch.setitem(ClipSweep.several.__func__.__kwdefaults__, "points", 6)
    torch.manual_seed(0)
    layers = {"layer3": nn.Sequential(nn.Linear(6, 12), nn.ReLU())}
    layers["pool"] = nn.Sequential(nn.Linear(12, 8), nn.ReLU())
    model = nn.Sequential(OrderedDict(**layers, fc=nn.Linear(8, 3)))
    x, y = 2 * torch.randn(200, 6), torch.randint(0, 3, (200,))
    loaders = {"val_loader": [(x[:100], y[:100])], "test_loader": [(x[100:], y[100:])]}
    known = {"model": model, **loaders}
    text = ANALYSIS.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    for block in blocks:
        exec(block, known)
    assert capsys.readouterr().out
    found = {name for name in analysis.__all__ if f"analysis.{name}." in "".join(blocks)}
    assert found == set(analysis.__all__) - {"Analysis", "BandedDiagram", "LayerRow"}
    # Levels and sizes that are defaults are no results; decimals of four digits would be.
    assert not re.search(r"\d\.\d{3,}|\d+\.\d+ %", text)
