"""Sentences of the library in the words of the command line."""

import pytest

from featcal.cli.train_words import as_typed, option_of
from featcal.core.errors import InputError


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


TYPED = {
    "batch is 128, and train has 67 rows: give a batch of 67 or fewer": (
        "--batch is 128, and train has 67 rows: give a --batch of 67 or fewer"
    ),
    "recipe: batch is 15: give a multiple of the 2 processes": (
        "--batch is 15: give a multiple of the 2 processes"
    ),
    "the last batch of an epoch has one row: choose another batch than 7": (
        "the last batch of an epoch has one row: choose another --batch than 7"
    ),
    "split: held_out=60 of 44 images": "--held-out 60 of 44 images",
    "split: val=10, and pets has a val part: leave val out": (
        "--val 10, and pets has a val part: leave --val out"
    ),
    "pass download=True": "pass --download",
    "9 images take 20.0 GiB, above memory_gib=16.0 of load_images: give a smaller image_size or "
    "fewer images (in Python, a larger memory_gib)": (
        "9 images take 20.0 GiB, above the limit of 16.0 GiB: give a smaller --image-size or "
        "fewer images (from Python, load_images takes a larger memory_gib)"
    ),
    "a network whose batch is odd has no val": "a network whose batch is odd has no val",
}


@pytest.mark.parametrize("said", TYPED)
def test_a_sentence_has_options_where_it_had_arguments(said):
    assert str(as_typed(InputError(said))) == TYPED[said]
