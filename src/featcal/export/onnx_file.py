"""ONNX: the model as one file, compared with the model in ONNX Runtime before it takes its name."""

from __future__ import annotations

import copy
import importlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from featcal.core.arguments import check_flags, check_whole
from featcal.core.disk import check_free, new_file
from featcal.core.errors import InputError
from featcal.core.fitting import exact, undisturbed
from featcal.export.capture import first_lines, quiet
from featcal.export.inputs import CHUNK_ROWS, Dynamic, Example, Inputs, portable
from featcal.export.onnx_graph import Model, built_graph
from featcal.export.output import proved_output
from featcal.export.parity import TOLERANCE, Parity, compare

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
ONE_FILE = 2**31 - 2**25  # bytes of weights up to which they fit into the file: protobuf ends there


@dataclass(frozen=True)
class OnnxExport:
    """An ONNX file and how well it was seen to agree with the model.

    Attributes:
        path: of the file.
        opset: the version of ONNX's operators in it.
        inputs: their names, types and sizes, such as {"x": "float32[batch, 8]"}.
        outputs: likewise: logits, and probabilities where they were asked for; probabilities alone
            where the model gives no logits.
        bytes: its size, that of the file of weights beside it included where there is one.
        parity: the comparison in ONNX Runtime.
        widened: the 16-bit type of the model's weights, which are float32 in the file; else "".
    """

    path: Path
    opset: int
    inputs: dict[str, str]
    outputs: dict[str, str]
    bytes: int
    parity: Parity
    widened: str = ""

    def as_json(self) -> dict[str, Any]:
        """One object for programs."""
        facts = {"opset": self.opset, "inputs": self.inputs, "outputs": self.outputs}
        tail = {"bytes": self.bytes, "widened": self.widened or None}
        return {"path": str(self.path), **facts, **tail, "parity": self.parity.as_json()}

    def __str__(self) -> str:
        widened = f" in float32 (the model is {self.widened})" if self.widened else ""
        size = _in_words(self.bytes)
        return f"{self.path.name}: opset {self.opset}, {size}{widened}; {self.parity}"


def onnx(
    model: nn.Module,
    path: Path | str,
    example: Example,
    *,
    dynamic: Dynamic | None = None,
    opset: int | None = None,
    probabilities: bool = False,
    rows: Example | None = None,
    tolerance: float = TOLERANCE,
    overwrite: bool = False,
) -> OnnxExport:
    """Writes the model, in eval mode, as an ONNX file; the model stays as it was.

    The file appears only after ONNX Runtime has given the model's own logits with it, on a single
    row and on more rows than it was made with too. A model on a GPU is copied to the CPU for this,
    one of 16-bit floats to float32, which ONNX Runtime knows on every machine.

    Args:
        model: a classifier, calibrated or not, or a calibrator's `wrap(head)`.
        path: the file to write.
        example: what it is called with: a tensor, a tuple of tensors, or a dict of tensors by name.
        dynamic: axes that may have any size, such as {"input_ids": {0: "batch", 1: "tokens"}};
            None for the first axis of every input, {} for none.
        opset: the version of ONNX's operators; None for the exporter's own.
        probabilities: give them as a second output: softmax, or sigmoid of a single logit. A model
            that ends in one of these has them for its only output, with or without this.
        rows: rows to compare on, in the form of the example; None for the example.
        tolerance: the largest difference of two logits, in parts of them where they are above 1;
            of two probabilities where the model gives these.
        overwrite: replace the file if it exists.

    Raises:
        InputError: when a package is missing, the model cannot be exported, or the file's logits
            are not the model's; there is no file then.
    """
    check_flags("export", probabilities=probabilities, overwrite=overwrite)
    if opset is not None:
        check_whole("export", 7, opset=opset)
    if not tolerance >= 0:
        raise InputError(
            f"export: tolerance is {tolerance!r}: give a number from 0 up, such as 1e-4"
        )
    _check_packages()
    path = check_free(path, overwrite=overwrite)
    inputs = Inputs.of(model, example, dynamic)
    checked = inputs if rows is None else inputs.like(rows)
    widened = _narrow(model)
    model, inputs, checked = _portable(model), inputs.portable(), checked.portable()
    with undisturbed(model), exact(), new_file(path, overwrite=overwrite) as temporary:
        output = proved_output(model, inputs)
        built = built_graph(model, inputs, output, opset=opset, probabilities=probabilities)
        written = _write(built, temporary)
        session = _session(temporary)
        both = partial(compare, model, partial(_run, session), tolerance=tolerance, output=output)
        parity = _compared(both, checked)
        ports = _ports(built.graph.inputs), _ports(built.graph.outputs)
        _place_weights(temporary, path, overwrite=overwrite)
    return OnnxExport(path, built.opset_imports[""], *ports, written, parity, widened)


