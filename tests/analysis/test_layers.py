"""The clip at other layers of a model, against doing it by hand."""

import json
import math
from collections import OrderedDict

import pytest
import torch
from torch import nn

import featcal
from featcal.analysis import LayerAblation
from featcal.core.checks import InputError


@pytest.fixture(scope="module")
def scene():
    torch.manual_seed(0)
    parts = {"first": nn.Sequential(nn.Linear(6, 16), nn.ReLU())}
    parts["second"] = nn.Sequential(nn.Linear(16, 12), nn.ReLU())
    model = nn.Sequential(OrderedDict(**parts, fc=nn.Linear(12, 3)))
    with torch.no_grad():
        model.fc.weight *= 6
        x = 2 * torch.randn(600, 6)
        y = (model(x) / 3 + 1.5 * torch.randn(600, 3)).argmax(1)
    return model, [(x[:300], y[:300])], [(x[300:], y[300:])]


def test_rows_are_those_of_calibrate(scene):
    model, val, test = scene
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = LayerAblation.of(model, val, test, {"early": "first"})
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert [row.layer for row in found.rows] == [None, "logits", "features", "first"]
    assert [row.label for row in found.rows][-1] == "early"
    for row, (recipe, layer) in zip(
        found.rows[1:], [("logit_clip", None), ("clip", None), ("clip", "first")], strict=True
    ):
        clip = featcal.parse(recipe)
        calibrated = featcal.calibrate(model, val, clip, layer=layer)
        scores = featcal.evaluate(featcal.collect(calibrated, test)).metrics
        assert row.threshold == float(clip.threshold)
        assert row.metrics == {name: scores[name] for name in ("accuracy", "ece", "nll", "brier")}
    baseline = featcal.evaluate(featcal.collect(model, test)).metrics
    assert found.rows[0].metrics["ece"] == baseline["ece"]
    assert math.isinf(found.rows[0].threshold)


def test_the_json_and_the_picture(scene):
    found = LayerAblation.of(*scene, ["second"]).plot()
    told = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert told["rows"][0]["threshold"] is None
    assert set(told["rows"][0]) == {"label", "layer", "threshold", "metrics"}
    widths = [bar.get_width() for bar in found.axes.patches]
    assert widths == pytest.approx([100 * row.metrics["ece"] for row in found.rows])


def test_layers_are_checked(scene):
    with pytest.raises(InputError, match=r"layers is the text 'first': pass a list of paths"):
        LayerAblation.of(*scene, "first")
    with pytest.raises(InputError, match="nowhere"):
        LayerAblation.of(*scene, ["nowhere"])
    with pytest.raises(InputError, match="a loader is missing"):
        LayerAblation.of(scene[0])
