"""Isotonic regression: scikit-learn, the paper's logits, and the order of the classes in a row."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from method_cases import mapped

from featcal import Batch, InputError, metrics, parse
from featcal.methods import Isotonic
from featcal.methods.score_tables import class_log_odds, probable_lines

sklearn = pytest.importorskip("sklearn.isotonic")


def drawn(n=600, k=4, *, scale=3.0, heat=2.0, seed=0, dtype=torch.float32):
    draw = np.random.default_rng(seed)
    logits = (draw.normal(size=(n, k)) * scale).astype(np.float32)
    labels = (logits / heat + draw.gumbel(size=logits.shape)).argmax(1)
    return torch.tensor(logits).to(dtype), torch.tensor(labels)


def probs64(logits):
    return logits.double().softmax(1).numpy()


def scikit(scores, hits):
    return sklearn.IsotonicRegression(out_of_bounds="clip").fit(scores, hits)


# --- the published form -----------------------------------------------------------------------


def published_multiclass(p, labels, p_new):
    hits = np.eye(p.shape[1])[labels]
    fit = scikit(p.ravel(), hits.ravel()).predict(p_new.ravel()).reshape(p_new.shape)
    return fit + 1e-9 * p_new


def published_one_vs_rest(p, labels, p_new):
    columns = [scikit(p[:, c], labels == c).predict(p_new[:, c]) for c in range(p.shape[1])]
    return np.stack(columns, 1) + 1e-9 * p_new


@pytest.mark.parametrize("reading", ["multiclass", "one_vs_rest"])
def test_the_published_form_is_scikit_learns(reading):
    logits, labels = drawn()
    new, _ = drawn(n=1000, seed=1, scale=4)
    calibrator = Isotonic(reading=reading, reference=True).fit(Batch(logits, labels))
    assert not calibrator.keeps_accuracy
    theirs = published_multiclass if reading == "multiclass" else published_one_vs_rest
    expected = theirs(probs64(logits), labels.numpy(), probs64(new))
    found = mapped(calibrator, new).exp()
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-6)
    expected /= expected.sum(1, keepdims=True)
    np.testing.assert_allclose(probs64(mapped(calibrator, new)), expected, atol=1e-5)


@pytest.fixture(scope="module")
def published(shared_file):
    with np.load(shared_file("anchors", "resnet50-cifar10-ce.npz")) as file:
        return {key: torch.from_numpy(file[key]) for key in file.files}


def scores_on(published, recipe):
    """The calibrator, and ECE, adaptive ECE, classwise ECE, NLL and accuracy, in percent."""
    calibrator = parse(recipe).fit(Batch(published["val_logits"], published["val_labels"]))
    both = {
        "logits": mapped(calibrator, published["test_logits"]),
        "labels": published["test_labels"],
    }
    names = (metrics.ece, metrics.classwise_ece, metrics.nll, metrics.accuracy)
    adaptive = metrics.adaptive_ece(**both, reference=True)
    found = [measure(**both) for measure in names]
    return calibrator, [100 * float(value) for value in (found[0], adaptive, *found[1:])]


@pytest.mark.shared
@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("isotonic(reference=True)", [1.750, 1.529, 0.4164, 20.26, 95.03]),
        (
            "isotonic(reading='one_vs_rest', reference=True)",
            [1.750, 1.429, 0.4123, 27.32, 94.94],
        ),
        (  # the temperature of the published row is that of the NLL
            "temperature | isotonic(reading='one_vs_rest', reference=True)",
            [1.564, 1.346, 0.4090, 24.31, 94.88],
        ),
    ],
)
def test_the_papers_logits(published, recipe, expected):
    _, found = scores_on(published, recipe)
    for value, wanted, digit in zip(found, expected, [1e-3, 1e-3, 1e-4, 1e-2, 1e-2], strict=True):
        assert value == pytest.approx(wanted, abs=0.7 * digit)


@pytest.mark.shared
def test_the_papers_logits_before_a_row_is_divided_by_its_sum(published):
    """0.744 counts float32 ties for the first class; with ties broken it is 0.764."""
    calibrator, _ = scores_on(published, "isotonic(reference=True)")
    logits, labels = published["test_logits"], published["test_labels"].numpy()
    odds = class_log_odds(logits)
    fit = probable_lines(odds, calibrator.nodes, calibrator.values.sigmoid()).numpy()

    def raw_ece(q):
        right = q.argmax(1) == labels
        confidence = q.max(1).astype(np.float64).round(6)  # some blocks lie on an edge: 4 of 5
        bins = np.clip(np.ceil((confidence * 15).round(6)) - 1, 0, 14).astype(int)
        return 100 * np.abs(np.bincount(bins, confidence - right, minlength=15)).sum() / len(q)

    lost = fit + np.float32(1e-9) * logits.softmax(1).numpy()
    assert raw_ece(lost) == pytest.approx(0.744, abs=2e-3)
    assert raw_ece(fit.astype(np.float64) + 1e-9 * probs64(logits)) == pytest.approx(
        0.764, abs=2e-3
    )


@pytest.mark.shared
def test_lines_and_kept_confidence_are_better_on_the_papers_logits(published):
    _, ours = scores_on(published, "isotonic")
    _, theirs = scores_on(published, "isotonic(reference=True)")
    assert ours[0] < theirs[0]
    assert ours[3] < theirs[3]
    assert ours[4] == pytest.approx(95.05)


# --- the default, by its definition -----------------------------------------------------------


def blocks_of(scores, hits):
    """Blocks by scikit-learn: (members as a mask, share of hits), ascending."""
    fit = scikit(scores, hits).predict(scores)
    return [(fit == value, value) for value in np.unique(fit)]


def logit(p):
    return np.log(p) - np.log1p(-p)


def naive_map(p, hits, new, low, high):
    """Lines in log-odds between (mean probability, share of hits) of the blocks."""
    blocks = blocks_of(logit(p), hits)
    centres = [logit(p[mine].mean()) for mine, _ in blocks]
    values = [logit(np.clip(share, low, high)) for _, share in blocks]
    return np.interp(logit(new), centres, values)


def test_the_multiclass_default_by_hand():
    logits, labels = drawn(scale=2)
    new, _ = drawn(n=300, seed=1, scale=3)
    n, k = logits.shape
    p, p_new = probs64(logits), probs64(new)
    hits = np.eye(k)[labels.numpy()]
    odds = naive_map(p.ravel(), hits.ravel(), p_new.ravel(), 1 / ((n + 1) * k), 1 - 1 / (n + 2))
    q = (1 / (1 + np.exp(-odds))).reshape(p_new.shape)
    top = p_new.argmax(1)
    rows = np.arange(len(q))
    rest = q.copy()
    rest[rows, top] = 0
    share = rest / rest.sum(1, keepdims=True)
    least = share.max(1) / (1 + share.max(1))  # what keeps the prediction
    sure = np.maximum(q[rows, top], least)
    expected = share * (1 - sure)[:, None]
    expected[rows, top] = sure
    found = probs64(mapped(Isotonic().fit(Batch(logits, labels)), new))
    np.testing.assert_allclose(found, expected, rtol=5e-3, atol=1e-4)


def test_the_one_vs_rest_default_by_hand():
    logits, labels = drawn(scale=2)
    new, _ = drawn(n=300, seed=1, scale=3)
    n, k = logits.shape
    p, p_new = probs64(logits), probs64(new)
    low, high = 1 / ((n + 1) * k), 1 - 1 / (n + 2)
    odds = [naive_map(p[:, c], (labels == c).numpy(), p_new[:, c], low, high) for c in range(k)]
    expected = np.stack([1 / (1 + np.exp(-column)) for column in odds], 1)
    expected /= expected.sum(1, keepdims=True)
    found = probs64(mapped(Isotonic(reading="one_vs_rest").fit(Batch(logits, labels)), new))
    np.testing.assert_allclose(found, expected, rtol=5e-3, atol=1e-4)


def test_the_top_reading_with_steps_is_scikit_learns_fit_of_the_top():
    logits, labels = drawn()
    calibrator = Isotonic(reading="top", between="step").fit(Batch(logits, labels))
    p = probs64(logits).max(1)
    fit = scikit(p, (logits.argmax(1) == labels).numpy()).predict(p)
    expected = np.clip(fit, 1 / 602, 1 - 1 / 602)
    found = probs64(mapped(calibrator, logits)).max(1)
    wrong = np.abs(found - expected) > 1e-4
    assert (found[wrong] > expected[wrong]).all()  # lifted to keep the prediction
    assert wrong.mean() < 0.1


def test_steps_and_lines_agree_at_the_centres():
    logits, labels = drawn()
    line = Isotonic(reading="top").fit(Batch(logits, labels))
    step = Isotonic(reading="top", between="step").fit(Batch(logits, labels))
    assert torch.equal(line.values, step.values)
    assert ((line.nodes[:-1] <= step.nodes) & (step.nodes < line.nodes[1:])).all()


def test_two_blocks_by_hand():
    # Two margins: right 1 of 4, and right 3 of 4.
    logits = torch.tensor([[1.0, 0.0]] * 4 + [[3.0, 0.0]] * 4)
    labels = torch.tensor([0, 1, 1, 1, 0, 0, 0, 1])
    calibrator = Isotonic(reading="top").fit(Batch(logits, labels))
    assert calibrator.nodes.tolist() == [1.0, 3.0]
    np.testing.assert_allclose(calibrator.values, [-np.log(3), np.log(3)], rtol=1e-6)
    assert calibrator.report.steps[0].values == {"blocks": 2}


def test_no_value_is_zero_or_one():
    logits, _ = drawn()
    labels = logits.argmax(1)
    n, k = logits.shape
    for reading in ("multiclass", "one_vs_rest", "top"):
        values = Isotonic(reading=reading).fit(Batch(logits, labels)).values.double().sigmoid()
        assert values.max() == pytest.approx(1 - 1 / (n + 2), rel=1e-5)
        assert values.min() >= 1 / ((n + 1) * k) * 0.999


# --- order within a row -----------------------------------------------------------------------


@given(st.integers(0, 1000), st.sampled_from(["line", "step"]))
@settings(max_examples=25, deadline=None)
def test_one_map_for_all_classes_never_reverses_two(seed, between):
    logits, labels = drawn(n=150, k=6, seed=seed)
    new, _ = drawn(n=150, k=6, seed=seed + 1, scale=8)
    calibrator = Isotonic(between=between).fit(Batch(logits, labels))
    found = mapped(calibrator, new)
    order = new.argsort(1)
    assert (found.gather(1, order).diff(dim=1) >= 0).all()
    assert torch.equal(found.argmax(1), new.argmax(1))


def test_classes_below_the_lowest_block_are_still_told_apart():
    logits, labels = drawn()
    calibrator = Isotonic(between="step").fit(Batch(logits, labels))
    row = torch.tensor([[0.0, -20.0, -21.0, -22.0]])
    found = mapped(calibrator, row)[0]
    assert (found.diff() < 0).all()
    assert found[1] - found[3] < 1e-3  # and hardly


# --- precision and errors ---------------------------------------------------------------------


@pytest.mark.parametrize("reading", ["multiclass", "one_vs_rest", "top"])
def test_half_precision_changes_little(reading):
    logits, labels = drawn(n=3000)
    calibrator = Isotonic(reading=reading).fit(Batch(logits, labels))
    expected = mapped(calibrator, logits)
    found = mapped(calibrator.half(), logits)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.05)


def test_double_precision_gives_the_same_map():
    logits, labels = drawn()
    one = Isotonic().fit(Batch(logits, labels))
    two = Isotonic().fit(Batch(logits.double(), labels))
    torch.testing.assert_close(one.values, two.values, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        mapped(one, logits).double(), mapped(one, logits.double()), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reading": "all"}, "isotonic: reading is 'all': choose multiclass, one_vs_rest or top"),
        ({"between": "spline"}, "isotonic: between is 'spline': choose line or step"),
        ({"reference": 1}, "isotonic: reference is 1: give True or False"),
        ({"reference": True, "reading": "top"}, "isotonic: reference=True is multiclass or one_vs"),
        ({"reference": True, "between": "step"}, "leave between out"),
    ],
)
def test_arguments_are_refused_by_name(arguments, message):
    with pytest.raises(InputError, match=message):
        Isotonic(**arguments)


@pytest.mark.parametrize("nodes", [torch.ones(1), -torch.arange(2.0)])
def test_damaged_values_are_refused(nodes):
    with pytest.raises(InputError, match=r"isotonic: .* nodes must ascend"):
        Isotonic().assign(nodes=nodes, values=torch.ones(len(nodes))).check()
