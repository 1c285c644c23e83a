"""`featcal paper`: the tables of the paper, each cell with what is known about it, and ours."""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path
from typing import Any

import click
from rich.table import Table as RichTable
from rich.text import Text

from featcal.cli import app
from featcal.cli.compare import PLAIN_ARROWS
from featcal.core.checks import InputError
from featcal.report.paper import CSV_HEADER, read_paper
from featcal.report.tables import Table

PLAIN = str.maketrans({"▼": PLAIN_ARROWS["down"], "▲": PLAIN_ARROWS["up"], "±": "+-"})
FORMATS = ("table", "markdown", "csv", "json")
LISTED = {
    **{"name": "name", "number": "table", "cells": "cells", "faulty": "marked"},
    "summary": "what it shows",
}


@click.command()
@click.argument("name", required=False)
@click.option("--all", "every", is_flag=True, help="Show every table.")
@app.format_option(FORMATS, "How to print: csv has one line per value.  [default: table]")
@app.JSON
@click.option(
    "--results",
    type=app.PATH,
    help="Folder with a paper.json of other results, which experiments/paper_tables.py makes; by "
    "default those of this version are shown.",
)
def paper(
    name: str | None, every: bool, form: str | None, as_json: bool, results: Path | None
) -> None:
    """List the tables of the feature clipping paper, or show table NAME.

    Each table is shown as printed, with a footnote where a cell does not hold what its heading
    says, and beside it what our own networks and the paper's own logits give. Networks we trained
    stand beside train-time, accuracy and layers, each with its training in a footnote.

    Example: featcal paper ece-posthoc
    """
    if name is not None and every:
        raise InputError(f"{name} and --all contradict each other: give one of them")
    form = app.format_of(form, as_json) or "table"
    tables = read_paper(results)
    if name is None and not every:
        _list([table.facts for table in tables.values()], form)
        return
    if name is not None and name not in tables:
        raise InputError(f"the paper has no table {name!r}: choose one of {', '.join(tables)}")
    chosen = list(tables.values()) if name is None else [tables[name]]
    if form == "json":
        found = [table.body for table in chosen]
        app.print_json({"tables": found} if every else found[0])
    elif form == "csv":
        click.echo(",".join(CSV_HEADER))
        for table in chosen:
            click.echo("\n".join(table.csv))
    else:
        for one in (one for table in chosen for one in table.shown):
            _print(one, form)
            app.say("")


def _list(facts: list[dict[str, Any]], form: str) -> None:
    """The tables by name, in any of the forms."""
    rows = tuple(tuple(str(fact[key]) for key in LISTED) for fact in facts)
    if form == "json":
        app.print_json({"tables": facts})
    elif form == "csv":
        text = io.StringIO()
        writer = csv.DictWriter(text, list(facts[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(facts)
        click.echo(text.getvalue(), nl=False)
    elif form == "markdown":
        click.echo(Table("", tuple(LISTED.values()), rows).markdown())
    else:
        table = RichTable()
        for key, heading in LISTED.items():
            side = "left" if key in ("name", "summary") else "right"
            table.add_column(heading, justify=side, no_wrap=key != "summary")  # type: ignore[arg-type]
        for row in rows:
            table.add_row(*row)
        app.console().print(table)
        app.say("Marked cells hold a defect or a misprint; see one with: featcal paper NAME")


def _print(table: Table, form: str) -> None:
    if form == "markdown":
        # Plain echo: a pipe table has one line per row, however narrow the terminal.
        click.echo(_printable(table.document()))
        return
    screen = app.console()
    app.say(table.title)
    for block in table.blocks(screen.width):
        shown = RichTable()
        shown.add_column(block.headings[0], overflow="fold")
        for heading in block.headings[1:]:
            shown.add_column(heading, justify="right", no_wrap=True)
        for row in block.rows:
            shown.add_row(*map(_text, row))
        screen.print(shown)
    if table.notes:
        footnotes = RichTable.grid(padding=(0, 1))
        footnotes.add_column(no_wrap=True)
        footnotes.add_column(overflow="fold")
        for letter, text in table.notes:
            footnotes.add_row(_printable(f"[{letter}]"), Text(text))
        screen.print(footnotes, width=min(screen.width, app.TEXT_WIDTH))


def _text(cell: str) -> Text:
    text = Text()
    for index, part in enumerate(_printable(cell).split("**")):
        text.append(part, style="bold" if index % 2 else "")
    return text


def _printable(text: str) -> str:
    """The text with signs that standard output can encode."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return text.translate(PLAIN)
    return text
