"""featcal collect: a network's features straight into a pack."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import torch
from torch import nn

from featcal.cli import tables
from featcal.cli.bar import progress_bar
from featcal.cli.commands import HEAD, JSON, going_on_later, output_option, print_json
from featcal.cli.packs import print_pack
from featcal.cli.target import load_target, placed_on
from featcal.core.disk import REMOVE, check_free
from featcal.data.collect_pack import COLLECTED_ROWS, collect_pack
from featcal.data.partial import partial_of

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
    tables.say(f"Wrote {output}: {rows:,} rows in {seconds:.1f} s{went_on}")


def _precision(model: nn.Module, autocast: str | None) -> AbstractContextManager[object]:
    if autocast is None:
        return nullcontext()
    device = next((weight.device.type for weight in model.parameters()), "cpu")
    return torch.autocast(device, getattr(torch, autocast))
