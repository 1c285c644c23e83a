"""Every replicate is the metric itself on the rows that were drawn; what may be read from them."""

import json
import math
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from featcal import Batch, evaluate
from featcal.core.checks import InputError
from featcal.metrics import Ordered, Predictions, smooth_ece_of
from featcal.metrics.columns import COLUMNS
from featcal.report.bootstrap import (
    MOST,
    UNKNOWN,
    Bootstrap,
    Interval,
    Resamples,
    interval,
    marks,
    metric_interval,
)

# The metric bisects the width to 2^-32, all others differ by rounding alone.
CLOSE = {"smooth_ece": 1e-9}


def rows(n, k, *, step=None, dtype=np.float32, seed=0):
    """Logits and labels; a step rounds the logits, so that ties are everywhere."""
    draw = np.random.default_rng(seed)
    logits = draw.normal(0, 2, (n, k))
    if step is not None:
        logits = np.round(logits / step) * step
    labels = np.where(draw.random(n) < 0.5, logits.argmax(1), draw.integers(0, k, n))
    return torch.tensor(logits.astype(dtype)), torch.tensor(labels)


def replicates(logits, labels, drawn, *, bins=15, part=17):
    """The replicates, the rows fed in parts."""
    bootstrap = Bootstrap(drawn, 0, bins)
    for start in range(0, len(labels), part):
        some = slice(start, start + part)
        bootstrap.add(logits[some], Predictions.of(logits=logits[some], labels=labels[some]))
    ordered = Ordered.of(logits=logits, labels=labels)
    return bootstrap.replicates(ordered, smooth_ece_of(ordered))


def drawn_from(logits, labels, resamples=100, seed=0):
    return Resamples.of([Batch(logits, labels)], None, len(labels), resamples, seed)


def check(logits, labels, *, bins=15, seed=0, every=25):
    """Draws rows and stand-ins physically, and evaluates them."""
    drawn = drawn_from(logits, labels, seed=seed)
    found = replicates(logits, labels, drawn, bins=bins)
    every_logits = torch.cat([logits, logits[drawn.rows]])
    every_label = torch.cat([labels, drawn.labels])
    for index in range(1, 101, every):
        counts = drawn.counts[:, index].long()
        rows = torch.arange(len(counts)).repeat_interleave(counts)
        assert int(counts[: len(labels)].sum()) == len(labels)
        scores = evaluate(Batch(every_logits[rows], every_label[rows]), bins=bins)
        assert set(found) == set(scores.metrics)
        for name, value in scores.metrics.items():
            close = pytest.approx(value, abs=CLOSE.get(name, 1e-12), nan_ok=True)
            assert float(found[name][index]) == close, (name, index)


CASES = {
    "no ties": {"n": 60, "k": 4},
    "ties everywhere": {"n": 80, "k": 3, "step": 2.0},
    "some ties": {"n": 200, "k": 20, "step": 1.0},
    "two rows of float64": {"n": 2, "k": 3, "dtype": np.float64},
    "fewer rows than bins": {"n": 7, "k": 2},
    "many classes": {"n": 60, "k": 300},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_replicate_is_the_metric_on_the_drawn_rows(case):
    check(*rows(**case))


def test_all_right_all_wrong_and_certain():
    logits, _ = rows(40, 3, step=1.0)
    check(logits, logits.argmax(1), every=50)  # AUROC is undefined on every resample
    check(logits, logits.argmin(1), every=50)
    check(100 * logits + 0.0, logits.argmax(1), every=50)  # a smooth ECE the series cannot resolve
    check(torch.zeros(30, 4), torch.arange(30) % 4, every=50)  # one run of equal confidences


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    n=st.integers(2, 40),
    k=st.integers(2, 6),
    step=st.sampled_from([None, 0.5, 3.0]),
    seed=st.integers(0, 10**6),
    bins=st.integers(1, 30),
)
def test_any_rows(n, k, step, seed, bins):
    check(*rows(n, k, step=step, seed=seed), bins=bins, seed=seed, every=50)


