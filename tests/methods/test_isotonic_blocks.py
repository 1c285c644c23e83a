"""The streamed blocks against scikit-learn's isotonic regression of all pairs at once."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from featcal import Batch
from featcal.methods.isotonic import fit_blocks
from featcal.methods.score_tables import class_log_odds, log_odds

isotonic = pytest.importorskip("sklearn.isotonic")


def drawn(n=400, k=4, *, seed=0, digits=None):
    draw = np.random.default_rng(seed)
    logits = draw.normal(size=(n, k)) * 3
    labels = (logits / 2 + draw.gumbel(size=logits.shape)).argmax(1)
    if digits is not None:
        logits = logits.round(digits)  # few distinct values: ties everywhere
    return Batch(torch.tensor(logits, dtype=torch.float32), torch.tensor(labels))


def pairs(batch, reading):
    """Scores and hits of each fit, all at once."""
    odds, k = class_log_odds(batch.logits), batch.logits.shape[1]
    hits = torch.nn.functional.one_hot(batch.labels, k).bool()
    if reading == "top":
        return [(log_odds(batch.logits), batch.logits.argmax(1) == batch.labels)]
    if reading == "multiclass":
        return [(odds.flatten(), hits.flatten())]
    return list(zip(odds.T, hits.T, strict=True))


def assert_same_fit(block, scores, hits):
    scores, hits = scores.double().numpy(), hits.double().numpy()
    theirs = isotonic.IsotonicRegression().fit_transform(scores, hits)
    place = np.searchsorted(block.high, scores)  # the first block that ends at or after the score
    assert (block.low[place] <= scores).all()
    np.testing.assert_allclose(block.share[place], theirs, atol=1e-12)
    assert (np.diff(block.share) > 0).all()
    assert (block.high[:-1] < block.low[1:]).all()
    p = 1 / (1 + np.exp(-scores))
    for number, centre in enumerate(block.centre):
        mean = p[place == number].mean()
        assert 1 / (1 + np.exp(-centre)) == pytest.approx(mean, abs=1e-7)
        assert block.low[number] <= centre <= block.high[number]


@pytest.mark.parametrize("reading", ["top", "multiclass", "one_vs_rest"])
@pytest.mark.parametrize("digits", [None, 1, 0])
@pytest.mark.parametrize("k", [2, 5])
def test_scikit_learn_agrees(reading, digits, k):
    batch = drawn(k=k, digits=digits)
    expected = pairs(batch, reading)
    found = fit_blocks([batch], reading, k)
    assert len(found) == len(expected)
    for block, (scores, hits) in zip(found, expected, strict=True):
        assert_same_fit(block, scores, hits)


@given(st.integers(0, 10_000), st.integers(1, 30))
@settings(max_examples=40, deadline=None)
def test_few_rows_with_ties(seed, rows):
    batch = drawn(n=rows, k=3, seed=seed, digits=0)
    for reading in ("top", "multiclass", "one_vs_rest"):
        expected = pairs(batch, reading)
        for block, (scores, hits) in zip(fit_blocks([batch], reading, 3), expected, strict=True):
            assert_same_fit(block, scores, hits)


@pytest.mark.parametrize("reading", ["top", "multiclass", "one_vs_rest"])
def test_batches_do_not_matter(reading):
    batch = drawn()
    parts = [batch.rows(slice(0, 0)), batch.rows(slice(0, 3)), batch.rows(slice(3, 400))]
    for one, two in zip(
        fit_blocks([batch], reading, 4), fit_blocks(parts, reading, 4), strict=True
    ):
        for key in ("low", "high", "share"):
            assert np.array_equal(getattr(one, key), getattr(two, key))
        np.testing.assert_allclose(one.centre, two.centre, rtol=1e-12)


def test_a_class_without_hits_is_one_block_of_zero():
    batch = drawn()
    blocks = fit_blocks([Batch(batch.logits, batch.labels % 2)], "one_vs_rest", 4)
    assert [block.share.tolist() for block in blocks[2:]] == [[0.0], [0.0]]


def test_only_hits():
    logits = drawn().logits
    (block,) = fit_blocks([Batch(logits, logits.argmax(1))], "top", 4)
    assert block.share.tolist() == [1.0]
    assert (block.low[0], block.high[0]) == tuple(log_odds(logits).aminmax())
