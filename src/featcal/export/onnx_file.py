"""ONNX: the model as one file, compared with the model in ONNX Runtime before it takes its name.

Some calibrators are maps with steps (`jumps`): a row at an edge of one changes by a whole step with
the last digit of its features, and two runtimes never agree on last digits. Such a row is forgiven
where the model itself gives the file's answer once its head's input is moved by as much as
rounding moves it; it is counted apart.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from featcal.core.checks import InputError, check_flags, check_whole
from featcal.core.files import check_free, new_file
from featcal.core.fit import exact, plain, undisturbed
from featcal.core.listed import TOLERANCE
from featcal.export.inputs import (
    CHUNK_ROWS,
    LOGITS,
    PROBABILITIES,
    Dynamic,
    Example,
    Inputs,
    Output,
    portable,
    proved_output,
)
from featcal.heads.head import CalibratedHead, Wrapper
from featcal.version import __version__

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
ROUNDINGS = 8 * (3e-8, 1e-7, 3e-7, 3e-6)  # moves of the features, in parts of a row's largest
ONE_FILE = 2**31 - 2**25  # bytes of weights up to which they fit into the file: protobuf ends there

Graph: TypeAlias = Any  # those of onnx_ir, which comes with the extra
Model: TypeAlias = Any
Value: TypeAlias = Any
Runner = Callable[[Inputs], Tensor]  # the exported file's first output


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
        raise InputError(f"export: tolerance is {tolerance!r}: give a number from 0 up")
    for package in PACKAGES:
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise InputError(f"ONNX needs {package}: pip install 'featcal[onnx]'") from error
    path = check_free(path, overwrite=overwrite)
    inputs = Inputs.of(model, example, dynamic)
    checked = (inputs if rows is None else inputs.like(model, rows)).portable()
    tensors = (value for value in (*model.parameters(), *model.buffers()))
    narrow = (t.dtype for t in tensors if t.is_floating_point() and t.dtype.itemsize < 4)
    widened = str(next(narrow, "")).removeprefix("torch.")
    model, inputs = _portable(model), inputs.portable()
    with undisturbed(model), exact(), new_file(path, overwrite=overwrite) as temporary:
        output = proved_output(model, inputs)
        built = built_graph(model, inputs, output, opset=opset, probabilities=probabilities)
        weights, place = (file.with_name(f"{file.name}.data") for file in (temporary, path))
        size = sum(value.const_value.nbytes for value in built.graph.initializers.values())
        with quiet():
            beside = None if size < ONE_FILE else weights.name
            importlib.import_module("onnx_ir").save(built, temporary, external_data=beside)
        files = [file for file in (temporary, weights) if file.is_file()]
        written = sum(file.stat().st_size for file in files)
        parity = _proved(model, runner(temporary), checked, tolerance, output)
        if len(files) > 1:  # the weights get there before the file that refers to them
            with new_file(place, overwrite=overwrite) as moved:
                os.replace(weights, moved)
    taken, given = (
        {
            port.name: f"{port.dtype.numpy().name}[{', '.join(map(str, port.shape))}]"
            for port in values
        }
        for values in (built.graph.inputs, built.graph.outputs)
    )
    return OnnxExport(path, built.opset_imports[""], taken, given, written, parity, widened)


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


def built_graph(
    model: nn.Module, inputs: Inputs, output: Output, *, opset: int | None, probabilities: bool
) -> Model:
    """The model as ONNX, in memory: named, signed, and with nothing missing.

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
            aten = torch.ops.aten
            known = {aten.logaddexp.default: _log_add_exp, aten.expm1.default: _exp_minus_1}
            options: dict[str, Any] = {"opset_version": opset, "custom_translation_table": known}
            made = torch.onnx.export(program, dynamo=True, verbose=False, **options)
    except Exception as error:  # errors of many classes, some of them private
        raise InputError(f"the model has no form in ONNX: {first_lines(error)}") from error
    assert made is not None
    built: Model = made.model
    found = built.opset_imports[""]
    if opset not in (None, found):
        raise InputError(f"opset {opset} cannot express the model: take {found}, or leave it out")
    # The optimiser names the bounds of a clamp after what is clamped; when one tensor is clamped
    # twice, as in `clip | group(features="clipped")`, the second pair drives the first out of the
    # table of constants, and the file would refer to values it does not hold.
    for node in built.graph:
        for value in node.inputs:
            constant = value is not None and value.const_value is not None
            if constant and value.producer() is None and value.name not in built.graph.initializers:
                built.graph.register_initializer(value)
    _name(built.graph, inputs, list(dict.fromkeys([output.name, PROBABILITIES])))
    # The paths and source lines of this machine go, and what the file is stands there instead.
    nodes = list(built.graph.all_nodes())
    values = [value for node in nodes for value in node.outputs]
    for part in (*nodes, *values, *built.graph.inputs, *built.graph.initializers.values()):
        part.metadata_props.clear()
    built.metadata_props["featcal.version"] = __version__
    fitted = [part.calibrator for part in model.modules() if isinstance(part, Wrapper)]
    if fitted:
        numbers = [str(one).removeprefix(repr(one)).strip() for one in fitted]
        built.metadata_props["featcal.recipe"] = "; ".join(map(repr, fitted))
        built.metadata_props["featcal.fitted"] = "; ".join(numbers)
    return built


