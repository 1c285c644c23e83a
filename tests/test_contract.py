"""What every method promises. A method registered later is tested here without a line."""

import copy
import gc
import json
import os
import pickle
import subprocess
import sys
import weakref
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import featcal
from featcal import METHODS, Batch, InputError, parse
from featcal.core.batch import CHUNK_ROWS
from featcal.heads.head import CalibratedHead

PIPELINES = [
    ("clip | temperature", "joint"),
    ("clip | temperature", "sequential"),
    ("clip(min_accuracy=0.99) | temperature", "joint"),
    ("clip | vector", "joint"),
    ("clip | group(partitions=3)", "joint"),
    ("clip | group(partitions=3, features='clipped')", "sequential"),
    ("temperature | isotonic", "sequential"),
]
CASES = [(name, "joint") for name in sorted(METHODS)] + PIPELINES
RECIPES = list(dict.fromkeys(recipe for recipe, _ in CASES))

every_case = pytest.mark.parametrize(("recipe", "mode"), CASES)
# Where only the machinery around the steps is in question, one joint search stands for the others.
MOST = [case for case in CASES if case[1] != "joint" or "|" not in case[0] or case == PIPELINES[0]]
most_cases = pytest.mark.parametrize(("recipe", "mode"), MOST)
every_recipe = pytest.mark.parametrize("recipe", RECIPES)
# The same fit in another way: coverage has seen every line of it and would only cost time.
seen = pytest.mark.no_cover


def buffers(calibrator):
    return {key: value.clone() for key, value in calibrator.state_dict().items()}


def same_buffers(left, right, **tolerance):
    left, right = buffers(left), buffers(right)
    assert left.keys() == right.keys()
    for key in left:
        torch.testing.assert_close(left[key], right[key], msg=f"{key} differs", **tolerance)


def fit(recipe, data, head=None, *, mode="joint"):
    """Fits a recipe; one that needs training rows is given the fit rows themselves."""
    return refit(recipe if not isinstance(recipe, str) else parse(recipe), data, head, mode=mode)


def refit(calibrator, data, head=None, *, mode="joint"):
    train = data if calibrator.needs_train else None
    return calibrator.fit(data, head, mode=mode, train=train)


