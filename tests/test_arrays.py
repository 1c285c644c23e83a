"""The numpy face against the torch one, scipy and plain numpy."""

import copy
import pickle
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.special import expit, log_softmax, softmax
from torch import nn

import featcal
from featcal import Batch, InputError, Temperature
from featcal.arrays import Calibrated
from featcal.core.batch import CHUNK_ROWS


@pytest.fixture(scope="module")
def scores():
    """Overconfident logits (n, 4) of labels 0 to 3, and as many to test on."""
    draw = np.random.default_rng(0)
    true = draw.normal(size=(600, 4)) * 1.5
    labels = (true + draw.gumbel(size=true.shape)).argmax(1)
    logits = true * 2.5
    return logits[:400], labels[:400], logits[400:], labels[400:]


@pytest.fixture(scope="module")
def binary():
    """Overconfident single logits (n,) of labels 0 and 1."""
    draw = np.random.default_rng(1)
    true = draw.normal(size=600) * 2
    return true * 3, (draw.uniform(size=600) < expit(true)).astype(int)


FEW = np.array([[3.0, 0.0], [0.0, 2.0], [2.0, 0.0], [0.0, 3.0], [1.0, 0.0]])  # the last is wrong
FEW_LABELS = np.array([0, 1, 0, 1, 1])


def best_temperature(logits, labels):
    """By scipy, in float64."""

    def nll(u):
        return -log_softmax(logits / np.exp(u), axis=1)[np.arange(len(labels)), labels].mean()

    found = minimize_scalar(nll, bounds=(-4, 4), method="bounded", options={"xatol": 1e-10})
    return float(np.exp(found.x))


def test_the_three_lines_are_temperature_scaling(scores):
    logits, labels, test, test_labels = scores
    estimator = Calibrated("temperature").fit(logits, labels)
    best = best_temperature(logits, labels)
    assert float(estimator.calibrator_.temperature) == pytest.approx(best, rel=1e-5)
    probs = estimator.predict_proba(test)
    np.testing.assert_allclose(probs, softmax(test / best, axis=1), atol=1e-6)
    np.testing.assert_allclose(np.exp(estimator.predict_log_proba(test)), probs, rtol=1e-12)
    np.testing.assert_array_equal(estimator.predict(test), test.argmax(1))
    assert estimator.score(test, test_labels) == (test.argmax(1) == test_labels).mean()
    weight = np.arange(len(test))
    hits = test.argmax(1) == test_labels
    expected = (hits * weight).sum() / weight.sum()
    assert estimator.score(test, test_labels, sample_weight=weight) == pytest.approx(expected)