def _log_add_exp(self: Value, other: Value) -> Value:
    """log(exp(a) + exp(b)): written so, as the exporter does, it would overflow or underflow."""
    op: Any = importlib.import_module("onnxscript").opset18

    top, low = op.Max(self, other), op.Min(self, other)
    log_sum = op.Add(top, op.Log(op.Add(op.CastLike(1.0, top), op.Exp(op.Sub(low, top)))))
    return op.Where(op.IsInf(top), top, log_sum)  # the difference of infinities is none


def _exp_minus_1(self: Value) -> Value:
    """exp(x) - 1: written so, as the exporter does, it would be 0 for all small x."""
    op: Any = importlib.import_module("onnxscript").opset18

    series = op.CastLike(1.0, self)  # x (1 + x/2 (1 + x/3 (1 + x/4)))
    for order in (4.0, 3.0, 2.0):
        term = op.Mul(op.Div(self, op.CastLike(order, self)), series)
        series = op.Add(op.CastLike(1.0, self), term)
    small = op.Less(op.Abs(self), op.CastLike(0.01, self))
    return op.Where(small, op.Mul(self, series), op.Sub(op.Exp(self), op.CastLike(1.0, self)))


def _name(graph: Graph, inputs: Inputs, outputs: list[str]) -> None:
    """The names of `forward` for the inputs, ours for the outputs and for the free sizes."""
    taken = {name: f"{name}_in" if name in outputs else name for name in inputs.values}
    wanted = [*taken.values(), *outputs]
    inner = [value for node in graph for value in node.outputs]
    for value in inner:
        if value.name in wanted:
            value.name = f"{value.name}_inner"
    for value, known in zip(graph.inputs, taken.values(), strict=True):
        value.name = known
    for value, known in zip(graph.outputs, outputs, strict=False):
        value.name = known
    names: dict[object, str] = {}
    for value, key in zip(graph.inputs, inputs.values, strict=True):
        for axis, name in inputs.axes.get(key, {}).items():
            names.setdefault(value.shape[axis], name)
    for value in (*graph.inputs, *inner):
        if value.shape is not None:
            value.shape = type(value.shape)([names.get(size, size) for size in value.shape])