def same_fit(found, expected, world, rtol):
    """Single fitted numbers agree to rtol, and whatever was fitted gives the same probabilities."""
    left, right = buffers(found), buffers(expected)
    assert left.keys() == right.keys()
    for key in left:
        if left[key].numel() == right[key].numel() == 1:
            torch.testing.assert_close(left[key], right[key], rtol=rtol, atol=0, msg=key)
    assert found.report.loss_after == pytest.approx(expected.report.loss_after, abs=1e-6)
    ours, theirs = (outputs(c, world.features, world.head).softmax(1) for c in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def nll64(logits, labels):
    return float(F.cross_entropy(logits.double(), labels))


def outputs(calibrator, features, head):
    with torch.no_grad():
        return calibrator(features, head)


@pytest.fixture(scope="module")
def world(made):
    """Enough rows that samples are used, overconfident in both ways: outliers and scale."""
    return made(n=2500, heat=1.6)


@pytest.fixture(scope="module")
def batch(world):
    return Batch(world.logits, world.labels, world.features)


@pytest.fixture(scope="module")
def fitted(world, batch):
    """A fresh copy of the calibrator fitted on the world, fitted once."""
    done = {}

    def get(recipe, mode):
        if (recipe, mode) not in done:
            done[recipe, mode] = fit(recipe, batch, world.head, mode=mode)
        return copy.deepcopy(done[recipe, mode])

    return get


# --- birth -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@every_recipe
def test_a_fresh_calibrator_is_the_identity_to_the_bit(recipe, dtype, world):
    head = copy.deepcopy(world.head).to(dtype)
    features = world.features.to(dtype)
    with torch.no_grad():
        plain = head(features)
    assert torch.equal(outputs(parse(recipe), features, head), plain)
    assert plain.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@every_recipe
def test_narrow_inputs_give_wide_logits_of_the_same_values(recipe, dtype, world):
    head = copy.deepcopy(world.head).to(dtype)
    features = world.features.to(dtype)
    with torch.no_grad():
        plain = head(features)
    found = outputs(parse(recipe), features, head)
    assert plain.dtype == dtype
    assert found.dtype == torch.float32
    assert torch.equal(found, plain.float())


@every_recipe
def test_a_fresh_calibrator_has_no_report_and_no_parameters(recipe):
    calibrator = parse(recipe)
    assert calibrator.report is None
    assert list(calibrator.parameters()) == []


@every_recipe
def test_a_recipe_survives_its_own_repr(recipe):
    once = parse(recipe)
    again = parse(repr(once))
    assert repr(again) == repr(once)
    assert type(again) is type(once)


@every_case
def test_repr_holds_no_fitted_value(recipe, mode, fitted):
    calibrator = fitted(recipe, mode)
    assert repr(calibrator) == repr(parse(recipe))
    assert repr(parse(repr(calibrator))) == repr(calibrator)
    assert repr(calibrator) in str(calibrator)


# --- fit -------------------------------------------------------------------------------------


@every_case
def test_fit_returns_self_and_lowers_the_loss_or_says_noop(recipe, mode, world, batch):
    calibrator = parse(recipe)
    assert refit(calibrator, batch, world.head, mode=mode) is calibrator
    before = nll64(world.logits, world.labels)
    after = nll64(outputs(calibrator, world.features, world.head), world.labels)
    report = calibrator.report
    assert after < before - 1e-3 or report.noop
    assert report.noop == torch.equal(outputs(calibrator, world.features, world.head), world.logits)
    assert report.loss_before == pytest.approx(before, abs=1e-6)
    assert report.loss_after == pytest.approx(after, abs=1e-6)
    assert report.rows == len(world.labels)
    assert report.mode == mode
    assert report.recipe == repr(parse(recipe))


@every_case
def test_report_is_json(recipe, mode, fitted):
    text = json.dumps(fitted(recipe, mode).report.as_json(), allow_nan=False)
    assert json.loads(text)["recipe"] == repr(parse(recipe))


@seen
@most_cases
def test_refit_gives_the_same_values(recipe, mode, world, batch, fitted):
    calibrator = fitted(recipe, mode)
    first = buffers(calibrator)
    loss = calibrator.report.loss_after
    refit(calibrator, batch, world.head, mode=mode)
    assert calibrator.report.loss_after <= loss + 1e-12
    for key, value in buffers(calibrator).items():
        assert torch.equal(value, first[key]), key


@seen
@most_cases
def test_a_fit_forgets_an_earlier_one_on_other_data(recipe, mode, world, batch, made, fitted):
    other = made(n=300, heat=4.0, seed=9)
    earlier = Batch(other.logits, other.labels, other.features)
    calibrator = fit(recipe, earlier, other.head, mode="sequential")  # the quicker way
    refit(calibrator, batch, world.head, mode=mode)
    same_buffers(calibrator, fitted(recipe, mode), rtol=0, atol=0)


@seen
@every_case
def test_order_of_rows_does_not_matter(recipe, mode, world, batch, fitted):
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(3))
    found = fit(recipe, batch.rows(order), world.head, mode=mode)
    same_fit(found, fitted(recipe, mode), world, rtol=1e-5)


@seen
@every_case
def test_split_into_batches_does_not_matter(recipe, mode, world, batch, fitted):
    """Batches of one row, of many, and of none: the first, one between, and the last."""
    edges = [0, 0, 1, 2, 700, 1000, 1000, len(batch), len(batch)]
    parts = [batch.rows(slice(a, b)) for a, b in pairwise(edges)]
    found = fit(recipe, parts, world.head, mode=mode)
    same_fit(found, fitted(recipe, mode), world, rtol=1e-5)


