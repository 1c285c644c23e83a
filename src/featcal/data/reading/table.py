"""A file with named columns, read block by block, and how a cell of it is refused."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import numpy.typing as npt

from featcal.core.batch import CHUNK_ROWS
from featcal.core.errors import InputError

BLOCK_CELLS = 2**22  # 32 MiB of numbers

Numbers = npt.NDArray[np.float64]


@final
@dataclass(frozen=True, slots=True)
class Block:
    """Some rows of a table.

    Attributes:
        values: (n, k) scores, finite.
        labels: n labels, as text without blanks around it.
        places: n names of the rows, such as "line 7".
    """

    values: Numbers
    labels: Sequence[str]
    places: Sequence[str]


class TableFile(ABC):
    """A file with named columns.

    Attributes:
        path: the file.
        names: of its columns, in order.
    """

    path: Path
    names: list[str]

    @abstractmethod
    def blocks(self, columns: Sequence[int], label: int) -> Iterator[Block]:
        """The rows, block by block: the numbers of `columns`, in that order, and their labels."""


def block_rows(columns: int) -> int:
    """Rows a block."""
    return max(1, min(CHUNK_ROWS, BLOCK_CELLS // max(columns, 1)))


def not_a_number(place: str, name: str, found: str) -> InputError:
    """The refusal of a cell, with the remedy that most likely helps."""
    where, found = f"{place}, column {name!r}", short(found)
    if not found.strip():
        return InputError(f"{where}: the cell is empty: fill it in or remove the row")
    if found.strip().lower().lstrip("+-") in ("nan", "inf", "infinity", "na", "null", "none"):
        return InputError(f"{where}: {found!r} is no finite number: correct it or remove the row")
    if found.count(",") == 1 and "." not in found:
        return InputError(f"{where}: {found!r} is not a number: write {found.replace(',', '.')}")
    return InputError(
        f"{where}: {found!r} is not a number: correct it, or leave a column that holds no scores "
        f"out with --ignore {name} (ignore=[{name!r}] in Python)"
    )


def short(text: str) -> str:
    """The beginning of a long text."""
    return text if len(text) <= 40 else text[:37] + "..."


def check_finite(values: Numbers, names: Sequence[str], places: Sequence[str]) -> None:
    """Refuses the first cell that is NaN or infinite."""
    if not np.isfinite(values).all():
        row, column = np.argwhere(~np.isfinite(values))[0]
        raise not_a_number(places[row], names[column], str(values[row, column]))
