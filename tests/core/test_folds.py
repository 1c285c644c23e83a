"""Rows told apart by content: the same fold wherever and whenever a row turns up."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from featcal import Batch
from featcal.core.sample import fold_of, row_hash


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


@pytest.mark.parametrize("folds", [2, 3, 5, 10])
def test_folds_are_in_range_and_nearly_equal(folds):
    counts = torch.bincount(fold_of(batch(), folds), minlength=folds)
    assert len(counts) == folds
    expected = 3000 / folds
    assert ((counts - expected).abs() < 5 * expected**0.5).all()


@given(st.integers(0, 50), st.integers(2, 12))
@settings(max_examples=30, deadline=None)
def test_order_and_split_do_not_matter(seed, folds):
    data = batch(n=64, seed=seed)
    whole = fold_of(data, folds)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(fold_of(data.rows(order), folds), whole[order])
    cut = [fold_of(data.rows(slice(a, b)), folds) for a, b in ((0, 1), (1, 1), (1, 64))]
    assert torch.equal(torch.cat(cut), whole)


def test_equal_rows_stay_together():
    data = batch(n=20)
    twice = Batch(data.logits.repeat(2, 1), data.labels.repeat(2))
    found = fold_of(twice, 5)
    assert torch.equal(found[:20], found[20:])


def test_rows_of_a_network_that_rounds_to_few_values_still_spread():
    """Logits on a coarse grid, as half precision gives: the low bits are all alike."""
    coarse = (batch(n=4000).logits * 4).round() / 4
    counts = torch.bincount(fold_of(Batch(coarse, torch.zeros(4000).long()), 4), minlength=4)
    assert (counts > 500).all()


def test_the_precision_of_storage_does_not_matter_where_values_agree():
    logits = (batch(n=100).logits * 8).round() / 8  # exact in half precision too
    for dtype in (torch.float16, torch.float64):
        assert torch.equal(row_hash(logits.to(dtype)), row_hash(logits))


def test_no_rows_have_no_folds():
    assert fold_of(batch(n=0), 4).tolist() == []


def test_the_last_digit_of_a_logit_moves_hardly_a_row():
    logits = torch.randn(4000, 20, generator=torch.Generator().manual_seed(0)) * 4
    near = logits * (1 + torch.finfo(torch.float32).eps)
    labels = torch.zeros(4000, dtype=torch.int64)
    moved = fold_of(Batch(logits, labels), 5) != fold_of(Batch(near, labels), 5)
    assert moved.double().mean() < 0.005
