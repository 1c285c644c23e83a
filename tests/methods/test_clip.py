"""Feature clipping: exact paths, thresholds against naive scans, ten passes, guard, joint fits."""

import functools
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as torch_dist
import torch.multiprocessing as mp
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from method_cases import score64
from torch import nn

from featcal import Batch, FeatureClip, Temperature, parse
from featcal.core import fit as fit_module
from featcal.core import memory
from featcal.core.batch import Through
from featcal.methods import clip as clip_module
from featcal.methods.clip import LinearPath, clipped_logits


def logits64(world, c=math.inf):
    head = world.head
    bias = 0 if head.bias is None else head.bias.detach().double().numpy()
    features = np.asarray(world.features, np.float64)
    return np.clip(features, -c, c) @ head.weight.detach().double().numpy().T + bias


def nll_at(world, c=math.inf):
    return score64("nll", logits64(world, c), world.labels)


def accuracy_at(world, c=math.inf):
    return float((logits64(world, c).argmax(1) == np.asarray(world.labels)).mean())


def log_grid(features, points, decades=4):
    top = float(features.abs().max())
    return np.geomspace(top / 10**decades, top, points)


def lowest_of(world, grid):
    """The lowest NLL on a grid: all of it in float32, the ten best once more in float64."""
    with torch.no_grad():
        rough = [
            float(
                nn.functional.cross_entropy(world.head(world.features.clamp(-c, c)), world.labels)
            )
            for c in grid
        ]
    return min(nll_at(world, grid[i]) for i in np.argsort(rough)[:10])


def as_batch(world):
    return Batch(None, world.labels, world.features)


def fitted(world, **arguments):
    return FeatureClip(**arguments).fit(as_batch(world), world.head)


def linear(weight, bias=None):
    weight = torch.as_tensor(weight, dtype=torch.float32)
    head = nn.Linear(weight.shape[1], len(weight), bias=bias is not None, device="meta")
    head.weight = nn.Parameter(weight)
    if bias is not None:
        head.bias = nn.Parameter(torch.as_tensor(bias, dtype=torch.float32))
    return head


