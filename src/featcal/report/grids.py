"""A table of text that fits where it is shown: cut into blocks for a terminal, or as Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import final

BORDER = 3  # what a column costs besides its text: a line and a space on either side


@final
@dataclass(frozen=True)
class Grid:
    """A table of text.

    Attributes:
        title: one line above it.
        headings: one a column, the first over the labels; a line break parts two levels.
        rows: the cells, labels first; **text** is bold.
        notes: letter and sentence of each footnote.
        together: columns that belong together, counted after the labels.
    """

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[tuple[str, str], ...] = ()
    together: int = 1

    def blocks(self, width: int) -> Iterator[Grid]:
        """The same table as several, each with the labels in front and no wider than `width`.

        Columns that belong together are parted only where they do not fit alone; a single column is
        given even where it is too wide.
        """
        widths = [self._width(column) for column in range(len(self.headings))]
        shown = [0]
        for group in self._groups(widths, width):
            used = sum(widths[column] for column in shown + group) + 1
            if len(shown) > 1 and used > width:
                yield self._only(shown)
                shown = [0]
            shown += group
        yield self._only(shown)

    def _groups(self, widths: list[int], width: int) -> Iterator[list[int]]:
        for start in range(1, len(widths), self.together):
            group = list(range(start, min(start + self.together, len(widths))))
            if widths[0] + sum(widths[column] for column in group) + 1 <= width:
                yield group
            else:
                yield from ([column] for column in group)

    def _width(self, column: int) -> int:
        texts = [*self.headings[column].split("\n"), *(row[column] for row in self.rows)]
        return BORDER + max(len(text.replace("**", "")) for text in texts)

    def _only(self, columns: list[int]) -> Grid:
        rows = tuple(tuple(row[column] for column in columns) for row in self.rows)
        return replace(self, headings=tuple(self.headings[c] for c in columns), rows=rows)

    def markdown(self) -> str:
        r"""A pipe table.

        >>> print(Grid("", ("", "ECE"), (("clip | temperature", "1.2"),)).markdown())
        |  | ECE |
        |---|---:|
        | clip \| temperature | 1.2 |
        """
        heads = (heading.replace("\n", " ") for heading in self.headings)
        columns = list(zip(*self.rows, strict=True)) or [()] * len(self.headings)
        rule = "|---|" + "".join("---:|" if _numeric(c) else "---|" for c in columns[1:])
        return "\n".join([_line(heads), rule, *map(_line, self.rows)])

    def document(self) -> str:
        """Title, pipe table and footnotes, as Markdown."""
        notes = "".join(f"\n- [{letter}] {text}" for letter, text in self.notes)
        return f"{self.title}\n\n{self.markdown()}\n{notes}".rstrip()


def _numeric(cells: tuple[str, ...]) -> bool:
    """Whether a column is one of numbers, which stand best at the right."""
    starts = (cell.lstrip("*")[:1] for cell in cells)
    return all(start in "-0123456789" for start in starts)


def _line(cells: tuple[str, ...] | Iterator[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