@pytest.mark.parametrize("recipe", ["isotonic", "histogram | temperature"])
def test_it_gives_what_the_calibrator_gives_bit_for_bit(scores, recipe):
    logits, labels, test, _ = scores
    estimator = Calibrated(recipe).fit(logits, labels)
    plain = featcal.parse(recipe).fit(Batch(torch.tensor(logits), torch.tensor(labels)))
    expected = plain(torch.tensor(test), nn.Identity()).softmax(1).numpy()
    np.testing.assert_array_equal(estimator.predict_proba(test), expected)
    assert estimator.report_ is estimator.calibrator_.report
    assert estimator.report_.recipe == recipe
    many = np.tile(test, (CHUNK_ROWS // len(test) + 2, 1))  # rows do not depend on the others
    np.testing.assert_allclose(estimator.predict_proba(many)[-len(test) :], expected, atol=1e-12)


class Frame:
    """What featcal knows of a frame: `columns` and `__array__`."""

    def __init__(self, values, columns):
        self.values, self.columns = values, columns

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.values, dtype=dtype)


FORMS = {
    "list": lambda x: x.tolist(),
    "float32": lambda x: x.astype(np.float32),
    "longdouble": lambda x: x.astype(np.longdouble),
    "big endian": lambda x: x.astype(">f8"),
    "fortran": np.asfortranarray,
    "reversed twice": lambda x: x[::-1].copy()[::-1],
    "object": lambda x: x.astype(object),
    "frame": lambda x: Frame(x, ["a", "b", "c", "d"]),
    "tensor with gradient": lambda x: torch.tensor(x, requires_grad=True),
    "read only": lambda x: np.frombuffer(x.tobytes()).reshape(x.shape),
    "bfloat16 tensor": lambda x: torch.tensor(x).bfloat16(),
}


@pytest.mark.parametrize("form", FORMS)
def test_scores_come_in_many_forms_and_probabilities_leave_as_numpy(scores, form):
    logits, labels, test, _ = scores
    expected = Calibrated().fit(logits, labels).predict_proba(test)
    make = FORMS[form]
    estimator = Calibrated().fit(make(logits), labels)
    probs = estimator.predict_proba(make(test))
    assert isinstance(probs, np.ndarray)
    narrow = "16" in form
    assert probs.dtype == (np.float32 if narrow or form == "float32" else np.float64)
    np.testing.assert_allclose(probs, expected, atol=0.03 if narrow else 1e-5)
    np.testing.assert_allclose(probs.sum(1), 1, atol=1e-6)


@pytest.mark.parametrize(
    "names", [[3, 5, 7, 11], ["ant", "bee", "cat", "dog"], [0.0, 1.0, 2.0, 3.0]], ids=str
)
def test_a_column_belongs_to_a_sorted_label_in_any_form(scores, names):
    logits, labels, test, test_labels = scores
    names = np.array(names)
    expected = Calibrated().fit(logits, labels)
    for form in (np.asarray, list, lambda y: y.astype(object)):
        estimator = Calibrated().fit(logits, form(names[labels]))
        np.testing.assert_array_equal(estimator.classes_, names)
        np.testing.assert_array_equal(estimator.predict(test), names[test.argmax(1)])
        np.testing.assert_array_equal(estimator.predict_proba(test), expected.predict_proba(test))
    assert estimator.score(test, names[test_labels]) == expected.score(test, test_labels)


def test_labels_counted_from_0_may_lack_a_class(scores):
    logits, labels, test, _ = scores
    kept = labels != 3
    estimator = Calibrated().fit(logits[kept], labels[kept])
    np.testing.assert_array_equal(estimator.classes_, [0, 1, 2, 3])
    assert estimator.classes_.dtype == labels.dtype
    best = best_temperature(logits[kept], labels[kept])
    np.testing.assert_allclose(
        estimator.predict_proba(test), softmax(test / best, axis=1), atol=1e-5
    )


def test_other_labels_that_lack_a_class_need_classes(scores):
    logits, labels, test, _ = scores
    names, kept = np.array(["ant", "bee", "cat", "dog"]), labels != 1
    with pytest.raises(InputError, match=r"4 columns and y has 3 classes.*pass classes="):
        Calibrated().fit(logits[kept], names[labels[kept]])
    with pytest.raises(InputError, match="4 columns and y has 3 classes"):
        Calibrated().fit(logits[kept], labels[kept] + 1)  # counted from 1: which one is absent?
    with pytest.raises(InputError, match=r"3 columns and y has 4 classes.*pass scores of every"):
        Calibrated().fit(logits[:, :3], labels)
    estimator = Calibrated(classes=names).fit(logits[kept], names[labels[kept]])
    np.testing.assert_array_equal(estimator.predict(test), names[test.argmax(1)])


@pytest.mark.parametrize(
    "labels",
    [
        lambda y: y,
        lambda y: y.astype(bool),
        lambda y: y[:, None].astype(np.float32),
        lambda y: 2 * y - 1,
        lambda y: np.array(["no", "yes"])[y],
    ],
    ids=["int", "bool", "column", "-1 and 1", "text"],
)
def test_one_logit_is_that_of_the_second_class(binary, labels):
    z, y = binary
    shape = (-1,) if labels(y).ndim == 1 else (-1, 1)
    estimator = Calibrated().fit(z.reshape(shape), labels(y))
    both = Calibrated().fit(np.stack([np.zeros_like(z), z], 1), y)
    probs = estimator.predict_proba(z.reshape(shape))
    np.testing.assert_array_equal(probs, both.predict_proba(np.stack([np.zeros_like(z), z], 1)))
    best = best_temperature(np.stack([np.zeros_like(z), z], 1), y)
    np.testing.assert_allclose(probs[:, 1], expit(z / best), atol=1e-6)
    decision = estimator.decision_function(z)
    assert decision.shape == z.shape
    np.testing.assert_allclose(decision, z / best, rtol=1e-5)
    np.testing.assert_array_equal(estimator.predict(z), estimator.classes_[(z > 0).astype(int)])
    assert estimator.n_features_in_ == 1
    decision = Calibrated().fit(np.stack([-z, z], 1), y).decision_function(np.stack([-z, z], 1))
    assert decision.shape == z.shape  # of two columns there is one decision, too


def test_one_class_of_two_is_enough_where_it_is_known_which():
    z = np.array([1.0, -3.0, -2.0])  # of the first class, mostly
    assert Calibrated().fit(z, [False, False, False]).classes_.tolist() == [False, True]
    assert Calibrated().fit(z, [0, 0, 0]).classes_.tolist() == [0, 1]
    assert Calibrated(classes=(0, 1)).fit(-z, [1, 1, 1]).classes_.tolist() == [0, 1]
    with pytest.raises(InputError, match="2 columns and y has 1 class, and"):
        Calibrated().fit(-z, [1, 1, 1])


def test_probabilities_are_said_to_be_such(scores, binary):
    logits, labels, test, _ = scores
    estimator = Calibrated(kind="probs").fit(softmax(logits, axis=1), labels)
    expected = Calibrated().fit(logits, labels).predict_proba(test)
    np.testing.assert_allclose(
        estimator.predict_proba(softmax(test, axis=1)), expected, rtol=1e-4, atol=1e-9
    )
    z, y = binary
    single = Calibrated(kind="probs").fit(expit(z), y)
    np.testing.assert_allclose(
        single.predict_proba(expit(z)), Calibrated().fit(z, y).predict_proba(z), atol=1e-6
    )
    certain = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]] * 20)
    estimator = Calibrated(kind="probs").fit(certain, [0, 1, 1] * 20)
    assert np.isfinite(estimator.predict_log_proba(certain)).all()


