"""Reports, the mode of a head around a fit, and losses against naive float64 loops."""

import json
import math
import random

import numpy as np
import pytest
import torch
from torch import nn

from featcal import parse
from featcal.core.batch import Batch
from featcal.core.checks import InputError
from featcal.core.fit import (
    Facts,
    FitReport,
    StepReport,
    accuracy,
    brier,
    confidence,
    ece,
    exact,
    measure,
    nll,
    survey,
    undisturbed,
)


def crowded(rows=300, classes=40, *, heat=1.0):
    """Logits that are right as they are, times `heat`, of many classes for the rows."""
    draw = np.random.default_rng(0)
    logits = 2 * draw.normal(size=(rows, classes))
    labels = (logits + draw.gumbel(size=logits.shape)).argmax(1)
    return Batch(torch.tensor(heat * logits), torch.tensor(labels))


@pytest.mark.parametrize(
    "recipe",
    [
        "isotonic(reading='one_vs_rest')",
        "histogram(reading='one_vs_rest', edges='width')",
        "vector(ridge=0)",
        "matrix(off_diagonal=0, bias=0, ridge=0)",
    ],
)
def test_more_numbers_than_the_rows_can_carry_are_judged_on_rows_left_out(recipe):
    found = parse(recipe).fit(crowded()).report.steps[0]
    assert found.noop
    assert "rows left out" in found.message
    assert found.details["left_out"] > found.loss_before


@pytest.mark.parametrize("recipe", ["svs", "vector", "classwise", "classwise(grid=True)"])
def test_what_helps_rows_left_out_is_kept(recipe):
    found = parse(recipe).fit(crowded(heat=3.0)).report.steps[0]
    assert not found.noop
    assert found.details["left_out"] < found.loss_before


def test_equations_without_a_solution_are_a_refusal():
    """Logits so large that their squares are not finite; `auto` does without what refuses."""
    batch, head = crowded(120, 4), nn.Linear(4, 4, bias=False)
    head.weight.data = torch.eye(4)
    huge = Batch(None, batch.labels, 1e30 * batch.logits.float())
    with pytest.raises(InputError, match="sample has no solution on these rows: rescale"):
        parse("sample").fit(huge, head)
    assert parse("auto").fit(huge, head).report.steps


def test_few_rows_are_told_of_where_something_was_learned_from_them():
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(60, 3, generator=draw)
    labels = torch.multinomial(logits.softmax(1), 1, generator=draw)[:, 0]
    sure = Batch(5 * logits, labels)
    assert "60 rows are few" in parse("temperature").fit(sure).report.few_rows
    assert parse("temperature(temperature=3.0)").fit(sure).report.few_rows == ""
    idle = parse("temperature").fit(Batch(torch.zeros(60, 3), labels)).report
    assert (idle.steps[0].noop, idle.few_rows) == (True, "")
    many = Batch(sure.logits.repeat(2, 1), labels.repeat(2))
    assert parse("temperature").fit(many).report.few_rows == ""


def test_few_numbers_are_not_judged_again():
    for recipe in ("temperature", "svs", "isotonic"):
        found = parse(recipe).fit(crowded(3000, 3, heat=3.0)).report.steps[0]
        assert "left_out" not in found.details
    nine = data(n=9, k=3, seed=7)  # with a row in each fold
    found = parse("ensemble").fit(Batch(2 * nine.logits, nine.labels)).report.steps[0]
    assert not found.noop
    assert "left_out" not in found.details


def step(**changes):
    base = {
        "name": "clip",
        "values": {"threshold": 0.25},
        "noop": False,
        "loss_before": 1.5,
        "loss_after": 1.25,
        "converged": True,
        "message": "c = 0.25",
        "details": {"evaluations": 7, "shares": (0.5, math.nan)},
        "head_passes": 9,
        "seconds": 0.1,
    }
    return StepReport(**{**base, **changes})


def report(*steps):
    return FitReport("clip", "joint", "nll", 100, steps or (step(),), 1.5, 1.25, 0.2)


