"""A classifier of scikit-learn's as a source of scores, so that `Calibrated` can stand on it.

`make_pipeline(Scores(SVC(), cv=5), Calibrated("temperature"))` does what `CalibratedClassifierCV`
does with `ensemble=False`, for any recipe of featcal.
"""

from __future__ import annotations

from typing import Any, Self, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from featcal.core.checks import InputError, check_choice

try:
    from sklearn.base import BaseEstimator, MetaEstimatorMixin, TransformerMixin, clone
    from sklearn.model_selection import check_cv, cross_val_predict
    from sklearn.utils import assert_all_finite, column_or_1d, get_tags
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted
except ImportError as error:
    raise InputError(
        "featcal.bridges.sklearn needs scikit-learn 1.6 or newer: pip install 'featcal[sklearn]'"
    ) from error

Anything: TypeAlias = Any  # scikit-learn takes arrays, frames, lists, sparse matrices
Array = NDArray[Any]

METHODS = ("auto", "decision_function", "predict_proba")
SMALLEST = 1e-12  # stands for a probability of 0, as in every metric: see docs/numerics.md


@final
class Scores(MetaEstimatorMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Turns rows into the scores a classifier gives them: (n, k), or (n, 1) for a binary decision.

    Args:
        estimator: the classifier. Without `cv` it must be fitted already; it is then used as it is,
            never fitted again, and shared by clones.
        cv: folds, as scikit-learn takes them. `fit_transform`, which a Pipeline calls, gives every
            row the score of a classifier that did not see it; `transform` uses one that is fitted
            to all rows. None where the estimator is fitted.
        method: where scores come from. "auto" is "decision_function" where there is one, else the
            logarithm of "predict_proba".
        n_jobs: processes for the folds.

    Attributes:
        estimator_: the fitted classifier.
        classes_: its classes, a column each.
    """

    def __init__(
        self,
        estimator: Anything,
        *,
        cv: Anything = None,
        method: str = "auto",
        n_jobs: int | None = None,
    ) -> None:
        self.estimator, self.cv, self.method, self.n_jobs = estimator, cv, method, n_jobs

    def fit(self, X: Anything, y: Anything = None) -> Self:
        """Fits the classifier to all rows, or takes it as it is."""
        self._method_of(self.estimator)
        if self.cv is None:
            check_is_fitted(
                self.estimator,
                msg="Scores: %(name)s is not fitted: fit it first, or pass cv= for scores of rows "
                "it did not see",
            )
            self.estimator_ = self.estimator
        else:
            self.estimator_ = clone(self.estimator).fit(X, _present(y))
        return self

    def fit_transform(self, X: Anything, y: Anything = None) -> Array:
        """Fits, and gives scores of rows the classifier that gives them did not see."""
        if self.cv is None:
            return self.fit(X, y).transform(X)
        method = self._method_of(self.estimator)
        y = column_or_1d(_present(y), warn=True)
        assert_all_finite(y, input_name="y")
        check_classification_targets(y)
        splits = list(check_cv(self.cv, y, classifier=True).split(X, y))
        for number, (seen, _) in enumerate(splits):
            absent = np.setdiff1d(y, y[seen])
            if len(absent):  # a classifier that has never met a class has no score for it
                raise InputError(
                    f"Scores: without fold {number} there is no row of class {absent[0]!r}: use "
                    "stratified folds, and no more of them than the rarest class has rows"
                )
        how = {"cv": splits, "method": method, "n_jobs": self.n_jobs}
        given = cross_val_predict(self.estimator, X, y, **how)
        self.fit(X, y)
        return _columns(given, method)

    def transform(self, X: Anything) -> Array:
        """The scores of the fitted classifier."""
        check_is_fitted(self)
        method = self._method_of(self.estimator_)
        return _columns(getattr(self.estimator_, method)(X), method)

    @property
    def classes_(self) -> Array:
        """The classes, a column each; two classes may share one."""
        classes: Array = self.estimator_.classes_
        return classes

    @property
    def n_features_in_(self) -> int:
        """The columns the classifier was fitted to."""
        return int(self.estimator_.n_features_in_)

    def set_params(self, **params: Anything) -> Self:
        """Changes parameters; those of a fitted classifier would change nothing, and stay."""
        inner = next((name for name in params if name.startswith("estimator__")), None)
        if inner is not None and params.get("cv", self.cv) is None:
            raise InputError(f"Scores: {inner} cannot change what is fitted: pass cv= to fit anew")
        super().set_params(**params)
        return self

    def _method_of(self, estimator: Anything) -> str:
        check_choice("Scores", "method", self.method, METHODS)
        wanted = METHODS[1:] if self.method == "auto" else (self.method,)
        found = next((name for name in wanted if hasattr(estimator, name)), None)
        if found is None:
            kind, names = type(estimator).__name__, " or ".join(wanted)
            raise InputError(f"Scores: {kind} has no {names}: pass a classifier that has")
        return found

    def __sklearn_clone__(self) -> Scores:
        if self.cv is None:  # a clone of the classifier would have forgotten its fit
            return Scores(self.estimator, method=self.method, n_jobs=self.n_jobs)
        copied: Scores = super().__sklearn_clone__()
        return copied

    def __sklearn_tags__(self) -> Anything:
        tags = super().__sklearn_tags__()
        tags.input_tags = get_tags(self.estimator).input_tags
        tags.target_tags.required = self.cv is not None
        tags.transformer_tags.preserves_dtype = []
        return tags


def _present(y: Anything) -> Anything:
    if y is None:
        raise InputError("Scores with cv= requires y to be passed, but the target y is None")
    return y


def _columns(given: Array, method: str) -> Array:
    """Scores as logits, (n, k) or (n, 1)."""
    if method == "predict_proba":
        given = np.log(np.maximum(given, SMALLEST))
    return given.reshape(len(given), -1)
