"""Feature clipping: the threshold against naive scans, the guard, the published search, no-ops."""

import functools
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from featcal import Batch, CalibrationWarning, FeatureClip, InputError, Temperature, parse
from featcal.core.loss import brier, ece


def logits64(features, head, threshold=math.inf):
    weight = head.weight.detach().double().numpy()
    bias = 0 if head.bias is None else head.bias.detach().double().numpy()
    return np.clip(np.asarray(features, np.float64), -threshold, threshold) @ weight.T + bias


def nll_of(logits, labels):
    z = logits - logits.max(1, keepdims=True)
    return float(np.mean(np.log(np.exp(z).sum(1)) - z[np.arange(len(z)), np.asarray(labels)]))


def accuracy_of(logits, labels):
    return float((logits.argmax(1) == np.asarray(labels)).mean())


def scanned(features, head, labels, grid):
    """(lowest NLL, its threshold) on a grid, in float64, one threshold at a time."""
    scores = [nll_of(logits64(features, head, c), labels) for c in grid]
    best = int(np.argmin(scores))
    return scores[best], float(grid[best])


def log_grid(features, points=2000, decades=4):
    top = float(features.abs().max())
    return np.exp(np.linspace(math.log(top) - decades * math.log(10), math.log(top), points))


def scores_of(features, head, labels, grid):
    """The NLL of each threshold by the head itself, in float32 with float64 sums."""
    scores = []
    with torch.no_grad():
        for c in grid:
            z = head(features.clamp(-c, c))
            rows = nn.functional.cross_entropy(z, labels, reduction="none")
            scores.append(float(rows.sum(dtype=torch.float64)))
    return scores


def fast_scan(features, head, labels, grid):
    """The same scan in float32, the ten best once more in float64."""
    best = np.argsort(scores_of(features, head, labels, grid))[:10]
    return scanned(features, head, labels, np.asarray(grid)[best])


def as_batch(world):
    return Batch(None, world.labels, world.features)


# --- the threshold is the best one ------------------------------------------------------------


def test_the_demo_pack_against_two_thousand_thresholds(demo):
    found = FeatureClip().fit(demo.batch, demo.head)
    # Every tenth of the two thousand, then all of them around the three lowest: the NLL is
    # continuous, and a tenth of the grid is finer than any valley of 5,000 rows.
    grid = log_grid(demo.batch.features)
    tenth = scores_of(demo.batch.features, demo.head, demo.batch.labels, grid[::10])
    near = {i for low in np.argsort(tenth)[:3] for i in range(10 * low - 60, 10 * low + 61)}
    grid = grid[sorted(i for i in near if 0 <= i < len(grid))]
    lowest, where = fast_scan(demo.batch.features, demo.head, demo.batch.labels, grid)
    c = float(found.threshold)
    ours = nll_of(logits64(demo.batch.features, demo.head, c), demo.batch.labels)
    assert ours <= lowest + 1e-6
    assert c == pytest.approx(where, rel=0.02)
    step = found.report.steps[0]
    assert step.head_passes <= 10
    assert step.loss_after == pytest.approx(ours, abs=1e-6)
    clipped = demo.batch.features.abs() > c
    assert step.details["clipped_share"] == pytest.approx(float(clipped.float().mean()), abs=1e-6)
    assert step.details["rows_touched"] == pytest.approx(
        float(clipped.any(1).float().mean()), abs=1e-6
    )
    after = accuracy_of(logits64(demo.batch.features, demo.head, c), demo.batch.labels)
    assert step.details["accuracy_after"] == pytest.approx(after, abs=1e-9)


PACKS = [
    "cifar100-wrn16x4",
    "cifar10-wrn16x4",
    "cifar10-resnet50",
    "cifar10-vit",
    "imagenet5k-efficientnet_lite0",
]


def shared_pack(path):
    with np.load(path) as file:
        features = torch.from_numpy(file["val_features"]).float()
        labels = torch.from_numpy(file["val_labels"].astype(np.int64))
        weight, bias = (torch.from_numpy(file[key]).float() for key in ("weight", "bias"))
    head = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    head.weight, head.bias = nn.Parameter(weight), nn.Parameter(bias)
    return Batch(None, labels, features), head


