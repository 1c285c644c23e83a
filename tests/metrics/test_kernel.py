from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from metric_cases import binary, cases, labelled_logits, quick, top

from featcal.core.checks import InputError
from featcal.metrics import Ordered, smooth_ece, smooth_ece_of
from featcal.metrics import ordered as kernel

GRID = np.linspace(0, 1, 4001)


def naive_smoothed(confidence, correct, width):
    """The integral of |r| with a Gaussian and its mirror images, image by image, row by row."""
    images = int(np.ceil(8 * width / 2)) + 1
    r = np.zeros_like(GRID)
    for f, y in zip(confidence, correct, strict=True):
        for j in range(-images, images + 1):
            for centre in (f + 2 * j, -f + 2 * j):
                r += (f - y) * np.exp(-0.5 * ((GRID - centre) / width) ** 2)
    r = np.abs(r) / (len(confidence) * width * np.sqrt(2 * np.pi))
    return (r.sum() - (r[0] + r[-1]) / 2) / (len(GRID) - 1)


def naive_smooth_ece(confidence, correct):
    low, high = 1e-3, 1.0
    for _ in range(26):
        middle = (low + high) / 2
        if naive_smoothed(confidence, correct, middle) > middle:
            low = middle
        else:
            high = middle
    return low


@pytest.mark.parametrize(("seed", "n", "k"), [(0, 12, 3), (1, 1, 2), (2, 10, 10)])
def test_against_the_reflected_kernel(seed, n, k):
    logits, labels = labelled_logits(seed, n, k)
    confidence, correct, _ = top(logits, labels)
    expected = naive_smooth_ece(confidence, correct)
    assert smooth_ece(logits=logits, labels=labels) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("width", [0.01, 0.05, 0.3, 1.0])
def test_every_width_against_the_reflected_kernel(width):
    logits, labels = labelled_logits(3, 25, 3)
    confidence, correct, _ = top(logits, labels)
    residual = kernel._Residual(torch.tensor(confidence), torch.tensor(correct))
    expected = naive_smoothed(confidence, correct, width)
    assert residual.smoothed(width) == pytest.approx(expected, abs=1e-6)


def test_confidence_at_the_border_keeps_its_mass():
    """A kernel that loses mass at 1 would halve this."""
    residual = kernel._Residual(torch.ones(3), torch.zeros(3))
    assert residual.smoothed(0.01) == pytest.approx(1, abs=1e-6)


def test_coefficients_are_the_same_however_they_are_reached():
    logits, labels = labelled_logits(4, 40, 3)
    ordered = Ordered.of(logits=logits, labels=labels)
    at_once, in_steps = (kernel._Residual(ordered.confidence, ordered.correct) for _ in range(2))
    at_once._extend(1000)
    for terms in (2, 5, 70, 71, 300, 1000):
        in_steps._extend(terms)
        assert len(in_steps.coefficients) == terms
    k = torch.arange(1000, dtype=torch.float64)[:, None]
    gap = ordered.confidence - ordered.correct.double()
    direct = 2 * (torch.cos(torch.pi * k * ordered.confidence) * gap).mean(1)
    direct[0] /= 2
    torch.testing.assert_close(at_once.coefficients, direct, atol=1e-11, rtol=0)
    torch.testing.assert_close(in_steps.coefficients, direct, atol=1e-11, rtol=0)


@quick
@given(cases(min_rows=1))
def test_it_is_at_least_the_mean_gap_and_never_rises_with_the_width(case):
    ordered = Ordered.of(logits=case[0], labels=case[1])
    residual = kernel._Residual(ordered.confidence, ordered.correct)
    gap = abs(float(ordered.confidence.double().mean() - ordered.correct.double().mean()))
    values = [residual.smoothed(width) for width in (0.05, 0.1, 0.2, 0.5, 1.0)]
    assert all(a >= b - 1e-9 for a, b in pairwise(values))
    assert values[-1] >= gap - 1e-9
    assert gap - 1e-6 <= smooth_ece_of(ordered) <= 1


def test_order_does_not_matter():
    logits, labels = labelled_logits(5, 100, 4, step=1.0)
    one = smooth_ece(logits=logits, labels=labels)
    assert smooth_ece(logits=logits.flip(0), labels=labels.flip(0)) == pytest.approx(one, abs=1e-9)


def test_sure_and_right_is_zero_and_below_the_smallest_width_a_bound_is_given():
    assert smooth_ece(torch.ones(5, 1), torch.ones(5, dtype=torch.int64)) == 0
    assert smooth_ece(torch.ones(5, 1), torch.zeros(5, dtype=torch.int64)) == pytest.approx(1)
    assert pytest.approx(2.9e-4, abs=1e-5) == kernel.SMALLEST_WIDTH
    assert smooth_ece(*binary([0.9999], [1])) == pytest.approx(1e-4, abs=1e-6)


def test_no_rows_have_no_value():
    with pytest.raises(InputError, match="no rows"):
        smooth_ece(torch.empty(0, 3), torch.empty(0, dtype=torch.int64))