@seen
@every_case
@pytest.mark.parametrize("rows", [60, 700])
def test_small_data_in_any_order_and_split(recipe, mode, rows, made):
    small = made(n=rows, d=6, k=3, heat=2.0)
    whole = Batch(small.logits, small.labels, small.features)
    one = fit(recipe, whole, small.head, mode=mode)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(3))
    mixed = whole.rows(order)
    parts = [mixed.rows(slice(0, 7)), mixed.rows(slice(7, 7)), mixed.rows(slice(7, rows))]
    two = fit(recipe, parts, small.head, mode=mode)
    same_fit(one, two, small, rtol=1e-4)


@seen
@most_cases
def test_stored_logits_are_optional_beside_a_head(recipe, mode, world, batch, fitted):
    bare = Batch(None, world.labels, world.features)
    found = fit(recipe, bare, world.head, mode=mode)
    same_fit(found, fitted(recipe, mode), world, rtol=1e-5)


@every_case
def test_logit_methods_need_no_head(recipe, mode, world, fitted):
    calibrator = parse(recipe)
    only_logits = Batch(world.logits, world.labels)
    if calibrator.needs_features:
        with pytest.raises(InputError, match=r"works on features: pass head="):
            refit(calibrator, only_logits, mode=mode)
        return
    refit(calibrator, only_logits, mode=mode)
    same_buffers(calibrator, fitted(recipe, mode), rtol=0, atol=0)


@every_recipe
def test_feature_methods_refuse_data_without_features(recipe, world):
    calibrator = parse(recipe)
    if not calibrator.needs_features:
        pytest.skip("a logit method")
    with pytest.raises(InputError, match="features"):
        refit(calibrator, Batch(world.logits, world.labels), world.head)


@every_case
def test_accuracy_is_kept_where_it_is_promised(recipe, mode, world, fitted):
    calibrator = fitted(recipe, mode)
    before = world.logits.argmax(1)
    after = outputs(calibrator, world.features, world.head).argmax(1)
    assert torch.equal(before, after) or not calibrator.keeps_accuracy
    kept = sum(before == world.labels) * 0.9
    assert sum(after == world.labels) > kept  # a promise or not, nothing is ruined


# --- the head and the world stay as they were -------------------------------------------------


@seen
@most_cases
def test_fit_touches_neither_head_nor_random_state(recipe, mode, world, batch):
    head = copy.deepcopy(world.head)
    weight, bias = head.weight.clone(), head.bias.clone()
    gradient = torch.full_like(head.weight, 0.5)
    head.weight.grad = gradient.clone()
    random = torch.get_rng_state()
    inputs = [batch.features.clone(), batch.logits.clone(), batch.labels.clone()]
    calibrator = fit(recipe, batch, head, mode=mode)
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(head.weight, weight)
    assert torch.equal(head.bias, bias)
    assert torch.equal(head.weight.grad, gradient)
    assert head.bias.grad is None
    assert head.weight.requires_grad
    assert head.training
    for given, kept in zip(inputs, [batch.features, batch.logits, batch.labels], strict=True):
        assert torch.equal(given, kept)
    assert not any(value.requires_grad for value in calibrator.buffers())


@seen
@most_cases
def test_a_head_in_train_mode_is_fitted_as_in_eval_and_left_in_train(recipe, mode, world):
    inner = nn.Sequential(nn.Dropout(0.5), copy.deepcopy(world.head), nn.Dropout(0.3))
    inner[2].eval()  # a flag that differs from its parent's must survive too
    bare = Batch(None, world.labels, world.features)
    training = fit(recipe, bare, inner, mode=mode)
    assert [module.training for module in inner.modules()] == [True, True, True, False]
    inner.eval()
    evaluated = fit(recipe, bare, inner, mode=mode)
    same_buffers(training, evaluated, rtol=0, atol=0)


