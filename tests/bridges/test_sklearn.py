"""Calibrated and Scores inside real scikit-learn: its checks, its tools, its own calibrators."""

import re
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import joblib
import numpy as np
import pytest
from sklearn.base import clone, is_classifier
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import make_blobs, make_classification
from sklearn.ensemble import RandomForestClassifier, StackingClassifier
from sklearn.exceptions import DataConversionWarning, NotFittedError
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LinearRegression, LogisticRegression, RidgeClassifier
from sklearn.metrics import log_loss
from sklearn.model_selection import (
    GridSearchCV,
    KFold,
    StratifiedKFold,
    cross_val_predict,
    cross_val_score,
)
from sklearn.naive_bayes import GaussianNB
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC, LinearSVC
from sklearn.utils import estimator_checks, estimator_html_repr
from sklearn.utils.estimator_checks import check_estimator
from sklearn.utils.validation import check_is_fitted

from featcal import CalibrationWarning, InputError
from featcal.arrays import Calibrated
from featcal.bridges.sklearn import Scores

DOCS = Path(__file__).parents[2] / "docs" / "bridges.md"

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


@pytest.mark.parametrize("name", list(REFUSED["Calibrated()"])[:3])
@pytest.mark.filterwarnings("ignore::featcal.CalibrationWarning")
def test_a_check_that_lacks_a_column_passes_where_it_is_there(name, monkeypatch):
    monkeypatch.setattr(estimator_checks, "make_blobs", partial(make_blobs, n_features=3))
    getattr(estimator_checks, name)("Calibrated", Calibrated())


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


@pytest.mark.parametrize("labels", [lambda y: y, lambda y: np.array(["c", "a", "b"])[y]])
def test_a_pipeline_with_folds_is_calibrated_classifier_cv_without_an_ensemble(rows, labels):
    (X, y), _, (X_test, _) = rows
    y = labels(y)
    pipeline = make_pipeline(Scores(SVC(), cv=5), Calibrated("temperature")).fit(X, y)
    peer = CalibratedClassifierCV(SVC(), method="temperature", ensemble=False, cv=5).fit(X, y)
    np.testing.assert_allclose(
        pipeline.predict_proba(X_test), peer.predict_proba(X_test), atol=1e-5
    )
    np.testing.assert_array_equal(pipeline.classes_, peer.classes_)
    np.testing.assert_array_equal(pipeline.predict(X_test), peer.predict(X_test))


@pytest.mark.parametrize("recipe", ["temperature", "isotonic"])
def test_stacking_on_one_classifier_gives_the_same(rows, recipe):
    (X, y), _, (X_test, _) = rows
    stack = StackingClassifier(
        [("svc", SVC())], Calibrated(recipe), cv=4, stack_method="decision_function"
    ).fit(X, y)
    pipeline = make_pipeline(Scores(SVC(), cv=4), Calibrated(recipe)).fit(X, y)
    np.testing.assert_array_equal(stack.predict_proba(X_test), pipeline.predict_proba(X_test))


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


def test_a_grid_search_over_recipes_finds_the_better_one(rows):
    (X, y), (X_val, y_val), (X_test, y_test) = rows
    model = SVC().fit(X, y)
    pipeline = make_pipeline(Scores(model), Calibrated())
    recipes = ["temperature", "isotonic", "temperature | histogram"]
    search = GridSearchCV(
        pipeline, {"calibrated__recipe": recipes}, scoring="neg_log_loss", cv=3, error_score="raise"
    ).fit(X_val, y_val)
    losses = search.cv_results_["mean_test_score"]
    assert search.best_params_["calibrated__recipe"] == recipes[int(losses.argmax())]
    folds = StratifiedKFold(3)
    by_hand = []
    for seen, left in folds.split(X_val, y_val):
        fitted = Calibrated("isotonic").fit(model.decision_function(X_val[seen]), y_val[seen])
        by_hand.append(
            -log_loss(y_val[left], fitted.predict_proba(model.decision_function(X_val[left])))
        )
    assert losses[1] == pytest.approx(np.mean(by_hand), rel=1e-9)
    assert log_loss(y_test, search.predict_proba(X_test)) < 1.0


def test_a_search_reaches_the_classifier_through_the_folds(rows):
    (X, y), _, _ = rows
    pipeline = make_pipeline(StandardScaler(), Scores(SVC(), cv=3), Calibrated("temperature"))
    search = GridSearchCV(
        pipeline,
        {"scores__estimator__C": [0.1, 10.0], "calibrated__recipe": ["temperature", "isotonic"]},
        scoring="neg_log_loss",
        cv=3,
        error_score="raise",
    ).fit(X, y)
    assert len(search.cv_results_["params"]) == 4
    assert search.best_params_["scores__estimator__C"] == search.best_estimator_[1].estimator_.C


