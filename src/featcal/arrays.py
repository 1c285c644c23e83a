"""The numpy face of featcal: arrays in, arrays out, in the manners of a scikit-learn classifier.

scikit-learn is not needed and not imported; where it is there, `Calibrated` is one of its
estimators, by duck typing.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Iterable
from typing import Any, Self, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from featcal.arrays_input import (
    Labels,
    Rows,
    check_finite,
    check_probs,
    classes_in,
    classes_of,
    codes_of,
    in_precision_of,
    labels_of,
    names_of,
    read_head,
    table,
)
from featcal.core.arguments import check_choice
from featcal.core.batch import CHUNK_ROWS, Batch, Head, device_of, stored_logits, wide
from featcal.core.binary import one_logit, two_classes
from featcal.core.calibrator import Calibrator
from featcal.core.errors import InputError
from featcal.core.fitting import FitReport, evaluating
from featcal.core.probabilities import Kind
from featcal.core.spec import parse
from featcal.core.steps import Mode

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
