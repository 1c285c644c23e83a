"""P(class 1) alone gives every metric the value of [1 - p, p], and that of other packages."""

import inspect
import re
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from metric_cases import quick
from sklearn.calibration import calibration_curve
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss, roc_auc_score

from featcal import metrics
from featcal.core.checks import InputError
from featcal.metrics import (
    Bins,
    ClassBins,
    Ordered,
    Predictions,
    ProperSums,
    classwise_ece,
    top_label,
)

FUNCTIONS = [name for name in metrics.__all__ if name[0].islower() and not name.endswith("_of")]
FUNCTIONS.remove("top_label")
SUMMARIES = (Bins, ClassBins, Ordered, ProperSums, Predictions)
M = 15


def drawn(n=400, *, seed=0, dtype=np.float64):
    """Logits z of class 1 and labels that follow z / 2: overconfident by half."""
    draw = np.random.default_rng(seed)
    z = draw.normal(0.4, 2.5, n).astype(dtype)
    return z, (draw.uniform(size=n) < 1 / (1 + np.exp(-z / 2))).astype(np.int64)


def pair(p):
    return np.stack([1 - p, p], 1)


Z, Y = drawn()
P = 1 / (1 + np.exp(-Z))
VALUES = {
    "flat": lambda v: torch.tensor(v),
    "column": lambda v: torch.tensor(v)[:, None],
    "numpy": lambda v: v,
    "numpy column": lambda v: v[:, None],
    "a column of two": lambda v: pair(v)[:, 1],
    "backwards": lambda v: v[::-1].copy()[::-1],
}
LABELS = {
    "int": lambda y: torch.tensor(y),
    "bool": lambda y: torch.tensor(y).bool(),
    "float column": lambda y: torch.tensor(y)[:, None].float(),
    "numpy": lambda y: y,
    "numpy bool": lambda y: y.astype(bool),
    "numpy float column": lambda y: y[:, None].astype(np.float32),
    "numpy uint8": lambda y: y.astype(np.uint8),
}
every_form = pytest.mark.parametrize("form", VALUES.values(), ids=VALUES)
every_label = pytest.mark.parametrize("label", LABELS.values(), ids=LABELS)


def fields(summary):
    """Every stored number of a summary."""
    return [np.asarray(getattr(summary, name), np.float64) for name in summary.__slots__]


# --- the same as two columns ------------------------------------------------------------------


def test_every_function_and_summary_is_tested():
    functions = {name for name in metrics.__all__ if inspect.isfunction(getattr(metrics, name))}
    assert functions == {*FUNCTIONS, *(n for n in functions if n.endswith("_of")), "top_label"}
    classes = {name for name in metrics.__all__ if inspect.isclass(getattr(metrics, name))}
    assert classes == {summary.__name__ for summary in SUMMARIES} | {"TopLabel"}


@pytest.mark.parametrize("name", FUNCTIONS)
@every_form
def test_functions_of_p_are_those_of_both_columns(name, form):
    function = getattr(metrics, name)
    assert function(form(P), Y) == function(pair(P), Y)
    logits = np.stack([np.zeros_like(Z), Z], 1)
    assert function(logits=form(Z), labels=Y) == function(logits=logits, labels=Y)
    assert function(form(P), Y) == pytest.approx(function(logits=form(Z), labels=Y), abs=1e-12)


@pytest.mark.parametrize("name", FUNCTIONS)
@every_label
def test_functions_take_the_labels_of_a_binary_loss(name, label):
    function = getattr(metrics, name)
    assert function(P, label(Y)) == function(pair(P), Y)


@pytest.mark.parametrize("summary", SUMMARIES)
@every_form
def test_summaries_of_p_are_those_of_both_columns(summary, form):
    expected = fields(summary.of(pair(P), Y))
    for found, wanted in zip(fields(summary.of(form(P), Y > 0)), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)
    for found, wanted in zip(fields(summary.of(logits=form(Z), labels=Y)), expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-12)