def test_cross_validation_and_scorers(binary_rows):
    (X, y), (X_val, y_val), _ = binary_rows
    scores = LinearSVC(random_state=0).fit(X, y).decision_function(X_val).reshape(-1, 1)
    probs = cross_val_predict(Calibrated("isotonic"), scores, y_val, cv=3, method="predict_proba")
    assert probs.shape == (len(y_val), 2)
    np.testing.assert_allclose(probs.sum(1), 1, atol=1e-6)
    for scoring in ("accuracy", "roc_auc", "neg_log_loss"):
        found = cross_val_score(
            Calibrated(), scores, y_val, cv=3, scoring=scoring, error_score="raise"
        )
        assert np.isfinite(found).all()


def test_it_is_an_estimator_in_every_respect(scored, tmp_path):
    X, y = scored
    estimator = Calibrated("isotonic", kind="logits")
    assert is_classifier(estimator)
    assert clone(estimator).get_params() == estimator.get_params()
    assert clone(estimator) is not estimator
    with pytest.raises(NotFittedError, match="is not fitted yet: call fit"):
        estimator.predict_proba(X)
    with pytest.raises(NotFittedError):
        check_is_fitted(estimator)
    estimator.fit(X, y)
    check_is_fitted(estimator)
    joblib.dump(estimator, tmp_path / "e.joblib")
    again = joblib.load(tmp_path / "e.joblib")
    np.testing.assert_array_equal(again.predict_proba(X), estimator.predict_proba(X))
    pipeline = Pipeline([("scores", Scores(SVC(), cv=2)), ("calibrated", estimator)])
    assert "Calibrated" in estimator_html_repr(pipeline)
    assert "Calibrated('isotonic')" in repr(pipeline)


def test_a_linear_model_is_a_head(binary_rows):
    """Feature clipping of a logistic regression, from its own weights."""
    (X, y), (X_val, y_val), (X_test, _) = binary_rows
    model = LogisticRegression().fit(X, y)
    head = (model.coef_, model.intercept_)
    ours = Calibrated("clip", head=head).fit(X_val, y_val)
    assert ours.report_.loss_after <= ours.report_.loss_before
    plain = Calibrated("temperature", head=head).fit(X_val, y_val)
    direct = Calibrated("temperature").fit(model.decision_function(X_val), y_val)
    np.testing.assert_allclose(
        plain.predict_proba(X_test),
        direct.predict_proba(model.decision_function(X_test)),
        atol=1e-6,
    )


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


def test_what_scores_cannot_do_it_says(rows):
    (X, y), _, _ = rows
    with pytest.raises(NotFittedError, match="SVC is not fitted: fit it first, or pass cv="):
        Scores(SVC()).fit(X, y)
    with pytest.raises(InputError, match="LinearRegression has no decision_function or predict"):
        Scores(LinearRegression(), cv=3).fit(X, y)
    with pytest.raises(InputError, match="SVC has no predict_proba: pass a classifier that has"):
        Scores(SVC(), cv=3, method="predict_proba").fit(X, y)
    with pytest.raises(InputError, match="Scores: method is 'proba': choose auto, "):
        Scores(SVC(), cv=3, method="proba").fit(X, y)
    with pytest.raises(InputError, match="requires y to be passed"):
        Scores(SVC(), cv=3).fit_transform(X)
    with pytest.raises(NotFittedError):
        Scores(SVC(), cv=3).transform(X)
    with pytest.raises(InputError, match=r"without fold 0 there is no row of class .*stratified"):
        Scores(SVC(), cv=KFold(3)).fit_transform(X, np.repeat([0, 1, 2], [160, 170, 170]))
    with pytest.raises(ValueError, match="Input y contains NaN"):
        Scores(SVC(), cv=3).fit_transform(X, np.where(y == 0, np.nan, y))
    with pytest.raises(ValueError, match="Unknown label type"):
        Scores(SVC(), cv=3).fit_transform(X, X[:, 0])
    fixed = Scores(SVC().fit(X, y))
    with pytest.raises(InputError, match="estimator__C cannot change what is fitted: pass cv="):
        fixed.set_params(estimator__C=3.0)
    fixed.set_params(cv=3, estimator__C=3.0)
    assert fixed.estimator.C == 3.0


def test_a_rare_class_in_too_many_folds_is_refused(rows):
    (X, y), _, _ = rows
    y = np.where(np.arange(len(y)) < 1, 7, y)
    with (
        pytest.warns(UserWarning, match="least populated class"),
        pytest.raises(InputError, match=r"there is no row of class .*7.*: use stratified folds"),
    ):
        Scores(SVC(), cv=3).fit_transform(X, y)


def test_a_doubtful_fit_warns_in_a_pipeline_too():
    X, y = np.array([[-1.0], [1.0]] * 20), np.array([0, 1] * 20)
    with pytest.warns(CalibrationWarning):
        make_pipeline(Scores(RidgeClassifier(), cv=2), Calibrated()).fit(X, y)


def test_without_scikit_learn_the_bridge_says_what_to_install():
    code = (
        "import sys; sys.modules['sklearn'] = None\n"
        "import featcal\n"
        "try:\n    import featcal.bridges.sklearn\n"
        "except featcal.InputError as error:\n    print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60
    )
    assert "pip install 'featcal[sklearn]'" in done.stdout, done.stderr
