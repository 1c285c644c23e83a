"""Any layer of a network: a feature map on what it gives, and the rest of the network as a head.

This is the layer ablation of the paper: features clipped somewhere inside, the rest recomputed.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn

from featcal.core.call import mapped, run, watched
from featcal.core.errors import InputError
from featcal.core.head import logit_rows
from featcal.core.wrapper import Wrapper


def first_tensor(output: Any) -> Tensor:  # noqa: ANN401
    """What a layer gave, or the first of several values."""
    first = output[0] if isinstance(output, (tuple, list)) else output
    if not isinstance(first, Tensor):
        raise InputError(
            f"the layer gives a {type(first).__name__}: name a layer that gives a tensor"
        )
    return first


def with_first(output: Any, tensor: Tensor) -> Any:  # noqa: ANN401
    """The same output with its first tensor changed."""
    if not isinstance(output, (tuple, list)):
        return tensor
    parts = [tensor, *output[1:]]
    return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)


@final
class MappedLayer(Wrapper):
    """A layer whose output goes through feature maps, each sample as one row."""

    def forward(self, *inputs: Any, **named: Any) -> Any:  # noqa: ANN401 - whatever the layer takes
        """The layer's output, mapped."""
        output = self.uncalibrated(*inputs, **named)
        given = first_tensor(output)
        rows = given.flatten(1)
        for step in self.calibrator.steps_in_order():
            rows = step.map_features(rows)  # type: ignore[operator]  # all are feature maps
        return with_first(output, rows.reshape(given.shape).to(given.dtype))


@final
class Rest(nn.Module):
    """The network behind a layer, as a head: rows of what the layer gave in, logits out.

    The network runs on a stand-in input, and what the layer gives is changed for the rows.

    Attributes:
        layer: the path of the layer.
        head: the path of the network's last layer, whose output is the logits.
        sample: the shape of what the layer gives for one sample.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,  # noqa: ANN401
        *,
        layer: str,
        head: str,
        sample: torch.Size,
        repeat: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.layer, self.head, self.sample = layer, head, sample
        self._input = first_row_of(inputs)
        self._repeat = repeat

    def forward(self, rows: Tensor) -> Tensor:
        """Logits (n, k) of rows (n, d)."""
        inner = self.model.get_submodule(self.layer)
        inputs = repeated(self._input, len(rows)) if self._repeat else self._input
        swap = inner.register_forward_hook(lambda _, __, own: self._swapped(own, rows))
        try:
            with watched(self.model, [self.head]) as calls:
                run(self.model, inputs)
        finally:
            swap.remove()
        return logit_rows(calls[-1][2])

    def _swapped(self, own: Any, rows: Tensor) -> Any:  # noqa: ANN401
        dtype = first_tensor(own).dtype
        return with_first(own, rows.reshape(-1, *self.sample).to(dtype))


def first_row_of(inputs: Any) -> Any:  # noqa: ANN401
    """The first row of every tensor, which stands in for all of them."""
    return mapped(inputs, lambda tensor: tensor[:1] if tensor.ndim else tensor)


def repeated(inputs: Any, rows: int) -> Any:  # noqa: ANN401
    """The one row of every tensor, so many times."""
    return mapped(inputs, lambda t: t.expand(rows, *t.shape[1:]) if t.ndim else t)
