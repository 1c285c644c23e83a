"""How metrics read probabilities, logits and labels, of k classes and of a binary model."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from metric_cases import cases, columns, labelled_logits, quick
from sklearn.calibration import calibration_curve
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss, roc_auc_score

from featcal import metrics
from featcal.core.checks import InputError
from featcal.metrics import ClassBins, Predictions, ece, inputs, top_label

FUNCTIONS = ("ece", "classwise_ece", "nll", "brier", "accuracy", "aurc")
HALVES = torch.full((3, 2), 0.5)
LABELS = torch.tensor([0, 1, 0])


def refuses(text, **arguments):
    for read in (Predictions.of, top_label):
        with pytest.raises(InputError, match=re.escape(text)):
            read(**arguments)


# --- k classes ------------------------------------------------------------------------------------


@quick
@given(cases())
def test_logits_their_probabilities_and_the_lean_path_agree(case):
    logits, labels = case
    a = Predictions.of(logits=logits, labels=labels)
    b = Predictions.of(columns(logits).softmax(1), labels)
    lean = top_label(logits=logits, labels=labels)
    assert torch.equal(a.probs, b.probs)
    assert torch.equal(a.confidence, b.confidence)
    assert torch.equal(a.confidence, lean.confidence)
    assert torch.equal(a.correct, lean.correct)
    torch.testing.assert_close(a.log_true, b.log_true, atol=1e-5, rtol=1e-5)


def test_chunks_change_nothing(monkeypatch):
    logits, labels = labelled_logits(0, 100, 7, dtype=np.float32)
    once = top_label(logits=logits, labels=labels)
    sums = metrics.ProperSums.of(logits=logits, labels=labels)
    monkeypatch.setattr(inputs, "CHUNK_VALUES", 21)
    parts = top_label(logits=logits, labels=labels)
    assert torch.equal(once.confidence, parts.confidence)
    assert torch.equal(once.correct, parts.correct)
    streamed = list(Predictions.stream(logits=logits, labels=labels))
    assert [len(part) for part in streamed] == [3] * 33 + [1]
    assert torch.equal(torch.cat([part.probs for part in streamed]), logits.softmax(1))
    assert metrics.ProperSums.of(logits=logits, labels=labels).nll == pytest.approx(sums.nll)
    monkeypatch.setattr(inputs, "CHUNK_VALUES", 2)  # fewer than there are classes
    assert len(top_label(HALVES, LABELS).confidence) == 3
    wrong = HALVES.clone()
    wrong[2] = 0.1
    refuses("probs[2] holds 0.1 to 0.1 with the sum 0.2", probs=wrong, labels=LABELS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_values_are_widened_and_may_miss_1_by_more(dtype):
    logits, labels = labelled_logits(1, 50, 200, dtype=np.float32)
    p = Predictions.of(logits=logits.to(dtype), labels=labels)
    assert p.probs.dtype == p.confidence.dtype == torch.float32
    assert torch.equal(p.probs, logits.to(dtype).float().softmax(1))
    narrow = logits.softmax(1).to(dtype)
    assert Predictions.of(narrow, labels).probs.dtype == torch.float32
    assert torch.equal(top_label(narrow, labels).confidence, narrow.float().amax(1))
    assert Predictions.of(HALVES.double(), LABELS).log_true.dtype == torch.float64
    rows = torch.tensor([[0.504, 0.501]])
    assert len(Predictions.of(rows.to(dtype), LABELS[:1])) == 1
    refuses("probs[0] holds 0.501 to 0.504 with the sum 1.005", probs=rows, labels=LABELS[:1])


def test_numpy_arrays_of_every_layout():
    logits, labels = labelled_logits(2, 12, 3)
    expected = Predictions.of(logits=logits, labels=labels).confidence
    array = logits.numpy()
    frozen = array.copy()
    frozen.flags.writeable = False
    for given_logits in (array, frozen, np.asfortranarray(array), array.astype(">f8")):
        got = Predictions.of(logits=given_logits, labels=labels.numpy().astype(np.uint16))
        assert torch.equal(got.confidence, expected)
    backwards = top_label(logits=array[::-1], labels=labels.flip(0)).confidence
    assert torch.equal(backwards, expected.flip(0))


def test_ties_take_the_first_class_and_logits_decide_where_softmax_rounds():
    assert Predictions.of(HALVES, LABELS).correct.tolist() == [True, False, True]
    p = Predictions.of(logits=torch.tensor([[0.0, 1e-9]]), labels=torch.tensor([1]))
    assert p.probs[0, 0] == p.probs[0, 1]
    assert p.correct.item()


def test_extreme_values_stay_finite():
    p = Predictions.of(logits=torch.tensor([[200.0, 0.0]]), labels=torch.tensor([1]))
    assert (p.log_true.item(), p.confidence.item()) == (-200, 1)
    sure = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    assert Predictions.of(sure, torch.tensor([1])).log_true.item() == pytest.approx(np.log(1e-12))
    above = Predictions.of(torch.tensor([[1 + 2e-7, 0.0]]), torch.tensor([0]))
    assert (above.confidence.item(), above.log_true.item()) == (1, 0)
    huge = torch.full((4, 2), 3e38)  # their sum overflows, they do not
    p = Predictions.of(logits=huge, labels=torch.zeros(4, dtype=torch.int64))
    assert torch.equal(p.confidence, torch.full((4,), 0.5))


def test_logits_between_0_and_1_are_logits():
    """Reading them by their range, as torchmetrics does, would give another number."""
    logits = torch.tensor([[0.9, 0.1], [0.2, 0.8]])
    confidence = 1 / (1 + np.exp([-0.8, -0.6]))
    assert ece(logits=logits, labels=torch.tensor([0, 1])) == pytest.approx(1 - confidence.mean())
    assert ece(logits, torch.tensor([0, 1])) == pytest.approx(0.15)


NAN = HALVES.clone()
NAN[1:, 0] = torch.nan
ONE_HOT = torch.tensor([[0, 1], [1, 0], [0, 1]])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "probs and logits are both None"),
        ({"probs": HALVES, "logits": HALVES}, "probs and logits are both given"),
        ({"probs": HALVES, "labels": None}, "labels is None"),
        (
            {"probs": HALVES - 1.5},
            "probs[0] holds -1 to -1 with the sum -2: ",
        ),
        (
            {"probs": HALVES + 0.2},
            "sum to 1; if these are logits pass logits=...",
        ),
        ({"probs": NAN}, "probs[1] holds nan"),
        ({"probs": torch.tensor([[0.9, 0.3, -0.2]] * 3)}, "probs[0] holds -0.2 to 0.9"),
        ({"probs": torch.tensor([[1.0005, 0.0]] * 3)}, "probs[0] holds 0 to 1.0005"),
        ({"logits": -1 / (1 - 2 * NAN)}, "logits are NaN or infinite in rows 0, 1, 2"),
        ({"probs": torch.full((3, 1, 1), 0.5)}, "probs has shape (3, 1, 1)"),
        ({"logits": torch.tensor(0.5)}, "logits has shape ()"),
        ({"probs": torch.empty(3, 0)}, "probs has shape (3, 0)"),
        ({"probs": ONE_HOT}, "probs has type torch.int64"),
        ({"labels": torch.tensor([0, 1, 2])}, "labels are outside 0..1 in row 2"),
        ({"labels": torch.tensor([-1, 1, 0])}, "labels are outside 0..1 in row 0"),
        ({"labels": torch.tensor([0, 1])}, "there are 2 labels for 3 rows"),
        ({"labels": torch.tensor([0.0, 1, 1])}, "type torch.float32: they must be one integer"),
        ({"labels": torch.tensor([True, False, True])}, "type torch.bool"),
        ({"labels": ONE_HOT}, "labels.argmax(1) if they are one-hot"),
        ({"labels": LABELS[:, None]}, "labels have shape (3, 1)"),
        ({"labels": [0, 1, 0]}, "labels is a list"),
        ({"labels": np.array([0, 1, None])}, "labels has type object"),
    ],
)
def test_what_cannot_be_read_is_named(arguments, text):
    given_values = {"labels": LABELS, **({"probs": HALVES} if "labels" in arguments else {})}
    refuses(text, **{**given_values, **arguments})


# --- a binary model: P(class 1) or its logit alone ------------------------------------------------


def pair(p):
    return np.stack([1 - p, p], 1)


draw = np.random.default_rng(0)
Z = draw.normal(0.4, 2.5, 400)
Y = (draw.uniform(size=400) < 1 / (1 + np.exp(-Z / 2))).astype(np.int64)  # overconfident by half
P = 1 / (1 + np.exp(-Z))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_p_are_those_of_both_columns_in_every_form(name):
    function = getattr(metrics, name)
    expected = function(pair(P), Y)
    for p in (P, P[:, None], torch.tensor(P), torch.tensor(P)[:, None], P[::-1].copy()[::-1]):
        assert function(p, Y) == expected
    assert function(logits=Z, labels=Y) == function(logits=np.stack([0 * Z, Z], 1), labels=Y)
    assert function(logits=Z[:, None], labels=Y) == pytest.approx(expected, abs=1e-12)
    y = torch.tensor(Y)
    for labels in (y.bool(), y[:, None].float(), Y.astype(bool), Y[:, None].astype(np.float32)):
        assert function(P, labels) == expected


def test_binary_scores_against_sklearn_and_torch():
    assert metrics.brier(P, Y) == pytest.approx(2 * brier_score_loss(Y, P), rel=1e-12)
    assert metrics.nll(P, Y) == pytest.approx(log_loss(Y, P), rel=1e-12)
    assert metrics.accuracy(P, Y) == accuracy_score(Y, P > 0.5)
    right = (P > 0.5) == Y
    assert metrics.auroc(P, Y) == pytest.approx(roc_auc_score(right, np.maximum(P, 1 - P)))
    z, y = torch.tensor(Z), torch.tensor(Y).double()
    expected = torch.nn.functional.binary_cross_entropy_with_logits(z, y)
    assert metrics.nll(logits=z, labels=y) == pytest.approx(float(expected), rel=1e-12)
    half = torch.tensor(P).half()
    wide = half.double().numpy()
    assert metrics.brier(half, Y) == pytest.approx(2 * brier_score_loss(Y, wide), abs=1e-6)


@pytest.mark.parametrize("bins", [5, 15])
def test_the_bins_of_a_class_are_those_of_sklearns_curve(bins):
    classes = ClassBins.of(P, Y, bins=bins)
    for label, probs in ((1, P), (np.int64(0), 1 - P)):
        share, mean = calibration_curve(label == Y, probs, n_bins=bins)
        found = classes.of_class(label)
        filled = found.count > 0
        np.testing.assert_allclose(found.accuracy[filled], share, rtol=1e-12)
        np.testing.assert_allclose(found.mean_confidence[filled], mean, rtol=1e-12)
        assert found.n == len(Y)
        assert found.ece == pytest.approx(float(classes.by_class[label]), rel=1e-12)
    for wrong in (2, -1, 1.0, "1", True, None):
        with pytest.raises(InputError, match="of_class is"):
            classes.of_class(wrong)


def test_one_half_predicts_class_0_and_certain_rows_stay_finite():
    half = torch.tensor([0.5, 0.5])
    assert metrics.accuracy(half, torch.tensor([0, 1])) == 0.5
    assert metrics.accuracy(logits=torch.zeros(2, 1), labels=torch.tensor([0, 0])) == 1
    p = np.array([0.0, 1.0, 1.0])
    assert metrics.nll(p, np.array([0, 1, 1])) == 0
    assert metrics.nll(p, np.array([0, 1, 0])) == pytest.approx(-np.log(1e-12) / 3)
    assert Predictions.of(np.empty((0, 1)), np.empty((0, 1))).probs.shape == (0, 2)


@pytest.mark.parametrize(
    ("probs", "labels", "text"),
    [
        ([0.5, 1.5, 2.0], [0, 1, 0], "probs[1] holds 1.5: probabilities lie in 0..1; if these are"),
        ([np.nan, 0.5, 0.5], [0, 1, 0], "probs[0] holds nan"),
        ([0.5] * 3, [0, 2, 1], "labels are outside 0..1 in row 1"),
        ([0.5] * 3, [0, 0.9, 0.1], "fractions such as 0.9"),
        ([0.5] * 3, np.eye(3), "labels have shape (3, 3)"),
        ([0.5] * 3, ["no", "yes", "no"], "labels has type <U3"),
        ([0, 1, 0], [0, 1, 0], "probs has type torch.int64"),
    ],
)
@pytest.mark.parametrize("shape", [(3,), (3, 1)])
def test_what_is_no_binary_prediction_is_shown_as_it_was_given(probs, labels, text, shape):
    refuses(text, probs=np.array(probs).reshape(shape), labels=np.array(labels))
