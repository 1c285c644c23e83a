"""What every summary and every metric function promises, stated once for all of them."""

import inspect

import pytest
import torch
from hypothesis import given
from metric_cases import cases, labelled_logits, quick, split_cases

from featcal import metrics
from featcal.core.checks import InputError
from featcal.metrics import Bins, ClassBins, Ordered, Predictions, ProperSums

SUMMARIES = (Bins, ClassBins, Ordered, ProperSums)
FUNCTIONS = [
    name
    for name in metrics.__all__
    if name[0].islower() and not name.endswith("_of") and name != "top_label"
]
every_summary = pytest.mark.parametrize("summary", SUMMARIES)


def numbers(summary):
    return [torch.as_tensor(getattr(summary, name)).double() for name in summary.__slots__]


def same(a, b, tolerance=1e-6):
    torch.testing.assert_close(numbers(a), numbers(b), atol=tolerance, rtol=1e-6)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_share_one_signature_and_return_a_float(name):
    function = getattr(metrics, name)
    parameters = inspect.signature(function).parameters
    assert list(parameters)[:3] == ["probs", "labels", "logits"]
    assert all(p.kind == p.KEYWORD_ONLY for p in list(parameters.values())[2:])
    logits, labels = labelled_logits(0, 30, 3)
    value = function(logits=logits.numpy(), labels=labels.numpy())
    assert type(value) is float
    assert value == pytest.approx(function(logits.softmax(1), labels))
    with pytest.raises(InputError, match="no rows"):
        function(torch.empty(0, 3), torch.empty(0, dtype=torch.int64))


@pytest.mark.parametrize("name", [*FUNCTIONS, "adaptive_ece_of", "debiased_ce_of"])
def test_fifteen_bins_where_none_are_named(name):
    function = getattr(metrics, name)
    if "bins" in inspect.signature(function).parameters:
        logits, labels = labelled_logits(1, 200, 3)
        rows = Ordered.of(logits=logits, labels=labels)
        given_rows = (rows,) if name.endswith("_of") else (logits.softmax(1), labels)
        assert function(*given_rows) == function(*given_rows, bins=15)


def test_fifteen_bins_in_a_summary():
    logits, labels = labelled_logits(1, 40, 3)
    read = Predictions.of(logits=logits, labels=labels)
    for summary in (Bins, ClassBins):
        for made in (summary.of(logits=logits, labels=labels), summary.of_predictions(read)):
            assert made.count.shape[-1] == 15
    assert Ordered.of_predictions(read).groups().shape == (3, 15)


@every_summary
@quick
@given(split_cases())
def test_parts_add_up_to_the_whole_and_no_rows_are_neutral(summary, case):
    logits, labels, i, j = case
    cuts = (slice(0, i), slice(i, j), slice(j, None))
    a, b, c = (summary.of(logits=logits[part], labels=labels[part]) for part in cuts)
    whole = summary.of(logits=logits, labels=labels)
    same(a + b + c, whole)
    same(a + (b + c), whole)
    same(whole + summary.of(logits=logits[:0], labels=labels[:0]), whole)
    same(whole.reduced(), whole)  # a process that is alone is the whole


@quick
@given(cases(min_rows=1))
def test_no_metric_depends_on_the_order_of_rows(case):
    logits, labels = case
    for name in FUNCTIONS:
        function = getattr(metrics, name)
        turned = function(logits=logits.flip(0), labels=labels.flip(0))
        assert turned == pytest.approx(
            function(logits=logits, labels=labels), rel=1e-5, abs=1e-6, nan_ok=True
        )


@every_summary
def test_read_once_or_directly(summary):
    logits, labels = labelled_logits(4, 60, 3)
    read = Predictions.of(logits=logits, labels=labels)
    same(summary.of_predictions(read), summary.of(logits=logits, labels=labels))


def test_summaries_that_differ_do_not_add():
    two, three, zero = torch.full((1, 2), 1 / 2), torch.full((1, 3), 1 / 3), torch.tensor([0])
    with pytest.raises(InputError, match=r"\(15,\) and \(10,\)"):
        Bins.of(two, zero) + Bins.of(two, zero, bins=10)
    with pytest.raises(InputError, match=r"\(2, 15\) and \(3, 15\)"):
        ClassBins.of(two, zero) + ClassBins.of(three, zero)


@pytest.mark.parametrize("bins", [0, -1, 2.0, "15", True, None])
def test_bins_is_a_positive_integer(bins):
    with pytest.raises(InputError, match="bins is"):
        metrics.ece(torch.tensor([0.8]), torch.tensor([1]), bins=bins)
