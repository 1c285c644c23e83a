"""Affine maps against sklearn, scipy, closed forms and known anchors; their descent and folds."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from method_cases import drawn_affine as drawn
from method_cases import log_probs, nll64, paper
from scipy import optimize

from featcal import Batch, CalibrationWarning, InputError, Temperature, metrics, parse
from featcal.core.fit import brier, ece, nll
from featcal.methods import VectorScaling
from featcal.methods import affine as affine_module
from featcal.methods.affine import STRENGTHS, Task, by_kind, curvature, descend, mapped

PLAIN_MATRIX = "matrix(off_diagonal=0, bias=0, ridge=0)"
DEFAULTS = ["vector", "matrix", "dirichlet", "svs", "sms"]


def close(left, right, tolerance=1e-4):
    torch.testing.assert_close(left, right, rtol=0, atol=tolerance)


def temperature64(logits, labels):
    found = optimize.minimize_scalar(
        lambda u: nll64(logits / math.exp(u), labels),
        bounds=(-4, 4),
        method="bounded",
        options={"xatol": 1e-11},
    )
    return math.exp(found.x)


def fitted(recipe, logits, labels):
    return parse(recipe).fit(Batch(logits, labels))


@pytest.mark.shared
@pytest.mark.parametrize(
    ("recipe", "expected", "tolerance"),
    [
        ("vector(ridge=0)", [1.441, 1.733, 0.3901, 0.1980, 94.98], 6e-4),
        # The anchor's optimiser stopped a little short; these are of Newton's exact minimum.
        (PLAIN_MATRIX, [1.555, 1.698, 0.4004, 0.20146, 94.95], 1.5e-3),
        # The published package stops short, too, which moves the third digit of its ECE.
        ("svs", [1.453, 2.340, 0.3946, 0.1996, 95.01], 0.012),
        ("sms", [1.300, 1.726, 0.3874, 0.1935, 95.06], 0.012),
    ],
)
def test_the_papers_own_logits(shared_file, recipe, expected, tolerance):
    arrays = paper(shared_file)
    found = fitted(recipe, arrays["val_logits"], arrays["val_labels"])
    assert found.report.steps[0].converged
    with torch.no_grad():
        test = {"logits": found.wrap()(arrays["test_logits"]), "labels": arrays["test_labels"]}
    ours = [100 * metrics.ece(**test), 100 * metrics.adaptive_ece(**test, reference=True)]
    ours += [100 * metrics.classwise_ece(**test), metrics.nll(**test)]
    ours += [100 * metrics.accuracy(**test)]
    assert ours == pytest.approx(expected, abs=tolerance)
    assert ours[3] == pytest.approx(expected[3], abs=1e-4)
    default = recipe.partition("(")[0]
    if default != recipe:  # what cross-validation chooses does better on unseen rows
        held = fitted(default, arrays["val_logits"], arrays["val_labels"])
        assert nll64(held.wrap()(arrays["test_logits"]), arrays["test_labels"]) < expected[3]


def test_plain_matrix_scaling_is_scikit_learns_logistic_regression():
    linear_model = pytest.importorskip("sklearn.linear_model")
    logits, labels = drawn()
    model = linear_model.LogisticRegression(C=1e9, tol=1e-9, max_iter=5000)
    model.fit(logits.numpy(), labels.numpy())
    theirs = torch.tensor(model.predict_log_proba(logits.numpy()))
    close(log_probs(fitted(PLAIN_MATRIX, logits, labels), logits), theirs)


@pytest.mark.parametrize("ridge", [0.0, 30.0])
def test_vector_scaling_agrees_with_scipy(ridge):
    logits, labels = drawn(n=300)
    heat, k = temperature64(logits, labels), logits.shape[1]

    def objective(values):
        w, b = torch.tensor(values).split(k)
        pull = ridge * ((heat * w - 1).square().sum() + b.square().sum())
        return float(F.cross_entropy(logits * w + b, labels, reduction="sum") + pull)

    start = np.r_[np.full(k, 1 / heat), np.zeros(k)]
    theirs = optimize.minimize(objective, start, method="BFGS", options={"gtol": 1e-5})
    w, b = torch.tensor(theirs.x).split(k)
    found = VectorScaling(ridge=ridge).fit(Batch(logits, labels))
    close(log_probs(found, logits), (logits * w + b).log_softmax(1), 2e-4)
    assert objective(np.r_[found.weight.double(), found.offset.double()]) <= theirs.fun + 1e-5


@pytest.mark.parametrize("recipe", ["matrix", "dirichlet"])
def test_the_gradient_of_the_penalised_loss_vanishes(recipe):
    """The loss as documented, written out here, at the values that were fitted."""
    logits, labels = drawn(n=400)
    found = fitted(f"{recipe}(off_diagonal=0.01, bias=0.003, ridge=2)", logits, labels)
    inputs = logits if recipe == "matrix" else logits.log_softmax(1)
    heat = temperature64(inputs, labels)
    weight = found.weight.double().requires_grad_()
    bias = found.offset.double().requires_grad_()
    off = weight.square().sum() - weight.diagonal().square().sum()
    loss = F.cross_entropy(inputs @ weight.T + bias, labels) + 0.01 * off
    loss = loss + 0.003 * bias.square().sum()
    loss = loss + 2 / 400 * (heat * weight.diagonal() - 1).square().sum()
    slopes = torch.autograd.grad(loss, [weight, bias])
    assert max(float(slope.abs().max()) for slope in slopes) < 1e-6  # float32 values
    values = found.report.steps[0].values
    assert (values["off_diagonal"], values["bias"], values["ridge"]) == (0.01, 0.003, 2)


def smoothed(logits, heat, rows):
    """Temperature, then a share 1 / (n + 1) of the uniform distribution, in plain arithmetic."""
    probs = (logits.double() / heat).softmax(1)
    share = 1 / (rows + 1)
    return ((1 - share) * probs + share / probs.shape[1]).log()


@pytest.mark.parametrize("penalty", [0.1, 1.0])
@pytest.mark.parametrize("recipe", ["svs", "sms"])
def test_the_gradient_of_the_published_objective_vanishes(recipe, penalty):
    """NLL + penalty k/n (|v|^2 + |b|^2) + penalty k (k-1)/n |M|^2 on the smoothed logits."""
    logits, labels = drawn(n=500)
    n, k = logits.shape
    found = fitted(f"{recipe}(penalty={penalty})", logits, labels)
    assert float(found.temperature) == pytest.approx(temperature64(logits, labels), rel=1e-5)
    inputs = smoothed(logits, float(found.temperature), n)
    stored = found.weight.double()
    weight = (torch.diag(stored) if stored.ndim == 1 else stored).requires_grad_()
    bias = found.offset.double().requires_grad_()
    moved = weight - torch.eye(k)
    diagonal = moved.diagonal().square().sum()
    loss = F.cross_entropy(inputs @ weight.T + bias, labels)
    loss = loss + penalty * k / n * (diagonal + bias.square().sum())
    loss = loss + penalty * k * (k - 1) / n * (moved.square().sum() - diagonal)
    slope, bias_slope = torch.autograd.grad(loss, [weight, bias])
    slope = slope.diagonal() if recipe == "svs" else slope
    assert float(slope.abs().max()) < 1e-6
    assert float(bias_slope.abs().max()) < 1e-6


@pytest.mark.parametrize("recipe", DEFAULTS)
def test_brier_is_minimised_and_ece_has_no_gradient_to_follow(recipe):
    logits, labels = drawn(n=300)
    found = parse(recipe).fit(Batch(logits, labels), loss=brier)
    ours = metrics.brier(logits=found.wrap()(logits), labels=labels)
    if recipe not in ("svs", "sms"):  # whose penalty weighs more beside a Brier score
        by_nll = fitted(recipe, logits, labels).wrap()(logits)
        assert ours <= metrics.brier(logits=by_nll, labels=labels) + 1e-4
    assert found.report.loss_after == pytest.approx(ours, abs=1e-6)
    with pytest.raises(InputError, match=f"{recipe} is fitted by gradients, and ece has none"):
        parse(recipe).fit(Batch(logits, labels), loss=ece)


@pytest.mark.parametrize("recipe", ["dirichlet", "svs", "sms"])
def test_a_constant_added_to_a_row_changes_nothing(recipe):
    logits, labels = drawn()
    shift = torch.randn(len(labels), 1, generator=torch.Generator().manual_seed(0)).double() * 9
    one, two = fitted(recipe, logits, labels), fitted(recipe, logits + shift, labels)
    close(log_probs(one, logits), log_probs(two, logits + shift), 1e-5)


@pytest.mark.parametrize("recipe", ["vector", "matrix", "svs", "sms"])
@pytest.mark.parametrize("scale", [1e-3, 1e4])
def test_the_scale_of_the_logits_does_not_matter(recipe, scale, monkeypatch):
    """At one strength: which rows make a fold does depend on the logits' digits."""
    monkeypatch.setattr(affine_module, "choose_strength", lambda task, *_: (0.1, {}, task.centre))
    logits, labels = drawn()
    one, two = fitted(recipe, logits, labels), fitted(recipe, logits * scale, labels)
    close(log_probs(one, logits), log_probs(two, logits * scale), 1e-4)


