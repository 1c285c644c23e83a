"""Histogram binning and BBQ: naive loops over probabilities, the paper's logits, closed forms."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from method_cases import drawn, floored, mapped, paper
from scipy import special

from featcal import Batch, metrics, parse
from featcal.core.fit import ece
from featcal.methods import BBQ, HistogramBinning
from featcal.methods.score_tables import log_odds, steps


def confidence(logits):
    return logits.double().softmax(1).amax(1).numpy()


def naive_bins(scores, right, edges, *, added=(1.0, 2.0)):
    """The value of each bin (lo, hi] by a loop; None where a bin is empty."""
    bounds = [-1.0, *edges, 2.0]
    values = []
    for low, high in pairwise(bounds):
        mine = [bool(r) for s, r in zip(scores, right, strict=True) if low < s <= high]
        values.append((sum(mine) + added[0]) / (len(mine) + added[1]) if mine else None)
    return values


def looked_up(scores, edges, values):
    return np.array([values[sum(s > edge for edge in edges)] for s in scores])


@pytest.mark.parametrize("smooth", [True, False])
@pytest.mark.parametrize(("edges", "bins"), [("mass", 1), ("mass", 7), ("width", 10)])
def test_top_bins_are_what_a_loop_says(edges, bins, smooth):
    logits, labels = drawn(scale=2)
    scores = confidence(logits)
    cuts = [j / bins for j in range(1, bins)]
    if edges == "mass":
        cuts = [np.quantile(scores, cut) for cut in cuts]
    added = (1.0, 2.0) if smooth else (0.0, 0.0)
    values = naive_bins(scores, logits.argmax(1) == labels, cuts, added=added)
    calibrator = HistogramBinning(bins=bins, edges=edges, smooth=smooth).fit(Batch(logits, labels))
    expected = floored(logits, looked_up(scores, cuts, values))
    found = mapped(calibrator, logits)
    np.testing.assert_allclose(confidence(found), expected, atol=1e-5)
    top = logits.argmax(1, keepdim=True)  # the other classes share the rest as before
    rest = [p.scatter(1, top, 0) for p in (found.double().softmax(1), logits.double().softmax(1))]
    shares = [r / r.sum(1, keepdim=True) for r in rest]
    torch.testing.assert_close(shares[0], shares[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("edges", ["mass", "width"])
def test_one_vs_rest_is_what_a_loop_says(edges):
    logits, labels = drawn(n=900, k=3, scale=2)
    probs = logits.double().softmax(1).numpy()
    columns = []
    for c in range(3):
        cuts = [j / 8 for j in range(1, 8)]
        if edges == "mass":
            cuts = [np.quantile(probs[:, c], j / 8) for j in range(1, 8)]
        values = naive_bins(probs[:, c], labels == c, cuts, added=(2 / 3, 2.0))
        columns.append(looked_up(probs[:, c], cuts, values))
    expected = np.stack(columns, 1)
    expected /= expected.sum(1, keepdims=True)
    recipe = HistogramBinning(bins=8, edges=edges, reading="one_vs_rest")
    assert not recipe.keeps_accuracy
    found = mapped(recipe.fit(Batch(logits, labels)), logits)
    np.testing.assert_allclose(found.softmax(1), expected, atol=1e-5)


def test_bins_are_closed_on_the_right_and_an_empty_one_keeps_its_centre():
    logits = torch.tensor([[0.5, 0.5], [0.75, 0.25], [0.76, 0.24]]).log()
    calibrator = HistogramBinning(bins=4, edges="width", smooth=False)
    calibrator.fit(Batch(logits, torch.tensor([0, 0, 1])), loss=ece)
    # 0.5 is in (0.25, 0.5], 0.75 in (0.5, 0.75], 0.76 above; (0, 0.25] is empty.
    np.testing.assert_allclose(calibrator.values.sigmoid(), [0.125, 1, 1, 0], atol=1e-6)


def test_many_classes_are_gathered_a_few_at_a_time(monkeypatch):
    logits, labels = drawn(n=200, k=7)
    whole = HistogramBinning(reading="one_vs_rest").fit(Batch(logits, labels))
    monkeypatch.setattr("featcal.methods.score_maps.GATHERED", 450)  # two classes a pass
    parts = HistogramBinning(reading="one_vs_rest").fit(Batch(logits, labels))
    assert torch.equal(whole.values, parts.values)
    assert torch.equal(whole.edges_at, parts.edges_at)


def fitted_on(published, recipe):
    calibrator = parse(recipe).fit(Batch(published["val_logits"], published["val_labels"]))
    logits, labels = published["test_logits"], published["test_labels"]
    return calibrator, mapped(calibrator, logits), labels


@pytest.mark.shared
def test_equal_mass_on_the_papers_logits(shared_file):
    _, found, labels = fitted_on(paper(shared_file), "histogram(smooth=False)")
    assert 100 * metrics.ece(logits=found, labels=labels) == pytest.approx(0.612, abs=5e-4)
    assert 100 * metrics.accuracy(logits=found, labels=labels) == pytest.approx(95.05)


@pytest.mark.shared
def test_equal_width_on_the_papers_logits(shared_file):
    """The published 0.760 keeps confidences of 0 and drops them from the ECE; a bin of two has one.

    Where the prediction is kept such rows get the runner-up's confidence instead.
    """
    arrays = paper(shared_file)
    calibrator, found, labels = fitted_on(arrays, "histogram(edges='width', smooth=False)")
    logits = arrays["test_logits"]
    raw = steps(log_odds(logits), calibrator.edges_at, calibrator.values).sigmoid().double().numpy()
    right = (logits.argmax(1) == labels).double().numpy()
    counted = raw > 1e-6
    bins = np.clip(np.ceil(raw * 15) - 1, 0, 14).astype(int)
    gaps = np.bincount(bins[counted], (raw - right)[counted], minlength=15)
    assert 100 * np.abs(gaps).sum() / len(raw) == pytest.approx(0.760, abs=5e-4)
    assert 100 * metrics.ece(logits=found, labels=labels) < 0.760


def naive_bbq(odds, right, new):
    """The averaged value at each new score, by loops over binnings and scores."""
    n = len(odds)
    low, high = max(1, math.floor(n ** (1 / 3) / 10)), math.ceil(10 * n ** (1 / 3))
    ordered = np.sort(odds)
    logs, values = [], []
    for bins in range(low, min(high, len(np.unique(odds))) + 1):
        cuts = sorted({j * (n - 1) // bins for j in range(1, bins)})
        edges = [(ordered[c] + ordered[c + 1]) / 2 for c in cuts]
        bounds = [0.0, *special.expit(edges), 1.0]
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
    return special.softmax(logs) @ np.array(values)


def test_bbq_is_a_loop_with_scipys_beta_function():
    logits, labels = drawn(n=120)
    new, _ = drawn(n=60, seed=1, scale=4)
    calibrator = BBQ().fit(Batch(logits, labels))
    odds, right = log_odds(logits).double().numpy(), (logits.argmax(1) == labels).numpy()
    expected = naive_bbq(odds, right, log_odds(new).double().numpy()).clip(1 / 122, 1 - 1 / 122)
    np.testing.assert_allclose(
        confidence(mapped(calibrator, new)), floored(new, expected), atol=1e-5
    )
    assert calibrator.report.steps[0].values["steps"] == len(calibrator.values)


@pytest.mark.parametrize(("rows", "binnings"), [(1, 1), (8, 8), (1000, 100), (27_000, 298)])
def test_the_numbers_of_bins_tried(rows, binnings):
    logits = torch.stack([torch.linspace(0.1, 5, rows), torch.zeros(rows)], 1)
    report = BBQ().fit(Batch(logits, torch.arange(rows) % 3 // 2)).report
    told = f"histograms averaged: {binnings}," in report.steps[0].message
    assert told or report.noop


def test_no_value_is_surer_than_n_rows_can_tell():
    logits, _ = drawn(n=98)
    calibrator = BBQ().fit(Batch(logits, logits.argmax(1)))
    assert calibrator.values.sigmoid().max() == pytest.approx(0.99, abs=1e-6)


def test_evidence_stays_finite_for_confidences_that_round_to_one():
    logits = torch.tensor([[50.0, 0.0], [800.0, 0.0], [9000.0, 0.0]]).repeat(40, 1)
    calibrator = BBQ().fit(Batch(logits, torch.arange(120) % 10 // 9))
    np.testing.assert_allclose(mapped(calibrator, logits).softmax(1)[:, 0], 0.9, atol=0.05)