@every_case
def test_a_failing_fit_leaves_the_head_in_its_mode(recipe, mode, world):
    head = nn.Sequential(nn.Dropout(0.5), copy.deepcopy(world.head))
    bad = Batch(None, world.labels + 100, world.features)
    with pytest.raises(InputError, match="labels are outside"):
        fit(recipe, bad, head, mode=mode)
    assert head.training
    assert head[0].training


# --- data is streamed -------------------------------------------------------------------------


class Stream:
    """Makes its chunks anew on every pass and watches how many are alive at once."""

    def __init__(self, batch, rows):
        self.batch, self.rows = batch, rows
        self.alive = weakref.WeakSet()
        self.passes = 0
        self.most = 0

    def __iter__(self):
        self.passes += 1
        for start in range(0, len(self.batch), self.rows):
            chunk = self.batch.rows(slice(start, start + self.rows))
            features = chunk.features.clone()
            self.alive.add(features)
            self.most = max(self.most, len(self.alive))
            yield Batch(chunk.logits.clone(), chunk.labels.clone(), features)
            del chunk, features


@most_cases
def test_features_are_streamed_never_gathered(recipe, mode):
    """On data too large for the exact path of clip, which keeps sums of all of it."""
    if any(step.keeps_rows for step in parse(recipe).steps_in_order()):
        pytest.skip("rows are among its fitted values")
    generator = torch.Generator().manual_seed(0)
    d, k = (48, 8) if "clip" in recipe else (16, 4)
    head = nn.Linear(d, k)
    head.weight.data.copy_(torch.randn(k, d, generator=generator))
    head.bias.data.zero_()
    features = torch.randn(6 * CHUNK_ROWS, d, generator=generator).relu()
    with torch.no_grad():
        logits = head(features)
    noise = torch.randn(logits.shape, generator=generator) * logits.std()
    batch = Batch(logits, (logits + noise).argmax(1), features)
    gc.collect()
    stream = Stream(batch, rows=CHUNK_ROWS)
    found = fit(recipe, stream, head, mode=mode)
    assert found.report.loss_after < found.report.loss_before
    assert stream.most <= 3, f"{stream.most} of 6 chunks were alive at once"


@every_recipe
def test_a_generator_is_refused_with_the_remedy(recipe, world, batch):
    with pytest.raises(InputError, match=r"can be read only once.*pass list\(data\)"):
        parse(recipe).fit((part for part in [batch]), world.head, train=batch)


# --- keeping and shipping ---------------------------------------------------------------------


@every_case
def test_save_and_load_are_bitwise(recipe, mode, world, fitted, tmp_path):
    calibrator = fitted(recipe, mode)
    again = featcal.load(featcal.save(calibrator, tmp_path / "c.safetensors"))
    same_buffers(again, calibrator, rtol=0, atol=0)
    assert repr(again) == repr(calibrator)
    assert torch.equal(
        outputs(again, world.features, world.head),
        outputs(calibrator, world.features, world.head),
    )
    assert again.report.as_json() == calibrator.report.as_json()
    assert again.report == calibrator.report


@every_recipe
def test_a_fresh_calibrator_can_be_kept_too(recipe, world, tmp_path):
    again = featcal.load(featcal.save(parse(recipe), tmp_path / "c.safetensors"))
    assert again.report is None
    assert torch.equal(outputs(again, world.features, world.head), world.logits)


@every_case
def test_copies_are_equal_and_independent(recipe, mode, world, fitted):
    calibrator = fitted(recipe, mode)
    expected = outputs(calibrator, world.features, world.head)
    for twin in (copy.deepcopy(calibrator), pickle.loads(pickle.dumps(calibrator))):
        assert torch.equal(outputs(twin, world.features, world.head), expected)
        assert twin.report == calibrator.report
        for value in twin.buffers():
            value.fill_(3.0)
    assert torch.equal(outputs(calibrator, world.features, world.head), expected)


