"""compare: rows, paired differences, what it refuses, and the same in several processes."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import featcal
from featcal import Batch, InputError
from featcal.core.progress import listen
from featcal.report import Comparison, compare
from featcal.report.scores import interval

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
    return compare(fit, test, RECIPES, head, resamples=300)


def test_it_is_a_sequence_of_rows(found):
    assert isinstance(found, Comparison)
    assert len(found) == 4
    assert [row.recipe for row in found] == RECIPES
    assert found[0] is found.rows[0]
    assert found[-1].recipe == "clip | temperature"
    assert [row.recipe for row in found[1:3]] == ["temperature", "clip"]
    (one,) = found[:1]
    assert one in found
    assert found.index(one) == 0
    assert min(found, key=lambda row: row.scores.metrics["nll"]).recipe != "none"


def test_scores_are_those_of_evaluate(data, found):
    fit, test, head = data
    for row in found:
        assert row.scores.metrics == featcal.evaluate(test, row.calibrator, head).metrics
        again = featcal.evaluate(test, row.calibrator, head, resamples=300)
        assert row.scores.intervals == again.intervals
    other = compare(fit, test, ["none"], head, resamples=300, seed=1)
    assert other[0].scores.metrics == found[0].scores.metrics
    assert other[0].scores.intervals != found[0].scores.intervals


def test_differences_are_paired(found):
    for index, row in enumerate(found):
        difference = found.difference(index, "nll")
        if index == 0:
            assert difference is None
            continue
        base = found[0].scores
        assert difference.baseline == "none"
        assert difference.delta == row.scores.metrics["nll"] - base.metrics["nll"]
        pairs = row.scores.replicates["nll"] - base.replicates["nll"]
        assert difference.interval == interval(difference.delta, pairs)
        # Pairing is what makes it narrow: the rows are the same.
        apart = row.scores.replicates["nll"] - base.replicates["nll"].roll(1)
        assert pairs.std() < apart.std()


def test_a_recipe_that_changes_nothing_is_undecided(data):
    fit, test, head = data
    twins = compare(fit, test, ["none", "none"], head, resamples=100)
    for name in twins[0].scores.metrics:
        difference = twins.difference(1, name)
        assert difference.delta == 0
        assert difference.verdict in ("undecided", None)


def test_another_baseline(data, found):
    fit, test, head = data
    other = compare(fit, test, RECIPES, head, resamples=300, baseline="clip|temperature")
    assert other.settings["baseline"] == "clip | temperature"
    assert other.against == (3, 3, 3, None)
    there, back = other.difference(0, "nll"), found.difference(3, "nll")
    assert there.delta == -back.delta
    assert there.interval.low == pytest.approx(-back.interval.high)
    assert {there.verdict, back.verdict} in ({"better", "worse"}, {"undecided"})
    assert compare(fit, test, ["clip"], head, resamples=0).against == (None,)
    with pytest.raises(InputError, match="baseline is 'clip', which is not among the recipes"):
        compare(fit, test, ["none"], head, baseline="clip")


def test_without_resamples_there_are_differences_but_no_verdicts(data):
    fit, test, head = data
    plain = compare(fit, test, ["none", "temperature"], head, resamples=0)
    difference = plain.difference(1, "ece")
    assert difference.verdict is None
    assert np.isnan(difference.interval.low)
    body = plain.as_json()
    assert body["rows"][0]["intervals"] is None
    assert body["rows"][1]["differences"]["ece"]["interval"] == [None, None]


def test_json_holds_everything(found):
    body = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert set(body) == {"rows", "settings"}
    settings = body["settings"]
    assert (settings["resamples"], settings["seed"], settings["mode"]) == (300, 0, "sequential")
    assert (settings["folds"], settings["bins"], settings["level"]) == (None, 15, 0.95)
    assert settings["versions"]["featcal"] == featcal.__version__
    first, second = body["rows"][:2]
    keys = {"recipe", "n", "metrics", "intervals", "fit", "seconds", "differences"}
    assert set(first) == set(second) == keys
    assert first["differences"] is None
    assert first["fit"] is None
    assert set(second["differences"]) == set(second["metrics"]) == set(second["intervals"])
    assert set(second["differences"]["ece"]) == {"baseline", "delta", "interval", "verdict"}
    assert second["fit"]["recipe"] == "temperature"
    assert second["seconds"] > 0


def test_sorting_keeps_each_row_with_its_baseline(found):
    by_nll = found.sorted_by("nll")
    values = [row.scores.metrics["nll"] for row in by_nll]
    assert values == sorted(values)
    by_accuracy = found.sorted_by("accuracy")
    values = [row.scores.metrics["accuracy"] for row in by_accuracy]
    assert values == sorted(values, reverse=True)
    assert [row.recipe for row in by_accuracy if row.recipe in ("none", "temperature")] == [
        "none",
        "temperature",
    ]  # equal accuracy: in the order given
    for index, row in enumerate(by_nll):
        old = found.difference(RECIPES.index(row.recipe), "ece")
        assert by_nll.difference(index, "ece") == old


def test_seconds_leave_resampling_out(data):
    fit, test, head = data
    few = test.rows(slice(0, 60))
    plain, dear = (
        compare(fit, few, ["none"], head, resamples=resamples) for resamples in (0, 3000)
    )
    assert dear[0].seconds < plain[0].seconds + 0.5


@pytest.mark.parametrize("wrong", [[], (), "temperature"])
def test_recipes_that_are_no_list(data, wrong):
    fit, test, head = data
    with pytest.raises(InputError, match=r"recipes is .*: pass a list of one recipe or more"):
        compare(fit, test, wrong, head)


def test_what_is_wrong_is_said_before_any_fit(data, monkeypatch):
    fit, test, head = data
    monkeypatch.setattr(featcal.Temperature, "learn", lambda *_: 1 / 0)
    for wrong in ({"bins": 0}, {"resamples": 7}, {"seed": -1}, {"baseline": "clip"}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            compare(fit, test, ["temperature"], head, **wrong)
    with pytest.raises(InputError, match="train="):
        compare(fit, test, ["temperature", "density"], head)


def test_features_are_asked_for_before_any_fit(data):
    fit, test, _ = data
    bare = replace(test, features=None)
    with pytest.raises(InputError, match="clip works on features"):
        compare(fit, bare, ["temperature", "clip"], data[2], resamples=0)


# --- processes --------------------------------------------------------------------------------

WORKER = """
import json, sys
import torch
torch.set_num_threads(1)
import torch.distributed as torch_dist
import featcal
from featcal import Batch

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
"""


def test_two_processes_say_what_one_says(data, tmp_path):
    fit, _, head = data
    some = fit.rows(slice(0, 400))
    held = {"features": some.features, "labels": some.labels, "head": head.state_dict()}
    torch.save(held, tmp_path / "data.pt")
    (tmp_path / "worker.py").write_text(WORKER)
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    running = [
        subprocess.Popen([sys.executable, tmp_path / "worker.py", str(r), tmp_path, w], env=env)
        for w, r in (("1", 0), ("2", 0), ("2", 1))
    ]
    assert [process.wait(timeout=120) for process in running] == [0, 0, 0]
    one, first, second = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("1-0", "2-0", "2-1")
    )
    assert first == second
    assert first["idle"][0]["n"] == 170
    for name in ("parts", "folds"):
        for alone, both in zip(one[name], first[name], strict=True):
            assert alone["n"] == both["n"] == 400
            for metric, value in alone["metrics"].items():
                assert both["metrics"][metric] == pytest.approx(value, abs=2e-6), metric
                assert both["intervals"][metric] == pytest.approx(
                    alone["intervals"][metric], abs=2e-5
                ), metric


def test_resampling_tells_how_far_it_is(data):
    fit, test, head = data
    seen = {}
    with listen(lambda label, done, of: seen.setdefault(label, []).append((done, of))):
        compare(fit, test, ["none", "temperature"], head, resamples=100)
    assert seen["fitting recipes"] == [(0, 2), (1, 2), (2, 2)]
    assert seen["resampling"][-1] == (100, 100)
