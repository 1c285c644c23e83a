"""The names of CIFAR's classes, and how many each of the two data sets has."""

from __future__ import annotations

from pathlib import Path

from featcal.core.errors import InputError

CIFAR10 = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
CLASSES = {"cifar10": 10, "cifar100": 100}


def check_names(name: str, found: object, path: Path) -> tuple[str, ...]:
    """The class names of a file, refused where they are not those of as many classes."""
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise InputError(f"{path} is not a list of class names: copy it again")
    if len(found) != CLASSES[name]:
        raise InputError(
            f"{path} names {len(found)} classes and {name} has {CLASSES[name]}: it belongs to "
            "another data set, or is incomplete; copy it again"
        )
    return tuple(found)
