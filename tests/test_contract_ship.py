"""What every method promises beside its fit: the identity, files, copies, exports, processes."""

import copy
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from contract_cases import CASES, RECIPES, fit, fitted, outputs, same_fit, shared_world

import featcal
from featcal import InputError, parse
from featcal.heads.head import CalibratedHead

every_case = pytest.mark.parametrize(("recipe", "mode"), CASES)
every_recipe = pytest.mark.parametrize("recipe", RECIPES)


@pytest.fixture(scope="module")
def world():
    return shared_world()


@every_recipe
def test_a_fresh_calibrator_is_the_identity_to_the_bit(recipe, world, tmp_path):
    fresh = parse(recipe)
    assert fresh.report is None
    assert list(fresh.parameters()) == []
    kept = featcal.load(featcal.save(fresh, tmp_path / "c.safetensors"))
    assert kept.report is None
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        head, features = copy.deepcopy(world.head).to(dtype), world.features[:99].to(dtype)
        plain = outputs(lambda x, head: head(x), features, head)
        wide = plain if dtype.itemsize >= 4 else plain.float()
        for calibrator in (fresh, kept):
            found = outputs(calibrator, features, head)
            assert found.dtype == wide.dtype
            assert torch.equal(found, wide)


@every_case
def test_files_and_copies_are_equal_and_independent(recipe, mode, world, tmp_path):
    calibrator = fitted(recipe, mode)
    expected = outputs(calibrator, world.features, world.head)
    kept = featcal.load(featcal.save(calibrator, tmp_path / "c.safetensors"))
    for twin in (kept, copy.deepcopy(calibrator), pickle.loads(pickle.dumps(calibrator))):
        assert torch.equal(outputs(twin, world.features, world.head), expected)
        assert twin.report == calibrator.report
        assert repr(twin.outcome()) == repr(calibrator.outcome())
        for value in twin.buffers():
            value.fill_(3.0)
    assert torch.equal(outputs(calibrator, world.features, world.head), expected)


@every_case
def test_wrap_takes_the_place_of_the_head_in_any_precision(recipe, mode, world):
    calibrator, head = fitted(recipe, mode), world.head
    expected = outputs(calibrator, world.features, head)
    with torch.no_grad():
        assert torch.equal(calibrator.wrap(head)(world.features), expected)
        if calibrator.needs_features:
            with pytest.raises(InputError, match="works on features"):
                calibrator.wrap()
        else:
            assert torch.equal(calibrator.wrap()(world.logits), expected)
        double = CalibratedHead(copy.deepcopy(head), fitted(recipe, mode)).double()
        found = double(world.features.double())
        assert found.dtype == torch.float64
        torch.testing.assert_close(found.float(), expected, rtol=1e-4, atol=1e-4)
        half = CalibratedHead(copy.deepcopy(head), fitted(recipe, mode)).half()
        found = half(world.features.half())
    assert found.dtype == torch.float32
    far = ((found - expected).abs() > 0.05 + 0.02 * expected.abs()).any(1).double().mean()
    steps = calibrator.steps_in_order()
    assert far <= (0.01 if any(step.jumps for step in steps) else 0.001)  # a steep piece
    assert outputs(calibrator.double(), world.features, head).dtype == torch.float32


