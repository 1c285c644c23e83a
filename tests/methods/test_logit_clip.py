"""Logit clipping: the paper's own logits, the tie rule, and the search against a fine grid."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from method_cases import nll64, paper

import featcal.metrics as scores
from featcal import Batch
from featcal.methods import logit_clip
from featcal.methods.logit_clip import LogitClip


def drawn(n=1500, k=5, seed=0):
    """Overconfident by outliers: labels follow logits clamped at 3."""
    draw = np.random.default_rng(seed)
    logits = draw.standard_t(3, size=(n, k)) * 2.5
    labels = (np.clip(logits, -3, 3) + draw.gumbel(size=logits.shape)).argmax(1)
    return torch.tensor(logits, dtype=torch.float32), torch.tensor(labels)


@pytest.mark.shared
def test_the_papers_own_logits(shared_file, monkeypatch):
    monkeypatch.setattr(logit_clip, "PUBLISHED", [step / 100 for step in range(300, 700)])
    arrays = paper(shared_file)
    data = Batch(arrays["val_logits"], arrays["val_labels"])

    def figures(found):
        test = {"logits": found.wrap()(arrays["test_logits"]), "labels": arrays["test_labels"]}
        adaptive = 100 * scores.adaptive_ece(**test, reference=True)
        return 100 * scores.ece(**test), adaptive, scores.nll(**test), scores.accuracy(**test)

    published = LogitClip(reference=True).fit(data)
    assert float(published.threshold) == pytest.approx(4.97, abs=1e-6)
    assert figures(published) == pytest.approx((0.755, 1.762, 0.1941, 0.9463), abs=1e-3)
    found = LogitClip().fit(data)
    assert 4.95 <= float(found.threshold) <= 5.00  # flat to 1e-5 there
    plain = arrays["val_logits"].clamp(-4.97, 4.97)
    assert found.report.loss_after <= nll64(plain, arrays["val_labels"]) + 1e-7
    assert figures(found)[0] == pytest.approx(1.2, abs=0.03)  # the paper's own figure is 1.21
    assert figures(found)[3] == pytest.approx(0.9505, abs=1e-6)


def test_ties_go_to_the_prediction_or_to_the_first():
    logits = torch.tensor([[7.0, 9.0, 1.0], [-8.0, -9.0, -7.0], [1.0, 2.0, 3.0], [2.0, 2.0, 1.0]])
    keep = LogitClip().assign(threshold=5.0).wrap()(logits)
    first = LogitClip(ties="first").assign(threshold=5.0).wrap()(logits)
    assert torch.equal(first, logits.clamp(-5, 5))
    assert first.argmax(1).tolist() == [0, 0, 2, 0]
    assert keep.argmax(1).tolist() == [1, 2, 2, 0]
    torch.testing.assert_close(keep, first, rtol=1e-5, atol=0)
    assert torch.equal(keep[2:], logits[2:])  # ties of the network itself stay
    promises = [LogitClip(), LogitClip(ties="first"), LogitClip(reference=True)]
    assert [clip.keeps_accuracy for clip in promises] == [True, False, False]


@given(st.integers(0, 100), st.floats(0.01, 20))
@settings(max_examples=25, deadline=None)
def test_predictions_are_kept_at_any_threshold(seed, threshold):
    logits, _ = drawn(n=60, seed=seed)
    kept = LogitClip().assign(threshold=threshold).wrap()(logits)
    assert torch.equal(kept.argmax(1), logits.argmax(1))
    assert (kept - logits.clamp(-threshold, threshold)).abs().max() <= 1e-5 * max(threshold, 1)


@pytest.mark.parametrize(("seed", "scale"), [(0, 1e-3), (1, 1.0), (2, 1e3)])
def test_a_fine_grid_finds_nothing_lower(seed, scale):
    logits, labels = drawn(seed=seed)
    sizes = logits.double() * scale
    found = LogitClip(ties="first").fit(Batch(sizes, labels))
    grid = np.geomspace(min(0.02 * scale, 0.1), 40 * scale, 1000)
    lowest = min(nll64(sizes.clamp(-c, c), labels) for c in grid)
    c = float(found.threshold)
    assert found.report.loss_after <= lowest + 1e-6
    assert found.report.loss_after == pytest.approx(nll64(sizes.clamp(-c, c), labels), abs=1e-6)


@pytest.mark.parametrize("criterion", ["nll", "brier", "ece"])
def test_the_criterion_comes_down_and_the_report_counts_ties(criterion):
    logits, labels = drawn()
    found = LogitClip(criterion=criterion).fit(Batch(logits, labels))
    out, metric = found.wrap()(logits), getattr(scores, criterion)
    assert metric(logits=out, labels=labels) < metric(logits=logits, labels=labels)
    assert found.report.loss_after == pytest.approx(nll64(out, labels), abs=1e-6)
    c, details = float(found.threshold), found.report.steps[0].details
    clamped = logits.double().clamp(-c, c)
    tied = float(((clamped == clamped.amax(1, keepdim=True)).sum(1) > 1).double().mean())
    beyond = float((logits.abs() > c).double().mean())
    assert details["criterion"] == criterion
    assert details["rows_tied"] == pytest.approx(tied, abs=1e-9)
    assert details["clamped_share"] == pytest.approx(beyond, abs=1e-9)
    assert details["accuracy_after"] == details["accuracy_before"]


@pytest.mark.parametrize("scale", [0.0, 0.1])
def test_no_threshold_helps_an_underconfident_network(scale):
    logits, _ = drawn()
    found = LogitClip().fit(Batch(logits * scale, logits.argmax(1)))
    assert found.report.noop
    assert found.report.steps[0].values == {"threshold": math.inf}
    assert found.report.as_json()["steps"][0]["threshold"] is None
    assert torch.equal(found.wrap()(logits), logits)
