"""Isotonic regression: scikit-learn, the paper's logits, and the order of the classes in a row."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from method_cases import drawn, mapped, paper

from featcal import Batch, metrics, parse
from featcal.methods import Isotonic
from featcal.methods.score_maps import fit_blocks, pool
from featcal.methods.score_tables import class_log_odds, log_odds

sklearn = pytest.importorskip("sklearn.isotonic")
READINGS = ("multiclass", "one_vs_rest", "top")


def probs64(logits):
    return logits.double().softmax(1).numpy()


def scikit(scores, hits):
    return sklearn.IsotonicRegression(out_of_bounds="clip").fit(scores, hits)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), min_size=1, max_size=80))
@settings(max_examples=80, deadline=None)
def test_pooling_is_scikit_learns_and_blocks_differ(pairs):
    rows = np.array([rows for _, rows in pairs], dtype=np.float64)
    hits = np.minimum([hits for hits, _ in pairs], rows)
    starts = pool(hits, rows)
    means = np.add.reduceat(hits, starts) / np.add.reduceat(rows, starts)
    assert (np.diff(means) > 0).all()
    fit = np.repeat(means, np.diff([*starts, len(rows)]))
    theirs = sklearn.isotonic_regression(hits / rows, sample_weight=rows)
    np.testing.assert_allclose(fit, theirs, atol=1e-9)


def pairs(batch, reading):
    """Scores and hits of each fit, all at once."""
    odds, k = class_log_odds(batch.logits), batch.logits.shape[1]
    hits = torch.nn.functional.one_hot(batch.labels, k).bool()
    if reading == "top":
        return [(log_odds(batch.logits), batch.logits.argmax(1) == batch.labels)]
    if reading == "multiclass":
        return [(odds.flatten(), hits.flatten())]
    return list(zip(odds.T, hits.T, strict=True))


def assert_same_fits(batch, reading):
    k = batch.logits.shape[1]
    found, expected = fit_blocks([batch], reading, k), pairs(batch, reading)
    for block, (scores, hits) in zip(found, expected, strict=True):
        scores, hits = scores.double().numpy(), hits.double().numpy()
        theirs = sklearn.IsotonicRegression().fit_transform(scores, hits)
        place = np.searchsorted(block.high, scores)  # the first block that ends at or after it
        assert (block.low[place] <= scores).all()
        np.testing.assert_allclose(block.share[place], theirs, atol=1e-12)
        assert (np.diff(block.share) > 0).all()
        assert (block.high[:-1] < block.low[1:]).all()
        p = 1 / (1 + np.exp(-scores))
        for number, centre in enumerate(block.centre):
            mean = p[place == number].mean()
            assert 1 / (1 + np.exp(-centre)) == pytest.approx(mean, abs=1e-7)
            assert block.low[number] <= centre <= block.high[number]


@given(st.integers(0, 10_000), st.integers(1, 30), st.booleans())
@example(0, 400, True)
@example(0, 400, False)
@settings(max_examples=20, deadline=None)
def test_streamed_blocks_are_scikit_learns_of_all_pairs(seed, rows, ties):
    logits, labels = drawn(n=rows, k=5, seed=seed)
    for reading in READINGS:
        assert_same_fits(Batch(logits.round() if ties else logits, labels), reading)


def test_a_class_without_hits_is_one_block_of_zero_and_only_hits_are_one_of_one():
    logits, labels = drawn()
    blocks = fit_blocks([Batch(logits, labels % 2)], "one_vs_rest", 4)
    assert [block.share.tolist() for block in blocks[2:]] == [[0.0], [0.0]]
    (block,) = fit_blocks([Batch(logits, logits.argmax(1))], "top", 4)
    assert block.share.tolist() == [1.0]
    assert (block.low[0], block.high[0]) == tuple(log_odds(logits).aminmax())


@pytest.mark.parametrize("reading", ["multiclass", "one_vs_rest"])
def test_the_published_form_is_scikit_learns(reading):
    logits, labels = drawn()
    new, _ = drawn(n=1000, seed=1, scale=4)
    calibrator = Isotonic(reading=reading, reference=True).fit(Batch(logits, labels))
    assert not calibrator.keeps_accuracy
    p, p_new, hits = probs64(logits), probs64(new), np.eye(4)[labels]
    if reading == "multiclass":
        fit = scikit(p.ravel(), hits.ravel()).predict(p_new.ravel()).reshape(p_new.shape)
    else:
        fit = np.stack([scikit(p[:, c], hits[:, c]).predict(p_new[:, c]) for c in range(4)], 1)
    expected = fit + 1e-9 * p_new
    found = mapped(calibrator, new)
    np.testing.assert_allclose(found.exp(), expected, rtol=2e-3, atol=2e-6)
    expected /= expected.sum(1, keepdims=True)
    np.testing.assert_allclose(probs64(found), expected, atol=1e-5)


def scores_on(published, recipe):
    """ECE, adaptive ECE, classwise ECE, NLL and accuracy, in percent."""
    calibrator = parse(recipe).fit(Batch(published["val_logits"], published["val_labels"]))
    both = {
        "logits": mapped(calibrator, published["test_logits"]),
        "labels": published["test_labels"],
    }
    names = (metrics.ece, metrics.classwise_ece, metrics.nll, metrics.accuracy)
    adaptive = metrics.adaptive_ece(**both, reference=True)
    found = [measure(**both) for measure in names]
    return [100 * float(value) for value in (found[0], adaptive, *found[1:])]


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
def test_the_papers_logits(shared_file, recipe, expected):
    found = scores_on(paper(shared_file), recipe)
    for value, wanted, digit in zip(found, expected, [1e-3, 1e-3, 1e-4, 1e-2, 1e-2], strict=True):
        assert value == pytest.approx(wanted, abs=0.7 * digit)


def logit(p):
    return np.log(p) - np.log1p(-p)


def naive_map(p, hits, new, low, high):
    """Lines in log-odds between (mean probability, share of hits) of scikit-learn's blocks."""
    fit = scikit(logit(p), hits).predict(logit(p))
    shares = np.unique(fit)
    centres = [logit(p[fit == share].mean()) for share in shares]
    found = np.interp(logit(new), centres, logit(np.clip(shares, low, high)))
    return 1 / (1 + np.exp(-found))


