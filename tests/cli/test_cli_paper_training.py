"""featcal paper beside networks of our own training, in every form; the numbers are made up."""

import csv
import io
import json
import re

import pytest
from cli_cases import done, encoded, featcal, refused
from made_training import content, written

from featcal.cli import paper as command
from featcal.report.paper import Ours, paper_table

EMPTY = {"replays": [], "packs": [], "beside": []}
REPLAY = {
    "table": "train-time",
    **{"row": "CIFAR-10 ResNet-50", "column": "Cross Entropy base"},
    "forms": {"default": 4.35},
}


@pytest.fixture
def results(tmp_path):
    """A folder with networks of our training and nothing else."""
    return written(tmp_path)


def lines_of(text):
    return list(csv.DictReader(io.StringIO(text)))


def test_a_folder_with_either_file_will_do(results):
    alone = done("paper", "train-time", "--results", results).out
    assert "our own networks" in alone
    assert "from the paper's own logits" not in alone
    (results / "reproduction.json").write_text(json.dumps({**EMPTY, "replays": [REPLAY]}))
    both = done("paper", "train-time", "--results", results).out
    assert "our own networks" in both
    assert "from the paper's own logits" in both
    (results / "training.json").unlink()
    assert "our own networks" not in done("paper", "train-time", "--results", results).out


def test_a_folder_with_neither_is_refused(tmp_path):
    said = refused("paper", "train-time", "--results", tmp_path)
    assert "holds no reproduction.json and no training.json" in said


def test_a_broken_file_is_refused_even_for_a_table_that_does_not_need_it(results):
    (results / "training.json").write_text('{"runs": [{}], "layers": []}')
    assert "train_grid.py" in refused("paper", "entropy", "--results", results)


def test_tables_for_people(results):
    said = done("paper", "train-time", "--results", results).out
    assert "0.70 (0.981)▼" in said
    assert "4.29 ± 0.10" in said
    assert "40 epochs, the paper's have 350" in " ".join(said.split())
    assert "further losses" in said
    assert "clip beside a temperature" in said
    assert command.NONE_OF_OURS not in said
    assert "clip after" in done("paper", "accuracy", "--results", results).out
    layers = done("paper", "layers", "--results", results).out
    assert re.search(r"antepenultimate +│ +layer3 │ +0\.352 │ +4\.42 │ +94\.95 │", layers)


def test_markdown_has_the_notes_under_each_table(results):
    said = done("paper", "train-time", "--results", results, "--format", "markdown").out
    assert "| CIFAR-10 WRN-16-4 [2] | 4.29 ± 0.10 |" in said
    assert said.count("\n- [made] experiments/train_grid.py; device NVIDIA H200") == 5
    assert "clip \\| temperature" in said


def test_csv_names_where_a_value_comes_from(results):
    lines = lines_of(done("paper", "train-time", "--results", results, "--format", "csv").out)
    ours = [line for line in lines if line["source"] != "paper"]
    assert len(ours) == 4 * len(content()["runs"])
    assert ours[1]["source"] == "our cifar10 wrn16x4, 40 epochs, seed 1"
    assert (ours[1]["threshold"], ours[1]["arrow"]) == ("0.245", "down")
    assert float(ours[1]["value"]) == pytest.approx(1.39667, abs=1e-4)
    layers = lines_of(done("paper", "layers", "--results", results, "--format", "csv").out)
    assert layers[-1]["source"] == "our cifar10 resnet50, ce, seed 1"
    assert layers[-1]["threshold"] == "inf"


def test_json_has_fractions(results):
    found = done("paper", "train-time", "--results", results, "--json").json["ours"]
    assert found["packs"] == []
    assert found["training"]["runs"][0]["results"][0]["metrics"]["ece"] == 0.0419
    every = done("paper", "--all", "--results", results, "--json").json["tables"]
    counts = {table["name"]: len(table["ours"]["training"]["runs"]) for table in every}
    assert {name for name, count in counts.items() if count} == {"train-time", "accuracy"}


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
@pytest.mark.parametrize("form", ["table", "markdown"])
def test_any_encoding_gets_signs_it_has(results, monkeypatch, encoding, form):
    chosen = ("--results", results, "--format", form)
    said = encoded(monkeypatch, encoding, "paper", "train-time", *chosen)
    assert "4.29 +- 0.10" in said or (encoding != "ascii" and "4.29 ± 0.10" in said)
    assert "0.70 (0.981)v" in said


@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_terminal_cuts_nothing(results, monkeypatch, width):
    monkeypatch.setattr(command.tables, "PIPE_WIDTH", width)
    ran = featcal("paper", "train-time", "--results", results)
    boxes = [line for line in ran.out.splitlines() if line.startswith(("│", "┃", "┏", "└"))]
    assert max(map(len, boxes)) <= width
    assert "…" not in ran.out
    for grid in Ours.read(results).beside(paper_table("train-time")):
        for cell in (cell for row in grid.rows for cell in row):
            assert cell in ran.out
