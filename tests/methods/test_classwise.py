"""Class temperatures against scipy, honest cross-validation, a naive greedy search, the paper."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from featcal import Batch, CalibrationWarning, InputError, Temperature, load, metrics, save
from featcal.core.loss import ece
from featcal.core.sample import fold_of
from featcal.core.scalar import Shrinkage, temper, temper_cells
from featcal.methods.classwise import (
    FOLDS,
    SPREADS,
    ClasswiseTemperature,
    best_spread,
    predicted_class,
)

HEATS = (1.2, 2.0, 3.2, 2.0)


def drawn(n=2000, *, heats=HEATS, seed=0, dtype=torch.float32):
    """Logits whose predicted classes need different temperatures."""
    draw = np.random.default_rng(seed)
    logits = draw.normal(size=(n, len(heats))) * 3
    heat = np.array(heats)[logits.argmax(1)][:, None]
    labels = (logits / heat + draw.gumbel(size=logits.shape)).argmax(1)
    return torch.tensor(logits, dtype=dtype), torch.tensor(labels)


def nll64(logits, labels):
    return float(F.cross_entropy(logits.double(), labels))


# --- anchors ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def paper(shared_file):
    with np.load(shared_file("anchors", "resnet50-cifar10-ce.npz")) as file:
        return {key: torch.from_numpy(file[key]) for key in file.files}


@pytest.mark.shared
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"criterion": "ece"}, (0.818, 1.844, 0.5643, 0.2112, 95.05)),
        ({"grid": True}, (1.331, 1.708, 0.4040, 0.2014, 95.05)),
        ({"reference": True}, (1.454, 1.729, 0.4111, 0.2015, 94.98)),
    ],
)
def test_the_papers_own_logits(paper, arguments, expected):
    found = ClasswiseTemperature(**arguments)
    found.fit(Batch(paper["val_logits"], paper["val_labels"]))
    with torch.no_grad():
        test = {"logits": found.wrap()(paper["test_logits"]), "labels": paper["test_labels"]}
    assert (
        round(100 * metrics.ece(**test), 3),
        round(100 * metrics.adaptive_ece(**test, reference=True), 3),
        round(100 * metrics.classwise_ece(**test), 4),
        round(metrics.nll(**test), 4),
        round(100 * metrics.accuracy(**test), 2),
    ) == expected


@pytest.mark.shared
@pytest.mark.parametrize("reading", ["predicted", "logit"])
def test_shrunk_temperatures_beat_the_common_one_on_rows_never_seen(paper, reading):
    data = Batch(paper["val_logits"], paper["val_labels"])
    found, plain = (c.fit(data) for c in (ClasswiseTemperature(reading=reading), Temperature()))
    assert found.report.loss_after < plain.report.loss_after
    own, common = (
        nll64(c.wrap()(paper["test_logits"]), paper["test_labels"]) for c in (found, plain)
    )
    assert own < common - 1e-3


# --- the penalised fit ------------------------------------------------------------------------


def test_each_predicted_class_has_its_own_penalised_minimum():
    logits, labels = drawn()
    found = ClasswiseTemperature().fit(Batch(logits, labels))
    spread, common = (
        found.report.steps[0].values["spread"],
        found.report.steps[0].details["common"],
    )
    assert spread > 0
    assert common == pytest.approx(temper([Batch(logits, labels)]).temperature, rel=1e-6)
    for k in range(4):
        rows = logits.argmax(1) == k

        def score(b, rows=rows):
            nll = F.cross_entropy(logits[rows].double() * b[0], labels[rows], reduction="sum")
            return float(nll) + (b[0] * common - 1) ** 2 / (2 * spread**2)

        exact = minimize(score, [1 / common], method="Nelder-Mead", options={"xatol": 1e-9})
        assert 1 / float(found.temperatures[k]) == pytest.approx(exact.x[0], rel=1e-4)
    order = found.temperatures.argsort().tolist()
    assert order[0] == 0
    assert order[-1] == 2


def test_each_logit_has_its_place_in_the_penalised_minimum():
    draw = np.random.default_rng(3)
    logits = torch.tensor(draw.normal(size=(1500, 4)) * 3)
    true = logits / torch.tensor([1.0, 2.0, 4.0, 2.0])
    labels = (true + torch.tensor(draw.gumbel(size=(1500, 4)))).argmax(1)
    found = ClasswiseTemperature(reading="logit").fit(Batch(logits, labels))
    step = found.report.steps[0]
    spread, common = step.values["spread"], step.details["common"]
    assert spread > 0

    def score(u):
        t = torch.tensor(u)
        pull = (t - math.log(common)).square().sum() / (2 * spread**2)
        return nll64(logits / t.exp(), labels) + float(pull) / 1500

    exact = minimize(score, np.full(4, math.log(common)), tol=1e-10)
    assert found.temperatures.log().tolist() == pytest.approx(exact.x.tolist(), abs=2e-3)
    assert not found.keeps_accuracy
    assert (found.temperatures > 0).all()


def test_the_spread_is_the_one_honest_cross_validation_chooses():
    """The quadratic model against refits without each fold."""
    logits, labels = drawn(n=1500, heats=(1.7, 2.0, 2.3, 2.0))
    data = Batch(logits, labels)
    found = ClasswiseTemperature().fit(data)
    fold, costs = fold_of(data, FOLDS), []
    for spread in SPREADS:
        total = 0.0
        for number in range(FOLDS):
            kept, left = data.rows(fold != number), data.rows(fold == number)
            common = float(temper([kept]).inverse[0])
            inverse = np.full(4, common)
            if spread:
                shrink = Shrinkage(common, spread)
                inverse = temper_cells([kept], predicted_class, 4, shrink).inverse
            b = torch.tensor(inverse)[left.logits.argmax(1)][:, None]
            total += float(F.cross_entropy(left.logits * b, left.labels, reduction="sum"))
        costs.append(total)
    chosen = found.report.steps[0].values["spread"]
    assert costs[SPREADS.index(chosen)] <= min(costs) + 0.3  # nats over 1,500 rows


def test_classes_that_are_alike_get_the_common_temperature():
    logits, labels = drawn(n=800, heats=(2.0,) * 4, seed=1)
    found = ClasswiseTemperature().fit(Batch(logits, labels))
    step = found.report.steps[0]
    assert step.values["spread"] <= 0.1
    if step.values["spread"] == 0:
        assert "do not pay" in step.message
    ratio = found.temperatures / step.details["common"]
    assert float((ratio - 1).abs().max()) < 0.1


def naive_cost(slopes, bends, spread):
    total = 0.0
    for fold in range(len(slopes)):
        others = [f for f in range(len(slopes)) if f != fold]
        slope, bend = slopes[others].sum(0), bends[others].sum(0)
        centre = -slope.sum() / bend.sum() if bend.sum() > 0 else 0.0
        for k in range(slopes.shape[1]):
            # argmin over d of slope d + bend d^2 / 2 + (d - centre)^2 / (2 s^2)
            d = centre
            if spread:
                d = (-slope[k] + centre / spread**2) / (bend[k] + 1 / spread**2)
            total += slopes[fold, k] * d + bends[fold, k] * d**2 / 2
    return total


@given(st.integers(0, 500))
@settings(max_examples=40, deadline=None)
def test_the_spread_minimises_the_quadratic_cost_of_a_naive_loop(seed):
    draw = np.random.default_rng(seed)
    slopes = draw.normal(size=(5, 3)) * draw.choice([0.5, 5, 50])
    bends = draw.uniform(0, 100, size=(5, 3))
    costs = [naive_cost(slopes, bends, spread) for spread in SPREADS]
    assert costs[SPREADS.index(best_spread(slopes, bends))] == pytest.approx(min(costs), abs=1e-9)


def test_no_curvature_at_all_means_no_spread():
    assert best_spread(np.zeros((5, 3)), np.zeros((5, 3))) == 0


@pytest.mark.parametrize("reading", ["predicted", "logit"])
def test_classes_without_rows_end_at_the_common_temperature(reading):
    logits, labels = drawn()
    wide = torch.cat([logits, torch.full((2000, 2), -40.0)], 1)
    found = ClasswiseTemperature(reading=reading).fit(Batch(wide, labels))
    step = found.report.steps[0]
    assert step.values["spread"] > 0
    assert found.temperatures[4:].tolist() == pytest.approx([step.details["common"]] * 2, rel=1e-3)


def test_few_rows_a_class_are_not_believed():
    draw = np.random.default_rng(0)
    labels = torch.tensor(np.repeat(np.arange(300), 2))
    logits = torch.tensor(draw.normal(size=(600, 300)) * 2)
    logits[torch.arange(600), labels] += torch.tensor(draw.uniform(0, 14, 600))
    found = ClasswiseTemperature().fit(Batch(logits, labels))
    assert float(found.temperatures.max() / found.temperatures.min()) < 1.5


# --- the greedy search ------------------------------------------------------------------------


def naive_greedy(logits, labels, criterion, reading, common):
    """One candidate at a time, everything computed anew."""
    grid = [round(0.5 + 0.1 * step, 1) for step in range(46)]
    k = logits.shape[1]
    chosen = [min(grid, key=lambda t: abs(t - common))] * k

    def mapped(each):
        each = torch.tensor(each, dtype=logits.dtype)
        return logits / (each[logits.argmax(1)][:, None] if reading == "predicted" else each)

    def score(each):
        z = mapped(each)
        right = float((z.argmax(1) == labels).sum())
        if criterion == "nll":
            return float(F.cross_entropy(z.double(), labels)), right
        return metrics.ece(logits=z, labels=labels), right

    best, right = score(chosen)
    for _ in range(5):
        before = list(chosen)
        for which in range(k):
            tried = [(*score([*chosen[:which], t, *chosen[which + 1 :]]), t) for t in grid]
            lowest = min((s, t) for s, r, t in tried if r >= right)
            if lowest[0] < best - 1e-9:
                chosen[which] = lowest[1]
                best, right = score(chosen)
        if chosen == before:
            break
    return chosen


@pytest.mark.parametrize("reading", ["predicted", "logit"])
@pytest.mark.parametrize("criterion", ["nll", "ece"])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_greedy_search_is_the_naive_one(reading, criterion, seed):
    logits, labels = drawn(n=250, seed=seed, dtype=torch.float64)
    found = ClasswiseTemperature(reading=reading, criterion=criterion, grid=True)
    found.fit(Batch(logits, labels))
    common = temper([Batch(logits, labels)]).temperature
    expected = naive_greedy(logits, labels, criterion, reading, common)
    assert found.temperatures.tolist() == pytest.approx(expected, abs=1e-6)


def test_the_greedy_search_never_costs_accuracy_on_the_fit_split():
    logits, labels = drawn(n=600)
    found = ClasswiseTemperature(reading="logit", criterion="ece").fit(Batch(logits, labels))
    after = found.wrap()(logits)
    assert (after.argmax(1) == labels).sum() >= (logits.argmax(1) == labels).sum()
    assert metrics.ece(logits=after, labels=labels) < metrics.ece(logits=logits, labels=labels)


def test_an_ece_that_comes_down_is_kept_whatever_the_nll_does():
    logits, labels = drawn(n=600)
    found = ClasswiseTemperature(criterion="ece").fit(Batch(logits, labels))
    assert not found.report.noop
    assert found.report.loss_after == pytest.approx(nll64(found.wrap()(logits), labels), abs=1e-6)
    by_ece = ClasswiseTemperature(criterion="ece").fit(Batch(logits, labels), loss=ece)
    assert torch.equal(by_ece.temperatures, found.temperatures)
    assert by_ece.report.loss_after < by_ece.report.loss_before


def test_an_ece_the_grid_cannot_lower_is_a_noop():
    """All certain and all right: no temperature from 0.5 on brings the confidence closer to 1."""
    logits = torch.tensor([[200.0, 0.0], [0.0, 200.0]]).repeat(20, 1)
    found = ClasswiseTemperature(criterion="ece").fit(Batch(logits, torch.tensor([0, 1] * 20)))
    assert found.report.noop
    assert found.temperatures.numel() == 0


@pytest.mark.parametrize("reading", ["predicted", "logit"])
def test_classes_without_samples_stay_where_the_search_starts(reading):
    logits, labels = drawn(n=500)
    wide = torch.cat([logits, torch.full((500, 2), -40.0)], 1)
    found = ClasswiseTemperature(reading=reading, criterion="ece").fit(Batch(wide, labels))
    common = found.report.steps[0].details["common"]
    assert found.temperatures[4:].tolist() == pytest.approx([round(common, 1)] * 2)


# --- the reference ----------------------------------------------------------------------------


def test_the_reference_is_torchs_lbfgs_on_the_diagonal():
    logits, labels = drawn(n=400)
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.LBFGS([parameter], lr=0.02, max_iter=1000)

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(logits / parameter, labels)
        loss.backward()
        return loss

    optimizer.step(closure)
    found = ClasswiseTemperature(reference=True).fit(Batch(logits, labels))
    torch.testing.assert_close(found.temperatures, parameter.detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.wrap()(logits), logits / found.temperatures)
    assert not found.keeps_accuracy


# --- outputs and edge cases -------------------------------------------------------------------


def test_rows_are_divided_by_the_temperature_of_their_prediction():
    temperatures = torch.tensor([0.5, 2.0, 4.0])
    logits = torch.tensor([[3.0, 1.0, 2.0], [0.0, 1.0, -1.0], [1.0, 1.0, 8.0]])
    found = ClasswiseTemperature().assign(temperatures=temperatures).wrap()(logits)
    assert torch.equal(found, logits / torch.tensor([[0.5], [2.0], [4.0]]))
    by_logit = ClasswiseTemperature(reading="logit").assign(temperatures=temperatures)
    assert torch.equal(by_logit.wrap()(logits), logits / temperatures)


def test_neighbouring_logits_may_tie_but_never_swap():
    low = torch.rand(20_000, generator=torch.Generator().manual_seed(0)) + 1
    logits = torch.stack([low, torch.nextafter(low, torch.tensor(9.0))], 1)
    found = ClasswiseTemperature().assign(temperatures=torch.tensor([0.7, 1.412])).wrap()(logits)
    assert (found[:, 1] >= found[:, 0]).all()


@pytest.mark.parametrize("reading", ["predicted", "logit"])
@pytest.mark.parametrize("labels", ["best", "worst"])
def test_ill_posed_labels_stop_at_the_cap_with_a_warning(reading, labels):
    logits, _ = drawn(n=300)
    labels = logits.argmax(1) if labels == "best" else logits.argmin(1)
    with pytest.warns(CalibrationWarning, match="classwise stopped at the cap"):
        found = ClasswiseTemperature(reading=reading).fit(Batch(logits, labels))
    assert torch.isfinite(found.wrap()(logits)).all()
    assert (found.temperatures > 0).all()


@pytest.mark.parametrize("arguments", [{}, {"reading": "logit"}, {"criterion": "ece"}])
@pytest.mark.parametrize("shape", [(20, 3), (20, 2)])
def test_logits_without_a_difference_are_a_noop(arguments, shape):
    labels = torch.arange(shape[0]) % shape[1]
    found = ClasswiseTemperature(**arguments).fit(Batch(torch.full(shape, 7.0), labels))
    assert found.report.noop
    assert found.temperatures.numel() == 0


def test_a_class_that_is_never_right_is_spread_out_and_stays_finite():
    logits, labels = drawn()
    labels[(logits.argmax(1) == 1)] = 0
    found = ClasswiseTemperature().fit(Batch(logits, labels))
    assert torch.isfinite(found.wrap()(logits)).all()
    assert int(found.temperatures.argmax()) == 1


def test_dear_forms_name_a_stand_in_for_joint_fits():
    assert ClasswiseTemperature().quick is None
    for dear in ({"reading": "logit"}, {"criterion": "ece"}, {"reference": True}, {"grid": True}):
        assert ClasswiseTemperature(**dear).quick == "temperature"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reading": "class"}, "classwise: reading is 'class': choose predicted or logit"),
        ({"criterion": "brier"}, "classwise: criterion is 'brier': choose nll or ece"),
        ({"criterion": 3}, "classwise: criterion is 3"),
        ({"grid": 1}, "classwise: grid is 1: give True or False"),
        ({"reference": "yes"}, "classwise: reference is 'yes'"),
        ({"reference": True, "reading": "logit"}, "leave the others out"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        ClasswiseTemperature(**arguments)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_damaged_file_is_refused(tmp_path, bad):
    found = ClasswiseTemperature().assign(temperatures=torch.tensor([1.0, bad]))
    with pytest.raises(InputError, match="one finite number above 0 for each class"):
        load(save(found, tmp_path / "c.safetensors"))


def test_a_reference_may_hold_a_negative_temperature(tmp_path):
    found = ClasswiseTemperature(reference=True).assign(temperatures=torch.tensor([1.0, -2.0]))
    assert load(save(found, tmp_path / "c.safetensors")).temperatures.tolist() == [1, -2]