@pytest.mark.parametrize("reading", ["multiclass", "one_vs_rest"])
def test_the_default_by_hand(reading):
    logits, labels = drawn(scale=2)
    new, _ = drawn(n=300, seed=1, scale=3)
    n, k = logits.shape
    p, p_new, hits = probs64(logits), probs64(new), np.eye(k)[labels]
    ends = 1 / ((n + 1) * k), 1 - 1 / (n + 2)
    if reading == "one_vs_rest":
        columns = [naive_map(p[:, c], hits[:, c], p_new[:, c], *ends) for c in range(k)]
        expected = np.stack(columns, 1)
        expected /= expected.sum(1, keepdims=True)
    else:
        q = naive_map(p.ravel(), hits.ravel(), p_new.ravel(), *ends).reshape(p_new.shape)
        rows, top = np.arange(len(q)), p_new.argmax(1)
        rest = q.copy()
        rest[rows, top] = 0
        share = rest / rest.sum(1, keepdims=True)
        sure = np.maximum(q[rows, top], share.max(1) / (1 + share.max(1)))  # keeps the prediction
        expected = share * (1 - sure)[:, None]
        expected[rows, top] = sure
    found = probs64(mapped(Isotonic(reading=reading).fit(Batch(logits, labels)), new))
    np.testing.assert_allclose(found, expected, rtol=5e-3, atol=1e-4)


def test_the_top_reading_with_steps_is_scikit_learns_fit_of_the_top():
    logits, labels = drawn()
    step = Isotonic(reading="top", between="step").fit(Batch(logits, labels))
    p = probs64(logits).max(1)
    fit = scikit(p, (logits.argmax(1) == labels).numpy()).predict(p)
    expected = np.clip(fit, 1 / 602, 1 - 1 / 602)
    found = probs64(mapped(step, logits)).max(1)
    wrong = np.abs(found - expected) > 1e-4
    assert (found[wrong] > expected[wrong]).all()  # lifted to keep the prediction
    assert wrong.mean() < 0.1
    line = Isotonic(reading="top").fit(Batch(logits, labels))
    assert torch.equal(line.values, step.values)
    assert ((line.nodes[:-1] <= step.nodes) & (step.nodes < line.nodes[1:])).all()


def test_no_value_is_zero_or_one():
    logits, _ = drawn()
    n, k = logits.shape
    for reading in READINGS:
        fitted = Isotonic(reading=reading).fit(Batch(logits, logits.argmax(1)))
        values = fitted.values.double().sigmoid()
        assert values.max() == pytest.approx(1 - 1 / (n + 2), rel=1e-5)
        assert values.min() >= 1 / ((n + 1) * k) * 0.999


@given(st.integers(0, 1000), st.sampled_from(["line", "step"]))
@settings(max_examples=15, deadline=None)
def test_one_map_for_all_classes_never_reverses_two(seed, between):
    logits, labels = drawn(n=150, k=6, seed=seed)
    new, _ = drawn(n=150, k=6, seed=seed + 1, scale=8)
    found = mapped(Isotonic(between=between).fit(Batch(logits, labels)), new)
    assert (found.gather(1, new.argsort(1)).diff(dim=1) >= 0).all()
    assert torch.equal(found.argmax(1), new.argmax(1))


def test_classes_below_the_lowest_block_are_still_told_apart():
    logits, labels = drawn()
    calibrator = Isotonic(between="step").fit(Batch(logits, labels))
    found = mapped(calibrator, torch.tensor([[0.0, -20.0, -21.0, -22.0]]))[0]
    assert (found.diff() < 0).all()
    assert found[1] - found[3] < 1e-3  # and hardly
