"""Whom a recipe makes less certain: both ways, undecided, and where there is nothing to say."""

import math
from dataclasses import replace

import pytest
import torch

from featcal import parse
from featcal.analysis import EntropyGrowth, Groups
from featcal.page.verdict import control_for, entropy_findings, entropy_words


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
        (growth(-0.5, -0.1), "gives more certainty to wrong answers than to right ones."),
        (growth(-0.1, -0.5), "gives more certainty to right answers than to wrong ones."),
        (growth(0.0, 0.0), "Feature clipping leaves the entropy of confident answers as it"),
        (growth(0.11, 0.1), "which may be chance"),
        (growth(0.1, 0.1, spread=0.0), "Feature clipping treats wrong and right answers alike."),
        (growth(0.11, 0.1), "is not known to treat wrong answers and right ones differently."),
        (growth(0.5, 0.1, wrong=5), "few rows, so the interval is rough"),
        (growth(0.5, 0.1, spread=math.nan), "too small for an interval"),
        (growth(-0.5, 0.0), "fell by 0.5000 nats, that of the 60 right ones did not"),
        (growth(0.5, 0.1, wrong=0), "No answer above 80 % confidence is wrong"),
        (growth(0.5, 0.1, right=0), "No answer above 80 % confidence is right"),
    ],
)
def test_entropy(found, words):
    assert words in entropy_words(found)


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
    (text,) = map(str, entropy_findings(growths))
    assert "as the paper claims. The entropy (how undecided" in text
    assert "(95 % interval +0.3600 to +0.4400). Temperature scaling, which never looks at" in text
    assert words in text
    no_sign = text.endswith("So this alone is no sign that the features matter.")
    assert no_sign == ("as strongly" in words or "more" in words)


def test_a_control_is_for_findings_about_features():
    growths = {"temperature": of_recipe("temperature", 0.6, 0.1), "clip": growth(0.11, 0.1)}
    (undecided,) = map(str, entropy_findings(growths))
    assert undecided.endswith("which may be chance.")
    (alone,) = map(str, entropy_findings({"temperature": growths["temperature"]}))
    assert alone.startswith("Temperature scaling takes more")
    assert "paper" not in alone
    assert "never looks" not in alone
    both = of_recipe("clip | temperature", 0.5, 0.1)
    text = entropy_words(both, control_for(both, growths))
    assert "than from right ones. The entropy" in text
    assert ". Temperature scaling, which never" in text


def test_clips_with_arguments_and_from_files_are_named():
    growths = {
        "vector": of_recipe("vector", 0.6, 0.1),
        "clip(min_accuracy=0.99)": of_recipe("clip(min_accuracy=0.99)", 0.5, 0.1),
        "clip from a.safetensors": growth(0.5, 0.1),
    }
    first, second = map(str, entropy_findings(growths))
    assert first.startswith("Feature clipping (min_accuracy=0.99) takes more")
    assert second.startswith("Feature clipping from a.safetensors takes more")
    assert all("as the paper claims." in text for text in (first, second))


def test_the_growth_of_a_real_clip_is_told_with_its_numbers(pack):
    clip = parse("clip").fit(pack.split("val"), pack.head)
    found = EntropyGrowth.of(pack.split("test"), clip, pack.head, confidence=0.8)
    text = entropy_words(found)
    assert f"{float(found.growth[0]):.4f}" in text
    assert f"{float(found.growth[1]):.4f}" in text
