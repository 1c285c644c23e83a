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


def of_recipe(recipe, hce, lce, spread=0.1):
    return replace(growth(hce, lce, spread), recipe=recipe)


@pytest.mark.parametrize(
    ("control", "words"),
    [
        ((0.9, 0.1), "the same more strongly: +0.8000 nats (95 % interval +0.7600 to +0.8400). So"),
        ((0.51, 0.1), "does the same about as strongly: +0.4100 nats"),
        ((0.3, 0.1), "the same less strongly: +0.2000 nats (95 % interval +0.1600 to +0.2400)."),
        ((0.1, 0.1), "does not do so beyond chance: +0.0000 nats"),
    ],
)
def test_a_clip_is_held_against_a_recipe_that_sees_no_features(control, words):
    growths = {"temperature": of_recipe("temperature", *control), "clip": growth(0.5, 0.1)}
    (text,) = sentences.entropy_findings(growths)
    assert "as the paper claims. Temperature scaling, which never looks at features," in text
    assert words in text
    no_sign = text.endswith("So this alone is no sign that the features matter.")
    assert no_sign == ("as strongly" in words or "more" in words)


def test_a_control_is_for_findings_about_features():
    growths = {"temperature": of_recipe("temperature", 0.6, 0.1), "clip": growth(0.11, 0.1)}
    (undecided,) = sentences.entropy_findings(growths)
    assert undecided.endswith("which may be chance.")
    (alone,) = sentences.entropy_findings({"temperature": growths["temperature"]})
    assert alone.startswith("With temperature scaling")
    assert "paper" not in alone
    assert "never looks" not in alone
    both = of_recipe("clip | temperature", 0.5, 0.1)
    text = sentences.entropy_words(both, sentences.control_for(both, growths))
    assert "than from right ones. Temperature scaling, which never" in text


def test_clips_with_arguments_and_from_files_are_named():
    growths = {
        "vector": of_recipe("vector", 0.6, 0.1),
        "clip(min_accuracy=0.99)": of_recipe("clip(min_accuracy=0.99)", 0.5, 0.1),
        "clip from a.safetensors": growth(0.5, 0.1),
    }
    first, second = sentences.entropy_findings(growths)
    assert first.startswith("With feature clipping (min_accuracy=0.99), the entropy")
    assert second.startswith("With feature clipping from a.safetensors, the entropy")
    assert all("as the paper claims." in text for text in (first, second))


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


def test_the_growth_of_a_real_clip_is_told_with_its_numbers(pack):
    clip = parse("clip").fit(pack.split("val"), pack.head)
    found = EntropyGrowth.of(pack.split("test"), clip, pack.head, confidence=0.8)
    text = sentences.entropy_words(found)
    assert f"{float(found.growth[0]):.4f}" in text
    assert f"{float(found.growth[1]):.4f}" in text
