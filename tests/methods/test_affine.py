"""Vector, matrix and Dirichlet scaling against sklearn, scipy, closed forms and known anchors."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from method_cases import drawn_affine as drawn
from method_cases import log_probs

from featcal import Batch, InputError, metrics, parse
from featcal.core.loss import brier, ece
from featcal.methods import DirichletCalibration, MatrixScaling, VectorScaling
from featcal.methods.affine import Choice

scipy_optimize = pytest.importorskip("scipy.optimize")

PLAIN_MATRIX = "matrix(off_diagonal=0, bias=0, ridge=0)"
DEFAULTS = ["vector", "matrix", "dirichlet"]


def close(left, right, tolerance=1e-4):
    torch.testing.assert_close(left, right, rtol=0, atol=tolerance)


def nll64(logits, labels):
    return float(F.cross_entropy(torch.as_tensor(logits).double(), torch.as_tensor(labels)))


def temperature64(logits, labels):
    found = scipy_optimize.minimize_scalar(
        lambda u: nll64(logits / math.exp(u), labels),
        bounds=(-4, 4),
        method="bounded",
        options={"xatol": 1e-11},
    )
    return math.exp(found.x)


# --- anchors ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def anchor(shared_file):
    with np.load(shared_file("anchors", "resnet50-cifar10-ce.npz")) as file:
        arrays = {key: torch.from_numpy(file[key]) for key in file.files}
    val = Batch(arrays["val_logits"], arrays["val_labels"])

    def scores(recipe):
        found = parse(recipe).fit(val)
        assert found.report.steps[0].converged
        with torch.no_grad():
            logits = found.wrap()(arrays["test_logits"])
        given = {"logits": logits, "labels": arrays["test_labels"]}
        ours = [100 * metrics.ece(**given), 100 * metrics.adaptive_ece(**given, reference=True)]
        ours += [100 * metrics.classwise_ece(**given), metrics.nll(**given)]
        return [*ours, 100 * metrics.accuracy(**given)]

    return scores


@pytest.mark.shared
def test_vector_scaling_of_the_papers_logits(anchor):
    found = anchor("vector(ridge=0)")
    assert found == pytest.approx([1.441, 1.733, 0.3901, 0.1980, 94.98], abs=6e-4)


@pytest.mark.shared
def test_unregularised_matrix_scaling_of_the_papers_logits(anchor):
    """The anchor's optimiser stopped a little short; Newton's exact minimum has ECE 1.555."""
    found = anchor(PLAIN_MATRIX)
    assert found == pytest.approx([1.564, 1.699, 0.4006, 0.2015, 94.95], abs=1e-2)
    assert found == pytest.approx([1.555, 1.698, 0.4004, 0.20146, 94.95], abs=1.5e-3)


@pytest.mark.shared
@pytest.mark.parametrize(("recipe", "plain"), [("vector", 0.1980), ("matrix", 0.2015)])
def test_the_defaults_do_better_than_the_plain_forms_on_unseen_rows(anchor, recipe, plain):
    assert anchor(recipe)[3] < plain


# --- independent references -------------------------------------------------------------------


def test_plain_matrix_scaling_is_scikit_learns_logistic_regression():
    linear_model = pytest.importorskip("sklearn.linear_model")
    logits, labels = drawn()
    model = linear_model.LogisticRegression(C=1e9, tol=1e-9, max_iter=5000)
    model.fit(logits.numpy(), labels.numpy())
    theirs = torch.tensor(model.predict_log_proba(logits.numpy()))
    close(log_probs(parse(PLAIN_MATRIX).fit(Batch(logits, labels)), logits), theirs)


@pytest.mark.parametrize("ridge", [0.0, 1.0, 30.0])
def test_vector_scaling_agrees_with_scipy(ridge):
    logits, labels = drawn(n=300)
    heat = temperature64(logits, labels)
    z, y, k = logits.numpy(), labels.numpy(), logits.shape[1]

    def objective(values):
        w, b = values[:k], values[k:]
        out = z * w + b
        top = out.max(1)
        total = np.log(np.exp(out - top[:, None]).sum(1)) + top
        pull = ridge * (((heat * w - 1) ** 2).sum() + (b**2).sum())
        return (total - out[np.arange(len(y)), y]).sum() + pull

    start = np.r_[np.full(k, 1 / heat), np.zeros(k)]
    theirs = scipy_optimize.minimize(objective, start, method="BFGS", options={"gtol": 1e-5})
    w, b = torch.tensor(theirs.x).split(k)
    found = VectorScaling(ridge=ridge).fit(Batch(logits, labels))
    close(log_probs(found, logits), (logits * w + b).log_softmax(1), 2e-4)
    assert objective(np.r_[found.weight.double(), found.offset.double()]) <= theirs.fun + 1e-5


@pytest.mark.parametrize("recipe", ["matrix", "dirichlet"])
def test_the_gradient_of_the_penalised_loss_vanishes(recipe):
    """The loss as documented, written out here, at the values that were fitted."""
    logits, labels = drawn(n=400)
    n, k = logits.shape
    found = parse(f"{recipe}(off_diagonal=0.01, bias=0.003, ridge=2)").fit(Batch(logits, labels))
    inputs = logits if recipe == "matrix" else logits.log_softmax(1)
    heat = temperature64(inputs, labels)
    weight = found.weight.double().requires_grad_()
    bias = found.offset.double().requires_grad_()
    off = weight.square().sum() - weight.diagonal().square().sum()
    loss = F.cross_entropy(inputs @ weight.T + bias, labels) + 0.01 * off
    loss = loss + 0.003 * bias.square().sum()
    loss = loss + 2 / n * (heat * weight.diagonal() - 1).square().sum()
    slopes = torch.autograd.grad(loss, [weight, bias])
    assert max(float(slope.abs().max()) for slope in slopes) < 1e-6  # float32 values
    assert found.report.steps[0].values["off_diagonal"] == 0.01
    assert found.report.steps[0].values["bias"] == 0.003
    assert weight.shape == (k, k)


def test_constant_logits_give_the_frequencies_of_the_classes():
    labels = torch.tensor([0] * 70 + [1] * 20 + [2] * 10)
    found = VectorScaling(ridge=0).fit(Batch(torch.zeros(100, 3), labels))
    probs = log_probs(found, torch.zeros(1, 3)).exp()[0]
    close(probs, torch.tensor([0.7, 0.2, 0.1]), 1e-5)


@pytest.mark.filterwarnings("ignore::featcal.CalibrationWarning")  # worse than guessing, sometimes
@given(st.integers(1, 49), st.integers(1, 49))
@settings(max_examples=20, deadline=None)
def test_two_classes_and_two_kinds_of_rows_have_a_closed_form(first, second):
    """A saturated model: each kind's probability is its frequency."""
    logits = torch.tensor([[2.0, 0.0]] * 50 + [[-1.0, 1.0]] * 50)
    labels = torch.tensor([1] * first + [0] * (50 - first) + [1] * second + [0] * (50 - second))
    found = parse(PLAIN_MATRIX).fit(Batch(logits, labels))
    probs = log_probs(found, logits[[0, 50]]).exp()[:, 1]
    if found.report.noop:
        probs = logits[[0, 50]].softmax(1)[:, 1]
    close(probs, torch.tensor([first, second]) / 50, 1e-3)