def test_neither_parts_nor_blocks_change_a_replicate(monkeypatch):
    logits, labels = rows(120, 6, step=1.0)
    resamples = drawn_from(logits, labels, 150, 3)
    whole = replicates(logits, labels, resamples, part=1000)
    monkeypatch.setattr("featcal.report.bootstrap.BLOCK", 500)
    monkeypatch.setattr("featcal.report.bootstrap.MATRIX", 700)
    cut = replicates(logits, labels, resamples, part=1)
    for name, values in whole.items():
        assert torch.allclose(cut[name], values, rtol=0, atol=1e-9, equal_nan=True), name


def test_draws_are_uniform_and_depend_on_the_seed_alone():
    first, again, other = (Resamples.draw(50, 100, seed).counts for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(first.sum(0), torch.full((101,), 50.0))
    counts = Resamples.draw(200, 5000).counts[:, 1:].double()
    assert counts.var() == pytest.approx(1 - 1 / 200, rel=0.01)
    assert float((counts.mean(1) - 1).abs().max()) < 5 / 5000**0.5


def test_numbers_that_are_refused():
    wrong = [{"resamples": n} for n in (99, MOST + 1, 2.5)] + [{"seed": s} for s in (-1, 0.5)]
    for one in wrong:
        with pytest.raises(InputError, match=f"{next(iter(one))} is"):
            evaluate(Batch(*rows(10, 3)), **{"resamples": 100, **one})


# --- intervals ---


def draws(n=4000, *, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=draw, dtype=torch.float64)


def around(centre, values):
    return torch.cat([torch.tensor([centre], dtype=torch.float64), values])


def test_bias_lengthens_the_percentile_interval_on_the_side_of_the_truth():
    values, power = draws(), 1 / 3
    values -= values.mean()
    low, high = values.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    plain = interval(10.0, around(10.0, values + 10), power)
    assert (plain.low, plain.high) == (pytest.approx(10 + low), pytest.approx(10 + high))
    above, below = (interval(10.0, around(10.0, values + at), power) for at in (11, 9))
    longer = 1 / (2**power - 1)
    assert (above.low, above.high) == (pytest.approx(plain.low - longer), pytest.approx(plain.high))
    assert (below.low, below.high) == (pytest.approx(plain.low), pytest.approx(plain.high + longer))

    # The norm of noise: the estimate is all bias, and the interval must hold 0.
    draw = torch.Generator().manual_seed(1)
    gaps = torch.randn(15, generator=draw, dtype=torch.float64)
    again = (gaps + torch.randn(4000, 15, generator=draw, dtype=torch.float64)).abs().sum(1)
    found = interval(float(gaps.abs().sum()), around(float(gaps.abs().sum()), again))
    assert found.low < 0 < again.quantile(0.025)


def test_a_fall_has_the_interval_of_a_rise_turned_round():
    values = 0.1 + 0.01 * draws(500, seed=3)
    rise, fall = interval(0.1, around(0.1, values)), interval(-0.1, -around(0.1, values))
    assert (fall.low, fall.high) == pytest.approx((-rise.high, -rise.low))
    assert fall.low < -0.11 < -0.09 < fall.high


def test_an_interval_holds_the_estimate_and_stays_where_the_metric_can_lie():
    for seed in range(20):
        shift = float(draws(1, seed=seed)) * 5
        found = interval(shift, draws(100, seed=seed))
        assert found.low <= shift <= found.high
    assert interval(1.0, torch.ones(100)) == Interval(1.0, 1.0)
    for name, column in COLUMNS.items():
        found = metric_interval(name, 0.5, around(0.5, 10 * draws() + 5))
        assert found.low == column.low, name
        assert found.high <= column.high, name


def test_an_error_that_chance_explains_may_be_none():
    values = around(0.03, 0.03 + 0.001 * draws())
    assert interval(0.03, values).low > 0.02
    assert interval(0.03, values, chance=(0.031, 0.0)).low == 0
    assert interval(0.03, values, chance=(0.02, 0.01)).low == pytest.approx(0.018, abs=3e-4)


def test_what_the_resamples_cannot_say_is_left_open():
    values = draws(101)
    assert interval(math.nan, values) is UNKNOWN
    values[:5] = math.nan
    assert interval(0.0, values) is UNKNOWN  # nothing to scatter around
    values[0] = 0.0
    assert not math.isnan(interval(0.0, values).low)
    values[1:7] = math.nan  # more than 5 %: the others are no fair sample
    assert interval(0.0, values) is interval(0.0, values[:1]) is UNKNOWN
    assert UNKNOWN.as_json() == [None, None]


def test_marks():
    for name, delta, low, high, expected in [
        ("ece", 0.15, 0.1, 0.2, "worse"),
        ("ece", -0.05, -0.101, 0.001, "undecided"),
        ("nll", -9e-5, -1e-4, -8e-5, "undecided"),  # none in the digits shown
        ("ece", -0.1, -0.1, -0.1, "undecided"),  # nothing is known without a width
        ("auroc", 0.15, 0.1, 0.2, "better"),
        ("overconfidence", 0.15, 0.1, 0.2, None),
        ("ece", 0.0, math.nan, math.nan, None),
    ]:
        assert marks(name, [(delta, Interval(low, high))]) == [expected], (name, delta)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.floats(0.5, 6), min_size=1, max_size=8))
