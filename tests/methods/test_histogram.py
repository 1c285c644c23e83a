"""Histogram binning: naive loops over probabilities, the paper's logits, and bins that go wrong."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from method_cases import drawn, floored, mapped

from featcal import Batch, InputError, metrics, parse
from featcal.core.loss import ece
from featcal.methods import HistogramBinning


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


# --- the definition ---------------------------------------------------------------------------


@pytest.mark.parametrize("smooth", [True, False])
@pytest.mark.parametrize("bins", [1, 2, 7, 15])
def test_equal_mass_is_what_a_loop_says(bins, smooth):
    logits, labels = drawn()
    scores = confidence(logits)
    edges = [np.quantile(scores, j / bins) for j in range(1, bins)]
    added = (1.0, 2.0) if smooth else (0.0, 0.0)
    values = naive_bins(scores, logits.argmax(1) == labels, edges, added=added)
    found = mapped(HistogramBinning(bins=bins, smooth=smooth).fit(Batch(logits, labels)), logits)
    expected = floored(logits, looked_up(scores, edges, values))
    np.testing.assert_allclose(confidence(found), expected, atol=1e-5)


@pytest.mark.parametrize("smooth", [True, False])
def test_equal_width_is_what_a_loop_says(smooth):
    logits, labels = drawn(scale=2)
    scores = confidence(logits)
    edges = [j / 10 for j in range(1, 10)]
    added = (1.0, 2.0) if smooth else (0.0, 0.0)
    values = naive_bins(scores, logits.argmax(1) == labels, edges, added=added)
    calibrator = HistogramBinning(bins=10, edges="width", smooth=smooth).fit(Batch(logits, labels))
    expected = floored(logits, looked_up(scores, edges, values))
    np.testing.assert_allclose(confidence(mapped(calibrator, logits)), expected, atol=1e-5)


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


def test_the_other_classes_share_the_rest_as_before():
    logits, labels = drawn()
    found = mapped(HistogramBinning().fit(Batch(logits, labels)), logits).softmax(1)
    top = logits.argmax(1, keepdim=True)
    rest = [p.scatter(1, top, 0) for p in (found.double(), logits.double().softmax(1))]
    shares = [r / r.sum(1, keepdim=True) for r in rest]
    torch.testing.assert_close(shares[0], shares[1], rtol=1e-4, atol=1e-6)


def test_two_bins_by_hand():
    # Margins 1 (right 1 of 4) and 3 (right 3 of 4), two classes: (1 + 1) / 6 and (3 + 1) / 6.
    logits = torch.tensor([[1.0, 0.0]] * 4 + [[3.0, 0.0]] * 4)
    labels = torch.tensor([0, 1, 1, 1, 0, 0, 0, 1])
    calibrator = HistogramBinning(bins=2).fit(Batch(logits, labels))
    np.testing.assert_allclose(calibrator.values.sigmoid(), [2 / 6, 4 / 6], rtol=1e-6)
    assert calibrator.edges_at.tolist() == [2.0]
    step = calibrator.report.steps[0]
    assert step.values == pytest.approx({"bins": 2, "lowest": 2 / 6, "highest": 4 / 6})
    top = mapped(calibrator, logits).softmax(1)[:, 0]
    np.testing.assert_allclose(top[4:], 4 / 6, rtol=1e-5)
    np.testing.assert_allclose(top[:4], 0.5, rtol=1e-5)  # 2/6 would make it the other class
    assert (top[:4] > 0.5).all()


def test_rows_of_equal_confidence_are_never_torn_apart():
    logits = torch.tensor([[1.0, 0.0]] * 50 + [[2.0, 0.0]] * 3)
    calibrator = HistogramBinning(bins=15).fit(Batch(logits, torch.arange(53) % 2))
    assert len(calibrator.values) == 2
    np.testing.assert_allclose(calibrator.values.sigmoid(), [26 / 52, 2.5 / 5], atol=0.2)


def test_bins_are_closed_on_the_right():
    logits = torch.tensor([[0.5, 0.5], [0.75, 0.25], [0.76, 0.24]]).log()
    labels = torch.tensor([0, 0, 1])
    calibrator = HistogramBinning(bins=4, edges="width", smooth=False)
    calibrator.fit(Batch(logits, labels), loss=ece)
    # 0.5 is in (0.25, 0.5], 0.75 in (0.5, 0.75], 0.76 above; (0, 0.25] is empty: its centre.
    np.testing.assert_allclose(calibrator.values.sigmoid(), [0.125, 1, 1, 0], atol=1e-6)


def test_empty_bins_keep_their_centre():
    logits, labels = drawn(k=2, scale=8)
    for smooth in (True, False):
        calibrator = HistogramBinning(bins=10, edges="width", smooth=smooth)
        calibrator.fit(Batch(logits, labels))
        np.testing.assert_allclose(
            calibrator.values[:5].sigmoid(), [0.05, 0.15, 0.25, 0.35, 0.45], rtol=1e-5
        )


def test_a_class_without_rows_keeps_a_finite_logarithm():
    logits, labels = drawn(k=5)
    recipe = HistogramBinning(reading="one_vs_rest", edges="width", smooth=False)
    found = mapped(recipe.fit(Batch(logits, labels % 2)), logits)
    assert recipe.report.loss_after < recipe.report.loss_before
    assert found.isfinite().all()
    assert found.log_softmax(1).isfinite().all()


def test_many_classes_are_gathered_a_few_at_a_time(monkeypatch):
    logits, labels = drawn(n=200, k=7)
    whole = HistogramBinning(reading="one_vs_rest").fit(Batch(logits, labels))
    monkeypatch.setattr("featcal.methods.histogram.GATHERED", 450)  # two classes a pass
    parts = HistogramBinning(reading="one_vs_rest").fit(Batch(logits, labels))
    assert torch.equal(whole.values, parts.values)
    assert torch.equal(whole.edges_at, parts.edges_at)


# --- the paper's logits -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def published(shared_file):
    with np.load(shared_file("anchors", "resnet50-cifar10-ce.npz")) as file:
        return {key: torch.from_numpy(file[key]) for key in file.files}


def fitted_on(published, recipe):
    calibrator = parse(recipe).fit(Batch(published["val_logits"], published["val_labels"]))
    logits, labels = published["test_logits"], published["test_labels"]
    return calibrator, mapped(calibrator, logits), labels


@pytest.mark.shared
def test_equal_mass_on_the_papers_logits(published):
    _, found, labels = fitted_on(published, "histogram(smooth=False)")
    assert 100 * metrics.ece(logits=found, labels=labels) == pytest.approx(0.612, abs=5e-4)
    assert 100 * metrics.accuracy(logits=found, labels=labels) == pytest.approx(95.05)


@pytest.mark.shared
def test_equal_width_on_the_papers_logits(published):
    """The published 0.760 keeps confidences of 0 and drops them from the ECE; a bin of two has one.

    Where the prediction is kept such rows get the runner-up's confidence instead.
    """
    from featcal.methods.score_tables import log_odds, steps

    calibrator, found, labels = fitted_on(published, "histogram(edges='width', smooth=False)")
    logits = published["test_logits"]
    raw = steps(log_odds(logits), calibrator.edges_at, calibrator.values).sigmoid().double().numpy()
    right = (logits.argmax(1) == labels).double().numpy()
    counted = raw > 1e-6
    bins = np.clip(np.ceil(raw * 15) - 1, 0, 14).astype(int)
    gaps = np.bincount(bins[counted], (raw - right)[counted], minlength=15)
    assert 100 * np.abs(gaps).sum() / len(raw) == pytest.approx(0.760, abs=5e-4)
    kept = 100 * metrics.ece(logits=found, labels=labels)
    assert kept < 0.760
    assert (~counted).sum() == 4


# --- precision and errors ---------------------------------------------------------------------


def test_half_precision_moves_only_rows_at_an_edge():
    logits, labels = drawn(n=3000)
    calibrator = HistogramBinning().fit(Batch(logits, labels))
    expected = mapped(calibrator, logits)
    found = mapped(calibrator.half(), logits)
    assert found.dtype == torch.float32
    moved = ((found - expected).abs() > 0.01 + 0.01 * expected.abs()).any(1)
    assert calibrator.jumps
    assert moved.float().mean() < 0.005


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bins": 0}, "histogram: bins is 0: give a whole number from 1 up"),
        ({"bins": 2.5}, "histogram: bins is 2.5: give a whole number"),
        ({"bins": True}, "histogram: bins is True"),
        ({"edges": "equal"}, "histogram: edges is 'equal': choose mass or width"),
        ({"reading": "all"}, "histogram: reading is 'all': choose top or one_vs_rest"),
        ({"smooth": 1}, "histogram: smooth is 1: give True or False"),
    ],
)
def test_arguments_are_refused_by_name(arguments, message):
    with pytest.raises(InputError, match=message):
        HistogramBinning(**arguments)


@pytest.mark.parametrize(
    "values",
    [{"values": torch.ones(3)}, {"edges_at": -torch.arange(2.0), "values": torch.ones(3)}],
)
def test_damaged_values_are_refused(values):
    with pytest.raises(InputError, match=r"histogram: .* edges must ascend"):
        HistogramBinning().assign(**values).check()