def test_probabilities_of_16_bit_may_be_off_by_a_hundredth(scores):
    logits, labels, _, _ = scores
    probs = softmax(logits, axis=1).astype(np.float16)
    half = Calibrated(kind="probs").fit(probs, labels)
    full = Calibrated(kind="probs").fit(probs.astype(np.float64).clip(6.2e-5), labels)
    assert float(half.calibrator_.temperature) == pytest.approx(
        float(full.calibrator_.temperature), rel=1e-3
    )
    with pytest.raises(InputError, match=r"X\[0\] .*sum 0\.99\d+"):
        Calibrated(kind="probs").fit(probs.astype(np.float32) * 0.997, labels)


@pytest.mark.parametrize(
    ("kind", "rows", "text"),
    [
        ("logits", [[1.0, np.nan], [0.0, 1.0]], "values of X are NaN or infinite in row 0: remove"),
        ("probs", [[0.5, 0.5], [0.5, 0.7]], r"X\[1\] .*the sum 1.2"),
        ("probs", [[0.5, 0.5], [-1.0, 2.0]], r"X\[1\] "),
        ("probs", [0.5, 1.5], r"X\[1\] "),
        ("scores", [[1.0, 0.0], [0.0, 1.0]], "Calibrated: kind is 'scores': choose logits or pro"),
        ("logits", [["a", "b"], ["c", "d"]], "X holds what is no number"),
        ("logits", np.array([[1j, 0], [0, 1]]), "Complex data not supported"),
        ("logits", torch.tensor([[1j, 0], [0, 1]]), "Complex data not supported"),
        ("logits", [[1.0, 2.0], [3.0]], "X holds what is no number"),
        ("logits", np.array([["x", 1], [2, 3]], dtype=object), "X holds what is no number"),
        ("logits", np.zeros((2, 2, 2)), r"X has shape \(2, 2, 2\): Reshape your data"),
        ("logits", np.zeros((0, 2)), r"0 sample\(s\) \(shape=\(0, 2\)\)"),
        ("logits", np.zeros((2, 0)), r"0 feature\(s\) \(shape=\(2, 0\)\)"),
    ],
)
def test_rows_that_cannot_be_used_are_refused_by_name(kind, rows, text):
    with pytest.raises(InputError, match=text):
        Calibrated(kind=kind).fit(rows, [0, 1])
    if kind != "scores":
        known = FEW if kind == "logits" else softmax(FEW, axis=1)
        fitted = Calibrated(kind=kind).fit(known, FEW_LABELS)
        with pytest.raises(InputError):
            fitted.predict_proba(rows)