def test_marks_are_those_of_holms_procedure(errors):
    """Differences of so many standard errors, against the textbook's steps."""
    width = NormalDist().inv_cdf(0.975)
    found = marks("nll", [(e, Interval(e - width, e + width)) for e in errors])
    p = [2 * NormalDist().cdf(-e) for e in errors]
    limits = [0.05 / place for place in range(1, len(p) + 1)]
    assume(all(abs(one / limit - 1) > 1e-9 for one in p for limit in limits))
    rejected = set()
    for step, index in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        if p[index] > 0.05 / (len(p) - step):
            break
        rejected.add(index)
    assert [word == "worse" for word in found] == [i in rejected for i in range(len(p))]
    # A recipe that changes nothing is no comparison.
    assert marks("nll", [(2.0, Interval(0.01, 4)), (0.0, Interval(0, 0))])[0] == "worse"


# --- errors that were not seen ---


def sure_rows(n, accuracy, seed, k=3):
    """Rows a calibrated model is right about with this chance, all as sure."""
    draw = np.random.default_rng(seed)
    other = math.log((1 - accuracy) / (k - 1))
    logits = np.full((n, k), other, dtype=np.float32)
    top = draw.integers(0, k, n)
    logits[np.arange(n), top] = math.log(accuracy)
    wrong = draw.random(n) > accuracy
    return torch.tensor(logits), torch.tensor(np.where(wrong, (top + 1) % k, top))


@pytest.mark.parametrize("accuracy", [0.98, 0.995])
def test_intervals_know_of_errors_that_are_rare(accuracy, monkeypatch):
    """They held the truth in 91 % and 65 % of such sets for the NLL, 85 % and 64 % for ECE."""
    monkeypatch.setattr("featcal.report.bootstrap.smooth_replicates", lambda *_: torch.zeros(101))
    truth = {"accuracy": accuracy, "ece": 0.0}
    truth["nll"] = -accuracy * math.log(accuracy) - (1 - accuracy) * math.log((1 - accuracy) / 2)
    held, sets = dict.fromkeys(truth, 0), 40
    for seed in range(sets):
        drawn = Batch(*sure_rows(200, accuracy, seed))
        found = evaluate(drawn, resamples=100, seed=seed)
        for name, value in truth.items():
            around = found.interval(name)
            held[name] += around.low <= value <= around.high
    assert min(held.values()) >= 0.88 * sets, held


