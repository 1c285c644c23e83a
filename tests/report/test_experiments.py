"""The experiments: a small reproduction, the files and pages kept."""

import json
import re

import numpy as np
import pytest

import featcal
from featcal import metrics
from featcal.data.pack import sha256
from featcal.report.tables import PAPER_METHODS


@pytest.fixture(scope="module")
def layout(imported):
    return imported("paper_tables")


# --- a small reproduction ---


@pytest.fixture(scope="module")
def experiment(imported):
    """The experiment with two quick methods."""
    with pytest.MonkeyPatch.context() as patch:
        module = imported("reproduction")
        few = {name: featcal.METHODS[name] for name in ("clip", "temperature")}
        patch.setattr(module, "METHODS", few)
        patch.setattr(module, "RESAMPLES", 100)
        yield module


@pytest.fixture(scope="module")
def network(made):
    """Arrays of a pack, and of logits alone."""
    world, arrays, logits = made(n=400), {}, {}
    for split, rows in {"val": slice(0, 200), "test": slice(200, 400)}.items():
        arrays[f"{split}_features"] = world.features[rows].numpy()
        logits[f"{split}_logits"] = world.logits[rows].numpy()
        arrays[f"{split}_labels"] = logits[f"{split}_labels"] = world.labels[rows].numpy()
    arrays["weight"], arrays["bias"] = (p.detach().numpy() for p in world.head.parameters())
    return arrays, logits


@pytest.fixture(scope="module")
def results(experiment, network, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    for name, arrays in zip(
        ("cifar10-toy", "toy-ce", "toy-flsd53"), (*network, network[1]), strict=True
    ):
        np.savez(folder / f"{name}.npz", **arrays)
    packs, anchors = sorted(folder.glob("cifar10*")), sorted(folder.glob("toy*"))
    found = experiment.run(packs, anchors)
    return json.loads(json.dumps(found, allow_nan=False))


def test_a_reproduction_can_be_shown_and_holds_what_the_metrics_give(results, network, layout):
    ece = layout.paper_tables()["ece-posthoc"]
    (table,) = (layout.pack_table(pack, "ece") for pack in layout.packs_of(results, ece))
    assert table.title.startswith("cifar10-toy, another network")
    rows = {(row["recipe"], row["mode"]): row for row in results["packs"][0]["results"]}
    alone = {"none", "temperature", "clip", "clip | temperature"}
    assert set(rows) == {(r, "sequential") for r in alone} | {("clip | temperature", "joint")}
    logits = network[1]["test_logits"]
    value = metrics.ece(logits=logits, labels=network[1]["test_labels"])
    none = rows["none", "sequential"]
    assert none["metrics"]["ece"] == pytest.approx(value, abs=1e-5)
    assert none["intervals"]["ece"][0] < none["intervals"]["ece"][1]
    after = rows["clip | temperature", "sequential"]["differences"]
    assert after["ece"]["baseline"] == "temperature"
    for entry in results["replays"]:
        assert layout.paper_tables()[entry["table"]].cell(entry["row"], entry["column"])
    base = next(e for e in results["replays"] if e["column"] == "Original Feature base")
    assert base["forms"]["default"] == pytest.approx(100 * value)
    for row in results["temperatures"]:
        assert row["least"] == pytest.approx(row["most"], rel=1e-4)
        assert row["rest"] < 1e-5


# --- the files that are kept ---


@pytest.fixture(scope="module")
def kept(layout):
    return layout.read_reproduction()


def test_the_kept_reproduction_is_what_the_code_gives_today(kept, layout):
    """Every recipe of the paper; the numbers of the one pack that ships with featcal."""
    methods = list(PAPER_METHODS.values())
    after = [f"clip | {method}" for method in methods if method != "none"]
    for entry in kept["packs"]:
        found = {(row["recipe"], row["mode"]) for row in entry["results"]}
        assert found == {(r, "sequential") for r in [*methods, "clip", *after]} | {
            (recipe, "joint") for recipe in after
        }
    pack = featcal.demo_pack()
    (entry,) = [p for p in kept["packs"] if p["name"] == "cifar100-wrn16x4"]
    found = featcal.compare(pack.split("val"), pack.split("test"), head=pack.head, resamples=0)
    for row in found:
        old = layout.find(entry["results"], row.recipe)["metrics"]
        for metric in ("accuracy", "ece", "nll", "brier"):
            assert row.scores.metrics[metric] == pytest.approx(old[metric], abs=2e-3)


def test_reference_forms_give_the_printed_digits_on_the_papers_logits(kept, layout):
    met = ("TS base", "ETS base", "PTS base", "CTS base")
    entries = [e for e in kept["replays"] if "reference" in e["forms"] and e["column"] in met]
    assert len(entries) == 8
    for entry in entries:
        printed = layout.paper_tables()[entry["table"]].cell(entry["row"], entry["column"])
        assert entry["forms"]["reference"] == pytest.approx(printed["value"], abs=0.02)


@pytest.mark.shared
def test_the_kept_file_is_of_these_files(kept, shared_file):
    for folder in ("packs", "anchors"):
        for entry in kept[folder]:
            assert sha256(shared_file(folder, entry["file"])) == entry["sha256"]


def test_the_grid_makes_every_run_of_the_file(imported):
    grid = imported("train_grid")
    made = {grid.name_of(run) for run in json.loads(grid.RESULTS.read_text())["runs"]}
    assert made == {grid.canonical(run) for run in grid.grid(grid.EPOCHS)}


def test_every_page_shows_what_the_result_files_hold(imported):
    docs = imported("paper_docs")
    for page, parts in docs.pages().items():
        text = page.read_text()
        assert docs.fill(text, parts) == text, "python experiments/paper_docs.py"
        assert text.count("made by experiments/paper_docs.py") == len(parts)
        for file in re.findall(r"\]\((\w[\w-]*\.md)", text):
            assert (page.parent / file).is_file()
