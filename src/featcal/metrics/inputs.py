"""One reading of probabilities or logits for every metric: checked, never guessed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from featcal.core.batch import is_single, predicted, two_classes, two_probs, wide, zero_or_one
from featcal.core.checks import (
    ROUNDING,
    InputError,
    Kind,
    check_finite,
    check_probs,
    checked_labels,
    sum_tolerance,
    whole_number,
)

# Rows of numbers, where None means that another argument has them.
Values = Tensor | NDArray[Any] | None

CHUNK_VALUES = 2**18  # 1 MiB of float32: the passes over a chunk then find it in the cache;
GPU_VALUES = 2**26  # a GPU wants more at a time than it can cache
REMEDY = "if these are logits pass logits=..., else divide each row by its sum"
SMALLEST_PROBABILITY = 1e-12  # stands for 0 where a logarithm of a given probability is taken


@final
@dataclass(frozen=True, slots=True)
class Given:
    """What a caller passed: n rows over k classes and a label for each.

    Attributes:
        name: the argument the values came in, which alone decides what they are.
        values: (n, k) in the precision they came in.
        labels: (n,) int64, each in 0 to k - 1.
    """

    name: Kind
    values: Tensor
    labels: Tensor

    @property
    def chunk_rows(self) -> int:
        """Rows of a chunk."""
        values = GPU_VALUES if self.values.is_cuda else CHUNK_VALUES
        return max(1, values // self.values.shape[1])

    def chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Checked values, float32 or wider, with their labels; one empty chunk for no rows."""
        for start in range(0, max(1, len(self.values)), self.chunk_rows):
            part = slice(start, start + self.chunk_rows)
            values = wide(self.values[part])
            if self.name == "logits":
                check_finite("logits", values, first_row=start)
            else:

                def place(row: int, first: int = start) -> str:
                    return f"probs[{first + row}]"

                slack = sum_tolerance(self.values)
                check_probs(values, slack=slack, place=place, remedy=REMEDY)
            yield values, self.labels[part]

    def whole(self) -> Tensor:
        """All checked values at once, float32 or wider."""
        for _ in self.chunks():
            pass
        return wide(self.values)


def read(probs: Values, labels: Values, logits: Values) -> Given:
    """The one entry of every metric: names, types, shapes and labels are checked here.

    One value per row is that of a sigmoid model, whose labels may be bool or float.

    Raises:
        InputError: unless exactly one of `probs` and `logits` is given, as (n, k) floating point,
            with n integer labels in range. Values are checked as `Given.chunks` reads them.
    """
    if (probs is None) == (logits is None):
        state = "both None" if probs is None else "both given"
        raise InputError(f"probs and logits are {state}: pass probs, or logits=... by keyword")
    if labels is None:
        raise InputError("labels is None: pass the class of every row, (n,) integers")
    name: Kind = "logits" if probs is None else "probs"
    values, known = as_tensor(name, logits if probs is None else probs), as_tensor("labels", labels)
    if not values.is_floating_point():
        raise InputError(f"{name} has type {values.dtype}: pass floating point values")
    if is_single(values):
        known = zero_or_one(known)
        if (
            name == "probs"
        ):  # before 1 - p stands beside p: a message shows the value that was given
            check_probs(values, remedy=REMEDY)
        values = two_classes(values) if name == "logits" else two_probs(values)
    if values.ndim != 2 or values.shape[1] == 0:
        raise InputError(
            f"{name} has shape {tuple(values.shape)}: pass (rows, classes), or (rows,) for class 1 "
            "of a binary model"
        )
    rows, classes = values.shape
    return Given(name, values, checked_labels(known.to(values.device), classes, rows=rows))


def as_tensor(name: str, values: Values) -> Tensor:
    """A tensor or array as a tensor without a graph; memory is shared where torch can."""
    if isinstance(values, Tensor):
        return values.detach()
    if not isinstance(values, np.ndarray):
        kind = type(values).__name__
        raise InputError(f"{name} is a {kind}: pass a torch tensor or a numpy array")
    # torch shares memory only with writable arrays of native byte order and forward strides.
    native = values.dtype.newbyteorder("=")
    try:
        return torch.from_numpy(np.require(values, dtype=native, requirements=["C", "W"]))
    except TypeError as error:
        raise InputError(f"{name} has type {values.dtype}: pass plain numbers") from error


def checked_bins(bins: int) -> int:
    """The number of bins, an integer of at least 1.

    >>> checked_bins(15)
    15
    """
    if whole_number(bins) < 1:
        raise InputError(f"bins is {bins!r}: pass an integer of at least 1")
    return whole_number(bins)


def checked_class(label: int, classes: int) -> int:
    """The number of one of k classes."""
    if not 0 <= whole_number(label) < classes:
        raise InputError(f"of_class is {label!r}: pass one of the classes 0..{classes - 1}")
    return whole_number(label)


