"""Ensemble temperature scaling against EM, scipy's SLSQP, naive mixtures and the paper's logits."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from featcal import Batch, CalibrationWarning, InputError, Temperature, load, metrics, save
from featcal.core.gradient import likeliest_weights, simplex_minimum
from featcal.core.loss import brier, ece
from featcal.methods.ensemble import EnsembleTemperature


def drawn(n=600, k=5, *, heat=2.0, noise=0.1, seed=0, dtype=torch.float32):
    """Logits that need a temperature, with a share of labels that follow nothing at all."""
    draw = np.random.default_rng(seed)
    logits = draw.normal(size=(n, k)) * 3
    labels = (logits / heat + draw.gumbel(size=logits.shape)).argmax(1)
    lost = draw.random(n) < noise
    labels[lost] = draw.integers(0, k, lost.sum())
    return torch.tensor(logits, dtype=dtype), torch.tensor(labels)


def naive_mixture(logits, temperature, weights):
    z = logits.double()
    parts = [(z / temperature).softmax(1), z.softmax(1), torch.full_like(z, 1 / z.shape[1])]
    return sum(float(w) * p for w, p in zip(weights, parts, strict=True))


def anchor(path):
    with np.load(path) as file:
        return {key: torch.from_numpy(file[key]) for key in file.files}


def scores(calibrator, arrays):
    with torch.no_grad():
        logits = calibrator.wrap()(arrays["test_logits"])
    test = {"logits": logits, "labels": arrays["test_labels"]}
    return (
        round(100 * metrics.ece(**test), 3),
        round(100 * metrics.adaptive_ece(**test, reference=True), 3),
        round(metrics.nll(**test), 4),
    )


# --- anchors ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def paper(shared_file):
    return anchor(shared_file("anchors", "resnet50-cifar10-ce.npz"))


@pytest.mark.shared
@pytest.mark.parametrize(
    ("criterion", "temperature", "expected"),
    [("nll", 2.497520, (1.373, 2.141, 0.2038)), ("brier", 2.881458, (2.965, 2.804, 0.2085))],
)
def test_the_papers_own_logits_want_no_other_part(paper, criterion, temperature, expected):
    found = EnsembleTemperature(criterion=criterion)
    found.fit(Batch(paper["val_logits"], paper["val_labels"]))
    assert found.weights.tolist() == [1, 0, 0]
    assert float(found.temperature) == pytest.approx(temperature, abs=1e-5)
    assert scores(found, paper) == expected
    assert "the same as temperature scaling" in found.report.steps[0].message


@pytest.mark.shared
def test_the_reference_is_the_papers_temperature_scaling(paper):
    data = Batch(paper["val_logits"], paper["val_labels"])
    found = EnsembleTemperature(reference=True).fit(data)
    assert float(found.temperature) == pytest.approx(2.494108, abs=1e-5)
    assert found.weights.tolist() == pytest.approx([1, 0, 0], abs=2e-4)
    plain = Temperature(reference=True).fit(data)
    mine, theirs = (x.wrap()(paper["test_logits"]).softmax(1) for x in (found, plain))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=3e-4)


def test_the_reference_can_do_no_more_than_one_scale():
    logits, labels = drawn()
    found = EnsembleTemperature(reference=True).fit(Batch(logits, labels))
    w = found.weights.double()
    scale = float(w[0] / found.temperature.double() + w[1])
    torch.testing.assert_close(
        found.wrap()(logits).softmax(1), (logits * scale).softmax(1), rtol=1e-4, atol=1e-5
    )
    plain = Temperature().fit(Batch(logits, labels))
    assert found.report.loss_after >= plain.report.loss_after - 1e-7


# --- weights ----------------------------------------------------------------------------------


def naive_em(parts, steps=20_000):
    weights = torch.full((3,), 1 / 3, dtype=torch.float64)
    probs = parts.exp()
    for _ in range(steps):
        joint = weights * probs
        weights = (joint / joint.sum(1, keepdim=True)).mean(0)
    return weights, float(-(probs @ weights).log().mean())


@pytest.mark.parametrize(("heat", "noise"), [(2.0, 0.0), (2.0, 0.2), (1.0, 0.1), (4.0, 0.5)])
def test_weights_are_those_that_em_creeps_towards(heat, noise):
    logits, labels = drawn(n=300, heat=heat, noise=noise, dtype=torch.float64)
    parts = torch.stack(
        [
            -F.cross_entropy(logits / 2.5, labels, reduction="none"),
            -F.cross_entropy(logits, labels, reduction="none"),
            torch.full((300,), -math.log(5), dtype=torch.float64),
        ],
        1,
    )
    slow, limit = naive_em(parts)
    value, weights = likeliest_weights(parts, 300)
    assert value <= limit + 1e-12
    assert value == pytest.approx(limit, abs=1e-6)
    assert weights == pytest.approx(slow.numpy(), abs=2e-2)
    assert weights.sum() == pytest.approx(1, abs=1e-12)
    assert weights.min() >= 0


def test_weights_survive_parts_that_give_the_label_nothing():
    parts = torch.tensor([[-900.0, -2000.0, -1.6], [-0.1, 0.0, -1.6], [-0.1, 0.0, -1.6]])
    value, weights = likeliest_weights(parts.double(), 3)
    assert math.isfinite(value)
    assert weights[2] > 0.2  # the first row is the uniform part's or nobody's


def test_equal_parts_need_one_weight_alone():
    parts = torch.full((10, 3), -1.0, dtype=torch.float64)
    value, weights = likeliest_weights(parts, 10)
    assert value == pytest.approx(1.0)
    assert weights.sum() == pytest.approx(1)


@given(st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_the_simplex_minimum_agrees_with_slsqp(seed):
    draw = np.random.default_rng(seed)
    root = draw.normal(size=(draw.integers(1, 4), 3))
    bend, slope = root.T @ root, draw.normal(size=3)
    found = simplex_minimum(bend, slope)
    assert found.min() >= 0
    assert found.sum() == pytest.approx(1)

    def value(w):
        return w @ bend @ w / 2 + slope @ w

    for start in (np.full(3, 1 / 3), *np.eye(3)):
        other = minimize(
            value,
            start,
            jac=lambda w: bend @ w + slope,
            bounds=[(0, 1)] * 3,
            constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
            method="SLSQP",
        ).x.clip(0)
        assert value(found) <= value(other / other.sum()) + 1e-9


# --- fits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("criterion", ["nll", "brier"])
@pytest.mark.parametrize("noise", [0.0, 0.15])
def test_the_fit_is_the_best_mixture_scipy_finds(criterion, noise):
    logits, labels = drawn(n=800, noise=noise)
    found = EnsembleTemperature(criterion=criterion).fit(Batch(logits, labels))
    onehot = F.one_hot(labels, 5)

    def score(x):
        probs = naive_mixture(logits, math.exp(x[0]), x[1:])
        if criterion == "brier":
            return float((probs - onehot).square().sum(1).mean())
        true = probs.gather(1, labels[:, None]).clamp(min=1e-300)
        return float(-true.log().mean())

    constraint = {"type": "eq", "fun": lambda x: x[1:].sum() - 1}
    bounds = [(-2, 3)] + [(0, 1)] * 3
    starts = [(0.7, 0.6, 0.2, 0.2), (1.5, 0.4, 0.4, 0.2), (0.2, 0.9, 0.05, 0.05)]
    exact = min(
        minimize(score, s, bounds=bounds, constraints=constraint, method="SLSQP", tol=1e-13).fun
        for s in map(np.array, starts)
    )
    reached = score([math.log(float(found.temperature)), *found.weights.double().tolist()])
    assert reached <= exact + 1e-7


def test_outputs_are_the_log_of_the_mixture():
    logits, labels = drawn(n=800, noise=0.2)
    found = EnsembleTemperature().fit(Batch(logits, labels))
    assert found.weights[2] > 0.05
    expected = naive_mixture(logits, float(found.temperature), found.weights)
    torch.testing.assert_close(found.wrap()(logits).double(), expected.log(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.wrap()(logits).exp().sum(1), torch.ones(800))
    values = found.report.steps[0].values
    assert list(values) == ["temperature", "w0", "w1", "w2"]
    assert sum(values[key] for key in ("w0", "w1", "w2")) == pytest.approx(1)


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
def test_it_is_never_worse_than_temperature_scaling(noise):
    data = Batch(*drawn(noise=noise))
    one, both = Temperature().fit(data), EnsembleTemperature().fit(data)
    assert both.report.loss_after <= one.report.loss_after + 1e-7
    if noise:
        assert both.report.loss_after < one.report.loss_after - 1e-4


def test_one_row_of_nonsense_is_left_to_the_uniform_part():
    """Alone, temperature gives up all rows for the sake of one."""
    logits, labels = drawn(n=300, noise=0.0)
    logits = torch.cat([logits, torch.tensor([[1e7, 0.0, 0.0, 0.0, 0.0]])])
    labels = torch.cat([labels, torch.tensor([1])])
    found = EnsembleTemperature().fit(Batch(logits, labels))
    assert found.report.loss_after < 1.2
    assert 1 < float(found.temperature) < 4
    assert 0 < float(found.weights[2]) < 0.1


def test_another_loss_of_the_fit_is_reported_and_the_criterion_still_decides():
    logits, labels = drawn(n=900)
    by_nll = EnsembleTemperature().fit(Batch(logits, labels), loss=brier)
    plain = EnsembleTemperature().fit(Batch(logits, labels))
    assert torch.equal(by_nll.weights, plain.weights)
    probs = by_nll.wrap()(logits).softmax(1).double()
    exact = float((probs - F.one_hot(labels, 5)).square().sum(1).mean())
    assert by_nll.report.loss_after == pytest.approx(exact, abs=1e-6)
    by_ece = EnsembleTemperature().fit(Batch(logits, labels), loss=ece)
    assert torch.equal(by_ece.weights, plain.weights)


def test_a_criterion_that_is_not_lowered_leaves_the_identity():
    # Margin log(3), right three times in four: calibrated already.
    logits = torch.tensor([[math.log(3), 0.0]], dtype=torch.float64).repeat(400, 1)
    found = EnsembleTemperature(criterion="brier").fit(
        Batch(logits, torch.tensor([0, 0, 0, 1] * 100))
    )
    assert found.report.loss_after <= found.report.loss_before + 1e-9
    assert found.wrap()(logits).softmax(1)[0, 0] == pytest.approx(0.75, abs=1e-4)


# --- edge cases -------------------------------------------------------------------------------


def test_separable_data_stop_at_the_cap_with_a_warning():
    logits, _ = drawn()
    with pytest.warns(CalibrationWarning, match="stopped at the cap"):
        found = EnsembleTemperature().fit(Batch(logits, logits.argmax(1)))
    assert torch.isfinite(found.wrap()(logits)).all()
    assert not found.report.steps[0].converged


def test_logits_no_better_than_guessing_become_uniform_with_a_warning():
    logits, _ = drawn()
    with pytest.warns(CalibrationWarning, match="no better than guessing"):
        found = EnsembleTemperature().fit(Batch(logits, logits.argmin(1)))
    assert found.report.loss_after == pytest.approx(math.log(5), abs=1e-6)
    assert torch.equal(found.wrap()(logits).argmax(1), logits.argmax(1))


@pytest.mark.parametrize("shape", [(20, 3), (20, 2)])
def test_logits_without_a_difference_are_a_noop(shape):
    labels = torch.arange(shape[0]) % shape[1]
    found = EnsembleTemperature().fit(Batch(torch.full(shape, 7.0), labels))
    assert found.report.noop
    assert found.weights.numel() == 0


def test_a_refit_that_ends_in_a_noop_forgets_the_first():
    found = EnsembleTemperature().fit(Batch(*drawn()))
    assert found.weights.numel() == 3
    found.fit(Batch(torch.zeros(20, 5), torch.arange(20) % 5))
    assert found.weights.numel() == 0
    assert found.temperature == 1


@pytest.mark.parametrize("scale", [1e4, 1e-4])
def test_the_scale_of_the_logits_does_not_matter_to_the_scaled_part(scale):
    logits, labels = drawn(noise=0.0, dtype=torch.float64)
    one = EnsembleTemperature().fit(Batch(logits, labels))
    other = EnsembleTemperature().fit(Batch(logits * scale, labels))
    assert other.report.loss_after <= one.report.loss_after + 1e-3
    assert torch.isfinite(other.wrap()(logits * scale)).all()


@given(st.integers(0, 50), st.floats(0.3, 5), st.floats(0, 1), st.floats(0, 1))
@settings(max_examples=50, deadline=None)
def test_any_mixture_keeps_every_prediction(seed, temperature, first, second):
    draw = np.random.default_rng(seed)
    logits = torch.tensor(draw.normal(size=(200, 4)) * 20, dtype=torch.float32)
    logits[:50, 1] = torch.nextafter(logits[:50, 0], torch.tensor(99.0))
    weights = torch.tensor([first, second * (1 - first), (1 - second) * (1 - first)])
    calibrator = EnsembleTemperature().assign(temperature=temperature, weights=weights)
    assert torch.equal(calibrator.wrap()(logits).argmax(1), logits.argmax(1))


# --- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"criterion": "ece"}, "ensemble: criterion is 'ece': choose nll or brier"),
        ({"criterion": None}, "ensemble: criterion is None"),
        ({"reference": 1}, "ensemble: reference is 1: give True or False"),
        ({"reference": True, "criterion": "brier"}, "leave criterion out"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        EnsembleTemperature(**arguments)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": 0.0}, "T is 0.0"),
        ({"temperature": math.nan}, "T is nan"),
        ({"weights": torch.tensor([0.5, 0.5])}, "three shares of 1"),
        ({"weights": torch.tensor([1.5, -0.5, 0.0])}, "three shares of 1"),
        ({"weights": torch.tensor([0.5, math.nan, 0.5])}, "three shares of 1"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, values, message):
    found = EnsembleTemperature().fit(Batch(*drawn())).assign(**values)
    with pytest.raises(InputError, match=message):
        load(save(found, tmp_path / "c.safetensors"))


def test_a_reference_with_a_negative_scale_can_still_be_read_back(tmp_path):
    found = EnsembleTemperature(reference=True)
    found.assign(temperature=-3.0, weights=torch.tensor([0.2, 4.0, 1.0]))
    again = load(save(found, tmp_path / "c.safetensors"))
    assert not again.keeps_accuracy
    assert torch.equal(again.weights, found.weights)
