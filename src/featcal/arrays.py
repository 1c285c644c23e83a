"""The numpy face of featcal: arrays in, arrays out, in the manners of a scikit-learn classifier.

scikit-learn is not needed and not imported; where it is there, `Calibrated` is one of its
estimators, by duck typing.
"""

from __future__ import annotations

import copy
import inspect
import sys
import warnings
from collections.abc import Iterable
from typing import Any, Self, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from featcal.core.batch import (
    CHUNK_ROWS,
    Batch,
    Head,
    device_of,
    is_single,
    one_logit,
    stored_logits,
    two_classes,
    wide,
)
from featcal.core.calibrator import Calibrator
from featcal.core.checks import ROUNDING, InputError, Kind, check_choice, rows_text, sum_tolerance
from featcal.core.fit import FitReport, Mode, evaluating
from featcal.core.text import parse
from featcal.data.manifest import head_tensors
from featcal.heads.head import as_head, linear_of

# --- Arrays as people hold them: rows of numbers, labels of any kind, a head; refused by name.
#
# Nothing is guessed: what the numbers are is said by the caller, and which column belongs to which
# class by the labels or by `classes`.

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


Array = NDArray[Any]


@final
class Calibrated:
    """A classifier whose input are the scores of another one, and whose output is calibrated.

    Column j of the scores belongs to `classes_[j]`. A single column, (n,) or (n, 1), is the logit
    of the second of two classes, as a binary `decision_function` gives it.

    Args:
        recipe: what to fit, as text or as a calibrator, which is copied.
        head: the classifier's last layer, where X holds the features that enter it: (weight, bias)
            as arrays, an `nn.Linear`, any module or function. None where X holds scores.
        kind: what the scores are, "logits" or "probs" (log-probabilities are logits).
        classes: the class of each column, sorted. None for the labels of the fit; where these lack
            some class, whole numbers counted from 0 are taken as column numbers.
        mode: "joint" or "sequential"; see `Calibrator.fit`.

    Attributes:
        calibrator_: the fitted calibrator, which `featcal.save` keeps and `featcal.attach` takes.
        report_: its fit report.
        classes_: the class of each column.
        n_features_in_: the columns of X; feature_names_in_: their names, where X was a frame.
        head_: the head as it is used, or None.

    >>> logits = np.array([[3.0, 0.0], [4.0, 0.0], [0.0, 2.0], [3.0, 0.0]])
    >>> estimator = Calibrated("temperature").fit(logits, ["cat", "cat", "dog", "dog"])
    >>> estimator.predict_proba(logits[:1]).round(3)
    array([[0.742, 0.258]])
    >>> estimator.predict(logits[:3])
    array(['cat', 'cat', 'dog'], dtype='<U3')
    """

    calibrator_: Calibrator
    classes_: Labels
    feature_names_in_: Labels
    head_: Head | None
    n_features_in_: int
    report_: FitReport | None

    def __init__(
        self,
        recipe: str | Calibrator = "temperature",
        *,
        head: Any = None,  # noqa: ANN401 - arrays of any kind, or a module
        kind: Kind = "logits",
        classes: Iterable[Any] | None = None,
        mode: Mode = "joint",
    ) -> None:
        # Nothing is checked before fit: scikit-learn copies and changes parameters as it likes.
        self.recipe = recipe
        self.head = head
        self.kind = kind
        self.classes = classes
        self.mode = mode

    def fit(self, X: Rows, y: Rows, *, train: Rows = None) -> Self:
        """Learns from rows the classifier was not trained on.

        Args:
            X: scores (n, k), or features (n, d) where there is a head.
            y: the label of each row.
            train: features of rows the classifier was trained on, for recipes that need them.
        """
        given = table(X)
        labels = labels_of(y, len(given), flat=given.shape[1] > 1)
        head = self._new_head()
        rows = _entering(given, head, self.kind)
        classes = classes_of(labels, classes_in(rows, head), self.classes)
        calibrator = _fresh(self.recipe)
        calibrator.fit(
            _batch(rows, codes_of(labels, classes), head),
            head,
            mode=self.mode,
            train=None if train is None else _unlabelled(table(train, name="train"), head),
        )
        self.calibrator_, self.report_ = calibrator, calibrator.report
        self.classes_, self.head_ = classes, head
        self.n_features_in_, self._kind = given.shape[1], self.kind
        self._keep_names(names_of(X))
        return self

    def predict_proba(self, X: Rows) -> Array:
        """Calibrated probabilities (n, k), a column a class."""
        return _numpy(self._logits(X).softmax(1))

    def predict_log_proba(self, X: Rows) -> Array:
        """Their logarithms, without the loss of digits of a logarithm of `predict_proba`."""
        return _numpy(self._logits(X).log_softmax(1))

    def decision_function(self, X: Rows) -> Array:
        """Calibrated logits (n, k); of two classes (n,), the logit of the second."""
        logits = self._logits(X)
        return _numpy(one_logit(logits)[:, 0] if logits.shape[1] == 2 else logits)

    def predict(self, X: Rows) -> Labels:
        """The most probable class of each row, the first one where several are equal."""
        first = _numpy(self._logits(X).argmax(1))
        found: Labels = self.classes_[first]
        return found

    def score(self, X: Rows, y: Rows, sample_weight: Rows = None) -> float:
        """The share of rows whose predicted class is their label."""
        predicted = self.predict(X)
        return float(np.average(predicted == labels_of(y, len(predicted)), weights=sample_weight))

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The constructor's arguments, as given; none of them has parameters of its own."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def set_params(self, **params: Any) -> Self:  # noqa: ANN401
        """Changes constructor arguments; the next fit uses them."""
        known = self.get_params()
        for name in params:
            if name not in known:
                raise InputError(f"Calibrated has no parameter {name!r}: it has {', '.join(known)}")
        for name, value in params.items():
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        """The call that makes it, with arguments that differ from their defaults."""
        known = inspect.signature(type(self)).parameters
        shown = [repr(self.recipe)] + ["head=..."] * (self.head is not None)
        for name in ("kind", "classes", "mode"):
            value = getattr(self, name)
            if repr(value) != repr(known[name].default):
                shown.append(f"{name}={value!r}")
        return f"Calibrated({', '.join(shown)})"

    def __sklearn_tags__(self) -> Any:  # noqa: ANN401 - a class of scikit-learn's
        """What scikit-learn asks an estimator about itself: a classifier as good as its scores."""
        from sklearn.utils import ClassifierTags, Tags, TargetTags

        return Tags(
            estimator_type="classifier",
            target_tags=TargetTags(required=True),
            classifier_tags=ClassifierTags(poor_score=True),
        )

    @torch.no_grad()
    def _logits(self, X: Rows) -> Tensor:
        """Calibrated logits (n, k)."""
        self._check_fitted()
        self._check_names(names_of(X))
        rows = _entering(table(X, width=self.n_features_in_), self.head_, self._kind)
        head = nn.Identity() if self.head_ is None else self.head_
        device = device_of(head)
        with evaluating(head):
            parts = [
                self.calibrator_(part.to(device), head) for part in torch.split(rows, CHUNK_ROWS)
            ]
        logits = torch.cat([part.cpu() for part in parts])
        check_finite(logits, "what the head makes of X")
        return logits

    def _new_head(self) -> Head | None:
        check_choice("Calibrated", "kind", self.kind, ("logits", "probs"))
        if self.head is not None and self.kind == "probs":
            raise InputError("Calibrated: with head= X holds features: leave kind='probs' out")
        return read_head(self.head)

    def _check_fitted(self) -> None:
        if hasattr(self, "calibrator_"):
            return
        text = f"{self!r} is not fitted yet: call fit(X, y) with rows of a validation split first"
        if "sklearn" not in sys.modules:
            raise InputError(text)
        from sklearn.exceptions import NotFittedError  # what scikit-learn's own code waits for

        raise NotFittedError(text)

    def _keep_names(self, names: Labels | None) -> None:
        if names is not None:
            self.feature_names_in_ = names
        elif hasattr(self, "feature_names_in_"):
            del self.feature_names_in_  # of an earlier fit

    def _check_names(self, names: Labels | None) -> None:
        """Columns of a frame in another order would be probabilities of other classes."""
        known = getattr(self, "feature_names_in_", None)
        if names is not None and known is not None and names.tolist() != known.tolist():
            raise InputError(
                "the columns of X are not those of fit, or in another order: "
                "pass X[list(estimator.feature_names_in_)]"
            )


