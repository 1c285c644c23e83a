"""The two ways featcal speaks up: an error for input it refuses, a warning for a fit it doubts."""

from __future__ import annotations

import re
from collections.abc import Callable

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
