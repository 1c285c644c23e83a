"""The registry of metrics: each is the function of its name, and how it is printed and ranked."""

import math

import pytest
from hypothesis import given
from metric_cases import cases, labelled_logits, quick

from featcal import metrics
from featcal.core.checks import InputError
from featcal.metrics.columns import COLUMNS, USUAL, columns

HIGHER = {"accuracy", "auroc"}
NEITHER = {"confidence", "overconfidence"}
PLAIN = {"nll", "brier", "auroc", "aurc"}  # no percentages


def of(column, logits, labels, bins=15):
    counted = {"bins": bins} if "Bins" in column.summary.__name__ else {}
    return column.of(column.summary.of(logits=logits, labels=labels, **counted), bins)


@pytest.mark.parametrize("bins", [4, 15])
def test_a_column_is_the_function_of_its_name(bins):
    logits, labels = labelled_logits(2, 150, 4)
    for name, column in COLUMNS.items():
        got = of(column, logits, labels, bins)
        if name in NEITHER:
            mean = float(logits.softmax(1).amax(1).mean())
            right = metrics.accuracy(logits=logits, labels=labels)
            assert got == pytest.approx(mean - right * (name == "overconfidence"))
        else:
            function = getattr(metrics, name)
            counted = {"bins": bins} if "bins" in function.__kwdefaults__ else {}
            assert got == pytest.approx(function(logits=logits, labels=labels, **counted))


@quick
@given(cases(min_rows=1))
def test_every_value_lies_within_its_bounds(case):
    for column in COLUMNS.values():
        value = of(column, *case)
        assert math.isnan(value) or column.low - 1e-9 <= value <= column.high + 1e-9


def test_bounds_are_reached_and_no_wider():
    assert {name for name, column in COLUMNS.items() if column.low} == {"overconfidence"}
    assert COLUMNS["overconfidence"].low == -1
    highs = {name: column.high for name, column in COLUMNS.items() if column.high != 1}
    assert highs == {"nll": math.inf, "brier": 2}
    assert {name for name, c in COLUMNS.items() if c.power != 0.5} == {"smooth_ece"}
    assert COLUMNS["smooth_ece"].power == pytest.approx(1 / 3)


def test_how_a_value_is_printed():
    ece, nll = COLUMNS["ece"], COLUMNS["nll"]
    assert (ece.number(0.04678), ece.text(0.04678), ece.unit) == ("4.68", "4.68 %", "ECE %")
    assert (nll.number(1.03117), nll.text(1.03117), nll.unit) == ("1.0312", "1.0312", "NLL")
    for column in (ece, nll):
        assert column.number(-1e-9).lstrip("0.") == column.number(0.0).lstrip("0.") == ""
        assert column.number(math.nan) == column.text(math.nan) == "n/a"
    assert {name for name, column in COLUMNS.items() if not column.percent} == PLAIN


def test_what_is_better():
    for name, column in COLUMNS.items():
        worse, better = (0.2, 0.1) if name not in HIGHER else (0.1, 0.2)
        assert column.merit(better) > column.merit(worse) > column.merit(math.nan)
        if name in NEITHER:
            assert column.merit(-0.1) == column.merit(0.1)
    assert {name for name, column in COLUMNS.items() if column.better == 1} == HIGHER
    assert {name for name, column in COLUMNS.items() if column.better == 0} == NEITHER


def test_columns_are_asked_for_by_name():
    assert [column.name for column in columns()] == list(USUAL)
    assert columns(("nll",)) == [COLUMNS["nll"]]
    with pytest.raises(InputError, match=r"metric is 'loss': choose one of .*nll"):
        columns(("nll", "loss"))
