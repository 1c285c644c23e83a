"""Metrics over ranks and the smooth error: against loops, over all orders of tied rows."""

import math
from itertools import pairwise, permutations

import numpy as np
import pytest
import torch
from hypothesis import given
from metric_cases import binary, cases, labelled_logits, quick, top
from sklearn.metrics import roc_auc_score

from featcal.metrics import (
    Ordered,
    Predictions,
    adaptive_ece,
    adaptive_ece_of,
    aurc,
    aurc_of,
    auroc,
    auroc_of,
    debiased_ce,
    debiased_ce_of,
    e_aurc,
    ks_error,
    ks_error_of,
    ordered,
    smooth_ece,
    smooth_ece_of,
)

TIED = ([0.6, 0.7, 0.7, 0.7, 0.9], [True, True, False, False, True])
GRID = np.linspace(0, 1, 4001)


def rows(confidence, correct):
    return Ordered.of(*binary(confidence, correct))


def naive_groups(confidence, correct, m):
    order = np.argsort(confidence, kind="stable")
    return zip(np.array_split(confidence[order], m), np.array_split(correct[order], m), strict=True)


def naive_reference(confidence, correct, m):
    """The published adaptive ECE, loop and defects included."""
    n = len(confidence)
    edges = np.interp(np.linspace(0, n, m + 1), np.arange(n), np.sort(confidence))
    total = 0.0
    for low, high in pairwise(edges):
        inside = (confidence > low) & (confidence <= high)
        if inside.any():
            total += inside.mean() * abs(confidence[inside].mean() - correct[inside].mean())
    return total


def naive_aurc(correct_by_confidence):
    """The mean over k of the error among the first k, for one given order."""
    risks = [np.mean(~correct_by_confidence[: k + 1]) for k in range(len(correct_by_confidence))]
    return np.mean(risks)


def naive_smoothed(confidence, correct, width):
    """The integral of |r| with a Gaussian and its mirror images, image by image, row by row."""
    images = int(np.ceil(8 * width / 2)) + 1
    r = np.zeros_like(GRID)
    for f, y in zip(confidence, correct, strict=True):
        for j in range(-images, images + 1):
            for centre in (f + 2 * j, -f + 2 * j):
                r += (f - y) * np.exp(-0.5 * ((GRID - centre) / width) ** 2)
    r = np.abs(r) / (len(confidence) * width * np.sqrt(2 * np.pi))
    return (r.sum() - (r[0] + r[-1]) / 2) / (len(GRID) - 1)


def naive_smooth_ece(confidence, correct):
    low, high = 1e-3, 1.0
    for _ in range(26):
        middle = (low + high) / 2
        if naive_smoothed(confidence, correct, middle) > middle:
            low = middle
        else:
            high = middle
    return low


# --- equal-mass groups and the cumulative error ---------------------------------------------------


@pytest.mark.parametrize(("n", "bins"), [(200, 15), (20, 20), (7, 15), (1, 3)])
def test_adaptive_ece_against_a_loop(n, bins):
    logits, labels = labelled_logits(6, n, 4)
    confidence, correct, _ = top(logits, labels)
    groups = naive_groups(confidence, correct, bins)
    expected = sum(abs(c.sum() - y.sum()) for c, y in groups) / n
    assert adaptive_ece(logits=logits, labels=labels, bins=bins) == pytest.approx(expected)


def test_debiased_ce_against_a_loop():
    logits, labels = labelled_logits(7, 300, 4)
    confidence, correct, _ = top(logits, labels)
    total = 0.0
    for c, y in naive_groups(confidence, correct, 15):
        noise = y.mean() * (1 - y.mean()) / (len(c) - 1)
        total += len(c) / 300 * ((c.mean() - y.mean()) ** 2 - noise)
    assert debiased_ce(logits=logits, labels=labels) == pytest.approx(total**0.5)


def test_groups_of_one_row_add_nothing_to_the_debiased_error():
    assert debiased_ce_of(rows([0.6, 0.9], [False, False]), bins=2) == 0
    assert debiased_ce_of(rows([0.9, 0.9], [False, False]), bins=1) == pytest.approx(0.9)


def test_no_rows_do_not_widen_the_others():
    empty = Ordered.of(torch.empty(0, 2, dtype=torch.float64), torch.empty(0, dtype=torch.int64))
    single = Ordered.of(*binary([0.7], [1], torch.float32))
    assert (empty + single).confidence.dtype == (single + empty).confidence.dtype == torch.float32
    assert single.reduced().confidence.dtype == torch.float32
    assert rows([0.7], [1]).reduced().confidence.dtype == torch.float64


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [1, 100, 1001])
def test_the_published_adaptive_ece_against_a_loop(n, dtype):
    logits, labels = labelled_logits(8, n, 3, dtype=dtype)
    p = Predictions.of(logits=logits, labels=labels)
    expected = naive_reference(p.confidence.numpy().astype(np.float64), p.correct.numpy(), 15)
    got = adaptive_ece(logits=logits, labels=labels, reference=True)
    assert got == pytest.approx(expected, abs=1e-9)


