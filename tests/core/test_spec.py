"""Recipes: read, never evaluated, and refused with an InputError whatever they are."""

import math
import sys

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from featcal import METHODS, FeatureClip, InputError, Pipeline, Temperature, parse


def test_names_calls_and_bars_are_read():
    found = parse(" clip( min_accuracy = 0.99 ,criterion='ece') |\ttemperature() ")
    assert isinstance(found, Pipeline)
    clip, temperature = found.steps_in_order()
    assert isinstance(clip, FeatureClip)
    assert isinstance(temperature, Temperature)
    assert (clip.min_accuracy, clip.criterion, clip.reference) == (0.99, "ece", False)


def test_parentheses_do_not_change_a_pipeline():
    flat = repr(parse("clip | temperature | temperature"))
    assert repr(parse("clip | (temperature | temperature)")) == flat
    assert repr(parse("(clip | temperature) | temperature")) == flat
    assert repr(parse("((clip))")) == "clip"


@pytest.mark.parametrize(
    "recipe",
    [
        "clip",
        "temperature",
        "clip(criterion='brier')",
        "clip(criterion='ece', min_accuracy=0.5, reference=True)",
        "clip(min_accuracy=1.0) | temperature",
    ],
)
def test_repr_is_the_recipe(recipe):
    assert repr(parse(recipe)) == recipe
    assert repr(parse(repr(parse(recipe)))) == recipe


def test_defaults_are_not_repeated():
    assert repr(parse("clip(criterion='nll', min_accuracy=None, reference=False)")) == "clip"


def test_a_numpy_number_does_not_spoil_the_recipe():
    recipe = repr(FeatureClip(min_accuracy=np.float64(0.99)))
    assert recipe == "clip(min_accuracy=0.99)"
    assert repr(parse(recipe)) == recipe


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nope", "no method is called 'nope'; there are .*clip.*temperature"),
        ("clip | nope", "no method is called 'nope'"),
        ("clip(0.99)", r"clip takes arguments by name only, as in clip\(criterion='nll'"),
        (
            "temperature(2)",
            "temperature takes arguments by name only, as in temperature.criterion=None",
        ),
        ("nope(2)", "no method is called 'nope'"),
        ("clip(threshold=2)", "clip has no argument 'threshold'"),
        ("clip(**{'a': 1})", r"clip has no argument '\*\*'"),
        ("clip(*[1])", "clip takes arguments by name only"),
        ("clip(min_accuracy=x)", "min_accuracy=.?x.? is not a literal"),
        ("clip(min_accuracy=open('f'))", "is not a literal"),
        ("clip(min_accuracy=__import__('os').system('true'))", "is not a literal"),
        ("clip(min_accuracy=lambda: 1)", "is not a literal"),
        ("clip(min_accuracy=1/2)", "is not a literal"),
        ("clip(min_accuracy=f'{1}')", "is not a literal"),
        ("clip(min_accuracy=clip())", "is not a literal"),
        ("clip + temperature", r"cannot read 'clip \+ temperature'"),
        ("clip & temperature", "cannot read"),
        ("clip or temperature", "cannot read"),
        ("clip | 3", "cannot read '3'"),
        ("-clip", "cannot read '-clip'"),
        ("lambda: clip", "cannot read"),
        ("clip.fit", "cannot read 'clip.fit'"),
        ("clip.__class__()", "cannot read"),
        ("clip()()", "cannot read"),
        ("clip[0]", "cannot read"),
        ("[clip]", "cannot read"),
        ("clip, temperature", "cannot read"),
        ("(clip := 1)", "cannot read"),
        ("__import__('os')", "no method is called '__import__'"),
        ("__import__", "no method is called '__import__'"),
        ("clip if 1 else temperature", "cannot read"),
        ("clip;temperature", "does not parse"),
        ("clip |", "does not parse"),
        ("| clip", "does not parse"),
        ("clip || temperature", "does not parse"),
        ("import os", "does not parse"),
        ("clip\ntemperature", "does not parse"),
        ("clip\0", "does not parse"),
        ("\ud800", "does not parse"),
        ("", "recipe is empty"),
        (" \n\t", "recipe is empty"),
        ("clip(criterion='nil')", "criterion is 'nil': choose nll, brier or ece"),
        ("clip(criterion=[])", "criterion is"),
        ("clip(criterion={'a': [1]})", "criterion is"),
        ("clip(min_accuracy='0.9')", "min_accuracy is '0.9'"),
        ("clip(min_accuracy=1e999)", "min_accuracy is inf"),
        ("clip(min_accuracy=True)", "min_accuracy is True"),
        ("clip(reference=1)", "reference is 1: give True or False"),
        ("temperature | clip", "temperature | clip"),
    ],
)
def test_everything_else_is_refused_by_name(text, says):
    with pytest.raises(InputError, match=says):
        parse(text)


