"""Tables: nothing is lost or cut, the same numbers in every format, escaped for their reader."""

import csv
import io
import re
from dataclasses import replace

import pytest

from featcal import Batch, InputError
from featcal.core.fit import FitReport, StepReport
from featcal.metrics.columns import COLUMNS, USUAL, columns
from featcal.paper import read_paper
from featcal.report import compare, tables
from featcal.report.compare import Comparison
from featcal.report.tables import (
    PAPER_METHODS,
    PAPER_RECIPES,
    Table,
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


# --- text ---


def test_blocks_fit_the_terminal_and_lose_nothing():
    width = 80
    for table in (table for paper in read_paper().values() for table in paper.shown):
        blocks = list(table.blocks(width))
        assert [h for block in blocks for h in block.headings[1:]] == list(table.headings[1:])
        cells = [row for block in blocks for row in zip(*block.rows, strict=True)]
        assert [c for c in cells if c != cells[0]] == [
            c for c in list(zip(*table.rows, strict=True))[1:] if c != cells[0]
        ]
        for block in blocks:
            widest = (
                max(len(x.replace("**", "")) for text in column for x in text.split("\n"))
                for column in zip(block.headings, *block.rows, strict=True)
            )
            assert sum(w + 3 for w in widest) + 1 <= width


def test_columns_stay_together_where_they_fit_and_numbers_stand_at_the_right():
    table = Table("t", ("", "a", "b", "c", "d"), (("x", "1", "**2**", "3", "4"),), together=2)
    assert [block.headings for block in table.blocks(14)] == [("", "a", "b"), ("", "c", "d")]
    wide = Table("t", ("", "a", "b"), (("label", "0.123456789", "9.876543210"),), together=2)
    for width in (24, 5):
        first, second = wide.blocks(width)
        assert first.rows + second.rows == (("label", "0.123456789"), ("label", "9.876543210"))

    rows = (("a | b", "**1.2**", "why"), ("b", "-", "1 of them"), ("c", "", "no"))
    lines = Table("t", ("", "two\nlevels", "words"), rows).markdown().splitlines()
    assert lines[:3] == [
        "|  | two levels | words |",
        "|---|---:|---|",
        "| a \\| b | **1.2** | why |",
    ]
    assert Table("t", ("", "value"), ()).markdown().splitlines()[1] == "|---|---:|"


# --- comparisons ---


def rows_of(text):
    """The cells of a Markdown table."""
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in text.splitlines()
        if line.startswith("|")
    ]


def test_markdown_shows_the_numbers(found):
    text = tables.markdown(found)
    head, rule, *body = rows_of(text)
    assert head == ["recipe", "accuracy %", "ECE‡ %", "adaptive ECE‡ %", "NLL", "Brier", "fitted"]
    assert len({len(row) for row in [head, rule, *body]}) == 1
    assert body[2][0] == "`clip(min_accuracy=0.9) \\| temperature`"
    for row, cells in zip(found, body, strict=True):
        for name, cell in zip(USUAL, cells[1:], strict=False):
            value, ends = row.scores.metrics[name], row.scores.interval(name)
            number = COLUMNS[name].number
            assert number(value) in cell
            assert f"[{number(ends.low)}, {number(ends.high)}]" in cell
    assert "T = " in body[1][-1]
    assert "200 resamples" in text
    assert repr(found) == text


def test_bold_marks_the_best_as_printed_and_words_mark_findings(found):
    lines = comparison_block(found, columns()).lines
    for place, name in enumerate(USUAL):
        cells = [line.cells[place] for line in lines]
        best = max(cells, key=lambda cell: cell.column.merit(cell.value)).number
        assert [cell.best for cell in cells] == [cell.number == best for cell in cells]
        for index, cell in enumerate(cells):
            difference = found.difference(index, name)
            said = ""
            if difference is not None and difference.verdict != "undecided":
                said = f"{'↑' if difference.delta > 0 else '↓'} {difference.verdict}"
            assert tables.finding_text(cell) == said
    none = comparison_block(found, columns(("confidence", "overconfidence"))).lines
    assert not any(cell.best for line in none for cell in line.cells)