class Watched(nn.Module):
    """A head that does not look linear, and counts its rows."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.rows = inner, 0

    def forward(self, features):
        self.rows += len(features)
        return self.inner(features)


@pytest.fixture
def walking(monkeypatch):
    """Small problems are looked at everywhere; this sends them the way of large ones."""
    monkeypatch.setattr(clip_module, "CHEAP", 0)


@pytest.fixture(params=["walk", "sweep"])
def either(request, walking, monkeypatch):
    """And this the way of data with very many logits, too."""
    if request.param == "sweep":
        monkeypatch.setattr(clip_module, "MANY", 0)


@pytest.mark.parametrize("signed", [False, True])
def test_a_linear_path_is_exact_wherever_it_goes(made, signed):
    world = made(n=80, d=9, k=4, signed=signed)
    features, weight = world.features.double(), world.head.weight.detach().double()
    sizes = features.abs()[features != 0].tolist()
    thresholds = [1e-6, 1.9, 0.1, *sizes[:20], 0.7, 100.0, max(sizes), 1.3 + 1e-9, 1.3]
    start = torch.tensor(logits64(world, 1.3))
    here = LinearPath(features, start, weight.T, 1.3, math.inf)
    moving = LinearPath(features, start, weight.T, 1.3, math.inf)
    for c in thresholds:
        expected = torch.tensor(logits64(world, c))
        torch.testing.assert_close(here.at(c), expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(moving.move(c), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kept", [True, False])
def test_the_head_is_asked_about_touched_rows_alone(made, kept):
    world = made(n=300, d=20, k=5)
    peaks, own = world.features.abs().amax(1), world.logits if kept else None
    for c in (0.01, float(peaks.median()), float(peaks.quantile(0.99)), math.inf):
        head = Watched(world.head)
        with torch.no_grad():
            found = clipped_logits(world.features, own, peaks, head, c)
        expected = torch.tensor(logits64(world, c)).float()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        touched = int((peaks > c).sum())
        assert head.rows == (touched if kept and touched < 200 else 300)


def test_a_layer_that_does_more_than_its_weights_is_not_taken_for_linear(made):
    """Hooks change what a layer computes without changing its type."""
    world = made(n=300, d=8, k=3)
    world.head.register_forward_hook(lambda _, __, output: torch.tanh(output) * 3)
    found = fitted(world)

    def score(c):
        with torch.no_grad():
            z = world.head(world.features.clamp(-c, c))
        return float(nn.functional.cross_entropy(z, world.labels))

    assert found.report.loss_after == pytest.approx(score(float(found.threshold)), abs=1e-5)
    assert found.report.loss_after <= min(map(score, np.geomspace(0.01, 10, 200))) + 1e-3


def test_map_features_is_the_signed_clamp():
    clip = FeatureClip().assign(threshold=0.5)
    found = clip.map_features(torch.tensor([[-2.0, -0.5, 0.0, 0.3, 7.0]]))
    assert found.tolist() == [[-0.5, -0.5, 0.0, pytest.approx(0.3), 0.5]]
    assert torch.isnan(clip.map_features(torch.tensor([[math.nan]]))).all()


def test_the_demo_pack_against_a_scan(demo):
    world = SimpleNamespace(features=demo.batch.features, labels=demo.batch.labels, head=demo.head)
    found = fitted(world)
    c, step = float(found.threshold), found.report.steps[0]
    near = c * np.exp(0.0046 * np.arange(-30, 31))
    grid = np.concatenate([log_grid(world.features, 80), near])
    ours = nll_at(world, c)
    assert ours <= lowest_of(world, grid) + 1e-6
    assert step.head_passes <= 10
    assert step.loss_after == pytest.approx(ours, abs=1e-6)
    clipped = world.features.abs() > c
    share, rows = float(clipped.float().mean()), float(clipped.any(1).float().mean())
    assert step.details["clipped_share"] == pytest.approx(share, abs=1e-6)
    assert step.details["rows_touched"] == pytest.approx(rows, abs=1e-6)
    assert step.details["accuracy_after"] == pytest.approx(accuracy_at(world, c), abs=1e-9)


@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cifar10-wrn16x4", None),
        ("cifar10-resnet50", 0.245),
        ("imagenet5k-efficientnet_lite0", math.inf),
    ],
)
def test_real_packs_within_ten_passes_and_a_millionth(shared_file, monkeypatch, name, expected):
    with np.load(shared_file("packs", f"{name}.npz")) as file:
        features = torch.from_numpy(file["val_features"]).float()
        labels = torch.from_numpy(file["val_labels"].astype(np.int64))
        head = linear(file["weight"], file["bias"])
    rows, forward = [], nn.Linear.forward

    def counting(layer, features):
        rows.append(len(features))
        return forward(layer, features)

    monkeypatch.setattr(nn.Linear, "forward", counting)
    found = FeatureClip().fit(Batch(None, labels, features), head)
    monkeypatch.undo()
    step, c = found.report.steps[0], float(found.threshold)
    assert step.head_passes <= 10
    assert sum(rows) <= step.head_passes * len(labels) + 64  # 64 rows prove the head beforehand
    if expected is not None:
        assert c == pytest.approx(expected, abs=0.01)
        assert found.report.noop == math.isinf(expected)

    def score(c):
        with torch.no_grad():
            z = head(features.clamp(-c, c)).double()
        return float(nn.functional.cross_entropy(z, labels))

    grid = [*log_grid(features, 40), math.inf]
    if math.isfinite(c):
        grid += [*(c * np.exp(0.0046 * np.arange(-20, 21)))]
    assert score(c) <= min(map(score, grid)) + 1e-6


WORLDS = [
    {"n": 2100, "d": 24, "k": 5},
    {"n": 2500, "d": 16, "k": 4, "knee": 0.6, "seed": 1, "signed": True},
    {"n": 2500, "d": 16, "k": 4, "knee": 4.0, "seed": 2},
    {"n": 3000, "d": 16, "k": 4, "knee": 1e9, "heat": 0.5},  # hardly anything to gain
]


@pytest.mark.parametrize("size", WORLDS, ids=str)
def test_the_walk_ends_at_the_best_of_a_fine_grid(made, either, size):
    world = made(**size)
    found = fitted(world)
    assert found.report.steps[0].head_passes <= 10
    # The fewer the rows, the rougher NLL(c): a finer grid would find a few millionths more.
    best = lowest_of(world, log_grid(world.features, 400, decades=3))
    assert nll_at(world, float(found.threshold)) <= best + 1e-5


def test_a_valley_hidden_in_a_few_rows_is_found():
    """Only 1 row in 100 has large activations; the answer lies far above the bulk of |x|."""
    draw = np.random.default_rng(0)
    features = np.abs(draw.normal(size=(4000, 10)))
    features[::100] *= 60
    weight = draw.normal(size=(4, 10))
    labels = (np.minimum(features, 5) @ weight.T + draw.gumbel(size=(4000, 4))).argmax(1)
    features = torch.tensor(features, dtype=torch.float32)
    world = SimpleNamespace(features=features, labels=torch.tensor(labels), head=linear(weight))
    found = fitted(world)
    assert not found.report.noop
    best = lowest_of(world, np.geomspace(0.05, 200, 300))
    assert nll_at(world, float(found.threshold)) <= best + 1e-6


@pytest.mark.parametrize("seed", [0, 3])
def test_a_shallow_valley_below_a_few_enormous_activations_is_found(seed):
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(256, 32, generator=draw) / 32**0.5
    features = torch.randn(66_000, 32, generator=draw).relu()
    labels = torch.multinomial((features @ weight.T * 4).softmax(1), 1, generator=draw)[:, 0]
    wrong = torch.rand(features.shape, generator=draw) < 1e-4
    features += wrong * 8 * torch.rand(features.shape, generator=draw)
    features[0, 0] = 200.0
    world = SimpleNamespace(features=features, labels=labels, head=linear(4 * weight.numpy()))
    found = fitted(world)
    assert found.report.loss_after <= lowest_of(world, [2.8, 3.2, 3.6]) + 1e-4


@pytest.mark.parametrize("share", [0.2, 0.6])
def test_rows_of_zeros_do_not_hide_the_others(share):
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(20, 64, generator=draw) / 8
    features = torch.randn(8000, 64, generator=draw).relu()
    logits = features.clamp(max=0.8) @ weight.T * 6
    labels = torch.multinomial(logits.softmax(1), 1, generator=draw)[:, 0]
    features[: int(8000 * share)] = 0
    world = SimpleNamespace(features=features, labels=labels, head=linear(6 * weight.numpy()))
    assert fitted(world).report.loss_after <= lowest_of(world, np.linspace(0.3, 1.5, 25)) + 1e-5


def test_logits_in_64_bit_beside_a_head_in_32_change_nothing(made):
    world = made(n=9000, d=16, k=24)
    logits = world.head(world.features).detach()
    one, other = (
        parse("clip").fit(Batch(kept, world.labels, world.features), world.head)
        for kept in (logits, logits.double())
    )
    assert float(one.threshold) == pytest.approx(float(other.threshold), rel=1e-4)


@given(st.integers(0, 2**31), st.booleans(), st.sampled_from([1.0, 3.0]))
@settings(max_examples=4, deadline=None)
def test_small_data_against_a_dense_grid(made, seed, signed, heat):
    world = made(n=60, d=5, k=3, knee=1.0, heat=heat, signed=signed, seed=seed)
    grid = [*log_grid(world.features, 1000), math.inf]
    scores = [nll_at(world, c) for c in grid]
    # Where the features say nothing, c = 0 is best and any small c is nearly as good.
    assume(grid[int(np.argmin(scores))] > 5e-3 * float(world.features.abs().max()))
    found = fitted(world)
    ours = nll_at(world, float(found.threshold))
    assert ours <= min(scores) + 1e-6
    assert found.report.loss_after == pytest.approx(ours, abs=1e-6)


@pytest.mark.parametrize("rows", [300, 2500])
def test_a_head_that_is_not_linear(rows):
    draw = torch.Generator().manual_seed(5)
    first = torch.randn(12, 24, generator=draw) / 12**0.5
    second = torch.randn(24, 4, generator=draw) * 1.5
    head = Watched(lambda x: torch.tanh(x @ first) @ second)
    features = torch.randn(rows, 12, generator=draw) * 2
    gumbel = -torch.empty(rows, 4).exponential_(generator=draw).log()
    labels = (head(features.clamp(-1, 1)) / 2 + gumbel).argmax(1)
    head.rows = 0
    found = FeatureClip().fit(Batch(None, labels, features), head)
    step, c = found.report.steps[0], float(found.threshold)
    assert head.rows <= 10 * rows + 64
    assert step.head_passes <= 10
    assert step.loss_after < step.loss_before - 0.01
    after = score64("nll", head(features.clamp(-c, c)).double().numpy(), labels)
    assert step.loss_after == pytest.approx(after, abs=1e-6)


@pytest.mark.parametrize("recipe", ["clip", "clip | temperature", "clip(min_accuracy=1.0)"])
@pytest.mark.parametrize(
    ("n", "d", "k", "copies_of", "plain"),
    [
        (1, 4, 3, None, False),
        (64, 20, 5, None, False),
        (100, 1024, 300, None, True),  # linear, and too large to look everywhere
        (500, 50, 7, None, False),
        (2500, 16, 4, None, True),
        (3000, 20, 5, 2, False),  # two rows over and over: content picks all of them or none
    ],
)
@pytest.mark.filterwarnings("ignore::featcal.CalibrationWarning")
def test_never_more_than_ten_passes(made, either, recipe, n, d, k, copies_of, plain):
    world = made(n=n, d=d, k=k)
    if copies_of:
        world.features = world.features[:copies_of][torch.arange(n) % copies_of]
    head = world.head if plain else Watched(world.head)
    found = parse(recipe).fit(as_batch(world), head)
    assert found.report.steps[0].head_passes <= 10
    assert found.report.loss_after <= found.report.loss_before + 1e-7
    if not plain and len(found.report.steps) == 1:
        assert head.rows - min(n, 64) <= 10 * n  # 64 rows prove the head before the fit


def test_logits_that_do_not_fit_into_memory_cost_one_pass_a_trial(made, walking, monkeypatch):
    monkeypatch.setattr(Through.__init__, "__kwdefaults__", {"features": True, "keep": 1000})
    monkeypatch.setattr(memory, "KEEP_BYTES", 1000)
    world = made(n=3000, d=24, k=5)
    both = parse("clip | temperature").fit(as_batch(world), world.head).report.steps
    clip, temperature = both
    assert clip.head_passes <= 10
    assert clip.details["fitted_with"] is None  # refitting would have cost passes of the head
    assert clip.loss_after < clip.loss_before
    assert temperature.loss_after <= clip.loss_after


@pytest.mark.parametrize(("rows", "factor"), [(200, 1e5), (2500, 1e-3)])
def test_scale_equivariance(made, rows, factor):
    world = made(n=rows, d=16, k=4)
    plain = fitted(world)
    world.features = world.features * factor
    world.head = linear(world.head.weight.detach() / factor, world.head.bias.detach())
    scaled = fitted(world)
    assert float(scaled.threshold) == pytest.approx(float(plain.threshold) * factor, rel=0.01)
    assert scaled.report.loss_after == pytest.approx(plain.report.loss_after, abs=1e-5)


@pytest.mark.parametrize("rows", [400, 2500])
@pytest.mark.parametrize("change", ["huge", "huge negative", "signed, without bias"])
def test_odd_features_end_at_the_best_of_a_grid(made, either, rows, change):
    world = made(n=rows, d=16, k=4, signed="signed" in change)
    if "signed" in change:
        world.head = linear(world.head.weight.detach())
    else:
        world.features[7, 3] = -1e6 if "negative" in change else 1e6
    found = fitted(world)
    c = float(found.threshold)
    grid = log_grid(world.features, 400, decades=4 if "signed" in change else 8)
    assert nll_at(world, c) <= lowest_of(world, grid) + 1e-5
    assert 0.5 < c < 5
    if "signed" in change:
        assert float(found.map_features(world.features).min()) == -c


@pytest.mark.parametrize("rows", [50, 2500])
def test_features_without_a_difference(rows):
    labels, head = torch.arange(rows) % 3, linear(torch.arange(18.0).view(3, 6) / 20)
    silent = FeatureClip().fit(Batch(None, labels, torch.zeros(rows, 6)), head)
    assert silent.report.noop
    assert math.isinf(float(silent.threshold))
    # Labels in equal shares: the best logits are all equal, so the smallest clip is best.
    constant = FeatureClip().fit(Batch(None, labels, torch.full((rows, 6), -1.0)), head)
    assert constant.report.loss_after == pytest.approx(math.log(3), abs=1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows", [200, 2500])
def test_features_and_heads_of_other_types(made, walking, dtype, rows):
    world = made(n=rows, d=16, k=4)
    head, features = linear(world.head.weight.detach(), world.head.bias.detach()), world.features
    head, features = head.to(dtype), features.to(dtype)
    found = FeatureClip().fit(Batch(None, world.labels, features), head)
    with torch.no_grad():
        logits = found(features, head)
    assert logits.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    after = score64("nll", logits.double().numpy(), world.labels)
    assert found.report.loss_after == pytest.approx(after, abs=5e-3)
    assert found.report.loss_after < found.report.loss_before


@pytest.fixture(scope="module")
def too_hot(made):
    """Rows too hot by 3, which a clip can cure only by wiping out what tells the classes apart.

    With (accuracy, NLL) of a scan: once for a size.
    """

    @functools.cache
    def of_size(rows):
        world = made(n=rows, d=16, k=4, knee=1e9, heat=3.0)
        grid = [*log_grid(world.features, 300), math.inf]
        return world, [(accuracy_at(world, c), nll_at(world, c)) for c in grid]

    return of_size


@pytest.mark.parametrize(
    ("rows", "share"), [(400, 0.95), (400, 1.0), (3000, 0.9), (3000, 0.99), (3000, 1.0)]
)
def test_the_guard_is_respected_where_it_binds(too_hot, rows, share, monkeypatch):
    if rows > 2048:
        monkeypatch.setattr(clip_module, "CHEAP", 0)
    world, scores = too_hot(rows)
    found = fitted(world, min_accuracy=share)
    step, c, floor = found.report.steps[0], float(found.threshold), share * accuracy_at(world)
    assert step.head_passes <= 10
    assert accuracy_at(world, c) >= floor - 1e-9
    assert step.details["accuracy_after"] == pytest.approx(accuracy_at(world, c))
    assert nll_at(world, c) <= nll_at(world) + 1e-9
    # No allowed threshold of a scan is better by much: the guard is no excuse to give up.
    best = min(nll for accuracy, nll in scores if accuracy >= floor)
    assert nll_at(world, c) <= best + (1e-6 if rows < 2048 else 0.05)


@pytest.mark.parametrize("rows", [100, 2500])
def test_the_criterion_decides(made, rows):
    world = made(n=rows, d=16, k=4, heat=1.4)
    names = ("nll", "brier", "ece")
    found = {name: fitted(world, criterion=name) for name in names}
    for name in names:
        scores = {
            other: score64(name, logits64(world, float(fit.threshold)), world.labels)
            for other, fit in found.items()
        }
        assert scores[name] <= min(scores.values()) + 1e-6
        details = found[name].report.steps[0].details
        tolerance = 2e-3 if name == "ece" else 1e-6  # one float32 row may change bins
        assert details["criterion_after"] == pytest.approx(scores[name], abs=tolerance)
        assert details["criterion_after"] <= details["criterion_before"]
        assert (details["criterion"], found[name].report.loss) == (name, "nll")


def published(world, criterion="nll", share=0.99):
    """The loop of the paper's code, one threshold at a time, independent of ours."""
    floor, best, chosen = share * accuracy_at(world), math.inf, math.inf
    for step in range(1, 2001):
        z = logits64(world, step * 0.01)
        score = score64(criterion, z, world.labels)
        if score < best and float((z.argmax(1) == np.asarray(world.labels)).mean()) > floor:
            best, chosen = score, step * 0.01
    return chosen


