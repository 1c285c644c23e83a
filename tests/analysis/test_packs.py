"""Every analysis takes a pack as it is: its split, and its own head."""

import json

import pytest
import torch

from featcal import Batch, InputError, write_pack
from featcal.analysis import (
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


@pytest.fixture(scope="module")
def pack(net, tmp_path_factory):
    splits = {
        name: Batch(None, batch.labels, batch.features)
        for name, batch in (("val", net.val), ("test", net.test))
    }
    return write_pack(tmp_path_factory.mktemp("packs") / "pack", splits, head=net.head)


def told(found):
    return json.dumps(found.as_json(), sort_keys=True)


@pytest.mark.parametrize("split", ["val", "test"])
@pytest.mark.parametrize("kind", [UnitMeans, FeatureValues, ConfidentCounts, GroupCalibration])
def test_a_pack_is_its_rows_and_its_head(kind, split, net, pack):
    head = {"head": net.head}
    wanted = told(kind.of(pack.split(split), **head))
    assert told(kind.of(pack, split=split)) == wanted
    assert told(kind.of(pack.split(split))) == wanted
    if split == "test":
        assert told(kind.of(pack)) == wanted


@pytest.mark.parametrize(
    "kind", [EntropyGrowth, ConfidentCounts, ChangedPredictions, GroupCalibration, BeforeAfter]
)
def test_with_a_calibrator_too(kind, net, pack):
    wanted = told(kind.of(pack.split("test"), net.clip, net.head))
    assert told(kind.of(pack, net.clip)) == wanted
    assert told(kind.of(pack, net.clip, split="val")) != wanted


def test_groups_and_diagrams_take_packs_as_well_as_arrays(net, pack):
    assert told(Groups.of(pack)) == told(Groups.of_data(pack.split("test"), net.head))
    assert Groups.of(pack, confidence=0.8, split="val").sizes == (
        Groups.of(net.val.logits, net.val.labels, 0.8).sizes
    )
    with torch.no_grad():
        logits = net.head(net.test.features)
    wanted = BandedDiagram.of(logits=logits, labels=net.test.labels)
    found = BandedDiagram.of(pack)
    assert torch.equal(found.diagram.bins.count, wanted.diagram.bins.count)
    assert found.diagram.ece == pytest.approx(wanted.diagram.ece, rel=1e-6)
    assert BandedDiagram.of(pack, split="val").diagram.ece != found.diagram.ece


def test_a_sweep_of_a_pack_chooses_on_val_and_scores_test(net, pack):
    plan = {"points": 6, "fitted": 1.0}
    wanted = told(ClipSweep.of(pack.split("val"), pack.split("test"), net.head, **plan))
    assert told(ClipSweep.of(pack, **plan)) == wanted
    assert told(ClipSweep.of(pack, splits=("test", "val"), **plan)) != wanted
    assert told(ClipSweep.several(pack, thens=[None], points=6, fitted=[1.0])[0]) == wanted
    with pytest.raises(InputError, match="test is None: pass rows"):
        ClipSweep.of(net.val)


def test_a_pack_serves_the_ablation_of_its_last_layers(net, pack):
    found = LayerAblation.of(pack)
    assert [row.layer for row in found.rows] == [None, "logits", "features"]
    assert found.rows[2].threshold == pytest.approx(float(net.clip.threshold), rel=1e-6)
    assert found.rows[2].metrics["ece"] < found.rows[0].metrics["ece"]
    with pytest.raises(InputError, match="a pack does not hold the outputs of layer3"):
        LayerAblation.of(pack, layers=["layer3"])
    with pytest.raises(InputError, match="a loader is missing"):
        LayerAblation.of(torch.nn.Linear(2, 2))


def test_a_split_that_is_not_there_is_refused(pack):
    with pytest.raises(InputError, match="has no split 'train'"):
        UnitMeans.of(pack, split="train")
