"""Which of the tensors a model gives is exported, and whether it holds logits or probabilities.

Both are proved on the example: the tensor is one that the calibrated head makes, as it is or
through a softmax or sigmoid behind it.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from featcal.core.call import Call, outputs_in, watched
from featcal.core.errors import InputError
from featcal.core.find import find_head
from featcal.core.head import CalibratedHead, is_linear
from featcal.core.proof import AS_IT_IS, check_not_multilabel, few_rows, link_between
from featcal.core.wrapper import Wrapper
from featcal.export.inputs import Inputs

LOGITS, PROBABILITIES = "logits", "probabilities"
NEITHER = "log-sigmoids"
REMEDY = "let it give its logits alone, or an object or dict with logits"

# What a model gives where this stands between its logits and its output.
HELD = {
    AS_IT_IS: LOGITS,
    "log_softmax": LOGITS,  # their softmax is the model's own
    "softmax": PROBABILITIES,
    "sigmoid": PROBABILITIES,
    "logsigmoid": NEITHER,
}


@final
@dataclass(frozen=True)
class Output:
    """The tensor that is exported.

    Attributes:
        place: where it is among the tensors that the model gives.
        name: "logits", or "probabilities" where the model ends in a softmax or sigmoid.
    """

    place: int = 0
    name: str = LOGITS

    def of(self, given: object) -> Tensor:
        """The tensor in what the model gives."""
        return outputs_in(given)[self.place]

    def chances(self, values: Tensor) -> Tensor:
        """The probabilities that values of this tensor stand for."""
        return values if self.name == PROBABILITIES else chances(values)

    def predicted(self, values: Tensor) -> Tensor:
        """The predicted class of each row (n, k); k = 1 for the value of class 1 alone."""
        middle = 0.5 if self.name == PROBABILITIES else 0.0
        return values[:, 0] > middle if values.shape[1] == 1 else values.argmax(1)

    def rows(self, values: Tensor) -> Tensor:
        """(n, k) float64 of values as the model gives them; k = 1 for one value a row."""
        if values.ndim == 0 or values.shape[2:].numel() != 1:
            raise InputError(
                f"the model gives {self.name} of shape {tuple(values.shape)}: a classifier gives "
                "(n, k), or (n,) with one a row"
            )
        return values.detach().double().reshape(len(values), -1)


LOGITS_ALONE = Output()


def chances(logits: Tensor) -> Tensor:
    """Probabilities of logits: their sigmoid where there is one a row, else their softmax."""
    single = logits.shape[1:].numel() == 1
    return logits.sigmoid() if single else logits.softmax(1)


@final
class Made(NamedTuple):
    """A tensor of the output, and the layer that was seen to make it."""

    output: Output
    layer: str


@torch.no_grad()
def proved_output(model: nn.Module, inputs: Inputs) -> Output:
    """The tensor to export of a model in eval mode, proved by one call of it.

    It is the one that the calibrated head makes. Without a calibrated head, it is the one that a
    linear layer makes, or the layer that `find_head` takes for the last one.
    """
    inputs = inputs.repeated(max(inputs.rows, 2))  # a model may drop the axis of a single row
    wrappers = [path for path, part in model.named_modules() if isinstance(part, Wrapper)]
    heads = [p for p in wrappers if isinstance(model.get_submodule(p), CalibratedHead)]
    layers = heads or _likely(model)
    with watched(model, dict.fromkeys([*wrappers, *layers]), few_rows) as calls:
        given = inputs.call(model)
    _check_called(wrappers, calls)
    tensors = {place: tensor for place, tensor in enumerate(outputs_in(given)) if _fits(tensor)}
    if not tensors:
        raise InputError(f"the model gives a {type(given).__name__} without logits: {REMEDY}")
    found = [call for call in calls if call[0] in layers and call[2] is not None]
    made = [made for call in found for made in _made(call, tensors)]
    if not made:
        check_not_multilabel({path: left for path, _, left in found}, list(tensors.values()))
    output = _chosen(tensors, made)
    output.rows(tensors[output.place])  # refused here, before the exporter's long work
    if heads and not made:
        _check_used(model, inputs, heads, output)
    return output


def _likely(model: nn.Module) -> list[str]:
    """Layers of a model without calibrated head one of which may be its last."""
    linear = [path for path, part in model.named_modules() if is_linear(part)]
    with suppress(InputError):  # it knows of none
        return [*linear, find_head(model)]
    return linear


def _fits(tensor: Tensor) -> bool:
    """Whether a tensor may hold logits: a loss and a predicted class do not."""
    return tensor.ndim > 0 and tensor.numel() > 0 and tensor.is_floating_point()


def _check_called(wrappers: list[str], calls: list[Call]) -> None:
    idle = next((path for path in wrappers if path not in {call[0] for call in calls}), None)
    if idle is not None:
        raise InputError(
            f"the model does not call its calibrated layer {idle!r}, so that the file would not be "
            "calibrated: it may keep another reference to that layer, which must be set too"
        )


def _check_used(model: nn.Module, inputs: Inputs, heads: list[str], output: Output) -> None:
    """Refuses an output that stays the same when the calibrated heads give something else."""
    plain = output.of(inputs.call(model)).clone()
    with ExitStack() as hooks:
        for head in map(model.get_submodule, heads):
            hooks.enter_context(head.register_forward_hook(lambda *call: 3 * call[2] + 1))
        changed = output.of(inputs.call(model))
    if torch.equal(plain, changed):
        raise InputError(
            f"the {output.name} that the model gives do not come from its calibrated layer "
            f"{heads[0]!r}: calibrate the layer that makes them, or let it give that one's"
        )


def _made(call: Call, tensors: dict[int, Tensor]) -> list[Made]:
    layer, _, given = call
    links = {place: link_between(given, tensor) for place, tensor in tensors.items()}
    return [Made(Output(p, HELD[link]), layer) for p, link in links.items() if link is not None]


def _chosen(tensors: dict[int, Tensor], made: list[Made]) -> Output:
    """The one tensor there is, or the one that one layer makes; its logits before all else."""
    places = {found.output.place for found in made} or set(tensors)
    if len(places) > 1 and len({found.layer for found in made}) != 1:
        shapes = ", ".join(str(tuple(tensors[place].shape)) for place in sorted(places))
        raise InputError(
            f"the model gives several tensors that may be its logits (of shapes {shapes}): {REMEDY}"
        )
    if not made:
        (place,) = places
        return Output(place, _guessed(tensors[place]))
    chosen = min((m.output for m in made), key=lambda output: (output.name != LOGITS, output.place))
    if chosen.name == NEITHER:
        raise InputError(
            "the model gives the log-sigmoid of its logits, which is neither logits nor "
            "probabilities: let it give its logits, or their sigmoid"
        )
    return chosen


def _guessed(values: Tensor) -> str:
    """What a tensor holds that no layer was seen to make."""
    rows = values.double().reshape(len(values), -1)
    if not bool(((rows >= 0) & (rows <= 1)).all()):
        return LOGITS
    ones = torch.ones_like(rows[:, 0])
    if rows.shape[1] > 1 and torch.allclose(rows.sum(1), ones, rtol=0, atol=0.01):
        return PROBABILITIES
    raise InputError(
        "the model gives values from 0 to 1, no layer was seen to make them, and they may be "
        "logits or probabilities: let it give what its last layer gives, or give an example in "
        "which some logit is below 0"
    )
