"""Calling a model whose inputs and outputs have any form, and watching its layers meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Call = tuple[str, Any, Any]  # a layer's path, its one argument (else None), what it gave


def run(model: nn.Module, inputs: Any) -> Any:  # noqa: ANN401
    """The model's output: of keyword arguments, of several arguments, or of one."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if _several(inputs) else model(inputs)


def mapped(
    inputs: Any,  # noqa: ANN401
    change: Callable[[Tensor], Any],
    other: Callable[[Any], Any] = lambda value: value,
) -> Any:  # noqa: ANN401
    """The same structure with every tensor in it changed; arrays of numpy become tensors first.

    Args:
        inputs: what a model is called with.
        change: what becomes of a tensor.
        other: what becomes of an object that is none of these, such as a packed sequence.
    """
    if isinstance(inputs, np.ndarray) and inputs.dtype.kind in "biuf":
        inputs = torch.as_tensor(inputs)
    if isinstance(inputs, Tensor):
        return change(inputs)
    if isinstance(inputs, Mapping):
        return {key: mapped(value, change, other) for key, value in inputs.items()}
    if _several(inputs):
        return tuple(mapped(value, change, other) for value in inputs)
    if isinstance(inputs, tuple) and not hasattr(inputs, "to"):
        return type(inputs)(*(mapped(value, change, other) for value in inputs))
    return other(inputs)


def _several(inputs: object) -> bool:
    """Whether these are several inputs; a tuple with named fields is one object."""
    return isinstance(inputs, (tuple, list)) and not hasattr(inputs, "_fields")


def outputs_in(output: Any) -> list[Tensor]:  # noqa: ANN401
    """The tensors of an output that may be its logits: those called so, else all, in order."""
    if isinstance(output, Tensor):
        return [output]
    named = output.get("logits") if isinstance(output, Mapping) else None
    named = getattr(output, "logits", None) if named is None else named
    if isinstance(named, Tensor):
        return [named]
    return [tensor for part in _parts(output) for tensor in outputs_in(part)]


def _parts(output: Any) -> Iterable[Any]:  # noqa: ANN401
    if isinstance(output, Mapping):
        return output.values()
    if is_dataclass(output) and not isinstance(output, type):
        return [getattr(output, field.name) for field in fields(output)]
    return output if isinstance(output, (tuple, list)) else ()


@contextmanager
def watched(
    model: nn.Module, paths: Iterable[str], keep: Callable[[Any], Any] = lambda value: value
) -> Iterator[list[Call]]:
    """Records, in order, what enters and leaves some layers while the block runs."""
    calls: list[Call] = []

    def remember(path: str) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: tuple[Any, ...], named: Any, output: Any) -> None:  # noqa: ANN401
            only = inputs[0] if len(inputs) == 1 and not named else None
            calls.append((path, keep(only), keep(output)))

        return hook

    with ExitStack() as hooks:
        for path in paths:
            layer = model.get_submodule(path)
            hooks.enter_context(layer.register_forward_hook(remember(path), with_kwargs=True))
        yield calls
