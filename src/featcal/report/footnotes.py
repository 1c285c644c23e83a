"""A table of the paper with its marks as letters and the sentences behind them."""

from __future__ import annotations

from string import ascii_lowercase
from typing import final

from featcal.report.grids import Grid
from featcal.report.paper import Cell, Mark, PaperTable


def paper_grid(table: PaperTable) -> Grid:
    """The table for people.

    A letter stands once for many cells where it can: in the title when every cell carries the mark,
    at a heading or a label when the whole column or row does.
    """
    letters = dict(zip(table.marks, ascii_lowercase, strict=False))
    places = _Places(table, letters)
    headings = ("\n".join(column) + places.column(j) for j, column in enumerate(table.columns))
    return Grid(
        f"Table {table.number}, {table.name}: {table.summary}, {table.unit}{places.whole()}",
        ("", *headings),
        tuple(_row(table, i, places) for i in range(len(table.cells))),
        tuple((letter, note(mark)) for mark, letter in letters.items()),
        together=2 if len(table.columns[0]) == 2 else 1,
    )


def note(mark: Mark) -> str:
    """A mark as the text of a footnote."""
    instead, evidence = (text.removesuffix(".") for text in (mark.instead, mark.evidence))
    return (
        f"{mark.kind.capitalize()}: {mark.sentence} Compare with: {instead}. "
        f"Known from: {evidence}."
    )


def _row(table: PaperTable, i: int, places: _Places) -> tuple[str, ...]:
    cells = table.cells[i]
    shown = (f"**{cell.printed}**" if cell.bold else cell.printed for cell in cells)
    return (
        table.rows[i] + places.row(i),
        *(text + places.cell(i, j) for j, text in enumerate(shown)),
    )


@final
class _Places:
    """Where the letter of each mark stands."""

    def __init__(self, table: PaperTable, letters: dict[Mark, str]) -> None:
        self.table, self.letters = table, letters
        self.everywhere = _common(tuple(table))
        self.in_row = [_common(row) - self.everywhere for row in table.cells]
        columns = zip(*table.cells, strict=True)
        self.in_column = [_common(column) - self.everywhere for column in columns]

    def whole(self) -> str:
        return self._text(self.everywhere, " ")

    def row(self, i: int) -> str:
        return self._text(self.in_row[i], " ")

    def column(self, j: int) -> str:
        return self._text(self.in_column[j], " ")

    def cell(self, i: int, j: int) -> str:
        said = self.everywhere | self.in_row[i] | self.in_column[j]
        return self._text(set(self.table.cells[i][j].marks) - said, "")

    def _text(self, marks: set[Mark], space: str) -> str:
        letters = "".join(letter for mark, letter in self.letters.items() if mark in marks)
        return f"{space}[{letters}]" if letters else ""


def _common(cells: tuple[Cell, ...]) -> set[Mark]:
    """The marks that all of the cells carry."""
    return set.intersection(*(set(cell.marks) for cell in cells))
