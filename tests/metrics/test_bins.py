"""Bins and class bins against loops, and where their edges lie."""

import numpy as np
import pytest
import torch
from hypothesis import given
from metric_cases import binary, cases, columns, labelled_logits, quick, top
from sklearn.metrics import accuracy_score, log_loss

from featcal.core.batch import Batch, bin_index
from featcal.metrics import (
    Bins,
    ClassBins,
    accuracy,
    brier,
    classwise_ece,
    ece,
    mce,
    nll,
    rms_ce,
)


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


def naive_class_sums(probs, labels, m):
    """Count, probability and hits by three loops: rows, classes, bins."""
    n, k = probs.shape
    edges = np.linspace(0, 1, m + 1)
    sums = np.zeros((3, k, m))
    for i in range(n):
        for c in range(k):
            b = max(0, int(np.searchsorted(edges, probs[i, c], side="left")) - 1)
            sums[:, c, b] += (1, probs[i, c], labels[i] == c)
    return sums


@pytest.mark.parametrize("bins", [1, 2, 10, 15, 40])
def test_errors_against_a_loop(bins):
    logits, labels = labelled_logits(3, 500, 6)
    confidence, correct, _ = top(logits, labels)
    got = [f(logits=logits, labels=labels, bins=bins) for f in (ece, mce, rms_ce)]
    assert got == pytest.approx(naive(confidence, correct, bins), abs=1e-12)


@pytest.mark.parametrize("bins", [1, 2, 15])
def test_class_bins_against_loops(bins):
    logits, labels = labelled_logits(5, 200, 4)
    sums = naive_class_sums(top(logits, labels)[2], labels.numpy(), bins)
    got = ClassBins.of(logits=logits, labels=labels, bins=bins)
    for name, expected in zip(("count", "probability", "hits"), sums, strict=True):
        np.testing.assert_allclose(getattr(got, name).numpy(), expected, atol=1e-10)
    by_class = np.abs(sums[1] - sums[2]).sum(1) / 200
    np.testing.assert_allclose(got.by_class.numpy(), by_class, atol=1e-12)
    assert classwise_ece(logits=logits, labels=labels, bins=bins) == pytest.approx(by_class.mean())


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
    probs, label = torch.full((1, k), 1 / k, dtype=dtype), torch.tensor([0])
    assert Bins.of(probs, label, bins=bins).count.nonzero().flatten().tolist() == [index]
    assert ClassBins.of(probs, label, bins=bins).count[:, index].tolist() == [1] * k


def test_a_probability_of_zero_is_in_the_first_bin():
    got = ClassBins.of(torch.tensor([[1.0, 0.0]]), torch.tensor([1]), bins=4)
    assert got.count.tolist() == [[0, 0, 0, 1], [1, 0, 0, 0]]
    assert got.hits.tolist() == [[0, 0, 0, 0], [1, 0, 0, 0]]
    assert got.ece == 1


@quick
@given(cases(min_rows=1))
def test_the_errors_are_ordered_and_every_class_counts_every_row(case):
    """Jensen and the mean under the maximum."""
    logits, labels = case
    bins = Bins.of(logits=logits, labels=labels)
    assert abs(bins.overconfidence) <= bins.ece + 1e-12
    assert bins.ece <= bins.rms_ce + 1e-12 <= bins.mce + 2e-12 <= 1 + 2e-12
    classes = ClassBins.of(logits=logits, labels=labels)
    assert classes.count.sum(1).tolist() == [len(labels)] * columns(logits).shape[1]
    assert classes.hits.sum() == len(labels) == classes.n


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
    assert Bins.of(*binary([0.6, 0.8], [True, True])).overconfidence == pytest.approx(-0.3)


def test_proper_scores_against_sklearn():
    logits, labels = labelled_logits(9, 300, 5)
    _, _, probs = top(logits, labels)
    given_logits = {"logits": logits, "labels": labels}
    assert nll(**given_logits) == pytest.approx(log_loss(labels, probs, labels=range(5)))
    assert accuracy(**given_logits) == accuracy_score(labels, probs.argmax(1))
    one_hot = np.eye(5)[labels.numpy()]
    assert brier(**given_logits) == pytest.approx(((probs - one_hot) ** 2).sum(1).mean())


def test_a_certain_mistake():
    probs, labels = torch.tensor([[1.0, 0.0]], dtype=torch.float64), torch.tensor([1])
    assert nll(probs, labels) == pytest.approx(-np.log(1e-12))
    assert (brier(probs, labels), accuracy(probs, labels)) == (2, 0)
    assert nll(logits=torch.tensor([[900.0, 0.0]]), labels=labels) == 900


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("m", [3, 5, 7, 10, 15, 20, 49])
def test_shares_of_votes_lie_in_the_bin_they_end(m, dtype):
    """k of m votes are the upper end of bin k, which is right-closed, in either precision."""
    votes = torch.tensor([k / m for k in range(1, m + 1)], dtype=dtype)
    assert bin_index(votes, m).tolist() == list(range(m))
    above = votes[:-1] * (1 + 16 * torch.finfo(dtype).eps)
    assert bin_index(above, m).tolist() == list(range(1, m))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("k", [2, 3, 10])
@pytest.mark.parametrize("m", [10, 15, 20, 30])
def test_shares_of_votes_stay_there_when_their_logarithms_are_the_logits(m, k, dtype):
    """Files and forests give probabilities, which are kept as logits: a softmax rounds them."""
    draw = np.random.default_rng(0)
    votes = torch.arange(m // 2 + 1, m, dtype=dtype).repeat_interleave(40) / m
    rest = torch.tensor(draw.dirichlet(np.ones(k - 1), len(votes)), dtype=dtype)
    probs = torch.cat([votes[:, None], (1 - votes)[:, None] * rest], 1)
    labels = torch.zeros(len(votes), dtype=torch.int64)
    given, kept = Bins.of(probs, labels, bins=m), Batch.from_probs(probs, labels).logits
    assert Bins.of(logits=kept, labels=labels, bins=m).count.tolist() == given.count.tolist()
    assert set(given.count.tolist()) == {0, 40}
