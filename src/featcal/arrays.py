"""The numpy face of featcal: arrays in, arrays out, in the manners of a scikit-learn classifier.

scikit-learn is not needed and not imported; where it is there, `Calibrated` is one of its
estimators, by duck typing. Nothing is guessed: what the numbers are is said by the caller, and
which column belongs to which class by the labels or by `classes`. What callers pass is checked
here, at the door.
"""

from __future__ import annotations

import copy
import inspect
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
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
    one_logit,
    stored_logits,
    two_classes,
    wide,
)
from featcal.core.calibrator import Calibrator
from featcal.core.checks import (
    CalibrationWarning,
    InputError,
    Kind,
    check_choice,
    check_finite,
    check_probs,
    doubt_logits,
)
from featcal.core.fit import FitReport, Mode, evaluating
from featcal.core.text import parse
from featcal.data.pack import head_tensors
from featcal.heads.head import as_head, linear_of
from featcal.io import load

Rows: TypeAlias = Any  # a numpy array, a torch tensor, nested lists, a frame: what numpy can read
Array: TypeAlias = NDArray[Any]


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
    classes_: Array
    feature_names_in_: Array
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
        self.recipe, self.head, self.kind = recipe, head, kind
        self.classes, self.mode = classes, mode

    def fit(self, X: Rows, y: Rows, *, train: Rows = None) -> Self:
        """Learns from rows the classifier was not trained on.

        Args:
            X: scores (n, k), or features (n, d) where there is a head.
            y: the label of each row.
            train: features of rows the classifier was trained on, for recipes that need them.
        """
        given = _table(X)
        _doubt(given, self.head, self.kind, depth=3)
        labels = _labels(y, len(given), flat=given.shape[1] > 1)
        check_choice("Calibrated", "kind", self.kind, ("logits", "probs"))
        if self.head is not None and self.kind == "probs":
            raise InputError("Calibrated: with head= X holds features: leave kind='probs' out")
        head = _read_head(self.head)
        rows = _entering(given, head, self.kind)
        classes = _classes(labels, _columns(rows, head), self.classes)
        codes = _codes(labels, classes)
        seen = None
        if train is not None:  # methods look at their features alone
            features = _table(train, name="train")
            features = features if head is None else _entering(features, head, self.kind)
            seen = Batch(None, torch.zeros(len(features), dtype=torch.int64), features)
        recipe = self.recipe
        calibrator = copy.deepcopy(recipe) if isinstance(recipe, Calibrator) else parse(recipe)
        data = Batch(rows, codes) if head is None else Batch(None, codes, rows)
        calibrator.fit(data, head, mode=self.mode, train=seen)
        self.calibrator_, self.report_ = calibrator, calibrator.report
        self.classes_, self.head_ = classes, head
        self.n_features_in_, self._kind = given.shape[1], self.kind
        names = _names(X)
        vars(self).pop("feature_names_in_", None)  # of an earlier fit
        if names is not None:
            self.feature_names_in_ = names
        return self

    @classmethod
    def load(
        cls,
        path: Path | str,
        *,
        head: Any = None,  # noqa: ANN401 - as in the constructor
        kind: Kind = "logits",
        classes: Iterable[Any] | None = None,
    ) -> Self:
        """A fitted estimator of the file that `featcal.save` or `featcal fit` wrote.

        Args:
            path: the file.
            head: the last layer, where X is to hold the features that enter it; as above.
            kind: what the scores will be, "logits" or "probs".
            classes: the class of each column; None for their numbers.
        """
        calibrator = load(path)
        report, layer = calibrator.report, _read_head(head)
        if report is None:
            raise InputError(f"{path} does not say how many classes it is for: fit it again")
        if calibrator.several:
            raise InputError(
                f"{calibrator!r} in {path} is for several labels a row: take the sigmoids of "
                "featcal.load(file).transform(logits)"
            )
        if calibrator.needs_features and layer is None:
            raise InputError(
                f"{calibrator!r} in {path} works on features: pass head=, (weight, bias)"
            )
        made = cls(calibrator, head=head, kind=kind, classes=classes)
        made.calibrator_, made.report_, made._kind, made.head_ = calibrator, report, kind, layer
        made.classes_ = _classes(np.arange(report.classes), report.classes, classes)
        if layer is not None:
            made.n_features_in_ = report.features
        elif report.classes > 2:  # of two classes one logit or two will do
            made.n_features_in_ = report.classes
        return made

    def predict_proba(self, X: Rows) -> Array:
        """Calibrated probabilities (n, k), a column per class."""
        return np.asarray(self._logits(X).softmax(1))

    def predict_log_proba(self, X: Rows) -> Array:
        """Their logarithms, without the loss of digits of a logarithm of `predict_proba`."""
        return np.asarray(self._logits(X).log_softmax(1))

    def decision_function(self, X: Rows) -> Array:
        """Calibrated logits (n, k); of two classes (n,), the logit of the second."""
        logits = self._logits(X)
        return np.asarray(one_logit(logits)[:, 0] if logits.shape[1] == 2 else logits)

    def predict(self, X: Rows) -> Array:
        """The most probable class of each row, the first one where several are equal."""
        logits = self._logits(X)
        return np.asarray(self.classes_[np.asarray(logits.argmax(1))])

    def score(self, X: Rows, y: Rows, sample_weight: Rows = None) -> float:
        """The share of rows whose predicted class is their label."""
        predicted = self.predict(X)
        return float(np.average(predicted == _labels(y, len(predicted)), weights=sample_weight))

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
        if not hasattr(self, "calibrator_"):
            text = (
                f"{self!r} is not fitted yet: call fit(X, y) with rows of a validation split, or "
                "take Calibrated.load(file) of what was fitted"
            )
            if "sklearn" not in sys.modules:
                raise InputError(text)
            from sklearn.exceptions import NotFittedError  # what scikit-learn's own code waits for

            raise NotFittedError(text)
        names, known = _names(X), getattr(self, "feature_names_in_", None)
        if names is not None and known is not None and names.tolist() != known.tolist():
            raise InputError(  # columns in another order would be other classes
                "the columns of X are not those of fit, or in another order: "
                "pass X[list(estimator.feature_names_in_)]"
            )
        width = getattr(self, "n_features_in_", None)
        given = _table(X, width=width)
        _doubt(given, self.head_, self._kind, depth=4)
        rows = _entering(given, self.head_, self._kind)
        if self.head_ is None:
            self.calibrator_.check_rows(classes=rows.shape[1])
        head = nn.Identity() if self.head_ is None else self.head_
        with evaluating(head):
            chunks = (rows[i : i + CHUNK_ROWS] for i in range(0, len(rows), CHUNK_ROWS))
            parts = [self.calibrator_(part.to(device_of(head)), head).cpu() for part in chunks]
        logits = torch.cat(parts)
        check_finite("the calibrated logits of X", logits)
        return logits


