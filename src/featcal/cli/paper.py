"""The tables of the paper, each cell with what is known about it, beside results of ours."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from featcal.cli.compare import PLAIN_ARROWS
from featcal.cli.shared import JSON, TEXT_WIDTH, console, print_json, say
from featcal.core.checks import InputError
from featcal.report.paper import (
    ARROWS,
    Grid,
    Ours,
    PaperTable,
    checkout_results,
    paper_grid,
    paper_table,
    paper_tables,
)

FORMATS = ("table", "markdown", "csv", "json")
AS_PRINTED = (ARROWS[0], "As the paper prints them.")
PLAIN = str.maketrans({"▼": PLAIN_ARROWS["down"], "▲": PLAIN_ARROWS["up"], "±": "+-"})
LISTED = {
    **{"name": "name", "number": "table", "cells": "cells", "faulty": "marked"},
    "summary": "what it shows",
}
VALUES = (
    *("table", "source", "row", "column", "value", "low", "high"),
    *("threshold", "arrow", "bold", "marks"),
)
NONE_OF_OURS = (
    "No results of ours are shown: give --results DIR, the results folder of a source checkout."
)


@click.command()
@click.argument("name", required=False)
@click.option("--all", "every", is_flag=True, help="Show every table.")
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    help="How to print: csv has one line a value.  [default: table]",
)
@JSON
@click.option(
    "--results",
    type=click.Path(path_type=Path),
    help="Folder with reproduction.json, training.json or both; by default that of the source "
    "checkout, if it is one.",
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
    if as_json and form not in (None, "json"):
        raise InputError(f"--json and --format {form} contradict each other: give one")
    form = "json" if as_json else form or "table"
    if name is None and not every:
        _list(form)
        return
    folder = checkout_results() if results is None else results
    ours = None if folder is None else Ours.read(folder)
    chosen = paper_tables() if name is None else (paper_table(name),)
    if form == "json":
        found = [_as_json(table, ours) for table in chosen]
        print_json({"tables": found} if every else found[0])
    elif form == "csv":
        click.echo(as_csv(_values(chosen, ours), VALUES), nl=False)
    else:
        for table in chosen:
            _show(table, ours, form)
        if ours is None:
            say(NONE_OF_OURS)


def _list(form: str) -> None:
    """The tables by name, in any of the forms."""
    facts = [_facts(table) for table in paper_tables()]
    if form == "json":
        print_json({"tables": facts})
    elif form == "csv":
        click.echo(as_csv(facts, tuple(facts[0])), nl=False)
    elif form == "markdown":
        rows = tuple(tuple(str(fact[key]) for key in LISTED) for fact in facts)
        click.echo(Grid("", tuple(LISTED.values()), rows).markdown())
    else:
        console().print(_listing(facts))
        say("Marked cells hold a defect or a misprint; see one with: featcal paper NAME")


def _listing(facts: list[dict[str, Any]]) -> Table:
    table = Table()
    for key, heading in LISTED.items():
        words = key in ("name", "summary")
        table.add_column(heading, justify="left" if words else "right", no_wrap=key != "summary")
    for fact in facts:
        table.add_row(*(str(fact[key]) for key in LISTED))
    return table


def _facts(table: PaperTable) -> dict[str, Any]:
    return {
        "number": table.number,
        "name": table.name,
        "label": table.label,
        "summary": table.summary,
        "cells": len(list(table)),
        "faulty": table.faulty,
    }


def _as_json(table: PaperTable, ours: Ours | None) -> dict[str, Any]:
    return {**table.as_json(), "ours": None if ours is None else ours.as_json(table)}


def _values(chosen: tuple[PaperTable, ...], ours: Ours | None) -> Iterator[dict[str, Any]]:
    """Every value, the paper's and ours, as a line of the CSV."""
    for table in chosen:
        yield from ({"table": table.name, "source": "paper", **v} for v in table.values())
        for value in () if ours is None else ours.values(table):
            yield {"table": table.name, **value}


def as_csv(lines: Iterable[dict[str, Any]], columns: tuple[str, ...]) -> str:
    """Text with one line a value; what a line does not have stays empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def _show(table: PaperTable, ours: Ours | None, form: str) -> None:
    for grid in (_as_printed(paper_grid(table)), *([] if ours is None else ours.beside(table))):
        _print(grid, form)
        say("")


def _as_printed(grid: Grid) -> Grid:
    """The paper's table with a word on its arrows, which no interval stands behind."""
    marked = any(set(cell) & set(ARROWS[0].split()) for row in grid.rows for cell in row)
    return replace(grid, notes=(*grid.notes, AS_PRINTED)) if marked else grid


def _printable(text: str) -> str:
    """The text with signs that standard output can encode."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return text.translate(PLAIN)
    return text


def _print(grid: Grid, form: str) -> None:
    if form == "markdown":
        # Plain echo: a pipe table is one line a row, however narrow the terminal.
        click.echo(_printable(grid.document()))
        return
    screen = console()
    say(grid.title)
    for block in grid.blocks(screen.width):
        screen.print(_rich(block))
    if grid.notes:
        screen.print(_footnotes(grid), width=min(screen.width, TEXT_WIDTH))


def _rich(grid: Grid) -> Table:
    table = Table()
    table.add_column(grid.headings[0], overflow="fold")
    for heading in grid.headings[1:]:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in grid.rows:
        table.add_row(*map(_text, row))
    return table


def _text(cell: str) -> Text:
    text = Text()
    for index, part in enumerate(_printable(cell).split("**")):
        text.append(part, style="bold" if index % 2 else "")
    return text


def _footnotes(grid: Grid) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for letter, text in grid.notes:
        table.add_row(_printable(f"[{letter}]"), Text(text))
    return table