@pytest.fixture
def linear_rows(monkeypatch):
    """A list whose sum is the number of rows any linear layer was asked for."""
    rows, forward = [], nn.Linear.forward

    def counting(layer, features):
        rows.append(len(features))
        return forward(layer, features)

    monkeypatch.setattr(nn.Linear, "forward", counting)
    return rows


@pytest.mark.shared
@pytest.mark.parametrize("name", PACKS)
def test_real_packs_within_ten_passes_and_a_millionth(shared_file, name, linear_rows):
    batch, head = shared_pack(shared_file("packs", f"{name}.npz"))
    found = FeatureClip().fit(batch, head)
    asked = sum(linear_rows)
    step = found.report.steps[0]
    assert step.head_passes <= 10
    assert asked <= step.head_passes * len(batch) + 64  # 64 rows prove the head beforehand
    c = float(found.threshold)
    # Near the answer as finely as two thousand points over four decades would be, and all around
    # coarsely: large heads are slow in float64.
    grid = log_grid(batch.features, points=60 if "imagenet" in name else 150)
    if math.isfinite(c):
        step_size = 4 * math.log(10) / 2000
        near = c * np.exp(step_size * np.arange(-25, 26))
        grid = np.concatenate([grid, near])
    lowest, _ = fast_scan(batch.features, head, batch.labels, grid)
    unclipped = nll_of(logits64(batch.features, head), batch.labels)
    ours = nll_of(logits64(batch.features, head, c), batch.labels)
    assert ours <= min(lowest, unclipped) + 1e-6


@pytest.mark.shared
def test_the_underconfident_imagenet_network_is_left_alone(shared_file):
    batch, head = shared_pack(shared_file("packs", "imagenet5k-efficientnet_lite0.npz"))
    found = FeatureClip().fit(batch, head)
    assert found.report.noop
    assert math.isinf(float(found.threshold))
    assert "underconfident" in found.report.steps[0].message
    assert found.report.as_json()["steps"][0]["threshold"] is None


@pytest.mark.shared
def test_the_resnet50_of_the_paper(shared_file):
    batch, head = shared_pack(shared_file("packs", "cifar10-resnet50.npz"))
    found = FeatureClip().fit(batch, head)
    assert float(found.threshold) == pytest.approx(0.245, abs=0.01)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(0))
    again = FeatureClip().fit(batch.rows(order), head)
    assert float(again.threshold) == pytest.approx(float(found.threshold), rel=5e-3)
    assert again.report.loss_after == pytest.approx(found.report.loss_after, abs=1e-6)


