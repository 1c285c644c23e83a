"""compare: paired differences, shared first steps, cross-fitting, refusals, several processes."""

import json
import os
import runpy
import subprocess
import sys

import numpy as np
import pytest
import torch

import featcal
from featcal import Batch, InputError
from featcal.core.progress import listen
from featcal.core.sample import Folds
from featcal.report import Comparison, compare
from featcal.report.bootstrap import interval

RECIPES = ["none", "temperature", "clip", "clip | temperature"]


@pytest.fixture(scope="module")
def data(made):
    """A fit part, a test part and the head."""
    both = made(n=900, d=12, k=4)
    batch = Batch(both.logits, both.labels, both.features)
    return batch.rows(slice(0, 500)), batch.rows(slice(500, 900)), both.head


@pytest.fixture(scope="module")
def found(data):
    fit, test, head = data
    return compare(fit, test, RECIPES, head, resamples=200)


def test_it_is_a_sequence_of_rows_with_the_scores_of_evaluate(data, found):
    _, test, head = data
    assert isinstance(found, Comparison)
    assert [row.recipe for row in found] == RECIPES
    assert found[-1] is found.rows[3]
    assert [row.recipe for row in found[1:3]] == ["temperature", "clip"]
    for row in found:
        again = featcal.evaluate(test, row.calibrator, head, resamples=200)
        assert row.scores.metrics == again.metrics
        assert row.scores.intervals == again.intervals


def test_differences_are_paired(found):
    base = found[0].scores
    assert found.difference(0, "nll") is None
    for index, row in list(enumerate(found))[1:]:
        difference = found.difference(index, "nll")
        assert difference.baseline == "none"
        assert difference.delta == row.scores.metrics["nll"] - base.metrics["nll"]
        pairs = row.scores.replicates["nll"] - base.replicates["nll"]
        assert difference.interval == interval(difference.delta, pairs)
        # Pairing is what makes it narrow: the rows are the same.
        apart = row.scores.replicates["nll"] - base.replicates["nll"].roll(1)
        assert pairs.std() < apart.std()


def test_another_baseline(data, found):
    fit, test, head = data
    asked = {"resamples": 200, "baseline": " temperature "}
    other = compare(fit, test, ["none", "temperature"], head, **asked)
    assert other.settings["baseline"] == "temperature"
    assert other.against == (1, None)
    there, back = other.difference(0, "nll"), found.difference(1, "nll")
    assert there.delta == -back.delta
    assert there.interval.low == pytest.approx(-back.interval.high)
    assert compare(fit, test, ["temperature"], head, resamples=0).against == (None,)


def test_json_holds_everything(data, found):
    body = json.loads(json.dumps(found.as_json(), allow_nan=False))
    settings, (first, second, *_) = body["settings"], body["rows"]
    assert (settings["resamples"], settings["seed"], settings["mode"]) == (200, 0, "joint")
    assert settings["versions"]["featcal"] == featcal.__version__
    assert first["differences"] is first["fit"] is None
    assert set(second["differences"]) == set(second["metrics"]) == set(second["intervals"])
    assert second["fit"]["recipe"] == "temperature"
    fit, test, head = data
    plain = compare(fit, test, ["none", "temperature"], head, resamples=0).as_json()["rows"]
    assert plain[0]["intervals"] is None
    ece = plain[1]["differences"]["ece"]
    assert (ece["interval"], ece["verdict"]) == ([None, None], None)


def test_sorting_keeps_each_row_with_its_baseline(found):
    by_nll, by_accuracy = found.sorted_by("nll"), found.sorted_by("accuracy")
    values = [row.scores.metrics["nll"] for row in by_nll]
    assert values == sorted(values)
    equal = [row.recipe for row in by_accuracy if row.recipe in ("none", "temperature")]
    assert equal == ["none", "temperature"]  # equal accuracy: in the order given
    for index, row in enumerate(by_nll):
        old = found.difference(RECIPES.index(row.recipe), "ece")
        assert by_nll.difference(index, "ece") == old


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"recipes": "temperature"}, "recipes is .*: pass a list"),
        ({"bins": 0}, "bins"),
        ({"resamples": 7}, "resamples"),
        ({"seed": -1}, "seed"),
        ({"baseline": "clip"}, "baseline is 'clip', which is not among the recipes"),
        ({"recipes": ["temperature", "density"]}, "train="),
        ({"recipes": ["temperature", "clip"], "head": None}, "clip works on features"),
        ({"test_data": None}, r"test_data is None.*folds=5"),
        ({"folds": 5}, "test_data is given"),
        ({"test_data": None, "folds": 501}, "folds is 501 for 500 rows"),
        ({"test_data": None, "folds": 2.5}, "folds is 2.5"),
    ],
)
def test_what_is_wrong_is_said_before_any_fit(data, monkeypatch, wrong, why):
    fit, test, head = data
    monkeypatch.setattr(featcal.Temperature, "learn", lambda *_: 1 / 0)
    given = {"test_data": test, "recipes": ["temperature"], "head": head, **wrong}
    with pytest.raises(InputError, match=why):
        compare(fit, **given)


def test_progress_is_told(data):
    fit, test, head = data
    seen = {}
    with listen(lambda label, done, of: seen.setdefault(label, []).append((done, of))):
        compare(fit, test.rows(slice(0, 60)), ["none", "none"], head, resamples=100)
    assert seen["fitting recipes"] == [(0, 2), (1, 2), (2, 2)]
    assert seen["resampling"][-1] == (100, 100)


