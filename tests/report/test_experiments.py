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
    recipes = ["none", "temperature", "clip", "clip | temperature"]
    val, test = pack.split("val"), pack.split("test")
    for row in featcal.compare(val, test, recipes, pack.head, resamples=0, mode="sequential"):
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


# --- networks trained as published ---


@pytest.fixture(scope="module")
def published(layout):
    return layout.read_published()


def test_the_list_makes_every_published_network(imported, published):
    script = imported("train_published")
    listed = [run.name for run in script.grid()]
    found = [run["name"] for run in published["runs"]]
    assert found == [name for name in listed if name in found]
    for run in published["runs"]:
        assert run["recipe"]["epochs"] == 350
        assert set(run["results"]) == set(script.NORMS[run["dataset"]])
        for result in run["results"].values():
            recipes = {(row["recipe"], row["mode"]) for row in result["rows"]}
            assert recipes - {("clip | sample", "sequential")} == {
                *((recipe, "sequential") for recipe in script.AGAINST if recipe != "clip | sample"),
                (script.JOINT, "joint"),
            }


def test_sample_from_kept_lengths_is_sample_from_features(imported, made):
    """What --merge computes for a run without features is what the features give."""
    script, world = imported("train_published"), made(n=1200)
    logits = world.logits.float()
    arrays, parts = {}, {"val": slice(0, 600), "test": slice(600, 1200)}
    for part, rows in parts.items():
        features = world.features[rows].float()
        arrays[f"{part}_logits"], arrays[f"{part}_labels"] = (
            logits[rows].numpy(),
            world.labels[rows].numpy(),
        )
        arrays[f"{part}_l1"] = features.abs().sum(1).numpy()
        arrays[f"{part}_l2"] = features.norm(dim=1).numpy()
    k, width = logits.shape[1], world.features.shape[1]
    stand_ins = [script.stand_in(arrays, part, width) for part in parts]
    own = [featcal.Batch(None, world.labels[r], world.features[r].float()) for r in parts.values()]
    recipes = ["none", "temperature", "sample"]
    found = featcal.compare(*stand_ins, recipes, script.stand_in_head(k, width), resamples=0)
    expected = featcal.compare(*own, recipes, world.head.float(), resamples=0)
    for mine, right in zip(found, expected, strict=True):
        for metric in ("accuracy", "ece", "nll"):
            assert mine.scores.metrics[metric] == pytest.approx(
                right.scores.metrics[metric], abs=1e-5
            )
    one, other = (rows[2].calibrator.weights for rows in (found, expected))
    assert one.numpy() == pytest.approx(other.numpy(), abs=1e-4)
    assert len(one) == 5


def test_a_finished_run_joins_those_of_the_file(imported, published, tmp_path):
    """Merged beside what is there, in the order of the list, and in place of itself."""
    script = imported("train_published")
    run = next(run for run in published["runs"] if run["name"] == "cifar10-wrn16x4-brier-1")
    folder, draw = tmp_path / "cifar10-wrn16x4-flsd-1", np.random.default_rng(0)
    folder.mkdir()
    left = {key: value for key, value in run.items() if key != "name"}
    (folder / "run.json").write_text(json.dumps(left))
    logits = 20 * draw.normal(size=(400, 10))
    lengths = draw.uniform(20, 30, 400)
    labels = draw.integers(10, size=400)
    arrays = {"logits": logits, "labels": labels, "l1": lengths, "l2": lengths / 3}
    np.savez(folder / "logits.npz", **{f"test_matched_{key}": of for key, of in arrays.items()})
    made = script.merged([tmp_path], published["runs"])
    names = [run["name"] for run in made["runs"]]
    assert names == [r.name for r in script.grid() if r.name in names]
    assert set(names) == {folder.name, *(run["name"] for run in published["runs"])}
    one, other = (
        [r for r in found["runs"] if r["name"] != folder.name] for found in (made, published)
    )
    assert one == other
    assert script.merged([tmp_path], made["runs"])["runs"] == made["runs"]
    new = made["runs"][names.index(folder.name)]["results"]["matched"]
    p = np.exp(logits - logits.max(1, keepdims=True))
    sure, right = p.max(1) > 0.9 * p.sum(1), logits.argmax(1) == labels
    assert new["means_0.9"]["hce"] == pytest.approx(lengths[sure & ~right].mean() / run["features"])
    (folder / "run.json").write_text(json.dumps({**left, "recipe": {"epochs": 2}}))
    with pytest.raises(SystemExit, match="a trial"):
        script.merged([tmp_path], published["runs"])


def counted(runs, key):
    """How many runs have the signs 1, 0 and -1, test images normalised as the paper's."""
    signs = [key(run["results"].get("reference", run["results"]["matched"])) for run in runs]
    return {sign: signs.count(sign) for sign in (1, 0, -1)}


