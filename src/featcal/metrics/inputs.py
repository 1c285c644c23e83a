"""One reading of probabilities or logits for every metric: checked, never guessed."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, Self, final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from featcal.core.batch import is_single, two_classes, two_probs, wide, zero_or_one
from featcal.core.checks import ROUNDING, InputError, Kind, rows_text, sum_tolerance
from featcal.core.rows import predicted

# --- A metric is a monoid: batches, shards and ranks merge the same way.


class Summary(Protocol):
    """What is left of labelled predictions when only one kind of question is asked of them.

    `of(a followed by b) == of(a) + of(b)`, addition is associative, and the summary of no rows is
    neutral. A rank's part becomes the whole by `reduced()`.
    """

    @classmethod
    def of(
        cls,
        probs: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        logits: Tensor | None = None,
    ) -> Self:
        """The summary of n predictions, given as probabilities or as logits."""
        ...

    def __add__(self, other: Self) -> Self: ...

    def reduced(self) -> Self:
        """The sum over all processes."""
        ...


Values = Tensor | NDArray[Any]

CHUNK_VALUES = 2**18  # 1 MiB of float32: the passes over a chunk then find it in the cache


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

    def raw_chunks(self) -> tuple[Tensor, ...]:
        """The values as they came, in the same chunks, not checked."""
        rows = max(1, CHUNK_VALUES // self.values.shape[1])
        return torch.split(self.values, rows)

    def passes(self, sums: Tensor, lowest: float, highest: float) -> bool:
        """Whether values with these row sums and ends are probabilities."""
        near = bool(((sums - 1).abs() <= sum_tolerance(self.values)).all())
        return near and lowest >= -ROUNDING and highest <= 1 + ROUNDING

    def chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Checked values, float32 or wider, with their labels; one empty chunk for no rows."""
        n, k = self.values.shape
        rows = max(1, CHUNK_VALUES // k)
        for start in range(0, max(1, n), rows):
            part = slice(start, start + rows)
            yield self._checked(self.values[part], first_row=start), self.labels[part]

    def whole(self) -> Tensor:
        """All checked values at once, float32 or wider."""
        for _ in self.chunks():
            pass
        return wide(self.values)

    def _checked(self, values: Tensor, *, first_row: int) -> Tensor:
        if self.name == "logits":
            # A finite sum proves finite terms; one that overflows costs a second look, no error.
            if not bool(torch.isfinite(wide(values).sum())):
                _refuse_infinite("logits", values, first_row)
            return wide(values)
        values = wide(values)
        if len(values) and not self.passes(values.sum(1), *_ends(values)):
            _refuse_infinite("probs", values, first_row)
            _refuse_outside(values, first_row)
            _refuse_row_sums(values, sum_tolerance(self.values), first_row)
        return values


def read(probs: Values | None, labels: Values | None, logits: Values | None) -> Given:
    """The one entry of every metric: names, types, shapes and labels are checked here.

    Raises:
        InputError: unless exactly one of `probs` and `logits` is given, as (n, k) floating point,
            with n integer labels in range. Values are checked as `Given.chunks` reads them.
    """
    if probs is not None and logits is not None:
        raise InputError("probs and logits are both given: pass one of them")
    if labels is None:
        raise InputError("labels is None: pass the class of every row, (n,) integers")
    if probs is not None:
        return _given("probs", probs, labels)
    if logits is not None:
        return _given("logits", logits, labels)
    raise InputError("probs and logits are both None: pass probs, or logits=... by keyword")


def _given(name: Kind, values: Values, labels: Values) -> Given:
    """The values as (n, k); one a row is a sigmoid model's, whose labels may be bool or float."""
    found, known = _floating(name, values), _tensor("labels", labels)
    if is_single(found):
        found, known = _both_classes(name, found), _binary_labels(known)
    if found.ndim != 2 or found.shape[1] == 0:
        raise InputError(
            f"{name} has shape {tuple(found.shape)}: pass (rows, classes), or (rows,) for class 1 "
            "of a binary model"
        )
    return Given(name, found, _labels(known, found))


def _both_classes(name: Kind, single: Tensor) -> Tensor:
    if name == "logits":
        return two_classes(single)
    # Seen before 1 - p stands beside p, so that a message shows the value that was given.
    outside = ((single < -ROUNDING) | (single > 1 + ROUNDING)) & single.isfinite()
    rows = outside.flatten().nonzero().flatten()
    if len(rows):
        raise InputError(
            f"probs[{int(rows[0])}] is {float(single.flatten()[rows[0]]):.6g}, outside 0..1 "
            f"({rows_text(rows)}): if these are logits pass logits=..."
        )
    return two_probs(single)


def _binary_labels(given: Tensor) -> Tensor:
    labels = zero_or_one(given)
    if labels.is_floating_point() and labels.ndim == 1:
        rows = ((labels != 0) & (labels != 1)).nonzero().flatten()
        raise InputError(
            f"labels[{int(rows[0])}] is {float(labels[rows[0]]):.6g}, neither 0 nor 1 "
            f"({rows_text(rows)}): a binary model has the classes 0 and 1"
        )
    return labels


def checked_bins(bins: int) -> int:
    """The number of bins, an integer of at least 1.

    >>> checked_bins(15)
    15
    """
    number = _integer(bins)
    if number is None or number < 1:
        raise InputError(f"bins is {bins!r}: pass an integer of at least 1")
    return number


def checked_class(label: int, classes: int) -> int:
    """The number of one of k classes.

    >>> checked_class(1, 2)
    1
    """
    number = _integer(label)
    if number is None or not 0 <= number < classes:
        raise InputError(f"of_class is {label!r}: pass one of the classes 0..{classes - 1}")
    return number


def _integer(value: object) -> int | None:
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def checked_rows(rows: int) -> int:
    """The number of rows, refused when a metric would divide by none."""
    if rows == 0:
        raise InputError("there are no rows: a metric needs at least one labelled prediction")
    return rows


def _tensor(name: str, values: Values) -> Tensor:
    if isinstance(values, Tensor):
        return values.detach()
    if not isinstance(values, np.ndarray):
        raise InputError(
            f"{name} is a {type(values).__name__}: pass a torch tensor or a numpy array"
        )
    # torch shares memory only with writable arrays of native byte order and forward strides.
    native = values.dtype.newbyteorder("=")
    array = np.require(values, dtype=native, requirements=["C", "W"])
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise InputError(f"{name} has type {values.dtype}: pass plain numbers") from error


def _floating(name: str, given: Values) -> Tensor:
    values = _tensor(name, given)
    if not values.is_floating_point():
        raise InputError(f"{name} has type {values.dtype}: pass floating point values")
    return values


def _labels(labels: Tensor, values: Tensor) -> Tensor:
    rows, classes = values.shape
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise InputError(f"labels has type {labels.dtype}: pass integer classes, labels.long()")
    if labels.ndim != 1:
        remedy = "labels[:, 0]" if labels.shape[1:] == (1,) else "labels.argmax(1) if one-hot"
        raise InputError(f"labels has shape {tuple(labels.shape)}: pass one class a row, {remedy}")
    if len(labels) != rows:
        raise InputError(f"labels has {len(labels)} rows and the predictions {rows}: pass as many")
    labels = labels.to(values.device, torch.int64)
    wrong = ((labels < 0) | (labels >= classes)).nonzero().flatten()
    if len(wrong):
        row = int(wrong[0])
        raise InputError(
            f"labels[{row}] is {int(labels[row])}, outside 0..{classes - 1} "
            f"({rows_text(wrong)}): correct or remove it"
        )
    return labels


def _ends(values: Tensor) -> tuple[float, float]:
    low, high = torch.aminmax(values)
    return float(low), float(high)


def _refuse_infinite(name: str, values: Tensor, first_row: int) -> None:
    rows = (~torch.isfinite(values).all(1)).nonzero().flatten()
    if len(rows):
        raise InputError(f"{name} is NaN or infinite in {rows_text(rows, first_row)}: remove them")


def _refuse_outside(values: Tensor, first_row: int) -> None:
    outside = ((values < -ROUNDING) | (values > 1 + ROUNDING)).nonzero()
    if len(outside):
        row, column = outside[0].tolist()
        raise InputError(
            f"probs[{first_row + row}, {column}] is {float(values[row, column]):.6g}, "
            "outside 0..1: if these are logits pass logits=..."
        )


def _refuse_row_sums(values: Tensor, tolerance: float, first_row: int) -> None:
    sums = values.sum(1)
    rows = ((sums - 1).abs() > tolerance).nonzero().flatten()
    if len(rows):
        raise InputError(
            f"probs[{first_row + int(rows[0])}] sums to {float(sums[rows[0]]):.6g}, not 1 "
            f"({rows_text(rows, first_row)}): if these are logits pass logits=..., "
            "else divide each row by its sum"
        )


# --- What metrics ask of predictions: the confidence, whether it was right, the true class's
# share.

SMALLEST_PROBABILITY = 1e-12  # stands for 0 where a logarithm of a given probability is taken


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
        cls,
        probs: Values | None = None,
        labels: Values | None = None,
        *,
        logits: Values | None = None,
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
        cls,
        probs: Values | None = None,
        labels: Values | None = None,
        *,
        logits: Values | None = None,
    ) -> Iterator[Predictions]:
        """The same in parts of a few rows, for sums that need every class but keep none."""
        given = read(probs, labels, logits)
        return (_predictions(given, values, chosen) for values, chosen in given.chunks())