def _fresh(recipe: str | Calibrator) -> Calibrator:
    return copy.deepcopy(recipe) if isinstance(recipe, Calibrator) else parse(recipe)


def _entering(rows: Tensor, head: Head | None, kind: str) -> Tensor:
    """What the calibrator gets: logits (n, k), or features (n, d) in the head's precision."""
    if head is not None:
        return in_precision_of(head, rows)
    if kind == "probs":
        check_probs(rows)
        # In 16 bits a 0 is a small number rounded away: what stands for it is as small as they get.
        probs = wide(rows.clamp(torch.finfo(rows.dtype).tiny, 1))
        return stored_logits(Batch.from_probs(probs, torch.zeros(len(rows), dtype=torch.int64)))
    return wide(two_classes(rows))


def _batch(rows: Tensor, labels: Tensor, head: Head | None) -> Batch:
    return Batch(rows, labels) if head is None else Batch(None, labels, rows)


def _unlabelled(rows: Tensor, head: Head | None) -> Batch:
    """Training rows: methods look at their features alone."""
    rows = rows if head is None else in_precision_of(head, rows)
    return Batch(None, torch.zeros(len(rows), dtype=torch.int64), rows)


def _numpy(values: Tensor) -> Array:
    array: Array = values.numpy()
    return array
