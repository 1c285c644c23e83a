"""The hashed sample: bounded, the same in any order and split, and complete where it can be."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from featcal import Batch
from featcal.core.sample import hashed_sample


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
@settings(max_examples=40, deadline=None)
def test_order_and_split_do_not_matter(edges, seed):
    whole = rows(50)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(seed))
    one = hashed_sample([whole], 20, width=3, classes=2)
    two = hashed_sample(cut(whole.rows(order), edges), 20, width=3, classes=2)
    assert torch.equal(one.features, two.features)
    assert torch.equal(one.logits, two.logits)
    assert torch.equal(one.labels, two.labels)
    assert len(one) == 20


def test_all_rows_are_there_where_they_fit():
    whole = rows(30)
    found = hashed_sample([whole], 100, width=3, classes=2)
    assert len(found) == 30
    assert sorted(found.features[:, 0].tolist()) == sorted(whole.features[:, 0].tolist())


def test_rows_stay_together():
    whole = rows(60)
    found = hashed_sample(cut(whole, [13, 40]), 25, width=3, classes=2)
    for row in range(25):
        at = (whole.features == found.features[row]).all(1).nonzero().item()
        assert torch.equal(whole.logits[at].double(), found.logits[row])
        assert whole.labels[at] == found.labels[row]


def test_it_is_close_to_a_random_sample():
    whole = rows(4000, d=8)
    found = hashed_sample([whole], 1000, width=8)
    assert found.logits is None
    assert float(found.features.mean()) == pytest.approx(0, abs=0.05)
    assert float(found.features.std()) == pytest.approx(1, abs=0.05)


def test_copies_of_one_row_are_bounded_and_cut_by_label():
    same = Batch(None, torch.arange(40) % 2, torch.ones(40, 3))
    found = hashed_sample(cut(same, [7, 25]), 10, width=3)
    assert found.labels.tolist() == [0] * 10
    assert torch.equal(found.features, torch.ones(10, 3))


def test_types_are_those_every_process_agrees_on():
    narrow = Batch(torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64), torch.zeros(4, 3).half())
    found = hashed_sample([narrow], 4, width=3, classes=2)
    assert (found.features.dtype, found.logits.dtype) == (torch.float32, torch.float64)


@pytest.mark.parametrize("data", [[], [rows(0)]])
def test_no_rows_have_shapes_all_the_same(data):
    found = hashed_sample(data, 5, width=3, classes=2)
    assert (found.features.shape, found.logits.shape, len(found)) == ((0, 3), (0, 2), 0)
