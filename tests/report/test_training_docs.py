"""The pages about training hold what the result files hold, or say that there is nothing yet."""

import json
import re
import statistics

import made_training
import pytest
import torch

from featcal.report.paper import TrainingRuns, direction, paper_tables


@pytest.fixture(scope="module")
def docs(imported):
    return imported("training_docs")


def shown(docs, page, name):
    text = page.read_text()
    return text.split(docs.START.format(name))[1].split(f"<!-- end of {name} -->")[0].strip()


def test_the_page_shows_what_the_result_file_holds(docs):
    made = (docs.RESULTS / TrainingRuns.file).is_file()
    ours = TrainingRuns.read(docs.RESULTS) if made else TrainingRuns(made_training.content())
    for name, part in docs.sections(ours).items():
        expected = part if made else docs.NOTHING
        assert shown(docs, docs.DOCS, name) == expected, "python experiments/training_docs.py"
    assert docs.DOCS.read_text().count("<!-- end of ") == len(docs.sections(ours))


def test_the_benchmarks_show_what_their_file_holds(docs):
    made = docs.BENCH.is_file()
    results = json.loads(docs.BENCH.read_text()) if made else made_training.bench()
    for name, part in docs.bench_sections(results).items():
        expected = part if made else docs.NOTHING
        assert shown(docs, docs.BENCH_DOCS, name) == expected, "python experiments/training_docs.py"


def test_pages_are_filled_from_the_files_that_are_there(docs, tmp_path, monkeypatch, capsys):
    pages = {"DOCS": docs.DOCS, "BENCH_DOCS": docs.BENCH_DOCS}
    for key, page in pages.items():
        copy = tmp_path / page.name
        copy.write_text(page.read_text())
        monkeypatch.setattr(docs, key, copy)
    monkeypatch.setattr(docs, "RESULTS", tmp_path)
    monkeypatch.setattr(docs, "BENCH", tmp_path / "bench-train.json")
    docs.main()
    assert capsys.readouterr().out == ""
    made_training.written(tmp_path)
    (tmp_path / "bench-train.json").write_text(json.dumps(made_training.bench()))
    docs.main()
    first = docs.DOCS.read_text(), docs.BENCH_DOCS.read_text()
    assert docs.NOTHING not in "".join(first)
    assert "| CIFAR-10 WRN-16-4 [2] | 4.29 ± 0.10 |" in first[0]
    assert "- [made] experiments/train_grid.py" in first[0]
    docs.main()
    assert (docs.DOCS.read_text(), docs.BENCH_DOCS.read_text()) == first


def test_the_grid_without_layers_leaves_their_place_empty(docs):
    parts = docs.sections(TrainingRuns({**made_training.content(), "layers": []}))
    assert parts["layers"] == docs.NOTHING
    assert "| CIFAR-10 WRN-16-4 | 40 | 8 | 9 | seeds 1 and 2 |" in parts["runs"]


def test_the_table_of_speed(docs):
    lines = docs.bench_sections(made_training.bench())["training"].splitlines()
    made = "device NVIDIA H200, precision bfloat16, compiled; torch 2.13.0; compiler combo_kernels"
    assert f"({made})" in lines[0]
    assert lines[-2:] == [
        "| resnet50 | 2.50 (2.40 to 2.60) | 7.20 (7.00 to 7.30) | 6.00 | 2.9 | 2.4 | 61, new |",
        "| vit | 1.00 | 3.00 | - | 3.0 | 3.0 | 3, cached |",
    ]
    curves = docs.bench_sections(made_training.bench())["loss curves"].splitlines()
    assert curves[0].endswith("over the seeds (resnet50 1, 2):")
    assert curves[-2:] == [
        "| resnet50, epoch 2 | 1.200 ± 0.071 | 1.220 ± 0.057 | -0.020 ± 0.010 |",
        "| resnet50, val accuracy, % | 55.0 ± 7.1 | 56.0 ± 8.5 | -1.0 ± 1.0 |",
    ]


def test_curves_made_by_other_means_than_the_seconds_say_so(docs):
    results = made_training.bench()
    same = {key: results[key] for key in ("hardware", "versions", "compiler")}
    results["rows"][0]["made"] = {"curves": same}
    assert "\n- [" not in docs.bench_sections(results)["loss curves"]
    results["rows"][0]["made"] = {"curves": {**same, "compiler": {}}}
    note = docs.bench_sections(results)["loss curves"].splitlines()[-1]
    assert note == "- [resnet50] compiler: defaults; of the seconds above: combo_kernels."