def test_csv_has_every_number_in_full(found):
    lines = list(csv.DictReader(io.StringIO(tables.as_csv(found))))
    assert len(lines) == len(found) * len(COLUMNS)
    for line in lines:
        index = [row.recipe for row in found].index(line["recipe"])
        scores, name = found[index].scores, line["metric"]
        assert float(line["value"]) == scores.metrics[name]
        assert float(line["low"]) == scores.interval(name).low
        difference = found.difference(index, name)
        if difference is None:
            assert line["baseline"] == line["delta"] == line["verdict"] == ""
        else:
            assert float(line["delta"]) == difference.delta
            assert float(line["delta_high"]) == difference.interval.high
            assert line["verdict"] == (difference.verdict or "")
    bare = (replace(row, scores=replace(row.scores, replicates={})) for row in found)
    assert "nan" not in tables.as_csv(replace(found, rows=tuple(bare))).lower()


def latex_problems(text):
    """What would stop LaTeX: unbalanced braces, bare specials."""
    body = "\n".join(line for line in text.splitlines() if not line.startswith("%"))
    plain = re.sub(r"\\[\\&%$#_{}]", "", body)
    problems = [mark for mark in '#~^|<>"_' if mark in plain]
    even = plain.count("{") == plain.count("}") and plain.count("$") % 2 == 0
    return problems if even and body.isascii() else [*problems, "unbalanced, or not ASCII"]


def test_latex_is_a_booktabs_table(found):
    text = tables.latex(found)
    assert latex_problems(text) == []
    assert text.count("\\toprule") == text.count("\\bottomrule") == 1
    assert "\\texttt{clip(min\\_accuracy=0.9) \\textbar{} temperature}" in text
    assert "\\textbf{" in text
    assert "ECE$\\ddagger$ \\%" in text
    assert latex_problems(tables.escaped("a&b%c$d#e_f{g}h~i^j\\k|l<m>n\"o'p")) == []


def test_the_layout_of_the_paper_compares_each_method_with_itself(found):
    assert PAPER_RECIPES[:4] == ("none", "clip", "temperature", "clip | temperature")
    rows = tuple(replace(found[i % 3], recipe=recipe) for i, recipe in enumerate(PAPER_RECIPES))
    paper = against_own_base(Comparison(rows, (None,) * 12, found.settings))
    blocks = paper_blocks(paper, columns(("ece", "nll")))
    for block, name in zip(blocks, ("ece", "nll"), strict=True):
        assert [line.label for line in block.lines] == list(PAPER_METHODS)
        for at, line in enumerate(block.lines):
            base, clipped = line.cells
            assert base.difference is None
            assert clipped.difference == paper.difference(2 * at + 1, name)
            assert clipped.difference.baseline == PAPER_RECIPES[2 * at]
    text = tables.markdown(paper, blocks)
    assert "**ECE**" in text
    assert ["method", "base‡ %", "after clip‡ %"] in rows_of(text)
    assert "the same method without clip" in text
    assert latex_problems(tables.latex(paper, blocks)) == []


def test_signs_mark_intervals_that_are_not_what_they_say(found, made):
    both = made(n=300, d=10, k=4)
    right = Batch(both.logits, both.logits.argmax(1))
    sure = compare(right, right, ["none"], resamples=100)
    shown = columns(("nll", "classwise_ece"))
    for comparison, few in ((found, ""), (sure, "†")):
        blocks = [comparison_block(comparison, shown)]
        assert {cell.range.partition("]")[2] for cell in blocks[0].lines[0].cells} == {few}
        assert blocks[0].marked == ["NLL", "classwise ECE‡"]
        for sign in f"{few}‡":  # explained once, in every format
            assert [n[0] for n in tables.notes(comparison, blocks)].count(sign) == 1
            assert f"- {sign} " in tables.markdown(comparison, blocks)
        assert latex_problems(tables.latex(comparison, blocks)) == []
        for names in (("nll",), ("accuracy", "brier")):  # where no such column is shown
            assert "‡" not in tables.markdown(
                comparison, [comparison_block(comparison, columns(names))]
            )
        wide = comparison.as_json()["settings"]["wide"]
        assert wide == ["ece", "adaptive_ece", "classwise_ece"]
        assert comparison[0].as_json().get("few_wrong", False) is bool(few)