def runner(path: Path) -> Runner:
    """Runs a file in ONNX Runtime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises classes of its own, which it does not name
        raise InputError(f"ONNX Runtime cannot load the model: {first_lines(error)}") from error

    def run(inputs: Inputs) -> Tensor:
        names = [port.name for port in session.get_inputs()]
        arrays = (value.contiguous().numpy() for value in inputs.values.values())
        try:
            return torch.from_numpy(session.run(None, dict(zip(names, arrays, strict=True)))[0])
        except Exception as error:
            sizes = ", ".join(str(tuple(value.shape)) for value in inputs.values.values())
            raise InputError(
                f"ONNX Runtime cannot run the file on inputs of {sizes}: {first_lines(error)}"
            ) from error

    return run


def _proved(
    model: nn.Module, run: Runner, rows: Inputs, tolerance: float, output: Output
) -> Parity:
    """The comparison on the rows, once it holds for other numbers of them than were traced."""
    few = rows.at(slice(0, CHUNK_ROWS))
    sizes = [few.repeated(1), few.repeated(few.rows + 1)] if rows.rows else []
    for batches in (*([size] for size in sizes), rows.chunks()):
        parity = compare(model, run, batches, tolerance=tolerance, output=output)
        if not parity.holds:
            raise InputError(
                f"the file's {parity.output} differ from the model's by up to "
                f"{parity.max_difference:.2g} in ONNX Runtime, on {parity.rows_beyond} of "
                f"{parity.rows} rows by more than {tolerance:g}: not kept; see tolerance="
            )
    return parity


def _in_words(size: int) -> str:
    """A file's size for people.

    >>> _in_words(999), _in_words(123_456), _in_words(5_000_000)
    ('999 bytes', '123 KB', '5 MB')
    """
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "KB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size} bytes"


def program(
    model: nn.Module, example: Example, *, dynamic: Dynamic | None = None
) -> ExportedProgram:
    """The model in eval mode as a `torch.export` program that gives its logits alone.

    They are probabilities where the model ends in a softmax or sigmoid. The model stays as it was,
    and shares its weights with the program. Save the program with `torch.export.save`.

    Args:
        model: a classifier, calibrated or not, or a calibrator's `wrap(head)`.
        example: what it is called with: a tensor, a tuple of tensors, or a dict of tensors by name.
        dynamic: axes that may have any size, such as {"input_ids": {0: "batch", 1: "tokens"}};
            None for the first axis of every input, {} for none.
    """
    inputs = Inputs.of(model, example, dynamic)
    with undisturbed(model), exact():
        return captured(model, inputs, proved_output(model, inputs))


def captured(
    model: nn.Module, inputs: Inputs, output: Output, *, probabilities: bool = False
) -> ExportedProgram:
    """A model in eval mode as a program: one output, and its probabilities where asked for."""
    inputs = inputs.repeated(max(inputs.rows, 2))  # torch.export takes a size of 1 for a constant
    values = {name: value.detach().clone() for name, value in inputs.values.items()}
    args, kwargs = ((), values) if inputs.keywords else (tuple(values.values()), {})
    free = {name: dict.fromkeys(inputs.axes.get(name, {}), Dim.DYNAMIC) for name in values}
    module = OneOutput(model, list(values), output, probabilities=probabilities)
    try:
        with quiet(), torch.no_grad():
            return torch.export.export(module, args, kwargs, dynamic_shapes=free, strict=False)
    except Exception as error:  # torch raises errors of a dozen classes here, some of them private
        raise InputError(
            "torch.export cannot follow the model: neither what it does nor a size may depend on "
            f"the values or the number of rows; torch says: {first_lines(error)}"
        ) from error


@final
class OneOutput(nn.Module):
    """One tensor of all that a model gives; with the probabilities of logits where asked for.

    Its `forward` has the names of the inputs for a signature, because torch.export looks there for
    names, and is confused by bare *args and **kwargs.
    """

    def __init__(
        self, model: nn.Module, names: list[str], output: Output, *, probabilities: bool = False
    ) -> None:
        super().__init__()
        self.model = model
        self.training = False

        def forward(*args: Tensor, **kwargs: Tensor) -> Tensor | tuple[Tensor, Tensor]:
            values = output.of(model(*args, **kwargs))
            both = probabilities and output.name == LOGITS
            return (values, output.chances(values)) if both else values

        named = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        forward.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
        self.forward = forward


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings, log lines or prints: the exporters' chatter; what they build is checked after.

    What they cannot do they raise.
    """
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(redirect_stdout(io.StringIO()))
        stack.enter_context(redirect_stderr(io.StringIO()))
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.CRITICAL)
        yield


def first_lines(error: BaseException, most: int = 300) -> str:
    """The beginning of an error's text, on one line."""
    text = " ".join(str(error).split())
    return f"{text[:most]} ..." if len(text) > most else text or type(error).__name__


@dataclass(frozen=True)
class Parity:
    """How far the logits of an exported file are from the model's.

    Attributes:
        rows: how many were compared.
        max_difference: of two logits, or of two probabilities where the model gives no logits; rows
            at an edge are left out.
        max_probability_difference: of the probabilities they stand for; likewise.
        predictions_changed: rows with another prediction, those at an edge included.
        tolerance: the largest difference allowed; of logits beyond 1, and beside a top logit beyond
            1, in parts of them, as float32 rounds them.
        rows_beyond: rows that differ by more.
        rows_at_edges: rows at an edge of the calibrator, where rounding decides on the side.
        output: what was compared: "logits" or "probabilities".
    """

    rows: int
    max_difference: float
    max_probability_difference: float
    predictions_changed: int
    tolerance: float
    rows_beyond: int = 0
    rows_at_edges: int = 0
    output: str = LOGITS

    @property
    def holds(self) -> bool:
        """Whether the file may stand for the model."""
        return self.rows_beyond == 0

    def as_json(self) -> dict[str, Any]:
        """The figures; `holds` among them."""
        return plain({**asdict(self), "holds": self.holds})  # type: ignore[no-any-return]

    def __str__(self) -> str:
        """The figures in words.

        >>> print(Parity(512, 3.1e-7, 1e-8, 0, 1e-4))
        512 rows in ONNX Runtime: logits differ by at most 3.1e-07, no prediction changed
        """
        changed = _counted(self.predictions_changed, "prediction")
        edges = f"; {_counted(self.rows_at_edges, 'row')} at an edge left out"
        return (
            f"{_counted(self.rows, 'row')} in ONNX Runtime: {self.output} differ by at most "
            f"{self.max_difference:.2g}, {changed} changed{edges if self.rows_at_edges else ''}"
        )


