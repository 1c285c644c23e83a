import numpy as np
import pytest
import torch
from hypothesis import given
from metric_cases import cases, columns, labelled_logits, quick, split_cases, top

from featcal.core.checks import InputError
from featcal.metrics import ClassBins, Predictions, classwise_ece

FIELDS = ("count", "probability", "hits")


def naive(probs, labels, m):
    """Sums by three loops: rows, classes, bins."""
    n, k = probs.shape
    edges = np.linspace(0, 1, m + 1)
    sums = np.zeros((3, k, m))
    for i in range(n):
        for c in range(k):
            b = max(0, int(np.searchsorted(edges, probs[i, c], side="left")) - 1)
            sums[:, c, b] += (1, probs[i, c], labels[i] == c)
    return sums


def same(a, b):
    for name in FIELDS:
        torch.testing.assert_close(getattr(a, name), getattr(b, name), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("bins", [1, 2, 15])
def test_against_loops(bins):
    logits, labels = labelled_logits(5, 200, 4)
    sums = naive(top(logits, labels)[2], labels.numpy(), bins)
    got = ClassBins.of(logits=logits, labels=labels, bins=bins)
    for name, expected in zip(FIELDS, sums, strict=True):
        np.testing.assert_allclose(getattr(got, name).numpy(), expected, atol=1e-10)
    by_class = np.abs(sums[1] - sums[2]).sum(1) / 200
    np.testing.assert_allclose(got.by_class.numpy(), by_class, atol=1e-12)
    assert classwise_ece(logits=logits, labels=labels, bins=bins) == pytest.approx(by_class.mean())


def test_a_probability_of_zero_is_in_the_first_bin():
    got = ClassBins.of(torch.tensor([[1.0, 0.0]]), torch.tensor([1]), bins=4)
    assert got.count.tolist() == [[0, 0, 0, 1], [1, 0, 0, 0]]
    assert got.hits.tolist() == [[0, 0, 0, 0], [1, 0, 0, 0]]
    assert got.ece == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_edges_belong_to_the_bin_below(dtype):
    probs = torch.full((1, 5), 0.2, dtype=dtype)
    assert ClassBins.of(probs, torch.tensor([3]), bins=5).count[:, 0].tolist() == [1] * 5
    probs = torch.full((1, 15), 1 / 15, dtype=dtype)
    assert ClassBins.of(probs, torch.tensor([3])).count[:, 0].tolist() == [1] * 15


def test_absent_classes_count():
    """The mean is over the columns, also those behind the largest label."""
    probs = torch.tensor([[0.75, 0.25, 0.0, 0.0]])
    assert classwise_ece(probs, torch.tensor([0])) == pytest.approx((0.25 + 0.25) / 4)


@quick
@given(split_cases())
def test_parts_add_up_to_the_whole(case):
    logits, labels, i, j = case
    a, b, c = (
        ClassBins.of(logits=logits[part], labels=labels[part])
        for part in (slice(0, i), slice(i, j), slice(j, None))
    )
    whole = ClassBins.of(logits=logits, labels=labels)
    same(a + b + c, whole)
    same(a + (b + c), whole)
    same(whole + ClassBins.of(logits=logits[:0], labels=labels[:0]), whole)


@quick
@given(cases(min_rows=1))
def test_order_does_not_matter_and_every_class_counts_every_row(case):
    logits, labels = case
    whole = ClassBins.of(logits=logits, labels=labels)
    same(ClassBins.of(logits=logits.flip(0), labels=labels.flip(0)), whole)
    assert whole.count.sum(1).tolist() == [len(labels)] * columns(logits).shape[1]
    assert whole.hits.sum() == len(labels) == whole.n


def test_read_once_or_directly():
    logits, labels = labelled_logits(4, 60, 3)
    p = Predictions.of(logits=logits, labels=labels)
    same(ClassBins.of_predictions(p, bins=7), ClassBins.of(logits=logits, labels=labels, bins=7))


def test_a_single_probability_fills_the_bins_of_both_classes():
    got = ClassBins.of(torch.tensor([[0.9], [0.3]]), torch.tensor([1, 1]), bins=4)
    assert got.count.tolist() == [[1, 0, 1, 0], [0, 1, 0, 1]]
    assert got.hits.tolist() == [[0, 0, 0, 0], [0, 1, 0, 1]]
    assert got.by_class.tolist() == pytest.approx([0.4, 0.4])
    assert classwise_ece(torch.ones(4, 1), torch.ones(4, dtype=torch.int64)) == 0
    assert classwise_ece(torch.ones(4, 1), torch.zeros(4, dtype=torch.int64)) == 1


def test_no_rows_have_no_value():
    empty = ClassBins.of(torch.empty(0, 3), torch.empty(0, dtype=torch.int64))
    assert empty.count.shape == (3, 15)
    with pytest.raises(InputError, match="no rows"):
        empty.ece  # noqa: B018


def test_different_classes_or_bins_do_not_add():
    two, three = torch.full((1, 2), 1 / 2), torch.full((1, 3), 1 / 3)
    zero = torch.tensor([0])
    with pytest.raises(InputError, match=r"\(classes, bins\) differ, \(2, 15\) and \(3, 15\)"):
        ClassBins.of(two, zero) + ClassBins.of(three, zero)


def test_alone_a_process_is_the_whole():
    logits, labels = labelled_logits(4, 20, 3)
    whole = ClassBins.of(logits=logits, labels=labels)
    same(whole.reduced(), whole)
