"""`torch.export` of a model with free batch size, one tensor picked out of whatever it gives."""

from __future__ import annotations

import inspect
import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import final

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from featcal.core.errors import InputError
from featcal.core.fitting import exact, undisturbed
from featcal.export.inputs import Dynamic, Example, Inputs
from featcal.export.output import LOGITS, Output, proved_output

POSITIONAL_OR_KEYWORD = inspect.Parameter.POSITIONAL_OR_KEYWORD


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

        named = [inspect.Parameter(name, POSITIONAL_OR_KEYWORD) for name in names]
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
