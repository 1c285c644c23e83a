"""Tables of text: as a terminal's blocks, as Markdown, and as the HTML that notebooks show.

Nothing here needs torch: what prints only text answers at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import final

CONTROLS = {code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), *range(127, 160))}
MARKS = {r"\*\*(.+?)\*\*": r"<b>\1</b>", "`([^`]+)`": r"<code>\1</code>"}  # in HTML
BORDER = 3  # what a column costs besides its text: a line and a space on either side


@final
@dataclass(frozen=True)
class Table:
    """A table of text.

    Attributes:
        title: one line above it.
        headings: one per column, the first over the labels; a line break parts two levels.
        rows: the cells, labels first; **text** is bold.
        notes: letter and sentence of each footnote.
        together: columns that belong together, counted after the labels.
    """

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[tuple[str, str], ...] = ()
    together: int = 1

    def blocks(self, width: int) -> Iterator[Table]:
        """The same table as several, each with the labels in front and no wider than `width`.

        Columns that belong together are parted only where they do not fit alone; a single column is
        given even where it is too wide.
        """
        columns = list(zip(self.headings, *self.rows, strict=True))
        texts = ["\n".join(column).split("\n") for column in columns]
        widths = [BORDER + max(len(text.replace("**", "")) for text in column) for column in texts]
        groups = []
        for start in range(1, len(widths), self.together):
            group = list(range(start, min(start + self.together, len(widths))))
            fits = widths[0] + sum(widths[column] for column in group) + 1 <= width
            groups += [group] if fits else [[column] for column in group]
        parts = [[0]]
        for group in groups:
            used = sum(widths[column] for column in parts[-1] + group) + 1
            if len(parts[-1]) > 1 and used > width:
                parts.append([0])
            parts[-1] += group
        for part in parts:
            headings, *rows = zip(*(columns[column] for column in part), strict=True)
            yield replace(self, headings=headings, rows=tuple(rows))

    def markdown(self, *, gap: str = "", numeric: Sequence[bool] = ()) -> str:
        r"""A pipe table.

        Args:
            gap: on either side of the dashes of its rule.
            numeric: whether each column is one of numbers, which stand at the right; as the cells
                look where it is empty.

        >>> print(Table("", ("", "ECE"), (("clip | temperature", "1.2"),)).markdown())
        |  | ECE |
        |---|---:|
        | clip \| temperature | 1.2 |
        """
        columns = list(zip(*self.rows, strict=True)) or [()] * len(self.headings)
        right = numeric or (False, *map(_numeric, columns[1:]))
        dashes = ["---:" if one else "---" for one in right]
        rule = f"|{gap}" + f"{gap}|{gap}".join(dashes) + f"{gap}|"
        lines = [[heading.replace("\n", " ") for heading in self.headings], *self.rows]
        head, *rows = (
            "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
        )
        return "\n".join([head, rule, *rows])

    def document(self) -> str:
        """Title, pipe table and footnotes, as Markdown."""
        notes = "".join(f"\n- [{letter}] {text}" for letter, text in self.notes)
        return f"{self.title}\n\n{self.markdown()}\n{notes}".rstrip()


def spelled(text: str) -> str:
    r"""The text with control characters spelled out: names of files and classes may hold any.

    >>> print(spelled("cat" + chr(27) + "[31m"))
    cat\x1b[31m
    """
    return text.translate(CONTROLS)


def _numeric(cells: Iterable[str]) -> bool:
    """Whether a column is one of numbers, which stand best at the right."""
    shown = (cell.lstrip("*") for cell in cells)
    return all(cell[:1] in "-0123456789" or cell.startswith(("n/a", "inf")) for cell in shown)


def html_text(text: str) -> str:
    """Text for a page: nothing in it acts there, but **bold** and `code` are so.

    >>> html_text("**c** < `1`")
    '<b>c</b> &lt; <code>1</code>'
    """
    text = escape(text)
    for pattern, tag in MARKS.items():
        text = re.sub(pattern, tag, text)
    return text


def html_table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], *, above: str = "", below: str = ""
) -> str:
    """A table with a line of text above it and one below."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html_text(one)}</{tag}>" for one in cells) + "</tr>"

    body = "".join(line(row, "td") for row in rows)
    head = f"<thead>{line(headings, 'th')}</thead>" if any(headings) else ""
    parts = (above, f"<table>{head}<tbody>{body}</tbody></table>", below)
    told = [parts[1] if one is parts[1] else f"<p>{html_text(one)}</p>" for one in parts if one]
    return "".join(told)
