"""Whether the output of a model is what one of its layers gave, seen on a few rows of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from featcal.core.errors import InputError

PROOF_ROWS = 4  # of what a layer gives: enough to tell layers apart, and little to keep

# What a network may do to its logits before it returns them; a calibrated head stays before it.
Links = dict[str, Callable[[Tensor], Tensor]]
AS_IT_IS = "identity"
LINKS_OF_ONE: Links = {"sigmoid": torch.sigmoid, "logsigmoid": nn.functional.logsigmoid}
LINKS: Links = {
    "softmax": lambda z: z.softmax(-1),
    "log_softmax": lambda z: z.log_softmax(-1),
}


def few_rows(value: Any) -> Tensor | None:  # noqa: ANN401 - whatever enters or leaves a layer
    """The first rows of a tensor, copied: what comes after may write into them."""
    few = isinstance(value, Tensor) and value.ndim > 0
    return value[:PROOF_ROWS].detach().clone() if few else None


def makes(given: Tensor, output: Tensor) -> bool:
    """Whether the model's output is what a layer gave, as it is, or through a softmax.

    Of a single logit, it may also be the sigmoid.
    """
    return link_between(given, output) is not None


def link_between(given: Tensor, output: Tensor) -> str | None:
    """The name of what stands between a layer's output and the model's; None if that is no link."""
    return _linked(given, output, LINKS_OF_ONE, LINKS)


def _linked(given: Tensor, output: Tensor, of_one: Links, of_more: Links) -> str | None:
    """The nearest of the links that lead from what a layer gave to an output."""
    if not output.numel() or not output.is_floating_point():
        return None  # such as a prediction beside the logits
    if len(given) == 1 and output.numel() == given.numel():
        output = output.reshape(given.shape)  # a model may drop the axis of a single row
    if output.ndim == 0:
        return None  # such as a loss
    digits = torch.finfo(output.dtype).eps
    cast = given.to(output.dtype).double()  # a model may return its logits in another type
    output, given = output[: len(given)].double(), given.double()
    if given.numel() != output.numel():
        return None if positions(cast, output) is None else AS_IT_IS
    shape = output.shape
    if shape[2:].numel() == 1:  # classes last, where a softmax acts
        shape = torch.Size((shape[0], shape[1:].numel()))
    cast, given, output = (part.reshape(shape) for part in (cast, given, output))
    links = of_more if shape[-1] > 1 else of_one
    found = [(cast, AS_IT_IS)] if _close(cast, output) else []
    linked = ((link(given), name) for name, link in links.items())
    found += [(values, name) for values, name in linked if _close(values, output, digits)]
    # Small logits are close to more than one of them.
    nearest = min(found, key=lambda one: _gap(one[0], output), default=(cast, None))
    return nearest[1]


def _gap(found: Tensor, output: Tensor) -> float:
    return float((found - output).nan_to_num().abs().max())


def _close(found: Tensor, output: Tensor, digits: float = 0.0) -> bool:
    """NaN is as good as NaN: what it means for a fit is for `survey` to say, row by row."""
    return torch.allclose(found, output, rtol=max(1e-5, digits), atol=1e-6, equal_nan=True)


def positions(given: Tensor, output: Tensor) -> Tensor | None:
    """Which of the positions (n, t, k) a layer worked at the model kept as its output (n, k).

    Language models score every token and return the scores of one; None when they do not.
    """
    if output.ndim == 1:
        output = output[:, None]  # one logit a row
    if given.ndim != 3 or output.ndim != 2 or given.shape[::2] != output.shape:
        return None
    same = (given == output[:, None].to(given.dtype)).all(2)  # (n, t)
    return same.int().argmax(1) if bool(same.any(1).all()) else None


def check_not_multilabel(found: dict[str, Tensor], output: list[Tensor]) -> None:
    """Says of a sigmoid a class what it means: such classes do not exclude one another."""
    for path, given in reversed(found.items()):
        if any(_linked(given, tensor, {}, LINKS_OF_ONE) for tensor in output):
            raise InputError(
                f"the model's output is a sigmoid of each of the logits of {path!r}, so that a "
                "sample may be of several classes, and a softmax over them means nothing: "
                "calibrate one class at a time, as Batch(logits[:, j], labels[:, j])"
            )
