"""Cross-fitting: every row is scored by a fit that has not seen it."""

import pytest
import torch

import featcal
from featcal import Batch, InputError, compare
from featcal.report.compare import Folds


@pytest.fixture(scope="module")
def data(made):
    """A fit part, a test part and the head."""
    both = made(n=900, d=12, k=4)
    batch = Batch(both.logits, both.labels, both.features)
    return batch.rows(slice(0, 500)), batch.rows(slice(500, 900)), both.head


def test_folds_partition_the_rows(data):
    fit, _, _ = data
    batches = [fit.rows(slice(start, start + 64)) for start in range(0, 500, 64)]
    folds = Folds.deal(batches, 500, 7, seed=3, first_row=0)
    sizes = torch.bincount(folds.fold).tolist()
    assert sum(sizes) == 500
    assert max(sizes) - min(sizes) <= 1
    for fold in range(7):
        left = torch.cat([batch.features for batch in folds.without(fold)])
        assert torch.equal(left, fit.features[folds.fold != fold])
    assert torch.equal(folds.fold, Folds.deal(batches, 500, 7, seed=3, first_row=0).fold)
    assert not torch.equal(folds.fold, Folds.deal(batches, 500, 7, seed=4, first_row=0).fold)


@pytest.mark.parametrize("recipe", ["none", "temperature", "clip | temperature"])
def test_out_of_fold_scores_are_those_of_the_fits_without_each_fold(data, recipe):
    fit, _, head = data
    (row,) = compare(fit, None, [recipe], head, folds=4, seed=5, resamples=100)
    dealt = Folds.deal([fit], 500, 4, seed=5, first_row=0)
    logits = torch.empty(500, 4)
    for fold in range(4):
        inside = dealt.fold == fold
        if recipe == "none":
            logits[inside] = fit.logits[inside]
            continue
        alone = featcal.parse(recipe).fit(fit.rows(~inside), head, mode="sequential")
        assert torch.equal(
            alone(fit.features[inside], head), row.folds[fold](fit.features[inside], head)
        )
        logits[inside] = alone(fit.features[inside], head)
    expected = featcal.evaluate(Batch(logits, fit.labels), resamples=100, seed=5)
    assert row.scores.n == 500
    assert row.scores.metrics == pytest.approx(expected.metrics, abs=1e-6)
    assert row.scores.interval("nll").low == pytest.approx(expected.interval("nll").low, abs=1e-6)
    assert row.calibrator is None


def test_batches_do_not_change_cross_fitting(data):
    fit, _, head = data
    batches = [fit.rows(slice(start, start + 33)) for start in range(0, 500, 33)]
    whole, cut = (
        compare(given, None, ["temperature"], head, folds=5, resamples=0)
        for given in (fit, batches)
    )
    assert whole[0].scores.metrics == pytest.approx(cut[0].scores.metrics, abs=1e-6)


def test_json_of_cross_fitting(data):
    fit, _, head = data
    body = compare(fit, None, ["none", "temperature"], head, folds=3, resamples=0).as_json()
    assert body["settings"]["folds"] == 3
    none, temperature = body["rows"]
    assert none["fit"] is temperature["fit"] is None
    assert none["fits"] == [] if "fits" in none else True
    assert [fit_["rows"] for fit_ in temperature["fits"]] == [333, 333, 334]
    assert len({fit_["steps"][0]["temperature"] for fit_ in temperature["fits"]}) == 3


def test_leave_one_out(data):
    fit, _, head = data
    few = fit.rows(slice(0, 12))
    (row,) = compare(few, None, ["temperature"], head, folds=12, resamples=0)
    assert len(row.folds) == 12
    assert row.scores.n == 12


@pytest.mark.parametrize("wrong", [1, 0, -3, 501, 2.5, True, "5"])
def test_folds_that_are_refused(data, wrong):
    fit, _, head = data
    with pytest.raises(
        InputError, match=r"folds is .* for 500 rows: pass an integer from 2 to 500"
    ):
        compare(fit, None, ["none"], head, folds=wrong)


def test_test_data_or_folds(data):
    fit, test, head = data
    with pytest.raises(InputError, match="test_data is None: pass rows to score on, or folds=5"):
        compare(fit, None, ["none"], head)
    with pytest.raises(InputError, match="folds is 5 and test_data is given"):
        compare(fit, test, ["none"], head, folds=5)