@pytest.mark.parametrize(
    "arguments", [{}, {"min_accuracy": 0.9, "criterion": "ece"}], ids=["as it is", "changed"]
)
def test_reference_is_the_published_loop(made, arguments):
    world = made(n=200, d=12, k=4)
    found = fitted(world, reference=True, **arguments)
    expected = published(
        world, arguments.get("criterion", "nll"), arguments.get("min_accuracy", 0.99)
    )
    assert float(found.threshold) == pytest.approx(expected, abs=1e-6)


def test_reference_without_a_passing_threshold_is_the_identity():
    # Features of size 1e4: every c up to 20 ruins the one sample whose class needs a large one.
    features = torch.tensor([[3e4, 1e4]] * 10 + [[1e4, 3e4]] * 10)
    batch = Batch(None, torch.tensor([0] * 10 + [1] * 10), features)
    found = FeatureClip(reference=True).fit(batch, linear(torch.eye(2) * 1e-4))
    assert math.isinf(float(found.threshold))
    assert found.report.noop


@pytest.mark.parametrize("rows", [400])
def test_data_that_needs_a_temperature_is_not_trapped_by_the_clip(rows):
    """Logits too hot by 3.5; clip alone first ends far from the joint optimum."""
    draw = np.random.default_rng(0)
    features = np.maximum(draw.normal(size=(rows, 32)), 0) * (1 + 2 * draw.random((rows, 1)))
    weight = draw.normal(size=(10, 32)) * 1.5
    logits = features @ weight.T
    labels = (logits / 3.5 + draw.gumbel(size=logits.shape)).argmax(1)
    batch = Batch(None, torch.tensor(labels), torch.tensor(features, dtype=torch.float32))
    joint, greedy = (
        parse("clip | temperature").fit(batch, linear(weight), mode=mode)
        for mode in ("joint", "sequential")
    )
    alone = Temperature().fit(batch, linear(weight)).report.loss_after
    assert joint.report.loss_after <= min(greedy.report.loss_after, alone) + 1e-7
    assert greedy.report.loss_after > alone + 0.05  # the trap is real
    assert float(joint.steps[1].temperature) == pytest.approx(3.5, rel=0.15)
    fitted_with = [fit.report.steps[0].details["fitted_with"] for fit in (joint, greedy)]
    assert fitted_with == ["temperature", None]


