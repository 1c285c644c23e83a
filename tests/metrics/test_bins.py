import numpy as np
import pytest
import torch
from hypothesis import given
from metric_cases import binary, cases, labelled_logits, quick, split_cases, top

from featcal.core.checks import InputError
from featcal.metrics import Bins, Predictions, ece, mce, rms_ce

FIELDS = ("count", "confidence", "correct")


def naive(confidence, correct, m):
    """ECE, MCE and RMS-CE by one loop over the bins."""
    edges = np.linspace(0, 1, m + 1)
    total, largest, squares = 0.0, 0.0, 0.0
    for i in range(m):
        inside = (confidence > edges[i]) & (confidence <= edges[i + 1])
        if inside.any():
            gap = abs(confidence[inside].mean() - correct[inside].mean())
            total += inside.mean() * gap
            squares += inside.mean() * gap**2
            largest = max(largest, gap)
    return total, largest, squares**0.5


def same(a, b):
    for name in FIELDS:
        torch.testing.assert_close(getattr(a, name), getattr(b, name), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("bins", [1, 2, 10, 15, 40])
def test_against_a_loop(bins):
    logits, labels = labelled_logits(3, 500, 6)
    confidence, correct, _ = top(logits, labels)
    got = [f(logits=logits, labels=labels, bins=bins) for f in (ece, mce, rms_ce)]
    assert got == pytest.approx(naive(confidence, correct, bins), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("bins", "value", "index"),
    [(15, 1.0, 14), (5, 0.6, 2), (5, 0.8, 3), (15, 12 / 15, 11), (2, 0.5, 0)],
)
def test_edges_belong_to_the_bin_below(dtype, bins, value, index):
    count = Bins.of(*binary([value], [True], dtype), bins=bins).count
    assert count.nonzero().flatten().tolist() == [index]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("bins", "k", "index"), [(15, 15, 0), (5, 5, 0), (15, 5, 2)])
def test_low_edges_need_many_equal_classes(dtype, bins, k, index):
    probs = torch.full((1, k), 1 / k, dtype=dtype)
    count = Bins.of(probs, torch.tensor([0]), bins=bins).count
    assert count.nonzero().flatten().tolist() == [index]


@quick
@given(split_cases())
def test_parts_add_up_to_the_whole(case):
    logits, labels, i, j = case
    a, b, c = (
        Bins.of(logits=logits[part], labels=labels[part])
        for part in (slice(0, i), slice(i, j), slice(j, None))
    )
    whole = Bins.of(logits=logits, labels=labels)
    same(a + b + c, whole)
    same(a + (b + c), whole)
    same(whole + Bins.of(logits=logits[:0], labels=labels[:0]), whole)


@quick
@given(cases(min_rows=1))
def test_rows_may_come_in_any_order(case):
    logits, labels = case
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    same(Bins.of(logits=logits[order], labels=labels[order]), Bins.of(logits=logits, labels=labels))


@quick
@given(cases(min_rows=1))
def test_the_errors_are_ordered(case):
    """Jensen and the mean under the maximum."""
    bins = Bins.of(logits=case[0], labels=case[1])
    assert abs(bins.overconfidence) <= bins.ece + 1e-12
    assert bins.ece <= bins.rms_ce + 1e-12 <= bins.mce + 2e-12 <= 1 + 2e-12


def test_read_once_or_directly():
    logits, labels = labelled_logits(4, 60, 3)
    p = Predictions.of(logits=logits, labels=labels)
    same(Bins.of_predictions(p, bins=7), Bins.of(logits=logits, labels=labels, bins=7))


def test_what_a_diagram_reads():
    bins = Bins.of(*binary([0.75, 0.75, 0.9], [True, False, False]), bins=4)
    assert bins.n == 3
    assert bins.edges.tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert bins.accuracy[2:].tolist() == [0.5, 0.0]
    assert bins.mean_confidence[2:].tolist() == pytest.approx([0.75, 0.9])
    assert bins.gap[2:].tolist() == pytest.approx([0.25, 0.9])
    for values in (bins.accuracy, bins.mean_confidence, bins.gap):
        assert values[:2].isnan().all()
    assert bins.overconfidence == pytest.approx(0.8 - 1 / 3)


def test_underconfidence_is_negative():
    assert Bins.of(*binary([0.6, 0.8], [True, True])).overconfidence == pytest.approx(-0.3)


def test_all_confidences_equal_and_one_row():
    assert ece(*binary([0.8] * 5, [1, 1, 1, 1, 0])) == pytest.approx(0, abs=1e-12)
    assert ece(*binary([0.8], [0])) == mce(*binary([0.8], [0])) == pytest.approx(0.8)


def test_a_single_probability_is_that_of_class_1():
    sure = torch.ones(4, 1)
    assert ece(sure, torch.ones(4, dtype=torch.int64)) == 0
    assert ece(sure, torch.zeros(4, dtype=torch.int64)) == 1
    assert ece(torch.zeros(4), torch.zeros(4, dtype=torch.int64)) == 0


def test_no_rows_have_no_value():
    empty = Bins.of(torch.empty(0, 3), torch.empty(0, dtype=torch.int64))
    assert empty.n == 0
    for name in ("ece", "mce", "rms_ce", "overconfidence"):
        with pytest.raises(InputError, match="no rows"):
            getattr(empty, name)


def test_different_bins_do_not_add():
    probs, labels = binary([0.8], [1])
    with pytest.raises(InputError, match="bins differ, 15 and 10"):
        Bins.of(probs, labels) + Bins.of(probs, labels, bins=10)


@pytest.mark.parametrize("bins", [0, -1, 2.0, "15", True, None])
def test_bins_is_a_positive_integer(bins):
    with pytest.raises(InputError, match="bins is"):
        ece(*binary([0.8], [1]), bins=bins)


def test_a_numpy_integer_is_an_integer():
    assert len(Bins.of(*binary([0.8], [1]), bins=np.int64(4)).count) == 4


def test_alone_a_process_is_the_whole():
    bins = Bins.of(*binary([0.8, 0.6], [1, 0]))
    same(bins.reduced(), bins)
