"""A model with one logit is first-class: every method, score, pack, file and picture."""

import copy
import itertools
import json
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.calibration import calibration_curve
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression
from torch import nn

import featcal
from featcal import (
    METHODS,
    Batch,
    CalibrationWarning,
    InputError,
    Pack,
    ReliabilityDiagram,
    compare,
    evaluate,
    metrics,
    parse,
    write_pack,
)
from featcal.report import save_comparison

N, D = 400, 16
RECIPES = [*sorted(METHODS), "clip | temperature", "clip | isotonic"]
LOGIT_RECIPES = [recipe for recipe in RECIPES if not parse(recipe).needs_features]
LABELS = {
    "float column": lambda y: y[:, None].float(),
    "float": lambda y: y.double(),
    "bool": lambda y: y.bool(),
    "integers": lambda y: y,
}
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


# --- fits -------------------------------------------------------------------------------------


@every_recipe
def test_one_logit_is_fitted_as_the_two_it_stands_for(recipe, world, pair, fitted):
    expected = fit(recipe, pair, world.two)
    found = fitted(recipe)
    same_state(found, expected, rtol=0, atol=0)
    assert found.report.loss_after == expected.report.loss_after < expected.report.loss_before
    assert (found.report.classes, found.report.rows) == (2, N)
    entropy = F.binary_cross_entropy_with_logits(world.z[:, 0].double(), world.labels.double())
    assert found.report.loss_before == pytest.approx(float(entropy), abs=1e-6)


SHAPES = {"column": lambda z: z, "flat": lambda z: z[:, 0]}
# A batch is made the same before any method sees it: all forms with one, and one form with each.
FORMS = list(itertools.product(SHAPES, LABELS))
FITS_OF_FORMS = [("temperature", *form) for form in FORMS]
OTHERS = ["clip", "isotonic", "vector", "group"]
FITS_OF_FORMS += [(name, *form) for name, form in zip(OTHERS, FORMS[::2], strict=True)]


@pytest.mark.parametrize(("recipe", "shape", "labels"), FITS_OF_FORMS)
def test_labels_and_logits_of_every_form_fit_alike(recipe, shape, labels, world, fitted):
    batch = Batch(SHAPES[shape](world.z), LABELS[labels](world.labels), world.features)
    same_state(fit(recipe, batch, world.one), fitted(recipe), rtol=0, atol=0)


@pytest.mark.parametrize("recipe", ["clip", "temperature", "vector", "group", "proximity"])
def test_features_and_the_layer_alone_fit_alike(recipe, world, fitted):
    """The layer then gives the logits: a product of one row rounds otherwise than one of two."""
    bare = Batch(None, world.labels, world.features)
    found = outputs(fit(recipe, bare, world.one).wrap(world.one), world.features).sigmoid()
    expected = outputs(fitted(recipe).wrap(world.one), world.features).sigmoid()
    far = ((found - expected).abs() > 1e-3).double().mean()
    assert far <= (0.01 if any(step.jumps for step in parse(recipe).steps_in_order()) else 0)


@pytest.mark.parametrize("recipe", sorted(METHODS))
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


# --- what ships -------------------------------------------------------------------------------


@every_recipe
def test_the_wrapped_layer_gives_one_logit_back(recipe, world, pair, fitted):
    calibrator = fitted(recipe)
    two = outputs(calibrator.wrap(world.two), world.features)
    assert two.shape == (N, 2)
    one = outputs(calibrator.wrap(world.one), world.features)
    assert one.shape == (N, 1)
    torch.testing.assert_close(one[:, 0].sigmoid(), two.softmax(1)[:, 1], rtol=0, atol=2e-5)
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


def test_a_fresh_calibrator_is_the_identity_on_one_logit(world):
    for recipe in LOGIT_RECIPES:
        for logits in (world.z, world.z[:, 0], world.z.double()):
            assert torch.equal(outputs(parse(recipe).wrap(), logits), logits)


@every_recipe
def test_a_fresh_calibrator_leaves_the_layer_its_logit(recipe, world):
    assert torch.equal(outputs(parse(recipe).wrap(world.one), world.features), world.z)


@pytest.mark.parametrize(
    "head",
    [
        lambda one: nn.Sequential(nn.Dropout(0.5), one),
        lambda one: nn.Sequential(one, nn.Flatten(0)),
        lambda one: nn.Sequential(nn.Identity(), one, nn.Identity()),
    ],
    ids=["dropout", "flat", "identities"],
)
@pytest.mark.parametrize("recipe", ["clip", "isotonic"])
def test_layers_around_the_one_logit(recipe, head, world, fitted):
    made = head(world.one).eval()
    found = fit(recipe, Batch(world.z, world.labels, world.features), made)
    # A layer that is more than one product is searched less finely, see docs/numerics.md.
    assert found.report.loss_after == pytest.approx(fitted(recipe).report.loss_after, abs=1e-3)
    own, given = outputs(found.wrap(made), world.features), outputs(made, world.features)
    assert own.shape == given.shape
    entropy = F.binary_cross_entropy_with_logits(own.reshape(-1), world.labels.float())
    assert float(entropy) == pytest.approx(found.report.loss_after, abs=1e-6)


@pytest.mark.no_cover
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@every_recipe
def test_export_with_a_free_batch_size_equals_eager(recipe, world, fitted):
    calibrator = fitted(recipe)
    pairs = [(calibrator.wrap(world.one).eval(), world.features)]
    if recipe in ("temperature", "vector", "isotonic"):
        bare = calibrator.wrap().eval()
        pairs += [(bare, world.z), (bare, world.z[:, 0])]
    for module, given in pairs:
        shapes = ({0: torch.export.Dim("n", min=2)},)
        program = torch.export.export(module, (given[:8],), dynamic_shapes=shapes).module()
        for rows in (2, 8, 333):
            torch.testing.assert_close(program(given[:rows]), outputs(module, given[:rows]))


