"""The tables of the feature clipping paper as printed, each cell with what is known about it.

Tao, Dong and Xu, "Feature Clipping for Uncertainty Calibration", AAAI 2025. `assets/paper` holds
the transcription (tables.json) apart from our judgement of it (marks.json).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, final

from featcal.core.errors import InputError

PAPER = Path(__file__).parents[1] / "assets" / "paper"
PRINTED = re.compile(
    r"(\*\*)?(?P<value>\d+(?:\.\d+)?)(\*\*)?(?:\((?P<c>[\d.]+)\))?(?P<arrow>[▼▲]?)"
)


@final
@dataclass(frozen=True)
class Mark:
    """What a reader of a cell should know.

    Attributes:
        id: stable, for programs.
        kind: "defect", "misprint" or "note".
        evidence: how it is known.
        sentence: one plain sentence.
        instead: what to compare the cell with.
    """

    id: str
    kind: str
    evidence: str
    sentence: str
    instead: str

    def as_json(self) -> dict[str, str]:
        """The public form."""
        return {**vars(self)}


@final
@dataclass(frozen=True)
class Cell:
    """One printed value.

    Attributes:
        row: the label of its row, such as "CIFAR-10 ResNet-50".
        column: the heading of its column, such as "TS base".
        printed: its text, digit for digit, with threshold and arrow.
        value: the number.
        threshold: c, where it is printed.
        arrow: "▼" (green in the paper), "▲" (red) or "".
        bold: whether it is printed in bold.
        marks: what is known about it.
    """

    row: str
    column: str
    printed: str
    value: float
    threshold: float | None
    arrow: str
    bold: bool
    marks: tuple[Mark, ...] = ()

    @classmethod
    def read(cls, row: str, column: str, text: str) -> Cell:
        """A cell from the notation of tables.json.

        >>> Cell.read("CIFAR-10 DenseNet-121", "+ours(c)", "**1.05**(0.45)▼").threshold
        0.45
        """
        match = PRINTED.fullmatch(text)
        assert match is not None, f"{row}, {column}: {text}"
        c = match["c"]
        return cls(
            row,
            column,
            text.replace("*", ""),
            float(match["value"]),
            None if c is None else float(c),
            match["arrow"],
            "**" in text,
        )

    def as_json(self) -> dict[str, Any]:
        """The public form; marks by their ids."""
        return {**vars(self), "marks": [mark.id for mark in self.marks]}


@final
@dataclass(frozen=True)
class PaperTable:
    """One table of the paper.

    Attributes:
        name: a short name that does not change.
        number: as LaTeX counts them.
        label: the LaTeX label.
        summary: one line on what it shows.
        metric: the id of our metric, where we have it.
        unit: of the values.
        columns: headings, one or two levels each.
        cells: row by row.
    """

    name: str
    number: int
    label: str
    summary: str
    metric: str
    unit: str
    columns: tuple[tuple[str, ...], ...]
    cells: tuple[tuple[Cell, ...], ...]

    def __iter__(self) -> Iterator[Cell]:
        return (cell for row in self.cells for cell in row)

    @property
    def rows(self) -> tuple[str, ...]:
        """The labels of the rows."""
        return tuple(row[0].row for row in self.cells)

    @property
    def marks(self) -> tuple[Mark, ...]:
        """Every mark of its cells, once, in the order of marks.json."""
        present = {mark.id for cell in self for mark in cell.marks}
        return tuple(mark for mark in all_marks() if mark.id in present)

    @property
    def faulty(self) -> int:
        """How many cells carry a defect or a misprint."""
        return sum(any(mark.kind != "note" for mark in cell.marks) for cell in self)

    def cell(self, row: str, column: str) -> Cell:
        """One cell by its labels.

        >>> paper_table("ece-posthoc").cell("CIFAR-10 ResNet-50", "TS base").value
        1.39
        """
        for cell in self:
            if (cell.row, cell.column) == (row, column):
                return cell
        raise InputError(f"table {self.name} has no cell {row!r}, {column!r}")

    def values(self) -> Iterator[dict[str, Any]]:
        """Each cell as a line of a CSV file, its digits as printed."""
        for cell in self:
            found = PRINTED.fullmatch(cell.printed)
            assert found is not None
            yield {
                "row": cell.row,
                "column": cell.column,
                "value": found["value"],
                "threshold": found["c"],
                "arrow": {"▼": "down", "▲": "up", "": ""}[cell.arrow],
                "bold": "yes" if cell.bold else "",
                "marks": " ".join(mark.id for mark in cell.marks),
            }

    def as_json(self) -> dict[str, Any]:
        """The public form."""
        return {
            **{key: getattr(self, key) for key in ("name", "number", "label", "summary")},
            **{"metric": self.metric, "unit": self.unit},
            "cells": [cell.as_json() for cell in self],
            "marks": [mark.as_json() for mark in self.marks],
        }


def paper_table(name: str) -> PaperTable:
    """A table by its short name."""
    tables = {table.name: table for table in paper_tables()}
    if name not in tables:
        raise InputError(f"the paper has no table {name!r}: choose one of {', '.join(tables)}")
    return tables[name]


@cache
def paper_tables() -> tuple[PaperTable, ...]:
    """Every table of the paper, in the order of their numbers.

    >>> len(paper_tables())
    8
    """
    places = _read("marks.json")["marks"]
    return tuple(_table(table, places) for table in _read("tables.json")["tables"])


@cache
def all_marks() -> tuple[Mark, ...]:
    """Every mark there is."""
    return tuple(_mark(entry) for entry in _read("marks.json")["marks"])


def _read(name: str) -> Any:  # noqa: ANN401 - JSON
    return json.loads((PAPER / name).read_text(encoding="utf-8"))


def _mark(entry: dict[str, Any]) -> Mark:
    return Mark(**{key: value for key, value in entry.items() if key != "cells"})


def _table(entry: dict[str, Any], places: list[dict[str, Any]]) -> PaperTable:
    columns = tuple(map(tuple, entry["columns"]))
    cells = []
    for row in entry["rows"]:
        label = " ".join(row["label"])
        pairs = zip(columns, row["cells"], strict=True)
        read = (Cell.read(label, " ".join(column), text) for column, text in pairs)
        cells.append(tuple(_marked(cell, entry["name"], places) for cell in read))
    facts = {key: entry[key] for key in ("name", "number", "label", "summary", "metric", "unit")}
    return PaperTable(**facts, columns=columns, cells=tuple(cells))


def _marked(cell: Cell, table: str, places: list[dict[str, Any]]) -> Cell:
    marks = [_mark(entry) for entry in places if any(_at(cell, table, p) for p in entry["cells"])]
    return replace(cell, marks=tuple(marks))


def _at(cell: Cell, table: str, place: dict[str, Any]) -> bool:
    """Whether a place, given by patterns of row labels and column headings, holds the cell."""
    rows, columns = place.get("rows", ["*"]), place.get("columns", ["*"])
    return (
        place["table"] == table
        and any(fnmatchcase(cell.row, pattern) for pattern in rows)
        and any(fnmatchcase(cell.column, pattern) for pattern in columns)
    )
