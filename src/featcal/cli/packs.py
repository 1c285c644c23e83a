"""The commands that make and look at feature packs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from featcal.cli import tables
from featcal.cli.bar import progress_bar
from featcal.cli.commands import JSON, PACK, output_option, print_json
from featcal.core.errors import InputError
from featcal.core.probabilities import Kind
from featcal.data import Pack, import_files


@click.group()
def pack() -> None:
    """Make and look at feature packs."""


@pack.command("import")
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@output_option("The folder to make.")
@click.option("--logits", is_flag=True, help="The numbers of the tables are logits.")
@click.option("--probs", is_flag=True, help="The numbers of the tables are probabilities.")
@click.option("--label", default="label", show_default=True, help="The tables' column of labels.")
@click.option(
    "--ignore", multiple=True, metavar="COLUMN", help="A column that holds no scores; repeatable."
)
@JSON
def import_(
    files: tuple[str, ...],
    output: Path,
    logits: bool,
    probs: bool,
    label: str,
    ignore: tuple[str, ...],
    as_json: bool,
) -> None:
    """Make a pack of logits, probabilities or features in files.

    Arrays (.npz, .safetensors, or one .npy each) are told by their names: val_logits or val_probs
    (rows, classes), val_labels, and the same for test; or val_features with weight and bias of the
    last layer. Tables (.csv, .tsv, .parquet) hold a split each: a column "label" and a column for
    each class, called logit_cat or prob_cat, or cat with --logits or --probs. The file's name is
    the split's, unless NAME=PATH says another. A single column is that of class 1.

    \b
    Examples:
      featcal pack import arrays.npz -o my-pack
      featcal pack import arrays.safetensors -o my-pack
      featcal pack import val_logits.npy val_labels.npy test_logits.npy test_labels.npy -o my-pack
      featcal pack import val.csv test.csv --logits -o my-pack
      featcal pack import val=runs/7.parquet test=runs/8.parquet --label y --ignore id -o my-pack
    """  # noqa: D301 - click knows a block by the character itself
    with progress_bar():
        made = import_files(files, output, label=label, kind=_kind(logits, probs), ignore=ignore)
    if as_json:
        print_json({**made.summary(), "output": str(output)})
        return
    print_pack(made.summary())
    tables.say(f"Wrote {output}")


def _kind(logits: bool, probs: bool) -> Kind | None:
    if logits and probs:
        raise InputError("--logits and --probs contradict each other: give one")
    return "logits" if logits else "probs" if probs else None


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
