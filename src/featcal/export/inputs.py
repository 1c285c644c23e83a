"""What a model is called with: tensors with names, some of whose axes may have any size."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from featcal.core.calibrator import Calibrator
from featcal.core.errors import InputError
from featcal.core.find import check_bare
from featcal.core.head import CalibratedHead

Example = Tensor | Sequence[Tensor] | Mapping[str, Tensor]
Dynamic = Mapping[str, Mapping[int, str]]  # input name -> axis -> the name of its size

BATCH = "batch"  # the size that counts rows
CHUNK_ROWS = 256  # rows a call of a model: whole networks may be behind it
WIDE = torch.float32  # what 16-bit floats become where a runtime has no kernels for them


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
        values = _named(model, example)
        keywords = isinstance(example, Mapping)
        if dynamic is None:
            _same_rows(values)
            return cls(values, keywords, {name: {0: BATCH} for name in values})
        return cls(values, keywords, _checked(dynamic, values))

    def like(self, example: Example) -> Inputs:
        """Other inputs for the same call: of the same names, types and sizes, but for free ones."""
        given = [example] if isinstance(example, Tensor) else example
        known = list(self.values)
        names = list(given) if isinstance(given, Mapping) else known
        values = given.values() if isinstance(given, Mapping) else given
        if len(names) != len(values) or sorted(names) != sorted(known):
            raise InputError(f"rows must hold what the example holds: {', '.join(known)}")
        found = dict(zip(names, values, strict=True))
        for name, shown in self.values.items():
            self._check_like(name, shown, found[name])
        _same_rows({name: found[name] for name in self._with_rows()})
        return replace(self, values={name: found[name] for name in known})

    def _check_like(self, name: str, shown: Tensor, value: object) -> None:
        free = self.axes.get(name, {})
        if (
            not isinstance(value, Tensor)
            or value.dtype != shown.dtype
            or value.ndim != shown.ndim
            or any(value.shape[a] != shown.shape[a] for a in range(shown.ndim) if a not in free)
        ):
            raise InputError(
                f"rows: {name} is {_described(value)}, the example has {_described(shown)}: "
                "give rows of the same kind"
            )

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
            shown = ", ".join(f"{key}: {_described(value)}" for key, value in self.values.items())
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


def _named(model: nn.Module, example: Example) -> dict[str, Tensor]:
    given = [example] if isinstance(example, Tensor) else example
    if not isinstance(given, (Sequence, Mapping)) or not given:
        raise InputError(
            f"example is {type(example).__name__}: give a tensor, a tuple of them, or a dict of "
            "them by name"
        )
    if isinstance(given, Mapping):
        values = {str(name): value for name, value in given.items()}
    else:
        values = dict(zip(_positional_names(model, len(given)), given, strict=True))
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise InputError(f"example: {name} is {type(value).__name__}: every input is a tensor")
    return values


def _positional_names(model: nn.Module, count: int) -> list[str]:
    """The names `forward` gives its first arguments; numbers go on where it stops naming them."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    known = inspect.signature(model.forward).parameters.values()
    names = [parameter.name for parameter in known if parameter.kind in kinds][:count]
    if isinstance(model, CalibratedHead) and isinstance(model.uncalibrated, nn.Identity):
        names[0] = "logits"  # where forward says features: `wrap()` has no layer before them
    return names + [f"input_{place}" for place in range(len(names), count)]


def _same_rows(values: Mapping[str, Tensor]) -> None:
    sizes = {name: tuple(value.shape[:1]) for name, value in values.items()}
    if len(set(sizes.values())) > 1 or () in sizes.values() or (0,) in sizes.values():
        shown = ", ".join(f"{name}: {tuple(values[name].shape)}" for name in values)
        raise InputError(
            f"inputs must have the same number of rows, at least one, in their first axis "
            f"({shown}): say with dynamic= which axes count rows"
        )


def _checked(dynamic: Dynamic, values: Mapping[str, Tensor]) -> dict[str, dict[int, str]]:
    for name, axes in dynamic.items():
        if name not in values:
            raise InputError(f"dynamic: {name!r} is no input; there are {', '.join(values)}")
        for axis, size in axes.items():
            if axis not in range(values[name].ndim) or not isinstance(size, str) or not size:
                raise InputError(
                    f"dynamic: {name} has {values[name].ndim} axes, and {axis!r}: {size!r} is no "
                    "name of a size of one of them, such as 0: 'batch'"
                )
    return {name: dict(axes) for name, axes in dynamic.items() if axes}


def _described(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
