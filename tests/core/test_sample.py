"""Rows told apart by content, in folds and samples, and the nearest of stored rows."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from featcal import Batch
from featcal.core.sample import (
    Folds,
    fold_of,
    hashed_sample,
    row_hash,
    size_counts,
    size_quantile,
)
from featcal.methods.neighbours import nearest, on_sphere


def batch(n=3000, k=7, seed=0):
    logits = torch.tensor(np.random.default_rng(seed).normal(size=(n, k)), dtype=torch.float32)
    return Batch(logits, torch.zeros(n, dtype=torch.long))


def naive_hash(row):
    """The same mix in Python's integers: bits summed, multiplied, the high half of 64 bits."""
    total = sum(int(x) for x in np.asarray(row, np.float32).view(np.int32))
    return ((total * -7046029254386353131) % 2**64) >> 32


def test_the_hash_is_what_plain_integers_give():
    logits = batch(n=50).logits
    assert row_hash(logits).tolist() == [naive_hash(row) for row in logits.numpy()]


def test_folds_by_content_are_of_nearly_one_size():
    sizes = Folds([batch()], 5).sizes()
    assert sum(sizes) == 3000
    assert max(sizes) - min(sizes) < 150  # three standard deviations


@given(st.integers(0, 50), st.integers(2, 12))
@settings(max_examples=15, deadline=None)
def test_folds_know_neither_order_nor_split(seed, folds):
    data = batch(n=64, seed=seed)
    whole = fold_of(data, folds)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(fold_of(data.rows(order), folds), whole[order])
    cut = [fold_of(data.rows(slice(a, b)), folds) for a, b in ((0, 1), (1, 1), (1, 64))]
    assert torch.equal(torch.cat(cut), whole)