class Opaque(nn.Module):
    """A linear head that does not look like one, and counts its rows."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.rows = 0

    def forward(self, features):
        self.rows += len(features)
        return self.inner(features)


class Bent(nn.Module):
    """A head that is not linear."""

    def __init__(self, d, k):
        super().__init__()
        draw = torch.Generator().manual_seed(4)
        self.rows = 0
        self.first = nn.Parameter(torch.randn(d, 2 * d, generator=draw) / d**0.5)
        self.second = nn.Parameter(torch.randn(2 * d, k, generator=draw) * 1.5)

    def forward(self, features):
        self.rows += len(features)
        return torch.tanh(features @ self.first) @ self.second


def test_any_module_as_head_improves_within_ten_passes(demo):
    head = Opaque(demo.head)
    found = FeatureClip().fit(demo.batch, head)
    assert head.rows <= 10 * len(demo.batch) + 64
    step = found.report.steps[0]
    assert step.head_passes <= 10
    assert math.ceil((head.rows - 64) / len(demo.batch)) <= step.head_passes
    assert step.loss_after < step.loss_before - 0.01
    linear = FeatureClip().fit(demo.batch, demo.head)
    assert step.loss_after <= linear.report.loss_after + 1e-4
    assert float(found.threshold) == pytest.approx(float(linear.threshold), rel=0.05)


@pytest.mark.parametrize("rows", [300, 3000])
def test_a_head_that_is_not_linear(rows):
    head = Bent(12, 4)
    draw = torch.Generator().manual_seed(5)
    features = torch.randn(rows, 12, generator=draw) * 2
    with torch.no_grad():
        true = head(features.clamp(-1, 1)) / 2
    gumbel = -torch.empty(rows, 4).exponential_(generator=draw).log()
    labels = (true + gumbel).argmax(1)
    head.rows = 0
    found = FeatureClip().fit(Batch(None, labels, features), head)
    assert head.rows <= 10 * rows + 64
    step = found.report.steps[0]
    assert step.head_passes <= 10
    assert step.loss_after < step.loss_before - 0.01
    with torch.no_grad():
        again = head(features.clamp(-float(found.threshold), float(found.threshold)))
    assert step.loss_after == pytest.approx(nll_of(again.double().numpy(), labels), abs=1e-6)


@given(st.integers(0, 2**31), st.booleans(), st.sampled_from([1.0, 3.0]))
@settings(max_examples=8, deadline=None)
def test_small_data_against_a_dense_grid(made, seed, signed, heat):
    world = made(n=60, d=5, k=3, knee=1.0, heat=heat, signed=signed, seed=seed)
    found = FeatureClip().fit(as_batch(world), world.head)
    c = float(found.threshold)
    grid = np.concatenate([log_grid(world.features, 4000), [math.inf]])
    lowest, where = scanned(world.features, world.head, world.labels, grid)
    # Where the features say nothing, c = 0 is best and any small c is nearly as good.
    assume(where > 5e-3 * float(world.features.abs().max()))
    ours = nll_of(logits64(world.features, world.head, c), world.labels)
    assert ours <= lowest + 1e-6
    assert found.report.loss_after == pytest.approx(ours, abs=1e-6)


@pytest.mark.parametrize("rows", [300, 2500])
def test_signed_features_are_clipped_on_both_sides(made, rows):
    world = made(n=rows, d=16, k=4, signed=True, knee=1.0)
    found = FeatureClip().fit(as_batch(world), world.head)
    c = float(found.threshold)
    assert 0.5 < c < 2
    mapped = found.map_features(world.features)
    assert float(mapped.max()) == c
    assert float(mapped.min()) == -c
    lowest, _ = scanned(world.features, world.head, world.labels, log_grid(world.features, 400))
    assert nll_of(logits64(world.features, world.head, c), world.labels) <= lowest + 1e-6


@pytest.mark.parametrize(
    ("rows", "factor"), [(200, 0.37), (200, 1e5), (2500, 1e-3), (2500, 0.37), (2500, 1e5)]
)
def test_scale_equivariance(made, rows, factor):
    world = made(n=rows, d=16, k=4)
    plain = FeatureClip().fit(as_batch(world), world.head)
    head = nn.Linear(16, 4, device="meta")
    head.weight = nn.Parameter(world.head.weight.detach() / factor)
    head.bias = nn.Parameter(world.head.bias.detach())
    scaled = FeatureClip().fit(Batch(None, world.labels, world.features * factor), head)
    assert float(scaled.threshold) == pytest.approx(float(plain.threshold) * factor, rel=0.01)
    assert scaled.report.loss_after == pytest.approx(plain.report.loss_after, abs=1e-5)


# --- odd features -----------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [50, 2500])
def test_all_zero_features_are_a_noop(rows):
    head = nn.Linear(6, 3)
    found = FeatureClip().fit(Batch(None, torch.arange(rows) % 3, torch.zeros(rows, 6)), head)
    assert found.report.noop
    assert math.isinf(float(found.threshold))


@pytest.mark.parametrize("rows", [50, 2500])
@pytest.mark.parametrize("value", [1.0, -3.0, 1e-4])
def test_constant_features(rows, value):
    head = nn.Linear(6, 3, device="meta")
    head.weight = nn.Parameter(torch.arange(18.0).view(3, 6) / 20 / abs(value))
    head.bias = nn.Parameter(torch.zeros(3))
    labels = torch.arange(rows) % 3
    found = FeatureClip().fit(Batch(None, labels, torch.full((rows, 6), value)), head)
    # Labels in equal shares: the best logits are all equal, so the smallest clip is best.
    assert found.report.loss_after < found.report.loss_before
    assert found.report.loss_after == pytest.approx(math.log(3), abs=1e-2)


@pytest.mark.parametrize("rows", [400, 2500])
@pytest.mark.parametrize("size", [1e6, -1e6])
def test_one_huge_activation_hides_nothing(made, rows, size):
    world = made(n=rows, d=16, k=4)
    features = world.features.clone()
    features[7, 3] = size
    found = FeatureClip().fit(Batch(None, world.labels, features), world.head)
    c = float(found.threshold)
    lowest, _ = scanned(features, world.head, world.labels, log_grid(features, 600, decades=8))
    assert nll_of(logits64(features, world.head, c), world.labels) <= lowest + 1e-6
    assert 0.5 < c < 5


@pytest.mark.parametrize("rows", [300, 2500])
def test_a_head_without_bias(made, rows):
    world = made(n=rows, d=16, k=4)
    head = nn.Linear(16, 4, bias=False, device="meta")
    head.weight = world.head.weight
    found = FeatureClip().fit(as_batch(world), head)
    lowest, _ = scanned(world.features, head, world.labels, log_grid(world.features, 400))
    ours = nll_of(logits64(world.features, head, float(found.threshold)), world.labels)
    assert ours <= lowest + 1e-6


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_a_handful_of_rows(rows, made):
    world = made(n=rows, d=5, k=3)
    found = FeatureClip().fit(as_batch(world), world.head)
    assert float(found.threshold) > 0
    assert found.report.loss_after <= found.report.loss_before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows", [200, 2500])
def test_features_and_heads_of_other_types(made, dtype, rows):
    world = made(n=rows, d=16, k=4)
    head = nn.Linear(16, 4, device="meta")
    head.weight = nn.Parameter(world.head.weight.detach().to(dtype))
    head.bias = nn.Parameter(world.head.bias.detach().to(dtype))
    features = world.features.to(dtype)
    found = FeatureClip().fit(Batch(None, world.labels, features), head)
    with torch.no_grad():
        logits = found(features, head)
    assert logits.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert found.report.loss_after < found.report.loss_before
    after = nll_of(logits.double().numpy(), world.labels)
    assert found.report.loss_after == pytest.approx(after, abs=5e-3)
    plain = FeatureClip().fit(as_batch(world), world.head)
    assert found.report.loss_after <= plain.report.loss_after + 0.01


# --- guard and criterion ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def too_hot(made):
    """Rows too hot by 3, the free fit's details, and (accuracy, NLL) of a scan: once for a size.

    A clip can cure them only by wiping out what tells the classes apart.
    """

    @functools.cache
    def of_size(rows):
        world = made(n=rows, d=16, k=4, knee=1e9, heat=3.0)
        free = FeatureClip().fit(as_batch(world), world.head).report.steps[0].details
        thresholds = [*log_grid(world.features, 600), math.inf]
        scanned = [logits64(world.features, world.head, t) for t in thresholds]
        scores = [(accuracy_of(z, world.labels), nll_of(z, world.labels)) for z in scanned]
        return world, free, scores

    return of_size


@pytest.mark.parametrize(
    ("rows", "share"),
    [(400, 0.95), (400, 0.99), (400, 1.0), (3000, 0.9), (3000, 0.95), (3000, 0.99), (3000, 1.0)],
)
def test_the_guard_is_respected_where_it_binds(too_hot, rows, share):
    world, free, scores = too_hot(rows)
    assert free["accuracy_after"] < share * free["accuracy_before"], "the data must make it bind"
    found = FeatureClip(min_accuracy=share).fit(as_batch(world), world.head)
    details = found.report.steps[0].details
    assert details["accuracy_after"] >= share * details["accuracy_before"]
    c = float(found.threshold)
    before = accuracy_of(logits64(world.features, world.head), world.labels)
    z = logits64(world.features, world.head, c)
    assert accuracy_of(z, world.labels) >= share * before - 1e-9
    ours = nll_of(z, world.labels)
    assert ours <= nll_of(logits64(world.features, world.head), world.labels) + 1e-9
    # No allowed threshold of a scan is better by much: the guard is no excuse to give up.
    best = min(nll for accuracy, nll in scores if accuracy >= share * before)
    assert ours <= best + (1e-6 if rows < 2048 else 0.02)


def test_a_guard_that_does_not_bind_changes_nothing(demo):
    free = FeatureClip().fit(demo.batch, demo.head)
    guarded = FeatureClip(min_accuracy=0.9).fit(demo.batch, demo.head)
    assert guarded.threshold == free.threshold


@pytest.mark.parametrize("value", [0, -0.5, 1.01, math.nan, math.inf, "0.99", True, [0.9]])
def test_a_share_that_is_none_is_refused(value):
    with pytest.raises(InputError, match=r"clip: min_accuracy is .*such as 0\.99"):
        FeatureClip(min_accuracy=value)


@pytest.mark.parametrize("value", ["NLL", "accuracy", "", None, 3])
def test_an_unknown_criterion_is_refused(value):
    with pytest.raises(InputError, match=r"clip: criterion is .*: choose nll, brier or ece"):
        FeatureClip(criterion=value)


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_reference_is_yes_or_no(value):
    with pytest.raises(InputError, match=r"reference is .*: give True or False"):
        FeatureClip(reference=value)


def score64(name, logits, labels):
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    labels = np.asarray(labels)
    if name == "nll":
        return nll_of(logits, labels)
    if name == "brier":
        return float(((p - np.eye(p.shape[1])[labels]) ** 2).sum(1).mean())
    confidence, right = p.max(1), p.argmax(1) == labels
    index = np.clip(np.ceil(confidence * 15) - 1, 0, 14).astype(int)
    return float(np.abs(np.bincount(index, confidence - right, minlength=15)).sum()) / len(p)


@pytest.mark.parametrize("rows", [300, 2500])
def test_the_criterion_decides(made, rows):
    world = made(n=rows, d=16, k=4, heat=1.4)
    names = ("nll", "brier", "ece")
    found = {name: FeatureClip(criterion=name).fit(as_batch(world), world.head) for name in names}
    for name in names:
        scores = {
            other: score64(
                name, logits64(world.features, world.head, float(fit.threshold)), world.labels
            )
            for other, fit in found.items()
        }
        assert scores[name] <= min(scores.values()) + 1e-6
        details = found[name].report.steps[0].details
        assert details["criterion"] == name
        tolerance = 2e-3 if name == "ece" else 1e-6  # one float32 row may change bins
        assert details["criterion_after"] == pytest.approx(scores[name], abs=tolerance)
        assert details["criterion_after"] <= details["criterion_before"]
        assert found[name].report.loss == "nll"


def test_the_loss_of_the_report_is_the_loss_of_the_fit(made):
    world = made(n=400, d=16, k=4)
    for loss, name in ((brier, "brier"), (ece, "ece")):
        found = FeatureClip().fit(as_batch(world), world.head, loss=loss)
        z = logits64(world.features, world.head, float(found.threshold))
        assert found.report.loss_after == pytest.approx(score64(name, z, world.labels), abs=2e-3)


# --- the published search ---------------------------------------------------------------------


def published(features, head, labels, criterion="nll", share=0.99):
    """The loop of the paper's code, one threshold at a time, independent of ours."""
    with torch.no_grad():
        plain = head(features).double().numpy()
        floor = share * accuracy_of(plain, labels)
        best, chosen = math.inf, math.inf
        for step in range(1, 2001):
            c = step * 0.01
            z = head(features.clamp(-c, c)).double().numpy()
            score = score64(criterion, z, labels)
            if score < best and accuracy_of(z, labels) > floor:
                best, chosen = score, c
    return chosen