def top_label(
    probs: Values | None = None, labels: Values | None = None, *, logits: Values | None = None
) -> TopLabel:
    """Confidence and correctness alone, without keeping n x k probabilities.

    Equal, to the bit, to the same fields of `Predictions.of`.
    """
    given = read(probs, labels, logits)
    quick = _quick_top(given)
    if quick is not None:
        return quick
    parts = [_top(given, values, chosen) for values, chosen in given.chunks()]
    return TopLabel(
        torch.cat([part.confidence for part in parts]), torch.cat([part.correct for part in parts])
    )


def _quick_top(given: Given) -> TopLabel | None:
    """The same for probabilities on a CPU, checked once at the end; None where that fails.

    With a thousand classes the time goes into reading memory and into calls: three reductions a
    chunk are the fewest that find the class and prove the values to be probabilities.
    """
    values = given.values
    if given.name == "logits" or values.dtype.itemsize < 4 or not values.is_cpu or not len(values):
        return None
    parts = [(predicted(part), part.sum(1), part.amin()) for part in given.raw_chunks()]
    classes, sums = (torch.cat(column) for column in list(zip(*parts, strict=True))[:2])
    confidence = values.gather(1, classes[:, None])[:, 0]
    lowest = min(float(low) for _, _, low in parts)
    if not given.passes(sums, lowest, float(confidence.max())):
        return None  # the slow way says what is wrong, and where
    return TopLabel(confidence.clamp(max=1), classes == given.labels)


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
