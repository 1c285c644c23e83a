"""Every replicate is the metric itself on the rows that were drawn, drawn physically."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from featcal import Batch, evaluate
from featcal.core.checks import InputError
from featcal.metrics import Ordered, Predictions
from featcal.report.bootstrap import (
    MOST,
    Bootstrap,
    Resamples,
    row_blocks,
    smooth_replicates,
    weighted_sums,
)

# The metric bisects the width to 2^-32, all others differ by rounding alone.
CLOSE = {"smooth_ece": 1e-9}


def rows(n, k, *, step=None, dtype=np.float32, seed=0):
    """Logits and labels; a step rounds the logits, so that ties are everywhere."""
    draw = np.random.default_rng(seed)
    logits = draw.normal(0, 2, (n, k))
    if step is not None:
        logits = np.round(logits / step) * step
    labels = np.where(draw.random(n) < 0.5, logits.argmax(1), draw.integers(0, k, n))
    return torch.tensor(logits.astype(dtype)), torch.tensor(labels)


def replicates(logits, labels, resamples, *, bins=15, part=17):
    """The replicates, the rows fed in parts."""
    bootstrap = Bootstrap(resamples, 0, bins)
    for start in range(0, len(labels), part):
        some = slice(start, start + part)
        bootstrap.add(Predictions.of(logits=logits[some], labels=labels[some]))
    return bootstrap.replicates(Ordered.of(logits=logits, labels=labels))


def check(logits, labels, *, bins=15, seed=0, count=100, every=1):
    resamples = Resamples.draw(len(labels), count, seed)
    found = replicates(logits, labels, resamples, bins=bins)
    for index in range(0, count, every):
        drawn = torch.arange(len(labels)).repeat_interleave(resamples.counts[:, index].long())
        assert len(drawn) == len(labels)
        scores = evaluate(Batch(logits[drawn], labels[drawn]), bins=bins)
        assert set(found) == set(scores.metrics)
        for name, value in scores.metrics.items():
            close = pytest.approx(value, abs=CLOSE.get(name, 1e-12), nan_ok=True)
            assert float(found[name][index]) == close, (name, index)


CASES = {
    "no ties": {"n": 60, "k": 4},
    "ties everywhere": {"n": 80, "k": 3, "step": 2.0},
    "some ties": {"n": 200, "k": 20, "step": 1.0},
    "float64": {"n": 50, "k": 5, "dtype": np.float64},
    "two classes": {"n": 40, "k": 2},
    "two rows": {"n": 2, "k": 3},
    "fewer rows than bins": {"n": 7, "k": 3},
    "many classes": {"n": 60, "k": 300},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_replicate_is_the_metric_on_the_drawn_rows(case):
    check(*rows(**case), every=6)


@pytest.mark.parametrize("bins", [1, 2, 7, 100])
def test_any_number_of_bins(bins):
    check(*rows(60, 8), bins=bins, every=7)


def test_all_right_all_wrong_and_certain():
    logits, _ = rows(40, 3, step=1.0)
    check(logits, logits.argmax(1), every=10)  # AUROC is undefined on every resample
    check(logits, logits.argmin(1), every=10)
    check(100 * logits + 0.0, logits.argmax(1), every=10)  # a smooth ECE the series cannot resolve
    check(torch.zeros(30, 4), torch.arange(30) % 4, every=10)  # one run of equal confidences


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    n=st.integers(2, 40),
    k=st.integers(2, 6),
    step=st.sampled_from([None, 0.5, 3.0]),
    seed=st.integers(0, 10**6),
    bins=st.integers(1, 30),
)
def test_any_rows(n, k, step, seed, bins):
    check(*rows(n, k, step=step, seed=seed), bins=bins, seed=seed, every=50)


def test_predictions_are_left_as_they_are():
    logits, labels = rows(30, 4, dtype=np.float64)
    seen = Predictions.of(logits=logits, labels=labels)
    before = seen.probs.clone()
    Bootstrap(Resamples.draw(30, 100), 0, 15).add(seen)
    assert torch.equal(seen.probs, before)


def test_neither_parts_nor_blocks_change_a_replicate(monkeypatch):
    logits, labels = rows(120, 6, step=1.0)
    resamples = Resamples.draw(120, 150, 3)
    whole = replicates(logits, labels, resamples, part=1000)
    for module in ("resample_ranked", "resample_smooth"):
        monkeypatch.setattr(f"featcal.report.{module}.BLOCK", 500)
    monkeypatch.setattr("featcal.report.bootstrap.MATRIX", 700)
    cut = replicates(logits, labels, resamples, part=1)
    for name, values in whole.items():
        assert torch.allclose(cut[name], values, rtol=0, atol=1e-9, equal_nan=True), name


def test_draws_depend_on_the_seed_alone():
    first, again, other = (Resamples.draw(50, 100, seed).counts for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.shape == (50, 100)
    assert first.dtype == torch.uint8
    assert torch.equal(first.sum(0), torch.full((100,), 50))
    state = torch.get_rng_state()
    Resamples.draw(50, 100, 1)
    assert torch.equal(state, torch.get_rng_state())


def test_draws_are_uniform():
    """Counts of a row over the resamples: mean 1, variance 1 - 1/n."""
    counts = Resamples.draw(200, 5000).counts.double()
    assert counts.mean() == 1
    assert counts.var() == pytest.approx(1 - 1 / 200, rel=0.01)
    assert float((counts.mean(1) - 1).abs().max()) < 5 / 5000**0.5


@pytest.mark.parametrize("wrong", [1, 99, MOST + 1, -1, 2.5, "1000", True, None])
def test_numbers_of_resamples_that_are_refused(wrong):
    with pytest.raises(InputError, match=r"resamples is .*: pass 0 for none, or 100 to"):
        evaluate(Batch(*rows(10, 3)), resamples=wrong)


@pytest.mark.parametrize("wrong", [-1, 0.5, "0", True, None])
def test_seeds_that_are_refused(wrong):
    with pytest.raises(InputError, match="seed is"):
        evaluate(Batch(*rows(10, 3)), resamples=100, seed=wrong)


def test_weighted_sums_are_sums_of_copies():
    counts = Resamples.draw(30, 100).counts
    values = torch.randn(2, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = weighted_sums(values, counts)
    drawn = torch.arange(30).repeat_interleave(counts[:, 7].long())
    assert torch.allclose(found[:, 7], values[:, drawn].sum(1))
    assert [part.stop for part in row_blocks(5, 2**20)] == [1, 2, 3, 4, 5]


def test_a_width_below_the_smallest_is_answered_as_the_metric_does():
    """Confidences that are right to 1e-6: no fixed point the series can resolve."""
    confidence = torch.full((50,), 1 - 1e-6, dtype=torch.float64)
    ordered = Ordered(confidence, torch.ones(50, dtype=torch.bool))
    found = smooth_replicates(ordered, Resamples.draw(50, 100).counts)
    assert torch.allclose(found, torch.full_like(found, 1e-6), rtol=1e-6)
