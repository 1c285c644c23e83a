"""Tables as text, .csv and .tsv: any size of file, one block of rows in memory."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, final

import numpy as np

from featcal.core.errors import InputError
from featcal.core.progress import tell
from featcal.data.reading.table import (
    Block,
    Numbers,
    TableFile,
    block_rows,
    check_finite,
    not_a_number,
)


@final
class CsvTable(TableFile):
    """Text in UTF-8 whose first line names the columns; tabs part them in a .tsv, else commas."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
        with self._opened() as (rows, _):
            header = next(rows, [])
        self.names = [name.strip() for name in header]
        self._check_header()

    def _check_header(self) -> None:
        if not self.names:
            raise InputError("it is empty: the first line must name the columns")
        other = next((mark for mark in ";\t,|" if mark in self.names[0]), None)
        if len(self.names) == 1 and other is not None:
            wanted = "tabs" if self.delimiter == "\t" else "commas"
            raise InputError(
                f"line 1: the columns are parted by {other!r}: save it with {wanted} between them"
            )
        if all(_is_number(name) and "." in name for name in self.names[:-1]) and self.names[1:]:
            raise InputError("line 1 holds numbers: the first line must name the columns")

    def blocks(self, columns: Sequence[int], label: int) -> Iterator[Block]:
        """The rows, block by block."""
        names = [self.names[column] for column in columns]
        full = block_rows(len(columns))
        values: list[Numbers] = []
        labels: list[str] = []
        places: list[str] = []
        with self._opened() as (rows, done):
            next(rows)
            for row in rows:
                place = f"line {rows.line}"
                self._check_width(row, place)
                values.append(_numbers([row[column] for column in columns], names, place))
                labels.append(row[label].strip())
                places.append(place)
                if len(values) == full:
                    yield _block(values, labels, places, names)
                    done()
                    values, labels, places = [], [], []
            if values:
                yield _block(values, labels, places, names)
            done()

    def _check_width(self, row: list[str], place: str) -> None:
        if len(row) != len(self.names):
            raise InputError(
                f"{place} has {len(row)} cells and the header {len(self.names)}: correct the line; "
                "numbers need decimal points, and text with commas quotes"
            )

    @contextmanager
    def _opened(self) -> Iterator[tuple[_Rows, Callable[[], None]]]:
        """The rows that are not blank, and a function that tells how far the reading is."""
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            rows = _Rows(file, self.delimiter)
            try:
                yield rows, lambda: tell(f"reading {self.path.name}", file.tell(), size)
            except UnicodeDecodeError as error:
                raise InputError(
                    f"after line {rows.line} it is not UTF-8 text ({error.reason}): save it as "
                    "UTF-8"
                ) from error
            except csv.Error as error:
                raise InputError(
                    f"line {rows.line} is no row of a table ({error}): correct its quotes"
                ) from error


@final
class _Rows:
    """The rows of a text file without the blank lines, and the line where the last one ends."""

    def __init__(self, file: BinaryIO, delimiter: str) -> None:
        text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
        self.reader = csv.reader(text, delimiter=delimiter, strict=True, skipinitialspace=True)

    @property
    def line(self) -> int:
        return self.reader.line_num

    def __iter__(self) -> Iterator[list[str]]:
        return self

    def __next__(self) -> list[str]:
        for row in self.reader:
            if len(row) > 1 or any(cell.strip() for cell in row):
                return row
        raise StopIteration


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text  # which Python allows in a number, and no file means


def _numbers(cells: list[str], names: Sequence[str], place: str) -> Numbers:
    try:
        if "_" not in "".join(cells):
            return np.fromiter(map(float, cells), np.float64, len(cells))
    except ValueError:
        pass
    name, found = next(pair for pair in zip(names, cells, strict=True) if not _is_number(pair[1]))
    raise not_a_number(place, name, found)


def _block(
    values: list[Numbers], labels: list[str], places: list[str], names: Sequence[str]
) -> Block:
    whole = np.stack(values)
    check_finite(whole, names, places)
    return Block(whole, labels, places)