WORKER = """
import datetime, json, os, sys, time, traceback
import torch
torch.set_num_threads(1)
import torch.distributed as dist
from torch import nn
import featcal.core.fit
from featcal import Batch, parse

jobs, arrays, folder = json.loads(sys.argv[1]), torch.load(sys.argv[2]), sys.argv[3]

def shard(rank, layout):
    part = lambda a, b: Batch(
        arrays["logits"][a:b], arrays["labels"][a:b], arrays["features"][a:b])
    n = len(arrays["labels"])
    if layout == "uneven":
        return [part(0, 90), part(90, 300)] if rank == 0 else [part(300, 800), part(800, n)]
    if layout == "small":
        return [part(0, 90)] if rank == 0 else [part(90, 400)]
    if rank == 1:
        return [part(0, 0)] if layout == "no rows" else []
    return [part(0, 800), part(800, n)]

def fit(number, rank, recipe, mode, layout):
    featcal.core.fit.FEW_NUMBERS = 0  # few rows would all be brought together
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/{number}.store", rank=rank, world_size=2,
        timeout=datetime.timedelta(seconds=60))
    head = nn.Linear(*reversed(arrays["weight"].shape))
    head.load_state_dict({"weight": arrays["weight"], "bias": arrays["bias"]})
    calibrator, data = parse(recipe), shard(rank, layout)
    found = calibrator.fit(data, head, mode=mode, train=data if calibrator.needs_train else None)
    torch.save(found.outcome().state_dict(), f"{folder}/{number}-{rank}.pt")
    return {"report": found.report.as_json()}

def metrics(rank):
    from featcal.metrics import Bins, ClassBins, Ordered, Predictions, ProperSums

    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/metrics.store", rank=rank, world_size=2)
    given = lambda part, kind=torch.float32: Predictions.of(
        logits=arrays["logits"][part].to(kind), labels=arrays["labels"][part])
    whole, none = given(slice(None)), given(slice(0, 0), torch.float64)
    uneven = given([slice(0, 300), slice(300, None)][rank])
    for mine in (uneven, whole if rank == 0 else none):
        for summary in (Bins, ClassBins, Ordered, ProperSums):
            found = summary.of_predictions(mine).reduced()
            for name in summary.__slots__:
                expected = getattr(summary.of_predictions(whole), name)
                torch.testing.assert_close(getattr(found, name), expected)
    return {}

def child(rank):
    for number, job in [("metrics", None), *enumerate(jobs)]:
        try:
            result = fit(number, rank, *job) if job else metrics(rank)
        except BaseException:
            result = {"error": traceback.format_exc()[-1500:]}
        if dist.is_initialized():
            dist.destroy_process_group()
        with open(f"{folder}/{number}-{rank}.json", "w") as file:
            json.dump(result, file)
    os._exit(0)

children = []
for rank in range(2):
    pid = os.fork()
    if pid == 0:
        child(rank)
    children.append(pid)
deadline = time.monotonic() + 900
while children and time.monotonic() < deadline:
    children = [pid for pid in children if os.waitpid(pid, os.WNOHANG) == (0, 0)]
    time.sleep(0.01)
for pid in children:
    os.kill(pid, 9)
    os.waitpid(pid, 0)
"""

# Uneven shards for most; of the odd layouts one each, in turn.
ODD = ["small", "no rows", "no batches"]
ONCE = ("clip", "dirichlet", "parameterised", "vector", "clip(min_accuracy=0.99) | temperature")
SHARED_OUT = [(*case, "uneven") for case in CASES if case[0] not in ONCE]
SHARED_OUT += [(*case, ODD[number % 3]) for number, case in enumerate(CASES) if "|" not in case[0]]


@pytest.fixture(scope="module")
def two_processes(world, tmp_path_factory, request):
    """Fits every selected case on its layouts of shards in two real gloo processes."""
    folder = tmp_path_factory.mktemp("gloo")
    name = test_two_processes_give_the_result_of_one.__name__
    items = [item for item in request.session.items if item.name.startswith(f"{name}[")]
    wanted = [item.callspec.params for item in items]
    jobs = [(one["recipe"], one["mode"], one["layout"]) for one in wanted]
    (folder / "worker.py").write_text(WORKER)
    arrays = {name: getattr(world, name) for name in ("features", "logits", "labels")}
    torch.save({**arrays, **world.head.state_dict()}, folder / "arrays.pt")
    subprocess.run(
        [sys.executable, folder / "worker.py", json.dumps(jobs), folder / "arrays.pt", folder],
        check=True,
        timeout=1500,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        cwd=Path(__file__).parent,
    )

    def result(*job):
        number = jobs.index(job) if job else "metrics"
        ranks = []
        for rank in range(2):
            file = folder / f"{number}-{rank}.json"
            ranks.append(json.loads(file.read_text()) if file.exists() else {"error": "it hung"})
            if job and "error" not in ranks[-1]:
                ranks[-1]["state"] = torch.load(folder / f"{number}-{rank}.pt")
        return ranks

    return result


@pytest.mark.no_cover
@pytest.mark.parametrize(("recipe", "mode", "layout"), SHARED_OUT)
def test_two_processes_give_the_result_of_one(recipe, mode, layout, two_processes, world):
    ranks = two_processes(recipe, mode, layout)
    errors = [rank["error"] for rank in ranks if "error" in rank]
    assert not errors, "\n".join(errors)
    one = fitted(recipe, mode)
    if layout == "small":
        one = fit(recipe, world.batch.rows(slice(0, 400)), world.head, mode=mode)
    one = one.outcome()
    states = [rank["state"] for rank in ranks]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    both = parse(repr(one))
    both.load_state_dict(states[0])
    both.report = one.report
    same_fit(both, one, world, rtol=1e-4)
    for rank in ranks:
        assert rank["report"]["rows"] == one.report.rows
        assert rank["report"]["loss_after"] == pytest.approx(one.report.loss_after, abs=1e-6)
        passes = [step["head_passes"] for step in rank["report"]["steps"]]
        assert passes == [step.head_passes for step in one.report.steps]


@pytest.mark.no_cover
def test_two_processes_make_the_whole_summary_even_when_one_has_no_rows(two_processes):
    assert two_processes() == [{}, {}]
