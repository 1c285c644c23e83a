"""A model with one logit is first-class: every method, score, pack, file and picture."""

import copy
import json
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression
from torch import nn

from featcal import (
    METHODS,
    Batch,
    CalibrationWarning,
    Pack,
    evaluate,
    metrics,
    parse,
    write_pack,
)

N, D = 250, 12
RECIPES = [*sorted(METHODS), "clip | temperature"]
FEATURE_RECIPES = [r for r in RECIPES if parse(r).needs_features or parse(r).takes_features]
LOGIT_RECIPES = [recipe for recipe in RECIPES if recipe not in FEATURE_RECIPES]
every_recipe = pytest.mark.parametrize("recipe", RECIPES)


def layer(weight, bias):
    made = nn.Linear(weight.shape[1], len(weight), device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    made.bias = nn.Parameter(bias, requires_grad=False)
    return made


@pytest.fixture(scope="module")
def world():
    """A sigmoid model that is overconfident: activations too large, logits too far, a bias."""
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(N, D, generator=draw).relu() * 3 * torch.rand(N, 1, generator=draw)
    features[::10] *= 3
    weight, bias = 0.8 * torch.randn(1, D, generator=draw), torch.tensor([0.7])
    one = layer(weight, bias)
    two = layer(torch.cat([torch.zeros_like(weight), weight]), torch.cat([torch.zeros(1), bias]))
    z = one(features)
    true = (one(features.clamp(max=1.5)) - 0.7) / 1.5
    labels = (torch.rand(N, 1, generator=draw) < true.sigmoid())[:, 0].long()
    return SimpleNamespace(features=features, z=z, labels=labels, one=one, two=two)


@pytest.fixture(scope="module")
def pair(world):
    """The same rows as a model of two classes gives them."""
    logits = torch.cat([torch.zeros_like(world.z), world.z], 1)
    return Batch(logits, world.labels, world.features)


def fit(recipe, data, head=None):
    calibrator = parse(recipe)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        return calibrator.fit(data, head, train=data if calibrator.needs_train else None)


@pytest.fixture(scope="module")
def fitted(world):
    """Recipe -> a copy of the calibrator fitted on single logits and float labels."""
    done = {}

    def get(recipe):
        if recipe not in done:
            batch = Batch(world.z, world.labels[:, None].float(), world.features)
            done[recipe] = fit(recipe, batch, world.one)
        return copy.deepcopy(done[recipe])

    return get


def same_state(left, right, **tolerance):
    left, right = left.state_dict(), right.state_dict()
    assert left.keys() == right.keys()
    for key in left:
        torch.testing.assert_close(left[key], right[key], msg=key, **tolerance)


def outputs(module, *arguments):
    with torch.no_grad():
        return module(*arguments)


@every_recipe
def test_one_logit_is_fitted_as_the_two_it_stands_for(recipe, world, pair, fitted):
    expected = fit(recipe, pair, world.two)
    found = fitted(recipe)
    same_state(found, expected, rtol=0, atol=0)
    assert found.report.loss_after == expected.report.loss_after < expected.report.loss_before
    assert (found.report.classes, found.report.rows) == (2, N)
    entropy = F.binary_cross_entropy_with_logits(world.z[:, 0].double(), world.labels.double())
    assert found.report.loss_before == pytest.approx(float(entropy), abs=1e-6)


@pytest.mark.parametrize("recipe", ["vector", "isotonic", "ensemble", "proximity"])
def test_nothing_depends_on_which_class_is_called_1(recipe, world, fitted):
    mirror = layer(-world.one.weight, -world.one.bias)
    found = fit(recipe, Batch(-world.z, world.labels == 0, world.features), mirror)
    positive = outputs(fitted(recipe).wrap(world.one), world.features).sigmoid()
    negative = outputs(found.wrap(mirror), world.features).sigmoid()
    torch.testing.assert_close(positive, 1 - negative, rtol=0, atol=1e-5)


def test_temperature_is_logistic_regression_without_an_intercept(world, fitted):
    model = LogisticRegression(C=np.inf, fit_intercept=False, tol=1e-10)
    slope = model.fit(world.z.double(), world.labels).coef_[0, 0]
    assert 1 / float(fitted("temperature").temperature) == pytest.approx(slope, rel=1e-4)


def test_vector_without_its_ridge_is_platt_scaling(world):
    model = LogisticRegression(C=np.inf, tol=1e-10).fit(world.z.double(), world.labels)
    found = fit("vector(ridge=0)", Batch(world.z, world.labels)).wrap()
    expected = torch.tensor(model.decision_function(world.z.double())).float()
    torch.testing.assert_close(outputs(found, world.z)[:, 0], expected, rtol=1e-3, atol=1e-3)


def test_isotonic_of_each_class_is_isotonic_regression_of_class_1(world):
    recipe = "isotonic(reading='one_vs_rest', between='step')"
    found = outputs(fit(recipe, Batch(world.z, world.labels)).wrap(), world.z).sigmoid()[:, 0]
    curve = IsotonicRegression(out_of_bounds="clip").fit(world.z[:, 0], world.labels)
    expected = torch.tensor(curve.predict(world.z[:, 0]))
    # Ours never says 0 or 1, sklearn's may.
    torch.testing.assert_close(found.double(), expected.clamp(1e-3, 1 - 1e-3), rtol=0, atol=1e-3)


@every_recipe
def test_the_wrapped_layer_gives_one_logit_back(recipe, world, pair, fitted):
    calibrator = fitted(recipe)
    two = outputs(calibrator.wrap(world.two), world.features)
    assert two.shape == (N, 2)
    one = outputs(calibrator.wrap(world.one), world.features)
    assert one.shape == (N, 1)
    torch.testing.assert_close(one[:, 0].sigmoid(), two.softmax(1)[:, 1], rtol=0, atol=4e-5)
    if calibrator.keeps_accuracy:
        assert torch.equal(one > 0, world.z > 0)


@pytest.mark.parametrize("recipe", LOGIT_RECIPES)
def test_without_a_layer_logits_come_back_in_their_shape(recipe, world, pair, fitted):
    module = fitted(recipe).wrap()
    two = outputs(module, pair.logits)
    for logits in (world.z, world.z[:, 0]):
        found = outputs(module, logits)
        assert found.shape == logits.shape
        torch.testing.assert_close(found.reshape(-1), two[:, 1] - two[:, 0], rtol=0, atol=0)


@pytest.mark.parametrize("recipe", ["temperature", "isotonic", "clip | temperature"])
def test_scores_are_those_of_two_classes(recipe, world, pair, fitted):
    calibrator = fitted(recipe)
    single = Batch(world.z, world.labels.float(), world.features)
    found = evaluate(single, calibrator, world.one, resamples=100)
    expected = evaluate(pair, calibrator, world.two, resamples=100)
    assert found.metrics == pytest.approx(expected.metrics, abs=1e-5)
    for name, interval in expected.intervals.items():
        assert found.intervals[name].as_json() == pytest.approx(interval.as_json(), abs=1e-4)
    p = outputs(calibrator.wrap(world.one), world.features).sigmoid()
    assert found.metrics["nll"] == pytest.approx(metrics.nll(p, world.labels > 0), abs=1e-5)
    assert found.metrics["ece"] == pytest.approx(metrics.ece(p[:, 0], world.labels), abs=1e-5)


@pytest.mark.parametrize("with_features", [True, False])
def test_a_pack_holds_two_classes(with_features, world, pair, fitted, tmp_path):
    features, head = (world.features, world.one) if with_features else (None, None)
    data = [
        Batch(world.z[:200, 0], world.labels[:200, None].float(), None),
        Batch(world.z[200:], world.labels[200:] > 0, None),
    ]
    if with_features:
        data = Batch(world.z, world.labels.float(), features)
    pack = write_pack(tmp_path / "p", {"val": data}, head=head, class_names=["no", "yes"])
    pack = Pack.open(pack.path)
    pack.verify()
    manifest = json.loads((pack.path / "manifest.json").read_text())
    assert manifest["class_names"] == ["no", "yes"]
    found = fit("temperature", pack.split("val"), pack.head)
    same_state(found, fitted("temperature"), rtol=0, atol=0)
    if with_features:
        assert torch.equal(pack.head.weight, world.two.weight)
        assert torch.equal(pack.head.bias, world.two.bias)
        clipped = fit("clip | temperature", pack.split("val"), pack.head)
        same_state(clipped, fitted("clip | temperature"), rtol=0, atol=0)