def test_as_json_is_flat_and_has_no_infinities():
    found = report(step(values={"threshold": math.inf}, noop=True)).as_json()
    text = json.dumps(found, allow_nan=False)
    assert '"threshold": null' in text
    assert found["steps"][0]["name"] == "clip"
    assert found["steps"][0]["evaluations"] == 7
    assert found["steps"][0]["shares"] == [0.5, None]
    assert found["noop"] is True


def test_a_noop_survives_the_record():
    first = report(step(values={"threshold": math.inf}, noop=True, details={}))
    again = FitReport.of_record(json.loads(json.dumps(first.as_record(), allow_nan=False)))
    assert again == first
    assert again.as_json() == first.as_json()


def test_a_report_sums_up_its_steps():
    chosen = step(details={"choice": "clip"})
    whole = report(step(warning="look"), step(noop=True), chosen)
    assert whole.warnings == ["look"]
    assert whole.choice is chosen
    assert not whole.noop
    assert report(step(noop=True), step(noop=True)).noop
    assert (report().warnings, report().choice) == ([], None)
    found = whole.as_json()
    assert (found["classes"], found["features"], found["rows"]) == (0, 0, 100)
    assert found["warnings"] == ["look"]
    assert (step().seconds, step(head_passes=0).as_json()["head_passes"]) == (0.1, 0)
    fresh = StepReport("clip", {}, True, 1.0, 1.0, True, "no-op")
    assert (fresh.warning, fresh.details, fresh.head_passes, fresh.seconds) == ("", {}, 0, 0)


def test_the_work_of_a_pass_counts_a_wide_head():
    for width, times in ((0, 1), (255, 1), (511, 1), (512, 2), (2048, 8)):
        assert Facts(10, 3, width, torch.device("cpu")).work == 30 * times


def test_a_head_is_tried_on_the_first_rows_that_come():
    rows = data(n=90)
    seen = []

    def head(features):
        seen.append(len(features))
        return features

    batch = Batch(rows.logits, rows.labels, rows.logits)
    empty = batch.rows(slice(0, 0))
    facts = survey([empty, batch, empty, batch.rows(slice(0, 5))], head)
    assert (facts.rows, facts.classes, facts.width) == (95, 4, 4)
    assert seen == [64]
    with pytest.raises(InputError, match="in row 3"):
        survey(
            [empty, Batch(rows.logits, torch.where(torch.arange(90) == 3, 9, rows.labels))], None
        )


def test_samples_are_counted_over_all_batches():
    rows = data(n=90)
    groups = torch.arange(90) // 9
    cut = [slice(0, 30), slice(30, 90)]
    facts = survey([Batch(rows.logits[c], rows.labels[c], groups=groups[c]) for c in cut], None)
    assert (facts.rows, facts.groups, facts.samples) == (90, 10, 10)
    alone = survey([Batch(rows.logits, rows.labels)], None)
    assert (alone.groups, alone.samples) == (0, 90)
    parts = Batch(rows.logits, rows.labels, groups=groups), Batch(rows.logits, rows.labels)
    with pytest.raises(InputError, match=r"row 90 on has .* None groups .* first batch has .* 1 g"):
        survey(parts, None)


def draws():
    """The next number of every generator."""
    return float(torch.rand(())), random.random(), float(np.random.rand())


@pytest.fixture
def module():
    module = nn.Sequential(nn.Dropout(), nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)))
    module[1].eval()
    return module


@pytest.mark.parametrize("fails", [False, True])
def test_undisturbed_restores_generators_and_flags(module, fails):
    flags = [part.training for part in module.modules()]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    expected = draws()
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])
    try:
        with undisturbed(module):
            assert not any(part.training for part in module.modules())
            assert draws() == expected  # the block goes on where the caller was
            draws()
            if fails:
                raise OSError
    except OSError:
        assert fails
    assert draws() == expected  # and so does the caller
    assert [part.training for part in module.modules()] == flags


class Merging(nn.Linear):
    """Adds its part to the weights in eval mode and takes it off in training, as LoRA does."""

    merged = False

    def train(self, mode=True):
        super().train(mode)
        if mode == self.merged:
            with torch.no_grad():
                self.weight += -1 if mode else 1
            self.merged = not mode
        return self


