"""The sentences under the figures: both ways, undecided, and where there is nothing to say."""

import math
from dataclasses import replace

import pytest
import torch

from featcal.analysis import (
    ChangedPredictions,
    ClipSweep,
    ConfidentCounts,
    FeatureValues,
    GroupCalibration,
    Groups,
    UnitMeans,
)
from featcal.analysis.features import NormalFit
from featcal.page import html as sentences


def groups(wrong=40, right=60):
    right_rows = torch.tensor([False] * wrong + [True] * right)
    return Groups(0.8, torch.full((wrong + right,), 0.9), right_rows)


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


def values(sigmas, errors=(0.1, 0.1), zeros=(0.5, 0.5), signed=False, **sizes):
    fits = tuple(NormalFit(sigma, 0.0, sigma, not signed) for sigma in sigmas)
    edges, counts = torch.tensor([0.0, 1.0]), torch.ones(2, 1)
    return FeatureValues(groups(**sizes), edges, counts, (1, 1), fits, signed, errors, zeros)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            values((2.0, 1.0)),
            "wrong and 1 where it is right. The difference is +1.00 (95 % interval +0.72 to +1.28):"
            " wider where it is wrong, as the paper reports of its networks.",
        ),
        (values((1.0, 2.0)), "narrower where it is wrong, the opposite of what the paper reports"),
        (values((1.188, 1.172)), "(95 % interval -0.26 to +0.29), which may be chance."),
        (values((1.0, 1.0)), "The difference is +0.00 (95 % interval -0.28 to +0.28), which may"),
        (values((1.5, 1.0), (0.0, 0.0)), "+0.5000 (95 % interval +0.5000 to +0.5000): wider"),
        (values((2.0, 1.0), wrong=17), "The smaller group has few rows, so the interval is rough."),
        (values((2.0, 1.0), (math.nan, 0.1)), "too few rows to tell whether that is more than"),
        (values((2.0, 1.0), (1.0, 1.0), wrong=5), "which may be chance. The smaller group"),
        (values((math.nan, 1.0)), "no rows"),
    ],
)
def test_values(found, words):
    text = sentences.values_words(found)
    assert words in text
    assert "half the values" not in text


def test_values_that_are_no_rectified_normals_are_said_to_be_none():
    text = sentences.values_words(values((2.0, 1.0), zeros=(0.003, 0.45)))
    assert text.endswith(
        "Of such a normal half the values would be 0; of these, 0.3 % (wrong answers) and 45.0 % "
        "(right ones) are. It does not describe them, so read sigma as no more than the root mean "
        "square of the values above 0."
    )
    signed = sentences.values_words(values((2.0, 1.0), zeros=(0.003, 0.003), signed=True))
    assert "half" not in signed


def test_signed_values_are_no_case_of_the_theory_of_the_paper():
    plain, signed = (
        sentences.values_words(values((2.0, 1.0), signed=kind)) for kind in (False, True)
    )
    assert plain.startswith(
        "Fitted with a rectified normal of mean 0, as the paper's theory has it,"
    )
    assert signed.startswith("Fitted with a normal of mean 0, the values have sigma")


def test_two_groups_of_one_spread_without_error_do_not_differ():
    text = sentences.values_words(values((1.0, 1.0), (0.0, 0.0)))
    assert text.endswith("and 1 where it is right: there is no difference.")


def test_counts():
    before, after = torch.tensor([[90], [10]]), torch.tensor([[0], [0]])
    found = ConfidentCounts(200, "clip", (0.95,), before, after)
    assert sentences.counts_words(found) == (
        "Of the answers above 95 % confidence, 10 of 100 (10.0 %) are wrong as the model is; with "
        "feature clipping, no answer is that sure."
    )
    turned = replace(found, before=after, after=before)
    assert sentences.counts_words(turned) == (
        "No answer is above 95 % confidence as the model is; with feature clipping, 10 of 100 "
        "(10.0 %) of such are wrong."
    )
    assert sentences.counts_words(replace(found, recipe="none")).endswith("as the model is.")
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
        "in 1 and too little in 1; fewer than one would be so by chance alone. 1 of the 2 have "
        "fewer than 100 rows."
    )


def test_classes_that_chance_alone_would_give():
    """One of thirty is off, and one or two would be by chance; all are small."""
    honest = torch.tensor([90.0, 72.0, 72.0]).repeat(30, 1)
    honest[0, 1] = 50
    found = GroupCalibration("none", tuple(map(str, range(30))), honest[:, :, None].double())
    text = sentences.classes_words(found)
    assert ", no more than chance alone would give (about 2). All have fewer than 100" in text


def test_sweeps(pack, content):
    clip, _ = content.sweeps
    assert isinstance(clip, ClipSweep)
    assert f"lowest at c = {float(clip.thresholds[clip.best]):.4g}" in sentences.sweep_words(clip)
    idle = replace(clip, best=len(clip.thresholds) - 1)
    assert "the best is not to clip" in sentences.sweep_words(idle)