@pytest.mark.parametrize("summary", SUMMARIES[:4])
def test_parts_of_one_and_of_two_columns_add_up(summary):
    total = summary.of(P[:150], Y[:150]) + summary.of(pair(P)[150:], Y[150:])
    for found, wanted in zip(fields(total), fields(summary.of(P, Y)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_the_lean_path_and_the_stream_agree():
    whole, lean = Predictions.of(P, Y), top_label(P, Y)
    assert torch.equal(whole.confidence, lean.confidence)
    assert torch.equal(whole.correct, lean.correct)
    streamed = torch.cat([part.probs for part in Predictions.stream(P, Y)])
    assert torch.equal(streamed, whole.probs)
    assert whole.probs.shape == (400, 2)


@quick
@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=30), st.integers(0, 2**30))
def test_every_probability_is_accepted_and_gives_the_pairs_value(values, seed):
    p = torch.tensor(values)
    labels = torch.randint(2, p.shape, generator=torch.Generator().manual_seed(seed))
    both = torch.stack([1 - p, p], 1)
    for name in ("ece", "classwise_ece", "nll", "brier", "accuracy", "aurc"):
        function = getattr(metrics, name)
        assert function(p, labels.bool()) == function(both, labels)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_probabilities_count_with_all_their_digits(dtype):
    p = torch.tensor(P).to(dtype)
    wide = p.double().numpy()
    assert metrics.ece(p, Y) == pytest.approx(metrics.ece(wide, Y), abs=1e-6)
    assert metrics.brier(p, Y) == pytest.approx(2 * brier_score_loss(Y, wide), abs=1e-6)


# --- against other packages -------------------------------------------------------------------


def test_proper_scores_against_sklearn():
    assert metrics.brier(P, Y) == pytest.approx(2 * brier_score_loss(Y, P), rel=1e-12)
    assert metrics.nll(P, Y) == pytest.approx(log_loss(Y, P), rel=1e-12)
    assert metrics.accuracy(P, Y) == accuracy_score(Y, P > 0.5)


def test_nll_of_logits_is_the_binary_loss_of_torch():
    z, y = torch.tensor(Z), torch.tensor(Y).double()
    expected = torch.nn.functional.binary_cross_entropy_with_logits(z, y)
    assert metrics.nll(logits=z, labels=y) == pytest.approx(float(expected), rel=1e-12)
    huge = torch.tensor([800.0, -800.0])
    assert metrics.nll(logits=huge, labels=torch.tensor([0.0, 1.0])) == 800