@pytest.mark.parametrize("outer", [True, False])
def test_weights_merged_in_eval_mode_come_back(outer):
    model = nn.Sequential(Merging(2, 2), nn.Sequential(Merging(2, 2), nn.Dropout()))
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(0.25)
    model.train(outer)
    model[1].train()
    model[1][1].eval()
    flags = [part.training for part in model.modules()]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with undisturbed(model):
        assert model[0].merged
        assert model[1][0].merged
        assert not any(part.training for part in model.modules())
    assert [part.training for part in model.modules()] == flags
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model[0].merged == (not outer)
    assert not model[1][0].merged


def test_a_flag_comes_back_even_where_train_refuses_it(module):
    class Frozen(nn.BatchNorm1d):
        def train(self, mode=True):
            return super().train(False)

    frozen = Frozen(2)
    frozen.training = True
    with undisturbed(nn.Sequential(frozen, module)):
        assert not frozen.training
    assert frozen.training
    assert module.training


def test_exact_turns_autocast_off_and_on_again():
    a = torch.randn(4, 4)
    with exact():
        assert (a @ a).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert (a @ a).dtype == torch.bfloat16
        with exact():
            assert not torch.is_autocast_enabled("cpu")
            assert (a @ a).dtype == torch.float32
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
        with pytest.raises(OSError, match="stop"), exact():
            raise OSError("stop")
        assert (a @ a).dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


def data(n=400, k=4, seed=0):
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, k, generator=draw) * 3
    labels = torch.multinomial(logits.softmax(1), 1, generator=draw)[:, 0]  # gaps of either sign
    return Batch(logits, labels)


def naive(batch):
    """Every loss by plain loops over rows."""
    z = batch.logits.double().numpy()
    y = batch.labels.numpy()
    sums = {"nll": 0.0, "brier": 0.0, "accuracy": 0.0, "confidence": 0.0}
    bins = {}
    for row, label in zip(z, y, strict=True):
        e = np.exp(row - row.max())
        p = e / e.sum()
        target = np.eye(len(p))[label]
        sums["nll"] -= math.log(p[label])
        sums["brier"] += float(((p - target) ** 2).sum())
        right = float(p.argmax() == label)
        sums["accuracy"] += right
        sums["confidence"] += float(p.max())
        where = min(max(math.ceil(p.max() * 15) - 1, 0), 14)
        conf, corr = bins.get(where, (0.0, 0.0))
        bins[where] = (conf + float(p.max()), corr + right)
    found = {key: value / len(y) for key, value in sums.items()}
    found["ece"] = sum(abs(a - b) for a, b in bins.values()) / len(y)
    return found


@pytest.mark.parametrize("loss", [nll, brier, ece, accuracy, confidence], ids=lambda x: x.name)
def test_losses_equal_naive_loops(loss):
    batch = data()
    assert measure([batch], loss)[0] == pytest.approx(naive(batch)[loss.name], abs=1e-6)


def test_losses_are_measured_together_over_parts_and_of_changed_logits():
    batch = data()
    parts = [batch.rows(slice(0, 150)), batch.rows(slice(150, None))]
    alone = [measure([batch], loss)[0] for loss in (ece, nll, accuracy)]
    assert measure(parts, ece, nll, accuracy) == pytest.approx(alone, abs=1e-12)
    halved = Batch(batch.logits / 2, batch.labels)
    assert measure([batch], ece.after(lambda z: z / 2)) == measure([halved], ece)
    assert (ece.smooth, accuracy.smooth) == (False, False)
    assert nll.smooth
    assert brier.smooth
    assert confidence.smooth


@pytest.mark.parametrize("loss", [nll, brier, ece, accuracy, confidence], ids=lambda x: x.name)
def test_sums_have_the_declared_size_and_type(loss):
    batch = data()
    sums = loss(batch.logits, batch)
    assert sums.shape == (loss.size,)
    assert sums.dtype == torch.float64
    assert torch.equal(loss(batch.logits[:0], batch.rows(slice(0, 0))), torch.zeros_like(sums))