def _check_packages() -> None:
    for package in PACKAGES:
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise InputError(
                f"ONNX files need the package {package}: pip install 'featcal[onnx]'"
            ) from error


def _narrow(model: nn.Module) -> str:
    """The 16-bit type of a model's weights; empty where it has none."""
    for value in (*model.parameters(), *model.buffers()):
        if value.is_floating_point() and value.dtype.itemsize < 4:
            return str(value.dtype).removeprefix("torch.")
    return ""


def _portable(model: nn.Module) -> nn.Module:
    """The model where it is on the CPU in 32 bits or more; else a copy of it that is."""
    tensors = [*model.parameters(), *model.buffers()]
    # Deepcopy takes from this table what it finds there: nothing is copied on the GPU first.
    moved: dict[int, Any] = {id(value): portable(value) for value in tensors}
    if all(moved[id(value)].data_ptr() == value.data_ptr() for value in tensors):
        return model
    for weight in model.parameters():
        moved[id(weight)] = nn.Parameter(moved[id(weight)], requires_grad=False)
    return copy.deepcopy(model, moved)


def _write(built: Model, temporary: Path) -> int:
    """Writes the file, and one with the weights beside it where they are too many for one."""
    import onnx_ir

    weights = sum(value.const_value.nbytes for value in built.graph.initializers.values())
    beside = None if weights < ONE_FILE else _weights(temporary).name
    with quiet():
        onnx_ir.save(built, temporary, external_data=beside)
    files = [temporary] if beside is None else [temporary, _weights(temporary)]
    return sum(file.stat().st_size for file in files)


def _weights(path: Path) -> Path:
    return path.with_name(f"{path.name}.data")


def _place_weights(temporary: Path, path: Path, *, overwrite: bool) -> None:
    """Moves the file of weights to its place, before the file that refers to it gets there."""
    if _weights(temporary).is_file():
        with new_file(_weights(path), overwrite=overwrite) as place:
            os.replace(_weights(temporary), place)


def _session(path: Path) -> Any:  # noqa: ANN401 - onnxruntime has no types
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises classes of its own, which it does not name
        raise InputError(f"ONNX Runtime cannot load the model: {first_lines(error)}") from error


def _run(session: Any, inputs: Inputs) -> Tensor:  # noqa: ANN401
    """The file's first output."""
    names = [port.name for port in session.get_inputs()]
    arrays = (value.contiguous().numpy() for value in inputs.values.values())
    try:
        first, *_ = session.run(None, dict(zip(names, arrays, strict=True)))
    except Exception as error:
        sizes = ", ".join(str(tuple(value.shape)) for value in inputs.values.values())
        raise InputError(
            f"ONNX Runtime cannot run the file on inputs of {sizes}: {first_lines(error)}"
        ) from error
    return torch.from_numpy(first)


def _compared(both: Callable[[Iterable[Inputs]], Parity], rows: Inputs) -> Parity:
    """The comparison on the rows, once it holds for other numbers of them than were traced."""
    few = rows.at(slice(0, CHUNK_ROWS))
    sizes = [few.repeated(1), few.repeated(few.rows + 1)] if rows.rows else []
    for size in sizes:
        _check(both([size]))
    return _check(both(rows.chunks()))


def _check(parity: Parity) -> Parity:
    if parity.holds:
        return parity
    raise InputError(
        f"the file's {parity.output} differ from the model's by up to {parity.max_difference:.2g} "
        f"in ONNX Runtime, on {parity.rows_beyond} of {parity.rows} rows by more than the "
        f"tolerance of {parity.tolerance:g}: it was not kept; a larger tolerance= allows more"
    )


def _ports(values: Any) -> dict[str, str]:  # noqa: ANN401
    return {
        port.name: f"{port.dtype.numpy().name}[{', '.join(map(str, port.shape))}]"
        for port in values
    }


def _in_words(size: int) -> str:
    """A file's size for people.

    >>> _in_words(999), _in_words(123_456), _in_words(5_000_000)
    ('999 bytes', '123 KB', '5 MB')
    """
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "KB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size} bytes"
