"""The commands that make and look at feature packs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from featcal.cli import tables
from featcal.cli.bar import progress_bar
from featcal.cli.commands import JSON, PACK, print_json
from featcal.data import Pack, import_npz


@click.group()
def pack() -> None:
    """Make and look at feature packs."""


@pack.command("import")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path), help="The folder to make."
)
@JSON
def import_(file: Path, output: Path, as_json: bool) -> None:
    """Make a pack of an .npz FILE.

    The file holds val_features, val_labels, test_features, test_labels, weight and bias (logits are
    features @ weight.T + bias), or logits alone: val_logits, val_labels, test_logits, test_labels.
    """
    with progress_bar():
        made = import_npz(file, output)
    if as_json:
        print_json({**made.summary(), "output": str(output)})
        return
    print_pack(made.summary())
    tables.say(f"Wrote {output}")


def print_pack(summary: dict[str, Any]) -> None:
    """What a pack holds, for people."""
    for line in tables.pack_lines(summary):
        tables.say(line)
    tables.console().print(tables.pack_table(summary))


@pack.command()
@PACK
@click.option("--verify", is_flag=True, help="Read every byte and check it against its sha256.")
@JSON
def info(pack_path: Path, verify: bool, as_json: bool) -> None:
    """Say what PACK holds."""
    opened = Pack.open(pack_path)
    if verify:
        with progress_bar():
            opened.verify()
    summary = opened.summary()
    if as_json:
        print_json({**summary, "verified": verify})
        return
    print_pack(summary)
    if verify:
        tables.say("Every byte is as its sha256 says.")
