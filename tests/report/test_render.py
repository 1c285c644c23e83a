"""Comparisons as text: the same numbers in every format, escaped for the reader they are for."""

import csv
import io
import re
from dataclasses import replace

import pytest
import torch

from featcal import Batch, InputError
from featcal.core.fit import FitReport, StepReport
from featcal.report import compare
from featcal.report import tables as render
from featcal.report.compare import Comparison
from featcal.report.scores import COLUMNS, USUAL, Difference, Interval, columns
from featcal.report.tables import (
    PAPER_METHODS,
    PAPER_RECIPES,
    Cell,
    against_own_base,
    comparison_block,
    fitted_text,
    folded,
    paper_blocks,
    step_text,
)


@pytest.fixture(scope="module")
def found(made):
    both = made(n=700, d=10, k=4)
    batch = Batch(both.logits, both.labels, both.features)
    recipes = ["none", "temperature", "clip(min_accuracy=0.9) | temperature"]
    fit, test = batch.rows(slice(0, 400)), batch.rows(slice(400, 700))
    return compare(fit, test, recipes, both.head, resamples=200)


def rows_of(text):
    """The cells of a Markdown table."""
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in text.splitlines()
        if line.startswith("|")
    ]


def test_markdown_shows_the_numbers(found):
    text = render.markdown(found)
    head, rule, *body = rows_of(text)
    assert head == ["recipe", "accuracy %", "ECE %", "adaptive ECE %", "NLL", "Brier", "fitted"]
    assert len({len(row) for row in [head, rule, *body]}) == 1
    assert [row[0] for row in body] == [
        "`none`",
        "`temperature`",
        "`clip(min_accuracy=0.9) \\| temperature`",
    ]
    for row, cells in zip(found, body, strict=True):
        for name, cell in zip(USUAL, cells[1:], strict=False):
            value, ends = row.scores.metrics[name], row.scores.interval(name)
            column = COLUMNS[name]
            assert column.number(value) in cell
            assert f"[{column.number(ends.low)}, {column.number(ends.high)}]" in cell
    assert "T = " in body[1][-1]
    assert "200 resamples" in text
    assert repr(found) == text


def test_bold_marks_the_best_as_printed(found):
    for name in USUAL:
        cells = [line.cells[USUAL.index(name)] for line in comparison_block(found, columns()).lines]
        best = max(cells, key=lambda cell: cell.column.merit(cell.value)).number
        assert [cell.best for cell in cells] == [cell.number == best for cell in cells]
        assert any(cell.best for cell in cells)
    same = comparison_block(found, columns(("accuracy",))).lines
    assert same[0].cells[0].best is same[1].cells[0].best  # temperature keeps the accuracy
    none = comparison_block(found, columns(("confidence", "overconfidence"))).lines
    assert not any(cell.best for line in none for cell in line.cells)


def test_words_where_the_difference_is_a_finding(found):
    block = comparison_block(found, columns(("nll", "accuracy")))
    for index, line in enumerate(block.lines):
        for cell in line.cells:
            difference = found.difference(index, cell.column.name)
            if difference is None or difference.verdict == "undecided":
                assert render.finding_text(cell) == ""
            else:
                arrow = "↑" if difference.delta > 0 else "↓"
                assert render.finding_text(cell) == f"{arrow} {difference.verdict}"
    worse = Difference("none", -0.1, Interval(-0.2, -0.05), "worse")
    cell = Cell(COLUMNS["accuracy"], 0.5, difference=worse)
    assert render.finding_text(cell) == "↓ worse"
    assert render.finding_text(cell, {"down": "v", "up": "^"}) == "v worse"


def test_csv_has_every_number_in_full(found):
    lines = list(csv.DictReader(io.StringIO(render.as_csv(found))))
    assert len(lines) == len(found) * len(COLUMNS)
    for line in lines:
        index = [row.recipe for row in found].index(line["recipe"])
        scores, name = found[index].scores, line["metric"]
        assert float(line["value"]) == scores.metrics[name]
        assert float(line["low"]) == scores.interval(name).low
        assert int(line["n"]) == 300
        difference = found.difference(index, name)
        if difference is None:
            assert line["baseline"] == line["delta"] == line["verdict"] == ""
        else:
            assert line["baseline"] == "none"
            assert float(line["delta"]) == difference.delta
            assert float(line["delta_high"]) == difference.interval.high
            assert line["verdict"] == (difference.verdict or "")
    few = render.as_csv(found, columns(("ece",)))
    assert len(few.splitlines()) == 4
    assert "nan" not in render.as_csv(replace(found, rows=tuple(map(bare, found)))).lower()


