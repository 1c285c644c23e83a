"""Arrays as people hold them: rows of numbers, labels of any kind, a head; refused by name.

Nothing is guessed: what the numbers are is said by the caller, and which column belongs to which
class by the labels or by `classes`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from featcal.core.batch import Head, device_of, wide
from featcal.core.binary import is_single
from featcal.core.errors import InputError
from featcal.core.fitting import evaluating
from featcal.core.head import as_head, linear_of
from featcal.core.probabilities import ROUNDING, rows_text, sum_tolerance
from featcal.data.layout import head_tensors

Rows: TypeAlias = Any  # a numpy array, a torch tensor, nested lists, a frame: what numpy can read
Labels: TypeAlias = NDArray[Any]


def table(given: Rows, *, width: int | None = None, name: str = "X") -> Tensor:
    """Rows of finite numbers, (n, d) floating point; (n,) is one column.

    Args:
        given: what the caller passed.
        width: the columns a fit has seen; None where any number will do.
        name: what the caller calls it.
    """
    values = _numbers(given, name)
    if values.ndim == 1 and width in (None, 1):
        values = values[:, None]
    if values.ndim != 2:
        raise InputError(
            f"{name} has shape {tuple(values.shape)}: Reshape your data to (rows, columns), "
            "with X.reshape(1, -1) where it is a single row"
        )
    if values.shape[1] == 0 or len(values) == 0:
        what, axis = ("sample(s)", 0) if len(values) == 0 else ("feature(s)", 1)
        shape = tuple(values.shape)
        raise InputError(
            f"{name} has {shape[axis]} {what} (shape={shape}) while a minimum of 1 is required."
        )
    if width is not None and values.shape[1] != width:
        raise InputError(
            f"{name} has {values.shape[1]} features, but Calibrated is expecting {width} features "
            "as input: pass the columns that fit has seen"
        )
    check_finite(values, name)
    return values


def check_finite(values: Tensor, name: str) -> None:
    """Refuses rows with NaN or infinity."""
    bad = ~torch.isfinite(values).all(1)
    if bool(bad.any()):
        raise InputError(f"{name} is NaN or infinite in {_listed(bad)}: remove or correct them")


def _numbers(given: Rows, name: str) -> Tensor:
    """The values as a floating point tensor in the CPU's memory, in their own precision."""
    if isinstance(given, Tensor):
        values = given.detach().cpu()
        if values.is_complex():
            raise InputError(f"Complex data not supported: {name} has type {values.dtype}")
        return values if values.is_floating_point() else values.double()
    if hasattr(given, "toarray"):
        raise InputError(f"{name} is a sparse {type(given).__name__}: pass {name}.toarray()")
    array = _array(given, name)
    if array.dtype.kind == "c":
        raise InputError(f"Complex data not supported: {name} has type {array.dtype}")
    if array.dtype.kind not in "fiubO":
        raise InputError(f"{name} has type {array.dtype}: pass numbers")
    exact = array.dtype.kind == "f" and array.dtype.itemsize <= 8
    try:
        # torch shares memory only with writable arrays of native byte order and forward strides.
        wanted = array.dtype.newbyteorder("=") if exact else np.dtype(np.float64)
        return torch.from_numpy(np.require(array, wanted, ["C", "W"]))
    except TypeError as error:
        raise TypeError(f"{name} holds what is no number: {error}") from error
    except ValueError as error:
        raise InputError(f"{name} holds what is no number: {error}") from error


def _array(given: Rows, name: str) -> NDArray[Any]:
    try:
        return np.asarray(given)
    except ValueError as error:  # rows of unequal length
        raise InputError(f"{name} cannot be read as an array: {error}") from error


def check_probs(probs: Tensor) -> None:
    """Refuses rows (n, k) that are no probabilities; a single column is that of class 1."""
    outside = ((probs < -ROUNDING) | (probs > 1 + ROUNDING)).nonzero()
    if len(outside):
        row, column = outside[0].tolist()
        raise InputError(
            f"X[{row}, {column}] is {float(probs[row, column]):.6g}, outside 0..1: "
            "with kind='probs' X holds probabilities; say kind='logits' where it does not"
        )
    sums = probs.double().sum(1)
    wrong = (sums - 1).abs() > sum_tolerance(probs)
    if not is_single(probs) and bool(wrong.any()):
        first = float(sums[wrong][0])
        raise InputError(
            f"X sums to {first:.6g}, not 1, in {_listed(wrong)}: divide each row by its sum, or "
            "say kind='logits' where these are no probabilities"
        )


def _listed(bad: Tensor) -> str:
    return rows_text(bad.nonzero().flatten())


def names_of(given: Rows) -> Labels | None:
    """The names of a frame's columns; None where there are none, or they are no text."""
    names = list(getattr(given, "columns", ()))
    text = bool(names) and all(isinstance(name, str) for name in names)
    return np.array(names, dtype=object) if text else None