@given(st.integers(2, 8), st.integers(1, 30), st.lists(st.integers(0, 2**40), min_size=8))
@settings(max_examples=20, deadline=None)
def test_a_sample_is_in_one_fold_alone(folds, share, numbers):
    """By content and by a permutation; with row folds a sample of 40 rows is in nearly all."""
    groups = torch.tensor(sorted(set(numbers))).repeat_interleave(40)
    logits = batch(len(groups)).logits
    data = Batch(logits, torch.zeros(len(groups), dtype=torch.long), groups=groups)
    by_content = fold_of(data, folds, share)
    assert int(by_content.max()) <= folds
    parts = [data.rows(slice(0, 100)), data.rows(slice(100, None))]
    shuffled = Folds.shuffled(parts, folds, len(data), seed=3, grouped=True)
    dealt = torch.cat([fold for _, fold in shuffled])
    for sample in set(numbers):
        kept = by_content[groups == sample]
        assert len(set(kept[kept < folds].tolist())) <= 1
        assert len(set(dealt[groups == sample].tolist())) == 1
    sizes = [size // 40 for size in shuffled.sizes()]
    assert max(sizes) - min(sizes) <= 1
    if share == 1:
        assert int(by_content.max()) < folds


def test_the_last_digit_of_a_logit_moves_hardly_a_row():
    logits = torch.randn(4000, 20, generator=torch.Generator().manual_seed(0)) * 4
    near = logits * (1 + torch.finfo(torch.float32).eps)
    labels = torch.zeros(4000, dtype=torch.int64)
    moved = fold_of(Batch(logits, labels), 5) != fold_of(Batch(near, labels), 5)
    assert moved.double().mean() < 0.005


def rows(n, d=3, k=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return Batch(
        torch.randn(n, k, generator=generator),
        torch.randint(k, (n,), generator=generator),
        torch.randn(n, d, generator=generator),
    )


def cut(batch, edges):
    edges = [0, *sorted(edges), len(batch)]
    return [batch.rows(slice(a, b)) for a, b in pairwise(edges)]


@given(st.lists(st.integers(0, 50), max_size=4), st.integers(0, 5))
@settings(max_examples=20, deadline=None)
def test_order_and_split_do_not_matter(edges, seed):
    whole = rows(50)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(seed))
    one = hashed_sample([whole], 20, width=3, classes=2)
    two = hashed_sample(cut(whole.rows(order), edges), 20, width=3, classes=2)
    assert torch.equal(one.features, two.features)
    assert torch.equal(one.logits, two.logits)
    assert torch.equal(one.labels, two.labels)
    assert len(one) == 20


def test_rows_stay_together():
    whole = rows(60)
    found = hashed_sample(cut(whole, [13, 40]), 25, width=3, classes=2)
    for row in range(25):
        at = (whole.features == found.features[row]).all(1).nonzero().item()
        assert torch.equal(whole.logits[at].double(), found.logits[row])
        assert whole.labels[at] == found.labels[row]


@pytest.mark.parametrize("data", [[], [rows(0)]])
def test_no_rows_have_shapes_all_the_same(data):
    found = hashed_sample(data, 5, width=3, classes=2)
    assert (found.features.shape, found.logits.shape, len(found)) == ((0, 3), (0, 2), 0)


def test_dealt_folds_are_those_of_the_seed_in_whatever_parts_the_rows_come():
    whole = rows(90)

    def dealt(data, *args, **kwargs):
        return torch.cat([fold for _, fold in Folds.shuffled(data, *args, **kwargs)])

    one = dealt([whole], 4, 90, seed=3)
    assert torch.equal(dealt(cut(whole, [1, 1, 40]), 4, 90, seed=3), one)
    first, second = cut(whole, [40])
    apart = [dealt([first], 4, 90, seed=3), dealt([second], 4, 90, seed=3, first_row=40)]
    assert torch.equal(torch.cat(apart), one)
    order = np.random.default_rng((3, 4)).permutation(90)
    assert one[order].tolist() == [place % 4 for place in range(90)]


def test_a_sample_takes_the_lowest_hashes_and_labels_decide_between_equal_rows():
    whole = rows(50)
    found = hashed_sample([whole], 20, width=3)
    assert found.logits is None
    order = row_hash(whole.features).argsort()[:20]
    assert torch.equal(found.features, whole.features[order])
    same = Batch(None, torch.tensor([2, 0, 1] * 3), torch.ones(9, 3))
    assert hashed_sample(cut(same, [2, 5]), 5, width=3).labels.tolist() == [0, 0, 0, 1, 1]


def test_a_quantile_of_sizes_is_that_of_numpy_to_seven_bits_and_of_no_values_not_a_number():
    values = torch.randn(501, 3, generator=torch.Generator().manual_seed(0)).relu()
    counts = size_counts(-values)
    assert counts.shape == (2**15,)
    for share in (0.6, 0.9, 0.999):
        exact = np.quantile(values.numpy(), share, method="inverted_cdf")
        assert size_quantile(counts, share) == pytest.approx(exact, rel=1 / 128)
    assert size_quantile(counts, 0.1) == 0 < size_quantile(counts, 0.1, zeros=False)
    assert np.isnan(size_quantile(size_counts(torch.zeros(9)), 0.5, zeros=False))


def brute(points, stored, count):
    gaps = np.asarray(points, float)[:, None] - np.asarray(stored, float)[None]
    return np.sort((gaps**2).sum(2), 1)[:, :count]


@pytest.mark.parametrize("stored_rows", [7, 1024, 2500])
@pytest.mark.parametrize("count", [1, 5])
def test_brute_force_agrees(stored_rows, count):
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(40, 6, generator=generator, dtype=torch.float64)
    stored = torch.randn(stored_rows, 6, generator=generator, dtype=torch.float64)
    found = nearest(points, stored, count)
    np.testing.assert_allclose(found, brute(points, stored, count), atol=1e-12)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_rows_of_any_size_get_length_one(scale):
    values = torch.randn(9, 5, generator=torch.Generator().manual_seed(0))
    found = on_sphere(values * scale)
    torch.testing.assert_close(found.norm(dim=1), torch.ones(9))
    torch.testing.assert_close(found, on_sphere(values), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("by_content", [True, False])
def test_every_row_is_held_out_once(by_content):
    whole = rows(90)
    parts = cut(whole, [1, 1, 40])
    folds = Folds(parts, 4) if by_content else Folds.shuffled(parts, 4, 90, seed=3)
    held = []
    for fold in range(4):
        only, without = (
            torch.cat([part.features for part in view])
            for view in (folds.only(fold), folds.without(fold))
        )
        assert len(only) == folds.sizes()[fold]
        assert sorted(torch.cat([only, without])[:, 0].tolist()) == sorted(
            whole.features[:, 0].tolist()
        )
        held += only[:, 0].tolist()
    assert sorted(held) == sorted(whole.features[:, 0].tolist())
    assert by_content or folds.sizes() == [23, 23, 22, 22]