def test_reference_is_the_published_loop(demo):
    part = demo.batch.rows(slice(0, 400))
    found = FeatureClip(reference=True).fit(part, demo.head)
    assert float(found.threshold) == pytest.approx(
        published(part.features, demo.head, part.labels), abs=1e-6
    )
    details = found.report.steps[0].details
    assert details["accuracy_after"] > 0.99 * details["accuracy_before"]


def test_reference_takes_the_first_threshold_that_clips_nothing_when_none_helps():
    # Correct and underconfident: every clip hurts, so the scan ends at the largest feature.
    features = torch.tensor([[1.234, 0.0], [0.0, 1.234]]).repeat(30, 1)
    head = nn.Linear(2, 2, bias=False, device="meta")
    head.weight = nn.Parameter(torch.eye(2))
    labels = torch.tensor([0, 1]).repeat(30)
    found = FeatureClip(reference=True).fit(Batch(None, labels, features), head)
    assert float(found.threshold) == pytest.approx(1.24, abs=1e-6)
    assert float(found.threshold) == pytest.approx(published(features, head, labels), abs=1e-6)
    better = FeatureClip().fit(Batch(None, labels, features), head)
    assert better.report.noop


def test_reference_without_a_passing_threshold_is_the_identity():
    # Features of size 1e4: every c up to 20 ruins the one sample whose class needs a large one.
    features = torch.tensor([[3e4, 1e4]] * 10 + [[1e4, 3e4]] * 10)
    head = nn.Linear(2, 2, bias=False, device="meta")
    head.weight = nn.Parameter(torch.eye(2) * 1e-4)
    labels = torch.tensor([0] * 10 + [1] * 10)
    found = FeatureClip(reference=True).fit(Batch(None, labels, features), head)
    assert math.isinf(float(found.threshold))
    assert found.report.noop


