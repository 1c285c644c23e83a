"""Calibrated and Scores inside real scikit-learn: its checks, its tools, its own calibrators."""

import importlib.util
import re
import sys
from collections import Counter
from pathlib import Path

import joblib
import numpy as np
import pytest
from sklearn.base import clone, is_classifier
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import make_classification
from sklearn.ensemble import RandomForestClassifier
from sklearn.exceptions import DataConversionWarning, NotFittedError
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LinearRegression, LogisticRegression, RidgeClassifier
from sklearn.model_selection import (
    KFold,
    StratifiedKFold,
)
from sklearn.naive_bayes import GaussianNB
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.svm import SVC, LinearSVC
from sklearn.utils import estimator_html_repr
from sklearn.utils.estimator_checks import check_estimator

from featcal import InputError
from featcal.arrays import Calibrated
from featcal.bridges.sklearn import Scores

DOCS = Path(__file__).parents[2] / "docs" / "sklearn.md"

COLUMNS = "3 classes and 2 columns: no column for the third class"
PIPELINE = "of every Pipeline: it fits its steps in place"
REFUSED = {
    "Calibrated()": {
        "check_estimators_overwrite_params": COLUMNS,
        "check_estimators_fit_returns_self": COLUMNS,
        "check_readonly_memmap_input": COLUMNS,
        "check_classifiers_classes": COLUMNS,
        "check_classifiers_train": COLUMNS,
        "check_estimators_dtypes": "labels 1 and 2 beside 5 columns: which columns are theirs?",
    },
    "Scores(..., cv=2)": {
        "check_transformer_general": "fit_transform gives out-of-fold scores, transform does not",
        "check_transformer_data_not_an_array": "the same",
    },
    "make_pipeline(Scores(..., cv=2), Calibrated())": {
        "check_estimators_overwrite_params": PIPELINE,
        "check_dont_overwrite_parameters": PIPELINE,
        "check_estimator_sparse_tag": "a Pipeline takes sparse rows only where every step says so",
    },
}
ESTIMATORS = {
    "Calibrated()": Calibrated,
    "Scores(..., cv=2)": lambda: Scores(RidgeClassifier(), cv=2),
    "make_pipeline(Scores(..., cv=2), Calibrated())": lambda: make_pipeline(
        Scores(RidgeClassifier(), cv=2), Calibrated()
    ),
}


@pytest.mark.filterwarnings(
    "ignore:Estimator Calibrated does not inherit:UserWarning",
    "ignore::featcal.CalibrationWarning",  # the checks give it ten rows of noise
)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_check_estimator_passes_but_for_what_the_documents_say(name):
    found = check_estimator(
        ESTIMATORS[name](), expected_failed_checks=REFUSED[name], on_skip=None, on_fail="raise"
    )
    failed = {result["check_name"] for result in found if result["status"] == "xfail"}
    assert failed == set(REFUSED[name])  # none is on the list for nothing
    counts = Counter(result["status"] for result in found)
    assert counts["passed"] + counts["skipped"] + counts["xfail"] == len(found)
    assert counts["passed"] > 40


def test_the_table_of_checks_in_the_documents_is_this_one():
    shown = DOCS.read_text().split("<!-- checks -->")[1].split("<!-- end of checks -->")[0]
    rows = [
        f"| `{name}` | `{check}` | {reason} |"
        for name, checks in REFUSED.items()
        for check, reason in checks.items()
    ]
    table = "\n".join(["| estimator | check | why it does not apply |", "|---|---|---|", *rows])
    assert shown.strip() == table


def test_the_examples_of_the_documents_run():
    text = DOCS.read_text()
    sections = re.findall(r"^## (numpy|scikit-learn)\n(.*?)(?=^## |\Z)", text, re.S | re.M)
    assert [name for name, _ in sections] == ["numpy", "scikit-learn"]
    X, y = make_classification(600, n_features=8, n_informative=5, n_classes=3, random_state=0)
    W, b = np.stack([X[y == j].mean(0) for j in range(3)]), np.zeros(3)
    names = {
        **{"val_logits": X[:200] @ W.T, "val_labels": y[:200], "test_logits": X[200:] @ W.T},
        **{"val_features": X[:200], "test_features": X[200:], "W": W, "b": b},
        **{"X_train": X[:200], "y_train": y[:200], "X_val": X[200:400], "y_val": y[200:400]},
        **{"X_test": X[400:], "y_test": y[400:]},
    }
    ran = 0
    for _, section in sections:
        for block in re.findall(r"```python\n(.*?)```", section, re.S):
            exec(compile(block, str(DOCS), "exec"), names)
            ran += 1
    assert ran >= 4


@pytest.fixture(scope="module")
def rows():
    """Rows of 3 classes: to train, to calibrate and to test on."""
    X, y = make_classification(
        1500, n_features=10, n_informative=6, n_classes=3, flip_y=0.15, random_state=0
    )
    return (X[:500], y[:500]), (X[500:1000], y[500:1000]), (X[1000:], y[1000:])


