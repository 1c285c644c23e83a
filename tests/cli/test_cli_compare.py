"""featcal compare: columns, order, formats, files, cross-fitting, and what it refuses."""

import csv
import io
import json

import pytest
from cli_cases import arrays, done, featcal, packed, refused, tree

from featcal import evaluate
from featcal.data import Pack
from featcal.report.scores import COLUMNS

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
    names = [name for name, column in COLUMNS.items() if column.heading in head]
    assert names[:2] == ["accuracy", "ece"]
    for row, above, below in zip(found, body[::2], body[1::2], strict=True):
        assert above[0] == row["recipe"]
        for name in names:
            at, column = head.index(COLUMNS[name].heading), COLUMNS[name]
            assert above[at].endswith(column.text(row["metrics"][name]))
            low, high = row["intervals"][name]
            assert below[at] == f"[{column.number(low)}, {column.number(high)}]"
            finding = (row["differences"] or {}).get(name, {"verdict": None})["verdict"]
            assert above[at].startswith(("↓", "↑")) is (finding in ("better", "worse"))
            assert finding not in ("better", "worse") or finding in above[at]
    assert "100 resamples" in text
    assert "paired difference from none" in text
    assert "featcal fit" in text


def test_without_resamples_the_table_is_one_line_a_recipe(pack):
    text = compare(pack, "none", "temperature", "--resamples", "0").out
    assert len(cells(text)) == 3
    assert "better" not in text
    assert "resamples" not in text


@pytest.mark.parametrize("joint", [False, True])
def test_metrics_choose_the_columns_and_the_first_one_sorts(pack, joint):
    flags = ["--joint"] * joint
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


def test_cross_fitting_works_without_a_test_split(tmp_path):
    made = {key: value for key, value in arrays(val=60).items() if not key.startswith("test")}
    pack = packed(tmp_path, made)
    assert compare(pack, "temperature", "--folds", "5", "--json").json["rows"][0]["n"] == 60


# --- formats and files ------------------------------------------------------------------------


def test_markdown(pack):
    text = compare(pack, "none", "clip | temperature", "--format", "markdown").out
    assert text.startswith("| recipe | accuracy % | ECE % |")
    assert "`clip \\| temperature`" in text
    assert "pack: fitted step by step on val, scored on 300 rows of test." in text


def test_latex(pack):
    text = compare(pack, "clip(min_accuracy=0.9)", "none", "--format", "latex").out
    assert "\\begin{tabular}{lrrrrr}" in text
    assert "\\texttt{clip(min\\_accuracy=0.9)}" in text


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


def test_the_option_wins_over_the_name(pack, tmp_path):
    compare(pack, "none", "-o", tmp_path / "out", "--json")
    assert json.loads((tmp_path / "out").read_text())["rows"][0]["recipe"] == "none"
    compare(pack, "none", "-o", tmp_path / "table.txt", "--format", "csv")
    assert (tmp_path / "table.txt").read_text().startswith("recipe,metric")


def test_an_output_that_exists_is_refused_before_any_fit(pack, tmp_path, monkeypatch):
    taken = tmp_path / "taken.csv"
    taken.write_text("mine")
    monkeypatch.setattr("featcal.cli.compare.run_comparison", lambda *_a, **_k: 1 / 0)
    assert "exists" in refused("compare", pack, "-o", taken)
    assert "does not exist" in refused("compare", pack, "-o", tmp_path / "no" / "out.csv")
    assert taken.read_text() == "mine"


def test_warnings_reach_whoever_reads(tmp_path):
    made = arrays(val=30, test=40)
    logits = made["val_features"] @ made["weight"].T + made["bias"]
    made["val_labels"] = logits.argmax(1)  # every prediction is right
    pack = packed(tmp_path, made)
    assert "Warning: temperature:" in compare(pack, "temperature").out
    ran = featcal("compare", pack, "temperature", "--format", "csv", *FEW)
    assert ran.code == 0
    assert ran.err.startswith("Warning: temperature:")
    assert "Warning" not in ran.out