# --- a first step that recipes share ---


def timeless(report):
    steps = [{**step, "seconds": 0} for step in report.as_json()["steps"]]
    return {**report.as_json(), "steps": steps, "seconds": 0}


def test_a_shared_first_step_is_fitted_once_and_changes_no_bit(data, monkeypatch):
    fit, test, head = data
    batches = [fit.rows(slice(start, start + 72)) for start in range(0, len(fit), 72)]
    recipes = ["clip", "clip | temperature", "clip | temperature | temperature"]
    calls, learn = [], featcal.FeatureClip.learn
    monkeypatch.setattr(
        featcal.FeatureClip, "learn", lambda self, problem: calls.append(1) or learn(self, problem)
    )
    together = compare(batches, test, recipes, head, mode="sequential", resamples=0)
    assert len(calls) == 1
    for row in together:
        (alone,) = compare(batches, test, [row.recipe], head, mode="sequential", resamples=0)
        assert row.scores.metrics == alone.scores.metrics
        for mine, other in zip(row.calibrator.buffers(), alone.calibrator.buffers(), strict=True):
            assert torch.equal(mine, other)
        assert timeless(row.calibrator.report) == timeless(alone.calibrator.report)
        steps = row.calibrator.steps_in_order()
        assert len(steps) == 1 or all(step.report is None for step in steps)
    firsts = [row.calibrator.steps_in_order()[0] for row in together]
    assert len({id(first) for first in firsts}) == 3  # none shares its values with another
    calls.clear()
    compare(fit, test, ["clip(min_accuracy=0.5)", "clip | temperature"], head, resamples=0)
    assert len(calls) == 2


# --- cross-fitting ---


def test_out_of_fold_scores_are_those_of_the_fits_without_each_fold(data):
    fit, _, head = data
    none, row = compare(fit, None, ["none", "temperature"], head, folds=3, seed=5, resamples=100)
    dealt = Folds.shuffled([fit], 3, 500, seed=5).dealt
    logits = torch.empty(500, 4)
    for fold in range(3):
        inside = dealt == fold
        alone = featcal.parse(row.recipe).fit(fit.rows(~inside), head, mode="sequential")
        mine = row.folds[fold](fit.features[inside], head)
        logits[inside] = alone(fit.features[inside], head)
        assert torch.equal(logits[inside], mine)
    for found, expected in ((row, logits), (none, fit.logits)):
        scores = featcal.evaluate(Batch(expected, fit.labels), resamples=100, seed=5)
        assert found.scores.metrics == pytest.approx(scores.metrics, abs=1e-6)
        low = scores.interval("nll").low
        # The stand-ins for wrong rows go by the network's own logits, which are others there.
        assert found.scores.interval("nll").low == pytest.approx(low, abs=2e-3)
    body = row.as_json()
    assert (body["fit"], len(body["fits"]), row.calibrator) == (None, 3, None)


# --- processes ---

WORKER = """
import json, sys
import torch
torch.set_num_threads(1)
import torch.distributed as torch_dist
import featcal
import featcal.core.fit
from featcal import Batch

featcal.core.fit.FEW_NUMBERS = 0  # few rows would all be brought together
rank, folder, world = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
if world > 1:
    torch_dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
held = torch.load(f"{folder}/data.pt", weights_only=True)
head = torch.nn.Linear(12, 4)
head.load_state_dict(held["head"])
cuts = [0, 170, 400] if world > 1 else [0, 400]  # uneven shards
mine = slice(cuts[rank], cuts[rank + 1])
batch = Batch(None, held["labels"][mine], held["features"][mine])
empty = batch.rows(slice(0, 0)) if rank else batch
result = {}
for name, found in {
    "parts": featcal.compare([batch], [batch], ["none", "temperature"], head, resamples=120),
    "folds": featcal.compare([batch], None, ["none", "temperature"], head, folds=3, resamples=120),
    "idle": featcal.compare([batch], [empty], ["none"], head, resamples=120),
}.items():
    result[name] = [{**row.as_json(), "seconds": 0, "fit": 0, "fits": 0} for row in found]
with open(f"{folder}/{world}-{rank}.json", "w") as file:
    json.dump(result, file)
if world > 1:
    torch_dist.destroy_process_group()
    assert "featcal.analysis" not in sys.modules
    import featcal.analysis
    assert "matplotlib" not in sys.modules
"""


def test_two_processes_say_what_one_says_without_matplotlib(data, tmp_path, monkeypatch):
    fit, _, head = data
    some = fit.rows(slice(0, 400))
    held = {"features": some.features, "labels": some.labels, "head": head.state_dict()}
    torch.save(held, tmp_path / "data.pt")
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    running = [
        subprocess.Popen([sys.executable, worker, str(rank), tmp_path, "2"], env=env)
        for rank in range(2)
    ]
    monkeypatch.setattr(sys, "argv", [str(worker), "0", str(tmp_path), "1"])
    runpy.run_path(str(worker))
    assert [process.wait(timeout=120) for process in running] == [0, 0]
    one, first, second = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("1-0", "2-0", "2-1")
    )
    assert first == second
    assert first["idle"][0]["n"] == 170
    for name in ("parts", "folds"):
        for alone, both in zip(one[name], first[name], strict=True):
            assert alone["n"] == both["n"] == 400
            assert both["metrics"] == pytest.approx(alone["metrics"], abs=2e-6)
            for metric, ends in alone["intervals"].items():
                assert np.allclose(both["intervals"][metric], ends, atol=2e-5), metric
