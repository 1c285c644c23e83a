"""featcal export: a calibrated network, or its calibrated last layer, as a file to serve."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, nn

from featcal import export as files
from featcal import io
from featcal.cli import app
from featcal.cli.fit import load_for
from featcal.cli.packs import DYNAMIC, load_target
from featcal.core.checks import InputError
from featcal.core.files import check_free
from featcal.data import Pack
from featcal.data.collect import placed, unpacked
from featcal.export.parity import TOLERANCE
from featcal.heads.attach import attach
from featcal.heads.find import find_head, mapped

EXAMPLE_ROWS = 4


@click.command()
@click.argument("source", metavar="PACK|PACKAGE.MODULE:FUNCTION")
@app.CALIBRATOR
@click.option("--onnx", "output", required=True, type=app.PATH, help="The file to write.")
@app.HEAD
@click.option("--split", help="Rows to compare on; the last split, if it is not named.")
@click.option("--rows", default=256, type=app.COUNT, help="How many to compare on.")
@click.option("--probabilities", is_flag=True, help="Give them as a second output.")
@click.option(
    "--tolerance", default=TOLERANCE, type=click.FloatRange(0), help="Largest difference allowed."
)
@click.option("--opset", type=click.IntRange(7), help="Version of ONNX's operators.")
@app.FORCE
@app.JSON
def export(
    source: str,
    calibrator_path: Path,
    output: Path,
    head: str | None,
    split: str | None,
    rows: int,
    probabilities: bool,
    tolerance: float,
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
    check_free(output, overwrite=force, remedy=app.OVERWRITE)
    model, inputs, dynamic = _source(source, calibrator_path, head, split, rows)
    with app.progress_bar():
        made = files.onnx(
            model,
            output,
            _first(inputs, EXAMPLE_ROWS),  # enough to follow the model
            rows=inputs,
            dynamic=dynamic,
            opset=opset,
            probabilities=probabilities,
            tolerance=tolerance,
            overwrite=force,
        )
    if as_json:
        app.print_json(made.as_json())
        return
    for title, ports in (("in", made.inputs), ("out", made.outputs)):
        app.say(f"{title}: {', '.join(f'{name} {kind}' for name, kind in ports.items())}")
    app.say(str(made))


def _source(
    source: str, path: Path, head: str | None, split: str | None, rows: int
) -> tuple[nn.Module, Any, Any]:
    """What becomes a file, real rows of what enters it, and its axes of any size.

    Of a pack that is the calibrated last layer; of a function the network with the calibrator in
    it. Axes are None for the rows alone.
    """
    if Path(source).is_dir():
        if head is not None:
            raise InputError(
                "--head names a layer of a network, and a pack has only one: leave it out"
            )
        pack = Pack.open(source)
        calibrator = load_for(path, pack)
        batches = pack.split(split or pack.splits[-1])
        entered = (b.logits if pack.head is None else b.features for b in batches)
        return calibrator.wrap(pack.head), _joined(entered, rows), None
    if ":" not in source:
        raise InputError(
            f"{source} is neither a folder nor package.module:function: give a pack or the "
            "function that returns the model and its loaders"
        )
    calibrator = io.load(path)
    network, loaders, options = load_target(source)
    name = split or list(loaders)[-1]
    if name not in loaders:
        raise InputError(f"{source} has no loader {name!r}: choose one of {', '.join(loaders)}")
    given = (inputs for inputs, _ in unpacked(network, loaders[name], options.get("unpack")))
    inputs = _joined((placed(batch, network) for batch in given), rows)
    if inputs is None:
        raise InputError(f"the loader {name!r} of {source} is empty: give it rows to compare on")
    told = head or options.get("head")
    place = find_head(network, told, inputs=_first(inputs, EXAMPLE_ROWS))
    # Where a pack keeps an inner layer, a calibrator of logits alone acts behind the last one.
    layer = options.get("layer") if calibrator.needs_features else None
    return attach(network, calibrator, head=place, layer=layer), inputs, options.get(DYNAMIC)


def _joined(batches: Iterable[Any], most: int) -> Any:  # noqa: ANN401
    """The first rows of the batches as one; those before a batch of other sizes, None of none."""
    parts: list[Any] = []
    rows = 0
    for batch in batches:
        if parts and _sizes(batch) != _sizes(parts[0]):
            break  # such as text of another length
        parts.append(batch)
        rows += next((len(tensor) for tensor in _tensors(batch) if tensor.ndim), most)
        if rows >= most:
            break
    if len(parts) < 2:
        return _first(parts[0], most) if parts else None
    columns = zip(*map(_tensors, parts), strict=True)
    whole = (torch.cat(column) for column in columns)
    return _first(mapped(parts[0], lambda _: next(whole)), most)


def _first(inputs: Any, rows: int) -> Any:  # noqa: ANN401
    return mapped(inputs, lambda tensor: tensor[:rows] if tensor.ndim else tensor)


def _tensors(inputs: Any) -> list[Tensor]:  # noqa: ANN401
    found: list[Tensor] = []
    mapped(inputs, found.append)
    return found


def _sizes(inputs: Any) -> list[object]:  # noqa: ANN401
    """Of every tensor, what must be alike in two batches to be joined; no two scalars are alike."""
    return [
        (tensor.dtype, tensor.shape[1:]) if tensor.ndim else object() for tensor in _tensors(inputs)
    ]
