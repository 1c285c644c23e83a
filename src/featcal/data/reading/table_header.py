"""What the header of a table says: which column is the label's, which are scores, and of what kind.

`logit_` or `prob_` in front of every class says what the numbers are; without that the caller says
it. Nothing is guessed from the numbers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import cast, final

from featcal.core.errors import InputError
from featcal.core.probabilities import Kind
from featcal.data.reading.contents import listed

PREFIXED = re.compile(r"(logit|prob)s?_(.+)", re.DOTALL)
ALONE = re.compile(r"(logit|prob)s?")  # a binary model's one column may have this name alone


@final
@dataclass(frozen=True, slots=True)
class Reading:
    """What the caller says of the columns: the labels', the kind of the others, those to skip."""

    label: str = "label"
    kind: Kind | None = None
    ignore: tuple[str, ...] = ()

    def ignores(self, name: str) -> bool:
        """Whether a column is to be left out, by its name or a pattern such as "feature_*"."""
        return any(name == pattern or fnmatchcase(name, pattern) for pattern in self.ignore)


@final
@dataclass(frozen=True, slots=True)
class Header:
    """The columns of one table.

    Attributes:
        kind: of its scores.
        columns: the position of every class, by its name.
        label: the position of the labels.
        told: whether the names say the kind, so that nothing else can be among the scores.
    """

    kind: Kind
    columns: dict[str, int]
    label: int
    told: bool


def read_header(names: Sequence[str], reading: Reading) -> Header:
    """Tells the columns apart by their names.

    Raises:
        InputError: where the names do not say enough; the remedy is an option or a better name.
    """
    kept = [name for name in names if not reading.ignores(name)]
    _check_names(kept, reading.label)
    scores = [name for name in kept if name != reading.label]
    kind, told = _kind(scores, reading)
    columns = {_class_name(name) if told else name: names.index(name) for name in scores}
    if len(columns) < len(scores):
        raise InputError("two columns name the same class, once with logit_ or prob_: rename one")
    return Header(kind, columns, names.index(reading.label), told)


def _check_names(names: Sequence[str], label: str) -> None:
    if label not in names:
        raise InputError(
            f"it has no column {label!r} (found: {listed(names)}): name the column of labels with "
            "--label (label= in Python)"
        )
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"{names.count(twice)} columns are called {twice!r}: rename them")
    if "" in names:
        raise InputError(
            "a column has no name (row numbers, as pandas writes them?): leave it out when saving, "
            "index=False, or with --ignore '' (ignore=[''] in Python)"
        )
    if len(names) == 1:
        raise InputError(f"it has no column but {label!r}: add the scores, one column a class")


def _kind(names: Sequence[str], reading: Reading) -> tuple[Kind, bool]:
    """What the numbers are, and whether the names say it."""
    found = [_kind_by_name(name, alone=len(names) == 1) for name in names]
    kind = next((one for one in found if one is not None), None)
    if kind is None:
        return _kind_by_word(names, reading), False
    others = [name for name, one in zip(names, found, strict=True) if one != kind]
    if others:
        flags = " ".join(f"--ignore {name}" for name in others[:3])
        raise InputError(
            f"the columns {listed(others)} are not named as {kind} and others are: leave them out "
            f"with {flags} (ignore= in Python; patterns such as 'feature_*' will do)"
        )
    if reading.kind not in (None, kind):
        raise InputError(f"the columns are named as {kind}: do not call them {reading.kind}")
    return kind, True


def _kind_by_name(name: str, *, alone: bool) -> Kind | None:
    match = PREFIXED.fullmatch(name) or (ALONE.fullmatch(name) if alone else None)
    return None if match is None else cast(Kind, f"{match[1]}s")


def _kind_by_word(names: Sequence[str], reading: Reading) -> Kind:
    if reading.kind is None:
        raise InputError(
            f"nothing says whether {listed(names, at_most=3)} are logits or probabilities: say "
            "--logits or --probs (kind='logits' or kind='probs' in Python), or begin the names of "
            "the columns with logit_ or prob_"
        )
    return reading.kind


def _class_name(name: str) -> str:
    match = PREFIXED.fullmatch(name)
    return name if match is None else str(match[2])
