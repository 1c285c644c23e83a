"""What the library says of a run, in the words of the command line.

The library names its arguments; whoever typed a command knows options.
"""

from __future__ import annotations

import re

from featcal.core.errors import InputError

SAID = {  # as the library has it, and as it was typed
    r"download=True": "--download",
    r"\bsplit: (val|held_out)=": r"--\1 ",
    r"\bgive a val\b": "give a --val",
    r"\bleave val out\b": "leave --val out",
    r"^(recipe: )?batch is\b": "--batch is",
    r"\bgive a batch of\b": "give a --batch of",
    r"\banother batch than\b": "another --batch than",
    r"memory_gib=(\S+) of load_images": r"the limit of \1 GiB",
    r"\bgive a smaller image_size\b": "give a smaller --image-size",
    r"\(in Python, a larger memory_gib\)": "(from Python, load_images takes a larger memory_gib)",
}
OPTIONS = ("loss", "precision", "image_size", "test_norm")
RECIPE = ("epochs", "lr", "batch", "clip_norm", "schedule", "seed", "mixup", "smoothing")
ARGUMENTS = ("dataset", "network")


def as_typed(error: InputError) -> InputError:
    """The same sentence with options where it had arguments."""
    sentence = str(error)
    for said, typed in SAID.items():
        sentence = re.sub(said, typed, sentence)
    return InputError(sentence.replace("--held_out", "--held-out"))


def option_of(setting: str) -> str:
    """What sets a setting of a run, such as --lr for recipe.lr."""
    group, _, name = setting.rpartition(".")
    if group == "options":
        return f"--network-option {name}"
    if group == "rows":
        return f"rows of {name.replace('_', ' ')}"
    if name in (RECIPE if group == "recipe" else OPTIONS):
        return f"--{name.replace('_', '-')}"
    return name.upper() if name in ARGUMENTS else setting