@pytest.fixture(scope="module")
def scored(rows):
    """Scores and labels of the rows to calibrate on."""
    (X, y), (X_val, y_val), _ = rows
    return SVC().fit(X, y).decision_function(X_val), y_val


@pytest.fixture(scope="module")
def binary_rows():
    """Rows of 2 classes, likewise."""
    X, y = make_classification(1500, n_features=10, n_informative=4, flip_y=0.2, random_state=1)
    y = np.array(["no", "yes"])[y]
    return (X[:500], y[:500]), (X[500:1000], y[500:1000]), (X[1000:], y[1000:])


def theirs(model, method, X, y):
    """scikit-learn's own calibration of a fitted model."""
    return CalibratedClassifierCV(FrozenEstimator(model), method=method, ensemble=False).fit(X, y)


@pytest.mark.parametrize("model", [SVC(), LogisticRegression(C=100)], ids=str)
def test_temperature_is_that_of_scikit_learn(rows, model):
    (X, y), (X_val, y_val), (X_test, _) = rows
    model = clone(model).fit(X, y)
    ours = Calibrated("temperature").fit(model.decision_function(X_val), y_val)
    peer = theirs(model, "temperature", X_val, y_val)
    beta = peer.calibrated_classifiers_[0].calibrators[0].beta_
    assert 1 / float(ours.calibrator_.temperature) == pytest.approx(float(beta), rel=1e-5)
    np.testing.assert_allclose(
        ours.predict_proba(model.decision_function(X_test)), peer.predict_proba(X_test), atol=1e-5
    )


def test_binary_temperature_is_that_of_scikit_learn_which_halves_the_score(binary_rows):
    """Theirs reads z as the logits (-z, z), ours as (0, z): the same probabilities at half beta."""
    (X, y), (X_val, y_val), (X_test, _) = binary_rows
    model = LinearSVC(random_state=0).fit(X, y)
    ours = Calibrated("temperature").fit(model.decision_function(X_val), y_val)
    peer = theirs(model, "temperature", X_val, y_val)
    beta = peer.calibrated_classifiers_[0].calibrators[0].beta_
    assert 1 / float(ours.calibrator_.temperature) == pytest.approx(2 * float(beta), rel=1e-5)
    np.testing.assert_allclose(
        ours.predict_proba(model.decision_function(X_test)), peer.predict_proba(X_test), atol=1e-5
    )
    np.testing.assert_array_equal(ours.classes_, peer.classes_)


def test_isotonic_is_that_of_scikit_learn_where_both_are_linear_in_the_probability(binary_rows):
    (X, y), (X_val, y_val), (X_test, _) = binary_rows
    model = GaussianNB().fit(X, y)
    recipe = "isotonic(reading='one_vs_rest', reference=True)"
    ours = Calibrated(recipe, kind="probs").fit(model.predict_proba(X_val), y_val)
    peer = theirs(model, "isotonic", X_val, y_val)
    found, expected = ours.predict_proba(model.predict_proba(X_test)), peer.predict_proba(X_test)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert len(np.unique(expected.round(6))) > 20


def test_a_pipeline_with_folds_is_calibrated_classifier_cv_without_an_ensemble(rows):
    (X, y), _, (X_test, _) = rows
    y = np.array(["c", "a", "b"])[y]
    pipeline = make_pipeline(Scores(SVC(), cv=5), Calibrated("temperature")).fit(X, y)
    peer = CalibratedClassifierCV(SVC(), method="temperature", ensemble=False, cv=5).fit(X, y)
    np.testing.assert_allclose(
        pipeline.predict_proba(X_test), peer.predict_proba(X_test), atol=1e-5
    )
    np.testing.assert_array_equal(pipeline.classes_, peer.classes_)
    np.testing.assert_array_equal(pipeline.predict(X_test), peer.predict(X_test))


def test_scores_in_fit_are_of_rows_not_seen(binary_rows):
    """Against a plain loop over the folds."""
    (X, y), _, (X_test, _) = binary_rows
    folds = StratifiedKFold(4, shuffle=True, random_state=0)
    expected = np.empty(len(X))
    for seen, left in folds.split(X, y):
        expected[left] = LinearSVC(random_state=0).fit(X[seen], y[seen]).decision_function(X[left])
    scores = Scores(LinearSVC(random_state=0), cv=folds)
    found = scores.fit_transform(X, y)
    assert found.shape == (len(X), 1)
    np.testing.assert_allclose(found[:, 0], expected, rtol=1e-10)
    whole = LinearSVC(random_state=0).fit(X, y).decision_function(X_test)
    np.testing.assert_allclose(scores.transform(X_test)[:, 0], whole, rtol=1e-10)
    assert scores.classes_.tolist() == ["no", "yes"]
    assert scores.n_features_in_ == 10


