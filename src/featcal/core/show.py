"""Small tables of HTML, as notebooks show them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

MARKS = {r"\*\*(.+?)\*\*": r"<b>\1</b>", "`([^`]+)`": r"<code>\1</code>"}


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