def test_reference_with_a_guard_of_ones_own(demo):
    part = demo.batch.rows(slice(0, 300))
    found = FeatureClip(reference=True, min_accuracy=0.9, criterion="ece").fit(part, demo.head)
    chosen = published(part.features, demo.head, part.labels, "ece", 0.9)
    assert float(found.threshold) == pytest.approx(chosen, abs=1e-6)


# --- with a temperature -----------------------------------------------------------------------


def test_joint_is_never_worse_than_sequential_on_the_demo_pack(demo):
    losses = {
        mode: parse("clip | temperature").fit(demo.batch, demo.head, mode=mode).report.loss_after
        for mode in ("joint", "sequential")
    }
    alone = Temperature().fit(demo.batch, demo.head).report.loss_after
    assert losses["joint"] <= losses["sequential"] + 1e-7
    assert losses["joint"] <= alone + 1e-7


@pytest.mark.parametrize("rows", [400, 4000])
def test_data_that_needs_a_temperature_is_not_trapped_by_the_clip(rows):
    """DESIGN B9: logits too hot by 3.5; clip alone first ends far from the joint optimum."""
    draw = np.random.default_rng(0)
    features = np.maximum(draw.normal(size=(rows, 32)), 0) * (1 + 2 * draw.random((rows, 1)))
    weight = draw.normal(size=(10, 32)) * 1.5
    logits = features @ weight.T
    labels = (logits / 3.5 + draw.gumbel(size=logits.shape)).argmax(1)
    head = nn.Linear(32, 10, bias=False, device="meta")
    head.weight = nn.Parameter(torch.tensor(weight, dtype=torch.float32))
    batch = Batch(None, torch.tensor(labels), torch.tensor(features, dtype=torch.float32))
    joint = parse("clip | temperature").fit(batch, head, mode="joint")
    greedy = parse("clip | temperature").fit(batch, head, mode="sequential")
    alone = Temperature().fit(batch, head)
    assert joint.report.loss_after <= greedy.report.loss_after + 1e-7
    assert joint.report.loss_after <= alone.report.loss_after + 1e-7
    assert greedy.report.loss_after > alone.report.loss_after + 0.05  # the trap is real
    assert float(joint.steps[1].temperature) == pytest.approx(3.5, rel=0.15)


