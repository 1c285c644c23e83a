"""A training loss: a frozen record of hyperparameters that maps logits and labels to one number.

Every loss runs inside a captured CUDA graph: shapes do not depend on data, and nothing waits for
the device. Logits of 16 bits are computed in float32, and float64 stays float64.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from math import isfinite, nan
from numbers import Real
from typing import ClassVar, Literal, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from featcal.core.checks import InputError
from featcal.core.text import Reader

# torch leaves rows out whose label is `ignore_index`, -100 by default: here no label means that.
NO_LABEL = -(2**62)

Value = TypeVar("Value")


def as_float(value: object) -> float:
    """The value as a float; NaN where it is no finite number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return nan
    try:
        found = float(value)
    except OverflowError:
        return nan
    return found if isfinite(found) else nan


def checked(default: Value, allowed: Callable[[Value], bool], words: str) -> Value:
    """A hyperparameter of the default's type that is refused with these words unless allowed."""
    return field(default=default, metadata={"allowed": allowed, "words": words})


def not_negative(default: float) -> float:
    """A hyperparameter from 0 up."""
    return checked(default, lambda value: value >= 0, "give a number from 0 up")


def above_0(default: float) -> float:
    """A hyperparameter above 0."""
    return checked(default, lambda value: value > 0, "give a number above 0")


def whole(default: int) -> int:
    """A hyperparameter that is a whole number from 1 up."""
    return checked(default, lambda value: value >= 1, "give a whole number from 1 up")


def choice(default: Value, other: Value) -> Value:
    """A hyperparameter that is one of two values."""
    return checked(default, (default, other).__contains__, f"choose {default} or {other}")


LOSSES: dict[str, type[TrainingLoss]] = {}