def labels_of(given: Rows, rows: int, *, flat: bool = False) -> Labels:
    """The label of each row, (n,), of any kind that can be sorted.

    Args:
        given: what the caller passed; (n, 1) will do.
        rows: how many there must be.
        flat: whether to say that (n,) is expected, as scikit-learn does. Beside one logit a row,
            (n, 1) is the usual form.
    """
    if given is None:
        raise InputError("Calibrated requires y to be passed, but the target y is None")
    y = _array(given.detach().cpu() if isinstance(given, Tensor) else given, "y")
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
        if flat:
            _say_column()
    if y.ndim != 1:
        raise InputError(
            f"y has shape {y.shape}: pass one label a row, y.argmax(1) where it is one-hot"
        )
    if len(y) != rows:
        raise InputError(f"y has {len(y)} labels and X has {rows} rows: pass as many")
    if y.dtype.kind == "O":  # numbers in an array of objects are numbers
        plain = np.asarray(y.tolist())
        y = plain if plain.dtype.kind in "biuf" and plain.ndim == 1 else y
    if y.dtype.kind == "f":
        bad = torch.from_numpy(~np.isfinite(y))
        if bool(bad.any()):
            raise InputError(f"y is NaN or infinite in {_listed(bad)}: remove these rows")
        if (y % 1 != 0).any():
            value = y[y % 1 != 0][0]
            raise InputError(f"Unknown label type: y is continuous ({value:.6g}): pass classes")
    return y


def _say_column() -> None:
    """scikit-learn's warning, for those who use it."""
    if "sklearn" in sys.modules:
        from sklearn.exceptions import DataConversionWarning

        text = "A column-vector y was passed when a 1d array was expected: pass y.ravel()"
        warnings.warn(text, DataConversionWarning, stacklevel=4)


def classes_of(y: Labels, columns: int, given: Iterable[Any] | None) -> Labels:
    """The class of each of k columns: those given, or the labels found, sorted.

    Labels that lack some class are column numbers where they are whole numbers counted from 0, as
    everywhere in featcal; what others mean cannot be known.
    """
    if given is not None:
        return _given_classes(given, columns)
    try:
        found = np.unique(y)
    except TypeError as error:
        raise InputError(f"Unknown label type: y mixes kinds that do not sort: {error}") from error
    if len(found) == columns:
        return found
    if found.dtype.kind == "b" and columns == 2:
        return np.array([False, True])
    if found.dtype.kind in "iuf" and found[0] == 0 and found[-1] < columns:
        return np.arange(columns, dtype=found.dtype)
    less = len(found) < columns
    raise InputError(
        f"the scores have {columns} columns and y has {len(found)} "
        f"class{'es' * (len(found) != 1)}, and each class needs a column of its own: "
        + ("pass classes=, the class of every column" if less else "pass scores of every class")
        + ", or head= where X holds features"
    )


def _given_classes(given: Iterable[Any], columns: int) -> Labels:
    if not isinstance(given, Iterable) or isinstance(given, str):
        raise InputError(f"classes is {given!r}: pass the class of every column, as in range(10)")
    classes = np.asarray(list(given))
    if classes.ndim != 1 or len(set(classes.tolist())) != len(classes):
        raise InputError("classes holds a class twice, or is no flat list: name each column once")
    if classes.tolist() != sorted(classes.tolist()):
        raise InputError(
            "classes is not sorted, and scikit-learn reads column j as the j-th class in sorted "
            f"order: sort the columns of X alike, or fit with labels 0 to {len(classes) - 1}"
        )
    if len(classes) != columns:
        raise InputError(
            f"classes has {len(classes)} entries and the scores {columns} columns: name each column"
        )
    return classes


def codes_of(y: Labels, classes: Labels) -> Tensor:
    """The column of each label, (n,) int64."""
    found, place = np.unique(y, return_inverse=True)
    columns = {label: column for column, label in enumerate(classes.tolist())}
    strange = [label for label in found.tolist() if label not in columns]
    if strange:
        row = int(np.flatnonzero(y == strange[0])[0])
        raise InputError(
            f"y[{row}] is {strange[0]!r}, which is none of the {len(classes)} classes: "
            "name the class of every column in classes="
        )
    return torch.tensor([columns[label] for label in found.tolist()])[torch.from_numpy(place)]


def read_head(given: Any) -> Head | None:  # noqa: ANN401 - whatever the caller passed
    """The head a caller described, as rows in, rows of two or more logits out."""
    if given is None or callable(given):
        return as_head(given)
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise InputError(
            f"head is a {type(given).__name__}: pass (weight, bias), with bias None where there "
            "is none, or the classifier's last layer"
        )
    weight = table(given[0], name="head weight")
    bias = None if given[1] is None else torch.as_tensor(np.asarray(given[1])).to(weight)
    if bias is not None and bias.numel() == 1:  # scikit-learn's intercept_ where there is none
        bias = bias.expand(len(weight))
    tensors = head_tensors((weight, bias))
    assert tensors is not None
    return linear_of(**tensors)


def in_precision_of(head: Head, rows: Tensor) -> Tensor:
    """The rows as the head's weights can be multiplied with them."""
    weights = head.parameters() if isinstance(head, nn.Module) else iter(())
    return next((rows.to(weight.dtype) for weight in weights), wide(rows))


@torch.no_grad()
def classes_in(rows: Tensor, head: Head | None) -> int:
    """The number of classes."""
    if head is None:
        return rows.shape[1]
    try:
        with evaluating(head):
            return head(rows[:1].to(device_of(head))).shape[1]
    except RuntimeError as error:
        raise InputError(
            f"head does not take rows of {rows.shape[1]} features: {str(error).splitlines()[0]}"
        ) from error
