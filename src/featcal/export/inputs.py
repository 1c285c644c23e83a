"""What a model is called with, and which of the tensors it gives is exported.

Inputs are tensors with names, some of whose axes may have any size. The output is proved on the
example: the tensor is one that the calibrated head makes, as it is or through a softmax or sigmoid
behind it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor, nn

from featcal.core.calibrator import Calibrator
from featcal.core.checks import InputError
from featcal.heads.attach import CalibratedOutput
from featcal.heads.find import (
    AS_IT_IS,
    LINKS,
    LINKS_OF_ANY,
    check_bare,
    check_not_multilabel,
    class_axis,
    few_rows,
    find_head,
    link_between,
    logits_in,
    outputs_in,
    watched,
)
from featcal.heads.head import CalibratedHead, Wrapper, channels, is_linear

Example = Tensor | Sequence[Tensor] | Mapping[str, Tensor]
Dynamic = Mapping[str, Mapping[int, str]]  # input name -> axis -> the name of its size

BATCH = "batch"  # the size that counts rows
CHUNK_ROWS = 256  # rows per call of a model: whole networks may be behind it
WIDE = torch.float32  # what 16-bit floats become where a runtime has no kernels for them

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


@dataclass(frozen=True)
class Inputs:
    """The inputs of one call.

    Attributes:
        values: the tensors by name, in the order of the call.
        keywords: whether the model takes them by name; else by position.
        axes: the axes of any size: input name -> axis -> the name of its size.
    """

    values: dict[str, Tensor]
    keywords: bool
    axes: dict[str, dict[int, str]]

    @classmethod
    def of(cls, model: nn.Module, example: Example, dynamic: Dynamic | None = None) -> Inputs:
        """The inputs of a model, named as its `forward` names them.

        Args:
            model: the model.
            example: a tensor, tensors by position, or tensors by name.
            dynamic: axes of any size; None for the first one of every input, {} for none.
        """
        if not isinstance(model, nn.Module) or isinstance(model, Calibrator):
            remedy = "export calibrator.wrap(head), or the model it is attached to"
            raise InputError(f"{type(model).__name__} is no model: give an nn.Module; {remedy}")
        check_bare(model)
        given = [example] if isinstance(example, Tensor) else example
        keywords = isinstance(given, Mapping)
        tensors = list(given.values() if isinstance(given, Mapping) else given or ())
        if not tensors or not all(isinstance(value, Tensor) for value in tensors):
            raise InputError(f"example is {type(example).__name__}: give a tensor, tuple or dict")
        if isinstance(given, Mapping):
            names = [str(name) for name in given]
        else:
            named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            own = model.uncalibrated if isinstance(model, CalibratedOutput) else model
            known = inspect.signature(own.forward).parameters.values()
            names = [parameter.name for parameter in known if parameter.kind in named]
            if isinstance(model, CalibratedHead) and isinstance(model.uncalibrated, nn.Identity):
                names[0] = "logits"  # where forward says features: `wrap()` has no layer before
            names = names[: len(tensors)]  # numbers go on where forward stops naming its arguments
            names += [f"input_{place}" for place in range(len(names), len(tensors))]
        values = dict(zip(names, tensors, strict=True))
        if dynamic is None:
            return cls(values, keywords, {name: {0: BATCH} for name in values})._checked()
        for name, axes in dynamic.items():
            there = range(values[name].ndim if name in values else 0)
            if not all(i in there and isinstance(size, str) and size for i, size in axes.items()):
                raise InputError(
                    f"dynamic: {name}: {axes} must name axes of an input, as in 0: 'batch'; the "
                    f"inputs are {', '.join(values)}"
                )
        free = {name: dict(axes) for name, axes in dynamic.items() if axes}
        return cls(values, keywords, free)._checked()

    def like(self, model: nn.Module, example: Example) -> Inputs:
        """Other inputs for the same call: of the same names, types and sizes, but for free ones."""
        found = Inputs.of(model, example, {}).values
        kinds = [
            {
                name: (
                    value.dtype,
                    [self.axes.get(name, {}).get(i, n) for i, n in enumerate(value.shape)],
                )
                for name, value in values.items()
            }
            for values in (self.values, found)
        ]
        if kinds[0] != kinds[1]:
            raise InputError(
                f"rows are {_described(found)} and the example is {_described(self.values)}: give "
                "rows of the same kind"
            )
        return replace(self, values={name: found[name] for name in self.values})._checked()

    def _checked(self) -> Inputs:
        """The same, once all inputs that have rows have as many."""
        counts = {tuple(self.values[name].shape[:1]) for name in self._with_rows()}
        if len(counts) > 1 or counts & {(), (0,)}:
            raise InputError(
                "inputs must have the same number of rows, at least one, in their first axis "
                f"({_described(self.values)}): say with dynamic= which axes count rows"
            )
        return self

    @property
    def rows(self) -> int:
        """How many rows they are; 0 where no axis counts rows."""
        names = self._with_rows()
        return self.values[names[0]].shape[0] if names else 0

    def at(self, index: slice | Tensor) -> Inputs:
        """The chosen rows of every input that has rows."""
        chosen = {name: self.values[name][index] for name in self._with_rows()}
        return replace(self, values={**self.values, **chosen})

    def chunks(self) -> Iterator[Inputs]:
        """A few rows at a time; all at once where no axis counts rows."""
        if not self.rows:
            yield self
        for start in range(0, self.rows, CHUNK_ROWS):
            yield self.at(slice(start, start + CHUNK_ROWS))

    def repeated(self, rows: int) -> Inputs:
        """So many rows, the first ones again after the last; as they are where none are counted."""
        return self.at(torch.arange(rows) % self.rows) if self.rows else self

    def portable(self) -> Inputs:
        """On the CPU, with 16-bit floats as float32."""
        return replace(self, values={key: portable(value) for key, value in self.values.items()})

    @torch.no_grad()
    def call(self, model: nn.Module) -> object:
        """What the model gives for them."""
        try:
            if self.keywords:
                return model(**self.values)
            return model(*self.values.values())
        except (TypeError, ValueError, RuntimeError) as error:
            shown = _described(self.values)
            raise InputError(f"the model does not take the example ({shown}): {error}") from error

    def _with_rows(self) -> list[str]:
        """The inputs whose first axis counts rows."""
        sizes = {name: axes[0] for name, axes in self.axes.items() if 0 in axes}
        first = next((sizes[name] for name in self.values if name in sizes), None)
        return [name for name in self.values if sizes.get(name, "") == first]


def portable(value: Tensor) -> Tensor:
    """The tensor on the CPU, a 16-bit float as float32."""
    narrow = value.is_floating_point() and value.dtype.itemsize < WIDE.itemsize
    return value.detach().to("cpu", WIDE if narrow else value.dtype)


def _described(values: Mapping[str, Tensor]) -> str:
    kinds = {name: f"{value.dtype} {tuple(value.shape)}" for name, value in values.items()}
    return ", ".join(f"{name}: {kind.removeprefix('torch.')}" for name, kind in kinds.items())


@final
@dataclass(frozen=True)
class Output:
    """The tensor that is exported.

    Attributes:
        place: where it is among the tensors that the model gives.
        name: "logits", or "probabilities" where the model ends in a softmax or sigmoid.
        several: whether each of the k values has a sigmoid of its own: several labels a sample.
    """

    place: int = 0
    name: str = LOGITS
    several: bool = False

    def of(self, given: object) -> Tensor:
        """The tensor in what the model gives."""
        return outputs_in(given)[self.place]

    def chances(self, values: Tensor) -> Tensor:
        """The probabilities of these values: a sigmoid where there is one per row, or softmax."""
        if self.name == PROBABILITIES:
            return values
        axis = _class_axis(values)
        single = self.several or values.ndim == 1 or values.shape[axis] == 1
        return values.sigmoid() if single else values.softmax(axis)

    def predicted(self, values: Tensor) -> Tensor:
        """The predicted class of each row (n, k), or its labels; k = 1 for class 1 alone."""
        middle = 0.5 if self.name == PROBABILITIES else 0.0
        if self.several:
            return values > middle
        return values[:, 0] > middle if values.shape[1] == 1 else values.argmax(1)

    def rows(self, values: Tensor) -> Tensor:
        """(n, k) float64 of values as the model gives them; k = 1 for one value per row.

        Of pixels (n, k, h, w) and tokens (n, t, k) every position is a row.
        """
        if values.ndim == 0:
            raise InputError(f"the model gives {self.name} that are one number: let it give (n, k)")
        rows = values.detach().double()
        if rows.ndim == 1:
            return rows[:, None]
        axis = _class_axis(values)
        return rows.movedim(axis, -1).reshape(-1, rows.shape[axis])


def _class_axis(values: Tensor) -> int:
    """The axis of the classes in what a model gives; (n, k, 1) is one row per sample."""
    return 1 if values.ndim > 1 and values.shape[2:].numel() == 1 else class_axis(values)


@torch.no_grad()
def proved_output(model: nn.Module, inputs: Inputs) -> Output:
    """The tensor to export of a model in eval mode, proved by one call of it.

    It is the one that the calibrated head makes. Without a calibrated head, it is the one that a
    linear layer makes, or the layer that `find_head` takes for the last one.
    """
    inputs = inputs.repeated(max(inputs.rows, 2))  # a model may drop the axis of a single row
    wrappers = [path for path, part in model.named_modules() if isinstance(part, Wrapper)]
    heads = [p for p in wrappers if isinstance(model.get_submodule(p), CalibratedHead)]
    layers = list(heads)
    if not heads:
        layers = [path for path, part in model.named_modules() if is_linear(part)]
        with suppress(InputError):  # it knows of none
            layers.append(find_head(model))
    with watched(model, dict.fromkeys([*wrappers, *layers]), few_rows) as calls:
        given = inputs.call(model)
    idle = set(wrappers) - {call[0] for call in calls}
    if idle:
        raise InputError(
            f"the model does not call its calibrated layer {min(idle)!r}, so that the file would "
            "not be calibrated: it may keep another reference to that layer, which must be set too"
        )
    if isinstance(model, CalibratedOutput):
        logits = logits_in(given)
        return Output([tensor is logits for tensor in outputs_in(given)].index(True))
    tensors = {  # not a loss, nor a predicted class
        place: tensor
        for place, tensor in enumerate(outputs_in(given))
        if tensor.ndim > 0 and tensor.numel() > 0 and tensor.is_floating_point()
    }
    if not tensors:
        raise InputError(f"the model gives a {type(given).__name__} without logits: {REMEDY}")
    made: list[tuple[str, Output]] = []  # layers, and the tensors each was seen to make
    found = [(path, left) for path, _, left in calls if path in layers and left is not None]
    wrapped = (part for part in model.modules() if isinstance(part, Wrapper))
    several = any(head.calibrator.several for head in wrapped)
    known = LINKS_OF_ANY if several else LINKS
    for path, left in found:
        links = {p: link_between(left, tensor, of_more=known) for p, tensor in tensors.items()}
        made += [
            (path, Output(p, HELD[link], several)) for p, link in links.items() if link is not None
        ]
    for path, left in found:
        if left.ndim == 3 and left.shape[2] > 1 and channels(model.get_submodule(path), left) == -2:
            raise InputError(f"{path!r} gives logits as (n, k, t): let the model give (n, t, k)")
    if not made:
        check_not_multilabel(dict(found), list(tensors.values()))
    places = {output.place for _, output in made} or set(tensors)
    if len(places) > 1 and len({path for path, _ in made}) != 1:
        shapes = ", ".join(str(tuple(tensors[place].shape)) for place in sorted(places))
        raise InputError(
            f"the model gives several tensors that may be its logits (of shapes {shapes}): {REMEDY}"
        )
    if made:  # logits before all else
        output = min((o for _, o in made), key=lambda o: (o.name != LOGITS, o.place))
    else:
        (place,) = places
        if tensors[place].shape[2:].numel() != 1:
            shape = tuple(tensors[place].shape)
            raise InputError(
                f"the model gives a tensor of shape {shape} that no layer was seen to make: let it "
                "give (n, k), or calibrate it first"
            )
        output = Output(place, _guessed(tensors[place]), several)
    if output.name == NEITHER:
        raise InputError("the model gives log-sigmoids: let it give its logits, or their sigmoid")
    output.rows(tensors[output.place])  # refused here, before the exporter's long work
    if heads and not made:
        _check_used(model, inputs, heads, output)
    return output


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
