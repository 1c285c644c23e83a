"""Temperature scaling against closed forms, scipy, scikit-learn and the paper's own logits."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from method_cases import paper, score64, torchs_lbfgs
from scipy.optimize import minimize_scalar

from featcal import Batch, CalibrationWarning, Temperature, metrics
from featcal.core.fit import brier, ece


def score_at(name, logits, labels, temperature):
    return score64(name, np.asarray(logits, dtype=np.float64) / temperature, labels)


def scipy_temperature(logits, labels):
    found = minimize_scalar(
        lambda u: score_at("nll", logits, labels, math.exp(u)),
        bounds=(math.log(0.02), math.log(50)),
        method="bounded",
        options={"xatol": 1e-10},
    )
    return math.exp(found.x)


def drawn(n=500, k=4, *, heat=2.0, seed=0, dtype=torch.float32):
    """Logits that need the temperature `heat`, up to noise."""
    draw = np.random.default_rng(seed)
    logits = draw.normal(size=(n, k)) * 3
    labels = (logits / heat + draw.gumbel(size=logits.shape)).argmax(1)
    return torch.tensor(logits, dtype=dtype), torch.tensor(labels)


def temperature_of(logits, labels, **arguments):
    return float(Temperature(**arguments).fit(Batch(logits, labels)).temperature)


@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "arguments", "temperature", "expected"),
    [
        ("ce", {}, 2.497520, {"nll": 0.2038}),
        ("ce", {"reference": True}, 2.494108, {"ece": 0.01389, "nll": 0.2038}),
        ("ce", {"grid": True}, 2.5, {"ece": 0.01354, "nll": 0.2038}),
        ("ce", {"grid": True, "criterion": "ece"}, 2.5, {"classwise_ece": 0.004543}),
        ("ce", {"criterion": "brier"}, 2.881458, {"ece": 0.02965, "nll": 0.2085}),
        ("flsd53", {}, 1.062623, {}),
        ("flsd53", {"reference": True}, 1.061205, {"ece": 0.00984}),
    ],
)
def test_the_papers_own_logits(shared_file, name, arguments, temperature, expected):
    arrays = paper(shared_file, name)
    found = Temperature(**arguments).fit(Batch(arrays["val_logits"], arrays["val_labels"]))
    assert float(found.temperature) == pytest.approx(temperature, abs=1e-5)
    test = {"logits": found.wrap()(arrays["test_logits"]), "labels": arrays["test_labels"]}
    for metric, value in expected.items():
        assert getattr(metrics, metric)(**test) == pytest.approx(value, abs=5.1e-5)


def test_scipy_and_scikit_learn_agree(demo):
    calibration = pytest.importorskip("sklearn.calibration")
    with torch.no_grad():
        logits = demo.head(demo.batch.features)
    found, exact = (
        Temperature().fit(demo.batch, demo.head),
        scipy_temperature(logits, demo.batch.labels),
    )
    assert float(found.temperature) == pytest.approx(exact, rel=1e-5)
    for loss, t in ((found.report.loss_before, 1), (found.report.loss_after, exact)):
        assert loss == pytest.approx(score_at("nll", logits, demo.batch.labels, t), abs=1e-6)
    solver = getattr(calibration, "_TemperatureScaling", None)
    if solver is not None:
        theirs = solver().fit(logits.double().numpy(), demo.batch.labels.numpy())
        assert float(found.temperature) == pytest.approx(1 / float(theirs.beta_), rel=1e-4)


@given(st.floats(0.1, 30), st.floats(0.55, 0.98))
@settings(max_examples=20, deadline=None)
def test_two_classes_with_a_constant_margin_have_a_closed_form(margin, share):
    # All rows have the margin m, and a share q of them is right: sigmoid(m / T) = q.
    right = round(share * 2000)
    logits = torch.tensor([[margin, 0.0]], dtype=torch.float64).repeat(2000, 1)
    labels = torch.tensor([0] * right + [1] * (2000 - right))
    expected = margin / math.log(right / (2000 - right))
    assert temperature_of(logits, labels) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("heat", [0.3, 1.7, 6.0])
def test_random_logits_agree_with_scipy(heat, dtype):
    logits, labels = drawn(heat=heat, n=800, dtype=dtype)
    found = Temperature().fit(Batch(logits, labels))
    exact = scipy_temperature(logits.double(), labels)
    assert float(found.temperature) == pytest.approx(exact, rel=1e-5)
    word = "overconfident" if exact > 1 else "underconfident"
    assert word in found.report.steps[0].message


@given(st.floats(1e-6, 1e4), st.integers(0, 20), st.floats(-50, 50))
@settings(max_examples=20, deadline=None)
def test_scale_moves_the_temperature_and_a_shift_of_a_row_does_not(factor, seed, shift):
    logits, labels = drawn(n=200, seed=seed, dtype=torch.float64)
    one = temperature_of(logits, labels)
    assert temperature_of(logits * factor, labels) == pytest.approx(one * factor, rel=1e-5)
    moved = logits + shift * torch.randn(200, 1, dtype=torch.float64)
    assert temperature_of(moved, labels) == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize("rows", [1, 500])
def test_logits_no_better_than_guessing_stop_at_the_cap(rows):
    logits = drawn()[0][:rows]
    with pytest.warns(CalibrationWarning, match="no better than guessing") as caught:
        found = Temperature().fit(Batch(logits, logits.argmin(1)))
    assert caught[0].filename == __file__
    temperature, step = float(found.temperature), found.report.steps[0]
    assert 100 < temperature < math.inf
    assert not step.converged
    assert not step.noop
    assert torch.isfinite(found.wrap()(logits)).all()
    assert step.loss_after < step.loss_before
    json.dumps(found.report.as_json(), allow_nan=False)


@pytest.mark.parametrize("gap", [60.0, 20.0, 15.0, 7.0, 5.0, 1.0])
def test_rows_all_right_are_given_one_of_any_label_more(gap):
    labels = torch.arange(300) % 4
    found = Temperature().fit(Batch(torch.nn.functional.one_hot(labels, 4) * gap, labels))
    # Three in four of the one row in 301 are wrong, as for a constant margin.
    expected = gap / math.log((1 - 0.75 / 301) / (0.25 / 301))
    assert float(found.temperature) == pytest.approx(min(expected, 1.0), rel=1e-5)
    assert found.report.noop == (expected >= 1)


def test_nearly_sure_rows_with_one_mistake_have_a_minimum_before_the_cap():
    labels = torch.arange(400_000) % 4
    logits = torch.nn.functional.one_hot(labels, 4) * 30.0
    labels[0] = 1  # 1 in 400,000 wrong: T = 30 / log(3 * 399,999), as for a constant margin
    assert temperature_of(logits, labels) == pytest.approx(30 / math.log(3 * 399_999), rel=1e-4)


@pytest.mark.parametrize("grid", [False, True])
def test_logits_that_are_calibrated_stay_as_they_are(grid):
    # Margin log(3), right three times in four: T = 1 exactly.
    logits = torch.tensor([[math.log(3), 0.0]], dtype=torch.float64).repeat(400, 1)
    found = Temperature(grid=grid).fit(Batch(logits, torch.tensor([0, 0, 0, 1] * 100)))
    assert float(found.temperature) == pytest.approx(1, abs=1e-6)
    assert found.report.loss_after <= found.report.loss_before
    assert not grid or found.report.noop


@pytest.mark.parametrize("heat", [0.5, 2.5])
@pytest.mark.parametrize(("loss", "slack"), [(brier, 1e-7), (ece, 0.004)], ids=["brier", "ece"])
def test_other_losses_are_minimised(heat, loss, slack):
    """Of the rough curve of ECE a walk finds a good place."""
    logits, labels = drawn(n=1000, heat=heat)
    found = Temperature().fit(Batch(logits, labels), loss=loss)
    after = score_at(loss.name, logits, labels, float(found.temperature))
    lowest = min(score_at(loss.name, logits, labels, t) for t in np.geomspace(0.05, 20, 1000))
    assert after <= lowest + slack
    assert found.report.loss_after == pytest.approx(after, abs=1e-4)
    by_criterion = Temperature(criterion=loss.name).fit(Batch(logits, labels))
    assert torch.equal(by_criterion.temperature, found.temperature)
    by_nll = score_at("nll", logits, labels, float(found.temperature))
    assert by_criterion.report.loss_after == pytest.approx(by_nll, abs=1e-6)


@pytest.mark.parametrize("criterion", ["nll", "brier", "ece", None])
def test_the_grid_is_the_best_of_a_hundred_by_a_naive_loop(criterion):
    logits, labels = drawn(heat=1.7, dtype=torch.float64)
    found = Temperature(criterion=criterion, grid=True).fit(Batch(logits, labels))
    grid = [round(0.1 * step, 1) for step in range(1, 101)]
    best = min(grid, key=lambda t: (score_at(criterion or "nll", logits, labels, t), t))
    assert float(found.temperature) == pytest.approx(best, abs=1e-6)
    assert found.report.steps[0].details["criterion"] == (criterion or "nll")


def test_the_reference_is_torchs_own_lbfgs_of_those_settings():
    logits, labels = drawn(n=400)
    expected = torchs_lbfgs(lambda t: logits / t, torch.ones(1), labels)
    found = Temperature(reference=True).fit(Batch(logits, labels))
    assert float(found.temperature) == pytest.approx(expected.item(), abs=1e-6)
    assert float(found.temperature) == pytest.approx(scipy_temperature(logits, labels), rel=0.01)
    assert found.report.steps[0].warning == ""