def bare(row):
    return replace(row, scores=replace(row.scores, replicates={}))


def latex_problems(text):
    """What would stop LaTeX: unbalanced braces, bare specials, uneven rows."""
    body = "\n".join(line for line in text.splitlines() if not line.startswith("%"))
    plain = re.sub(r"\\[\\&%$#_{}]", "", body)
    problems = [mark for mark in '#~^|<>"' if mark in plain]
    if plain.count("{") != plain.count("}") or plain.count("$") % 2:
        problems.append("unbalanced")
    if re.search(r"[^\x00-\x7f]", body):
        problems.append("not ASCII")
    if "_" in plain.replace("\\_", ""):
        problems.append("_")
    for block in re.findall(
        r"\\begin\{tabular\}\{(l[lr]+)\}(.*?)\\end\{tabular\}", text, re.DOTALL
    ):
        for line in block[1].splitlines():
            cells = len(re.split(r"(?<!\\)&", line))
            if line.endswith("\\\\") and "multicolumn" not in line and cells != len(block[0]):
                problems.append(line)
    return problems


def test_latex_is_a_booktabs_table(found):
    text = render.latex(found)
    assert latex_problems(text) == []
    assert text.count("\\toprule") == text.count("\\bottomrule") == 1
    assert "\\texttt{clip(min\\_accuracy=0.9) \\textbar{} temperature}" in text
    assert "\\textbf{" in text
    assert "ECE \\%" in text
    assert "\\usepackage{booktabs}" in text.splitlines()[0]


def test_latex_escapes_every_special_mark():
    text = render.escaped("a&b%c$d#e_f{g}h~i^j\\k|l<m>n\"o'p")
    assert latex_problems(text) == []
    assert render.escaped("plain text, 1.5 (x)") == "plain text, 1.5 (x)"


def paper_like(found):
    """Twelve rows in the order of the paper's recipes."""
    rows = tuple(
        replace(found[number % 3], recipe=recipe) for number, recipe in enumerate(PAPER_RECIPES)
    )
    return against_own_base(Comparison(rows, (None,) * 12, found.settings))


def test_the_recipes_of_the_paper():
    assert PAPER_RECIPES[:4] == ("none", "clip", "temperature", "clip | temperature")
    assert PAPER_RECIPES[-2:] == ("group", "clip | group")
    assert len(PAPER_RECIPES) == 2 * len(PAPER_METHODS) == 12


def test_paper_blocks_compare_each_method_with_itself(found):
    paper = paper_like(found)
    assert paper.against == (None, 0, None, 2, None, 4, None, 6, None, 8, None, 10)
    for block, name in zip(
        paper_blocks(paper, columns(("ece", "nll"))), ("ece", "nll"), strict=True
    ):
        assert block.headings == ("base", "after clip")
        assert [line.label for line in block.lines] == list(PAPER_METHODS)
        for at, line in enumerate(block.lines):
            base, clipped = line.cells
            assert base.difference is None
            assert clipped.difference == paper.difference(2 * at + 1, name)
            assert clipped.difference.baseline == PAPER_RECIPES[2 * at]
            assert base.value == paper[2 * at].scores.metrics[name]


def test_paper_blocks_as_text(found):
    paper = paper_like(found)
    blocks = paper_blocks(paper, columns(("ece", "nll")))
    text = render.markdown(paper, blocks)
    assert "**ECE**" in text
    assert ["method", "base %", "after clip %"] in rows_of(text)
    assert ["method", "base", "after clip"] in rows_of(text)
    assert "the same method without clip" in text
    assert "TS is temperature, ETS is ensemble" in text
    latex = render.latex(paper, blocks)
    assert latex_problems(latex) == []
    assert latex.count("\\begin{tabular}") == 2
    assert "Group Calibration" in latex


def test_notes_say_how_the_numbers_came(found):
    settings = found.settings
    how, brackets, words = render.notes(found)
    assert how == "fitted step by step, scored on 300 rows."
    assert "200 resamples of these rows (seed 0)" in brackets
    assert "paired difference from none" in words
    named = {**settings, "pack": "p", "fit_split": "val", "test_split": "test", "mode": "joint"}
    how, *_ = render.notes(replace(found, settings=named))
    assert how == "p: fitted jointly on val, scored on 300 rows of test."
    crossed = {**settings, "folds": 5, "fit_split": "val", "resamples": 0}
    assert render.notes(replace(found, settings=crossed)) == [
        "cross-fitted step by step in 5 folds, scored on all 300 rows of val."
    ]


# --- fitted values ----------------------------------------------------------------------------