def _table(given: Rows, *, width: int | None = None, name: str = "X") -> Tensor:
    """Rows of finite numbers, (n, d) floating point in their own precision; (n,) is one column.

    Args:
        given: what the caller passed.
        width: the columns a fit has seen; None where any number will do.
        name: what the caller calls it.
    """
    if hasattr(given, "toarray"):
        raise InputError(f"{name} is a sparse {type(given).__name__}: pass {name}.toarray()")
    if isinstance(given, Tensor) and not given.is_complex():
        values = given.detach().cpu()
        values = values if values.is_floating_point() else values.double()
    else:
        try:
            array = np.asarray(given)
            if array.dtype.kind not in "fiubO":
                raise ValueError(f"it has type {array.dtype} (Complex data not supported)")
            # torch shares memory only with writable arrays of native byte order, in C's order.
            exact = array.dtype.kind == "f" and array.dtype.itemsize <= 8
            wanted = array.dtype.newbyteorder("=") if exact else np.dtype(np.float64)
            values = torch.from_numpy(np.require(array, wanted, ["C", "W"]))
        except TypeError as error:  # scikit-learn asks for this class
            raise TypeError(f"{name} holds what is no number: {error}") from error
        except ValueError as error:
            raise InputError(f"{name} holds what is no number: {error}") from error
    if values.ndim == 1 and width in (None, 1):
        values = values[:, None]
    shape = tuple(values.shape)
    if len(shape) != 2:
        raise InputError(
            f"{name} has shape {shape}: Reshape your data to (rows, columns), "
            "with X.reshape(1, -1) where it is a single row"
        )
    if 0 in shape:
        what = "0 sample(s)" if shape[0] == 0 else "0 feature(s)"
        raise InputError(f"{name} has {what} (shape={shape}) while a minimum of 1 is required.")
    if width is not None and shape[1] != width:
        raise InputError(
            f"{name} has {shape[1]} features, but Calibrated is expecting {width} features "
            "as input: pass the columns that fit has seen"
        )
    check_finite(f"values of {name}", values)
    return values


def _names(given: Rows) -> Array | None:
    """The names of a frame's columns; None where there are none, or they are no text."""
    names = list(getattr(given, "columns", ()))
    text = bool(names) and all(isinstance(name, str) for name in names)
    return np.array(names, dtype=object) if text else None


