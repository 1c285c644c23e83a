"""The two ways featcal speaks up: an error for input it refuses, a warning for a fit it doubts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Literal

from torch import Tensor

ARGUMENT = re.compile(r"<([\w=]+)>")


class InputError(ValueError):
    """Input that cannot be used; the text names the argument, the value and the remedy."""


class ArgumentError(InputError):
    """Input refused for an argument that people may know under another name, such as an option.

    Attributes:
        template: the sentence, with every such argument in angle brackets.

    >>> error = ArgumentError("<batch> is 0: give a <batch> of 1 or more")
    >>> str(error)
    'batch is 0: give a batch of 1 or more'
    >>> error.sentence(lambda name: f"--{name}")
    '--batch is 0: give a --batch of 1 or more'
    """

    def __init__(self, template: str) -> None:
        self.template = template
        super().__init__(self.sentence(str))

    def sentence(self, name_of: Callable[[str], str]) -> str:
        """What is wrong, with arguments by the names the reader knows."""
        return ARGUMENT.sub(lambda found: name_of(found[1]), self.template)


class CalibrationWarning(UserWarning):
    """A fit that ended somewhere a person should look at."""


# --- Hyperparameters checked in one way: the method, the argument, the value and the remedy.


def check_flags(method: str, **given: object) -> None:
    """Refuses anything but True and False.

    >>> check_flags("group", reference=1)
    Traceback (most recent call last):
    featcal.core.checks.InputError: group: reference is 1: give True or False
    """
    for key, value in given.items():
        if not isinstance(value, bool):
            raise InputError(f"{method}: {key} is {value!r}: give True or False")


def check_choice(method: str, key: str, value: object, known: Iterable[str]) -> None:
    """Refuses anything but one of the known words.

    >>> check_choice("group", "base", "temp", ("temperature", "ensemble"))
    Traceback (most recent call last):
    featcal.core.checks.InputError: group: base is 'temp': choose temperature or ensemble
    """
    words = list(known)
    if not isinstance(value, str) or value not in words:
        *first, last = words
        listed = f"{', '.join(first)} or {last}" if first else last
        raise InputError(f"{method}: {key} is {value!r}: choose {listed}")


def check_whole(method: str, least: int, **given: object) -> None:
    """Refuses anything but whole numbers from `least` up.

    >>> check_whole("histogram", 1, bins=0)
    Traceback (most recent call last):
    featcal.core.checks.InputError: histogram: bins is 0: give a whole number from 1 up
    """
    for key, value in given.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise InputError(f"{method}: {key} is {value!r}: give a whole number from {least} up")


# --- Scores as callers hold them: what they are called, and how far probabilities may be off.

Kind = Literal["logits", "probs"]

ROUNDING = 1e-6  # how far below 0 or above 1 one may lie: exp(z - logsumexp(z)) may end there
ROW_SUM = 1e-3
ROW_SUM_16_BIT = 1e-2
SHOWN_ROWS = 5


def sum_tolerance(values: Tensor) -> float:
    """How far from 1 a row of probabilities of this precision may sum."""
    return ROW_SUM if values.dtype.itemsize >= 4 else ROW_SUM_16_BIT


def rows_text(rows: Tensor, first_row: int = 0) -> str:
    """Row numbers as a message shows them.

    >>> import torch
    >>> rows_text(torch.arange(7), 10)
    'rows 10, 11, 12, 13, 14 and 2 more'
    """
    shown = ", ".join(str(first_row + row) for row in rows[:SHOWN_ROWS].tolist())
    more = len(rows) - SHOWN_ROWS
    return f"row{'s' * (len(rows) > 1)} {shown}" + (f" and {more} more" if more > 0 else "")
