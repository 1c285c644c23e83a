"""Sentences of the library in the words of the command line."""

import pickle

import pytest

from featcal.cli.train import as_typed, option_of
from featcal.core.checks import ArgumentError, InputError


@pytest.mark.parametrize(
    ("setting", "option"),
    [
        ("recipe.lr", "--lr"),
        ("recipe.clip_norm", "--clip-norm"),
        ("recipe.drops", "recipe.drops"),
        ("options.width", "--network-option width"),
        ("rows.held_out", "rows of held out"),
        ("test_norm", "--test-norm"),
        ("loss", "--loss"),
        ("network", "NETWORK"),
        ("epochs", "epochs"),
    ],
)
def test_a_setting_has_the_name_of_its_option(setting, option):
    assert option_of(setting) == option


@pytest.mark.parametrize(
    ("template", "said", "typed"),
    [
        (
            "<held_out> is 60 of 44 images: give a <held_out> of 43",
            "held_out is 60 of 44 images: give a held_out of 43",
            "--held-out is 60 of 44 images: give a --held-out of 43",
        ),
        ("get it with <download=True>", "get it with download=True", "get it with --download"),
        ("batch and val are words", "batch and val are words", "batch and val are words"),
    ],
)
def test_a_sentence_has_options_where_it_had_arguments(template, said, typed):
    error = ArgumentError(template)
    assert str(error) == said
    assert str(as_typed(error)) == typed
    assert str(pickle.loads(pickle.dumps(error))) == said


def test_a_sentence_without_arguments_stays_as_it_is():
    error = InputError("train/<class>/ is missing: make it")
    assert as_typed(error) is error
