"""Class temperatures against scipy, honest cross-validation, a naive greedy search, the paper."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from method_cases import nll64, paper, torchs_lbfgs
from scipy.optimize import minimize

from featcal import Batch, CalibrationWarning, Temperature, metrics
from featcal.core.fit import ece
from featcal.core.sample import fold_of
from featcal.core.scalar import Shrinkage, temper, temper_cells
from featcal.methods.classwise import (
    FOLDS,
    SPREADS,
    ClasswiseTemperature,
    predicted_class,
)


def drawn(n=2000, *, heats=(1.2, 2.0, 3.2, 2.0), seed=0, dtype=torch.float32):
    """Logits whose predicted classes need different temperatures."""
    draw = np.random.default_rng(seed)
    logits = draw.normal(size=(n, len(heats))) * 3
    heat = np.array(heats)[logits.argmax(1)][:, None]
    labels = (logits / heat + draw.gumbel(size=logits.shape)).argmax(1)
    return torch.tensor(logits, dtype=dtype), torch.tensor(labels)


@pytest.mark.shared
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"criterion": "ece"}, (0.818, 1.844, 0.5643, 0.2112, 95.05)),
        ({"grid": True}, (1.331, 1.708, 0.4040, 0.2014, 95.05)),
        ({"reference": True}, (1.454, 1.729, 0.4111, 0.2015, 94.98)),
        ({}, None),
        ({"reading": "logit"}, None),
    ],
)
def test_the_papers_own_logits(shared_file, arguments, expected):
    arrays = paper(shared_file)
    data = Batch(arrays["val_logits"], arrays["val_labels"])
    found = ClasswiseTemperature(**arguments).fit(data)
    with torch.no_grad():
        test = {"logits": found.wrap()(arrays["test_logits"]), "labels": arrays["test_labels"]}
    if expected is None:  # shrunk temperatures beat the common one on rows never seen
        plain = Temperature().fit(data).wrap()(arrays["test_logits"])
        assert metrics.nll(**test) < nll64(plain, arrays["test_labels"]) - 1e-3
        return
    assert (
        round(100 * metrics.ece(**test), 3),
        round(100 * metrics.adaptive_ece(**test, reference=True), 3),
        round(100 * metrics.classwise_ece(**test), 4),
        round(metrics.nll(**test), 4),
        round(100 * metrics.accuracy(**test), 2),
    ) == expected


def test_each_predicted_class_has_its_own_penalised_minimum():
    logits, labels = drawn()
    found = ClasswiseTemperature().fit(Batch(logits, labels))
    step = found.report.steps[0]
    spread, common = step.values["spread"], step.details["common"]
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
    assert (order[0], order[-1]) == (0, 2)


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


def test_the_spread_is_the_one_honest_cross_validation_chooses():
    """The quadratic model against refits without each fold."""
    logits, labels = drawn(n=1000, heats=(1.7, 2.0, 2.3, 2.0))
    data = Batch(logits, labels)
    chosen = ClasswiseTemperature().fit(data).report.steps[0].values["spread"]
    fold, costs = fold_of(data, FOLDS), np.zeros(len(SPREADS))
    for number in range(FOLDS):
        kept, left = data.rows(fold != number), data.rows(fold == number)
        common = float(temper([kept]).inverse[0])
        for place, spread in enumerate(SPREADS):
            inverse = np.full(4, common)
            if spread:
                shrink = Shrinkage(common, spread)
                inverse = temper_cells([kept], predicted_class, 4, shrink).inverse
            b = torch.tensor(inverse)[left.logits.argmax(1)][:, None]
            costs[place] += float(F.cross_entropy(left.logits * b, left.labels, reduction="sum"))
    assert costs[SPREADS.index(chosen)] <= min(costs) + 0.3  # nats over 1,000 rows


def test_classes_that_are_alike_or_have_few_rows_stay_near_the_common_temperature():
    found = ClasswiseTemperature().fit(Batch(*drawn(n=800, heats=(2.0,) * 4, seed=1)))
    ratio = found.temperatures / found.report.steps[0].details["common"]
    assert float((ratio - 1).abs().max()) < 0.1
    draw = np.random.default_rng(0)
    labels = torch.tensor(np.repeat(np.arange(300), 2))
    logits = torch.tensor(draw.normal(size=(600, 300)) * 2)
    logits[torch.arange(600), labels] += torch.tensor(draw.uniform(0, 14, 600))
    few = ClasswiseTemperature().fit(Batch(1.5 * logits, labels)).temperatures
    assert float(few.max() / few.min()) < 1.5


@pytest.mark.parametrize("reading", ["predicted", "logit"])
@pytest.mark.parametrize("criterion", ["nll", "ece"])
def test_classes_without_rows_stay_where_the_search_starts(reading, criterion):
    logits, labels = drawn(n=1500)
    wide = torch.cat([logits, torch.full((1500, 2), -40.0)], 1)
    found = ClasswiseTemperature(reading=reading, criterion=criterion).fit(Batch(wide, labels))
    common = found.report.steps[0].details["common"]
    common = round(common, 1) if criterion == "ece" else common
    assert found.temperatures[4:].tolist() == pytest.approx([common] * 2, rel=1e-3)


def naive_greedy(logits, labels, criterion, reading, common):
    """One candidate at a time, everything computed anew."""
    grid = [round(0.5 + 0.1 * step, 1) for step in range(46)]
    k = logits.shape[1]
    chosen = [min(grid, key=lambda t: abs(t - common))] * k

    def score(each):
        each = torch.tensor(each, dtype=logits.dtype)
        z = logits / (each[logits.argmax(1)][:, None] if reading == "predicted" else each)
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
def test_the_greedy_search_is_the_naive_one(reading, criterion):
    logits, labels = drawn(n=150, heats=(1.2, 2.0, 3.2), dtype=torch.float64)
    found = ClasswiseTemperature(reading=reading, criterion=criterion, grid=True)
    found.fit(Batch(logits, labels))
    common = temper([Batch(logits, labels)]).temperature
    expected = naive_greedy(logits, labels, criterion, reading, common)
    assert found.temperatures.tolist() == pytest.approx(expected, abs=1e-6)
    after = found.wrap()(logits)
    assert (after.argmax(1) == labels).sum() >= (logits.argmax(1) == labels).sum()


def test_an_ece_that_comes_down_is_kept_whatever_the_nll_does():
    logits, labels = drawn(n=600)
    found = ClasswiseTemperature(criterion="ece").fit(Batch(logits, labels))
    assert not found.report.noop
    assert found.report.loss_after == pytest.approx(nll64(found.wrap()(logits), labels), abs=1e-6)
    by_ece = ClasswiseTemperature(criterion="ece").fit(Batch(logits, labels), loss=ece)
    assert torch.equal(by_ece.temperatures, found.temperatures)
    assert by_ece.report.loss_after < by_ece.report.loss_before


def test_the_reference_is_torchs_lbfgs_on_the_diagonal():
    logits, labels = drawn(n=400)
    expected = torchs_lbfgs(lambda t: logits / t, torch.ones(4), labels)
    found = ClasswiseTemperature(reference=True).fit(Batch(logits, labels))
    torch.testing.assert_close(found.temperatures, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.wrap()(logits), logits / found.temperatures)
    assert not found.keeps_accuracy


def test_rows_are_divided_by_the_temperature_of_their_prediction():
    temperatures = torch.tensor([0.5, 2.0, 4.0])
    logits = torch.tensor([[3.0, 1.0, 2.0], [0.0, 1.0, -1.0], [1.0, 1.0, 8.0]])
    found = ClasswiseTemperature().assign(temperatures=temperatures).wrap()(logits)
    assert torch.equal(found, logits / torch.tensor([[0.5], [2.0], [4.0]]))
    by_logit = ClasswiseTemperature(reading="logit").assign(temperatures=temperatures)
    assert torch.equal(by_logit.wrap()(logits), logits / temperatures)
    low = torch.rand(20_000, generator=torch.Generator().manual_seed(0)) + 1
    logits = torch.stack([low, torch.nextafter(low, torch.tensor(9.0))], 1)
    found = ClasswiseTemperature().assign(temperatures=torch.tensor([0.7, 1.412])).wrap()(logits)
    assert (found[:, 1] >= found[:, 0]).all()  # neighbours may tie but never swap


@pytest.mark.parametrize("reading", ["predicted", "logit"])
def test_logits_no_better_than_guessing_stop_at_the_cap_with_a_warning(reading):
    logits, _ = drawn(n=300)
    with pytest.warns(CalibrationWarning, match="classwise stopped at the cap"):
        found = ClasswiseTemperature(reading=reading).fit(Batch(logits, logits.argmin(1)))
    assert torch.isfinite(found.wrap()(logits)).all()
    assert (found.temperatures > 0).all()
