"""The sentences under the figures: both ways, undecided, and where there is nothing to say."""

import math
from dataclasses import replace

import pytest
import torch

from featcal import parse
from featcal.analysis import (
    ChangedPredictions,
    ClipSweep,
    ConfidentCounts,
    EntropyGrowth,
    FeatureValues,
    GroupCalibration,
    Groups,
    UnitMeans,
)
from featcal.analysis.normal import NormalFit
from featcal.page import sentences


def groups(wrong=40, right=60):
    right_rows = torch.tensor([False] * wrong + [True] * right)
    return Groups(0.8, torch.full((wrong + right,), 0.9), right_rows)


def growth(hce, lce, spread=0.1, **sizes):
    before = torch.tensor([0.2, 0.1], dtype=torch.float64)
    after = before + torch.tensor([hce, lce], dtype=torch.float64)
    spreads = torch.full((2,), spread, dtype=torch.float64)
    return EntropyGrowth(groups(**sizes), "clip", before, after, spreads)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (growth(0.5, 0.1), "takes more certainty from wrong answers than from right ones, as the"),
        (growth(0.1, 0.5), "the opposite of what the paper claims"),
        (growth(-0.5, -0.1), "it gives more certainty to wrong answers than to right ones."),
        (growth(-0.1, -0.5), "it gives more certainty to right answers than to wrong ones."),
        (growth(0.0, 0.0), "Feature clipping leaves the entropy of confident answers as it"),
        (growth(0.11, 0.1), "which may be chance"),
        (growth(0.5, 0.1, wrong=5), "few rows, so the interval is rough"),
        (growth(0.5, 0.1, spread=math.nan), "too small for an interval"),
        (growth(-0.5, 0.0), "fell by 0.5000 nats, that of confident right ones (60) did not"),
        (growth(0.5, 0.1, wrong=0), "No answer above 80 % confidence is wrong"),
        (growth(0.5, 0.1, right=0), "No answer above 80 % confidence is right"),
    ],
)
def test_entropy(found, words):
    assert words in sentences.entropy_words(found)


def test_units():
    known = UnitMeans(
        groups(), torch.tensor([2.0, 1.0]), torch.tensor([1.0, 2.0]), torch.arange(2), False
    )
    assert sentences.units_words(known) == (
        "The mean feature over all 2 units is 1.5 for confident wrong answers and 1.5 for "
        "confident right ones; 50.0 % of the units are larger where the answer is wrong."
    )
    signed = replace(known, absolute=True)
    assert "mean absolute feature" in sentences.units_words(signed)
    empty = replace(known, hce=torch.full((2,), math.nan))
    assert "no rows" in sentences.units_words(empty)


@pytest.mark.parametrize(
    ("sigmas", "words"),
    [
        ((2.0, 1.0), "sigma 2 where a confident answer is wrong and 1 where it is right: wider"),
        ((1.0, 2.0), "not wider where it is wrong, unlike what the paper"),
        ((1.0, 1.0), "not wider where it is wrong"),
        ((math.nan, 1.0), "no rows"),
    ],
)
def test_values(sigmas, words):
    fits = tuple(NormalFit(sigma, 0.0, sigma, True) for sigma in sigmas)
    edges, counts = torch.tensor([0.0, 1.0]), torch.ones(2, 1)
    found = FeatureValues(groups(), edges, counts, (1, 1), fits, False)
    assert words in sentences.values_words(found)


def test_counts():
    before, after = torch.tensor([[90], [10]]), torch.tensor([[0], [0]])
    found = ConfidentCounts(200, "clip", (0.95,), before, after)
    assert sentences.counts_words(found) == (
        "Of the answers above 95 % confidence, 10 of 100 are wrong as they are, 10.0 %; 0 of 0 are "
        "wrong with feature clipping."
    )
    assert "above 95 %" in sentences.counts_words(found, level=0.5)


def test_changed():
    rows = [torch.tensor(column) for column in ([0, 1, 2], [1, 0, 2], [0, 0, 0], [1, 1, 1])]
    sure = torch.full((3,), 0.5)
    found = ChangedPredictions(100, "clip", *rows, sure, sure)
    assert sentences.changed_words(found) == (
        "Feature clipping changes the predicted class of 3 of 100 rows (3.0 %): 1 became right, "
        "1 became wrong, 1 went from one wrong class to another."
    )
    none = [torch.zeros(0, dtype=torch.int64)] * 4
    kept = ChangedPredictions(100, "temperature", *none, torch.zeros(0), torch.zeros(0))
    assert sentences.changed_words(kept).startswith(
        "Temperature scaling changes no predicted class"
    )


def test_classes():
    """One class far too sure, one as far too modest, one without rows."""
    counts = torch.tensor([[500.0, 450.0, 250.0], [50.0, 25.0, 45.0], [0.0, 0.0, 0.0]])
    found = GroupCalibration("none", ("a", "b", "c"), counts[:, :, None].double())
    assert sentences.classes_words(found) == (
        "Predicted classes: 2. By the 95 % interval of each, the model as it is claims too much "
        "in 1 and too little in 1; about 0 would be so by chance alone. 1 of the 2 have fewer than "
        "100 rows."
    )


def test_sweeps(pack, content):
    clip, _ = content.sweeps
    assert isinstance(clip, ClipSweep)
    assert f"lowest at c = {float(clip.thresholds[clip.best]):.4g}" in sentences.sweep_words(clip)
    idle = replace(clip, best=len(clip.thresholds) - 1)
    assert "the best is not to clip" in sentences.sweep_words(idle)


def test_the_growth_of_a_real_clip_is_told_with_its_numbers(pack):
    clip = parse("clip").fit(pack.split("val"), pack.head)
    found = EntropyGrowth.of(pack.split("test"), clip, pack.head, confidence=0.8)
    text = sentences.entropy_words(found)
    assert f"{float(found.growth[0]):.4f}" in text
    assert f"{float(found.growth[1]):.4f}" in text