@pytest.mark.parametrize("recipe", DEFAULTS)
def test_all_predictions_right(recipe, recwarn):
    logits, _ = drawn(n=120)
    found = fitted(recipe, logits, logits.argmax(1))
    assert (found.wrap()(logits).argmax(1) != logits.argmax(1)).sum() <= 1  # one is nearly a tie
    assert torch.isfinite(found.wrap()(torch.tensor([[1e4, 0.0, 0.0, -1e4]]))).all()
    assert not recwarn.list  # smoothing has taken care of it
    assert 0.4 < log_probs(found, logits).exp().amax(1).min() < 0.95


def test_many_classes_with_few_rows_each(monkeypatch):
    draw = np.random.default_rng(0)
    labels = torch.arange(800) % 400
    logits = torch.tensor(draw.normal(size=(800, 400)), dtype=torch.float32)
    logits[torch.arange(800), labels] += torch.tensor(draw.normal(3.5, 2, 800)).float()
    for recipe in ("vector", "svs", "sms"):
        rows = slice(0, 100) if recipe == "sms" else slice(0, 800)
        step = fitted(recipe, logits[rows], labels[rows]).report.steps[0]
        assert step.converged
        assert step.loss_after < step.loss_before
    for recipe in ("matrix", "dirichlet"):
        with pytest.raises(InputError, match=rf"{recipe}: 400 classes.*160,000 values.*use sms"):
            fitted(recipe, logits, labels)


