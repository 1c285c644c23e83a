"""The experiments: runs laid out as tables, a small reproduction, the files and pages kept."""

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


# --- runs laid out as tables; every number is made up ---

RECIPE = {
    **{"epochs": 40, "batch": 128, "optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "warmup": 0},
    **{"schedule": "steps", "drops": [0.5, 0.75], "clip_norm": None, "augment": True},
}


def scored(recipe, ece, c=0.245, *, against=None, verdict="better"):
    """The scores of a recipe, with a paired difference from another."""
    delta = {"better": -0.01, "worse": 0.01}.get(verdict, -0.001)
    difference = {"baseline": against, "delta": delta, "verdict": verdict}
    return {
        **{"recipe": recipe, "mode": "sequential"},
        "metrics": {"accuracy": 0.9312, "ece": ece, "nll": 5 * ece + 0.1},
        "intervals": {"ece": [ece - 0.002, ece + 0.003]},
        "differences": {"ece": difference, "nll": difference} if against else {},
        "fit": {"steps": [{"threshold": c}]},
    }


def run(loss, ece, c=0.245, *, seed=1):
    """A trained network with its four recipes; without a threshold the clip changes nothing."""
    verdict = "undecided" if c is None else "better"
    return {
        **{"dataset": "cifar10", "network": "wrn16x4", "loss": loss, "seed": seed},
        "recipe": RECIPE,
        **{"precision": "bfloat16", "test_norm": "matched"},
        "rows": {"train": 45000, "val": 5000, "test": 10000},
        "results": [
            scored("none", ece),
            scored("clip", ece if c is None else ece / 3, c, against="none", verdict=verdict),
            scored("temperature", ece / 4),
            scored("clip | temperature", ece / 5, c, against="temperature", verdict="undecided"),
        ],
    }


def training(*runs):
    return {"runs": list(runs), "layers": [], "hardware": {"device": "H200"}}


def cell(table, row, heading):
    (line,) = [cells for cells in table.rows if cells[0].startswith(row)]
    return line[table.headings.index(heading)]


def test_seeds_are_a_mean_and_their_range_and_an_arrow_needs_all_of_them(layout):
    runs = run("ce", 0.0419, 0.245), run("ce", 0.0439, 0.255, seed=2), run("brier", 0.02, None)
    table = layout.loss_tables(training(*runs), layout.paper_tables()["train-time"])[0]
    assert cell(table, "CIFAR-10 WRN-16-4", "Cross Entropy\nbase") == "4.29 ± 0.10"
    assert cell(table, "CIFAR-10 WRN-16-4", "Cross Entropy\n+clip (c)") == "1.43 ± 0.03 (0.25)▼"
    assert cell(table, "CIFAR-10 WRN-16-4", "Brier Loss\n+clip (c)") == "2.00 (no-op)"
    assert cell(table, "CIFAR-10 WRN-16-4", "MMCE\nbase") == "-"
    notes = dict(table.notes)
    assert notes["1"].startswith("40 epochs, the paper's have 350; batch 128, ")
    assert "gradients not clipped, images shifted and mirrored; bfloat16" in notes["1"]
    assert set(notes) == {"1", "losses", "±", "▼ ▲", "no-op", "-", "made"}
    better, worse, undecided = (
        scored("clip", 0.01, against="none", verdict=v) for v in ("better", "worse", "undecided")
    )
    assert layout.agreed_arrow([better, better], "ece") == "▼"
    assert layout.agreed_arrow([better, undecided], "ece") == ""
    assert layout.agreed_arrow([better, worse], "ece") == ""
    other = scored("clip", 0.01, against="temperature")
    assert (layout.direction(other, "ece"), layout.agreed_arrow([other], "ece")) == ("down", "")
    some = [scored("clip", 0.02, 0.5), scored("clip", 0.02, None)]
    assert layout.clipped(some, "ece") == "2.00 ± 0.00 (0.5/-)"


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


def test_the_pictures_are_those_of_the_result_file(imported, layout, tmp_path):
    docs, results = imported("paper_docs"), layout.read_training()
    docs.draw_losses(results, tmp_path / "losses.svg")
    docs.draw_epochs(results, tmp_path / "epochs.svg")
    for name in ("losses", "epochs"):
        text = (tmp_path / f"{name}.svg").read_text()
        kept = (docs.IMAGES / f"training-{name}.svg").read_text()
        assert len(text.splitlines()) == len(kept.splitlines())
        assert text.count("<use") == kept.count("<use")


def test_what_the_pages_say_of_training_is_what_the_file_holds(layout):
    """docs/training-results.md, beside a temperature, and docs/losses.md on MMCE."""
    runs = [layout.Run(entry) for entry in layout.read_training()["runs"]]
    known = {}
    for run in (run for run in runs if run.loss == "ce"):
        clip, temperature = (run.row(name)["metrics"] for name in ("clip", "temperature"))
        assert temperature["ece"] < clip["ece"]
        assert temperature["nll"] < clip["nll"]
        both = run.row("clip | temperature")
        found = (layout.direction(both, metric, "temperature") for metric in ("ece", "nll"))
        known.setdefault(run.content["dataset"], []).append(tuple(found))
    assert set(known["cifar100"]) == {("down", "up")}
    assert [ece for ece, _ in known["cifar10"]].count("down") == 0
    assert [nll for _, nll in known["cifar10"]].count("up") == 7
    assert len(known["cifar10"]) == 10
    forms = {}
    for run in runs:
        of_network = forms.setdefault(run.network, {})
        of_network.setdefault(run.loss, []).append(run.row("none")["metrics"])
    published = "mmce(variant='weighted', form='published')"
    forms = [found for found in forms.values() if published in found]
    assert len(forms) == 3
    for found in forms:
        highest = max(one["ece"] for one in found[published])
        assert highest < min(one["ece"] for one in found["ce"])
        weighted = found["mmce(variant='weighted')"][0]["accuracy"]
        assert weighted < found["ce"][0]["accuracy"] - 0.05
    assert sum(found["mmce"][0]["ece"] > found["ce"][0]["ece"] for found in forms) == 2