@dataclass(frozen=True, kw_only=True, repr=False)
class TrainingLoss(ABC):
    """What a network is trained to make small.

    A subclass that sets `name` is registered under it. Losses are equal when their hyperparameters
    are, and `repr` is the text that `parse_loss` reads.

    Attributes:
        name: the id in text, such as "focal".
        title: the heading of its column in tables, as the literature has it.
        soft_targets: whether labels may be rows of class probabilities (n, k).
        needs_held_out: whether `updated` wants outputs on rows kept out of training.
        reduction: "mean" over the batch, or "sum": n times the mean, whatever the loss.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    soft_targets: ClassVar[bool] = False
    needs_held_out: ClassVar[bool] = False

    reduction: Literal["mean", "sum"] = choice("mean", "sum")

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" in cls.__dict__ and LOSSES.setdefault(cls.name, cls) is not cls:
            taken = LOSSES[cls.name].__qualname__
            raise TypeError(f"loss name {cls.name!r} is taken by {taken}")

    def __post_init__(self) -> None:
        for one in fields(self):
            if one.metadata:
                given, kind = getattr(self, one.name), type(one.default)
                # A number is kept as a float, so that 3 and 3.0 are one loss.
                value = as_float(given) if kind is float else given
                if type(value) is not kind or not one.metadata["allowed"](value):
                    words = one.metadata["words"]
                    raise InputError(f"{self.name}: {one.name} is {given!r}: {words}")
                object.__setattr__(self, one.name, value)

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of a batch, a 0-d tensor, float32 or wider.

        Args:
            logits: (n, k) floating point, k at least 2.
            labels: (n,) int64, or (n, k) class probabilities where `soft_targets`.

        Raises:
            InputError: for shapes and dtypes that cannot be used. Values are not looked at: that
                would wait for the device.
        """
        self.check(logits, labels)
        value = self.mean(widened(logits), labels)
        return value if self.reduction == "mean" else value * len(logits)

    @abstractmethod
    def mean(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss under reduction "mean", of checked logits that are float32 or wider."""

    def rows(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of each row (n,), of checked logits that are float32 or wider."""
        raise InputError(f"{self.name}: it is no mean over rows: call the loss on the batch")

    def at(self, progress: float) -> TrainingLoss:
        """The loss for a point of training, from 0 at the start to 1 at the end."""
        return self

    def updated(self, logits: Tensor, labels: Tensor) -> TrainingLoss:
        """The loss of the next epoch, given outputs on held-out rows; itself unless it adapts."""
        return self

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint must hold besides the text: the tensors `updated` has set."""
        return {}

    def restored(self, state: Mapping[str, Tensor]) -> TrainingLoss:
        """This loss with the state of a checkpoint."""
        if state:
            raise InputError(f"{self.name}: state holds {', '.join(state)}: this loss has no state")
        return self

    def to(self, device: torch.device | str) -> TrainingLoss:
        """This loss with its state on a device."""
        return self

    @property
    def heading(self) -> str:
        """`title`, or the text of the loss where its hyperparameters are not the default ones."""
        changed = self.changed().keys() - {"reduction"}
        return repr(self) if changed else self.title

    @classmethod
    def arguments(cls) -> dict[str, object]:
        """The hyperparameters with their defaults; state is none of them."""
        own = sorted(fields(cls), key=lambda field: field.name == "reduction")
        return {field.name: field.default for field in own if field.compare}

    def changed(self) -> dict[str, object]:
        """The hyperparameters that differ from their defaults."""
        given = {key: getattr(self, key) for key in self.arguments()}
        return {key: value for key, value in given.items() if value != self.arguments()[key]}

    def __repr__(self) -> str:
        arguments = ", ".join(f"{key}={value!r}" for key, value in self.changed().items())
        return f"{self.name}({arguments})" if arguments else self.name

    def check(self, logits: Tensor, labels: Tensor) -> None:
        """Refuses what is no batch, by shape and dtype alone."""
        shape = tuple(logits.shape)
        if not logits.is_floating_point() or len(shape) != 2 or shape[0] < 1 or shape[1] < 2:
            raise InputError(
                f"{self.name}: logits are {logits.dtype} of shape {shape}: give floating point "
                "(n, k), at least one row and two classes; of a single logit z make the two "
                "columns 0 and z"
            )
        soft = labels.is_floating_point() and labels.ndim == 2
        if soft and not self.soft_targets:
            raise InputError(
                f"{self.name}: labels are rows of probabilities: this loss needs class numbers; "
                "for mixup use featcal.losses.mixed with both labels of a row"
            )
        kind, wanted = ("probabilities", shape) if soft else ("int64 class numbers", shape[:1])
        if tuple(labels.shape) != wanted or not (soft or labels.dtype == torch.int64):
            raise InputError(
                f"{self.name}: labels are {labels.dtype} of shape {tuple(labels.shape)}: give "
                f"{kind} of shape {wanted} for logits of shape {shape}"
            )


class RowLoss(TrainingLoss):
    """A loss that is a mean over rows, each computed by itself: `rows` is all it has to say."""

    @abstractmethod
    def rows(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of each row (n,), of checked logits that are float32 or wider."""

    def mean(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean over the rows."""
        return self.rows(logits, labels).mean()


def mixed(
    loss: TrainingLoss, logits: Tensor, labels: Tensor, partners: Tensor, weight: Tensor | float
) -> Tensor:
    """The loss of mixed inputs in the two-term form: w L(labels) + (1 - w) L(partners).

    Zhang et al., mixup (ICLR 2018). It serves every loss, with or without soft targets.

    Args:
        loss: any training loss.
        logits: (n, k) outputs for w x + (1 - w) x'.
        labels: those of x.
        partners: those of x'.
        weight: w, a float or a 0-d tensor; a captured graph reads a tensor anew at each replay.
    """
    if isinstance(weight, Tensor) and weight.ndim != 0:
        raise InputError(f"mixed: weight has shape {tuple(weight.shape)}: give one for the batch")
    return weight * loss(logits, labels) + (1 - weight) * loss(logits, partners)


READER: Reader[TrainingLoss] = Reader(
    text="loss",
    item="loss",
    known=LOSSES,
    example="focal(gamma=3)",
    grammar="one loss, for example 'focal(gamma=3)'",
    pieces="the name of one loss and literal keyword arguments",
    arguments=lambda loss: cast(type[TrainingLoss], loss).arguments(),
    meant=dict.fromkeys(("cross_entropy", "crossentropy", "CrossEntropyLoss", "nll"), "ce"),
)


def parse_loss(text: str) -> TrainingLoss:
    """The loss a text describes.

    >>> parse_loss("focal(gamma=2)")
    focal(gamma=2.0)

    Raises:
        InputError: naming what cannot be read.
    """
    return READER.read(text)


def widened(logits: Tensor) -> Tensor:
    """float32 logits of 16-bit ones; others as they are."""
    return logits.float() if logits.dtype.itemsize < 4 else logits


def label_logs(logits: Tensor, labels: Tensor) -> Tensor:
    """The log p of each row's own class: (n, k), (n,) -> (n,), at most 0."""
    return -F.cross_entropy(logits, labels, reduction="none", ignore_index=NO_LABEL)


def top_label(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The confidence of each row, and 1 where its prediction is right, else 0: (n,) each.

    Only the confidence has a gradient: being right is constant but for jumps.
    """
    confidence = logits.softmax(1).amax(1)
    return confidence, (logits.detach().argmax(1) == labels).to(logits.dtype)
