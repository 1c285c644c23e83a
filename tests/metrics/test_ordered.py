from itertools import pairwise, permutations

import numpy as np
import pytest
import torch
from hypothesis import given
from metric_cases import binary, cases, labelled_logits, quick, split_cases, top

from featcal.core.checks import InputError
from featcal.metrics import (
    Ordered,
    Predictions,
    adaptive_ece,
    adaptive_ece_of,
    debiased_ce,
    debiased_ce_of,
    ks_error,
    ks_error_of,
)

TIED = ([0.6, 0.7, 0.7, 0.7, 0.9], [True, True, False, False, True])


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


@pytest.mark.parametrize(("n", "bins"), [(200, 15), (200, 7), (20, 20), (7, 15), (1, 3)])
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
        total += (
            len(c) / 300 * ((c.mean() - y.mean()) ** 2 - y.mean() * (1 - y.mean()) / (len(c) - 1))
        )
    assert debiased_ce(logits=logits, labels=labels) == pytest.approx(total**0.5)


def test_debiased_ce_of_a_calibrated_model_is_about_zero_where_the_plain_one_is_not():
    rng = np.random.default_rng(0)
    confidence = rng.uniform(0.5, 1, 3000)
    ordered = rows(confidence, rng.uniform(size=3000) < confidence)
    count, conf, correct = ordered.groups(bins=300)
    plain = float((count * ((conf - correct) / count).square()).sum() / 3000) ** 0.5
    assert plain > 0.1
    assert debiased_ce_of(ordered, bins=300) < 0.05


def test_groups_of_one_row_add_nothing_to_the_debiased_error():
    assert debiased_ce_of(rows([0.6, 0.9], [False, False]), bins=2) == 0
    assert debiased_ce_of(rows([0.9, 0.9], [False, False]), bins=1) == pytest.approx(0.9)


def test_tied_rows_count_with_their_mean_over_all_orders():
    confidence, correct = map(np.array, TIED)
    sums = np.zeros(2)
    orders = list(permutations(range(5)))
    for order in orders:
        p = np.array(order)
        sums += [y.sum() for _, y in naive_groups(confidence[p], correct[p], 2)]
    np.testing.assert_allclose(rows(*TIED).groups(bins=2)[2].numpy(), sums / len(orders))


@quick
@given(cases(min_rows=1))
def test_the_order_of_rows_changes_no_bit(case):
    logits, labels = case
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    one = Ordered.of(logits=logits, labels=labels)
    two = Ordered.of(logits=logits[order], labels=labels[order])
    for metric in (adaptive_ece_of, debiased_ce_of, ks_error_of):
        assert metric(one) == metric(two)
    assert adaptive_ece_of(one, reference=True) == pytest.approx(
        adaptive_ece_of(two, reference=True)
    )


@quick
@given(split_cases())
def test_parts_add_up_to_the_whole(case):
    logits, labels, i, j = case
    a, b, c = (
        Ordered.of(logits=logits[part], labels=labels[part])
        for part in (slice(0, i), slice(i, j), slice(j, None))
    )
    whole = Ordered.of(logits=logits, labels=labels)
    for total in (a + b + c, a + (b + c)):
        assert torch.equal(total.confidence, whole.confidence)
        assert torch.equal(total.correct, whole.correct)


def test_no_rows_do_not_widen_the_others():
    empty = Ordered.of(torch.empty(0, 2, dtype=torch.float64), torch.empty(0, dtype=torch.int64))
    single = Ordered.of(*binary([0.7], [1], torch.float32))
    assert (empty + single).confidence.dtype == (single + empty).confidence.dtype == torch.float32


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [1, 5, 100, 1001])
def test_the_reference_variant_against_a_loop(n, dtype):
    logits, labels = labelled_logits(8, n, 3, dtype=dtype)
    p = Predictions.of(logits=logits, labels=labels)
    expected = naive_reference(p.confidence.numpy().astype(np.float64), p.correct.numpy(), 15)
    assert adaptive_ece(logits=logits, labels=labels, reference=True) == pytest.approx(
        expected, abs=1e-9
    )


def test_the_reference_variant_drops_all_rows_tied_at_the_minimum():
    ordered = rows([0.6] * 4 + [0.9] * 4, [False] * 8)
    assert adaptive_ece_of(ordered, bins=2) == pytest.approx(0.75)
    assert adaptive_ece_of(ordered, bins=2, reference=True) == pytest.approx(0.45)
    assert adaptive_ece_of(rows([0.8] * 3, [False] * 3), reference=True) == 0


def test_ks_error_at_the_ends_of_runs():
    confidence, correct = map(np.array, TIED)
    ends = [abs((confidence - correct)[confidence <= t].sum()) / 5 for t in np.unique(confidence)]
    assert ks_error(*binary(*TIED)) == pytest.approx(max(ends))


@quick
@given(cases(min_rows=1))
def test_bounds(case):
    ordered = Ordered.of(logits=case[0], labels=case[1])
    gap = float(ordered.confidence.double().mean() - ordered.correct.double().mean())
    assert abs(gap) <= ks_error_of(ordered) + 1e-12 <= 1 + 1e-12
    assert abs(gap) <= adaptive_ece_of(ordered) + 1e-12 <= 1 + 1e-12
    assert adaptive_ece_of(ordered, bins=1) == pytest.approx(abs(gap), abs=1e-12)


def test_all_confidences_equal():
    ordered = rows([0.75] * 8, [True] * 6 + [False] * 2)
    assert adaptive_ece_of(ordered) == ks_error_of(ordered) == debiased_ce_of(ordered) == 0


def test_no_rows_have_no_value():
    empty = Ordered.of(torch.empty(0, 3), torch.empty(0, dtype=torch.int64))
    assert len(empty) == 0
    assert empty.groups(bins=3).sum() == 0
    for metric in (adaptive_ece_of, debiased_ce_of, ks_error_of):
        with pytest.raises(InputError, match="no rows"):
            metric(empty)


@pytest.mark.parametrize("reference", [False, True])
def test_bins_are_checked(reference):
    with pytest.raises(InputError, match="bins is 0"):
        adaptive_ece(*binary(*TIED), bins=0, reference=reference)


def test_alone_a_process_is_the_whole():
    for dtype in (torch.float32, torch.float64):
        ordered = Ordered.of(*binary(*TIED, dtype))
        whole = ordered.reduced()
        assert whole.confidence.dtype == dtype
        assert torch.equal(whole.confidence, ordered.confidence)
        assert torch.equal(whole.correct, ordered.correct)
