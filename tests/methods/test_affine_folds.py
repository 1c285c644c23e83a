"""Choosing how firmly a map is held: folds, the path of strengths, and what is said of it."""

import math

import numpy as np
import pytest
import torch
from method_cases import drawn_affine as drawn

from featcal import Batch
from featcal.methods import MatrixScaling, Temperature, VectorScaling
from featcal.methods.affine import STRENGTHS, Fold


def test_the_penalty_is_the_best_of_those_tried():
    logits, labels = drawn(n=2000)
    step = MatrixScaling().fit(Batch(logits, labels)).report.steps[0]
    held_out = step.details["held_out"]
    assert 2 <= len(held_out) <= len(STRENGTHS)
    best = float(min(held_out, key=held_out.get))
    heat = float(Temperature().fit(Batch(logits, labels)).temperature)
    expected = best * heat**2 * 12 / 2000
    assert step.values["off_diagonal"] == pytest.approx(expected, rel=0.01)
    assert step.values["bias"] == 4 / 2000
    assert step.values["ridge"] == 4
    assert f"c = {best:.2g}, the best of {len(held_out)} tried" in step.message


def test_the_ridge_of_vector_scaling_is_chosen_too():
    logits, labels = drawn(n=400)
    step = VectorScaling().fit(Batch(logits, labels)).report.steps[0]
    held_out = step.details["held_out"]
    assert step.values["ridge"] == pytest.approx(
        4 * float(min(held_out, key=held_out.get)), rel=0.01
    )


def test_the_path_ends_where_weaker_penalties_lose():
    draw = np.random.default_rng(0)
    logits = torch.tensor(draw.normal(size=(250, 12)) * 2)
    labels = (logits + torch.tensor(draw.gumbel(size=logits.shape))).argmax(1)
    held_out = MatrixScaling().fit(Batch(logits, labels)).report.steps[0].details["held_out"]
    assert len(held_out) < len(STRENGTHS)
    *before, last = held_out.values()
    assert last > 1.01 * min(before)


def test_folds_share_the_rows_out():
    logits, labels = drawn(n=900)
    data = [Batch(logits[:500], labels[:500]), Batch(logits[500:], labels[500:])]
    sizes = [sum(len(part) for part in Fold(data, fold, held=True)) for fold in range(3)]
    assert sum(sizes) == 900
    assert min(sizes) > 230
    for fold, size in enumerate(sizes):
        assert sum(len(part) for part in Fold(data, fold, held=False)) == 900 - size


def test_a_last_digit_moves_no_row_to_another_fold():
    logits, labels = drawn(n=900, dtype=torch.float32)
    nudged = torch.nextafter(logits, torch.tensor(math.inf))
    parts = [
        torch.cat([part.labels for part in Fold([Batch(values, labels)], 0, held=True)])
        for values in (logits, nudged)
    ]
    assert abs(len(parts[0]) - len(parts[1])) <= 2


def test_too_few_rows_to_choose_by():
    logits = torch.tensor([[2.0, 0.0, 0.0]]).repeat(6, 1)
    found = MatrixScaling().fit(Batch(logits, torch.tensor([0, 0, 0, 1, 1, 2])))
    assert "for want of rows to choose by" in found.report.steps[0].message
    assert torch.isfinite(found.weight).all()


def test_given_penalties_are_not_chosen(monkeypatch):
    monkeypatch.setattr(
        "featcal.methods.affine.choose_strength", lambda *_: pytest.fail("it was chosen")
    )
    logits, labels = drawn()
    VectorScaling(ridge=2).fit(Batch(logits, labels))
    step = MatrixScaling(off_diagonal=0.5).fit(Batch(logits, labels)).report.steps[0]
    assert "as strongly as given" in step.message
    assert step.details["held_out"] == {}