def step(noop=False, name="clip", **values):
    return StepReport(name, values, noop, 1.0, 0.9, True, "")


def report(*steps):
    return FitReport("r", "sequential", "nll", 10, steps, 1.0, 0.9, 0.1)


def test_fitted_values_in_a_few_characters():
    one = report(step(threshold=2.2649), step(name="temperature", temperature=1.137))
    assert fitted_text([one]) == "c = 2.265, T = 1.137"
    assert fitted_text([]) == ""
    assert step_text(step(noop=True, threshold=float("inf"))) == "clip: no-op"
    assert step_text(step(weight=[0.5, 0.25, 1.0], words=["a"], on=True)) == "weight = 0.25 to 1"
    assert step_text(step()) == ""
    many = step_text(step(**{f"w{number}": number for number in range(5)}))
    assert many == "w0 = 0; w1 = 1; w2 = 2; w3 = 3; ..."


def test_two_ends_of_a_range_are_one_value_and_a_penalty_is_called_one():
    assert step_text(step(T_min=1.347, T_max=2.178, spread=0.2)) == "T 1.347 to 2.178; spread = 0.2"
    assert step_text(step(T_min=1.5, T_max=1.5)) == "T = 1.5"
    assert step_text(step(T_min=1.5)) == "T_min = 1.5"
    histogram = step(bins=15, lowest=0.6, highest=0.9)
    assert step_text(histogram) == "bins = 15; values 0.6 to 0.9"
    matrix = step(off_diagonal=1.397, bias=0.005, ridge=10, w_min=-0.4, w_max=0.7)
    assert step_text(matrix) == "w -0.4 to 0.7; penalty = 10"
    ensemble = step(temperature=1.762, w0=1.0, w1=0.0, w2=0.0)
    assert step_text(ensemble) == "T = 1.762; w0 = 1; w1 = 0; w2 = 0"


def test_folds_need_not_have_found_the_same_values():
    fits = [report(step(temperature=1.5)), report(step(temperature=1.6, T_min=1.2, T_max=1.9))]
    assert fitted_text(fits) == "T = 1.5 to 1.6; T 1.2 to 1.9"


def test_lines_break_between_values_alone():
    text = "c = 2.2, T 1.347 to 2.178; spread = 0.2"
    assert folded(text, 18).splitlines() == ["c = 2.2,", "T 1.347 to 2.178;", "spread = 0.2"]
    assert folded(text, 28).splitlines() == ["c = 2.2, T 1.347 to 2.178;", "spread = 0.2"]
    assert folded(text, 100) == text
    assert folded("", 10) == ""


def test_fitted_values_over_folds():
    fits = [report(step(threshold=c)) for c in (2.26, 2.3, 2.21)]
    assert fitted_text(fits) == "c = 2.21 to 2.3"
    assert fitted_text(fits[:1] * 3) == "c = 2.26"
    idle = report(step(noop=True, threshold=float("inf")))
    assert fitted_text([*fits, idle]) == "c = 2.21 to 2.3 (clip: no-op in 1 of 4 folds)"
    assert fitted_text([idle, idle]) == "clip: no-op"


# --- columns ----------------------------------------------------------------------------------


def test_every_metric_has_a_column(found):
    assert set(COLUMNS) == set(found[0].scores.metrics)
    with pytest.raises(InputError, match="metric is 'ecce': choose one of accuracy, adaptive_ece"):
        columns(("ece", "ecce"))


def test_numbers_as_printed():
    ece, nll = COLUMNS["ece"], COLUMNS["nll"]
    assert (ece.number(0.04684), ece.text(0.04684), ece.unit) == ("4.68", "4.68 %", "ECE %")
    assert (nll.number(1.03125), nll.text(1.0), nll.unit) == ("1.0312", "1.0000", "NLL")
    assert ece.text(float("nan")) == nll.text(float("nan")) == "n/a"
    assert COLUMNS["overconfidence"].text(-0.00001) == "0.00 %"
    for value in torch.rand(200, dtype=torch.float64).tolist():
        assert ece.text(value) == f"{100 * value:.2f} %"
        assert nll.text(value) == f"{value:.4f}"


def test_what_is_sorted_first():
    assert COLUMNS["accuracy"].merit(0.9) > COLUMNS["accuracy"].merit(0.8)
    assert COLUMNS["ece"].merit(0.1) > COLUMNS["ece"].merit(0.2)
    assert COLUMNS["overconfidence"].merit(-0.1) > COLUMNS["overconfidence"].merit(0.2)
    assert COLUMNS["auroc"].merit(float("nan")) < COLUMNS["auroc"].merit(0.0)