def test_a_huge_penalty_leaves_a_diagonal():
    logits, labels = drawn()
    diagonal = parse("matrix(off_diagonal=1e7, bias=0, ridge=0)").fit(Batch(logits, labels))
    off = diagonal.weight - torch.diag(diagonal.weight.diagonal())
    assert off.abs().max() < 1e-5
    vector = VectorScaling(ridge=0).fit(Batch(logits, labels))
    close(log_probs(diagonal, logits), log_probs(vector, logits), 1e-3)
    fixed = parse("matrix(off_diagonal=1e7, bias=1e7, ridge=1e9)").fit(Batch(logits, labels))
    heat = temperature64(logits, labels)
    close(log_probs(fixed, logits), (logits / heat).log_softmax(1), 1e-3)


def test_brier_is_minimised_too():
    logits, labels = drawn()
    given = {"labels": labels}
    for recipe in DEFAULTS:
        found = parse(recipe).fit(Batch(logits, labels), loss=brier)
        by_nll = parse(recipe).fit(Batch(logits, labels))
        ours = metrics.brier(logits=found.wrap()(logits), **given)
        assert ours <= metrics.brier(logits=by_nll.wrap()(logits), **given) + 1e-4
        assert found.report.loss_after == pytest.approx(ours, abs=1e-6)