@pytest.mark.parametrize(
    ("labels", "classes", "text"),
    [
        (None, None, "requires y to be passed, but the target y is None"),
        ([0, 1, 1], None, r"y has shape \(3,\) and X 2 rows"),
        ([[0, 1], [1, 0]], None, r"y has shape \(2, 2\) .*y.argmax\(1\)"),
        ([0.5, 1.0], None, r"Unknown label type: y is continuous \(0.5\)"),
        ([0.0, np.nan], None, "values of y are NaN or infinite in row 1"),
        (np.array(["a", None], dtype=object), None, "Unknown label type: y mixes kinds"),
        (["a", "b"], ["a", "x"], r"y\[1\] is 'b', which is none of the 2 classes"),
        *[
            (["a", "b"], classes, "classes is .*: name the class of each of the 2 columns once")
            for classes in (["a", "b", "c"], ["a", "a"], [["a", "b"]], 3, "ab", ["b", "a"])
        ],
    ],
)
def test_labels_and_classes_that_cannot_be_used_are_refused_by_name(labels, classes, text):
    with pytest.raises(InputError, match=text):
        Calibrated(classes=classes).fit([[2.0, 0.0], [0.0, 2.0]], labels)


def test_other_columns_than_fit_has_seen_are_refused(scores):
    logits, labels, test, test_labels = scores
    estimator = Calibrated().fit(logits, labels)
    with pytest.raises(InputError, match="X has 3 features, but Calibrated is expecting 4"):
        estimator.predict(test[:, :3])
    with pytest.raises(InputError, match=r"X has shape \(4,\): Reshape your data"):
        estimator.predict_proba(test[0])
    with pytest.raises(InputError, match="y has shape"):
        estimator.score(test, test_labels[:2])


def test_columns_of_a_frame_must_keep_their_order(scores):
    logits, labels, test, _ = scores
    names = ["a", "b", "c", "d"]
    estimator = Calibrated().fit(Frame(logits, names), labels)
    assert estimator.feature_names_in_.tolist() == names
    estimator.predict(Frame(test, names))
    estimator.predict(test)  # an array has no names to compare
    with pytest.raises(InputError, match="in another order: pass X"):
        estimator.predict(Frame(test, names[::-1]))
    estimator.fit(logits, labels)
    assert not hasattr(estimator, "feature_names_in_")
    assert not hasattr(Calibrated().fit(Frame(logits, range(4)), labels), "feature_names_in_")


def heads(made):
    weight, bias = (p.detach().numpy() for p in made.head.parameters())
    return {
        "arrays": (weight, bias),
        "lists": [weight.tolist(), bias.tolist()],
        "tensors": (torch.tensor(weight), torch.tensor(bias)),
        "layer": made.head,
        "dropout": nn.Sequential(nn.Dropout(0.5), made.head),
        "function": lambda x: x @ torch.tensor(weight).T + torch.tensor(bias),
    }


@pytest.fixture(scope="module")
def world(made):
    return made(300, d=8, k=5)


@pytest.fixture(scope="module")
def clipped(world):
    """A clip fitted by featcal itself, on the first rows."""
    batch = Batch(None, world.labels[:200], world.features[:200])
    return featcal.parse("clip").fit(batch, world.head)


