"""featcal compare: columns, order, formats, files, cross-fitting, terminals of any width."""

import csv
import io
import re

import pytest
from cli_cases import arrays, done, encoded, featcal, packed, refused, tree

from featcal import METHODS, evaluate, parse
from featcal.data import Pack
from featcal.metrics.columns import COLUMNS
from featcal.report.tables import PAPER_METHODS, PAPER_RECIPES

FEW = ("--resamples", "100")


def compare(*args):
    return done("compare", *args, *(() if "--resamples" in args else FEW))


def rows(*args):
    return compare(*args, "--json").json["rows"]


def cells(text):
    """The cells of a table on the terminal, line by line."""
    return [
        [cell.strip() for cell in line.strip("│┃").split("│" if "│" in line else "┃")]
        for line in text.splitlines()
        if line.startswith(("│", "┃"))
    ]


def test_json_is_the_library(pack):
    body = compare(pack, "none", "temperature", "--seed", "7", "--json").json
    settings = body["settings"]
    assert settings["pack"] == "pack"
    assert (settings["fit_split"], settings["test_split"]) == ("val", "test")
    assert (settings["seed"], settings["resamples"], settings["baseline"]) == (7, 100, "none")
    opened = Pack.open(pack)
    scores = evaluate(opened.split("test"), head=opened.head, resamples=100, seed=7)
    assert body["rows"][0]["metrics"] == scores.metrics
    assert body["rows"][0]["intervals"] == {
        name: found.as_json() for name, found in scores.intervals.items()
    }
    difference = body["rows"][1]["differences"]["nll"]
    assert difference["baseline"] == "none"
    assert difference["verdict"] in ("better", "worse", "undecided")
    assert difference["interval"][0] <= difference["delta"] <= difference["interval"][1]


def test_the_table_says_what_json_says(pack):
    """Values above, intervals below them, words where the difference is a finding."""
    text = compare(pack, "none", "temperature", "clip").out
    lines, found = cells(text), rows(pack, "none", "temperature", "clip")
    head, body = lines[0], lines[1:]
    headings = [heading.removesuffix("‡") for heading in head]
    names = [name for name, column in COLUMNS.items() if column.heading in headings]
    assert names[:2] == ["accuracy", "ece"]
    for row, above, below in zip(found, body[::2], body[1::2], strict=True):
        assert above[0] == row["recipe"]
        for name in names:
            at, column = headings.index(COLUMNS[name].heading), COLUMNS[name]
            assert above[at].endswith(column.text(row["metrics"][name]))
            low, high = row["intervals"][name]
            assert below[at] == f"[{column.number(low)}, {column.number(high)}]"
            finding = (row["differences"] or {}).get(name, {"verdict": None})["verdict"]
            assert above[at].startswith(("↓", "↑")) is (finding in ("better", "worse"))
            assert finding not in ("better", "worse") or finding in above[at]
    assert "100 resamples" in text
    assert "paired difference from none" in text
    assert "featcal fit" in text


@pytest.mark.parametrize("joint", [False, True])
def test_metrics_choose_the_columns_and_the_first_one_sorts(pack, joint):
    flags = ["--sequential"] * (not joint)
    text = compare(pack, "--metric", "nll", "--metric", "auroc", *flags).out
    head, *body = cells(text)
    assert head[:3] == ["recipe", "NLL", "AUROC"]
    shown = [line[0] for line in body[::2]]
    found = rows(pack, "--metric", "nll", *flags)
    assert shown == [row["recipe"] for row in found]
    values = [row["metrics"]["nll"] for row in found]
    assert values == sorted(values)
    assert ("jointly" if joint else "step by step") in text


def test_the_order_of_rows(pack):
    given = ["temperature", "none", "clip"]
    assert [row["recipe"] for row in rows(pack, *given)] == given
    kept = rows(pack, *given, "--metric", "ece", "--sort", "given")
    assert [row["recipe"] for row in kept] == given
    found = [row["metrics"]["accuracy"] for row in rows(pack, *given, "--sort", "accuracy")]
    assert found == sorted(found, reverse=True)


def test_another_baseline_is_run_if_it_must_be(pack):
    found = rows(pack, "none", "--baseline", "temperature")
    assert [row["recipe"] for row in found] == ["temperature", "none"]
    assert found[0]["differences"] is None
    assert found[1]["differences"]["ece"]["baseline"] == "temperature"
    assert len(rows(pack, "clip|temperature", "none", "--baseline", "clip | temperature")) == 2
    text = compare(pack, "none", "--baseline", "temperature").out
    assert "paired difference from temperature" in text
    assert "paired" not in compare(pack, "temperature", "clip").out  # none is not among them


def test_cross_fitting_reads_one_split(pack):
    body = compare(pack, "none", "temperature", "--folds", "3", "--json").json
    assert body["settings"]["folds"] == 3
    assert body["settings"]["test_split"] is None
    none, temperature = body["rows"]
    assert none["n"] == 240
    assert [fit["rows"] for fit in temperature["fits"]] == [160, 160, 160]
    text = compare(pack, "temperature", "--folds", "3", "--resamples", "0").out
    assert "3 folds" in text
    assert "240 rows of val" in text
    values = [fit["steps"][0]["temperature"] for fit in temperature["fits"]]
    assert f"T = {min(values):.4g} to {max(values):.4g}" in text


