"""What all batches of a pack share, and the refusal of a batch that does not share it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from featcal.core.batch import Batch, Data
from featcal.core.errors import InputError
from featcal.core.survey import check_batch, check_same
from featcal.data.manifest import FLOATS, INTEGERS

HeadLike = nn.Linear | tuple[Tensor, Tensor | None]


@final
@dataclass(frozen=True, slots=True)
class Layout:
    """The columns and types of the stored tensors: d or None, k, and a type a tensor."""

    features: int | None
    classes: int
    dtypes: dict[str, str]

    def __str__(self) -> str:
        columns = {"features": self.features, "logits": self.classes}
        stored = [name for name in columns if name in self.dtypes]
        return " and ".join(f"{self.dtypes[name]} {name} (n, {columns[name]})" for name in stored)


@final
class Gate:
    """Lets through the batches that fit the head, the class names and the batches before them."""

    def __init__(self, head: dict[str, Tensor] | None, class_names: tuple[str, ...] | None) -> None:
        self.head = head
        self.class_names = class_names
        self.layout: Layout | None = None

    def go_on(self, layout: Layout | None) -> None:
        """Takes over the layout of batches that came before, None where there were none."""
        self.layout = layout
        if layout is not None:
            self._check_names(layout.classes)

    def checked(self, name: str, data: Batch | Data, *, first_row: int = 0) -> Iterator[Batch]:
        """The batches of one split, from a row on, in the types they are stored in.

        Raises:
            InputError: with the name of the split in front; also for a split without rows.
        """
        rows = first_row
        for batch in _batches(name, data):
            try:
                stored = self._check(batch, rows)
            except InputError as error:
                raise InputError(f"split '{name}': {error}") from error
            rows += len(stored)
            yield stored
        if rows == 0:
            raise InputError(f"split '{name}' is empty: give it rows or leave it out")

    def _check(self, batch: Batch, first_row: int) -> Batch:
        if not isinstance(batch, Batch):
            raise InputError(f"data holds a {type(batch).__name__}: every item must be a Batch")
        if len(batch) == 0:
            return batch
        batch = _plain(batch)
        layout = self.layout or self._first(batch)
        check_batch(batch, classes=layout.classes, first_row=first_row)
        found = _layout(batch, layout.classes)
        if found != layout:
            raise InputError(
                f"{found} after {layout}: all batches of a pack must store the same tensors"
            )
        self.layout = layout
        return batch

    def _first(self, batch: Batch) -> Layout:
        """The layout the first batch sets, once it agrees with the head and the class names."""
        if self.head is not None:
            _check_head(self.head["weight"], batch)
            _check_made_by(self.head, batch.rows(slice(0, 64)))
        classes = self._classes(batch)
        self._check_names(classes)
        return _layout(batch, classes)

    def _check_names(self, classes: int) -> None:
        if self.class_names is not None and len(self.class_names) != classes:
            raise InputError(
                f"{len(self.class_names)} class_names for {classes} classes: give one name a class"
            )

    def _classes(self, batch: Batch) -> int:
        if self.head is not None:
            return len(self.head["weight"])
        if batch.logits is not None:
            return batch.logits.shape[1]
        raise InputError("the batch has features and no logits: pass the head of the network")


def _check_made_by(head: dict[str, Tensor], batch: Batch) -> None:
    """Where logits are stored beside features, the head must be the one that made them."""
    if batch.features is not None and batch.logits is not None:
        weight, bias = (head[name].double() for name in ("weight", "bias"))
        check_same(batch.features.double() @ weight.T + bias, batch.logits)


def head_tensors(head: HeadLike | None) -> dict[str, Tensor] | None:
    """Weight (k, d) and bias (k,) of a head, checked against each other; zeros for no bias."""
    if head is None:
        return None
    weight, bias = (head.weight, head.bias) if isinstance(head, nn.Linear) else _pair(head)
    if bias is None:
        bias = torch.zeros(weight.shape[:1], dtype=weight.dtype)
    if weight.ndim != 2 or bias.shape != weight.shape[:1]:
        raise InputError(
            f"head weight has shape {tuple(weight.shape)} and bias {tuple(bias.shape)}: "
            "they must be (classes, features) and (classes,)"
            + ("; give weight.T" if bias.shape == weight.shape[1:] else "")
        )
    values = {"weight": _head_values("weight", weight), "bias": _head_values("bias", bias)}
    if len(weight) > 1:
        return values
    # A sigmoid's one row: class 0 gets the logit 0, as everywhere.
    return {name: torch.cat([torch.zeros_like(row), row]) for name, row in values.items()}


def _pair(head: object) -> tuple[Tensor, Tensor | None]:
    if isinstance(head, tuple) and len(head) == 2:
        weight, bias = head
        if isinstance(weight, Tensor) and (bias is None or isinstance(bias, Tensor)):
            return weight, bias
    raise InputError(f"head is {type(head).__name__}: give an nn.Linear or (weight, bias) tensors")


def _head_values(name: str, values: Tensor) -> Tensor:
    _check_type(f"head {name}", values)
    if not bool(torch.isfinite(values.float()).all()):
        raise InputError(f"head {name} is NaN or infinite in float32: give a trained head")
    return values.detach().cpu().clone(memory_format=torch.contiguous_format)


def _check_type(name: str, values: Tensor) -> None:
    if _dtype(values) not in FLOATS:
        raise InputError(f"{name} has type {_dtype(values)}: give one of {', '.join(FLOATS)}")


def _dtype(values: Tensor) -> str:
    return str(values.dtype).removeprefix("torch.")


def _batches(name: str, data: Batch | Data) -> Data:
    if isinstance(data, Batch):
        return [data]
    if isinstance(data, Iterable):
        return data
    raise InputError(
        f"split '{name}': data is {type(data).__name__}: pass a Batch or a list of Batches"
    )


def _plain(batch: Batch) -> Batch:
    """The batch on the CPU, detached, labels in int64 and logits no wider than they are read."""
    if batch.features is None and batch.logits is None:
        raise InputError("the batch has neither logits nor features: give one of them")
    for name, values in (("features", batch.features), ("logits", batch.logits)):
        if values is not None:
            _check_matrix(name, values)
    labels, features, logits = batch.labels.cpu(), batch.features, batch.logits
    if not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool):
        labels = labels.to(torch.int64)
    if logits is not None:
        narrow = torch.float32 if logits.dtype == torch.float64 else logits.dtype
        logits = logits.detach().to("cpu", narrow)
    return Batch(logits, labels, None if features is None else features.detach().cpu())


def _check_matrix(name: str, values: Tensor) -> None:
    _check_type(name, values)
    if values.ndim != 2 or values.shape[1] == 0:
        raise InputError(f"{name} have shape {tuple(values.shape)}: they must be (rows, columns)")


def _check_head(weight: Tensor, batch: Batch) -> None:
    """Refuses a head that cannot have made this batch."""
    if batch.features is None:
        raise InputError("the batch has no features for the head: add them or leave the head out")
    (classes, columns), d = weight.shape, batch.features.shape[1]
    if columns != d:
        remedy = "it is transposed, give weight.T" if classes == d else "this is not their head"
        raise InputError(
            f"head weight has shape {tuple(weight.shape)} and the features have {d} columns: "
            f"it must be (classes, {d}); {remedy}"
        )
    if batch.logits is not None and batch.logits.shape[1] != classes:
        raise InputError(
            f"head gives {classes} classes and the logits have {batch.logits.shape[1]}: "
            "this is not the head that made them"
        )


def _layout(batch: Batch, classes: int) -> Layout:
    dtypes = {} if batch.features is None else {"features": _dtype(batch.features)}
    dtypes["labels"] = _label_dtype(classes)
    if batch.logits is not None:
        classes = batch.logits.shape[1]
        dtypes["logits"] = _dtype(batch.logits)
    return Layout(None if batch.features is None else batch.features.shape[1], classes, dtypes)


def _label_dtype(classes: int) -> str:
    """The smallest type that holds every label."""
    fits = (name for name in INTEGERS if torch.iinfo(getattr(torch, name)).max >= classes - 1)
    return next(fits)
