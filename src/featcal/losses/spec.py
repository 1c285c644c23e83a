"""A loss as text, `focal(gamma=2.0)`: `repr` writes it and `parse_loss` reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from featcal.core.call_text import Reader
from featcal.losses.base import LOSSES, TrainingLoss


def _arguments(loss: Callable[..., TrainingLoss]) -> dict[str, object]:
    return cast(type[TrainingLoss], loss).arguments()


READER: Reader[TrainingLoss] = Reader(
    text="loss",
    item="loss",
    known=LOSSES,
    example="focal(gamma=3)",
    grammar="one loss, for example 'focal(gamma=3)'",
    pieces="the name of one loss and literal keyword arguments",
    arguments=_arguments,
    meant=dict.fromkeys(("cross_entropy", "crossentropy", "CrossEntropyLoss", "nll"), "ce"),
)


def parse_loss(text: str) -> TrainingLoss:
    """The loss a text describes.

    >>> parse_loss("focal(gamma=2)")
    focal(gamma=2.0)

    Raises:
        InputError: naming what cannot be read.
    """
    return READER.read(text)
