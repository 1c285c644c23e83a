"""Confidences set and predictions kept, against plain loops over rows."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from featcal.core.rows import NUDGE, keep_prediction, predicted, with_confidence


def rows(n=200, k=5, scale=3.0, seed=0, dtype=torch.float64):
    return torch.tensor(np.random.default_rng(seed).normal(size=(n, k)) * scale, dtype=dtype)


# --- predicted ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_predicted_is_the_first_of_equal_maxima(dtype):
    logits = rows(dtype=torch.float64).round().to(dtype)
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert predicted(logits).tolist() == expected
    assert predicted(logits).dtype == torch.int64
    assert predicted(logits.requires_grad_()).tolist() == expected


# --- with_confidence --------------------------------------------------------------------------


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
@settings(max_examples=60, deadline=None)
def test_any_confidence_gives_finite_normalised_rows_of_the_same_prediction(seed, value, dtype):
    logits = rows(n=30, k=4, seed=seed, dtype=dtype)
    found = with_confidence(logits, torch.full((30,), value, dtype=dtype))
    assert found.dtype == dtype
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found.exp().sum(1), torch.ones(30, dtype=dtype), rtol=0, atol=1e-5)
    assert torch.equal(found.argmax(1), logits.argmax(1))


def test_a_confidence_below_the_runner_up_ends_just_above_it():
    logits = torch.tensor([[3.0, 2.0, -9.0]], dtype=torch.float64)
    first, second, _ = with_confidence(logits, torch.tensor([0.01])).exp()[0].tolist()
    share = 1 / (1 + np.exp(-11.0))  # the runner-up's among the others
    assert first == pytest.approx(share / (1 + share), rel=1e-5)
    assert second < first < second * (1 + 1e-5)


def test_two_classes_cannot_go_below_a_half():
    found = with_confidence(torch.tensor([[1.0, 0.0]]), torch.tensor([0.2])).exp()[0]
    assert float(found[0]) == pytest.approx(0.5, abs=1e-5)
    assert found[0] > found[1]


def test_huge_logits_keep_the_shares_of_the_others():
    logits = torch.tensor([[1e4, 1.0, 0.0]], dtype=torch.float64)
    found = with_confidence(logits, torch.tensor([0.7], dtype=torch.float64)).exp()[0].tolist()
    e = float(np.e)
    assert found == pytest.approx([0.7, 0.3 * e / (1 + e), 0.3 / (1 + e)], rel=1e-9)


def test_one_class_is_left_alone():
    logits = torch.tensor([[2.0], [-1.0]])
    assert with_confidence(logits, torch.tensor([0.3, 0.9])) is logits
    assert keep_prediction(logits, logits) is logits


def test_ties_keep_the_first_as_the_prediction():
    logits = torch.tensor([[1.0, 1.0, 0.0], [0.0, 2.0, 2.0]])
    found = with_confidence(logits, torch.tensor([0.1, 0.9]))
    assert found.argmax(1).tolist() == [0, 1]


# --- keep_prediction --------------------------------------------------------------------------


def test_rows_whose_prediction_stands_are_left_to_the_bit():
    logits = rows(dtype=torch.float32)
    mapped = logits / 3
    assert torch.equal(keep_prediction(mapped, logits), mapped)


@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=3, max_size=3),
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=3, max_size=3),
)
@settings(max_examples=200, deadline=None)
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


def test_a_tie_is_broken_for_the_prediction():
    logits = torch.tensor([[0.0, 1.0, 0.5]])
    mapped = torch.tensor([[0.7, 0.7, 0.7]])
    assert keep_prediction(mapped, logits).argmax(1).tolist() == [1]


def test_zero_rows_of_equal_logits_are_moved_by_next_to_nothing():
    found = keep_prediction(torch.zeros(2, 4), torch.zeros(2, 4))
    assert found.argmax(1).tolist() == [0, 0]
    assert float(found.abs().max()) < 1e-11


@pytest.mark.parametrize("classes", [4000, 5000, 10_000, 50_257])
def test_the_prediction_stays_among_very_many_nearly_equal_classes(classes):
    logits = torch.randn(100, classes, generator=torch.Generator().manual_seed(0)) * 1e-3
    mapped = with_confidence(logits, torch.zeros(100))
    assert torch.equal(mapped.argmax(1), logits.argmax(1))


def test_keep_prediction_leaves_what_agrees_to_the_bit():
    logits = torch.tensor([[1.0, 1.0, 0.0], [2.0, 3.0, 3.0]])
    assert torch.equal(keep_prediction(logits, logits), logits)
