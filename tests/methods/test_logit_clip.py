"""Logit clipping: the paper's own logits, the tie rule, and the search against a fine grid."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import featcal
import featcal.metrics as scores
from featcal import Batch, InputError
from featcal.methods.logit_clip import LogitClip


def drawn(n=1500, k=5, seed=0):
    """Overconfident by outliers: labels follow logits clamped at 3."""
    draw = np.random.default_rng(seed)
    logits = draw.standard_t(3, size=(n, k)) * 2.5
    labels = (np.clip(logits, -3, 3) + draw.gumbel(size=logits.shape)).argmax(1)
    return torch.tensor(logits, dtype=torch.float32), torch.tensor(labels)


def nll64(logits, labels):
    z = np.asarray(logits, float)
    z = z - z.max(1, keepdims=True)
    return float(np.mean(np.log(np.exp(z).sum(1)) - z[np.arange(len(z)), np.asarray(labels)]))


# --- anchors ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def anchor(shared_file):
    with np.load(shared_file("anchors", "resnet50-cifar10-ce.npz")) as file:
        return {key: torch.from_numpy(file[key]) for key in file.files}


def measured(found, anchor):
    logits, labels = found.wrap()(anchor["test_logits"]), anchor["test_labels"]
    return {
        "ece": 100 * scores.ece(logits=logits, labels=labels),
        "adaece": 100 * scores.adaptive_ece(logits=logits, labels=labels, reference=True),
        "cece": 100 * scores.classwise_ece(logits=logits, labels=labels),
        "nll": scores.nll(logits=logits, labels=labels),
        "accuracy": 100 * scores.accuracy(logits=logits, labels=labels),
    }


@pytest.mark.shared
def test_the_papers_own_logits_by_the_published_search(anchor):
    found = LogitClip(reference=True).fit(Batch(anchor["val_logits"], anchor["val_labels"]))
    assert float(found.threshold) == pytest.approx(4.97, abs=1e-6)
    got = measured(found, anchor)
    assert got["ece"] == pytest.approx(0.755, abs=1e-3)
    assert got["adaece"] == pytest.approx(1.762, abs=1e-3)
    assert got["cece"] == pytest.approx(0.4076, abs=1e-4)
    assert got["nll"] == pytest.approx(0.1941, abs=5e-5)
    assert got["accuracy"] == pytest.approx(94.63, abs=1e-6)


@pytest.mark.shared
def test_the_search_ends_no_higher_and_keeps_the_accuracy(anchor):
    data = Batch(anchor["val_logits"], anchor["val_labels"])
    found = LogitClip().fit(data)
    assert 4.95 <= float(found.threshold) <= 5.00  # flat to 1e-5 there
    plain = anchor["val_logits"].double().clamp(-4.97, 4.97)
    assert found.report.loss_after <= nll64(plain, anchor["val_labels"]) + 1e-7
    got = measured(found, anchor)
    assert got["accuracy"] == pytest.approx(95.05, abs=1e-6)
    assert got["ece"] == pytest.approx(1.2, abs=0.03)  # the paper's own figure is 1.21


# --- the tie rule -----------------------------------------------------------------------------


def test_ties_go_to_the_prediction_or_to_the_first():
    logits = torch.tensor([[7.0, 9.0, 1.0], [-8.0, -9.0, -7.0], [1.0, 2.0, 3.0]])
    keep = LogitClip().assign(threshold=5.0).wrap()(logits)
    first = LogitClip(ties="first").assign(threshold=5.0).wrap()(logits)
    assert torch.equal(first, logits.clamp(-5, 5))
    assert first.argmax(1).tolist() == [0, 0, 2]
    assert keep.argmax(1).tolist() == [1, 2, 2]
    torch.testing.assert_close(keep, first, rtol=1e-5, atol=0)
    assert torch.equal(keep[2], logits[2])


@given(st.integers(0, 100), st.floats(0.01, 20))
@settings(max_examples=50, deadline=None)
def test_predictions_are_kept_at_any_threshold(seed, threshold):
    logits, _ = drawn(n=60, seed=seed)
    kept = LogitClip().assign(threshold=threshold).wrap()(logits)
    assert torch.equal(kept.argmax(1), logits.argmax(1))
    assert (kept - logits.clamp(-threshold, threshold)).abs().max() <= 1e-5 * max(threshold, 1)


def test_ties_of_the_network_itself_stay():
    logits = torch.tensor([[2.0, 2.0, 1.0], [0.0, 0.0, 0.0]])
    assert torch.equal(LogitClip().wrap()(logits), logits)
    assert torch.equal(LogitClip().assign(threshold=2.5).wrap()(logits), logits)


def test_the_promise_follows_the_rule():
    assert LogitClip().keeps_accuracy
    assert not LogitClip(ties="first").keeps_accuracy
    assert not LogitClip(reference=True).keeps_accuracy


# --- the search -------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "scale"), [(0, 1e-3), (1, 1.0), (2, 1e3), (3, 1.0)])
def test_a_fine_grid_finds_nothing_lower(seed, scale):
    logits, labels = drawn(seed=seed)
    sizes = logits.double() * scale
    found = LogitClip(ties="first").fit(Batch(sizes, labels))
    grid = np.exp(np.linspace(math.log(min(0.02 * scale, 0.1)), math.log(40 * scale), 3000))
    lowest = min(nll64(sizes.clamp(-c, c), labels) for c in grid)
    assert found.report.loss_after <= lowest + 1e-6
    assert found.report.loss_after == pytest.approx(
        nll64(sizes.clamp(-float(found.threshold), float(found.threshold)), labels), abs=1e-6
    )


def test_the_loss_is_that_of_what_is_given_out():
    logits, labels = drawn()
    for ties in ("keep", "first"):
        found = LogitClip(ties=ties).fit(Batch(logits, labels))
        assert found.report.loss_after == pytest.approx(
            nll64(found.wrap()(logits), labels), abs=1e-6
        )


@pytest.mark.parametrize("criterion", ["brier", "ece"])
def test_other_criteria_come_down(criterion):
    logits, labels = drawn()
    found = LogitClip(criterion=criterion).fit(Batch(logits, labels))
    metric = getattr(scores, criterion)
    assert metric(logits=found.wrap()(logits), labels=labels) < metric(logits=logits, labels=labels)
    assert found.report.steps[0].details["criterion"] == criterion


def test_no_threshold_helps_an_underconfident_network():
    logits, _ = drawn()
    found = LogitClip().fit(Batch(logits / 10, logits.argmax(1)))
    assert found.report.noop
    assert found.threshold == math.inf
    assert found.report.steps[0].values == {"threshold": math.inf}
    assert found.report.as_json()["steps"][0]["threshold"] is None
    assert torch.equal(found.wrap()(logits), logits)


def test_the_report_counts_ties():
    logits, labels = drawn()
    found = LogitClip().fit(Batch(logits, labels))
    c, details = float(found.threshold), found.report.steps[0].details
    clamped = logits.double().clamp(-c, c)
    tied = (clamped == clamped.amax(1, keepdim=True)).sum(1) > 1
    assert details["rows_tied"] == pytest.approx(float(tied.double().mean()), abs=1e-9)
    assert details["clamped_share"] == pytest.approx(
        float((logits.abs() > c).double().mean()), abs=1e-9
    )
    assert details["accuracy_after"] == details["accuracy_before"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"criterion": "mce"}, "logit_clip: criterion is 'mce': choose nll, brier or ece"),
        ({"ties": "last"}, "logit_clip: ties is 'last': choose keep or first"),
        ({"reference": None}, "logit_clip: reference is None: give True or False"),
        ({"reference": True, "ties": "first"}, "reference=True fixes the search"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(InputError, match=message):
        LogitClip(**arguments)


@pytest.mark.parametrize("value", [-1.0, math.nan])
def test_a_damaged_threshold_is_refused(tmp_path, value):
    path = featcal.save(LogitClip().assign(threshold=value), tmp_path / "c.safetensors")
    with pytest.raises(InputError, match="must not be below 0"):
        featcal.load(path)