@every_case
def test_dtype_moves(recipe, mode, world, fitted):
    expected = outputs(fitted(recipe, mode), world.features, world.head)
    double = CalibratedHead(copy.deepcopy(world.head), fitted(recipe, mode)).to(torch.float64)
    with torch.no_grad():
        found = double(world.features.double())
    assert found.dtype == torch.float64
    torch.testing.assert_close(found.float(), expected, rtol=1e-4, atol=1e-4)
    half = CalibratedHead(copy.deepcopy(world.head), fitted(recipe, mode)).half()
    with torch.no_grad():
        found = half(world.features.half())
    assert found.dtype == torch.float32
    far = ((found - expected).abs() > 0.05 + 0.02 * expected.abs()).any(1).double().mean()
    steps = half.calibrator.steps_in_order()
    assert far <= (0.01 if any(step.jumps for step in steps) else 0)
    mixed = fitted(recipe, mode).to(torch.float64)  # the calibrator alone was moved
    assert outputs(mixed, world.features, world.head).dtype == torch.float32


@pytest.mark.no_cover  # tracing takes most of an export's time
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@every_case
def test_export_with_a_free_batch_size_equals_eager(recipe, mode, world, fitted):
    calibrator = fitted(recipe, mode)
    head = nn.Linear(24, 5, device="meta")
    head.weight = nn.Parameter(world.head.weight.detach(), requires_grad=False)
    head.bias = nn.Parameter(world.head.bias.detach(), requires_grad=False)
    module = calibrator.wrap(head).eval()
    shapes = ({0: torch.export.Dim("n", min=2)},)
    program = torch.export.export(module, (world.features[:8],), dynamic_shapes=shapes)
    for rows in (2, 8, 333):
        torch.testing.assert_close(
            program.module()(world.features[:rows]),
            outputs(calibrator, world.features[:rows], head),
        )


@every_case
def test_wrap_takes_the_place_of_the_head(recipe, mode, world, fitted):
    calibrator = fitted(recipe, mode)
    expected = outputs(calibrator, world.features, world.head)
    with torch.no_grad():
        assert torch.equal(calibrator.wrap(world.head)(world.features), expected)
        if calibrator.needs_features:
            with pytest.raises(InputError, match="works on features"):
                calibrator.wrap()
        else:
            assert torch.equal(calibrator.wrap()(world.logits), expected)


# --- two processes ----------------------------------------------------------------------------

WORKER = """
import datetime, json, os, sys, time, traceback
import torch
torch.set_num_threads(1)
import torch.distributed as dist
from torch import nn
from featcal import Batch, parse

jobs, arrays, folder = json.loads(sys.argv[1]), torch.load(sys.argv[2]), sys.argv[3]

def shard(rank, layout):
    part = lambda a, b: Batch(
        arrays["logits"][a:b], arrays["labels"][a:b], arrays["features"][a:b])
    n = len(arrays["labels"])
    if layout == "uneven":
        return [part(0, 90), part(90, 300)] if rank == 0 else [part(300, 1000), part(1000, n)]
    if layout == "small":
        return [part(0, 90)] if rank == 0 else [part(90, 400)]
    if rank == 1:
        return [part(0, 0)] if layout == "no rows" else []
    return [part(0, 1000), part(1000, n)]

def fit(number, rank, recipe, mode, layout):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/{number}.store", rank=rank, world_size=2,
        timeout=datetime.timedelta(seconds=60))
    head = nn.Linear(*reversed(arrays["weight"].shape))
    head.load_state_dict({"weight": arrays["weight"], "bias": arrays["bias"]})
    calibrator, data = parse(recipe), shard(rank, layout)
    found = calibrator.fit(data, head, mode=mode, train=data if calibrator.needs_train else None)
    torch.save(found.state_dict(), f"{folder}/{number}-{rank}.pt")
    return {"report": found.report.as_json()}

def child(rank, layout):
    for number, (recipe, mode, wanted) in enumerate(jobs):
        if wanted != layout:
            continue
        try:
            result = fit(number, rank, recipe, mode, layout)
        except BaseException:
            result = {"error": traceback.format_exc()[-1500:]}
        if dist.is_initialized():
            dist.destroy_process_group()
        with open(f"{folder}/{number}-{rank}.json", "w") as file:
            json.dump(result, file)
    os._exit(0)

for layout in dict.fromkeys(job[2] for job in jobs):
    children = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            child(rank, layout)
        children.append(pid)
    deadline = time.monotonic() + 300
    while children and time.monotonic() < deadline:
        children = [pid for pid in children if os.waitpid(pid, os.WNOHANG) == (0, 0)]
        time.sleep(0.01)
    for pid in children:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
"""

