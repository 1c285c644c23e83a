"""Norm clipping: the formula, the search against fine grids, joint fits, and what is no-op."""

import math

import numpy as np
import pytest
import torch
from method_cases import score64

from featcal import Batch, parse
from featcal.core.batch import Through
from featcal.methods.norm_clip import SAMPLE, NormClip


def long_rows(n, *, knee=3.0, heat=1.0, k=5, d=12, seed=0):
    """Lengths differ widely; labels follow logits of rows cut to `knee`, divided by `heat`."""
    draw = np.random.default_rng(seed)
    features = np.abs(draw.normal(size=(n, d))) * draw.lognormal(0, 0.8, size=(n, 1))
    weight, bias = draw.normal(size=(k, d)), draw.normal(size=k)
    head = torch.nn.Linear(d, k)
    with torch.no_grad():
        head.weight.copy_(torch.tensor(weight))
        head.bias.copy_(torch.tensor(bias))
    true = logits64(features, head, knee) / heat
    labels = torch.tensor((true + draw.gumbel(size=true.shape)).argmax(1))
    return Batch(None, labels, torch.tensor(features, dtype=torch.float32)), head


def logits64(features, head, c=math.inf):
    x = np.asarray(features, np.float64)
    z = x @ head.weight.detach().double().numpy().T + head.bias.detach().double().numpy()
    return z * np.minimum(1, c / np.sqrt((x**2).sum(1, keepdims=True)))


def nll_at(batch, head, c, temperature=1.0):
    return score64("nll", logits64(batch.features, head, c) / temperature, batch.labels)


def grid_of(batch, points):
    norms = batch.features.double().norm(dim=1)
    return np.geomspace(float(norms.median()) / 50, float(norms.max()), points)


def test_without_a_bias_it_is_the_head_of_shortened_features():
    head = torch.nn.Linear(4, 3, bias=False)
    features = torch.tensor([[3.0, 0, 4, 0], [0.1, 0, 0, 0], [0.0, 0, 0, 0], [0, -60, 0, 80]])
    shortened = torch.tensor([[1.2, 0, 1.6, 0], [0.1, 0, 0, 0], [0, 0, 0, 0], [0, -1.2, 0, 1.6]])
    found = NormClip().assign(threshold=2.0)(features, head)
    torch.testing.assert_close(found, head(shortened), rtol=1e-5, atol=1e-7)
    assert torch.equal(NormClip()(features, head), head(features))


@pytest.mark.parametrize("rows", [300, SAMPLE + 900])
@pytest.mark.parametrize(("knee", "heat"), [(3.0, 1.0), (8.0, 1.0), (1e9, 2.0)])
def test_the_search_ends_at_the_best_of_a_fine_grid(rows, knee, heat):
    batch, head = long_rows(rows, knee=knee, heat=heat)
    found = NormClip().fit(batch, head)
    c, step = float(found.threshold), found.report.steps[0]
    ours = nll_at(batch, head, c)
    assert ours <= min(nll_at(batch, head, at) for at in grid_of(batch, 200)) + 1e-6
    assert step.loss_after == pytest.approx(ours, abs=1e-6)
    assert step.loss_before == pytest.approx(nll_at(batch, head, math.inf), abs=1e-6)
    touched = float((batch.features.double().norm(dim=1) > c).double().mean())
    assert step.details["rows_touched"] == pytest.approx(touched, abs=1e-9)
    assert step.head_passes == 1
    with torch.no_grad():
        assert torch.equal(found(batch.features, head).argmax(1), head(batch.features).argmax(1))


@pytest.mark.parametrize("rows", [300, SAMPLE + 900])
def test_joint_against_a_scan_of_both(rows):
    batch, head = long_rows(rows, knee=4.0, heat=2.0)
    joint = parse("norm_clip | temperature").fit(batch, head)
    c, temperature = float(joint.steps[0].threshold), float(joint.steps[1].temperature)
    best = min(
        nll_at(batch, head, at, t) for at in grid_of(batch, 40) for t in np.geomspace(0.5, 4, 30)
    )
    assert nll_at(batch, head, c, temperature) <= best + 1e-5
    assert joint.report.steps[0].details["fitted_with"] == "temperature"
    alone = parse("norm_clip | temperature").fit(batch, head, mode="sequential")
    assert joint.report.loss_after <= alone.report.loss_after + 1e-7


def test_logits_that_do_not_fit_into_memory_are_chosen_for_themselves(monkeypatch):
    batch, head = long_rows(400, heat=2.0)
    monkeypatch.setattr(Through.__init__, "__kwdefaults__", {"features": True, "keep": 1000})
    steps = parse("norm_clip | temperature").fit(batch, head).report.steps
    assert steps[0].details["fitted_with"] is None
    assert steps[0].loss_after < steps[0].loss_before


def test_rows_of_one_length_are_left_to_the_temperature():
    batch, head = long_rows(300, heat=2.0)
    features = torch.nn.functional.normalize(batch.features) * 5
    batch = Batch(None, batch.labels, features)
    found = parse("norm_clip | temperature").fit(batch, head)
    alone = parse("temperature").fit(batch, head)
    assert found.report.loss_after == pytest.approx(alone.report.loss_after, abs=1e-6)


@pytest.mark.parametrize("change", ["cold", "silent"])
def test_where_no_threshold_helps_nothing_is_done(change):
    batch, head = long_rows(500, knee=1e9, heat=0.3)
    if change == "silent":
        batch = Batch(None, batch.labels, torch.zeros_like(batch.features))
    found = NormClip().fit(batch, head)
    assert found.report.noop
    assert found.report.steps[0].values == {"threshold": math.inf}
    assert "no threshold improves nll" in found.report.steps[0].message
    with torch.no_grad():
        assert torch.equal(found(batch.features, head), head(batch.features))


def test_half_precision_features_keep_their_length():
    head = torch.nn.Linear(4, 3).half()
    features = torch.tensor([[30000.0, 40000, 30000, 40000], [1.0, 2, 3, 4]]).half()
    with torch.no_grad():
        found = NormClip().assign(threshold=2.0)(features, head)
        own = head(features).float()
    lengths = features.double().norm(dim=1, keepdim=True)
    torch.testing.assert_close(found, (own * 2 / lengths).float(), rtol=1e-5, atol=1e-7)