@pytest.mark.parametrize("rows", [300, 2500])
def test_joint_against_a_scan_of_both(made, walking, rows):
    world = made(n=rows, d=12, k=4, knee=1.2, heat=2.0)
    found = parse("clip | temperature").fit(as_batch(world), world.head)
    lowest = math.inf
    for c in [*log_grid(world.features, 50, decades=2), math.inf]:
        z = logits64(world, c)
        lowest = min(lowest, *(score64("nll", z / t, world.labels) for t in np.geomspace(1, 4, 30)))
    assert found.report.loss_after <= lowest + 1e-5
    z = logits64(world, float(found.steps[0].threshold)) / float(found.steps[1].temperature)
    assert found.report.loss_after == pytest.approx(score64("nll", z, world.labels), abs=1e-6)


def lowest_joint(features, labels, head, low, high, points=120):
    """The lowest NLL of a grid of thresholds, each with the best temperature, in numpy alone."""
    weight, scores = head.weight.detach().double().numpy(), []
    bias = 0 if head.bias is None else head.bias.detach().double().numpy()
    features, rows = np.asarray(features, np.float64), np.arange(len(labels))
    for c in np.geomspace(low, high, points):
        logits = np.clip(features, -c, c) @ weight.T + bias
        logits -= logits.max(1, keepdims=True)
        true, inverse = logits[rows, labels], 0.6
        for _ in range(8):  # Newton in b = 1/T: the NLL is convex in it
            parts = np.exp(inverse * logits)
            total = parts.sum(1)
            first = (parts * logits).sum(1) / total
            second = (parts * logits**2).sum(1) / total
            score = (np.log(total) - inverse * true).mean()
            inverse -= (first - true).mean() / (second - first**2).mean()
        scores.append(score)
    return min(scores)