LAYOUTS = ["uneven", "small", "no rows", "no batches"]
# Their fits ask the other process hundreds of times, and each time costs a millisecond.
DEAR = ["clip", "density", "dirichlet", "ensemble", "matrix", "parameterised", "vector"]


def layouts_of(number, case):
    """All of them for a method, two in turn for a dear one; pipelines are made of those methods."""
    if case in PIPELINES[1:]:
        return LAYOUTS[:1]
    if case[0] in (*DEAR, PIPELINES[0][0]):
        return [LAYOUTS[0], LAYOUTS[1 + number % 3]]
    return LAYOUTS


SHARED_OUT = [(*case, layout) for n, case in enumerate(CASES) for layout in layouts_of(n, case)]


@pytest.fixture(scope="module")
def two_processes(world, tmp_path_factory, request):
    """Fits every selected case on every layout of shards in two real gloo processes."""
    folder = tmp_path_factory.mktemp("gloo")
    name = test_two_processes_give_the_result_of_one.__name__
    items = [item for item in request.session.items if item.name.startswith(f"{name}[")]
    wanted = [item.callspec.params for item in items]
    jobs = [(one["recipe"], one["mode"], one["layout"]) for one in wanted]
    (folder / "worker.py").write_text(WORKER)
    torch.save(
        {
            "features": world.features,
            "logits": world.logits,
            "labels": world.labels,
            "weight": world.head.weight.detach(),
            "bias": world.head.bias.detach(),
        },
        folder / "arrays.pt",
    )
    subprocess.run(
        [sys.executable, folder / "worker.py", json.dumps(jobs), folder / "arrays.pt", folder],
        check=True,
        timeout=1500,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        cwd=Path(__file__).parent,
    )

    def result(*job):
        number = jobs.index(job)
        ranks = []
        for rank in range(2):
            file = folder / f"{number}-{rank}.json"
            ranks.append(json.loads(file.read_text()) if file.exists() else {"error": "it hung"})
            if "error" not in ranks[-1]:
                ranks[-1]["state"] = torch.load(folder / f"{number}-{rank}.pt")
        return ranks

    return result


@seen
@pytest.mark.parametrize(("recipe", "mode", "layout"), SHARED_OUT)
def test_two_processes_give_the_result_of_one(
    recipe, mode, layout, two_processes, world, batch, fitted
):
    ranks = two_processes(recipe, mode, layout)
    errors = [rank["error"] for rank in ranks if "error" in rank]
    assert not errors, "\n".join(errors)
    one = fitted(recipe, mode)
    if layout == "small":
        one = fit(recipe, batch.rows(slice(0, 400)), world.head, mode=mode)
    states = [rank["state"] for rank in ranks]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    both = parse(recipe)
    both.load_state_dict(states[0])
    both.report = one.report
    same_fit(both, one, world, rtol=1e-4)
    for rank in ranks:
        assert rank["report"]["rows"] == one.report.rows
        assert rank["report"]["loss_after"] == pytest.approx(one.report.loss_after, abs=1e-6)
        passes = [step["head_passes"] for step in rank["report"]["steps"]]
        assert passes == [step.head_passes for step in one.report.steps]
