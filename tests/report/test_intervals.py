"""Intervals and verdicts: what replicates may be read as."""

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch

from featcal import Batch, evaluate
from featcal.report.scores import COLUMNS, UNKNOWN, Interval, interval, metric_interval, verdict

ROOT = Path(__file__).parents[2]


def draws(n=4000, *, mean=0.0, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return mean + torch.randn(n, generator=draw, dtype=torch.float64)


def test_without_bias_it_is_the_percentile_interval():
    values = draws()
    values -= values.mean()
    low, high = values.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    found = interval(0.0, values)
    assert found.low == pytest.approx(low)
    assert found.high == pytest.approx(high)


@pytest.mark.parametrize("power", [1 / 2, 1 / 3])
def test_bias_lengthens_the_side_of_the_truth_alone(power):
    values = draws()
    values -= values.mean()
    plain = interval(10.0, values + 10, power)
    above, below = interval(10.0, values + 11, power), interval(10.0, values + 9, power)
    longer = 1 / (2**power - 1)
    assert above.high == pytest.approx(plain.high)
    assert above.low == pytest.approx(plain.low - longer)
    assert below.low == pytest.approx(plain.low)
    assert below.high == pytest.approx(plain.high + longer)


def test_pure_noise_reaches_down_to_zero():
    """The norm of noise: the estimate is all bias, and the interval must hold 0."""
    draw = torch.Generator().manual_seed(1)
    gaps = torch.randn(15, generator=draw, dtype=torch.float64)
    again = gaps + torch.randn(4000, 15, generator=draw, dtype=torch.float64)
    found = interval(float(gaps.abs().sum()), again.abs().sum(1))
    assert found.low < 0
    percentile = again.abs().sum(1).quantile(0.025)
    assert percentile > 0


def test_it_always_holds_the_estimate():
    for seed in range(20):
        shift = float(draws(1, mean=0, seed=seed)) * 5
        found = interval(shift, draws(100, seed=seed))
        assert found.low <= shift <= found.high
    assert interval(1.0, torch.ones(100)) == Interval(1.0, 1.0)


def test_metrics_stay_where_they_can_lie():
    wide = draws(mean=0.5) * 10
    for name, column in COLUMNS.items():
        found = metric_interval(name, 0.5, wide)
        assert found.low == column.low, name
        assert found.high == min(column.high, found.high), name
    assert math.isfinite(metric_interval("nll", 0.5, wide).high)


def test_what_the_resamples_cannot_say_is_left_open():
    values = draws(100)
    assert interval(math.nan, values) is UNKNOWN
    values[:4] = math.nan
    assert not math.isnan(interval(0.0, values).low)
    values[:6] = math.nan  # more than 5 %: the others are no fair sample
    assert interval(0.0, values) is UNKNOWN
    assert interval(0.0, values[:0]) is UNKNOWN
    assert UNKNOWN.as_json() == [None, None]
    assert Interval(0.25, 0.5).as_json() == [0.25, 0.5]


@pytest.mark.parametrize(
    ("name", "low", "high", "expected"),
    [
        ("ece", -0.2, -0.1, "better"),
        ("ece", 0.1, 0.2, "worse"),
        ("ece", -0.1, 0.1, "undecided"),
        ("ece", 0.0, 0.0, "undecided"),
        ("ece", -0.1, 0.0, "undecided"),
        ("ece", -2e-8, -1e-8, "undecided"),  # rounding of the same logits
        ("nll", -2e-4, -1e-4, "better"),
        ("accuracy", -0.2, -0.1, "worse"),
        ("accuracy", 0.1, 0.2, "better"),
        ("auroc", 0.1, 0.2, "better"),
        ("aurc", 0.1, 0.2, "worse"),
        ("confidence", 0.1, 0.2, None),
        ("overconfidence", 0.1, 0.2, None),
        ("ece", math.nan, math.nan, None),
    ],
)
def test_verdicts(name, low, high, expected):
    assert verdict(name, Interval(low, high)) == expected


def test_scores_carry_intervals_when_asked():
    draw = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(300, 4, generator=draw)
    batch = Batch(logits, logits.argmax(1))
    assert evaluate(batch).intervals == {}
    assert evaluate(batch).interval("ece") is UNKNOWN
    scores = evaluate(batch, resamples=200)
    assert set(scores.intervals) == set(scores.metrics) == set(COLUMNS)
    for name, found in scores.intervals.items():
        if name == "auroc":
            assert math.isnan(found.low)  # every row is right
        else:
            assert found.low <= scores.metrics[name] <= found.high, name
    assert scores.as_json() == evaluate(batch).as_json()  # `featcal eval --json` is as it was
    one = evaluate(Batch(logits[:1], batch.labels[:1]), resamples=100)
    assert one.intervals == {}  # one row says nothing of others


def test_narrower_with_more_rows():
    draw = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(4000, 4, generator=draw)
    labels = (logits + torch.randn(4000, 4, generator=draw)).argmax(1)
    few, many = (
        evaluate(Batch(logits[:n], labels[:n]), resamples=300).interval("accuracy")
        for n in (250, 4000)
    )
    assert (many.high - many.low) / (few.high - few.low) == pytest.approx(1 / 4, rel=0.2)
    right = evaluate(Batch(logits, labels)).metrics["accuracy"]
    normal = 2 * 1.96 * (right * (1 - right) / 4000) ** 0.5
    assert many.high - many.low == pytest.approx(normal, rel=0.15)


def test_the_table_of_the_documents_is_that_of_the_result_file():
    path = ROOT / "experiments" / "interval_coverage.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    results = json.loads(module.RESULTS.read_text())
    shown = module.DOCS.read_text().split(module.START)[1].split(module.END)[0].strip()
    assert shown == module.table(results)
    for case in results["coverage"]:
        for name in module.SHOWN:
            assert case["metrics"][name]["ours"] >= 0.8, (case["rows"], case["sharpness"], name)
    for case in results["false_findings"]:
        for name in module.SHOWN:
            assert case["metrics"][name]["ours"] <= 0.08, (case["sharpness"], name)