def test_the_claims_are_what_the_networks_say(imported, published, layout):
    """Counted again from the file, and the words of the page that no table writes."""
    script = imported("paper_claims")
    claims = {c.text: c for c in script.claims(published, layout.read_layers())}
    ce = [run for run in published["runs"] if run["loss"].startswith("ce")]
    others = [run for run in published["runs"] if not run["loss"].startswith("ce")]

    def decided(recipe, metric, pairs=False):
        def sign(result):
            row = next(r for r in result["rows"] if r["recipe"] == recipe)
            found = (result["pairs"][recipe] if pairs else row["differences"])[metric]
            assert found["baseline"] == ("temperature" if pairs else "none")
            low, high = found["interval"]
            return int(high < 0) - int(low > 0)

        return sign

    def above(key):
        def sign(result):
            low, high = result[key]["interval"]
            return int(low > 0) - int(high < 0)

        return sign

    expected = {
        "A clip lowers the ECE after cross-entropy": (ce, decided("clip", "ece")),
        "A clip does better than a temperature in most cases, by ECE": (
            ce,
            decided("clip", "ece", pairs=True),
        ),
        "A clip lowers the ECE after every other loss as well": (others, decided("clip", "ece")),
        "Confident wrong samples have the larger features on average": (ce, above("means_0.9")),
        "Confident wrong samples have the thicker tail of features, the larger sigma": (
            ce,
            above("values_0.9"),
        ),
        "A clip adds more entropy to confident wrong samples than to right ones": (
            ce,
            above("entropy_0.9"),
        ),
    }
    for text, (runs, sign) in expected.items():
        assert counted(runs, sign) == {s: claims[text].signs.count(s) for s in (1, 0, -1)}, text
    assert claims["A clip lowers the ECE after cross-entropy"].mark == "reproduced"
    *_, tail, entropy = expected
    assert (claims[tail].mark, claims[entropy].mark) == ("reversed", "reproduced")
    beside = claims["A clip does better than a temperature in most cases, by ECE"]
    assert {1, -1} <= set(beside.signs)  # it depends on the network
    (first,) = [run for run in ce if run["name"] == "cifar100-wrn16x4-ce-1"]
    curve = {epoch["epoch"]: epoch for epoch in first["curve"]}
    assert curve[150]["accuracy"] > curve[140]["accuracy"]
    assert curve[350]["ece"] > curve[150]["ece"]


def test_every_page_shows_what_the_result_files_hold(imported):
    docs = imported("paper_docs")
    for page, parts in docs.pages().items():
        text = page.read_text()
        assert docs.fill(text, parts) == text, "python experiments/paper_docs.py"
        assert text.count("made by experiments/paper_docs.py") == len(parts)
        for file in re.findall(r"\]\((\w[\w-]*\.md)", text):
            assert (page.parent / file).is_file()


def test_advice_is_tried_on_fresh_rows(imported, monkeypatch):
    advice = imported("advice")
    monkeypatch.setattr(advice, "FRESH", 2000)
    monkeypatch.setattr(advice, "usual_recipes", lambda features: ["none", "temperature"])
    right = advice.tried(("far too sure, 200", 0))
    assert right["pick"] == "temperature"
    assert right["delta"] < 0
    world = advice.World(accuracy=0.9, lead=3.0, spread=1.0)  # scored rows that mislead
    draw = advice.torch.Generator().manual_seed(0)
    fit, test = (world.rows(500, draw) for _ in range(2))
    fresh = advice.World(spread=1.0, lead=3.0).rows(2000, draw)
    monkeypatch.setattr(advice, "split", lambda *_: (fit, test, fresh, None))
    wrong = advice.tried(("far too sure, 200", 0))
    assert wrong["pick"] == "temperature"
    assert wrong["harm"]
    results = {"test": 500, "settings": {"a": advice.summed([right, wrong])}}
    assert "| a | 100% | 50.0% |" in advice.table(results)


def test_advice_goes_on_where_it_was_stopped(imported, monkeypatch, tmp_path):
    """What the journal has is not tried again; the page is of all of it, and the journal goes."""
    advice = imported("advice")
    journal, results, page = (tmp_path / name for name in ("a.jsonl", "a.json", "a.md"))
    old = {"setting": "2 classes, 200", "repetition": 0, "pick": None, "delta": 0.0, "harm": False}
    journal.write_text(json.dumps(old) + "\n")
    marker = advice.START.format("advice")
    page.write_text(f"{marker}\n<!-- end of advice -->\n")
    for name, path in (("RESULTS", results), ("PAGE", page)):
        monkeypatch.setattr(advice, name, path)
    monkeypatch.setattr(advice, "ProcessPoolExecutor", lambda *_, **__: Here())
    tries = []

    def tried(job, folder):
        tries.append(job)
        return {"pick": "temperature", "delta": 0.5, "harm": True}

    monkeypatch.setattr(advice, "tried", tried)
    asked = ("--repetitions", "2", "--only", "2 classes, 200", "--journal", str(journal))
    monkeypatch.setattr("sys.argv", ["advice.py", *asked])
    advice.main()
    assert tries == [("2 classes, 200", 1)]
    assert json.loads(results.read_text())["settings"]["2 classes, 200"]["harm"] == 0.5
    assert "| 2 classes, 200 | 50% | 50.0% |" in page.read_text()
    assert not journal.exists()


class Here:
    """A pool that works in this process."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def map(self, work, jobs):
        return map(work, jobs)
