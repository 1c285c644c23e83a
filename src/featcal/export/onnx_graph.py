"""A captured model in the terms of ONNX: named, signed, and with nothing missing."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import nn

from featcal.core.calibrator import Calibrator
from featcal.core.errors import InputError
from featcal.core.wrapper import Wrapper
from featcal.export.capture import captured, first_lines, quiet
from featcal.export.inputs import Inputs
from featcal.export.output import PROBABILITIES, Output
from featcal.version import __version__

Graph: TypeAlias = Any  # those of onnx_ir, which comes with the extra
Model: TypeAlias = Any


def built_graph(
    model: nn.Module,
    inputs: Inputs,
    output: Output,
    *,
    opset: int | None = None,
    probabilities: bool = False,
) -> Model:
    """The model as ONNX, in memory.

    Args:
        model: in eval mode, on the CPU.
        inputs: what it is called with.
        output: which tensor of what it gives.
        opset: the version of ONNX's operators; None for the exporter's own.
        probabilities: whether those of logits are a second output.
    """
    program = captured(model, inputs, output, probabilities=probabilities)
    try:
        with quiet():
            made = torch.onnx.export(program, dynamo=True, verbose=False, opset_version=opset)
    except Exception as error:  # as above: errors of many classes, some of them private
        raise InputError(f"the model has no form in ONNX: {first_lines(error)}") from error
    assert made is not None
    found = made.model.opset_imports[""]
    if opset not in (None, found):
        raise InputError(f"opset {opset} cannot express the model: take {found}, or leave it out")
    _keep_constants(made.model.graph)
    _name(made.model.graph, inputs, list(dict.fromkeys([output.name, PROBABILITIES])))
    _sign(made.model, model)
    return made.model


def _keep_constants(graph: Graph) -> None:
    """Puts back constants that were lost on the way.

    The optimiser names the bounds of a clamp after what is clamped; when one tensor is clamped
    twice, as in `clip | group(features="clipped")`, the second pair drives the first out of the
    table of constants, and the file would refer to values it does not hold.
    """
    for node in graph:
        for value in node.inputs:
            constant = value is not None and value.const_value is not None
            if constant and value.producer() is None and value.name not in graph.initializers:
                graph.register_initializer(value)


def _name(graph: Graph, inputs: Inputs, outputs: list[str]) -> None:
    """The names of `forward` for the inputs, ours for the outputs and for the free sizes."""
    taken = {name: f"{name}_in" if name in outputs else name for name in inputs.values}
    wanted = [*taken.values(), *outputs]
    for node in graph:
        for value in node.outputs:
            if value.name in wanted:
                value.name = f"{value.name}_inner"
    for value, known in zip(graph.inputs, taken.values(), strict=True):
        value.name = known
    for value, known in zip(graph.outputs, outputs, strict=False):
        value.name = known
    _name_sizes(graph, inputs)


def _name_sizes(graph: Graph, inputs: Inputs) -> None:
    names: dict[object, str] = {}
    for value, key in zip(graph.inputs, inputs.values, strict=True):
        for axis, name in inputs.axes.get(key, {}).items():
            names.setdefault(value.shape[axis], name)
    for value in (*graph.inputs, *(value for node in graph for value in node.outputs)):
        if value.shape is not None:
            value.shape = type(value.shape)([names.get(size, size) for size in value.shape])


def _sign(built: Model, model: nn.Module) -> None:
    """Says in the file what it is, and takes out the paths and source lines of this machine."""
    for node in built.graph.all_nodes():
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*built.graph.inputs, *built.graph.initializers.values()):
        value.metadata_props.clear()
    built.metadata_props["featcal.version"] = __version__
    fitted = [part.calibrator for part in model.modules() if isinstance(part, Wrapper)]
    if fitted:
        built.metadata_props["featcal.recipe"] = "; ".join(map(repr, fitted))
        built.metadata_props["featcal.fitted"] = "; ".join(map(_fitted, fitted))


def _fitted(calibrator: Calibrator) -> str:
    return str(calibrator).removeprefix(repr(calibrator)).strip()