@pytest.mark.parametrize("seed", [2, 5, 6])
def test_joint_fits_find_the_best_of_three_valleys(walking, seed):
    """Units that say too much at 5, 16 and 50 and tell the truth at 9 and 28."""
    draw = np.random.default_rng(seed)
    features, weight = np.abs(draw.normal(size=(2500, 24))), draw.normal(size=(5, 24))
    heard = features.copy()
    for size, share, part in (
        (5, 0.1, 0.2),
        (9, 0.06, 1),
        (16, 0.02, 0.3),
        (28, 0.02, 1),
        (50, 0.005, 0.3),
    ):
        rows = np.flatnonzero(draw.random(2500) < share)
        units = draw.integers(24, size=len(rows))
        features[rows, units] = size * (1 + 0.05 * draw.random(len(rows)))
        heard[rows, units] = part * features[rows, units]
    labels = (heard @ weight.T / 1.5 + draw.gumbel(size=(2500, 5))).argmax(1)
    features = torch.tensor(features, dtype=torch.float32)
    found = parse("clip | temperature").fit(
        Batch(None, torch.tensor(labels), features), linear(weight)
    )
    assert found.report.steps[0].head_passes <= 10
    best = lowest_joint(features, labels, linear(weight), 1, 52)
    assert found.report.loss_after <= best + 1e-5


