"""featcal paper: every form, beside results of ours and without them."""

import csv
import io
import json
import re

import pytest
from cli_cases import done, encoded, featcal, refused

from featcal.cli import paper as command
from featcal.report.paper import paper_table, paper_tables

NAMES = [table.name for table in paper_tables()]
METRICS = {"ece": 0.0124, "adaptive_ece": 0.013, "accuracy": 0.9323}


def row(recipe, mode, value, c=0.25):
    steps = [{"name": name, "threshold": c} for name in recipe.split(" | ")]
    return {
        "recipe": recipe,
        "mode": mode,
        "metrics": {**METRICS, "ece": value},
        "intervals": {"ece": [value - 0.002, value + 0.003]},
        "fit": {"steps": steps},
    }


def content():
    """A small file as experiments/reproduction.py writes it."""
    results = [
        row("none", "sequential", 0.0419),
        row("clip", "sequential", 0.0176),
        row("temperature", "sequential", 0.0124),
        row("clip | temperature", "sequential", 0.0115),
        row("clip | temperature", "joint", 0.0131),
    ]
    pack = {"name": "toy-vit", "dataset": "toy", "model": "vit", "rows": {"test": 3000}}
    forms = {"default": 1.373, "reference": 1.389}
    cell = {"row": "CIFAR-10 ResNet-50", "column": "TS base"}
    small = {"title": "toy, another network", "columns": ["Correct", "Wrong"], "digits": 0}
    counts = [{"label": ">0.80", "values": [2735, None]}]
    return {
        "replays": [{"table": "ece-posthoc", **cell, "forms": forms}],
        "packs": [{**pack, "results": results}],
        "beside": [{"table": "counts", **small, "rows": counts}],
    }


@pytest.fixture
def results(tmp_path):
    (tmp_path / "reproduction.json").write_text(json.dumps(content()))
    return tmp_path


@pytest.fixture
def installed(monkeypatch):
    """As where no source checkout is around the package."""
    monkeypatch.setattr(command, "checkout_results", lambda: None)


def lines_of(text):
    return list(csv.DictReader(io.StringIO(text)))


# --- the list --------------------------------------------------------------------------------


def test_the_list_names_every_table_and_counts_its_marked_cells():
    said = done("paper").out
    for table in paper_tables():
        line = next(x for x in said.splitlines() if f" {table.name} " in x)
        assert [int(x) for x in re.findall(r"│ +(\d+) ", line)] == [
            table.number,
            len(list(table)),
            table.faulty,
        ]
    assert "featcal paper NAME" in said


def test_the_list_for_programs():
    found = done("paper", "--json").json["tables"]
    assert [table["name"] for table in found] == NAMES
    assert found[1]["label"] == "table:ece compare with posthoc methods"
    assert done("paper", "--format", "json").json["tables"] == found
    assert [line["name"] for line in lines_of(done("paper", "--format", "csv").out)] == NAMES
    markdown = done("paper", "--format", "markdown").out.splitlines()
    assert len(markdown) == 2 + len(NAMES)


# --- one table -------------------------------------------------------------------------------


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", NAMES)
def test_every_printed_value_is_shown(name):
    said = done("paper", name).out
    for cell in paper_table(name):
        assert cell.printed in said
    for mark in paper_table(name).marks:
        assert mark.sentence in " ".join(said.split())
    assert said.endswith(f"{command.NONE_OF_OURS}\n")
    assert command.NONE_OF_OURS.count(".") == 1


@pytest.mark.usefixtures("installed")
def test_json_holds_every_cell_with_its_marks():
    found = done("paper", "ece-posthoc", "--json").json
    assert found["ours"] is None
    assert len(found["cells"]) == 120
    cell = next(c for c in found["cells"] if c["column"] == "Group Calibration +ours")
    assert (cell["value"], cell["arrow"], cell["bold"]) == (0.49, "▼", True)
    assert "group-fitted-on-test" in cell["marks"]
    known = {mark["id"]: mark for mark in found["marks"]}
    assert {mark for c in found["cells"] for mark in c["marks"]} == set(known)
    assert set(known["one-run"]) == {"id", "kind", "evidence", "sentence", "instead"}


@pytest.mark.usefixtures("installed")
def test_csv_has_one_line_a_value_with_its_digits():
    lines = lines_of(done("paper", "accuracy", "--format", "csv").out)
    assert len(lines) == 30
    assert lines[1]["value"] == "95.0"
    assert {line["source"] for line in lines} == {"paper"}
    layers = lines_of(done("paper", "layers", "--format", "csv").out)
    assert (layers[2]["value"], layers[2]["threshold"]) == ("1.21", "4.98")


@pytest.mark.usefixtures("installed")
def test_all_shows_them_all():
    said = done("paper", "--all").out
    assert [int(n) for n in re.findall(r"^Table (\d),", said, re.M)] == list(range(1, 9))
    assert [t["name"] for t in done("paper", "--all", "--json").json["tables"]] == NAMES
    assert len(lines_of(done("paper", "--all", "--format", "csv").out)) == 424
    markdown = done("paper", "--all", "--format", "markdown").out
    assert markdown.count("\n|---|") == 8
    assert "- [a] " in markdown


# --- beside ours -----------------------------------------------------------------------------