def test_ece_is_of_the_predicted_class():
    confidence, right = np.maximum(P, 1 - P), (P > 0.5) == Y
    edges, total = np.linspace(0, 1, M + 1), 0.0
    for low, high in pairwise(edges):
        inside = (confidence > low) & (confidence <= high)
        if inside.any():
            total += inside.mean() * abs(confidence[inside].mean() - right[inside].mean())
    assert metrics.ece(P, Y, bins=M) == pytest.approx(total, abs=1e-12)
    bins = Bins.of(P, Y, bins=M)
    assert float(bins.count[: M // 2].sum()) == 0  # a confidence is one half at the least


def test_auroc_is_of_right_against_wrong_and_not_of_class_1():
    right = (P > 0.5) == Y
    assert metrics.auroc(P, Y) == pytest.approx(roc_auc_score(right, np.maximum(P, 1 - P)))
    assert metrics.auroc(P, Y) != pytest.approx(roc_auc_score(Y, P), abs=0.01)


@pytest.mark.parametrize("bins", [5, 10, 15])
def test_the_bins_of_class_1_are_those_of_sklearns_curve(bins):
    share, mean = calibration_curve(Y, P, n_bins=bins)
    found = ClassBins.of(P, Y, bins=bins).of_class(1)
    filled = found.count > 0
    np.testing.assert_allclose(found.accuracy[filled], share, rtol=1e-12)
    np.testing.assert_allclose(found.mean_confidence[filled], mean, rtol=1e-12)
    assert found.n == len(Y)


def test_the_bins_of_class_0_are_those_of_1_in_the_mirror():
    both = ClassBins.of(P, Y, bins=M)
    zero, one = both.of_class(0), both.of_class(1)
    np.testing.assert_array_equal(zero.count.flip(0), one.count)
    np.testing.assert_allclose(zero.gap.flip(0), -one.gap, atol=1e-12)


def test_classwise_ece_of_two_classes_is_the_error_of_class_1():
    both = ClassBins.of(P, Y)
    assert both.of_class(1).ece == pytest.approx(float(both.by_class[1]), rel=1e-12)
    assert classwise_ece(P, Y) == pytest.approx(both.of_class(1).ece, rel=1e-9)


def test_a_class_of_many():
    logits = torch.randn(200, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = logits.argmax(1)
    classes = ClassBins.of(logits=logits, labels=labels, bins=8)
    for label in range(4):
        share, mean = calibration_curve(labels == label, logits.softmax(1)[:, label], n_bins=8)
        found = classes.of_class(np.int64(label))
        np.testing.assert_allclose(found.accuracy[found.count > 0], share, rtol=1e-12)
        np.testing.assert_allclose(found.mean_confidence[found.count > 0], mean, rtol=1e-12)


@pytest.mark.parametrize("label", [2, -1, 1.0, "1", True, None])
def test_a_class_is_one_of_those_there_are(label):
    text = f"of_class is {label!r}: pass one of the classes 0..1"
    with pytest.raises(InputError, match=re.escape(text)):
        ClassBins.of(P, Y).of_class(label)


# --- edges and refusals -----------------------------------------------------------------------


def test_one_half_predicts_class_0():
    half = torch.tensor([0.5, 0.5])
    assert metrics.accuracy(half, torch.tensor([0, 1])) == 0.5
    assert metrics.accuracy(half, torch.tensor([0, 0])) == 1
    assert metrics.accuracy(logits=torch.zeros(2, 1), labels=torch.tensor([0, 0])) == 1


def test_certain_rows():
    p = np.array([0.0, 1.0, 1.0])
    assert metrics.nll(p, np.array([0, 1, 1])) == 0
    assert metrics.nll(p, np.array([0, 1, 0])) == pytest.approx(-np.log(1e-12) / 3)
    assert metrics.ece(p, np.array([False, True, True])) == 0


def test_no_rows_have_no_value():
    with pytest.raises(InputError, match="no rows"):
        metrics.ece(np.empty(0), np.empty(0))
    assert Predictions.of(np.empty((0, 1)), np.empty((0, 1))).probs.shape == (0, 2)


@pytest.mark.parametrize(
    ("probs", "text"),
    [
        ([0.5, 1.5, 2.0], "probs[1] is 1.5, outside 0..1 (rows 1, 2): if these are logits pass"),
        ([0.5, -3.0, 0.5], "probs[1] is -3, outside 0..1 (row 1): if these are logits pass"),
        ([np.nan, 0.5, 0.5], "probs is NaN or infinite in row 0: remove them"),
        ([0.5, 0.5, np.inf], "probs is NaN or infinite in row 2: remove them"),
    ],
)
@pytest.mark.parametrize("shape", [(3,), (3, 1)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_no_probability_is_shown_as_it_was_given(name, probs, text, shape):
    with pytest.raises(InputError, match=re.escape(text)):
        getattr(metrics, name)(np.array(probs).reshape(shape), np.array([0, 1, 0]))


@pytest.mark.parametrize(
    ("labels", "text"),
    [
        (np.array([0, 2, 1]), "labels[1] is 2, outside 0..1 (row 1): correct or remove it"),
        (np.array([-1, 1, 1]), "labels[0] is -1, outside 0..1 (row 0)"),
        (np.array([0, 0.9, 0.1]), "labels[1] is 0.9, neither 0 nor 1 (rows 1, 2): a binary model"),
        (np.array([0, 2.0, 1.0]), "labels[1] is 2, neither 0 nor 1 (row 1)"),
        (np.array([0, np.nan, 1.0]), "labels[1] is nan, neither 0 nor 1 (row 1)"),
        (np.array([0, 1]), "labels has 2 rows and the predictions 3: pass as many"),
        (np.eye(3), "labels has type torch.float64"),
        (np.eye(3, dtype=int), "labels has shape (3, 3): pass one class a row"),
        (np.array(["no", "yes", "no"]), "labels has type <U3: pass plain numbers"),
    ],
)
@pytest.mark.parametrize("name", ["probs", "logits"])
def test_labels_are_zero_or_one(name, labels, text):
    with pytest.raises(InputError, match=re.escape(text)):
        metrics.ece(**{name: np.full(3, 0.25)}, labels=labels)


@pytest.mark.parametrize("shape", [(3, 1, 1), (), (3, 0)])
@pytest.mark.parametrize("name", ["probs", "logits"])
def test_other_shapes_are_refused(name, shape):
    text = f"{name} has shape {shape}: pass (rows, classes), or (rows,) for class 1 of a binary"
    with pytest.raises(InputError, match=re.escape(text)):
        metrics.nll(**{name: np.full(shape, 0.5)}, labels=np.array([0, 1, 0]))


def test_integers_are_no_probabilities():
    with pytest.raises(InputError, match=r"probs has type torch\.int64: pass floating point"):
        metrics.ece(np.array([0, 1]), np.array([0, 1]))
