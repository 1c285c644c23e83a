"""A first step that recipes share is fitted once, and changes no bit."""

import pytest
import torch

import featcal
from featcal import Batch, compare


@pytest.fixture(scope="module")
def data(made):
    """A fit part, a test part and the head."""
    both = made(n=900, d=12, k=4)
    batch = Batch(both.logits, both.labels, both.features)
    return batch.rows(slice(0, 500)), batch.rows(slice(500, 900)), both.head


def timeless(report):
    steps = [{**step, "seconds": 0} for step in report.as_json()["steps"]]
    return {**report.as_json(), "steps": steps, "seconds": 0}


SHARED = ["clip", "clip | temperature", "clip | temperature | temperature", "temperature"]


@pytest.mark.no_cover
@pytest.mark.parametrize("parts", [1, 7])
def test_a_shared_first_step_changes_no_bit(data, parts):
    fit, test, head = data
    size = -(-len(fit) // parts)
    batches = [fit.rows(slice(start, start + size)) for start in range(0, len(fit), size)]
    together = compare(batches, test, SHARED, head, resamples=0)
    for row in together:
        (alone,) = compare(batches, test, [row.recipe], head, resamples=0)
        assert row.scores.metrics == alone.scores.metrics
        for mine, other in zip(row.calibrator.buffers(), alone.calibrator.buffers(), strict=True):
            assert torch.equal(mine, other)
        assert timeless(row.calibrator.report) == timeless(alone.calibrator.report)
        parts = row.calibrator.steps_in_order()
        assert len(parts) == 1 or all(part.report is None for part in parts)
    firsts = [row.calibrator.steps_in_order()[0] for row in together[:3]]
    assert len({id(first) for first in firsts}) == 3  # none shares its values with another


@pytest.mark.no_cover
def test_a_shared_first_step_is_fitted_once(data, monkeypatch):
    fit, test, head = data
    calls = []
    learn = featcal.FeatureClip.learn
    monkeypatch.setattr(
        featcal.FeatureClip, "learn", lambda self, problem: calls.append(1) or learn(self, problem)
    )
    compare(fit, test, ["clip", "clip | temperature"], head, resamples=0)
    assert len(calls) == 1
    compare(fit, test, ["clip | temperature"], head, resamples=0)
    assert len(calls) == 2
    compare(fit, test, ["clip(min_accuracy=0.5)", "clip | temperature"], head, resamples=0)
    assert len(calls) == 4
    compare(fit, test, ["clip", "clip | temperature"], head, resamples=0, mode="joint")
    assert len(calls) >= 6


def test_a_head_that_is_a_function_is_not_shared_and_works(data):
    fit, test, head = data
    bare = compare(fit, test, ["clip", "clip | temperature"], lambda x: head(x), resamples=0)
    full = compare(fit, test, ["clip", "clip | temperature"], head, resamples=0)
    for mine, other in zip(bare, full, strict=True):
        assert mine.scores.metrics["nll"] == pytest.approx(other.scores.metrics["nll"], abs=1e-2)