def test_what_the_page_says_of_the_temperature_is_what_the_file_holds(docs):
    """The sentences under "What stands there", one by one."""
    ours = TrainingRuns.read(docs.RESULTS)
    known, close = {}, []
    for run in (run for run in ours.runs if run.loss == "ce"):
        clip, temperature = (run.row(name)["metrics"] for name in ("clip", "temperature"))
        assert temperature["ece"] < clip["ece"]
        close += [run.network] if clip["ece"] - temperature["ece"] < 1e-5 else []
        assert temperature["nll"] < clip["nll"]
        both = run.row("clip | temperature")
        known.setdefault(run.content["dataset"], []).append(
            (direction(both, "ece", "temperature"), direction(both, "nll", "temperature"))
        )
    assert set(known["cifar100"]) == {("down", "up")}
    assert "down" not in {ece for ece, _ in known["cifar10"]}
    assert close == ["CIFAR-10 DenseNet-121"]
    assert len(known["cifar10"]) == 10
    assert sum(nll == "up" for _, nll in known["cifar10"]) == 7
    nll = {
        (run.content["dataset"], run.content["network"], run.loss, run.seed): {
            recipe: run.row(recipe)["metrics"]["nll"] for recipe in ("none", "clip", "temperature")
        }
        for run in ours.runs
    }
    dual = ("cifar10", "wrn16x4", "dual_focal(gamma=2.6)", 2)
    brier = {(dataset, "wrn16x4", "brier", seed) for dataset in known for seed in (1, 2)}
    others = {("cifar10", "resnet50", "mmce(variant='weighted', form='published')", 1), dual}
    gains = {run: of["temperature"] - of["clip"] for run, of in nll.items()}
    assert {run for run, gain in gains.items() if gain > 0} == brier | others
    assert max(gains[run] for run in others) < min(gains[run] for run in brier)
    assert max(gains.values()) < 0.002
    assert nll[dual]["temperature"] > nll[dual]["none"]


def in_standard_errors(curves, loop, seeds):
    """Ours minus another loop by epoch."""
    ours, other = (torch.tensor(curves[name]["losses"])[seeds] for name in ("featcal", loop))
    between = ours - other
    return between.mean(0) / between.std(0) * len(between) ** 0.5


def test_what_the_page_says_of_the_curves_is_what_the_file_holds(docs):
    rows = {row["network"]: row for row in json.loads(docs.BENCH.read_text())["rows"]}
    large, small = (rows[network]["curves"] for network in ("resnet50", "wrn16x4"))
    planned = slice(0, 4)
    assert 1.5 < in_standard_errors(large, "plain bfloat16", planned)[1] < 2
    for loop in ("plain bfloat16", "plain float32"):
        assert in_standard_errors(small, loop, planned)[:6].max() < -2.4
    for curves, hidden in ((large, 0.06), (small, 0.006)):
        epochs = range(len(curves["featcal"]["losses"][0]))
        errors = [docs.apart(curves, "plain bfloat16", epoch).split(" ± ")[1] for epoch in epochs]
        assert 2 * max(map(float, errors)) == pytest.approx(hidden, rel=0.1)
    comes = "featcal, compiler as it comes"
    twice = [statistics.mean(small[name]["accuracies"]) for name in (comes, f"{comes}, again")]
    assert [round(100 * found, 1) for found in twice] == [75.1, 77.0]
    first, *_, last = in_standard_errors(large, comes, slice(None))
    assert first > 2 > 1 > abs(last)


def test_a_loop_made_twice_is_as_far_from_itself_as_from_others(docs):
    """As docs/training-results.md has it."""
    (small,) = (
        row["curves"]
        for row in json.loads(docs.BENCH.read_text())["rows"]
        if row["network"] == "wrn16x4"
    )
    comes = "featcal, compiler as it comes"

    def spread(one, other):
        _, between = docs.differences(small[one], small[other])
        return between.std(0).mean().item()

    itself = spread(comes, f"{comes}, again")
    for loop in ("plain bfloat16", "plain float32"):
        assert itself > spread("featcal", loop)


def test_what_the_page_says_of_the_first_steps_is_what_the_file_holds(docs):
    rows = {row["network"]: row for row in json.loads(docs.BENCH.read_text())["rows"]}
    steps = rows["wrn16x4"]["first_steps"]
    assert len(steps["plain"]) == 20
    assert steps["compiled, graph"] == pytest.approx(steps["plain"], abs=2e-3)
    assert rows["wrn16x4"]["made"]["first_steps"]["compiler"]
    steps = rows["resnet50"]["first_steps"]
    apart = [abs(a - b) for a, b in zip(steps["graph"], steps["plain"], strict=True)]
    assert max(apart[:6]) > 0.03