def _counted(number: int, thing: str) -> str:
    return f"{number or 'no'} {thing}{'' if number < 2 else 's'}"


def compare(
    model: nn.Module, run: Runner, batches: Iterable[Inputs], *, tolerance: float, output: Output
) -> Parity:
    """Runs both on every batch; the model is in eval mode already."""
    parts: list[tuple[Tensor, Tensor, Tensor]] = []  # (n, k) of each, and rows at an edge (n,)
    for batch in batches:
        ours, theirs = output.rows(output.of(batch.call(model))), output.rows(run(batch))
        if ours.shape != theirs.shape:
            raise InputError(f"the file gives {tuple(theirs.shape)}, the model {tuple(ours.shape)}")
        if bool(ours.isnan().any()):
            raise InputError("the model gives NaN for these rows: there is nothing to compare")
        edge = _far(ours, theirs, tolerance)
        if bool(edge.any()):
            edge = _on_edges(model, batch, theirs, edge, tolerance, output)
        parts.append((ours, theirs, edge))
    ours, theirs, edge = (torch.cat(part) for part in zip(*parts, strict=True))
    changed = int((output.predicted(ours) != output.predicted(theirs)).sum())
    kept, other = ours[~edge], theirs[~edge]
    apart = _apart(kept, other), _apart(output.chances(kept), output.chances(other))
    largest = [float(part.max()) if part.numel() else 0.0 for part in apart]
    return Parity(
        rows=len(ours),
        max_difference=largest[0],
        max_probability_difference=largest[1],
        predictions_changed=changed,
        tolerance=tolerance,
        rows_beyond=int(_far(kept, other, tolerance).sum()),
        rows_at_edges=int(edge.sum()),
        output=output.name,
    )


def _apart(ours: Tensor, theirs: Tensor) -> Tensor:
    """Distances (n, k): 0 where both are the same infinity, infinite where either alone is NaN."""
    distance = torch.where(ours == theirs, 0, (ours - theirs).abs())
    return distance.nan_to_num(nan=torch.inf, posinf=torch.inf)


def _far(ours: Tensor, theirs: Tensor, tolerance: float) -> Tensor:
    """Rows (n,) that differ by more than the tolerance."""
    # Not of the largest size in the row: a class masked by -1e9 would excuse all the others.
    sizes = torch.maximum(ours.abs(), ours.amax(1, keepdim=True).abs())
    sizes = torch.where(sizes.isfinite(), sizes, 1).clamp(min=1)
    return (_apart(ours, theirs) > tolerance * sizes).any(1)


def _on_edges(
    model: nn.Module, batch: Inputs, other: Tensor, far: Tensor, tolerance: float, output: Output
) -> Tensor:
    """The far rows whose other answer the model gives too, its features moved by rounding: (n,)."""
    heads = [part for part in model.modules() if isinstance(part, CalibratedHead)]
    if not any(step.jumps for head in heads for step in head.calibrator.steps_in_order()):
        return torch.zeros_like(far)
    asked = far if batch.rows == len(far) else torch.ones_like(far)  # a network may be expensive
    batch = batch.at(asked) if batch.rows == len(far) else batch
    other, near = other[asked], torch.zeros_like(far[asked])
    for seed, size in enumerate(ROUNDINGS):

        def move(
            _: nn.Module, args: tuple[Tensor, ...], seed: int = seed, size: float = size
        ) -> tuple[Tensor, ...]:
            """Moves the input of a head by a part of each row's largest value."""
            features, *rest = args
            generator = torch.Generator().manual_seed(seed)
            signs = torch.randint(2, features.shape, generator=generator) * 2 - 1
            largest = features.abs().reshape(len(features), -1).amax(1)
            steps = size * largest.view(-1, *[1] * (features.ndim - 1))
            return (features + steps * signs.to(features), *rest)

        with ExitStack() as hooks:
            for head in heads:
                hooks.enter_context(head.register_forward_pre_hook(move))
            near |= ~_far(output.rows(output.of(batch.call(model))), other, tolerance)
    found = far.clone()
    found[asked] &= near
    return found