@pytest.mark.parametrize("text", [None, 3, b"clip", ["clip"], FeatureClip()])
def test_what_is_no_text_is_refused(text):
    with pytest.raises(InputError, match=f"recipe is a {type(text).__name__}: pass text"):
        parse(text)


def test_ten_thousand_characters_are_refused():
    with pytest.raises(InputError, match="recipe is 10000 characters long: the limit is"):
        parse("c" * 10_000)


@pytest.mark.parametrize(
    "text",
    [
        "(" * 900 + "clip" + ")" * 900,
        "(" * 150 + "nope" + ")" * 150,
        "(" * 1999,
        "-" * 1900 + "1",
        "-" * 400 + "1",
        "~" * 900 + "clip",
        "not " * 490 + "clip",
        "|".join(["a"] * 1000),
        "|".join(["clip"] * 10 + ["a"] * 900),
        "a" + ".b" * 900,
        "a" + "()" * 900,
        "clip(min_accuracy=" + "-" * 900 + "1)",
        "clip(min_accuracy=" + "[" * 90 + "]" * 90 + ")",
        "clip(min_accuracy=" + "[" * 900 + "]" * 900 + ")",
        "clip(min_accuracy=a" + ".b" * 900 + ")",
        "clip(min_accuracy=" + "1+" * 900 + "1)",
    ],
    ids=lambda text: text[:12] + "...",
)
def test_deep_nesting_is_refused_and_nothing_worse(text):
    limit = sys.getrecursionlimit()
    with pytest.raises(InputError):
        parse(text)
    assert sys.getrecursionlimit() == limit


def test_deep_but_honest_parentheses_are_read_or_refused():
    try:
        assert repr(parse("(" * 80 + "clip" + ")" * 80)) == "clip"
    except InputError as error:
        assert "does not parse" in str(error)  # noqa: PT017 - either answer is fine


def test_the_order_is_explained_with_both_names():
    with pytest.raises(InputError) as caught:
        parse("temperature | clip")
    text = str(caught.value)
    assert "temperature | clip is in the wrong order" in text
    assert "write clip | temperature" in text


PIECES = [*METHODS, "|", "(", ")", "=", "min_accuracy", "criterion", "reference", ",", "'nll'"]
SYNTAX = ["0.99", "True", "None", "*", "**", "lambda", ":", ".", "[", "]", "{", "}", "-", "~", " "]
ODDITIES = ["f'{x}'", "1e400", "0x1", "...", "\\", "\n", "#", "await", "(x for x in y)", "'\\d'"]
WORDS = st.sampled_from([*PIECES, *SYNTAX, *ODDITIES])


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(max_size=60), st.lists(WORDS, max_size=14).map("".join)))
@example("clip(criterion=[])")
@example("clip(criterion={})")
@example("clip(min_accuracy=" + "9" * 400 + ")")
@example("clip(min_accuracy=1j)")
def test_parse_gives_a_calibrator_or_an_input_error(text):
    try:
        found = parse(text)
    except InputError:
        return
    assert repr(parse(repr(found))) == repr(found)


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_a_share_is_accepted_exactly_between_zero_and_one(share):
    if 0 < share <= 1:
        recipe = repr(FeatureClip(min_accuracy=share))
        assert parse(recipe).min_accuracy == share
        return
    with pytest.raises(InputError, match="min_accuracy is"):
        FeatureClip(min_accuracy=share)
    assert not 0 < share <= 1 or math.isnan(share)
