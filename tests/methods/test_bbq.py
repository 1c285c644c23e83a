"""BBQ: a naive loop with scipy's Beta function, and closed forms."""

import math

import numpy as np
import pytest
import torch
from method_cases import drawn, floored, mapped

from featcal import Batch, InputError, metrics
from featcal.methods import BBQ
from featcal.methods.histogram import average, histogram, histograms
from featcal.methods.score_tables import Levels, equal_mass, top_levels

special = pytest.importorskip("scipy.special")


def sigmoid(x):
    return 1 / (1 + np.exp(-np.asarray(x, dtype=np.float64)))


def naive(odds, right, new):
    """The averaged value at each new score, by loops over binnings and scores."""
    n = len(odds)
    low, high = max(1, math.floor(n ** (1 / 3) / 10)), math.ceil(10 * n ** (1 / 3))
    ordered = np.sort(odds)
    logs, values = [], []
    for bins in range(low, min(high, len(np.unique(odds))) + 1):
        cuts = sorted({j * (n - 1) // bins for j in range(1, bins)})
        edges = [(ordered[c] + ordered[c + 1]) / 2 for c in cuts]
        bounds = [0.0, *sigmoid(edges), 1.0] if edges else [0.0, 1.0]
        total, means = 0.0, []
        for b in range(len(bounds) - 1):
            mine = [r for o, r in zip(odds, right, strict=True) if sum(o > e for e in edges) == b]
            middle = (bounds[b] + bounds[b + 1]) / 2
            alpha, beta = 2 / (len(bounds) - 1) * middle, 2 / (len(bounds) - 1) * (1 - middle)
            hits, misses = sum(mine), len(mine) - sum(mine)
            total += special.betaln(hits + alpha, misses + beta) - special.betaln(alpha, beta)
            means.append((hits + alpha) / (len(mine) + alpha + beta))
        logs.append(total)
        values.append([means[sum(x > e for e in edges)] for x in new])
    weights = special.softmax(logs)
    return weights @ np.array(values)


def test_a_loop_with_scipys_beta_function_agrees():
    logits, labels = drawn(n=120)
    new, _ = drawn(n=60, seed=1, scale=4)
    calibrator = BBQ().fit(Batch(logits, labels))
    odds, right = _scores(logits, labels)
    expected = naive(odds, right, _scores(new, new.argmax(1))[0]).clip(1 / 122, 1 - 1 / 122)
    found = mapped(calibrator, new).double().softmax(1).amax(1).numpy()
    np.testing.assert_allclose(found, floored(new, expected), atol=1e-5)


def _scores(logits, labels):
    """Log-odds of the prediction, rounded to float32 as the tables hold them, and its hits."""
    p = logits.double()
    first, prediction = p.max(1)
    others = p.scatter(1, prediction[:, None], -torch.inf).logsumexp(1)
    return (first - others).float().double().numpy(), (prediction == labels).numpy()


def test_one_bin_is_a_beta_binomial():
    # Prior Beta(1, 1): 7 of 10 right have the evidence B(8, 4) and the mean 8 / 12.
    levels = Levels.of(torch.arange(10.0), torch.arange(10) < 7)
    model = histogram(levels, np.array([], dtype=np.intp))
    assert model.evidence == pytest.approx(special.betaln(8, 4))
    np.testing.assert_allclose(model.values, [8 / 12])


def test_the_numbers_of_bins_tried():
    for n in (1, 8, 1000, 27_000):
        levels = Levels.of(torch.arange(n), torch.arange(n) % 2 == 0)
        low, high = max(1, round(n ** (1 / 3)) // 10), min(round(10 * n ** (1 / 3)), n)
        sizes = [len(model.values) for model in histograms(levels)]
        assert sizes == list(range(low, high + 1))


def test_an_average_of_steps_is_one_step_function():
    levels = Levels.of(torch.arange(100.0), torch.arange(100) % 3 == 0)
    models = [histogram(levels, equal_mass(levels, bins)) for bins in (1, 4, 7, 9)]
    weights = np.array([0.4, 0.3, 0.2999999999, 1e-10])
    cuts, shares = average(models, weights)
    expected = sum(
        w * model.values[np.searchsorted(model.cuts, np.arange(100))]
        for w, model in zip(weights, models, strict=True)
    )
    np.testing.assert_allclose(shares[np.searchsorted(cuts, np.arange(100))], expected, atol=1e-9)
    # The binning of no weight leaves no steps behind.
    assert set(cuts) == set(models[1].cuts) | set(models[2].cuts)


def test_a_clear_step_in_the_data_is_found():
    draw = np.random.default_rng(0)
    logits = torch.zeros(4000, 2)
    logits[:, 0] = torch.tensor(draw.uniform(0, 4, 4000))
    sure = logits[:, 0].numpy() > 2
    labels = torch.tensor((draw.uniform(size=4000) > np.where(sure, 0.95, 0.6)).astype(int))
    found = mapped(BBQ().fit(Batch(logits, labels)), logits).softmax(1)[:, 0].numpy()
    np.testing.assert_allclose(found[sure & (logits[:, 0].numpy() > 2.3)], 0.95, atol=0.03)
    np.testing.assert_allclose(found[logits[:, 0].numpy() < 1.7], 0.6, atol=0.06)


def test_no_value_is_surer_than_n_rows_can_tell():
    logits, _ = drawn(n=98)
    calibrator = BBQ().fit(Batch(logits, logits.argmax(1)))
    assert calibrator.values.sigmoid().max() == pytest.approx(0.99, abs=1e-6)


def test_the_report_says_how_many_bins_and_steps():
    logits, labels = drawn(n=1000)
    step = BBQ().fit(Batch(logits, labels)).report.steps[0]
    assert step.values["steps"] >= 1
    assert 1 <= step.values["bins"] <= 100
    assert step.message.startswith("histograms averaged: 100,")


def test_evidence_stays_finite_for_confidences_that_round_to_one():
    logits = torch.tensor([[50.0, 0.0], [800.0, 0.0], [9000.0, 0.0]]).repeat(40, 1)
    labels = torch.arange(120) % 10 // 9
    calibrator = BBQ().fit(Batch(logits, labels))
    assert all(
        math.isfinite(model.evidence) for model in histograms(top_levels([Batch(logits, labels)]))
    )
    assert mapped(calibrator, logits).isfinite().all()
    np.testing.assert_allclose(mapped(calibrator, logits).softmax(1)[:, 0], 0.9, atol=0.05)


@pytest.mark.shared
@pytest.mark.parametrize("name", ["ce", "flsd53"])
def test_the_papers_logits_get_better(shared_file, name):
    with np.load(shared_file("anchors", f"resnet50-cifar10-{name}.npz")) as file:
        arrays = {key: torch.from_numpy(file[key]) for key in file.files}
    calibrator = BBQ().fit(Batch(arrays["val_logits"], arrays["val_labels"]))
    labels = arrays["test_labels"]
    before, after = arrays["test_logits"], mapped(calibrator, arrays["test_logits"])
    assert torch.equal(before.argmax(1), after.argmax(1))
    for metric in (metrics.ece, metrics.nll):
        assert metric(logits=after, labels=labels) < metric(logits=before, labels=labels)
    assert len(calibrator.values) < 500


@pytest.mark.parametrize(
    "values",
    [{"values": torch.ones(3)}, {"edges_at": -torch.arange(2.0), "values": torch.ones(3)}],
)
def test_damaged_values_are_refused(values):
    with pytest.raises(InputError, match=r"bbq: .* edges must ascend"):
        BBQ().assign(**values).check()
