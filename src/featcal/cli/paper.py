"""featcal paper: the tables of the feature clipping paper beside ours."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import click

from featcal.cli import app
from featcal.core.checks import InputError
from featcal.core.table import Table
from featcal.paper import CSV_HEADER, read_paper

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
    says, then what networks of ours that were trained as the paper's give, cell beside cell, and
    what other networks and the paper's own logits do.

    Example: featcal paper ece-posthoc
    """
    if name is not None and every:
        raise InputError(f"{name} and --all contradict each other: give one of them")
    form = app.format_of(form, as_json) or "table"
    tables = read_paper(results)
    if name is not None and name not in tables:
        raise InputError(f"the paper has no table {name!r}: choose one of {', '.join(tables)}")
    if name is None and not every:
        _list([table.facts for table in tables.values()], form)
        return
    chosen = list(tables.values()) if name is None else [tables[name]]
    if form == "json":
        found = [table.body for table in chosen]
        app.print_json({"tables": found} if every else found[0])
    elif form == "csv":
        click.echo("\n".join([",".join(CSV_HEADER), *(line for t in chosen for line in t.csv)]))
    else:
        for table in (one for each in chosen for one in each.shown):
            if form == "table":
                app.say(table, "")
            else:  # by a plain echo: a pipe table has one line per row, however narrow the terminal
                click.echo(app.printable(table.document(), sys.stdout.encoding) + "\n")


def _list(facts: list[dict[str, Any]], form: str) -> None:
    """The tables by name, in any of the forms."""
    rows = (tuple(str(fact[key]) for key in LISTED) for fact in facts)
    table = Table("", tuple(LISTED.values()), tuple(rows))
    if form == "json":
        app.print_json({"tables": facts})
    elif form == "csv":
        writer = csv.DictWriter(sys.stdout, list(facts[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(facts)
    elif form == "markdown":
        click.echo(table.markdown())
    else:
        hint = "Marked cells hold a defect or a misprint; see one with: featcal paper NAME"
        app.say(table, hint)
