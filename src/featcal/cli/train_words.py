"""What the library says of a run, in the words of the command line.

The library names its arguments; whoever typed a command knows options.
"""

from __future__ import annotations

from featcal.core.errors import ArgumentError, InputError

OPTIONS = ("loss", "precision", "image_size", "test_norm")
RECIPE = ("epochs", "lr", "batch", "clip_norm", "schedule", "seed", "mixup", "smoothing")
ARGUMENTS = ("dataset", "network")


def as_typed(error: InputError) -> InputError:
    """The same sentence with options where it had arguments."""
    if isinstance(error, ArgumentError):
        return InputError(error.sentence(_option))
    return error


def _option(argument: str) -> str:
    """--held-out for held_out, and --download for download=True."""
    return f"--{argument.partition('=')[0].replace('_', '-')}"


def option_of(setting: str) -> str:
    """What sets a setting of a run, such as --lr for recipe.lr."""
    group, _, name = setting.rpartition(".")
    if group == "options":
        return f"--network-option {name}"
    if group == "rows":
        return f"rows of {name.replace('_', ' ')}"
    if name in (RECIPE if group == "recipe" else OPTIONS):
        return _option(name)
    return name.upper() if name in ARGUMENTS else setting
