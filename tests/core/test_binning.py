"""The one binning: (lo, hi], 0 in the first bin, 1 in the last."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from featcal.core.rows import bin_edges, bin_index, bin_sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bins", [1, 2, 5, 10, 15, 100])
def test_an_edge_belongs_to_the_bin_below_it(bins, dtype):
    edges = bin_edges(bins, dtype)
    assert bin_index(edges, bins).tolist() == [0, *range(bins)]
    above = torch.nextafter(edges[:-1], torch.ones((), dtype=dtype))
    assert bin_index(above, bins).tolist() == list(range(bins))


@given(st.floats(0, 1), st.integers(1, 50))
def test_the_bin_is_the_naive_one(confidence, bins):
    found = int(bin_index(torch.tensor([confidence], dtype=torch.float64), bins)[0])
    exact = confidence * bins
    if abs(exact - round(exact)) > 1e-9:  # away from the edges there is no doubt
        assert found == max(math.ceil(exact) - 1, 0)


def test_sums_by_hand():
    confidence = torch.tensor([0.1, 0.2, 0.21, 1.0, 0.0])
    correct = torch.tensor([True, False, True, True, False])
    count, conf, right = bin_sums(confidence, correct, 5).tolist()
    assert count == [3, 1, 0, 0, 1]
    assert conf == pytest.approx([0.3, 0.21, 0, 0, 1.0])
    assert right == [1, 1, 0, 0, 1]


def test_sums_of_nothing_are_zero():
    sums = bin_sums(torch.zeros(0), torch.zeros(0, dtype=torch.bool), 7)
    assert torch.equal(sums, torch.zeros(3, 7, dtype=torch.float64))