def checked_rows(rows: int) -> int:
    """The number of rows, refused when a metric would divide by none."""
    if rows == 0:
        raise InputError("there are no rows: a metric needs at least one labelled prediction")
    return rows


@final
@dataclass(frozen=True, slots=True, eq=False)
class TopLabel:
    """The predicted class alone: its probability (n,) and whether it was the label (n,) bool."""

    confidence: Tensor
    correct: Tensor


@final
@dataclass(frozen=True, slots=True, eq=False)
class Predictions:
    """Checked predictions for n labelled rows, read once and fed to every summary.

    The prediction is the largest value of a row, the first of equal ones.

    Attributes:
        confidence: (n,) the probability of the predicted class.
        correct: (n,) bool, whether the predicted class is the label.
        probs: (n, k) float32 or float64.
        labels: (n,) int64.
        log_true: (n,) log probability of the label: by log_softmax from logits; from
            probabilities the logarithm of max(p, 1e-12), so that a certain mistake stays finite.
    """

    confidence: Tensor
    correct: Tensor
    probs: Tensor
    labels: Tensor
    log_true: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    @classmethod
    def of(
        cls, probs: Values = None, labels: Values = None, *, logits: Values = None
    ) -> Predictions:
        """Reads torch or numpy probabilities or logits (n, k); 16-bit values become float32.

        Raises:
            InputError: for anything but finite logits, or probabilities in [0, 1] whose rows sum
                to 1 within 1e-3 (1e-2 for 16-bit values), with one label in range a row.

        >>> p = Predictions.of(torch.tensor([[0.1, 0.9], [0.5, 0.5]]), torch.tensor([1, 1]))
        >>> p.correct.tolist()
        [True, False]
        """
        given = read(probs, labels, logits)
        return _predictions(given, given.whole(), given.labels)

    @classmethod
    def stream(
        cls, probs: Values = None, labels: Values = None, *, logits: Values = None
    ) -> Iterator[Predictions]:
        """The same in parts of a few rows, for sums that need every class but keep none."""
        given = read(probs, labels, logits)
        return (_predictions(given, values, chosen) for values, chosen in given.chunks())


def top_label(probs: Values = None, labels: Values = None, *, logits: Values = None) -> TopLabel:
    """Confidence and correctness alone, without keeping n x k probabilities.

    Equal, to the bit, to the same fields of `Predictions.of`.
    """
    given = read(probs, labels, logits)
    values = given.values
    # Probabilities on a CPU are checked once, at the end. With a thousand classes the time goes
    # into reading memory and into calls: three reductions a chunk are the fewest that find the
    # class and prove the values to be probabilities. If they do not, the slow way says where.
    if given.name == "probs" and values.dtype.itemsize >= 4 and values.is_cpu and len(values):
        chunks = torch.split(values, given.chunk_rows)
        parts = [(predicted(part), part.sum(1), part.amin()) for part in chunks]
        classes, sums = (torch.cat(column) for column in list(zip(*parts, strict=True))[:2])
        confidence = values.gather(1, classes[:, None])[:, 0]
        lowest = min(float(low) for _, _, low in parts)
        near = bool(((sums - 1).abs() <= sum_tolerance(values)).all())
        if near and lowest >= -ROUNDING and float(confidence.max()) <= 1 + ROUNDING:
            return TopLabel(confidence.clamp(max=1), classes == given.labels)
    # In their place at once: small results between large ones would keep freed memory from reuse.
    confidence = wide(values[:0]).new_empty(len(values))
    correct = torch.empty_like(given.labels, dtype=torch.bool)
    start = 0
    for part, chosen in given.chunks():
        top, end = _top(given, part, chosen), start + len(chosen)
        confidence[start:end], correct[start:end] = top.confidence, top.correct
        start = end
    return TopLabel(confidence, correct)


def _top(given: Given, values: Tensor, labels: Tensor) -> TopLabel:
    prediction = predicted(values)
    # The logits decide the class: softmax can round two different logits to one probability.
    if given.name == "logits":
        confidence = values.softmax(1).amax(1)
    else:
        confidence = values.gather(1, prediction[:, None])[:, 0].clamp(max=1)
    return TopLabel(confidence, prediction == labels)


def _predictions(given: Given, values: Tensor, labels: Tensor) -> Predictions:
    top = _top(given, values, labels)
    if given.name == "logits":
        log_true = -F.cross_entropy(values, labels, reduction="none")
        return Predictions(top.confidence, top.correct, values.softmax(1), labels, log_true)
    true = values.gather(1, labels[:, None])[:, 0]
    log_true = true.clamp(SMALLEST_PROBABILITY, 1).log()
    return Predictions(top.confidence, top.correct, values, labels, log_true)
