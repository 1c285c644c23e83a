"""The commands that make and look at feature packs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import torch
from torch import nn

from featcal.cli.shared import (
    HEAD,
    JSON,
    PACK,
    console,
    going_on_later,
    load_target,
    output_option,
    pack_lines,
    pack_table,
    placed_on,
    print_json,
    progress_bar,
    say,
)
from featcal.core.checks import InputError, Kind
from featcal.core.files import REMOVE, check_free
from featcal.data import Pack, import_files
from featcal.data.resume import COLLECTED_ROWS, collect_pack, partial_of


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
    say(f"Wrote {output}")


def _kind(logits: bool, probs: bool) -> Kind | None:
    if logits and probs:
        raise InputError("--logits and --probs contradict each other: give one")
    return "logits" if logits else "probs" if probs else None


def print_pack(summary: dict[str, Any]) -> None:
    """What a pack holds, for people."""
    for line in pack_lines(summary):
        say(line)
    console().print(pack_table(summary))


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
        say("Every byte is as its sha256 says.")


# --- featcal collect: a network's features straight into a pack.

TARGET = click.argument("target", metavar="PACKAGE.MODULE:FUNCTION")
DEVICE = click.option("--device", help="Where to run, such as cuda; where the model is, if not.")
AUTOCAST = click.option(
    "--autocast", type=click.Choice(["bfloat16", "float16"]), help="Run in mixed precision."
)


@click.command()
@TARGET
@output_option("The folder to make.")
@HEAD
@click.option("--layer", help="Keep what this layer gives, not what enters the last one.")
@DEVICE
@AUTOCAST
@click.option(
    "--shard-rows",
    default=COLLECTED_ROWS,
    show_default=True,
    type=click.IntRange(1),
    help="Rows a shard: what a kill costs at most.",
)
@JSON
def collect(
    target: str,
    output: Path,
    head: str | None,
    layer: str | None,
    device: str | None,
    autocast: str | None,
    shard_rows: int,
    as_json: bool,
) -> None:
    """Run a network over its data and write a pack of what enters its last layer.

    FUNCTION takes nothing and returns (model, {"val": loader, "test": loader}), or a mapping with
    model, loaders and, where you like, class_names, dataset, name, head, layer, unpack, meta, and
    for export dynamic. The loaders give (inputs, labels), or mappings with labels, in a fixed
    order. A run that was killed goes on where it was when the same command is given again.

    Example: featcal collect my_project.models:build -o my-pack
    """
    check_free(output, remedy=REMOVE)
    found = load_target(target)
    model = placed_on(found.model, device)
    told = {key: value for key, value in (("head", head), ("layer", layer)) if value is not None}
    begun = partial_of(output).exists()
    started = perf_counter()
    with progress_bar(), _precision(model, autocast), going_on_later(partial_of(output)):
        made = collect_pack(
            model, found.loaders, output, shard_rows=shard_rows, **{**found.options, **told}
        )
    seconds = perf_counter() - started
    rows = sum(map(made.manifest.rows, made.splits))
    if as_json:
        figures: dict[str, Any] = {"resumed": begun, "seconds": seconds}
        print_json({**made.summary(), "output": str(output), **figures})
        return
    print_pack(made.summary())
    went_on = ", some of them by an earlier run" if begun else ""
    say(f"Wrote {output}: {rows:,} rows in {seconds:.1f} s{went_on}")


def _precision(model: nn.Module, autocast: str | None) -> AbstractContextManager[object]:
    if autocast is None:
        return nullcontext()
    device = next((weight.device.type for weight in model.parameters()), "cpu")
    return torch.autocast(device, getattr(torch, autocast))
