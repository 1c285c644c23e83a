"""The parts of the search: samples, quantiles, the far end, and what a search may not do."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from featcal import Batch, FeatureClip, parse
from featcal.core.batch import Through
from featcal.methods import clip as clip_linear
from featcal.methods import clip as clip_search
from featcal.methods.clip import GAIN, Trial, _picked, choose, quantiles, row_peaks


def trial(threshold, score, accuracy=0.9):
    return Trial(threshold, score, score, accuracy)


def test_choose_wants_a_true_gain():
    before = trial(math.inf, 1.0)
    assert choose([before, trial(2.0, 1.0 - GAIN / 2)], before, 0) is before
    better = trial(2.0, 1.0 - 10 * GAIN)
    assert choose([before, better], before, 0) is better
    assert choose([before], before, 1.0) is before


def test_choose_takes_the_smaller_threshold_among_equals():
    before = trial(math.inf, 1.0)
    small, large = trial(1.0, 0.5), trial(2.0, 0.5)
    assert choose([before, large, small], before, 0) is small


def test_choose_keeps_to_the_guard():
    before = trial(math.inf, 1.0, accuracy=0.8)
    cheap, costly = trial(2.0, 0.7, accuracy=0.79), trial(1.0, 0.5, accuracy=0.7)
    assert choose([before, cheap, costly], before, 0.98) is cheap
    assert choose([before, cheap, costly], before, 1.0) is before
    assert choose([before, cheap, costly], before, 0) is costly


def test_rows_are_picked_by_content_alone():
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(5000, 20, generator=draw).relu()
    labels = torch.zeros(5000, dtype=torch.long)
    picked = _picked(Batch(None, labels, features), 0.2)
    order = torch.randperm(5000, generator=draw)
    assert torch.equal(_picked(Batch(None, labels, features[order]), 0.2), picked[order])
    assert torch.equal(_picked(Batch(None, labels[:7], features[:7]), 0.2), picked[:7])
    assert float(picked.float().mean()) == pytest.approx(0.2, abs=0.03)


@pytest.mark.parametrize("share", [0.02, 0.08, 0.2, 0.5])
@pytest.mark.parametrize("make", ["relu", "rounded", "powers", "one"])
def test_a_sample_has_about_the_share_asked_for(share, make):
    draw = torch.Generator().manual_seed(1)
    features = torch.randn(8000, 16, generator=draw)
    features = {
        "relu": features.relu(),
        "rounded": features.half().float(),
        "powers": 2.0 ** features.mul(4).round(),
        "one": torch.cat([features[:, :1], torch.zeros(8000, 15)], 1).half().float(),
    }[make]
    picked = _picked(Batch(None, torch.zeros(8000, dtype=torch.long), features), share)
    assert float(picked.float().mean()) == pytest.approx(share, rel=0.5)


def test_everything_is_picked_at_a_share_of_one():
    features = torch.randn(100, 3)
    assert _picked(Batch(None, torch.zeros(100, dtype=torch.long), features), 1.0).all()


def test_quantiles_are_the_values_that_shares_exceed():
    values = torch.arange(1, 1001).double()
    found = quantiles(values, np.array([0.5, 0.1, 0.001]))
    for share, value in zip([0.5, 0.1, 0.001], found, strict=True):
        assert float((values > value).float().mean()) == pytest.approx(share, abs=2e-3)


def test_row_peaks_are_absolute():
    batch = Batch(None, torch.zeros(2, dtype=torch.long), torch.tensor([[1.0, -3.0], [0.5, 0.0]]))
    assert row_peaks(batch).tolist() == [3.0, 0.5]


@pytest.mark.parametrize("recipe", ["clip", "clip | temperature", "clip(min_accuracy=0.99)"])
@pytest.mark.parametrize("rows", [100, 2047, 2048, 2500])
def test_a_search_keeps_to_ten_passes(made, monkeypatch, rows, recipe):
    world = made(n=rows, d=16, k=4)
    asked, forward = [], nn.Linear.forward

    def counting(layer, features):
        asked.append(len(features))
        return forward(layer, features)

    monkeypatch.setattr(nn.Linear, "forward", counting)
    found = parse(recipe).fit(Batch(None, world.labels, world.features), world.head)
    assert found.report.steps[0].head_passes <= 10
    assert sum(asked) <= 11 * rows + 64  # the temperature's own pass and the proof of the head


def test_a_valley_hidden_in_a_few_rows_is_found():
    """Only 1 row in 100 has large activations; the answer lies far above the bulk of |x|."""
    draw = np.random.default_rng(0)
    rows = 4000
    features = np.abs(draw.normal(size=(rows, 10)))
    features[::100] *= 60
    weight = draw.normal(size=(4, 10))
    labels = (np.minimum(features, 5) @ weight.T + draw.gumbel(size=(rows, 4))).argmax(1)
    head = nn.Linear(10, 4, bias=False, device="meta")
    head.weight = nn.Parameter(torch.tensor(weight, dtype=torch.float32))
    batch = Batch(None, torch.tensor(labels), torch.tensor(features, dtype=torch.float32))
    found = FeatureClip().fit(batch, head)

    def score(c):
        with torch.no_grad():
            logits = head(batch.features.clamp(-c, c)).double()
        return float(nn.functional.cross_entropy(logits, batch.labels))

    grid = np.exp(np.linspace(math.log(0.05), math.log(200), 600))
    lowest = min(score(c) for c in grid)
    assert not found.report.noop
    assert score(float(found.threshold)) <= lowest + 1e-6


# --- the walk, where looking everywhere would be too dear ---------------------------------------


@pytest.fixture
def walking(monkeypatch):
    """Small problems are looked at everywhere; this sends them the way of large ones."""
    monkeypatch.setattr(clip_search, "CHEAP", 0)


def nll_at(world, c):
    with torch.no_grad():
        logits = world.head(world.features.clamp(-c, c)).double()
    return float(torch.nn.functional.cross_entropy(logits, world.labels))


def accuracy_at(world, c):
    with torch.no_grad():
        logits = world.head(world.features.clamp(-c, c))
    return float((logits.argmax(1) == world.labels).double().mean())


WORLDS = [
    {"n": 2100, "d": 24, "k": 5},
    {"n": 3000, "d": 24, "k": 5, "signed": True},
    {"n": 4000, "d": 64, "k": 10, "seed": 3},
    {"n": 2500, "d": 16, "k": 4, "knee": 0.6, "seed": 1},
    {"n": 2500, "d": 16, "k": 4, "knee": 4.0, "seed": 2},
    {"n": 3000, "d": 24, "k": 5, "heat": 3.0, "seed": 4},
    {"n": 3000, "d": 16, "k": 4, "knee": 1e9, "heat": 0.5},  # hardly anything to gain
]


@pytest.mark.parametrize("size", WORLDS, ids=str)
def test_the_walk_ends_at_the_best_of_a_fine_grid(made, walking, size):
    world = made(**size)
    found = FeatureClip().fit(Batch(None, world.labels, world.features), world.head)
    (step,) = found.report.steps
    assert step.head_passes <= 10
    top = float(world.features.abs().max())
    best = min(nll_at(world, c) for c in np.geomspace(top / 1000, top, 700))
    # The fewer the rows, the rougher NLL(c): a finer grid would find a few millionths more.
    assert nll_at(world, float(found.threshold)) <= best + 1e-5


@pytest.mark.parametrize("share", [0.95, 0.99, 1.0])
def test_a_guard_that_binds_ends_on_the_allowed_side(made, walking, share):
    world = made(n=3000, d=16, k=4, knee=1e9, heat=3.0)
    found = FeatureClip(min_accuracy=share).fit(
        Batch(None, world.labels, world.features), world.head
    )
    (step,) = found.report.steps
    c = float(found.threshold)
    assert step.head_passes <= 10
    assert accuracy_at(world, c) >= share * accuracy_at(world, math.inf)
    assert nll_at(world, c) <= nll_at(world, math.inf)
    assert step.details["accuracy_after"] == pytest.approx(accuracy_at(world, c))


def test_a_pipeline_is_searched_jointly_within_ten_passes(made, walking):
    world = made(n=3000, d=24, k=5, heat=3.0, seed=4)
    batch = Batch(None, world.labels, world.features)
    joint = parse("clip | temperature").fit(batch, world.head)
    greedy = parse("clip | temperature").fit(batch, world.head, mode="sequential")
    assert joint.report.steps[0].head_passes <= 10
    assert joint.report.loss_after <= greedy.report.loss_after + 1e-6


# --- ten passes, whatever the data --------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["clip", "clip | temperature", "clip(min_accuracy=1.0)"])
@pytest.mark.parametrize(
    ("n", "d", "k", "copies_of", "plain"),
    [
        (1, 4, 3, None, False),
        (10, 4, 3, None, False),
        (64, 20, 5, None, False),
        (100, 20, 5, None, False),
        (100, 1024, 300, None, True),  # linear, and too large for the exact path
        (500, 50, 7, None, False),
        (3000, 20, 5, 2, False),  # two rows over and over: content picks all of them or none
        (20000, 20, 5, 3, False),
    ],
)
@pytest.mark.filterwarnings("ignore::featcal.CalibrationWarning")
def test_never_more_than_ten_passes(made, recipe, n, d, k, copies_of, plain):
    world = made(n=n, d=d, k=k)
    if copies_of:
        world.features = world.features[:copies_of][torch.arange(n) % copies_of]
    asked = []

    class Watched(nn.Module):
        def forward(self, features):
            asked.append(len(features))
            return world.head(features)

    head = world.head if plain else Watched()
    found = parse(recipe).fit(Batch(None, world.labels, world.features), head)
    (step, *_) = found.report.steps
    assert step.head_passes <= 10
    if not plain and len(found.report.steps) == 1:
        look = min(n, 64)  # the rows the check of the head costs before the fit
        assert sum(asked) - look <= 10 * n


def test_logits_that_do_not_fit_into_memory_cost_one_pass_a_trial(made, walking, monkeypatch):
    monkeypatch.setattr(Through.__init__, "__kwdefaults__", {"features": True, "keep": 1000})
    monkeypatch.setattr(clip_linear, "KEEP_BYTES", 1000)
    world = made(n=3000, d=24, k=5)
    batch = Batch(None, world.labels, world.features)
    clip, temperature = parse("clip | temperature").fit(batch, world.head).report.steps
    assert clip.head_passes <= 10
    assert clip.details["fitted_with"] is None  # refitting would have cost passes of the head
    assert clip.loss_after < clip.loss_before
    assert temperature.loss_after <= clip.loss_after


@pytest.fixture(scope="module")
def demo_grid(demo):
    """The demo pack's rows, and (accuracy, NLL) of 250 thresholds."""
    batch, head = demo.batch, demo.head
    world = SimpleNamespace(features=batch.features, labels=batch.labels, head=head)
    grid = np.geomspace(1.5, 10.4, 250)
    return world, [(accuracy_at(world, c), nll_at(world, c)) for c in grid]


@pytest.mark.parametrize("share", [0.99, 0.995, 1.0])
def test_a_guard_on_real_features_is_as_good_as_a_grid(demo, demo_grid, share):
    world, scores = demo_grid
    found = FeatureClip(min_accuracy=share).fit(demo.batch, demo.head)
    floor = share * accuracy_at(world, math.inf)
    best = min(nll for accuracy, nll in scores if accuracy >= floor)
    c = float(found.threshold)
    assert accuracy_at(world, c) >= floor
    assert nll_at(world, c) <= best + 1e-3