def test_a_fitted_classifier_is_used_as_it_is(rows):
    (X, y), (X_val, y_val), (X_test, y_test) = rows
    model = SVC().fit(X, y)
    before = joblib.hash(model)
    pipeline = make_pipeline(Scores(model), Calibrated("temperature")).fit(X_val, y_val)
    assert joblib.hash(model) == before
    assert pipeline[0].estimator_ is model
    expected = Calibrated("temperature").fit(model.decision_function(X_val), y_val)
    np.testing.assert_array_equal(
        pipeline.predict_proba(X_test), expected.predict_proba(model.decision_function(X_test))
    )
    copied = clone(pipeline).fit(X_val, y_val)  # as every search does
    np.testing.assert_array_equal(copied.predict_proba(X_test), pipeline.predict_proba(X_test))
    plain = Scores(FrozenEstimator(model)).fit(X_val, y_val)
    np.testing.assert_array_equal(plain.transform(X_test), model.decision_function(X_test))
    assert pipeline.score(X_test, y_test) == model.score(X_test, y_test)


def test_probabilities_serve_where_there_is_no_decision_function(rows):
    (X, y), (X_val, _), _ = rows
    model = RandomForestClassifier(20, random_state=0).fit(X, y)
    found = Scores(model).fit(X_val).transform(X_val)
    probs = model.predict_proba(X_val)
    assert (probs == 0).any()
    np.testing.assert_allclose(np.exp(found), np.maximum(probs, 1e-12), rtol=1e-9)
    linear = LogisticRegression().fit(X, y)
    chosen = Scores(linear, method="predict_proba").fit(X_val).transform(X_val)
    np.testing.assert_allclose(np.exp(chosen), linear.predict_proba(X_val), rtol=1e-9)


def test_it_is_dumped_and_shown_as_other_estimators(scored, tmp_path):
    X, y = scored
    estimator = Calibrated("isotonic", kind="logits")
    assert is_classifier(estimator)
    with pytest.raises(NotFittedError, match="is not fitted yet: call fit"):
        estimator.predict_proba(X)
    estimator.fit(X, y)
    joblib.dump(estimator, tmp_path / "e.joblib")
    again = joblib.load(tmp_path / "e.joblib")
    np.testing.assert_array_equal(again.predict_proba(X), estimator.predict_proba(X))
    pipeline = Pipeline([("scores", Scores(SVC(), cv=2)), ("calibrated", estimator)])
    assert "Calibrated" in estimator_html_repr(pipeline)
    assert "Calibrated('isotonic')" in repr(pipeline)


def test_a_column_of_labels_is_taken_with_the_usual_warning(scored):
    X, y = scored
    with pytest.warns(DataConversionWarning, match="A column-vector y was passed"):
        found = Calibrated().fit(X, y[:, None])
    expected = Calibrated().fit(X, y)
    np.testing.assert_array_equal(found.predict_proba(X), expected.predict_proba(X))


def test_sparse_rows_are_refused_by_calibrated_and_taken_by_scores(rows):
    sparse = pytest.importorskip("scipy.sparse")
    (X, y), _, _ = rows
    X = X * (np.abs(X) > 0.5)
    with pytest.raises(InputError, match=r"X is a sparse csr_array: pass X.toarray\(\)"):
        Calibrated().fit(sparse.csr_array(X[:, :3]), y)
    pipeline = make_pipeline(Scores(RidgeClassifier(), cv=3), Calibrated())
    found = clone(pipeline).fit(sparse.csr_array(X), y).predict_proba(sparse.csr_array(X))
    np.testing.assert_allclose(found, pipeline.fit(X, y).predict_proba(X), atol=0.01)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Scores(SVC()), NotFittedError, "SVC is not fitted: fit it first, or pass cv="),
        (lambda: Scores(LinearRegression(), cv=3), InputError, "has no decision_function or pred"),
        (lambda: Scores(SVC(), cv=3, method="predict_proba"), InputError, "has no predict_proba"),
        (lambda: Scores(SVC(), cv=3, method="proba"), InputError, "method is 'proba': choose auto"),
        (lambda: Scores(SVC(), cv=KFold(3)), InputError, "no row of class .* stratified folds"),
    ],
)
def test_what_scores_cannot_do_it_says(make, error, message, rows):
    with pytest.raises(error, match=message):
        make().fit_transform(rows[0][0], np.repeat([0, 1, 2], [160, 170, 170]))


def test_labels_and_parameters_that_cannot_be_used(rows):
    (X, y), _, _ = rows
    for labels, message in [
        (None, "requires y to be passed"),
        (np.where(y == 0, np.nan, y), "Input y contains NaN"),
        (X[:, 0], "Unknown label type"),
    ]:
        with pytest.raises(ValueError, match=message):
            Scores(SVC(), cv=3).fit_transform(X, labels)
    with pytest.raises(NotFittedError):
        Scores(SVC(), cv=3).transform(X)
    fixed = Scores(SVC().fit(X, y))
    with pytest.raises(InputError, match="estimator__C cannot change what is fitted: pass cv="):
        fixed.set_params(estimator__C=3.0)
    fixed.set_params(cv=3, estimator__C=3.0)
    assert fixed.estimator.C == 3.0


def test_without_scikit_learn_the_bridge_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    spec = importlib.util.find_spec("featcal.bridges.sklearn")
    with pytest.raises(InputError, match=r"pip install 'featcal\[sklearn\]'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