def test_no_mark_comes_of_rows_that_are_all_right():
    """Logits multiplied until the loss is 0 where every row is right: better, without a width."""
    logits, labels = rows(300, 5)
    labels = logits.argmax(1)
    drawn = drawn_from(logits, labels, 200)
    before, after = (replicates(z, labels, drawn)["nll"] for z in (logits, 150 * logits))
    delta, pairs = float(logits.log_softmax(1).amax(1).mean()), after - before  # to a loss of 0
    assert delta < -0.1
    assert marks("nll", [(delta, interval(delta, pairs))]) == ["undecided"]
    scores = evaluate(Batch(logits, labels), resamples=200)
    around = scores.interval("accuracy")
    assert around.low == pytest.approx(1 - 4 / 304, abs=2e-3)  # the rule of three, and some
    assert around.high == 1


def test_very_many_rows_are_drawn_in_groups(monkeypatch):
    """Their replicates scatter as those of single rows do."""
    logits, labels = rows(3000, 4)
    batch = Batch(logits, labels)
    single = evaluate(batch, resamples=400)
    for name, value in {"SINGLY": 2000, "GROUPS": 500, "CELLS": 200}.items():
        monkeypatch.setattr(f"featcal.report.bootstrap.{name}", value)
    grouped = evaluate(batch, resamples=400)
    assert grouped.metrics == single.metrics
    for name in single.metrics:
        one, other = (scores.replicates[name] for scores in (single, grouped))
        assert float(other[0]) == pytest.approx(float(one[0]), abs=1e-8), name
        assert float(other.std()) == pytest.approx(float(one.std()), rel=0.25), name
        assert float(other.mean() - other[0]) == pytest.approx(
            float(one.mean() - one[0]), abs=0.4 * float(one.std())
        ), name
    # Neither what is taken at a time nor the form in which gaps are kept makes a difference.
    monkeypatch.setattr("featcal.report.bootstrap.ROWS", 100)
    monkeypatch.setattr("featcal.metrics.ordered.ROWS", 100)
    monkeypatch.setattr("featcal.report.bootstrap.TABLE", 2000)
    again = evaluate(batch, resamples=400)
    for name, values in grouped.replicates.items():
        assert torch.allclose(again.replicates[name], values, rtol=0, atol=1e-8), name


def test_a_probability_that_rounding_puts_above_an_edge_lies_on_it_here_too():
    votes = torch.tensor([[4.0, 56.0], [0.5, 59.5]]).repeat(15, 1)  # 1 of 15, in float32 above it
    assert float(votes.log().softmax(1)[0, 0]) > 1 / 15
    check(votes.log(), torch.tensor([0, 1] * 10 + [1] * 10), every=50)


def test_scores_carry_intervals_when_asked():
    logits, _ = rows(300, 4)
    batch = Batch(logits, logits.argmax(1))
    plain, scores = evaluate(batch), evaluate(batch, resamples=200)
    assert plain.intervals == {}
    assert plain.interval("ece") is UNKNOWN
    assert set(scores.intervals) == set(scores.metrics) == set(COLUMNS)
    assert math.isnan(scores.interval("auroc").low)  # every row is right
    assert scores.as_json() == plain.as_json()
    one = evaluate(Batch(logits[:1], batch.labels[:1]), resamples=100)
    assert one.intervals == {}  # one row says nothing of others


def test_the_table_of_coverage_is_that_of_its_result_file(imported):
    module = imported("interval_coverage")
    results = json.loads(module.RESULTS.read_text())
    shown = module.DOCS.read_text().split(module.START)[1].split(module.END)[0].strip()
    assert shown == module.table(results)
    every = [s for one in results["coverage"] for both in one["coverage"].values() for s in both]
    low = sum(round(share, 6) < 0.93 for share in every)
    assert sum(shown.count(f"right, {model})") for model in module.MODELS) == low
    error = module.points(results["setting"]["sets"]["coverage"]) / 100
    for name in module.METRICS:
        shares = [
            share
            for one in results["coverage"]
            if not module.few_wrong(one)  # which tables mark
            for share in one["coverage"][name]
        ]
        assert min(shares) >= 0.93 - error, name
        marked = COLUMNS[name].wide
        assert max(shares) > 0.97 if marked else max(shares) <= 0.97 + error, name
        false = [one["marks"]["metrics"][name] for one in results["marks"]]
        assert sum(one["better"] + one["worse"] for one in false) / len(false) <= 0.05, name


