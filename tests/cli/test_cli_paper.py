"""featcal paper: every form, at any width, in any encoding."""

import csv
import io
import json
import re

import pytest
from cli_cases import done, encoded, featcal, refused

from featcal.cli import app
from featcal.paper import read_paper

TABLES = read_paper()


def lines_of(text):
    return list(csv.DictReader(io.StringIO(text)))


def test_the_list_in_every_form():
    said = done("paper").out
    for name, table in TABLES.items():
        line = next(x for x in said.splitlines() if f" {name} " in x)
        facts = table.body["number"], len(table.body["cells"]), table.faulty
        assert tuple(int(x) for x in re.findall(r"│ +(\d+) ", line)) == facts
    found = done("paper", "--json").json["tables"]
    assert [table["name"] for table in found] == list(TABLES)
    assert [x["name"] for x in lines_of(done("paper", "--format", "csv").out)] == list(TABLES)
    assert len(done("paper", "--format", "markdown").out.splitlines()) == 2 + len(TABLES)


def test_all_tables_with_every_cell_and_footnote_cut_nowhere(monkeypatch):
    monkeypatch.setattr(app, "PIPE_WIDTH", 80)
    ran = featcal("paper", "--all")
    boxes = [line for line in ran.out.splitlines() if line.startswith(("│", "┃", "┏", "└"))]
    assert max(map(len, boxes)) <= 80
    assert "…" not in ran.out
    said = " ".join(ran.out.split())
    for table in TABLES.values():
        for shown in table.shown:
            assert all(cell.replace("**", "") in ran.out for row in shown.rows for cell in row[1:])
            assert all(text in said for _, text in shown.notes)


def test_all_tables_for_programs():
    found = done("paper", "--all", "--json").json["tables"]
    assert [table["name"] for table in found] == list(TABLES)
    ours = found[1]["ours"]
    assert (len(ours["packs"]), ours["training"]["runs"]) == (5, [])
    runs = {table["name"] for table in found if table["ours"]["training"]["runs"]}
    assert runs == {"train-time", "accuracy", "adaece-posthoc"}
    lines = lines_of(done("paper", "--all", "--format", "csv").out)
    assert sum(line["source"] == "paper" for line in lines) == 424
    markdown = done("paper", "--all", "--format", "markdown").out
    assert markdown.count("\n|---|") == sum(len(table.shown) for table in TABLES.values())
    assert "- [a] " in markdown


def test_one_table_for_programs():
    found = done("paper", "ece-posthoc", "--json").json
    cell = next(c for c in found["cells"] if c["column"] == "Group Calibration +ours")
    assert (cell["value"], cell["arrow"], cell["bold"]) == (0.49, "▼", True)
    known = {mark["id"]: mark for mark in found["marks"]}
    assert {mark for c in found["cells"] for mark in c["marks"]} == set(known)
    assert set(known["one-run"]) == {"id", "kind", "evidence", "sentence", "instead"}
    layers = lines_of(done("paper", "layers", "--format", "csv").out)
    assert (layers[2]["value"], layers[2]["threshold"]) == ("1.21", "4.98")
    ours = next(line for line in layers if line["source"].startswith("our cifar10 resnet50"))
    first = TABLES["layers"].body["ours"]["training"]["layers"][0]["rows"][0]
    assert ours["row"] == first["label"] == "no clipping"
    assert float(ours["value"]) == pytest.approx(100 * first["metrics"]["ece"])


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
@pytest.mark.parametrize("form", ["table", "markdown", "csv", "json"])
def test_any_encoding_gets_signs_it_has(monkeypatch, encoding, form):
    text = encoded(monkeypatch, encoding, "paper", "train-time", "--format", form)
    if form in ("table", "markdown"):
        sign = "[+]-" if encoding == "ascii" else "(?:±|[+]-)"
        assert re.search(rf"\d\.\d\d {sign} 0\.\d\d \([\d.]+\)v", text)


def test_other_results_and_refusals(tmp_path):
    assert "choose one of entropy, ece-posthoc" in refused("paper", "table1")
    assert "contradict" in refused("paper", "vit", "--all")
    assert "contradict" in refused("paper", "vit", "--json", "--format", "csv")
    assert "is not one of" in refused("paper", "--format", "latex")
    assert "experiments/paper_tables.py" in refused("paper", "vit", "--results", tmp_path)
    (tmp_path / "paper.json").write_text('{"tables": [{}]}')
    assert "cannot be read" in refused("paper", "vit", "--results", tmp_path)
    body = {**TABLES["vit"].body, "ours": {"packs": [], "training": {"runs": []}}}
    entry = {"json": body, "faulty": 6, "csv": ["a line"], "shown": []}
    (tmp_path / "paper.json").write_text(json.dumps({"tables": [entry], "packs": [], "runs": []}))
    said = done("paper", "vit", "--results", tmp_path, "--format", "csv").out
    assert said.splitlines()[1:] == ["a line"]
