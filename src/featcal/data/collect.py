"""Features and logits of a model over a loader: the very tensors its head saw and made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from featcal.core.attach import find_head
from featcal.core.batch import Batch
from featcal.core.errors import InputError
from featcal.core.fitting import evaluating
from featcal.core.progress import tell


@torch.no_grad()
def collect(
    model: nn.Module, loader: Iterable[tuple[Any, Tensor]], *, head: str | None = None
) -> list[Batch]:
    """Runs the model over (inputs, labels) and keeps what enters and leaves its last layer.

    The model is in eval mode meanwhile and back in its own mode afterwards; inputs go to its
    device; the results are kept in main memory.

    Args:
        model: the trained classifier.
        loader: any iterable of (inputs, labels), such as a DataLoader over held-out data.
        head: dotted path of the last layer, when it is not found by itself.
    """
    path = find_head(model, head)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    length = len(loader) if isinstance(loader, Sized) else 0
    batches: list[Batch] = []
    with evaluating(model), _watched(model.get_submodule(path)) as seen:
        for done, (inputs, labels) in enumerate(loader, start=1):
            output = model(inputs.to(device) if isinstance(inputs, Tensor) else inputs)
            features, logits = _last_seen(seen, output, path)
            batches.append(Batch(logits.cpu(), torch.as_tensor(labels).cpu(), features.cpu()))
            seen.clear()
            tell("collecting features", done, max(length, done))
    if not batches:
        raise InputError("loader is empty: pass held-out data as (inputs, labels)")
    return batches


@contextmanager
def _watched(layer: nn.Module) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Records (input, output) of a layer while the block runs."""
    seen: list[tuple[Tensor, Tensor]] = []

    def remember(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen.append((inputs[0].detach(), output.detach()))

    handle = layer.register_forward_hook(remember)
    try:
        yield seen
    finally:
        handle.remove()


def _last_seen(
    seen: list[tuple[Tensor, Tensor]], output: object, path: str
) -> tuple[Tensor, Tensor]:
    """The one call of the head in this forward pass, proved to be the model's output."""
    if len(seen) != 1:
        raise InputError(
            f"head {path!r} ran {len(seen)} times in one forward pass, not once: "
            "pass head=, the path of the classifier's last layer"
        )
    features, logits = seen[0]
    same = isinstance(output, Tensor) and output.shape == logits.shape
    if not same or not torch.equal(output, logits):  # type: ignore[arg-type]
        raise InputError(
            f"the output of {path!r} is not the model's output: "
            "pass head=, the path of the layer that makes the logits"
        )
    return features, logits