def test_a_shallow_valley_of_a_joint_fit_is_found(demo):
    """Rows of the shipped pack on which a sample sees no valley: 1.5e-3 nats below c = inf."""
    parts = [part for name in ("val", "test") for part in demo.pack.split(name)]
    labels, features = torch.cat([p.labels for p in parts]), torch.cat([p.features for p in parts])
    every = Batch(None, labels, features)
    order = np.random.default_rng((3, 2500)).permutation(len(every))[:2500]
    batch = every.rows(torch.from_numpy(order))
    found = parse("clip | temperature").fit(batch, demo.head)
    best = lowest_joint(batch.features, batch.labels, demo.head, 3.2, 5, 8)
    assert found.report.loss_after <= best + 1e-5
    assert found.report.loss_after < found.report.loss_before - 1e-3


SHUFFLED = ["clip", "clip(criterion='ece')", "clip | temperature"]


def two_ranks(rank, folder, batch, weight, recipes):
    torch.set_num_threads(1)
    fit_module.FEW_NUMBERS = 0  # few rows would all be brought together
    torch_dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2
    )
    mine = batch.rows(slice(700, None) if rank else slice(0, 700))
    found = [fit_all([mine], weight, recipe) for recipe in recipes]
    (folder / f"{rank}.json").write_text(json.dumps(found))
    torch_dist.destroy_process_group()