def test_the_published_edges_are_rounded_to_the_type_of_the_confidences():
    """Between neighbours in float32 an edge two thirds of the way is the upper one."""
    low = np.float32(0.75)
    values = torch.tensor([0.25, 0.5, low, np.nextafter(low, np.float32(1))])
    drawn = Ordered(values, torch.tensor([True, False, False, True]))
    assert adaptive_ece_of(drawn, bins=3, reference=True) == pytest.approx((0.5 + 0.5) / 4)
    wide = Ordered(values.double(), drawn.correct)
    assert adaptive_ece_of(wide, bins=3, reference=True) == pytest.approx((0.5 + 0.75 + 0.25) / 4)


def test_the_published_adaptive_ece_drops_all_rows_tied_at_the_minimum():
    tied = rows([0.6] * 4 + [0.9] * 4, [False] * 8)
    assert adaptive_ece_of(tied, bins=2) == pytest.approx(0.75)
    assert adaptive_ece_of(tied, bins=2, reference=True) == pytest.approx(0.45)
    assert adaptive_ece_of(rows([0.8] * 3, [False] * 3), reference=True) == 0


def test_ks_error_at_the_ends_of_runs():
    confidence, correct = map(np.array, TIED)
    ends = [abs((confidence - correct)[confidence <= t].sum()) / 5 for t in np.unique(confidence)]
    assert ks_error(*binary(*TIED)) == pytest.approx(max(ends))


@quick
@given(cases(min_rows=1))
def test_bounds(case):
    drawn = Ordered.of(logits=case[0], labels=case[1])
    gap = abs(float(drawn.confidence.double().mean() - drawn.correct.double().mean()))
    assert gap <= ks_error_of(drawn) + 1e-12 <= 1 + 1e-12
    assert gap <= adaptive_ece_of(drawn) + 1e-12 <= 1 + 1e-12
    assert adaptive_ece_of(drawn, bins=1) == pytest.approx(gap, abs=1e-12)
    residual = ordered._Residual(drawn.confidence, drawn.correct)
    values = [residual.smoothed(width) for width in (0.05, 0.1, 0.2, 0.5, 1.0)]
    assert all(a >= b - 1e-9 for a, b in pairwise(values))  # never rises with the width
    assert values[-1] >= gap - 1e-9
    assert gap - 1e-6 <= smooth_ece_of(drawn) <= 1


