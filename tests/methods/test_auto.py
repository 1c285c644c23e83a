"""auto: what it tries, when it leaves `sample`, when it does nothing, and what it hands on."""

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from contract_cases import make_world

import featcal
from featcal import Batch, InputError, parse
from featcal.core.fit import brier
from featcal.core.sample import row_hash
from featcal.methods.auto import FOLDS, GROUPS, Judged, to_use


@pytest.fixture(scope="module")
def world():
    return make_world(n=900, d=12, k=4, heat=1.7)


@pytest.fixture(scope="module")
def batch(world):
    return Batch(world.logits, world.labels, world.features)


@pytest.fixture(scope="module")
def fitted(world, batch):
    return parse("auto").fit(batch, world.head)


def choice(calibrator):
    (step,) = calibrator.report.steps
    return step.values.get("recipe"), {row["recipe"]: row for row in step.details["choice"]}


def rows_left_out(recipe, batch, head):
    """The NLL of every row by a fit without its fold, in the plainest way."""
    group = row_hash(batch.logits.bfloat16()) * GROUPS >> 32
    losses = torch.zeros(len(batch), dtype=torch.float64)
    for fold in range(FOLDS):
        held = group % FOLDS == fold
        part = batch.rows(held)
        logits = part.logits
        if recipe != "none":
            fit = parse(recipe).fit(batch.rows(~held), head)
            with torch.no_grad():
                logits = fit(part.features, head)
        losses[held] = F.cross_entropy(logits.double(), part.labels, reduction="none")
    return losses.numpy(), group.numpy()


def test_the_table_is_that_of_a_plain_loop_over_the_folds(world, batch, fitted):
    _, table = choice(fitted)
    first, group = rows_left_out("sample", batch, world.head)
    for recipe in ("none", "temperature", "isotonic", "clip | sample"):
        losses, _ = rows_left_out(recipe, batch, world.head)
        assert table[recipe]["value"] == pytest.approx(losses.mean(), abs=2e-5)
        assert table[recipe]["difference"] == pytest.approx((losses - first).mean(), abs=2e-5)
        apart = losses - first
        without = np.array([apart[group != one].mean() for one in range(GROUPS)])
        error = np.sqrt((GROUPS - 1) / GROUPS * ((without - without.mean()) ** 2).sum())
        assert table[recipe]["error"] == pytest.approx(error, rel=0.02, abs=1e-6)


def judged(*rows):
    return [Judged(name, value, value - rows[1][1], error, 0.9) for name, value, error in rows]


def test_only_what_is_better_beyond_chance_takes_the_place_of_sample():
    raw, first = ("none", 1.0, 0.1), ("sample", 0.8, 0.0)
    assert to_use(judged(raw, first, ("svs", 0.75, 0.04))).recipe == "sample"
    assert to_use(judged(raw, first, ("svs", 0.75, 0.02))).recipe == "svs"
    better = (("svs", 0.75, 0.02), ("isotonic", 0.74, 0.02), ("spline", 0.7, 0.06))
    assert to_use(judged(raw, first, *better)).recipe == "isotonic"


def test_nothing_is_done_where_the_network_as_it_is_does_as_well():
    raw, first = ("none", 0.8, 0.1), ("sample", 0.8, 0.0)
    assert to_use(judged(raw, first)).recipe == "none"
    assert to_use(judged(raw, first, ("svs", 0.75, 0.02))).recipe == "svs"


def test_a_calibrated_network_is_left_as_it_is():
    draw = torch.Generator().manual_seed(3)
    found = []
    for _ in range(6):
        logits = 2 * torch.randn(400, 3, generator=draw)
        labels = torch.multinomial(logits.softmax(1), 1, generator=draw)[:, 0]
        auto = parse("auto").fit(Batch(logits, labels))
        found.append(choice(auto)[0])
        if found[-1] is None:
            assert auto.report.noop
            assert torch.equal(auto(logits, lambda z: z), logits)
    assert found.count(None) >= 3