def test_ours_stand_beside_the_paper_and_are_called_other_networks(results):
    said = done("paper", "ece-posthoc", "--results", results).out
    assert re.search(r"TS base +│ +1\.39 │ +1\.37 │ +1\.39 ", said)
    assert "toy-vit, another network (toy, vit): ECE in percent on 3,000 test rows" in said
    assert "clip at c = 0.25" in said
    assert "1.24 [1.04, 1.54]" in said
    assert re.search(r"Original Feature \(none\) │ 4\.19 \[.*│ 1\.76 \[.*│ +│", said)
    assert command.NONE_OF_OURS not in said


def test_ours_for_programs(results):
    found = done("paper", "ece-posthoc", "--results", results, "--json").json["ours"]
    assert found["replays"][0]["forms"]["default"] == 1.373
    assert len(found["packs"][0]["results"]) == 5
    lines = lines_of(done("paper", "ece-posthoc", "--results", results, "--format", "csv").out)
    ours = [line for line in lines if line["source"] != "paper"]
    assert len(ours) == 2 + 5
    joint = next(line for line in ours if line["column"] == "joint")
    assert float(joint["value"]) == pytest.approx(1.31)
    assert float(joint["low"]) == pytest.approx(1.11)


def test_a_metric_without_an_interval_is_shown_without_one(results):
    said = done("paper", "accuracy", "--results", results).out
    assert re.search(r"TS \(temperature\) +│ +93\.23 │", said)
    lines = lines_of(done("paper", "accuracy", "--results", results, "--format", "csv").out)
    assert lines[-1]["low"] == ""


def test_tables_get_the_results_that_belong_to_them(results):
    assert "toy-vit" in done("paper", "vit", "--results", results).out
    counts = done("paper", "counts", "--results", results).out
    assert re.search(r">0\.80 │ +2735 │ +- │", counts)
    assert "toy-vit" not in counts
    for name in ("layers", "train-time"):
        assert "another network" not in done("paper", name, "--results", results).out


def test_a_clip_that_does_nothing_is_called_so(tmp_path):
    made = content()
    made["packs"][0]["results"][1] = row("clip", "sequential", 0.04, c=None)
    (tmp_path / "reproduction.json").write_text(json.dumps(made))
    assert "clip is a no-op" in done("paper", "vit", "--results", tmp_path).out


@pytest.mark.parametrize("file", ["reproduction.json", "training.json"])
def test_only_a_checkout_has_results_of_its_own(monkeypatch, tmp_path, file):
    from featcal.report import paper as ours

    package = tmp_path / "site-packages" / "featcal" / "report" / "ours.py"
    monkeypatch.setattr(ours, "__file__", str(package))
    assert ours.checkout_results() is None
    root = tmp_path
    (root / "results").mkdir()
    (root / "results" / file).write_text("{}")
    assert ours.checkout_results() is None
    (root / "pyproject.toml").write_text("")
    assert ours.checkout_results() == root / "results"
    (root / "results" / file).unlink()
    assert ours.checkout_results() is None


# --- refusals --------------------------------------------------------------------------------


def test_refusals(tmp_path):
    assert "choose one of entropy, ece-posthoc" in refused("paper", "table1")
    assert "contradict" in refused("paper", "vit", "--all")
    assert "make reproduce" in refused("paper", "vit", "--results", tmp_path / "none")
    assert "is not one of" in refused("paper", "--format", "latex")
    assert "contradict" in refused("paper", "vit", "--json", "--format", "csv")


def test_the_list_needs_no_results(tmp_path):
    assert done("paper", "--results", tmp_path).out == done("paper").out


def test_the_file_itself_is_no_folder(results):
    assert "give its folder" in refused("paper", "vit", "--results", results / "reproduction.json")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
@pytest.mark.parametrize("form", ["table", "markdown", "csv", "json"])
def test_any_encoding_gets_arrows_it_has(results, monkeypatch, encoding, form):
    chosen = ("--results", results, "--format", form)
    text = encoded(monkeypatch, encoding, "paper", "ece-posthoc", *chosen)
    assert "0.49" in text
    assert form in ("csv", "json") or re.search(r"0\.49\D{0,2}v", text)


def test_arrows_of_the_paper_are_called_its_own():
    assert "[▼ ▲] As the paper prints them." in done("paper", "vit").out
    assert "As the paper prints them" not in done("paper", "entropy").out


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "cannot be read"),
        ("[]", "lacks"),
        ('{"packs": []}', "lacks replays, beside"),
        ('{"replays": null, "packs": [], "beside": []}', "holds something else"),
        ('{"replays": {"vit": 3}, "packs": [], "beside": []}', "holds something else"),
        ('{"replays": [], "packs": [{"name": "vit"}], "beside": []}', "holds something else"),
    ],
)
def test_results_that_are_not_ours_are_refused(tmp_path, text, why):
    (tmp_path / "reproduction.json").write_text(text)
    assert why in refused("paper", "vit", "--results", tmp_path)


@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_terminal_cuts_no_number(monkeypatch, width):
    monkeypatch.setattr(command.tables, "PIPE_WIDTH", width)
    ran = featcal("paper", "--all")
    assert ran.code == 0
    boxes = [line for line in ran.out.splitlines() if line.startswith(("│", "┃", "┏", "└"))]
    assert max(map(len, boxes)) <= width
    assert "…" not in ran.out
    for table in paper_tables():
        for cell in table:
            assert cell.printed in ran.out