@pytest.mark.parametrize("step", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_rows_taken_a_few_at_a_time_give_the_same(monkeypatch, step, dtype):
    """Without ties, with some, and with runs that are longer than what is taken at a time."""
    draw = torch.Generator().manual_seed(0)
    confidence = torch.rand(500, generator=draw)
    confidence = (confidence / step).round() * step if step else confidence
    rows = Ordered(confidence.to(dtype), torch.rand(500, generator=draw) < confidence)
    metrics = (adaptive_ece_of, debiased_ce_of, ks_error_of, smooth_ece_of, auroc_of, aurc_of)
    whole = [metric(rows) for metric in metrics]
    monkeypatch.setattr(ordered, "ROWS", 16)
    assert [metric(rows) for metric in metrics] == pytest.approx(whole, abs=1e-9)
    values, size, right = (torch.cat(part) for part in zip(*rows.runs(), strict=True))
    known, index, count = rows.confidence.unique(return_inverse=True, return_counts=True)
    assert torch.equal(values, known)
    assert torch.equal(size, count)
    assert torch.equal(right, torch.bincount(index[rows.correct], minlength=len(known)))


# --- the smooth error -----------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "n", "k"), [(0, 12, 3), (1, 1, 2), (2, 10, 10)])
def test_smooth_ece_against_the_reflected_kernel(seed, n, k):
    logits, labels = labelled_logits(seed, n, k)
    confidence, correct, _ = top(logits, labels)
    expected = naive_smooth_ece(confidence, correct)
    assert smooth_ece(logits=logits, labels=labels) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("width", [0.01, 0.3, 1.0])
def test_every_width_against_the_reflected_kernel(width):
    logits, labels = labelled_logits(3, 25, 3)
    confidence, correct, _ = top(logits, labels)
    residual = ordered._Residual(torch.tensor(confidence), torch.tensor(correct))
    expected = naive_smoothed(confidence, correct, width)
    assert residual.smoothed(width) == pytest.approx(expected, abs=1e-6)
    # A kernel that loses mass at 1 would halve this.
    sure = ordered._Residual(torch.ones(3), torch.zeros(3))
    assert sure.smoothed(width) == pytest.approx(1, abs=1e-6)


def test_sure_and_right_is_zero_and_below_the_smallest_width_a_bound_is_given():
    assert smooth_ece(torch.ones(5, 1), torch.ones(5, dtype=torch.int64)) == 0
    assert smooth_ece(torch.ones(5, 1), torch.zeros(5, dtype=torch.int64)) == pytest.approx(1)
    assert pytest.approx(2.9e-4, abs=1e-5) == ordered.SMALLEST_WIDTH
    assert smooth_ece(*binary([0.9999], [1])) == pytest.approx(1e-4, abs=1e-6)


@pytest.mark.parametrize(("terms", "intervals"), [(9, 4096), (2049, 4096), (2050, 8192)])
def test_the_area_is_that_of_a_plain_cosine_sum_on_the_grid(terms, intervals):
    """Two intervals or more to the shortest half wave, in powers of two from 4096 up."""
    t, widths = np.linspace(0, 1, intervals + 1), [0.0, 1e-4, 0.1]
    some = {0: 0.05, 1: 0.3, 7: -0.2, terms - 1: 0.4}
    coefficients = torch.zeros(3, terms, dtype=torch.float64)
    coefficients[:, list(some)] = torch.tensor(list(some.values()), dtype=torch.float64)
    expected = []
    for width in widths:
        damped = [c * math.exp(-((math.pi * k * width) ** 2) / 2) for k, c in some.items()]
        curve = sum(c * np.cos(np.pi * k * t) for k, c in zip(some, damped, strict=True))
        expected.append(np.trapezoid(np.abs(curve), t))
    found = ordered.smoothed_area(coefficients, torch.tensor(widths, dtype=torch.float64))
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_the_terms_that_are_left_out_are_negligible_and_no_more_than_those_are_computed():
    for width in (0.001, 0.03, 0.2, 1.0):
        terms = ordered.series_terms(width)
        first_left_out, last_but_one = (
            math.exp(-((math.pi * k * width) ** 2) / 2) for k in (terms, terms - 2)
        )
        assert first_left_out < 1e-12 <= last_but_one
    assert ordered.series_terms(1e-9) == ordered.series_terms(ordered.SMALLEST_WIDTH) == 8193


# --- telling right from wrong ---------------------------------------------------------------------


@pytest.mark.parametrize("step", [None, 3.0])
def test_auroc_against_sklearn(step):
    logits, labels = labelled_logits(13, 300, 3, step=step)
    p = Ordered.of(logits=logits, labels=labels)
    expected = roc_auc_score(p.correct.numpy(), p.confidence.numpy())
    assert auroc(logits=logits, labels=labels) == pytest.approx(expected)


def test_auroc_of_one_kind_is_not_a_number_and_of_equal_confidences_one_half():
    assert math.isnan(auroc(*binary([0.7, 0.8], [1, 1])))
    assert math.isnan(auroc(*binary([0.7, 0.8], [0, 0])))
    assert auroc(*binary([0.7] * 4, [1, 0, 1, 1])) == 0.5


def test_aurc_against_a_loop():
    logits, labels = labelled_logits(14, 80, 4)
    confidence, correct, _ = top(logits, labels)
    expected = naive_aurc(correct[np.argsort(-confidence)])
    assert aurc(logits=logits, labels=labels) == pytest.approx(expected)


def test_aurc_is_the_mean_over_all_orders_of_tied_rows():
    confidence = np.array([0.6, 0.8, 0.8, 0.8, 0.9, 0.9])
    correct = np.array([True, False, True, False, True, False])
    values = []
    for order in permutations(range(6)):
        p = np.array(order)
        values.append(naive_aurc(correct[p][np.argsort(-confidence[p], kind="stable")]))
    assert aurc(*binary(confidence, correct)) == pytest.approx(np.mean(values))


def test_e_aurc_subtracts_the_perfect_order():
    confidence, correct = np.array([0.9, 0.8, 0.7, 0.6]), np.array([True, False, True, True])
    oracle = 0.25 + 0.75 * math.log(0.75)
    assert e_aurc(*binary(confidence, correct)) == pytest.approx(naive_aurc(correct) - oracle)
    many = np.linspace(0.99, 0.51, 20000), [True] * 15000 + [False] * 5000
    assert e_aurc(*binary(*many)) == pytest.approx(0, abs=1e-4)


def test_all_right_and_all_wrong():
    right, wrong = binary([0.7, 0.8], [1, 1]), binary([0.7, 0.8], [0, 0])
    assert aurc(*right) == e_aurc(*right) == e_aurc(*wrong) == 0
    assert aurc(*wrong) == 1