def test_classes_that_are_off_each_in_its_own_way_call_for_more_than_sample():
    draw = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(4000, 4, generator=draw)
    shifted = logits + torch.tensor([2.0, -1.0, 0.0, -1.0])
    labels = torch.multinomial(logits.softmax(1), 1, generator=draw)[:, 0]
    batch = Batch(shifted, labels)
    recipe, _ = choice(parse("auto").fit(batch))
    assert "svs" in recipe
    kept = parse("auto(keep_predictions=True)").fit(batch)
    recipe, table = choice(kept)
    assert "svs" not in recipe
    assert not any("svs" in name or "clip" in name for name in table)
    assert torch.equal(kept(shifted, lambda z: z).argmax(1), shifted.argmax(1))


def test_logits_alone_and_few_rows_per_class_leave_recipes_out(batch):
    assert not any(
        "clip" in name for name in choice(parse("auto").fit(Batch(batch.logits, batch.labels)))[1]
    )
    draw = torch.Generator().manual_seed(0)
    wide = 3 * torch.randn(300, 100, generator=draw)
    labels = torch.multinomial((wide / 2).softmax(1), 1, generator=draw)[:, 0]
    _, table = choice(parse("auto").fit(Batch(wide, labels)))
    assert not any("svs" in name for name in table)


def test_too_few_rows_choose_nothing():
    auto = parse("auto").fit(Batch(torch.eye(3), torch.arange(3)))
    assert auto.report.noop
    assert choice(auto) == (None, {})
    assert auto.report.choice is None


def test_rows_of_few_kinds_that_fill_no_folds_get_sample():
    """Votes of five trees: three kinds of rows."""
    draw = torch.Generator().manual_seed(0)
    votes = torch.randint(3, (900,), generator=draw)
    logits = torch.tensor([[0.0, 9.0], [0.0, 0.1], [9.0, 0.0]])[votes]
    labels = (torch.rand(900, generator=draw) < torch.tensor([0.8, 0.5, 0.2])[votes]).long()
    auto = parse("auto").fit(Batch(logits, labels))
    assert choice(auto) == ("sample", {})
    assert auto.report.loss_after < 0.7 < auto.report.loss_before


@pytest.mark.parametrize("metric", ["brier", "ece"])
def test_another_metric_judges(metric, world, batch):
    _, table = choice(parse(f"auto(metric={metric!r})").fit(batch, world.head))
    scores = featcal.evaluate(batch, None, world.head, resamples=0)
    assert table["none"]["value"] == pytest.approx(scores.metrics[metric], abs=1e-6)


def test_another_loss_is_fitted_by_what_takes_it(world, batch):
    _, table = choice(parse("auto").fit(batch, world.head, loss=brier))
    assert list(table)[:2] == ["none", "temperature"]
    assert not any("sample" in name for name in table)


def test_files_models_and_pipelines_hold_what_was_chosen(world, batch, fitted, tmp_path):
    recipe, _ = choice(fitted)
    kept = featcal.load(featcal.save(fitted, tmp_path / "c.safetensors"))
    assert repr(kept) == repr(fitted.outcome()) == recipe
    assert kept.report.recipe == "auto"
    assert repr(fitted.wrap(world.head).calibrator) == recipe
    with pytest.raises(InputError, match="alone"):
        parse("clip | auto")


def test_the_choice_does_not_depend_on_order_and_batches(world, batch, fitted):
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(1))
    pieces = [batch.rows(part) for part in order.split(100)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = parse("auto").fit(pieces, world.head)
    mine, theirs = choice(fitted), choice(other)
    assert mine[0] == theirs[0]
    for recipe, row in mine[1].items():
        assert row["value"] == pytest.approx(theirs[1][recipe]["value"], abs=1e-4)


def test_calibrate_without_a_recipe_chooses(world, batch):
    model = torch.nn.Sequential(torch.nn.Identity(), world.head)
    loader = list(zip(batch.features.split(300), batch.labels.split(300), strict=True))
    calibrated = featcal.calibrate(model, loader)
    expected = parse("auto").fit(batch, world.head)
    with torch.no_grad():
        torch.testing.assert_close(calibrated(batch.features), expected(batch.features, world.head))
