"""experiments/reproduction.py on small data, and what is kept of a whole run."""

import importlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import featcal
from featcal import metrics
from featcal.data.pack import sha256
from featcal.report.paper import Reproduction, paper_table
from featcal.report.tables import PAPER_METHODS, PAPER_RECIPES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def experiment():
    """The experiment with two quick methods."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "experiments")
        module = importlib.import_module("reproduction")
        few = {name: featcal.METHODS[name] for name in ("clip", "temperature")}
        patch.setattr(module, "METHODS", few)
        patch.setattr(module, "RESAMPLES", 100)
        patch.setattr(importlib.import_module("reproduction_anchors"), "METHODS", few)
        yield module


@pytest.fixture(scope="module")
def network(made):
    """Arrays of a pack, and of logits alone."""
    world = made(n=600)
    cut = {"val": slice(0, 300), "test": slice(300, 600)}
    labels = {f"{s}_labels": world.labels[rows].numpy() for s, rows in cut.items()}
    features = {f"{s}_features": world.features[rows].numpy() for s, rows in cut.items()}
    logits = {f"{s}_logits": world.logits[rows].numpy() for s, rows in cut.items()}
    head = {"weight": world.head.weight.detach().numpy(), "bias": world.head.bias.detach().numpy()}
    return {**labels, **features, **head}, {**labels, **logits}


@pytest.fixture(scope="module")
def results(experiment, network, tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("shared")
    packs = [tmp_path / "cifar10-toy.npz"]
    anchors = tmp_path / "toy-ce.npz", tmp_path / "toy-flsd53.npz"
    for path in packs:
        np.savez(path, **network[0])
    for path in anchors:
        np.savez(path, **network[1])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a module's fixture comes before the one that does it for tests
    found = experiment.run(packs, anchors)
    torch.set_num_threads(threads)
    json.dumps(found, allow_nan=False)
    return json.loads(json.dumps(found))


def test_the_experiment_gives_a_file_that_every_table_can_be_shown_with(results, experiment):
    ours = Reproduction(results)
    ece = paper_table("ece-posthoc")
    assert [grid.title.split(",")[0] for grid in ours.packs(ece)] == ["cifar10-toy"]
    recipes = {(row["recipe"], row["mode"]) for row in results["packs"][0]["results"]}
    assert recipes == {
        ("none", "sequential"),
        ("temperature", "sequential"),
        ("clip", "sequential"),
        ("clip | temperature", "sequential"),
        ("clip | temperature", "joint"),
    }
    assert results["methods_missing"] == ["ensemble", "parameterised", "classwise", "group"]
    assert len(results["packs"][0]["sha256"]) == 64
    assert set(results["versions"]) == {"featcal", "torch", "numpy", "python"}
    assert results["hardware"]["threads"] == 1
    parts = experiment.sections(results)
    assert "Not run, because not there: ensemble" in parts["made"]
    page = experiment.DOCS.read_text()
    filled = experiment.fill(page, parts)
    assert experiment.fill(filled, parts) == filled
    assert all(part in filled for part in parts.values())


def test_pack_rows_agree_with_the_metrics_and_have_intervals(results, network):
    row = next(r for r in results["packs"][0]["results"] if r["recipe"] == "none")
    arrays = network[0]
    logits = arrays["test_features"] @ arrays["weight"].T + arrays["bias"]
    value = metrics.ece(logits=logits, labels=arrays["test_labels"])
    assert row["metrics"]["ece"] == pytest.approx(value, abs=1e-5)
    low, high = row["intervals"]["ece"]
    assert low < high
    assert not row["differences"]
    after = next(r for r in results["packs"][0]["results"] if r["recipe"] == "clip | temperature")
    assert after["differences"]["ece"]["baseline"] == "temperature"
    low, high = row["intervals"]["accuracy"]
    assert low < row["metrics"]["accuracy"] < high


def test_replays_name_cells_of_the_paper(results, network):
    for entry in results["replays"]:
        assert paper_table(entry["table"]).cell(entry["row"], entry["column"]).value
        assert all(value is not None for value in entry["forms"].values())
    (base,) = [e for e in results["replays"] if e["column"] == "Original Feature base"][:1]
    value = metrics.ece(logits=network[1]["test_logits"], labels=network[1]["test_labels"])
    assert base["forms"]["default"] == pytest.approx(100 * value)


def test_a_temperature_is_seen_as_one_temperature(results):
    for row in results["temperatures"]:
        assert row["least"] == pytest.approx(row["most"], rel=1e-4)
        assert row["rest"] < 1e-5


def test_wall_times_are_left_out_and_long_lists_shortened(experiment):
    value = {"seconds": 1.0, "steps": [{"seconds": 2.0, "weights": [[0.5] * 20, [2.0] * 20]}]}
    short = {"count": 40, "least": 0.5, "most": 2.0}
    assert experiment.tidy(value) == {"steps": [{"weights": short}]}


def test_a_fit_on_test_says_so(experiment, network, tmp_path):
    np.savez(tmp_path / "toy.npz", **network[0])
    pack = featcal.import_files([tmp_path / "toy.npz"], tmp_path / "toy")
    found = experiment.leaked("toy", pack, "temperature")
    assert found["fitted_on_test"] is True
    test = experiment.whole(pack.split("test"), pack.head)
    both = featcal.parse("clip | temperature").fit(pack.split("val"), pack.head, mode="sequential")
    honest = featcal.evaluate(test, both, pack.head).metrics
    assert found["on_val"]["nll"] == pytest.approx(honest["nll"])
    assert found["on_test"]["nll"] <= honest["nll"] + 1e-6


def test_the_recipes_are_those_of_compare_paper():
    after = ("clip" if m == "none" else f"clip | {m}" for m in PAPER_METHODS.values())
    assert {*PAPER_METHODS.values(), *after} == set(PAPER_RECIPES)


# --- the file that is kept -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def kept():
    return json.loads((ROOT / "results" / "reproduction.json").read_text())


def test_the_kept_file_holds_every_recipe_of_the_paper(kept):
    methods = [m for m in PAPER_METHODS.values() if m not in kept["methods_missing"]]
    after = [f"clip | {method}" for method in methods if method != "none"]
    for pack in kept["packs"]:
        found = {(row["recipe"], row["mode"]) for row in pack["results"]}
        assert found == {(r, "sequential") for r in [*methods, "clip", *after]} | {
            (recipe, "joint") for recipe in after
        }
        for row in pack["results"]:
            low, high = row["intervals"]["nll"]
            assert low <= row["metrics"]["nll"] <= high


@pytest.mark.shared
def test_the_kept_file_is_of_these_files(kept, shared_file):
    for folder in ("packs", "anchors"):
        for entry in kept[folder]:
            assert sha256(shared_file(folder, entry["file"])) == entry["sha256"]


def test_the_kept_file_is_what_the_code_gives_today(kept):
    """The one pack that ships with featcal."""
    pack, name = featcal.demo_pack(), "cifar100-wrn16x4"
    (entry,) = [p for p in kept["packs"] if p["name"] == name]
    found = featcal.compare(pack.split("val"), pack.split("test"), head=pack.head, resamples=0)
    for row in found:
        (old,) = [
            r for r in entry["results"] if (r["recipe"], r["mode"]) == (row.recipe, "sequential")
        ]
        for metric in ("accuracy", "ece", "nll", "brier"):
            assert row.scores.metrics[metric] == pytest.approx(old["metrics"][metric], abs=2e-3)


MET = ("TS base", "ETS base", "PTS base", "CTS base")


def test_the_paper_is_met_where_its_own_code_is_run_on_its_own_logits(kept):
    """Reference forms give the printed digits; the uncalibrated ECE is printed 0.01 lower."""
    for entry in kept["replays"]:
        printed = paper_table(entry["table"]).cell(entry["row"], entry["column"])
        if "reference" in entry["forms"] and printed.column in MET:
            assert entry["forms"]["reference"] == pytest.approx(printed.value, abs=0.02)