def test_notes_say_how_the_numbers_came(found):
    assert len(tables.notes(found)) == 4
    named = {"pack": "p", "fit_split": "val", "test_split": "test", "mode": "joint"}
    how, *_ = tables.notes(replace(found, settings={**found.settings, **named}))
    assert how == "p: fitted jointly on val, scored on 300 rows of test."
    crossed = {**found.settings, "folds": 5, "fit_split": "val", "resamples": 0}
    (how,) = tables.notes(replace(found, settings=crossed))
    assert how == "cross-fitted jointly in 5 folds, scored on all 300 rows of val."


# --- fitted values ---


def step(noop=False, name="clip", **values):
    return StepReport(name, values, noop, 1.0, 0.9, True, "")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"threshold": 2.2649}, "c = 2.265"),
        ({"noop": True, "threshold": float("inf")}, "clip: no-op"),
        ({"weight": [0.5, 0.25, 1.0], "words": ["a"], "on": True}, "weight = 0.25 to 1"),
        ({}, ""),
        ({f"w{i}": i for i in range(5)}, "w0 = 0; w1 = 1; w2 = 2; w3 = 3; ..."),
        ({"T_min": 1.347, "T_max": 2.178, "spread": 0.2}, "T 1.347 to 2.178; spread = 0.2"),
        ({"T_min": 1.5, "T_max": 1.5}, "T = 1.5"),
        ({"bins": 15, "lowest": 0.6, "highest": 0.9}, "bins = 15; values 0.6 to 0.9"),
        (
            {"name": "matrix", "off_diagonal": 1.4, "ridge": 10, "w_min": -0.4, "w_max": 0.7},
            "w -0.4 to 0.7; penalty = 10",
        ),
    ],
)
def test_fitted_values_in_a_few_characters(values, text):
    assert step_text(step(**values)) == text


def test_fitted_values_over_folds():
    def fit(*steps):
        return FitReport("r", "sequential", "nll", 10, steps, 1.0, 0.9, 0.1)

    fits = [fit(step(threshold=c)) for c in (2.26, 2.3, 2.21)]
    idle = fit(step(noop=True, threshold=float("inf")))
    assert fitted_text([]) == ""
    assert fitted_text(fits) == "c = 2.21 to 2.3"
    assert fitted_text([*fits, idle]) == "c = 2.21 to 2.3 (clip: no-op in 1 of 4 folds)"
    hot = [step(name="temperature", temperature=t) for t in (1.1, 1.5)]
    assert fitted_text([fit(step(threshold=2.0), hot[0])]) == "c = 2, T = 1.1"
    cells = step(name="temperature", temperature=1.6, T_min=1.2, T_max=1.9)
    apart = [fit(hot[1]), fit(cells)]
    assert fitted_text(apart) == "T = 1.5 to 1.6; T 1.2 to 1.9"

    # Lines break between values alone.
    text = "c = 2.2, T 1.347 to 2.178; spread = 0.2"
    assert folded(text, 18).splitlines() == ["c = 2.2,", "T 1.347 to 2.178;", "spread = 0.2"]


def test_every_metric_has_a_column_that_says_what_is_better(found):
    assert set(COLUMNS) == set(found[0].scores.metrics)
    with pytest.raises(InputError, match="metric is 'ecce': choose one of accuracy, adaptive_ece"):
        columns(("ece", "ecce"))
    ece, nll, over = COLUMNS["ece"], COLUMNS["nll"], COLUMNS["overconfidence"]
    assert (ece.number(0.04684), ece.text(0.04684), ece.unit) == ("4.68", "4.68 %", "ECE %")
    assert (nll.number(1.03125), nll.text(1.0), nll.unit) == ("1.0312", "1.0000", "NLL")
    assert ece.text(float("nan")) == nll.text(float("nan")) == "n/a"
    assert over.text(-0.00001) == "0.00 %"
    assert COLUMNS["accuracy"].merit(0.9) > COLUMNS["accuracy"].merit(0.8)
    assert ece.merit(0.1) > ece.merit(0.2) > ece.merit(float("nan"))
    assert over.merit(-0.1) > over.merit(0.2)