def _labels(given: Rows, rows: int, *, flat: bool = False) -> Array:
    """The label of each row, (n,), of any kind that can be sorted.

    Args:
        given: what the caller passed; (n, 1) will do.
        rows: how many there must be.
        flat: whether to say that (n,) is expected, as scikit-learn does. Beside one logit per row,
            (n, 1) is the usual form.
    """
    if given is None:
        raise InputError("Calibrated requires y to be passed, but the target y is None")
    y = np.asarray(given.detach().cpu() if isinstance(given, Tensor) else given)
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
        if flat and "sklearn" in sys.modules:
            from sklearn.exceptions import DataConversionWarning

            text = "A column-vector y was passed when a 1d array was expected: pass y.ravel()"
            warnings.warn(text, DataConversionWarning, stacklevel=3)
    if y.shape != (rows,):
        raise InputError(
            f"y has shape {y.shape} and X {rows} rows: pass one label per row, y.argmax(1) where "
            "it is one-hot; several labels a row are for "
            "featcal.parse('all_labels(temperature)').fit((X, y))"
        )
    if y.dtype.kind == "O":  # numbers in an array of objects are numbers
        plain = np.asarray(y.tolist())
        y = plain if plain.dtype.kind in "biuf" and plain.ndim == 1 else y
    if y.dtype.kind == "f":
        check_finite("values of y", torch.from_numpy(y)[:, None])
        if (y % 1 != 0).any():
            value = y[y % 1 != 0][0]
            raise InputError(
                f"Unknown label type: y is continuous ({value:.6g}), as the targets of a "
                "regression, which is not supported: pass classes"
            )
    return y


def _classes(y: Array, columns: int, given: Iterable[Any] | None) -> Array:
    """The class of each of k columns: those given, or the labels found, sorted.

    Labels that lack some class are column numbers where they are whole numbers counted from 0, as
    everywhere in featcal; what others mean cannot be known.
    """
    if given is not None:
        flat = isinstance(given, Iterable) and not isinstance(given, str)
        classes = np.asarray(list(given) if flat else given)
        wanted = sorted(set(classes.tolist())) if classes.ndim == 1 else None
        if classes.tolist() != wanted or len(classes) != columns:
            raise InputError(
                f"classes is {given!r}: name the class of each of the {columns} columns once, "
                "sorted, for scikit-learn reads column j as the j-th class in sorted order"
            )
        return classes
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


def _codes(y: Array, classes: Array) -> Tensor:
    """The column of each label, (n,) int64."""
    strange = ~np.isin(y, classes)
    if strange.any():
        row = int(np.flatnonzero(strange)[0])
        raise InputError(
            f"y[{row}] is {y[row].item()!r}, which is none of the {len(classes)} classes: "
            "name the class of every column in classes="
        )
    return torch.from_numpy(np.searchsorted(classes, y))


def _read_head(given: Any) -> Head | None:  # noqa: ANN401 - whatever the caller passed
    """The head a caller described, as rows in, rows of two or more logits out."""
    if given is None or callable(given):
        return as_head(given)
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise InputError(
            f"head is a {type(given).__name__}: pass (weight, bias), with bias None where there "
            "is none, or the classifier's last layer"
        )
    weight = _table(given[0], name="head weight")
    bias = torch.as_tensor(np.asarray(0.0 if given[1] is None else given[1])).to(weight)
    if bias.numel() == 1:  # scikit-learn's intercept_ where there is none
        bias = bias.expand(len(weight))
    return linear_of(**head_tensors((weight, bias)))


def _doubt(rows: Tensor, head: Any, kind: str, *, depth: int) -> None:  # noqa: ANN401 - any head
    """Warns of probabilities that are read as logits."""
    text = doubt_logits(rows, "Calibrated: the rows of X", "pass kind='probs'")
    if text and kind == "logits" and head is None:
        warnings.warn(text, CalibrationWarning, stacklevel=depth)


def _entering(rows: Tensor, head: Head | None, kind: str) -> Tensor:
    """What the calibrator gets: logits (n, k), or features (n, d) in the head's precision."""
    if head is not None:
        weights = head.parameters() if isinstance(head, nn.Module) else iter(())
        return next((rows.to(weight.dtype) for weight in weights), wide(rows))
    if kind == "probs":
        check_probs(rows, place=lambda row: f"X[{row}]")
        # In 16 bits a 0 is a small number rounded away: what stands for it is as small as they get.
        probs = wide(rows.clamp(torch.finfo(rows.dtype).tiny, 1))
        return stored_logits(Batch.from_probs(probs, torch.zeros(len(rows), dtype=torch.int64)))
    return wide(two_classes(rows))


@torch.no_grad()
def _columns(rows: Tensor, head: Head | None) -> int:
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
