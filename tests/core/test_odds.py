"""Log-odds against the plain formula in float64, and where the plain formula fails."""

import numpy as np
import pytest
import torch

from featcal.methods.score_tables import FARTHEST, class_log_odds, log_odds, odds_of


def plain(logits):
    p = torch.as_tensor(logits).double().softmax(1)
    return p.log() - torch.log1p(-p)


@pytest.fixture
def logits():
    return torch.randn(200, 6, generator=torch.Generator().manual_seed(0)) * 3


def test_the_plain_formula(logits):
    every = class_log_odds(logits)
    torch.testing.assert_close(every.double(), plain(logits), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(log_odds(logits), every.amax(1), rtol=0, atol=0)


def test_a_probability_that_rounds_to_one_keeps_its_place():
    logits = torch.tensor([[30.0, 0.0], [31.0, 0.0], [90.0, 0.0]])
    assert logits.softmax(1)[:, 0].tolist() == [1.0, 1.0, 1.0]
    assert log_odds(logits).tolist() == [30.0, 31.0, 90.0]
    assert class_log_odds(logits)[:, 1].tolist() == [-30.0, -31.0, -90.0]


def test_two_classes_are_each_others_complement(logits):
    every = class_log_odds(logits[:, :2])
    torch.testing.assert_close(every[:, 0], -every[:, 1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [1e4, 1e30])
def test_huge_logits_end_at_the_farthest_values(logits, scale):
    every = class_log_odds(logits * scale)
    assert every.isfinite().all()
    assert every.abs().max() == FARTHEST
    assert torch.equal(log_odds(logits * scale), every.amax(1))
    assert every.half().isfinite().all()


def test_one_class_is_certain():
    assert log_odds(torch.randn(3, 1)).tolist() == [FARTHEST] * 3
    assert class_log_odds(torch.randn(3, 1)).tolist() == [[FARTHEST]] * 3


def test_equal_logits():
    np.testing.assert_allclose(log_odds(torch.zeros(2, 5)), np.log(0.25), rtol=1e-6)
    np.testing.assert_allclose(class_log_odds(torch.zeros(2, 5)), np.log(0.25), rtol=1e-6)


def test_no_rows():
    assert log_odds(torch.zeros(0, 4)).shape == (0,)
    assert class_log_odds(torch.zeros(0, 4)).shape == (0, 4)


def test_odds_of_probabilities():
    share = np.array([0.1, 0.5, 0.999])
    np.testing.assert_allclose(1 / (1 + np.exp(-odds_of(share))), share, rtol=1e-12)
