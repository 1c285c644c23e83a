"""Quantiles of sizes from counted leading bits."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from featcal.analysis.base import Magnitudes

floats = st.floats(-1e6, 1e6, width=32)


@given(st.lists(floats, min_size=1, max_size=60), st.floats(0, 1))
def test_quantiles_lie_within_a_cell_of_the_exact_ones(values, share):
    sizes = np.sort(np.abs(np.float32(values)))
    exact = sizes[max(math.ceil(share * len(sizes)) - 1, 0)]
    found = Magnitudes.of(torch.tensor(values, dtype=torch.float32)).quantile(share)
    assert found <= exact
    assert exact <= found * (1 + 1 / 128) or exact < 1e-37


@given(st.lists(floats, max_size=40), st.lists(floats, max_size=40))
def test_parts_add_up_to_the_whole(one, other):
    parts = [torch.tensor(part, dtype=torch.float32) for part in (one, other)]
    added = sum(map(Magnitudes.of, parts), Magnitudes.none())
    assert torch.equal(added.counts, Magnitudes.of(torch.cat(parts)).counts)


def test_zeros_can_be_left_out():
    found = Magnitudes.of(torch.tensor([0.0, 0.0, 0.0, 1.0, -2.0]))
    assert found.quantile(0.5) == 0
    assert found.quantile(0.5, zeros=False) == 1
    assert found.quantile(1.0) == 2


def test_of_nothing_there_is_no_quantile():
    assert math.isnan(Magnitudes.none().quantile(0.5))
    assert math.isnan(Magnitudes.of(torch.zeros(3)).quantile(0.5, zeros=False))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_precision(dtype):
    assert Magnitudes.of(torch.tensor([[0.5, -1.0]], dtype=dtype)).quantile(1.0) == 1