def test_what_the_page_says_of_chance_is_what_the_file_holds(docs):
    rows = docs.chance(json.loads(docs.BENCH.read_text())).rows
    later, every, planned = (
        {row[0]: float(row[column].partition("p = ")[2]) for row in rows} for column in (1, 2, 3)
    )
    assert len(rows) == 16
    comes = "featcal, compiler as it comes"
    assert min(later.values()) == later[f"resnet50: featcal minus {comes}"] == 0.066
    assert later[f"wrn16x4: featcal minus {comes}"] == 0.325
    plain = ("plain bfloat16", "plain float32")
    for network, told in {"wrn16x4": [0.337, 0.130], "resnet50": [0.666, 0.518]}.items():
        assert [later[f"{network}: featcal minus {loop}"] for loop in plain] == told
    assert later["wrn16x4: plain bfloat16 minus plain float32"] == 0.131
    assert later[f"wrn16x4: {comes} minus {comes}, again"] == 0.723
    assert planned["wrn16x4: featcal minus plain bfloat16"] == 0.005
    assert planned[f"wrn16x4: featcal minus {comes}"] == 0.003
    assert min(p for pair, p in planned.items() if ": featcal minus" not in pair) > 0.3
    assert min(every.values()) == 0.016


def test_curves_are_compared_seed_by_seed_where_both_loops_have_the_seed(docs):
    results = made_training.bench()
    ours = results["rows"][0]["curves"]["featcal"]
    ours["seeds"], ours["losses"] = [2, 3, 1], [*ours["losses"][::-1]]
    ours["losses"].insert(1, [9.0, 9.0])
    ours["accuracies"] = [0.6, 0.9, 0.5]
    lines = docs.bench_sections(results)["loss curves"].splitlines()
    assert lines[0].endswith("over the seeds (resnet50 2, 3, 1):")
    assert lines[-2].endswith(" | -0.020 ± 0.010 |")
    assert lines[-1].endswith(" | -1.0 ± 1.0 |")


def test_what_is_said_of_mmce_is_what_the_file_holds(docs):
    """In docs/losses.md, form by form."""
    found = {}
    for run in TrainingRuns.read(docs.RESULTS).runs:
        if run.seed == 1 and run.loss.startswith(("ce", "mmce")):
            found.setdefault(run.network, {})[run.loss] = run.row("none")["metrics"]
    networks = [forms for forms in found.values() if len(forms) == 4]
    plain, weighted = "mmce", "mmce(variant='weighted')"
    published = "mmce(variant='weighted', form='published')"
    assert len(networks) == 3
    assert sum(forms[plain]["ece"] > forms["ce"]["ece"] for forms in networks) == 2
    assert all(forms[weighted]["accuracy"] < forms["ce"]["accuracy"] - 0.05 for forms in networks)
    ece = {}
    for run in TrainingRuns.read(docs.RESULTS).runs:
        ece.setdefault(run.network, {}).setdefault(run.loss, []).append(run.row("none")["metrics"])
    every = [forms for forms in ece.values() if published in forms]
    assert sum(len(forms[published]) for forms in every) == 5
    for forms in every:
        highest = max(found["ece"] for found in forms[published])
        assert highest < min(found["ece"] for found in forms["ce"])


def test_the_grid_makes_every_run_of_the_file(imported):
    grid = imported("train_grid")
    made = {grid.name_of(run) for run in json.loads(grid.RESULTS.read_text())["runs"]}
    assert made == {grid.canonical(run) for run in grid.grid(grid.EPOCHS)}


def test_what_the_page_says_of_the_compiler_is_what_the_file_holds(docs):
    runs = TrainingRuns.read(docs.RESULTS).runs
    told = {(run.content["network"], run.seed) for run in runs if "compiler" in run.content}
    assert told == {(network, 2) for network in ("resnet110", "densenet121", "wrn26x10")}
    assert all(run.content["compiler"] for run in runs if "compiler" in run.content)


def test_what_the_page_names_exists(docs):
    text = docs.DOCS.read_text()
    names = {table.name for table in paper_tables()}
    assert set(re.findall(r"featcal paper ([a-z][a-z-]+)", text)) <= names
    for file in re.findall(r"\]\((\w[\w-]*\.md)", text):
        assert (docs.DOCS.parent / file).is_file()