@every_recipe
def test_save_and_load_are_bitwise(recipe, world, fitted, tmp_path):
    calibrator = fitted(recipe)
    again = featcal.load(featcal.save(calibrator, tmp_path / "c.safetensors"))
    same_state(again, calibrator, rtol=0, atol=0)
    assert again.report == calibrator.report
    assert torch.equal(
        outputs(again.wrap(world.one), world.features),
        outputs(calibrator.wrap(world.one), world.features),
    )


def test_gradients_pass_through_the_one_logit(world, fitted):
    module = fitted("clip | temperature").wrap(copy.deepcopy(world.one).requires_grad_(True))
    loss = F.binary_cross_entropy_with_logits(module(world.features)[:, 0], world.labels.float())
    loss.backward()
    assert torch.isfinite(module.weight.grad).all()
    assert module.weight.grad.abs().sum() > 0


# --- scores and packs -------------------------------------------------------------------------


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


def test_the_model_as_it_is_needs_logits_alone(world, pair):
    for logits in (world.z, world.z[:, 0]):
        assert evaluate(Batch(logits, world.labels > 0)).metrics == evaluate(pair).metrics


@pytest.mark.parametrize("folds", [None, 2])
def test_comparisons_are_those_of_two_classes(folds, world, pair):
    recipes = ["none", "clip | temperature", "isotonic"]
    half = slice(0, N // 2), slice(N // 2, N)
    made = {}
    for name, head in (("one", world.one), ("two", world.two)):
        given = pair if name == "two" else Batch(world.z[:, 0], world.labels > 0, world.features)
        data = (given, None) if folds else (given.rows(half[0]), given.rows(half[1]))
        made[name] = compare(*data, recipes, head, resamples=100, folds=folds)
    for found, expected in zip(made["one"].rows, made["two"].rows, strict=True):
        assert found.recipe == expected.recipe
        assert found.scores.metrics == pytest.approx(expected.scores.metrics, abs=1e-5)


@pytest.mark.parametrize("with_features", [True, False])
def test_a_pack_holds_two_classes(with_features, world, pair, fitted, tmp_path):
    features, head = (world.features, world.one) if with_features else (None, None)
    data = [
        Batch(world.z[:300, 0], world.labels[:300, None].float(), None),
        Batch(world.z[300:], world.labels[300:] > 0, None),
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


@pytest.mark.parametrize("bias", [True, False])
def test_a_pack_of_features_and_a_layer_of_one_row(bias, world, tmp_path):
    weight = world.one.weight.detach()
    head = (weight, world.one.bias.detach()) if bias else (weight, None)
    data = Batch(None, world.labels, world.features)
    pack = write_pack(tmp_path / "p", {"val": data}, head=head)
    assert torch.equal(pack.head.weight, world.two.weight)
    wanted = world.two.bias if bias else torch.zeros(2)
    assert torch.equal(pack.head.bias, wanted)


def test_a_pack_of_a_layer_that_did_not_make_the_logits_is_refused(world, tmp_path):
    data = Batch(world.z + 1, world.labels, world.features)
    with pytest.raises(InputError, match=r"split 'val': head\(features\) differs from the stored"):
        write_pack(tmp_path / "p", {"val": data}, head=world.one)
    with pytest.raises(InputError, match=r"differs from the stored logits"):
        fit("temperature", data, world.one)
    labels = world.labels.clone()
    labels[3] = 2
    data = Batch(world.z, labels, world.features)
    with pytest.raises(InputError, match=r"split 'val': labels are outside 0\.\.1 in row 3"):
        write_pack(tmp_path / "p", {"val": data}, head=world.one)


# --- pictures ---------------------------------------------------------------------------------


def test_a_diagram_of_p_is_that_of_both_columns(world):
    p = world.z.double().sigmoid()
    both = torch.cat([1 - p, p], 1)
    expected = ReliabilityDiagram.of(both, world.labels)
    for probs in (p, p[:, 0], p.numpy()):
        found = ReliabilityDiagram.of(probs, world.labels > 0)
        assert found.caption == expected.caption
        torch.testing.assert_close(found.accuracy, expected.accuracy, equal_nan=True)
    assert found.plot().axes[0].get_ylabel() == "accuracy"


def test_a_diagram_of_class_1_is_sklearns_curve(world, tmp_path):
    p = world.z[:, 0].double().sigmoid().numpy()
    labels = world.labels.numpy()
    found = ReliabilityDiagram.of(p, labels, of_class=1, bins=10)
    share, mean = calibration_curve(labels, p, n_bins=10)
    filled = found.share > 0
    np.testing.assert_allclose(found.accuracy[filled], share, rtol=1e-12)
    np.testing.assert_allclose(found.mean_confidence[filled], mean, rtol=1e-12)
    assert float(found.share[:5].sum()) == pytest.approx((p <= 0.5).mean())
    assert found.overall_accuracy == labels.mean()
    assert found.overall_confidence == pytest.approx(p.mean())
    tempered = outputs(fit("temperature", Batch(world.z, world.labels)).wrap(), world.z)
    after = ReliabilityDiagram.of(logits=tempered, labels=labels, of_class=1, bins=10)
    paths = save_comparison([found, after], tmp_path / "class")
    assert all(path.stat().st_size > 10_000 for path in paths)