def test_fits_cut_short_are_said(monkeypatch):
    monkeypatch.setattr(
        affine_module, "descend", lambda task, pull, _: descend(task, pull, iterations=2)
    )
    with pytest.warns(CalibrationWarning, match=r"vector had not settled after \d+ passes"):
        fitted("vector(ridge=1)", *drawn())


def task_of(batches, rows, centre):
    return Task(batches, rows, nll, centre, curvature(batches, centre, rows))


def summed(values, batch):
    return F.cross_entropy(mapped(values, batch.logits), batch.labels, reduction="sum")


@pytest.mark.parametrize("matrix", [False, True])
def test_the_curvature_is_that_of_autograd_and_loss_and_pull_balance(matrix, monkeypatch):
    batch = Batch(*drawn(n=200, k=3))
    centre = by_kind(3, matrix=matrix, diagonal=0.7, bias=0.1, off_diagonal=0.05)
    hessian = torch.autograd.functional.hessian(lambda v: summed(v, batch), centre)
    blocks = torch.stack([hessian[c, :, c] for c in range(3)])
    if not matrix:  # few values: one block of all classes
        blocks = hessian.reshape(1, 6, 6)
    halves = [batch.rows(slice(0, 80)), batch.rows(slice(80, 80)), batch.rows(slice(80, None))]
    task = task_of(halves, 200, centre)
    torch.testing.assert_close(task.bend, blocks)
    pull = by_kind(3, matrix=matrix, diagonal=0.5, bias=3.0, off_diagonal=7.0)
    found = descend(task, pull)
    values = found.at.clone().requires_grad_()
    loss = summed(values, batch) + (pull * (values - centre).square()).sum()
    assert float(torch.autograd.grad(loss, values)[0].abs().max()) < 1e-5
    assert found.converged
    far = by_kind(3, matrix=matrix, diagonal=-2.0, bias=1.0, off_diagonal=1.0)
    close(descend(task, pull, far).at, found.at, 1e-6)
    # Large matrices keep the diagonals alone, and very many classes their own blocks.
    monkeypatch.setattr(affine_module, "BLOCKS", 0 if matrix else 12)
    slim = task_of(halves, 200, centre)
    expected = torch.stack([hessian[c, :, c] for c in range(3)])
    if matrix:
        expected = expected.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(slim.bend, expected)
    close(descend(slim, pull).at, found.at, 1e-6)
    monkeypatch.undo()
    monkeypatch.setattr(affine_module, "PRODUCTS", 100 * 36)  # and many rows speak for all
    close(descend(task_of(halves, 200, centre), pull).at, found.at, 1e-6)