@pytest.mark.parametrize("recipe", DEFAULTS)
def test_ece_has_no_gradient_to_follow(recipe):
    logits, labels = drawn()
    with pytest.raises(InputError, match=f"{recipe} is fitted by gradients, and ece has none"):
        parse(recipe).fit(Batch(logits, labels), loss=ece)


# --- invariances ------------------------------------------------------------------------------


def test_a_constant_added_to_a_row_changes_nothing_for_dirichlet():
    logits, labels = drawn()
    shift = torch.randn(len(labels), 1, generator=torch.Generator().manual_seed(0)).double() * 9
    one = DirichletCalibration().fit(Batch(logits, labels))
    two = DirichletCalibration().fit(Batch(logits + shift, labels))
    close(log_probs(one, logits), log_probs(two, logits + shift), 1e-5)


@pytest.mark.parametrize("recipe", ["vector", "matrix"])
@pytest.mark.parametrize("scale", [1e-3, 1e4])
def test_the_scale_of_the_logits_does_not_matter(recipe, scale, monkeypatch):
    """At one strength: which rows make a fold does depend on the logits' digits."""
    monkeypatch.setattr("featcal.methods.affine.choose_strength", lambda *_: Choice(0.1, {}))
    logits, labels = drawn()
    one = parse(recipe).fit(Batch(logits, labels))
    two = parse(recipe).fit(Batch(logits * scale, labels))
    close(log_probs(one, logits), log_probs(two, logits * scale), 1e-4)


@pytest.mark.parametrize("recipe", [*DEFAULTS, PLAIN_MATRIX])
def test_the_order_of_rows_and_their_batches_do_not_matter(recipe):
    logits, labels = drawn(n=1500, k=8, dtype=torch.float32)
    batch = Batch(logits, labels)
    mixed = batch.rows(torch.randperm(len(batch), generator=torch.Generator().manual_seed(1)))
    pieces = [mixed.rows(slice(0, 9)), mixed.rows(slice(9, 9)), mixed.rows(slice(9, None))]
    one, two = parse(recipe).fit(batch), parse(recipe).fit(pieces)
    close(log_probs(one, logits), log_probs(two, logits), 2e-5)
    chosen = [found.report.steps[0].values.get("off_diagonal") for found in (one, two)]
    assert chosen[0] == pytest.approx(chosen[1])


def test_permuting_the_classes_permutes_the_map():
    logits, labels = drawn()
    order = torch.tensor([2, 0, 3, 1])
    one = MatrixScaling(off_diagonal=0.01).fit(Batch(logits, labels))
    two = MatrixScaling(off_diagonal=0.01).fit(Batch(logits[:, order], order.argsort()[labels]))
    close(two.weight, one.weight[order][:, order], 1e-5)


# --- options and reports -----------------------------------------------------------------------


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, True, "1", [1.0]])
@pytest.mark.parametrize("key", ["ridge", "off_diagonal", "bias"])
def test_penalties_are_numbers_from_0(key, value):
    with pytest.raises(InputError, match=rf"matrix: {key} is .*: give a finite number, 0 or above"):
        MatrixScaling(**{key: value})
    assert getattr(MatrixScaling(**{key: np.float64(0.5)}), key) == 0.5


def test_values_no_fit_can_give_are_refused():
    good = VectorScaling().assign(weight=torch.ones(3), offset=torch.zeros(3))
    good.check()
    VectorScaling().check()
    with pytest.raises(InputError, match=r"vector: weight \(3,\) and offset \(2,\)"):
        good.assign(offset=torch.zeros(2)).check()
    with pytest.raises(InputError, match="must be finite"):
        good.assign(offset=torch.tensor([0.0, math.nan, 0.0])).check()


def test_dirichlet_clips_at_the_published_floor():
    found = DirichletCalibration(off_diagonal=0.1)
    inputs = found.inputs(torch.tensor([[0.0, -1e4]], dtype=torch.float64))
    assert inputs[0].tolist() == [0.0, math.log(2.2e-16)]


def test_the_report_shows_the_ranges():
    logits, labels = drawn()
    step = VectorScaling().fit(Batch(logits, labels)).report.steps[0]
    assert set(step.values) == {"ridge", "w_min", "w_max", "b_min", "b_max"}
    assert step.values["w_min"] < step.values["w_max"]