@pytest.mark.parametrize("form", ["arrays", "lists", "layer", "dropout", "function"])
def test_with_a_head_the_rows_are_features_and_the_head_stays_as_it_was(world, clipped, form):
    head, features = heads(world)[form], world.features.numpy()
    if form == "dropout":
        head.train()
    state = torch.get_rng_state()
    estimator = Calibrated("clip", head=head).fit(features[:200], world.labels[:200])
    expected = clipped(world.features[200:], world.head).detach().softmax(1).numpy()
    # Lists of floats are float64; what a function does is not known, and its clip is searched.
    loose = {"lists": 1e-4, "function": 5e-3}.get(form, 0)
    np.testing.assert_allclose(estimator.predict_proba(features[200:]), expected, atol=loose)
    assert (estimator.n_features_in_, len(estimator.classes_)) == (8, 5)
    assert torch.equal(torch.get_rng_state(), state)
    if form == "dropout":
        assert all(module.training for module in head.modules())
        assert all(weight.grad is None for weight in head.parameters())
    if form == "arrays":
        for twin in (copy.deepcopy(estimator), pickle.loads(pickle.dumps(estimator))):
            np.testing.assert_array_equal(twin.predict_proba(features[200:]), expected)
            assert twin.report_ == estimator.report_


@pytest.mark.parametrize("bias", ["array", "number", "none"])
def test_a_head_of_one_row_has_two_classes(bias):
    draw = np.random.default_rng(2)
    features, weight = draw.normal(size=(400, 6)), draw.normal(size=(1, 6))
    given = {"array": np.array([0.5]), "number": 0.5, "none": None}[bias]
    z = features @ weight[0] + (0.0 if given is None else 0.5)
    labels = np.where(draw.uniform(size=400) < expit(z / 3), "yes", "no")
    estimator = Calibrated("temperature", head=(weight, given)).fit(features, labels)
    expected = Calibrated("temperature").fit(z, labels)
    np.testing.assert_allclose(
        estimator.decision_function(features), expected.decision_function(z), rtol=1e-5
    )
    assert estimator.decision_function(features).shape == (400,)


