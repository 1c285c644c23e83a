"""Levels against numpy and naive loops; ties stay together and the order of rows is forgotten."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from featcal.core.batch import Batch
from featcal.methods.score_tables import Levels, equal_mass, halfway, log_odds, top_levels

few = st.lists(st.tuples(st.integers(0, 12), st.booleans()), min_size=1, max_size=60)


def levels_of(pairs):
    scores, right = zip(*pairs, strict=True)
    return Levels.of(torch.tensor(scores, dtype=torch.float32), torch.tensor(right))


def array(*values):
    return np.array(values, dtype=np.float64)


@given(few)
@settings(max_examples=60, deadline=None)
def test_levels_count_what_a_loop_counts(pairs):
    levels = levels_of(pairs)
    assert levels.at.tolist() == sorted({float(score) for score, _ in pairs})
    for at, rows, hits in zip(levels.at, levels.rows, levels.hits, strict=True):
        mine = [right for score, right in pairs if score == at]
        assert (rows, hits) == (len(mine), sum(mine))


@given(few, st.integers(1, 20))
@settings(max_examples=100, deadline=None)
def test_equal_mass_cuts_at_numpys_quantiles(pairs, bins):
    levels = levels_of(pairs)
    scores = np.array([score for score, _ in pairs], dtype=np.float64)
    edges = [float(np.quantile(scores, j / bins)) for j in range(1, bins)]
    cuts = equal_mass(levels, bins)
    # The same rows are together whether the quantile itself is the edge or a place beside it.
    theirs = np.searchsorted(np.round(edges, 9), np.round(levels.at, 9))
    ours = np.searchsorted(levels.edges(cuts), levels.at)
    joined = [np.flatnonzero(np.diff(bin_of)).tolist() for bin_of in (theirs, ours)]
    assert joined[0] == joined[1]


@given(few, st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_parts_are_whole(pairs, bins):
    levels = levels_of(pairs)
    cuts = equal_mass(levels, bins)
    rows, hits = levels.parts(cuts)
    assert len(rows) == len(cuts) + 1 <= bins
    assert rows.min() > 0
    assert (rows.sum(), hits.sum()) == (len(pairs), sum(right for _, right in pairs))


def test_parts_of_different_scores_are_nearly_equal():
    for n in (15, 16, 97, 1000):
        levels = Levels.of(torch.arange(n), torch.ones(n))
        rows, _ = levels.parts(equal_mass(levels, 15))
        assert len(rows) == 15
        assert rows.max() - rows.min() <= 2


def test_halfway_separates_even_neighbours():
    low = np.float32([1.0, -3.0, 0.0, 16383.999])
    high = np.nextafter(low, np.float32(np.inf))
    edges = halfway(low.astype(np.float64), high.astype(np.float64))
    assert (edges == edges.astype(np.float32)).all()
    assert (low <= edges).all()
    assert (edges < high).all()
    np.testing.assert_array_equal(halfway(array(0, 2), array(1, 5)), [0.5, 3.5])


def test_top_levels_forget_the_order_and_the_batches():
    draw = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(300, 4, generator=draw), torch.arange(300) % 4
    order = torch.randperm(300, generator=draw)
    whole = Batch(logits, labels)
    mixed = whole.rows(order)
    one = top_levels([whole])
    two = top_levels([mixed.rows(slice(0, 1)), mixed.rows(slice(1, 1)), mixed.rows(slice(1, 300))])
    for part in ("at", "rows", "hits"):
        assert np.array_equal(getattr(one, part), getattr(two, part))
    assert one.at.tolist() == log_odds(logits).unique().tolist()
    assert one.hits.sum() == (logits.argmax(1) == labels).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_levels_are_float32_values(dtype):
    levels = Levels.of(torch.tensor([0.1, 0.2], dtype=dtype), torch.tensor([True, False]))
    assert levels.at.dtype == np.float64
    assert levels.at.tolist() == torch.tensor([0.1, 0.2]).tolist()
