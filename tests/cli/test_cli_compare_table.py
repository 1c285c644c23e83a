"""The comparison on terminals of any width and encoding, and the paper's layout."""

import io
import re

import pytest
from cli_cases import done, refused

from featcal import METHODS, parse
from featcal.cli import compare as compare_request
from featcal.cli import main
from featcal.cli.compare import PLAIN_ARROWS, arrows
from featcal.report.scores import COLUMNS
from featcal.report.tables import ARROWS, PAPER_METHODS, PAPER_RECIPES

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


@pytest.fixture
def width(monkeypatch):
    """Sets the width of a pipe."""
    return lambda columns: monkeypatch.setattr("featcal.cli.shared.PIPE_WIDTH", columns)


@pytest.mark.parametrize("columns", [60, 80, 100, 120, 200])
def test_tables_fit_and_say_what_is_missing(pack, width, columns):
    width(columns)
    text = compare(pack).out
    table = [line for line in text.splitlines() if line[:1] in "┏┃┡│└"]
    assert max(map(len, table)) <= columns
    head = cells(text)[0]
    for column in ("accuracy", "ECE"):
        assert column in head
    hidden = re.search(r"Too narrow for: (.*) \(see", text)
    shown = {*head, *(hidden.group(1).split(", ") if hidden else ())} - {
        "recipe",
        "intervals",
        "findings",
    }
    usual = {"accuracy", "ECE", "adaptive ECE", "NLL", "Brier", "fitted", "seconds"}
    assert shown == usual
    assert (hidden is None) is (columns == 200)


def test_columns_that_were_asked_for_go_last(pack, width):
    width(80)
    asked = ["--metric", "brier", "--metric", "nll", "--metric", "aurc"]
    assert cells(compare(pack, "none", "temperature", *asked).out)[0][:4] == [
        *("recipe", "Brier", "NLL", "AURC")
    ]


def test_long_recipes_break_after_a_bar(pack, width):
    width(90)
    recipe = "clip(min_accuracy=0.99) | temperature"
    lines = cells(compare(pack, "none", recipe).out)
    first = [line[0] for line in lines]
    assert "clip(min_accuracy=0.99) |" in first
    assert first[first.index("clip(min_accuracy=0.99) |") + 1] == "temperature"
    assert "NLL" in lines[0]


@pytest.mark.parametrize(
    ("columns", "gone"), [(40, ["intervals"]), (31, ["intervals", "findings"])]
)
def test_what_is_not_shown_is_not_explained(pack, width, columns, gone):
    width(columns)
    text = compare(pack, "none", "clip").out
    assert re.search(r"Too narrow for: (.*) \(see", text).group(1).split(", ")[5:] == gone
    assert "In brackets" not in text
    assert ("Better, worse" in text) is ("findings" not in gone)
    assert bool(re.search("[↓↑] (better|worse)", text)) is ("findings" not in gone)


def test_a_pipe_and_a_file_cut_nothing_and_end_lines_without_blanks(pack, tmp_path):
    recipes = ["none", *(f"clip(min_accuracy=0.9{n}) | temperature" for n in range(3))]
    metrics = [part for name in COLUMNS for part in ("--metric", name)]
    text = compare(pack, *recipes, *metrics, "-o", tmp_path / "out.txt").out
    for shown in (text, (tmp_path / "out.txt").read_text()):
        assert "Too narrow" not in shown
        assert "…" not in shown
        assert not [line for line in shown.splitlines() if line.endswith(" ")]


def test_why_there_are_no_findings_is_said(pack):
    assert "No baseline: add none, or --baseline" in compare(pack, "temperature", "clip").out
    for args in (["none", "clip"], ["none"], ["clip", "temperature", "--baseline", "clip"]):
        assert "No baseline" not in compare(pack, *args).out


def test_help_names_the_metrics():
    said = " ".join(done("compare", "--help").out.split())
    assert said.count("One of: accuracy, confidence,") == 2


def test_arrows_where_they_can_be_printed():
    assert arrows("utf-8") == arrows(None) == ARROWS
    for encoding in ("ascii", "latin-1", "no such encoding"):
        assert arrows(encoding) == PLAIN_ARROWS
    "".join(PLAIN_ARROWS.values()).encode("ascii")


def test_an_ascii_terminal(pack, monkeypatch):
    """The whole output can be encoded, and the words are there."""
    for flags in ((), ("--format", "markdown")):
        written = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        monkeypatch.setattr("sys.stdout", written)
        with pytest.raises(SystemExit) as end:
            main(["compare", str(pack), *FEW, *flags])
        assert end.value.code == 0
        written.flush()
        text = written.buffer.getvalue().decode("ascii")
        assert re.search(r"[v^] (better|worse)", text)


# --- the paper's table ------------------------------------------------------------------------


@pytest.fixture
def paper(monkeypatch):
    """The paper's table with methods that are quick and always there."""
    recipes = ("none", "clip") + ("temperature", "clip | temperature") * 5
    monkeypatch.setattr(compare_request, "PAPER_RECIPES", recipes)
    return recipes


def test_paper_shows_a_block_a_metric(pack, paper, width):
    width(80)
    text = compare(pack, "--paper").out
    assert [line.strip() for line in text.splitlines() if line.strip() in ("ECE", "adaptive ECE")]
    lines = cells(text)
    heads = [line for line in lines if line[0] == "method"]
    assert heads == [["method", "base", "after clip"]] * 2
    labels = [line[0] for line in lines if line[0] in PAPER_METHODS]
    assert labels == [*PAPER_METHODS] * 2
    body = compare(pack, "--paper", "--json").json
    assert [row["recipe"] for row in body["rows"]] == [*paper]
    against = [
        row["differences"] and row["differences"]["ece"]["baseline"] for row in body["rows"][:4]
    ]
    assert against == [None, "none", None, "temperature"]
    assert body["settings"]["baseline"] == "the same method without clip"


def test_paper_in_every_format(pack, paper, tmp_path):
    assert compare(pack, "--paper", "--format", "markdown").out.count("| method |") == 2
    assert compare(pack, "--paper", "--format", "latex").out.count("\\begin{tabular}") == 2
    text = compare(pack, "--paper", "--metric", "nll", "--format", "markdown").out
    assert text.startswith("**NLL**")
    compare(pack, "--paper", "-o", tmp_path / "paper.csv")
    assert "clip | temperature,ece," in (tmp_path / "paper.csv").read_text()


def test_paper_needs_features(logits_pack):
    said = refused("compare", logits_pack, "--paper")
    assert "--paper" in said
    assert "logits alone" in said


def test_the_paper_recipes_are_methods():
    assert set(PAPER_METHODS.values()) <= {"none", *METHODS}
    for recipe in PAPER_RECIPES[1:]:
        assert repr(parse(recipe)) == recipe
