"""What a reliability diagram calls its numbers: of the predicted class, or of one class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True)
class Wording:
    """The names of what a model says and of what is so.

    Attributes:
        said: what the model says of a row, short.
        so: what turns out to be so, short.
        x: the same as the name of an axis.
        y: the same as the name of an axis.
        error: the mean gap between the two.
        above: a bin in which the model says too much.
        below: a bin in which it says too little.
    """

    said: str
    so: str
    x: str
    y: str
    error: str
    above: str
    below: str


TOP_LABEL = Wording(
    said="confidence",
    so="accuracy",
    x="confidence",
    y="accuracy",
    error="ECE",
    above="overconfident",
    below="underconfident",
)


def wording(of_class: int | None) -> Wording:
    """The words for a class's probability; those for the confidence without one.

    >>> wording(1).x
    'probability of class 1'
    """
    if of_class is None:
        return TOP_LABEL
    return Wording(
        said="probability",
        so="share",
        x=f"probability of class {of_class}",
        y=f"share of class {of_class}",
        error=f"class {of_class}: ECE",
        above="too high",
        below="too low",
    )
