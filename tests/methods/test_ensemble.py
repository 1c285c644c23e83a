"""Ensemble temperature scaling against EM, scipy's SLSQP, naive mixtures and the paper's logits."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from method_cases import paper
from scipy.optimize import minimize

from featcal import Batch, CalibrationWarning, Temperature, metrics
from featcal.core.fit import brier, ece
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


@pytest.mark.shared
@pytest.mark.parametrize(
    ("arguments", "temperature", "expected"),
    [
        ({}, 2.497520, (1.373, 2.141, 0.2038)),
        ({"criterion": "brier"}, 2.881458, (2.965, 2.804, 0.2085)),
        ({"reference": True}, 2.494108, (1.389, 2.140, 0.2038)),
    ],
)
def test_the_papers_own_logits_want_no_other_part(shared_file, arguments, temperature, expected):
    arrays = paper(shared_file)
    found = EnsembleTemperature(**arguments).fit(Batch(arrays["val_logits"], arrays["val_labels"]))
    reference = "reference" in arguments
    assert found.weights.tolist() == pytest.approx([1, 0, 0], abs=2e-4 if reference else 0)
    assert float(found.temperature) == pytest.approx(temperature, abs=1e-5)
    with torch.no_grad():
        test = {"logits": found.wrap()(arrays["test_logits"]), "labels": arrays["test_labels"]}
    figures = 100 * metrics.ece(**test), 100 * metrics.adaptive_ece(**test, reference=True)
    assert (*figures, metrics.nll(**test)) == pytest.approx(
        expected, abs=0.03 if reference else 6e-4
    )


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


def test_logits_no_better_than_guessing_are_said():
    logits, _ = drawn()
    with pytest.warns(CalibrationWarning, match="guessing"):
        found = EnsembleTemperature().fit(Batch(logits, logits.argmin(1)))
    out = found.wrap()(logits)
    assert torch.isfinite(out).all()
    assert torch.equal(out.argmax(1), logits.argmax(1))
    assert found.report.loss_after == pytest.approx(math.log(5), abs=1e-6)


@given(st.integers(0, 50), st.floats(0.3, 5), st.floats(0, 1), st.floats(0, 1))
@settings(max_examples=20, deadline=None)
def test_any_mixture_keeps_every_prediction(seed, temperature, first, second):
    draw = np.random.default_rng(seed)
    logits = torch.tensor(draw.normal(size=(200, 4)) * 20, dtype=torch.float32)
    logits[:50, 1] = torch.nextafter(logits[:50, 0], torch.tensor(99.0))
    weights = torch.tensor([first, second * (1 - first), (1 - second) * (1 - first)])
    calibrator = EnsembleTemperature().assign(temperature=temperature, weights=weights)
    assert torch.equal(calibrator.wrap()(logits).argmax(1), logits.argmax(1))
