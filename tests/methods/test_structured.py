"""Structured scaling against the published objective written out, its limits and known anchors."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from method_cases import log_probs

from featcal import Batch, InputError, metrics, parse
from featcal.methods import StructuredMatrixScaling, StructuredVectorScaling, Temperature

RECIPES = ["svs", "sms"]


def drawn(n=500, k=4, *, seed=0, dtype=torch.float64):
    draw = np.random.default_rng(seed)
    logits = draw.normal(size=(n, k)) * 2.5
    weight = np.diag(draw.uniform(0.3, 0.9, k)) + draw.normal(size=(k, k)) * 0.12
    true = logits @ weight.T + draw.normal(size=k) * 0.5
    labels = (true + draw.gumbel(size=true.shape)).argmax(1)
    return torch.tensor(logits, dtype=dtype), torch.tensor(labels)


def smoothed(logits, heat, rows):
    """Temperature, then a share 1 / (n + 1) of the uniform distribution, in plain arithmetic."""
    exponentials = np.exp(np.asarray(logits, dtype=np.float64) / heat)
    probs = exponentials / exponentials.sum(1, keepdims=True)
    share = 1 / (rows + 1)
    return torch.tensor(np.log((1 - share) * probs + share / probs.shape[1]))


def close(left, right, tolerance=1e-4):
    torch.testing.assert_close(left, right, rtol=0, atol=tolerance)


@pytest.mark.shared
@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("svs", [1.453, 2.340, 0.3946, 0.1996, 95.01]),
        ("sms", [1.300, 1.726, 0.3874, 0.1935, 95.06]),
    ],
)
def test_the_papers_own_logits(shared_file, recipe, expected):
    """The published package stops short of the minimum, which moves the third digit of its ECE."""
    with np.load(shared_file("anchors", "resnet50-cifar10-ce.npz")) as file:
        arrays = {key: torch.from_numpy(file[key]) for key in file.files}
    found = parse(recipe).fit(Batch(arrays["val_logits"], arrays["val_labels"]))
    with torch.no_grad():
        given = {"logits": found.wrap()(arrays["test_logits"]), "labels": arrays["test_labels"]}
    ours = [100 * metrics.ece(**given), 100 * metrics.adaptive_ece(**given, reference=True)]
    ours += [100 * metrics.classwise_ece(**given), metrics.nll(**given)]
    assert ours[0] == pytest.approx(expected[0], abs=0.012)
    assert ours[1:3] == pytest.approx(expected[1:3], abs=2e-3)
    assert ours[3] == pytest.approx(expected[3], abs=5e-5)
    assert 100 * metrics.accuracy(**given) == pytest.approx(expected[4], abs=1e-3)


@pytest.mark.parametrize("penalty", [0.1, 1.0])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_gradient_of_the_published_objective_vanishes(recipe, penalty):
    """NLL + penalty k/n (|v|^2 + |b|^2) + penalty k (k-1)/n |M|^2 on the smoothed logits."""
    logits, labels = drawn()
    n, k = logits.shape
    found = parse(f"{recipe}(penalty={penalty})").fit(Batch(logits, labels))
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
    if recipe == "svs":
        slope = slope.diagonal()
    assert float(slope.abs().max()) < 1e-6
    assert float(bias_slope.abs().max()) < 1e-6
    assert stored.shape == ((k,) if recipe == "svs" else (k, k))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_huge_penalty_leaves_smoothed_temperature_scaling(recipe):
    logits, labels = drawn()
    found = parse(f"{recipe}(penalty=1e9)").fit(Batch(logits, labels))
    heat = float(Temperature().fit(Batch(logits, labels)).temperature)
    close(log_probs(found, logits), smoothed(logits, heat, len(labels)), 1e-5)


@pytest.mark.parametrize("recipe", RECIPES)
def test_all_predictions_right_stays_short_of_certainty(recipe):
    logits, _ = drawn(n=99)
    found = parse(recipe).fit(Batch(logits, logits.argmax(1)))
    assert not found.report.warnings  # smoothing has taken care of it
    assert 0.95 < log_probs(found, logits).exp().amax(1).min() < 1
    assert torch.isfinite(found.wrap()(torch.tensor([[1e4, 0.0, 0.0, -1e4]]))).all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_constant_added_to_a_row_changes_nothing(recipe):
    logits, labels = drawn()
    shift = torch.randn(len(labels), 1, generator=torch.Generator().manual_seed(0)).double() * 9
    one = parse(recipe).fit(Batch(logits, labels))
    two = parse(recipe).fit(Batch(logits + shift, labels))
    close(log_probs(one, logits), log_probs(two, logits + shift), 1e-5)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("scale", [1e-3, 1e4])
def test_the_scale_of_the_logits_does_not_matter(recipe, scale):
    logits, labels = drawn()
    one = parse(recipe).fit(Batch(logits, labels))
    two = parse(recipe).fit(Batch(logits * scale, labels))
    close(log_probs(one, logits), log_probs(two, logits * scale), 1e-5)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_order_of_rows_and_their_batches_do_not_matter(recipe):
    logits, labels = drawn(n=1500, k=8, dtype=torch.float32)
    batch = Batch(logits, labels)
    mixed = batch.rows(torch.randperm(len(batch), generator=torch.Generator().manual_seed(1)))
    one = parse(recipe).fit(batch)
    two = parse(recipe).fit([mixed.rows(slice(0, 9)), mixed.rows(slice(9, None))])
    close(log_probs(one, logits), log_probs(two, logits), 1e-5)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_thousand_classes_with_two_rows_each(recipe):
    draw = np.random.default_rng(0)
    labels = torch.arange(2000) % 1000
    logits = torch.tensor(draw.normal(size=(2000, 1000)), dtype=torch.float32)
    logits[torch.arange(2000), labels] += torch.tensor(draw.normal(3.5, 2, 2000)).float()
    rows = slice(0, 2000) if recipe == "svs" else slice(0, 250)  # a second, not ten
    found = parse(recipe).fit(Batch(logits[rows], labels[rows]))
    step = found.report.steps[0]
    assert step.converged
    assert step.loss_after < step.loss_before
    assert torch.isfinite(log_probs(found, logits)).all()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("logits", "labels"),
    [
        (torch.tensor([[3.0, 1.0, 0.0], [0.0, 2.0, 1.0]] * 20), torch.tensor([1, 0] * 20)),
        (torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0])),
        (torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([2])),
        (torch.full((20, 3), 7.0), torch.tensor([0, 1, 1, 1] * 5)),
        (torch.tensor([[1e4, 0.0], [0.0, 1e4], [1e4, 0.0]] * 9), torch.tensor([0, 1, 1] * 9)),
        (torch.randn(9, 1), torch.zeros(9, dtype=torch.int64)),
    ],
    ids=["all wrong", "one row", "one wrong row", "constant", "huge", "one class"],
)
def test_hard_data_gives_finite_logits_no_worse_than_before(recipe, logits, labels):
    found = parse(recipe).fit(Batch(logits, labels))
    out = found.wrap()(logits)
    assert torch.isfinite(out).all()
    after, before = (float(F.cross_entropy(z.double(), labels)) for z in (out, logits))
    assert after <= before + 1e-6
    assert found.report.noop == torch.equal(out, logits)


def test_classes_without_rows_stay_near_their_temperature_scaling():
    logits, labels = drawn(n=500, k=6)
    found = StructuredMatrixScaling().fit(Batch(logits, labels % 3))
    out = log_probs(found, logits)
    assert torch.isfinite(out).all()
    assert out.min() > -20


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, True, None, "1"])
def test_the_penalty_is_a_number_from_0(value):
    with pytest.raises(InputError, match=r"svs: penalty is .*: give a finite number, 0 or above"):
        StructuredVectorScaling(penalty=value)


def test_values_no_fit_can_give_are_refused():
    StructuredVectorScaling().check()
    with pytest.raises(InputError, match=r"svs: T is 0.0 and the floor -inf: T must be finite"):
        StructuredVectorScaling().assign(temperature=0.0).check()
    with pytest.raises(InputError, match="the floor a log-probability"):
        StructuredVectorScaling().assign(floor=1.0).check()
    with pytest.raises(InputError, match="sms: weight"):
        StructuredMatrixScaling().assign(weight=torch.ones(2, 3)).check()


def test_the_report_shows_the_temperature():
    logits, labels = drawn()
    step = StructuredVectorScaling().fit(Batch(logits, labels)).report.steps[0]
    heat = float(Temperature().fit(Batch(logits, labels)).temperature)
    assert step.values["temperature"] == pytest.approx(heat, rel=1e-5)
    assert f"T = {heat:.4g}" in step.message
