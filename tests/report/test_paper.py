"""The paper's tables: exact as printed, and every mark true of the cells that carry it."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from featcal.core.checks import InputError
from featcal.report.paper import PAPER, Cell, all_marks, note, paper_table, paper_tables

NAMES = ["entropy", "ece-posthoc", "vit", "counts"]
NAMES += ["train-time", "accuracy", "layers", "adaece-posthoc"]
ROOT = Path(__file__).parents[2]
POSTHOC = ["ece-posthoc", "adaece-posthoc"]


def column(name, heading):
    return [cell.value for cell in paper_table(name) if cell.column == heading]


def marked(mark):
    return {(t.name, c.row, c.column) for t in paper_tables() for c in t if has(c, mark)}


def has(cell, mark):
    return mark in [m.id for m in cell.marks]


# --- the transcription against the LaTeX source --------------------------------------------------


@pytest.fixture(scope="module")
def source(shared_file):
    """Table environments of the paper by label."""
    text = shared_file("paper", "feature-clipping.tex").read_text()
    assert text.count(r"\begin{table") == text.count(r"\end{table")
    found = {}
    for part in text.split(r"\begin{table")[1:]:
        part = part.partition(r"\end{table")[0]
        found[part.partition(r"\label{")[2].partition("}")[0]] = part
    return found


def stream(part):
    """The body as one flat run of (bold, number, c, arrow), knowing nothing of rows and columns.

    The transcription was cut at & and \\\\; here names of rows are taken out and the rest is read
    from left to right, so that a lost, doubled or shifted cell shows.
    """
    body = part[part.index(r"\midrule") : part.index(r"\bottomrule")]
    body = re.sub(r"\\multirow\{\d\}\{\*\}\{[^}]*\}|\\cellgray|\\midrule", " ", body)
    body = re.sub(r"[A-Za-z-]*[Nn]et-(V2|\d+)|\$>[\d.]+\$", " ", body)
    shape = (
        r"(?P<bold>\\textbf\{)?(?P<number>\d+(?:\.\d+)?)\}?"
        r"\s*(?:\((?P<c>[\d.]+)\))?\s*(?P<arrow>\\greendown|\\redup)?"
    )
    arrows = {r"\greendown": "▼", r"\redup": "▲", None: ""}
    return [
        (m["bold"] is not None, m["number"], m["c"], arrows[m["arrow"]])
        for m in re.finditer(shape, body)
    ]


def ours(table):
    values = table.values()
    return [
        (cell.bold, line["value"], line["threshold"], cell.arrow)
        for cell, line in zip(table, values, strict=True)
    ]


@pytest.mark.shared
def test_every_table_of_the_paper_is_here_in_its_order(source):
    assert list(source) == [table.label for table in paper_tables()]
    assert [table.number for table in paper_tables()] == list(range(1, len(source) + 1))
    assert [table.name for table in paper_tables()] == NAMES


@pytest.mark.shared
@pytest.mark.parametrize("name", NAMES)
def test_every_number_is_as_printed(source, name):
    table = paper_table(name)
    assert ours(table) == stream(source[table.label])


def found_in_order(words, text):
    place = 0
    for word in words:
        assert word in text[place:], word
        place = text.index(word, place) + len(word)


@pytest.mark.shared
@pytest.mark.parametrize("name", NAMES)
def test_rows_and_headings_are_as_printed_and_in_their_order(source, name):
    table = paper_table(name)
    plain = re.sub(r"\\textbf|\\text|\\tilde|[${}]", "", source[table.label])
    head, body = plain.split(r"\midrule", 1)
    datasets = dict.fromkeys(
        re.findall(r"^(?:CIFAR-\d+|ImageNet)(?= )", "\n".join(table.rows), re.M)
    )
    found_in_order([f"*{dataset}" for dataset in datasets], body)
    found_in_order([re.sub(r"^(CIFAR-\d+|ImageNet) ", "", row) for row in table.rows], body)
    tops = dict.fromkeys(column[0].replace("~", "") for column in table.columns)
    found_in_order(tops, head)
    found_in_order([column[1] for column in table.columns if len(column) == 2], head)


def test_cells_read_by_eye():
    """Typed from the printed page, not from the source."""
    ece = paper_table("ece-posthoc")
    cell = ece.cell("CIFAR-10 DenseNet-121", "Original Feature +ours(c)")
    assert (cell.value, cell.threshold, cell.arrow, cell.bold) == (1.05, 0.45, "▼", True)
    cell = ece.cell("CIFAR-100 ResNet-110", "Group Calibration +ours")
    assert (cell.value, cell.threshold, cell.arrow, cell.bold) == (3.45, None, "▲", False)
    train = paper_table("train-time")
    assert train.cell("CIFAR-100 Wide-Resnet-26", "Dual Focal Loss +ours").printed == "1.18(2.30)▼"
    assert train.cell("CIFAR-10 ResNet-110", "Focal Loss +ours").printed == "1.54(1.26)▲"
    assert paper_table("accuracy").cell("CIFAR-100 ResNet-110", "Brier Loss").printed == "74.9"
    assert paper_table("layers").cell("Last Layer (logits)", "ECE (c)").threshold == 4.98
    assert paper_table("vit").cell("w/ FC", "CTS").value == 5.60
    assert paper_table("counts").cell(">0.95", "ViT-L-16 Correct").value == 44
    assert paper_table("entropy").cell("HCE", "Delta H_sm").value == 0.4908
    ada = paper_table("adaece-posthoc")
    assert ada.cell("CIFAR-100 ResNet-50", "Original Feature +ours(c)").printed == "4.01(0.6)▼"


# --- the marks against the printed values --------------------------------------------------------


def test_marks_are_sentences_with_stable_ids():
    kinds = json.loads((PAPER / "marks.json").read_text())["kinds"]
    ids = [mark.id for mark in all_marks()]
    assert len(set(ids)) == len(ids)
    for mark in all_marks():
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", mark.id)
        assert mark.kind in kinds
        assert mark.evidence
        assert mark.sentence.endswith(".")
        assert not mark.instead.startswith(" ")
        assert ".." not in note(mark)


def test_every_place_of_a_mark_holds_cells():
    for entry in json.loads((PAPER / "marks.json").read_text())["marks"]:
        places = marked(entry["id"])
        for place in entry["cells"]:
            assert any(table == place["table"] for table, _, _ in places), entry["id"]
            for key in place.get("rows", []) + place.get("columns", []):
                plain = key.strip("* ")
                assert any(plain in f"{row} {col}" for _, row, col in places), (entry["id"], key)


def test_arrows_say_whether_the_value_rose():
    """Equal values have a green arrow: those are marked, and no other arrow is wrong."""
    unchanged = set()
    for name in [*POSTHOC, "train-time"]:
        for row in paper_table(name).cells:
            for base, after in zip(row[::2], row[1::2], strict=True):
                if base.value == after.value:
                    unchanged.add((name, after.row, after.column))
                    assert after.arrow == "▼"
                else:
                    assert after.arrow == ("▲" if after.value > base.value else "▼")
    assert unchanged == marked("unchanged-ece")
    for base, after in zip(*paper_table("vit").cells, strict=True):
        assert after.arrow == "▼"
        assert after.value < base.value


def test_bold_is_the_least_of_its_row():
    for row in paper_table("ece-posthoc").cells:
        least = min(cell.value for cell in row)
        assert [cell.bold for cell in row] == [cell.value == least for cell in row]


@pytest.mark.parametrize("name", POSTHOC)
def test_cts_after_clipping_repeats_pts_after_clipping(name):
    assert column(name, "CTS +ours") == column(name, "PTS +ours")
    assert column(name, "CTS base") != column(name, "PTS base")
    assert {("CTS +ours" in c) for t, _, c in marked("cts-ours-is-pts-ours") if t == name} == {True}


def test_cts_after_clipping_repeats_pts_on_vit():
    vit = paper_table("vit")
    assert vit.cell("w/ FC", "CTS").value == vit.cell("w/ FC", "PTS").value


@pytest.mark.parametrize("name", POSTHOC)
def test_pts_stays_within_the_stated_distance_of_ts(name):
    pairs = zip(column(name, "PTS base"), column(name, "TS base"), strict=True)
    assert max(abs(pts - ts) for pts, ts in pairs) == pytest.approx(0.09)
    (mark,) = [m for m in all_marks() if m.id == "pts-network"]
    assert "within 0.09 of TS" in mark.sentence


@pytest.mark.parametrize("method", ["TS", "ETS", "PTS"])
def test_clipping_alone_is_often_better_than_with_a_method_after_it(method):
    worse = {
        name: sum(
            both > alone
            for both, alone in zip(
                column(name, f"{method} +ours"),
                column(name, "Original Feature +ours(c)"),
                strict=True,
            )
        )
        for name in POSTHOC
    }
    (mark,) = [m for m in all_marks() if m.id == "clip-chosen-alone"]
    assert f"in {worse['ece-posthoc']} of the 10 rows of ECE" in mark.sentence
    assert f"in {worse['adaece-posthoc']} of adaptive ECE" in mark.sentence


def test_the_printed_entropy_difference():
    cell = paper_table("entropy").cell
    right = cell("HCE", "H_sm(X~)").value - cell("HCE", "H_sm(X)").value
    assert f"{right:.4f}" == "0.4899"
    assert marked("entropy-difference") == {("entropy", "HCE", "Delta H_sm")}
    right = cell("LCE", "H_sm(X~)").value - cell("LCE", "H_sm(X)").value
    assert f"{right:.4f}" == cell("LCE", "Delta H_sm").printed


def test_focal_accuracies_are_those_published_for_flsd53():
    """Test errors of Mukhoti et al. on CIFAR-10: FLSD-53, and FL-3 as named in the sentence."""
    printed = column("accuracy", "Focal Loss")[:3]
    assert [round(100 - value, 2) for value in printed] == [4.98, 5.42, 5.46]
    (mark,) = [m for m in all_marks() if m.id == "focal-is-flsd53"]
    assert re.findall(r"\d\d\.\d\d", mark.sentence) == ["94.75", "94.92", "94.67"]


def test_what_clipping_does_to_accuracy():
    pairs = zip(column("accuracy", "FC (ours)"), column("accuracy", "Baseline"), strict=True)
    steps = [round(after - before, 2) for after, before in pairs]
    assert sum(step > 0 for step in steps) == sum(step < 0 for step in steps) == 3
    assert max(map(abs, steps)) == 0.21


def test_tables_that_share_values_agree():
    """Cross entropy with and without clipping is printed in three tables."""
    ece, train, layers = (paper_table(n).cell for n in ("ece-posthoc", "train-time", "layers"))
    for row in ("CIFAR-10 ResNet-50", "CIFAR-100 DenseNet-121"):
        for here, there in (("base", "base"), ("+ours(c)", "+ours")):
            mine, other = ece(row, f"Original Feature {here}"), train(row, f"Cross Entropy {there}")
            assert (mine.value, mine.threshold) == (other.value, other.threshold)
    assert layers("Penultimate Layer (ours)", "ECE (c)").value == 1.10


# --- the library -----------------------------------------------------------------------------


def test_an_unknown_table_or_cell_is_refused():
    with pytest.raises(InputError, match="no table 'table 1': choose one of entropy, ece-posthoc"):
        paper_table("table 1")
    with pytest.raises(InputError, match="table vit has no cell 'w/ FC', 'Dirichlet'"):
        paper_table("vit").cell("w/ FC", "Dirichlet")


def test_a_cell_is_read_with_and_without_its_parts():
    assert Cell.read("r", "c", "44") == Cell("r", "c", "44", 44.0, None, "", False)
    assert Cell.read("r", "c", "**0.6**(1.4)▲") == Cell("r", "c", "0.6(1.4)▲", 0.6, 1.4, "▲", True)


# --- the page about them ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def docs():
    spec = importlib.util.spec_from_file_location(
        "reproduction_docs", ROOT / "experiments" / "reproduction_docs.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_shows_what_the_result_file_holds(docs):
    text = docs.DOCS.read_text()
    parts = docs.sections(json.loads(docs.RESULTS.read_text()))
    for name, part in parts.items():
        start, end = docs.START.format(name), docs.END.format(name)
        assert text.split(start)[1].split(end)[0].strip() == part, f"{name}: make reproduce"
    assert text.count("<!-- end of ") == len(parts)


def test_every_check_the_page_names_exists(docs):
    text = " ".join(docs.DOCS.read_text().split())
    for name in re.findall(r"featcal paper ([a-z][a-z-]+)", text):
        assert name in NAMES
    nodes = re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", text)
    assert len(nodes) > 5
    for file, test in nodes:
        assert (ROOT / file).is_file(), file
        assert f"def {test}" in (ROOT / file).read_text()
    for file, word in re.findall(r"pytest (tests/\S+\.py) -k \"?(\w+)", text):
        assert re.search(rf"def test_\w*{word}", (ROOT / file).read_text()), (file, word)