@pytest.mark.parametrize("rows", [300, 2500])
def test_joint_against_a_scan_of_both(made, rows):
    world = made(n=rows, d=12, k=4, knee=1.2, heat=2.0)
    found = parse("clip | temperature").fit(as_batch(world), world.head)
    lowest = math.inf
    inverses = 1 / np.exp(np.linspace(math.log(0.5), math.log(6), 60))
    for c in [*log_grid(world.features, 80, decades=2), math.inf]:
        z = logits64(world.features, world.head, c)
        lowest = min(lowest, *(nll_of(z * b, world.labels) for b in inverses))
    assert found.report.loss_after <= lowest + 1e-5
    z = logits64(world.features, world.head, float(found.steps[0].threshold))
    z /= float(found.steps[1].temperature)
    assert found.report.loss_after == pytest.approx(nll_of(z, world.labels), abs=1e-6)


def test_the_first_step_of_a_joint_fit_says_what_follows_it(made):
    world = made(n=300, d=12, k=4, heat=2.0)
    joint = parse("clip | temperature").fit(as_batch(world), world.head)
    assert joint.report.steps[0].details["fitted_with"] == "temperature"
    alone = FeatureClip().fit(as_batch(world), world.head)
    assert alone.report.steps[0].details["fitted_with"] is None