@pytest.mark.parametrize(
    ("head", "text"),
    [
        ("fc", "head is a str: pass"),
        ((np.zeros((3, 4)),), "head is a tuple: pass"),
        ((np.zeros((3, 4)), np.zeros(4)), r"tensors of shapes .*4,"),
        ((np.zeros((3, 5)), np.zeros(3)), "head does not take rows of 4 features"),
        ((np.full((3, 4), np.nan), np.zeros(3)), "head weight are NaN or infinite in rows 0, 1, 2"),
        ((np.zeros((3, 4)), np.full(3, np.inf)), "head bias .* NaN or infinite"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(head, text):
    with pytest.raises(InputError, match=text):
        Calibrated("clip", head=head).fit(np.zeros((3, 4)), [0, 1, 2])


def test_what_a_recipe_needs_is_asked_for(scores, made):
    logits, labels, _, _ = scores
    with pytest.raises(InputError, match="clip works on features: pass head="):
        Calibrated("clip").fit(logits, labels)
    data = made(300, d=8)
    with pytest.raises(InputError, match="pass train="):
        Calibrated("density", head=data.head).fit(data.features, data.labels)
    with pytest.raises(InputError, match="train are NaN or infinite in row 0"):
        Calibrated("density", head=data.head).fit(
            data.features, data.labels, train=np.full((1, 8), np.nan)
        )
    fitted = Calibrated("density", head=data.head).fit(
        data.features[:200], data.labels[:200], train=data.features[200:].numpy()
    )
    assert np.isfinite(fitted.predict_proba(data.features)).all()
    with pytest.raises(InputError, match="leave kind='probs' out"):
        Calibrated("clip", head=data.head, kind="probs").fit(data.features, data.labels)
    with pytest.raises(InputError, match="mode is 'both'"):
        Calibrated(mode="both").fit(logits, labels)
    with pytest.raises(InputError, match="recipe is a int"):
        Calibrated(3).fit(logits, labels)


def test_a_head_that_overflows_is_refused_by_row(world):
    data = world
    estimator = Calibrated("temperature", head=data.head).fit(data.features, data.labels)
    rows = data.features.numpy().copy()
    rows[4] = np.array([1, -1] * 4) * 3e38
    with pytest.raises(InputError, match="logits of X are NaN or infinite in row 4"):
        estimator.predict_proba(rows)


def test_a_calibrator_serves_as_recipe_and_stays_as_it_is(scores, tmp_path):
    logits, labels, test, _ = scores
    recipe = Temperature()
    estimator = Calibrated(recipe).fit(logits, labels)
    assert float(recipe.temperature) == 1.0
    assert recipe.report is None
    expected = Calibrated("temperature").fit(logits, labels).predict_proba(test)
    np.testing.assert_array_equal(estimator.predict_proba(test), expected)
    path = featcal.save(estimator.calibrator_, tmp_path / "c.safetensors")
    loaded = featcal.load(path)(torch.tensor(test), nn.Identity())
    np.testing.assert_array_equal(loaded.softmax(1).numpy(), expected)


def test_parameters_are_kept_as_given():
    classes = ["b", "a"]
    estimator = Calibrated("vector", classes=classes, kind="probs")
    assert estimator.get_params() == {
        **{"recipe": "vector", "head": None, "kind": "probs", "classes": classes, "mode": "joint"}
    }
    assert estimator.get_params(deep=False)["classes"] is classes
    assert estimator.set_params(recipe="clip", head=(1, 2)) is estimator
    assert repr(estimator) == "Calibrated('clip', head=..., kind='probs', classes=['b', 'a'])"
    assert repr(Calibrated()) == "Calibrated('temperature')"
    assert repr(pickle.loads(pickle.dumps(Calibrated("vector", mode="sequential")))) == (
        "Calibrated('vector', mode='sequential')"
    )
    with pytest.raises(InputError, match="no parameter 'heat': it has recipe, head, kind, cl"):
        estimator.set_params(recipe="vector", heat=2)
    assert estimator.recipe == "clip"


def test_a_refit_forgets_and_a_failed_one_does_not(scores):
    logits, labels, test, _ = scores
    estimator = Calibrated("isotonic").fit(logits, labels)
    estimator.set_params(recipe="temperature").fit(logits[:, :2], labels % 2)
    assert len(estimator.classes_) == 2
    with pytest.raises(InputError):
        estimator.fit(logits, labels + 0.5)
    assert estimator.predict_proba(test[:, :2]).shape == (len(test), 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_head_on_the_gpu(made):
    data = made(300, d=8)
    here = Calibrated("clip | temperature", head=data.head).fit(data.features, data.labels)
    there = Calibrated("clip | temperature", head=copy.deepcopy(data.head).cuda())
    there.fit(data.features.cuda(), data.labels.cuda())
    np.testing.assert_allclose(
        there.predict_proba(data.features.numpy()), here.predict_proba(data.features), atol=1e-4
    )
    z = data.logits.cuda()
    np.testing.assert_array_equal(
        Calibrated().fit(z, data.labels.cuda()).predict_proba(z),
        Calibrated().fit(data.logits, data.labels).predict_proba(data.logits),
    )


@settings(deadline=None, max_examples=15)
@given(
    rows=st.integers(1, 30), classes=st.integers(2, 6), seed=st.integers(0, 999), huge=st.booleans()
)
@pytest.mark.filterwarnings("ignore::featcal.CalibrationWarning")
def test_any_finite_scores_give_probabilities(rows, classes, seed, huge):
    draw = np.random.default_rng(seed)
    scores = draw.normal(size=(rows, classes)) * (1e4 if huge else 1)
    labels = draw.integers(0, classes, size=rows)
    labels[0] = 0
    estimator = Calibrated().fit(scores, labels)
    probs = estimator.predict_proba(scores)
    assert probs.shape == (rows, classes)
    assert (probs >= 0).all()
    np.testing.assert_allclose(probs.sum(1), 1, atol=1e-12)


def test_without_scikit_learn_it_does_all_the_same(monkeypatch):
    monkeypatch.delitem(sys.modules, "sklearn", raising=False)
    estimator = Calibrated()
    with pytest.raises(
        InputError, match=r"^Calibrated\('temperature'\) is not fitted yet: call fit"
    ):
        estimator.predict([[1.0, 2.0]])
    estimator.fit(FEW, FEW_LABELS[:, None])  # and no warning
    assert pickle.loads(pickle.dumps(estimator)).predict([[1.0, 2.0]]) == [1]
    assert "sklearn" not in sys.modules