def fit_all(data, weight, recipe):
    found = parse(recipe).fit(data, linear(weight))
    step = found.report.steps[0]
    return [step.values["threshold"], step.details["criterion_after"], found.report.loss_after]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("walks", [clip_module.MANY, 1, 0])  # 1: it sweeps
def test_order_batches_and_processes_change_nothing(made, monkeypatch, tmp_path, walks):
    """So many activations that not all are looked at for their quantiles."""
    if torch.cuda.is_initialized():
        pytest.skip("a process that has used CUDA cannot be forked")
    if walks:
        monkeypatch.setattr(clip_module, "CHEAP", 0)
        monkeypatch.setattr(clip_module, "MANY", walks)
    world = made(n=2400, d=512 if walks else 96, k=4)
    batch, weight = as_batch(world), world.head.weight.detach()
    order = torch.from_numpy(np.random.default_rng(0).permutation(2400))
    recipes = SHUFFLED if walks else SHUFFLED[:1]
    shuffled, expected = batch.rows(order), [fit_all(batch, weight, one) for one in recipes]
    cut = [shuffled.rows(slice(start, start + 333)) for start in range(0, 2400, 333)]
    ways = [[fit_all(data, weight, one) for one in recipes] for data in (shuffled, cut)]
    args = (tmp_path, shuffled, weight, recipes)
    mp.start_processes(two_ranks, args, nprocs=2, start_method="fork")
    ways += [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for way in ways:
        for found, one in zip(way, expected, strict=True):
            assert found == pytest.approx(one, rel=1e-6)


def test_copies_of_a_few_rows_are_sampled_alike_in_any_order(made, either):
    """Where content picks all rows or none."""
    world = made(n=2500, d=16, k=4)
    world.features = world.features[:7][torch.arange(2500) % 7]
    batch, order = as_batch(world), torch.from_numpy(np.random.default_rng(0).permutation(2500))
    found = [FeatureClip().fit(rows, Watched(world.head)) for rows in (batch, batch.rows(order))]
    assert float(found[0].threshold) == pytest.approx(float(found[1].threshold), rel=1e-6)


@pytest.mark.parametrize("rows", [200, 2500])
def test_an_underconfident_network_is_left_alone(rows):
    draw = np.random.default_rng(1)
    features = np.maximum(draw.normal(size=(rows, 10)), 0)
    weight = draw.normal(size=(4, 10))
    labels = (3 * features @ weight.T + draw.gumbel(size=(rows, 4))).argmax(1)
    batch = Batch(None, torch.tensor(labels), torch.tensor(features, dtype=torch.float32))
    found = FeatureClip().fit(batch, linear(weight))
    step = found.report.steps[0]
    assert found.report.noop
    assert step.values == {"threshold": math.inf}
    assert step.loss_after == step.loss_before
    assert "underconfident" in step.message
    text = json.dumps(found.report.as_json(), allow_nan=False)
    assert json.loads(text)["steps"][0]["threshold"] is None


@pytest.mark.parametrize(("seed", "heavy"), [(0, 1.0), (2, 0.5)])
def test_a_guard_holds_where_the_best_threshold_lies_at_the_far_end(seed, heavy):
    """More rows than are looked at one by one, and heavy tails: against every threshold in turn."""
    draw = torch.Generator().manual_seed(seed)
    head = nn.Linear(64, 40)
    size = (torch.randn(3000, 64, generator=draw) * heavy).exp()
    x = torch.randn(3000, 64, generator=draw).abs() * size
    with torch.no_grad():
        head.weight.copy_(torch.randn(40, 64, generator=draw) / 4)
        head.bias.zero_()
        noise = -torch.rand(3000, 40, generator=draw).log()
        labels = (head(x.clamp(max=float(x.quantile(0.97)))) / 2 - noise.log()).argmax(1)

        def at(c):
            logits = head(x.clamp(-c, c))
            right = (logits.argmax(1) == labels).float().mean()
            return nn.functional.cross_entropy(logits, labels).item(), float(right)

        whole = at(math.inf)
        top = math.log(float(x.max()))
        tried = [at(math.exp(top - 5 * step / 300)) for step in range(300)]
    best = min([loss for loss, right in [*tried, whole] if right >= whole[1]])
    found = FeatureClip(min_accuracy=1.0).fit(Batch(None, labels, x), head)
    assert found.report.loss_after < best + 0.01


def test_a_criterion_that_is_not_the_loss_is_followed_however_far(walking, monkeypatch):
    """Its best threshold may lie far from that of the loss, which the sample is asked for."""
    monkeypatch.setattr(clip_module, "MANY", 0)
    draw = np.random.default_rng(0)
    x = np.abs(draw.standard_t(1.5, size=(8000, 16)))
    weight = draw.normal(size=(100, 16)) * 1.5
    labels = (np.minimum(x, 3) @ weight.T + draw.gumbel(size=(8000, 100))).argmax(1)
    labels[::20] = draw.integers(100, size=400)
    features, head = torch.tensor(x, dtype=torch.float32), linear(weight)
    found = FeatureClip(criterion="brier").fit(Batch(None, torch.tensor(labels), features), head)
    scores = {}
    for c in np.geomspace(0.3, 30, 120):
        with torch.no_grad():
            probs = head(features.clamp(max=float(c))).softmax(1)
        probs[torch.arange(8000), labels] -= 1
        scores[c] = float(probs.square().sum(1).mean())
    assert found.report.steps[0].details["criterion_after"] < min(scores.values()) + 1e-4