def test_capped_temperatures_at_untaken_thresholds_do_not_warn(recwarn):
    features = torch.eye(3).repeat(30, 1) * torch.linspace(0.5, 2, 90)[:, None]
    head = nn.Linear(3, 3, bias=False, device="meta")
    head.weight = nn.Parameter(torch.eye(3))
    labels = features.argmax(1)
    with pytest.warns(CalibrationWarning, match="separate the labels") as caught:
        parse("clip | temperature").fit(Batch(None, labels, features), head)
    assert len(caught) == 1


# --- no-ops -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [200, 2500])
def test_an_underconfident_network_is_left_alone(rows):
    draw = np.random.default_rng(1)
    features = np.maximum(draw.normal(size=(rows, 10)), 0)
    weight = draw.normal(size=(4, 10))
    labels = (3 * features @ weight.T + draw.gumbel(size=(rows, 4))).argmax(1)
    head = nn.Linear(10, 4, bias=False, device="meta")
    head.weight = nn.Parameter(torch.tensor(weight, dtype=torch.float32))
    batch = Batch(None, torch.tensor(labels), torch.tensor(features, dtype=torch.float32))
    found = FeatureClip().fit(batch, head)
    assert found.report.noop
    assert math.isinf(float(found.threshold))
    step = found.report.steps[0]
    assert step.values == {"threshold": math.inf}
    assert step.loss_after == step.loss_before
    assert "underconfident" in step.message
    text = json.dumps(found.report.as_json(), allow_nan=False)
    assert json.loads(text)["steps"][0]["threshold"] is None
    with torch.no_grad():
        assert torch.equal(found(batch.features, head), head(batch.features))


def test_a_noop_after_a_fit_opens_the_clip_again(made):
    world = made(n=300)
    clip = FeatureClip().fit(as_batch(world), world.head)
    assert math.isfinite(float(clip.threshold))
    clip.fit(Batch(None, world.labels, torch.zeros_like(world.features)), world.head)
    assert clip.report.noop
    assert math.isinf(float(clip.threshold))


def test_map_features_is_the_signed_clamp():
    clip = FeatureClip().assign(threshold=0.5)
    found = clip.map_features(torch.tensor([[-2.0, -0.5, 0.0, 0.3, 7.0]]))
    assert found.tolist() == [[-0.5, -0.5, 0.0, pytest.approx(0.3), 0.5]]
    assert torch.isnan(clip.map_features(torch.tensor([[math.nan]]))).all()
