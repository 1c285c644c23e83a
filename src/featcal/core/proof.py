"""Whether the output of a model is what one of its layers gave, seen on a few rows of both."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from featcal.core.errors import InputError

# What a network may do to its logits before it returns them; a calibrated head stays before it.
Link = Callable[[Tensor], Tensor]
LINKS_OF_ONE: tuple[Link, ...] = (torch.sigmoid, nn.functional.logsigmoid)
LINKS: tuple[Link, ...] = (lambda z: z.softmax(-1), lambda z: z.log_softmax(-1))


def makes(given: Tensor, output: Tensor) -> bool:
    """Whether the model's output is what a layer gave, as it is, or through a softmax.

    Of a single logit, it may also be the sigmoid.
    """
    return _linked(given, output, LINKS_OF_ONE, LINKS)


def _linked(
    given: Tensor, output: Tensor, of_one: tuple[Link, ...], of_more: tuple[Link, ...]
) -> bool:
    """Whether an output is what a layer gave, as it is or through one of the links."""
    if not output.numel() or not output.is_floating_point():
        return False  # such as a prediction beside the logits
    if len(given) == 1 and output.numel() == given.numel():
        output = output.reshape(given.shape)  # a model may drop the axis of a single row
    if output.ndim == 0:
        return False  # such as a loss
    digits = torch.finfo(output.dtype).eps
    cast = given.to(output.dtype).double()  # a model may return its logits in another type
    output, given = output[: len(given)].double(), given.double()
    if given.numel() != output.numel():
        return positions(cast, output) is not None
    shape = output.shape
    if shape[2:].numel() == 1:  # classes last, where a softmax acts
        shape = torch.Size((shape[0], shape[1:].numel()))
    cast, given, output = (part.reshape(shape) for part in (cast, given, output))
    links = of_more if shape[-1] > 1 else of_one
    return _close(cast, output) or any(_close(link(given), output, digits) for link in links)


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
        if any(_linked(given, tensor, (), LINKS_OF_ONE) for tensor in output):
            raise InputError(
                f"the model's output is a sigmoid of each of the logits of {path!r}, so that a "
                "sample may be of several classes, and a softmax over them means nothing: "
                "calibrate one class at a time, as Batch(logits[:, j], labels[:, j])"
            )
