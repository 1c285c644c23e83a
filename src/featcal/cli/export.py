"""featcal export: a calibrated network, or its calibrated last layer, as a file to serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from torch import Tensor, nn

from featcal import export as files
from featcal import io
from featcal.cli import tables
from featcal.cli.bar import progress_bar
from featcal.cli.collect import HEAD
from featcal.cli.commands import FORCE, JSON, OVERWRITE, load_for, print_json
from featcal.cli.target import load_target
from featcal.core.attach import attach
from featcal.core.disk import check_free
from featcal.core.errors import InputError
from featcal.core.find import find_head
from featcal.core.layer import mapped
from featcal.data import Pack
from featcal.data.loading import checked_iter, placed, unpacked


@click.command()
@click.argument("source", metavar="PACK|PACKAGE.MODULE:FUNCTION")
@click.argument("calibrator_path", metavar="CALIBRATOR", type=click.Path(path_type=Path))
@click.option(
    "--onnx", "output", required=True, type=click.Path(path_type=Path), help="The file to write."
)
@HEAD
@click.option("--split", help="Rows to compare on; the last split, if it is not named.")
@click.option(
    "--rows", default=256, show_default=True, type=click.IntRange(1), help="How many to compare on."
)
@click.option("--probabilities", is_flag=True, help="Give them as a second output.")
@click.option("--opset", type=click.IntRange(7), help="Version of ONNX's operators.")
@FORCE
@JSON
def export(
    source: str,
    calibrator_path: Path,
    output: Path,
    head: str | None,
    split: str | None,
    rows: int,
    probabilities: bool,
    opset: int | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write a calibrated network as an ONNX file and compare it on real rows in ONNX Runtime.

    With FUNCTION, as in "featcal collect", the file is the whole network: inputs to calibrated
    logits. With PACK it is the calibrated last layer alone: features to calibrated logits, or
    logits to calibrated logits where the calibrator needs no more.

    \b
    Examples:
      featcal export my_project.models:build cal.safetensors --onnx model.onnx
      featcal export my-pack cal.safetensors --onnx head.onnx
    """  # noqa: D301 - click knows a block by the character itself
    check_free(output, overwrite=force, remedy=OVERWRITE)
    make = _of_pack if Path(source).is_dir() else _of_function
    model, example = make(source, calibrator_path, head, split, rows)
    with progress_bar():
        made = files.onnx(
            model,
            output,
            example,
            opset=opset,
            probabilities=probabilities,
            overwrite=force,
        )
    if as_json:
        print_json(made.as_json())
        return
    for title, ports in (("in", made.inputs), ("out", made.outputs)):
        tables.say(f"{title}: {', '.join(f'{name} {kind}' for name, kind in ports.items())}")
    tables.say(str(made))


def _of_pack(
    source: str, path: Path, head: str | None, split: str | None, rows: int
) -> tuple[nn.Module, Tensor]:
    """The calibrated last layer, and real rows of what enters it."""
    if head is not None:
        raise InputError("--head names a layer of a network, and a pack has only one: leave it out")
    pack = Pack.open(source)
    calibrator = load_for(path, pack)
    batch = next(iter(pack.split(split or pack.splits[-1]))).rows(slice(0, rows))
    entered = batch.features if pack.head is not None else batch.logits
    assert entered is not None
    return calibrator.wrap(pack.head), entered


def _of_function(
    source: str, path: Path, head: str | None, split: str | None, rows: int
) -> tuple[nn.Module, Any]:
    """The network with the calibrator in it, and a batch of its own inputs."""
    if ":" not in source:
        raise InputError(
            f"{source} is neither a folder nor package.module:function: give a pack or the "
            "function that returns the model and its loaders"
        )
    calibrator = io.load(path)
    found = load_target(source)
    name = split or list(found.loaders)[-1]
    if name not in found.loaders:
        known = ", ".join(found.loaders)
        raise InputError(f"{source} has no loader {name!r}: choose one of {known}")
    batch = next(checked_iter(found.loaders[name]), None)
    if batch is None:
        raise InputError(f"the loader {name!r} of {source} is empty: give it rows to compare on")
    inputs = placed(unpacked(found.model, batch, found.options.get("unpack"))[0], found.model)
    told = head or found.options.get("head")
    layer = found.options.get("layer")
    place = find_head(found.model, told, inputs=inputs)
    model = attach(found.model, calibrator, head=place, layer=layer)
    return model, mapped(inputs, lambda tensor: tensor[:rows])