def test_csv(pack):
    text = compare(pack, "none", "temperature", "--format", "csv").out
    lines = list(csv.DictReader(io.StringIO(text)))
    found = {row["recipe"]: row for row in rows(pack, "none", "temperature")}
    assert len(lines) == 2 * len(COLUMNS)
    for line in lines:
        assert float(line["value"]) == found[line["recipe"]]["metrics"][line["metric"]]
    few = compare(pack, "none", "--format", "csv", "--metric", "ece").out
    assert few.splitlines()[1].startswith("none,ece,0.")


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("out.md", "| recipe |"),
        ("out.csv", "recipe,metric,"),
        ("out.tex", "% needs"),
        ("out.json", "{"),
        ("out.txt", "pack: fitted"),
    ],
)
def test_a_file_is_written_in_the_format_its_name_tells(pack, tmp_path, name, start):
    said = compare(pack, "none", "-o", tmp_path / name).out
    text = (tmp_path / name).read_text(encoding="utf-8")
    assert text.startswith(start)
    assert f"Wrote {tmp_path / name}" in said
    assert cells(said)  # and the table is shown all the same
    assert "\x1b" not in text
    assert list(tree(tmp_path)) == [name]
    assert "--force" in refused("compare", pack, "none", "-o", tmp_path / name)
    compare(pack, "none", "-o", tmp_path / name, "--force")


def test_warnings_reach_whoever_reads(tmp_path):
    made = arrays(val=30, test=40)
    logits = made["val_features"] @ made["weight"].T + made["bias"]
    made["val_labels"] = logits.argmin(1)  # every prediction is wrong
    pack = packed(tmp_path, made)
    assert "Warning: temperature:" in compare(pack, "temperature").out
    ran = featcal("compare", pack, "temperature", "--format", "csv", *FEW)
    assert ran.code == 0
    assert ran.err.startswith("Warning: temperature:")
    assert "Warning" not in ran.out


@pytest.fixture
def width(monkeypatch):
    """Sets the width of a pipe."""
    return lambda columns: monkeypatch.setattr("featcal.cli.app.PIPE_WIDTH", columns)


@pytest.mark.parametrize("columns", [60, 100])
def test_a_table_wider_than_the_terminal_is_shown_in_parts(pack, width, columns):
    recipes = ("none", "clip(min_accuracy=0.99) | temperature")
    whole = cells(compare(pack, *recipes).out)
    width(columns)
    text = compare(pack, *recipes).out
    table = [line for line in text.splitlines() if line[:1] in "┏┃┡│└"]
    assert max(map(len, table)) <= columns
    parts = cells(text)
    assert sum(line[0] == "recipe" for line in parts) > 1
    shown = {cell for line in parts for cell in line}
    assert {cell for line in whole for cell in line[1:-1]} <= shown


def test_a_pipe_and_a_file_cut_nothing_and_end_lines_without_blanks(pack, tmp_path):
    recipes = ["none", *(f"clip(min_accuracy=0.9{n}) | temperature" for n in range(3))]
    metrics = [part for name in COLUMNS for part in ("--metric", name)]
    text = compare(pack, *recipes, *metrics, "-o", tmp_path / "out.txt").out
    for shown in (text, (tmp_path / "out.txt").read_text()):
        assert "…" not in shown
        assert not [line for line in shown.splitlines() if line.endswith(" ")]


def test_why_there_are_no_findings_is_said(pack):
    assert "No baseline: add none, or --baseline" in compare(pack, "temperature", "clip").out
    for args in (["none", "clip"], ["none"], ["clip", "temperature", "--baseline", "clip"]):
        assert "No baseline" not in compare(pack, *args).out


def test_an_ascii_terminal(pack, monkeypatch):
    """The whole output can be encoded, and the words are there."""
    shown = ("none", "clip", "--metric", "ece", "--metric", "classwise_ece")
    for flags in ((), ("--format", "markdown")):
        text = encoded(monkeypatch, "ascii", "compare", pack, *shown, *FEW, *flags)
        assert re.search(r"[v^] (better|worse)", text)
        assert text.count("ECE#") == 2
        assert text.count("# Rather too long than too short") == 1


@pytest.fixture
def paper(monkeypatch):
    """The paper's table with methods that are quick and always there."""
    recipes = ("none", "clip") + ("temperature", "clip | temperature") * 5
    monkeypatch.setattr("featcal.report.tables.PAPER_RECIPES", recipes)
    return recipes


def test_paper_shows_a_block_a_metric(pack, paper, width):
    width(80)
    text = compare(pack, "--paper").out
    assert [line.strip() for line in text.splitlines() if line.strip() in ("ECE", "adaptive ECE")]
    lines = cells(text)
    heads = [line for line in lines if line[0] == "method"]
    assert heads == [["method", "base‡", "after clip‡"]] * 2
    labels = [line[0] for line in lines if line[0] in PAPER_METHODS]
    assert labels == [*PAPER_METHODS] * 2
    body = compare(pack, "--paper", "--json").json
    assert body["settings"]["mode"] == "sequential"
    assert [row["recipe"] for row in body["rows"]] == [*paper]
    against = [
        row["differences"] and row["differences"]["ece"]["baseline"] for row in body["rows"][:4]
    ]
    assert against == [None, "none", None, "temperature"]
    assert body["settings"]["baseline"] == "the same method without clip"


def test_paper_in_every_format(pack, paper, tmp_path):
    assert compare(pack, "--paper", "--format", "latex").out.count("\\begin{tabular}") == 2
    text = compare(pack, "--paper", "--metric", "nll", "--format", "markdown").out
    assert text.startswith("**NLL**")
    compare(pack, "--paper", "-o", tmp_path / "paper.csv")
    assert "clip | temperature,ece," in (tmp_path / "paper.csv").read_text()


def test_the_paper_recipes_are_methods():
    assert set(PAPER_METHODS.values()) <= {"none", *METHODS}
    for recipe in PAPER_RECIPES[1:]:
        assert repr(parse(recipe)) == recipe