def test_logits_whose_sum_hardly_varies_converge_all_the_same():
    """As those of real networks do: without the metric this takes thousands of steps."""
    logits, labels = drawn(n=500, k=5)
    draw = torch.randn(500, 1, generator=torch.Generator().manual_seed(0)).double()
    nearly = Batch(logits - logits.mean(1, keepdim=True) + 1e-4 * draw, labels)
    task = task_of([nearly], 500, by_kind(5, matrix=True, diagonal=0.6))
    found = descend(task, by_kind(5, matrix=True, diagonal=0.0))
    assert found.converged
    assert found.steps < 150


def test_the_strength_is_the_best_of_those_tried():
    logits, labels = drawn(n=1000)
    heat = float(Temperature().fit(Batch(logits, labels)).temperature)
    for recipe, key, unit in (
        ("matrix", "off_diagonal", heat**2 * 12 / 1000),
        ("vector", "ridge", 4),
    ):
        step = fitted(recipe, logits, labels).report.steps[0]
        held_out = step.details["held_out"]
        assert 2 <= len(held_out) <= len(STRENGTHS)
        best = float(min(held_out, key=held_out.get))
        assert step.values[key] == pytest.approx(best * unit, rel=0.01)
        assert step.values["w_min"] < step.values["w_max"]


def test_strengths_that_cannot_or_need_not_be_chosen(monkeypatch):
    logits = torch.tensor([[2.0, 0.0, 0.0]]).repeat(6, 1)
    found = fitted("matrix", logits, torch.tensor([0, 0, 0, 1, 1, 2]))
    assert "for want of rows to choose by" in found.report.steps[0].message
    monkeypatch.setattr(affine_module, "choose_strength", lambda *_: pytest.fail("it was chosen"))
    step = fitted("matrix(off_diagonal=0.5)", *drawn()).report.steps[0]
    assert "as strongly as given" in step.message
    assert step.details["held_out"] == {}


def test_a_sample_of_many_rows_chooses_the_penalty(monkeypatch):
    """The fit itself sees all rows; only how firmly it is held is learned from some."""
    draw = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(3000, 4, generator=draw)
    probs = (logits * torch.tensor([0.6, 1, 1, 1.3])).softmax(1)
    labels = torch.multinomial(probs, 1, generator=draw)[:, 0]
    whole = parse("vector").fit(Batch(logits, labels)).report
    seen = []
    monkeypatch.setattr("featcal.methods.affine.ENOUGH", 1000)
    measure = affine_module.measure
    monkeypatch.setattr(
        "featcal.methods.affine.measure",
        lambda data, *losses: seen.append(sum(map(len, data))) or measure(data, *losses),
    )
    some = parse("vector").fit(Batch(logits, labels)).report
    assert 800 < sum(seen[:3]) < 1200  # three folds
    assert some.rows == whole.rows == 3000
    assert some.loss_after == pytest.approx(whole.loss_after, abs=2e-3)


def test_vector_scaling_needs_few_passes_at_a_strength(monkeypatch):
    """Classes pull at each other: with blocks of one class alone and long tails this takes 16."""
    draw = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(2000, 20, generator=draw)
    tilted = logits * torch.linspace(0.3, 1.0, 20) + torch.linspace(-1, 1, 20)
    labels = torch.multinomial(tilted.softmax(1), 1, generator=draw)[:, 0]
    steps = []

    def counted(*given, **how):
        found = descend(*given, **how)
        steps.append(found.steps)
        return found

    monkeypatch.setattr(affine_module, "descend", counted)
    fitted("vector", logits, labels)
    assert sum(steps) / len(steps) < 7
