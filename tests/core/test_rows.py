"""Rows: bins (lo, hi], confidences set, predictions kept, against plain loops."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from featcal.core.rows import (
    NUDGE,
    bin_edges,
    bin_index,
    keep_prediction,
    predicted,
    with_confidence,
)


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


def rows(n=200, k=5, scale=3.0, seed=0, dtype=torch.float64):
    return torch.tensor(np.random.default_rng(seed).normal(size=(n, k)) * scale, dtype=dtype)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_predicted_is_the_first_of_equal_maxima(dtype):
    logits = rows(dtype=torch.float64).round().to(dtype)
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert predicted(logits).tolist() == expected
    assert predicted(logits).dtype == torch.int64
    assert predicted(logits.requires_grad_()).tolist() == expected


def test_the_top_class_gets_the_confidence_and_the_others_their_shares():
    logits = rows()
    wanted = torch.linspace(0.6, 0.999, 200, dtype=torch.float64)
    probs = with_confidence(logits, wanted).exp()
    before = logits.softmax(1)
    for row in range(200):
        top = int(before[row].argmax())
        assert float(probs[row, top]) == pytest.approx(float(wanted[row]), rel=1e-12)
        for k in range(5):
            if k != top:
                share = before[row, k] / (1 - before[row, top])
                assert float(probs[row, k]) == pytest.approx(
                    float(share * (1 - wanted[row])), rel=1e-9
                )


@given(st.integers(0, 100), st.floats(0, 1), st.sampled_from([torch.float32, torch.float64]))
@settings(max_examples=40, deadline=None)
def test_any_confidence_gives_finite_normalised_rows_of_the_same_prediction(seed, value, dtype):
    logits = rows(n=30, k=4, seed=seed, dtype=dtype)
    found = with_confidence(logits, torch.full((30,), value, dtype=dtype))
    assert found.dtype == dtype
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found.exp().sum(1), torch.ones(30, dtype=dtype), rtol=0, atol=1e-5)
    assert torch.equal(found.argmax(1), logits.argmax(1))


@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=3, max_size=3),
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=3, max_size=3),
)
@settings(max_examples=40, deadline=None)
def test_the_prediction_is_always_kept_and_the_other_logits_untouched(given_row, mapped_row):
    logits, mapped = torch.tensor([given_row]), torch.tensor([mapped_row])
    found = keep_prediction(mapped, logits)
    top = int(logits.argmax(1))
    assert int(found.argmax(1)) == top
    others = [k for k in range(3) if k != top]
    assert torch.equal(found[:, others], mapped[:, others])
    assert torch.isfinite(found).all()
    behind = float(mapped[0, others].max())
    if int(mapped.argmax(1)) != top:  # put just ahead, by no more than rounding needs
        assert 0 < float(found[0, top]) - behind <= 2 * NUDGE * max(abs(behind), NUDGE)


@pytest.mark.parametrize("classes", [4000, 50_257])
def test_the_prediction_stays_among_very_many_nearly_equal_classes(classes):
    logits = torch.randn(20, classes, generator=torch.Generator().manual_seed(0)) * 1e-3
    mapped = with_confidence(logits, torch.zeros(20))
    assert torch.equal(mapped.argmax(1), logits.argmax(1))
