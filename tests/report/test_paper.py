"""The paper's tables: exact as printed, every mark true of its cells, and the file of all of it."""

import re

import numpy as np
import pytest

from featcal.paper import read_paper

NAMES = ["entropy", "ece-posthoc", "vit", "counts"]
NAMES += ["train-time", "accuracy", "layers", "adaece-posthoc"]
POSTHOC = ["ece-posthoc", "adaece-posthoc"]


@pytest.fixture(scope="module")
def script(imported):
    return imported("paper_tables")


@pytest.fixture(scope="module")
def table(script):
    return lambda name: script.paper_tables()[name]


@pytest.fixture(scope="module")
def value(table):
    """The printed number of a cell."""
    return lambda name, row, column: table(name).cell(row, column)["value"]


@pytest.fixture(scope="module")
def marked(table):
    """The cells that carry a mark."""

    def find(mark):
        cells = ((name, cell) for name in NAMES for cell in table(name))
        return {(n, c["row"], c["column"]) for n, c in cells if mark in c["marks"]}

    return find


@pytest.fixture(scope="module")
def sentence(script):
    return lambda mark: next(m["sentence"] for m in script.all_marks() if m["id"] == mark)


# --- the file ---


def test_the_committed_file_is_what_the_script_writes(script):
    read = (script.read_reproduction, script.read_published, script.read_layers)
    content = script.assembled(*(one() for one in read))
    message = "python experiments/paper_tables.py"
    assert script.PACKAGED.read_text() == script.as_text(content), message
    assert list(read_paper()) == NAMES


# --- the transcription against the LaTeX source ---


@pytest.fixture(scope="module")
def source(shared_file):
    """Table environments of the paper by label."""
    text = shared_file("paper", "feature-clipping.tex").read_text()
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


def found_in_order(words, text):
    place = 0
    for word in words:
        assert word in text[place:], word
        place = text.index(word, place) + len(word)


@pytest.mark.shared
@pytest.mark.parametrize("name", NAMES)
def test_every_number_and_heading_is_as_printed(source, script, table, name):
    tables = list(script.paper_tables().values())
    assert list(source) == [one.label for one in tables]
    assert [one.number for one in tables] == list(range(1, len(source) + 1))
    table = table(name)
    lines = script.printed_values(table)
    assert stream(source[table.label]) == [
        (cell["bold"], line["value"], line["threshold"], cell["arrow"])
        for cell, line in zip(table, lines, strict=True)
    ]
    plain = re.sub(r"\\textbf|\\text|\\tilde|[${}]", "", source[table.label])
    head, body = plain.split(r"\midrule", 1)
    rows = [cells[0]["row"] for cells in table.cells]
    datasets = dict.fromkeys(re.findall(r"^(?:CIFAR-\d+|ImageNet)(?= )", "\n".join(rows), re.M))
    found_in_order([f"*{dataset}" for dataset in datasets], body)
    found_in_order([re.sub(r"^(CIFAR-\d+|ImageNet) ", "", row) for row in rows], body)
    found_in_order(dict.fromkeys(column[0].replace("~", "") for column in table.columns), head)
    found_in_order([column[1] for column in table.columns if len(column) == 2], head)


# --- the marks against the printed values ---


def test_arrows_say_whether_the_value_rose(table, marked):
    """Equal values have a green arrow: those are marked, and no other arrow is wrong."""
    unchanged = set()
    for name in [*POSTHOC, "train-time"]:
        for row in table(name).cells:
            for base, after in zip(row[::2], row[1::2], strict=True):
                if base["value"] == after["value"]:
                    unchanged.add((name, after["row"], after["column"]))
                risen = after["value"] > base["value"]
                assert after["arrow"] == ("▲" if risen else "▼")
    assert unchanged == marked("unchanged-ece")


# --- claims that no printed value shows ---


@pytest.mark.shared
def test_ties_of_clipped_logits_decide_the_printed_ece(shared_file, value, sentence):
    """At the printed threshold: the first index wins, and the unclipped prediction is kept."""
    with np.load(shared_file("anchors", "resnet50-cifar10-ce.npz")) as file:
        logits, labels = file["test_logits"], file["test_labels"]
    clipped = logits.clip(-4.98, 4.98)
    probs = np.exp(clipped.astype(float))
    probs /= probs.sum(1, keepdims=True)
    tied = ((clipped == clipped.max(1, keepdims=True)).sum(1) > 1).sum()
    assert f"in {tied} test rows" in sentence("logit-clip-ties")
    found = {}
    for rule, predicted in (("first", clipped.argmax(1)), ("kept", logits.argmax(1))):
        correct = predicted == labels
        confidence = probs[np.arange(len(labels)), predicted]
        bins = np.clip(np.ceil(confidence * 15), 1, 15)
        gaps = (abs((confidence - correct)[bins == b].sum()) for b in range(1, 16))
        found[rule] = (100 * correct.mean(), 100 * sum(gaps) / len(labels))
    accuracy = value("layers", "Last Layer (logits)", "Accuracy")
    ece = value("layers", "Last Layer (logits)", "ECE (c)")
    assert found["first"][0] == pytest.approx(accuracy, abs=1e-6)
    assert found["first"][1] < ece - 0.3
    assert found["kept"][0] == pytest.approx(95.05, abs=1e-6)
    assert found["kept"][1] == pytest.approx(ece, abs=0.03)