def test_few_units_scatter_as_students_t():
    """Quantiles of t at 97.5 % from a printed table, for samples and rows alike."""
    for units, t in ((10, 2.262), (30, 2.045), (50, 2.010), (201, 1.972)):
        drawn = Resamples.draw(8 * units, 100, samples=torch.arange(8 * units) // 8)
        expected = t / 1.960 * math.sqrt(units / (units - 1))
        assert drawn.few == pytest.approx(expected, abs=3e-3)
        assert Resamples.draw(units, 100).few == drawn.few
    logits, labels = rows(60, 3)
    alone = Batch(logits, labels, groups=torch.zeros(60, dtype=torch.int64))
    assert evaluate(alone, resamples=100).intervals == {}  # one sample says nothing of others


def test_noise_of_rows_that_are_alike_is_told_from_an_error():
    """Of samples whose rows are all right or all wrong, by the chance that is claimed."""
    right = torch.arange(100).repeat_interleave(20) % 5 > 0
    logits = torch.tensor([[math.log(4), 0.0]]).expand(2000, 2)
    for groups, samples in ((torch.arange(100).repeat_interleave(20), 100), (None, 2000)):
        scores = evaluate(Batch(logits, (~right).long(), groups=groups), resamples=1000)
        deviation = math.sqrt(0.8 * 0.2 / samples)
        most = deviation * (math.sqrt(2 / math.pi) + 1.96 * math.sqrt(1 - 2 / math.pi))
        assert scores.chance["ece"][0] == pytest.approx(most, rel=0.08)


def test_the_table_of_samples_is_that_of_its_result_file(imported):
    module = imported("clustered_coverage")
    results = json.loads(module.RESULTS.read_text())
    shown = module.DOCS.read_text().split(module.START)[1].split(module.END)[0].strip()
    assert shown == module.table(results)
    for one in results["rows"]:
        for name in module.METRICS:
            assert one["by_samples"][name] >= 0.93, (one["samples"], name)
            assert one["by_rows"][name] < 0.93, (one["samples"], name)


def test_rows_of_a_sample_are_drawn_together():
    """Copies of rows tell nothing new: drawn by samples, the intervals are those of one copy."""
    draw = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(150, 3, generator=draw)
    labels = torch.multinomial((logits / 2).softmax(1), 1, generator=draw)[:, 0]
    groups, copies = torch.arange(150), 8
    many = [values.repeat_interleave(copies, 0) for values in (logits, labels, groups)]
    one = evaluate(Batch(logits, labels), resamples=1000)
    by_sample = evaluate(Batch(many[0], many[1], groups=many[2]), resamples=1000)
    by_row = evaluate(Batch(many[0], many[1]), resamples=1000)
    for name in ("nll", "accuracy", "brier", "ece", "adaptive_ece", "classwise_ece", "auroc"):
        length, whole, torn = (
            (found := scores.interval(name)).high - found.low for scores in (one, by_sample, by_row)
        )
        assert whole == pytest.approx(length, rel=0.2), name
        assert torn < 0.7 * length, name
    drawn = Resamples.of([Batch(many[0], many[1], groups=many[2])], None, 1200, 100, 0)
    assert drawn.counts[:150].sum(0).unique().tolist() == [150]
    assert drawn.as_json == {"groups": None, "samples": 150, "unseen": 1.25}
    dealt = Resamples.draw(10_000, 100, samples=torch.arange(10_000) // 2)
    assert dealt.as_json["groups"] == 4096
    assert torch.equal(dealt.unit[::2], dealt.unit[1::2])
