"""Nearest distances against brute force in numpy."""

import numpy as np
import pytest
import torch

from featcal.core import sample as neighbours
from featcal.core.sample import nearest, on_sphere


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


def test_blocks_smaller_than_the_count(monkeypatch):
    monkeypatch.setattr(neighbours, "BLOCK", 3)
    points, stored = torch.randn(5, 4).double(), torch.randn(11, 4).double()
    np.testing.assert_allclose(nearest(points, stored, 8), brute(points, stored, 8), atol=1e-12)


def test_a_stored_row_is_at_distance_zero_and_never_below():
    stored = on_sphere(torch.rand(300, 50, generator=torch.Generator().manual_seed(1)))
    found = nearest(stored, stored, 2)
    assert (found[:, 0] < 1e-6).all()
    assert (found >= 0).all()
    assert (found[:, 1] > 1e-6).all()


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_rows_of_any_size_get_length_one(scale):
    values = torch.randn(9, 5, generator=torch.Generator().manual_seed(0))
    found = on_sphere(values * scale)
    torch.testing.assert_close(found.norm(dim=1), torch.ones(9))
    torch.testing.assert_close(found, on_sphere(values), rtol=1e-4, atol=1e-6)


def test_rows_of_zeros_stay_and_narrow_types_widen():
    assert torch.equal(on_sphere(torch.zeros(2, 3)), torch.zeros(2, 3))
    assert on_sphere(torch.ones(2, 3).half()).dtype == torch.float32
    assert on_sphere(torch.ones(2, 3).double()).dtype == torch.float64
