"""What every method promises beside its fit: the identity, files, copies, exports, processes."""

import copy
import pickle
import traceback
from datetime import timedelta
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from contract_cases import CASES, RECIPES, fit, fitted, outputs, same_fit, shared_world

import featcal
from featcal import InputError, parse
from featcal.core import fit as fit_module
from featcal.heads.head import CalibratedHead
from featcal.metrics import Bins, ClassBins, Ordered, Predictions, ProperSums
from forked import ended, started

pytestmark = pytest.mark.usefixtures("few_choices")
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


def shard(batch, rank, layout):
    """A rank's batches."""
    cuts = {"uneven": ((0, 90, 300), (300, 800, 1200)), "small": ((0, 90), (90, 400))}
    cuts |= {"no rows": ((0, 800, 1200), (0, 0)), "no batches": ((0, 800, 1200), ())}
    return [batch.rows(slice(*ends)) for ends in pairwise(cuts[layout][rank])]


def fit_share(world, rank, recipe, mode, layout):
    calibrator, data = parse(recipe), shard(world.batch, rank, layout)
    found = fit(calibrator, data, world.head, mode=mode)
    return {"report": found.report.as_json(), "state": found.outcome().state_dict()}


def summarise_share(world, rank):
    def given(part, kind=torch.float32):
        return Predictions.of(logits=world.logits[part].to(kind), labels=world.labels[part])

    whole, none = given(slice(None)), given(slice(0, 0), torch.float64)
    uneven = given([slice(0, 300), slice(300, None)][rank])
    for mine in (uneven, whole if rank == 0 else none):
        for summary in (Bins, ClassBins, Ordered, ProperSums):
            found = summary.of_predictions(mine).reduced()
            for name in summary.__slots__:
                expected = getattr(summary.of_predictions(whole), name)
                torch.testing.assert_close(getattr(found, name), expected)
    return {}


# Uneven shards for most; of the odd layouts one each, in turn.
ODD = ["small", "no rows", "no batches"]
ONCE = (
    "auto",
    "clip",
    "dirichlet",
    "parameterised",
    "vector",
    "clip(min_accuracy=0.99) | temperature",
)
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

    def work(rank):
        fit_module.FEW_NUMBERS = 0  # few rows would all be brought together
        for number, job in [("metrics", None), *enumerate(jobs)]:
            store = f"file://{folder}/{number}.store"
            dist.init_process_group(
                "gloo", store, rank=rank, world_size=2, timeout=timedelta(seconds=60)
            )
            try:
                found = fit_share(world, rank, *job) if job else summarise_share(world, rank)
            except BaseException:
                found = {"error": traceback.format_exc()}
            dist.destroy_process_group()
            torch.save(found, folder / f"{number}-{rank}.pt")

    ended(started(2, work, folder), folder, longest=900)

    def result(*job):
        number = jobs.index(job) if job else "metrics"
        files = [folder / f"{number}-{rank}.pt" for rank in range(2)]
        return [torch.load(file) if file.exists() else {"error": "it hung"} for file in files]

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
