"""Temperature scaling against closed forms, scipy, scikit-learn and the paper's own logits."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from featcal import Batch, CalibrationWarning, InputError, Temperature, metrics
from featcal.core.loss import brier, ece


def nll64(logits, labels, temperature):
    """The mean NLL by a plain float64 formula, independent of the code under test."""
    z = np.asarray(logits, dtype=np.float64) / temperature
    z = z - z.max(1, keepdims=True)
    return float(np.mean(np.log(np.exp(z).sum(1)) - z[np.arange(len(z)), np.asarray(labels)]))


def scipy_temperature(logits, labels):
    found = minimize_scalar(
        lambda u: nll64(logits, labels, math.exp(u)),
        bounds=(math.log(0.02), math.log(50)),
        method="bounded",
        options={"xatol": 1e-10},
    )
    return math.exp(found.x)


def drawn(n=500, k=4, *, scale=3.0, heat=2.0, seed=0, dtype=torch.float32):
    """Logits that need the temperature `heat`, up to noise."""
    draw = np.random.default_rng(seed)
    logits = draw.normal(size=(n, k)) * scale
    labels = (logits / heat + draw.gumbel(size=logits.shape)).argmax(1)
    return torch.tensor(logits, dtype=dtype), torch.tensor(labels)


# --- anchors ----------------------------------------------------------------------------------


@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "expected", "nll_test"),
    [("resnet50-cifar10-ce", 2.497520, 0.2038), ("resnet50-cifar10-flsd53", 1.062623, None)],
)
def test_the_papers_own_logits(shared_file, name, expected, nll_test):
    with np.load(shared_file("anchors", f"{name}.npz")) as file:
        arrays = {key: torch.from_numpy(file[key]) for key in file.files}
    data = Batch(arrays["val_logits"], arrays["val_labels"])
    found = Temperature().fit(data)
    assert float(found.temperature) == pytest.approx(expected, abs=1e-5)
    assert found.report.steps[0].converged
    if nll_test is not None:
        test = nll64(arrays["test_logits"], arrays["test_labels"], float(found.temperature))
        assert test == pytest.approx(nll_test, abs=5e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_demo_pack_agrees_with_scipy(demo, dtype):
    with torch.no_grad():
        logits = demo.head(demo.batch.features)
    found = Temperature().fit(Batch(logits.to(dtype), demo.batch.labels))
    exact = scipy_temperature(logits, demo.batch.labels)
    assert float(found.temperature) == pytest.approx(exact, rel=1e-5)
    assert found.report.loss_before == pytest.approx(nll64(logits, demo.batch.labels, 1), abs=1e-6)
    assert found.report.loss_after == pytest.approx(
        nll64(logits, demo.batch.labels, exact), abs=1e-6
    )


def test_scikit_learn_agrees(demo):
    calibration = pytest.importorskip("sklearn.calibration")
    solver = getattr(calibration, "_TemperatureScaling", None)
    if solver is None:
        pytest.skip("this scikit-learn has no temperature scaling")
    with torch.no_grad():
        logits = demo.head(demo.batch.features).double()
    theirs = solver().fit(logits.numpy(), demo.batch.labels.numpy())
    ours = Temperature().fit(Batch(logits, demo.batch.labels))
    assert float(ours.temperature) == pytest.approx(1 / float(theirs.beta_), rel=1e-4)


@given(st.floats(0.1, 30), st.floats(0.55, 0.98))
@settings(max_examples=40, deadline=None)
def test_two_classes_with_a_constant_margin_have_a_closed_form(margin, share):
    # All rows have the margin m, and a share q of them is right: sigmoid(m / T) = q.
    right = round(share * 200)
    logits = torch.tensor([[margin, 0.0]], dtype=torch.float64).repeat(200, 1)
    labels = torch.tensor([0] * right + [1] * (200 - right))
    expected = margin / math.log(right / (200 - right))
    found = Temperature().fit(Batch(logits, labels))
    assert float(found.temperature) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("heat", [0.3, 0.8, 1.7, 6.0])
def test_random_logits_agree_with_scipy(heat):
    logits, labels = drawn(heat=heat, n=800)
    found = Temperature().fit(Batch(logits, labels))
    assert float(found.temperature) == pytest.approx(scipy_temperature(logits, labels), rel=1e-5)
    word = "overconfident" if float(found.temperature) > 1 else "underconfident"
    assert word in found.report.steps[0].message


# --- ill-posed data ---------------------------------------------------------------------------


def test_separable_data_stops_at_the_cap_with_a_warning():
    logits, _ = drawn()
    with pytest.warns(CalibrationWarning, match="separate the labels completely"):
        found = Temperature().fit(Batch(logits, logits.argmax(1)))
    temperature = float(found.temperature)
    assert 0 < temperature < 0.1
    step = found.report.steps[0]
    assert not step.converged
    assert not step.noop
    assert torch.isfinite(found.wrap()(logits)).all()
    assert found.report.loss_after < found.report.loss_before
    json.dumps(found.report.as_json(), allow_nan=False)


@pytest.mark.parametrize("gap", [20.0, 30.0, 60.0])
def test_rows_so_sure_that_nothing_is_left_to_gain_keep_their_temperature(gap):
    labels = torch.arange(300) % 4
    found = Temperature().fit(Batch(torch.nn.functional.one_hot(labels, 4) * gap, labels))
    assert found.report.noop
    assert found.report.loss_before == 0
    assert "already the best" in found.report.steps[0].message


@pytest.mark.parametrize("gap", [5.0, 10.0, 15.0])
def test_rows_right_and_sure_stop_at_the_cap(gap):
    labels = torch.arange(300) % 4
    logits = torch.nn.functional.one_hot(labels, 4) * gap
    with pytest.warns(CalibrationWarning, match="separate the labels completely"):
        found = Temperature().fit(Batch(logits, labels))
    assert not found.report.steps[0].converged


def test_nearly_sure_rows_with_one_mistake_have_a_minimum_before_the_cap():
    labels = torch.arange(400_000) % 4
    logits = torch.nn.functional.one_hot(labels, 4) * 30.0
    labels[0] = 1  # 1 in 400,000 wrong: T = 30 / log(3 * 399,999), as for a constant margin
    found = Temperature().fit(Batch(logits, labels))
    assert float(found.temperature) == pytest.approx(30 / math.log(3 * 399_999), rel=1e-4)
    assert found.report.steps[0].converged


def test_logits_worse_than_uniform_stop_at_the_top():
    logits, _ = drawn()
    with pytest.warns(CalibrationWarning, match="no better than guessing"):
        found = Temperature().fit(Batch(logits, logits.argmin(1)))
    assert float(found.temperature) > 100
    assert math.isfinite(float(found.temperature))
    assert not found.report.steps[0].converged
    assert found.report.loss_after == pytest.approx(math.log(4), abs=0.02)


def test_the_warning_points_at_the_caller():
    logits, _ = drawn()
    with pytest.warns(CalibrationWarning) as caught:
        Temperature().fit(Batch(logits, logits.argmax(1)))
    assert caught[0].filename == __file__


@pytest.mark.parametrize("value", [0.0, 7.0, -1e4])
def test_constant_logits_are_a_noop(value):
    found = Temperature().fit(Batch(torch.full((20, 3), value), torch.arange(20) % 3))
    assert found.temperature == 1
    assert found.report.noop
    assert found.report.steps[0].values == {"temperature": 1.0}
    assert found.report.loss_after == found.report.loss_before


def test_a_noop_after_a_fit_puts_the_identity_back():
    logits, labels = drawn()
    calibrator = Temperature().fit(Batch(logits, labels))
    assert calibrator.temperature != 1
    calibrator.fit(Batch(torch.zeros(20, 3), torch.arange(20) % 3))
    assert calibrator.report.noop
    assert calibrator.temperature == 1


def test_logits_that_are_calibrated_stay_as_they_are():
    # Margin log(3), right three times in four: T = 1 exactly.
    logits = torch.tensor([[math.log(3), 0.0]], dtype=torch.float64).repeat(400, 1)
    found = Temperature().fit(Batch(logits, torch.tensor([0, 0, 0, 1] * 100)))
    assert float(found.temperature) == pytest.approx(1, abs=1e-6)
    assert found.report.loss_after <= found.report.loss_before


def test_one_logit_that_says_nothing_is_a_noop():
    found = Temperature().fit(Batch(torch.zeros(9, 1), torch.arange(9) % 2))
    assert found.report.noop
    assert found.temperature == 1


@pytest.mark.parametrize(("label", "message"), [(0, "separate"), (1, "guessing")])
def test_one_row_is_either_separable_or_hopeless(label, message):
    with pytest.warns(CalibrationWarning, match=message):
        found = Temperature().fit(Batch(torch.tensor([[2.0, 1.0]]), torch.tensor([label])))
    assert 0 < float(found.temperature) < math.inf


def test_classes_without_rows_do_no_harm():
    logits, labels = drawn(k=6)
    labels = labels % 2
    with np.errstate(all="raise"):
        exact = scipy_temperature(logits[:, :2].repeat(1, 3) + torch.eye(6)[0], labels)
    found = Temperature().fit(Batch(logits[:, :2].repeat(1, 3) + torch.eye(6)[0], labels))
    assert float(found.temperature) == pytest.approx(exact, rel=1e-4)


@pytest.mark.parametrize("scale", [1e4, 1e-3, 1e-6])
def test_the_scale_of_the_logits_does_not_matter(scale):
    logits, labels = drawn(dtype=torch.float64)
    expected = scipy_temperature(logits, labels) * scale
    found = Temperature().fit(Batch(logits * scale, labels))
    assert float(found.temperature) == pytest.approx(expected, rel=1e-5)
    narrow = Temperature().fit(Batch((logits * scale).float(), labels))
    assert float(narrow.temperature) == pytest.approx(expected, rel=1e-5)


def test_one_outlier_row_does_not_pull_the_caps_over_the_answer():
    logits, labels = drawn(heat=0.5, dtype=torch.float64)
    logits = torch.cat([logits, torch.tensor([[1e7, 0, 0, 0]], dtype=torch.float64)])
    labels = torch.cat([labels, torch.tensor([0])])
    found = Temperature().fit(Batch(logits, labels))
    assert float(found.temperature) == pytest.approx(scipy_temperature(logits, labels), rel=1e-4)


def test_a_huge_wrong_row_costs_what_it_costs():
    logits, labels = drawn(dtype=torch.float64)
    logits[0] = torch.tensor([1e3, 0, 0, 0])
    labels[0] = 1
    found = Temperature().fit(Batch(logits, labels))
    assert float(found.temperature) == pytest.approx(scipy_temperature(logits, labels), rel=1e-4)


@given(st.floats(1e-3, 1e3), st.integers(0, 20))
@settings(max_examples=40, deadline=None)
def test_scale_equivariance(factor, seed):
    logits, labels = drawn(n=200, seed=seed, dtype=torch.float64)
    one = float(Temperature().fit(Batch(logits, labels)).temperature)
    other = float(Temperature().fit(Batch(logits * factor, labels)).temperature)
    assert other == pytest.approx(one * factor, rel=1e-5)


@given(st.integers(0, 30), st.floats(-50, 50))
@settings(max_examples=20, deadline=None)
def test_a_shift_of_all_logits_of_a_row_changes_nothing(seed, shift):
    logits, labels = drawn(n=200, seed=seed, dtype=torch.float64)
    one = float(Temperature().fit(Batch(logits, labels)).temperature)
    moved = logits + shift * torch.randn(200, 1, dtype=torch.float64)
    other = float(Temperature().fit(Batch(moved, labels)).temperature)
    assert other == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_logits_are_read_as_the_numbers_they_are(dtype):
    logits, labels = drawn(n=800)
    narrow = logits.to(dtype)
    found = Temperature().fit(Batch(narrow, labels))
    assert float(found.temperature) == pytest.approx(
        scipy_temperature(narrow.double(), labels), rel=1e-5
    )


# --- other losses -----------------------------------------------------------------------------


def brier64(logits, labels, temperature):
    z = np.asarray(logits, dtype=np.float64) / temperature
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    return float(((p - np.eye(p.shape[1])[np.asarray(labels)]) ** 2).sum(1).mean())


def ece64(logits, labels, temperature):
    z = np.asarray(logits, dtype=np.float64) / temperature
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    confidence, right = p.max(1), p.argmax(1) == np.asarray(labels)
    index = np.clip(np.ceil(confidence * 15) - 1, 0, 14).astype(int)
    gaps = np.bincount(index, confidence - right, minlength=15)
    return float(np.abs(gaps).sum()) / len(p)


@pytest.mark.parametrize("heat", [0.5, 2.5])
def test_brier_is_minimised(heat):
    logits, labels = drawn(n=1500, heat=heat)
    found = Temperature().fit(Batch(logits, labels), loss=brier)
    grid = np.exp(np.linspace(math.log(0.05), math.log(20), 3000))
    lowest = min(brier64(logits, labels, t) for t in grid)
    assert brier64(logits, labels, float(found.temperature)) <= lowest + 1e-7
    assert found.report.loss_after == pytest.approx(lowest, abs=1e-6)


@pytest.mark.parametrize("heat", [0.5, 2.5])
def test_ece_comes_down_and_says_nothing_of_caps(heat):
    logits, labels = drawn(n=1500, heat=heat)
    found = Temperature().fit(Batch(logits, labels), loss=ece)
    temperature = float(found.temperature)
    after = ece64(logits, labels, temperature)
    grid = np.exp(np.linspace(math.log(0.05), math.log(20), 3000))
    lowest = min(ece64(logits, labels, t) for t in grid)
    assert found.report.loss_after == pytest.approx(after, abs=1e-4)
    assert after <= lowest + 0.004  # a rough curve of which a walk finds a good place
    assert "cap" not in found.report.steps[0].message


def test_the_top_class_stays_on_top_even_among_neighbours():
    """Two logits one step of float32 apart may become a tie, never the other way round."""
    low = torch.rand(20_000, generator=torch.Generator().manual_seed(0)) + 1
    high = torch.nextafter(low, torch.tensor(9.0))
    logits = torch.stack([low, high], 1)
    for temperature in (0.7, 1.412, 2.4975, 3.3):
        scaled = Temperature().assign(temperature=temperature).wrap()(logits)
        assert (scaled[:, 1] >= scaled[:, 0]).all(), temperature


# --- other criteria, the grid, and the search behind the paper's tables -----------------------


@pytest.fixture(scope="module")
def paper(shared_file):
    with np.load(shared_file("anchors", "resnet50-cifar10-ce.npz")) as file:
        return {key: torch.from_numpy(file[key]) for key in file.files}


@pytest.mark.shared
@pytest.mark.parametrize(
    ("arguments", "temperature", "accuracy_of_it", "expected"),
    [
        ({"reference": True}, 2.494108, 1e-5, (1.389, 2.140, 0.4546, 0.2038)),
        ({"grid": True}, 2.5, 1e-6, (1.354, 2.143, 0.4543, 0.2038)),
        ({"grid": True, "criterion": "ece"}, 2.5, 1e-6, (1.354, 2.143, 0.4543, 0.2038)),
        ({"criterion": "brier"}, 2.881458, 1e-5, (2.965, 2.804, 0.6603, 0.2085)),
    ],
)
def test_the_searches_of_the_literature_on_the_papers_logits(
    paper, arguments, temperature, accuracy_of_it, expected
):
    found = Temperature(**arguments).fit(Batch(paper["val_logits"], paper["val_labels"]))
    assert float(found.temperature) == pytest.approx(temperature, abs=accuracy_of_it)
    test = {"logits": found.wrap()(paper["test_logits"]), "labels": paper["test_labels"]}
    figures = (
        100 * metrics.ece(**test),
        100 * metrics.adaptive_ece(**test, reference=True),
        100 * metrics.classwise_ece(**test),
        metrics.nll(**test),
    )
    assert figures == pytest.approx(expected, abs=5.1e-4)
    assert metrics.accuracy(**test) == pytest.approx(0.9505)


@pytest.mark.shared
def test_the_reference_on_focal_logits(shared_file):
    with np.load(shared_file("anchors", "resnet50-cifar10-flsd53.npz")) as file:
        data = Batch(torch.from_numpy(file["val_logits"]), torch.from_numpy(file["val_labels"]))
        test = {"logits": torch.from_numpy(file["test_logits"]), "labels": file["test_labels"]}
    found = Temperature(reference=True).fit(data)
    assert float(found.temperature) == pytest.approx(1.061205, abs=1e-5)
    scaled = found.wrap()(test["logits"])
    assert round(100 * metrics.ece(logits=scaled, labels=test["labels"]), 3) == 0.984


@pytest.mark.parametrize("criterion", ["nll", "brier", "ece", None])
def test_the_grid_is_the_best_of_a_hundred_by_a_naive_loop(criterion):
    logits, labels = drawn(n=700, heat=1.7, dtype=torch.float64)
    found = Temperature(criterion=criterion, grid=True).fit(Batch(logits, labels))
    rule = {"nll": nll64, "brier": brier64, "ece": ece64, None: nll64}[criterion]
    grid = [round(0.1 * step, 1) for step in range(1, 101)]
    best = min(grid, key=lambda t: (rule(logits, labels, t), t))
    assert float(found.temperature) == pytest.approx(best, abs=1e-6)
    assert found.report.steps[0].details["criterion"] == (criterion or "nll")


def test_the_criterion_decides_and_the_loss_of_the_fit_is_reported():
    logits, labels = drawn(n=1500, heat=2.5)
    found = Temperature(criterion="brier").fit(Batch(logits, labels))
    by_loss = Temperature().fit(Batch(logits, labels), loss=brier)
    assert torch.equal(found.temperature, by_loss.temperature)
    temperature = float(found.temperature)
    assert found.report.loss_after == pytest.approx(nll64(logits, labels, temperature), abs=1e-6)
    assert found.report.loss_before == pytest.approx(nll64(logits, labels, 1), abs=1e-6)


def test_the_grid_of_a_network_that_is_calibrated_is_a_noop():
    logits = torch.tensor([[math.log(3), 0.0]], dtype=torch.float64).repeat(400, 1)
    labels = torch.tensor([0, 0, 0, 1] * 100)
    found = Temperature(grid=True).fit(Batch(logits, labels))
    assert found.report.noop
    assert found.temperature == 1


def test_the_reference_is_torchs_own_lbfgs_of_those_settings():
    logits, labels = drawn(n=400)
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.LBFGS([parameter], lr=0.02, max_iter=1000)

    def closure():
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(logits / parameter, labels)
        loss.backward()
        return loss

    optimizer.step(closure)
    found = Temperature(reference=True).fit(Batch(logits, labels))
    assert float(found.temperature) == pytest.approx(parameter.item(), abs=1e-6)
    assert float(found.temperature) == pytest.approx(scipy_temperature(logits, labels), rel=0.01)
    assert found.report.steps[0].warning == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"criterion": "mse"}, "temperature: criterion is 'mse': choose nll, brier or ece"),
        ({"criterion": 3}, "temperature: criterion is 3"),
        ({"grid": 1}, "temperature: grid is 1: give True or False"),
        ({"reference": None}, "temperature: reference is None: give True or False"),
        ({"reference": True, "grid": True}, "leave the others out"),
        ({"reference": True, "criterion": "nll"}, "leave the others out"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        Temperature(**arguments)
