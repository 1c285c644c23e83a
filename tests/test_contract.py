"""What every method promises of its fit. A method registered later is tested without a line."""

import copy
import gc
import json
import weakref
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from contract_cases import (
    CASES,
    SINGLE,
    fit,
    fitted,
    make_world,
    outputs,
    same_buffers,
    same_fit,
    shared_world,
)
from torch import nn

from featcal import Batch, InputError, parse
from featcal.core.batch import CHUNK_ROWS, Chunked

pytestmark = pytest.mark.usefixtures("few_choices")
every_case = pytest.mark.parametrize(("recipe", "mode"), CASES)
every_single = pytest.mark.parametrize(("recipe", "mode"), SINGLE)
# The same fit in another way: coverage has seen every line of it and would only cost time.
seen = pytest.mark.no_cover


@pytest.fixture(scope="module")
def world():
    return shared_world()


@every_case
def test_a_fit_lowers_the_loss_or_says_noop_and_keeps_what_it_promises(recipe, mode, world):
    calibrator = fitted(recipe, mode)
    found, report = outputs(calibrator, world.features, world.head), calibrator.report
    before, after = (
        float(F.cross_entropy(logits.double(), world.labels)) for logits in (world.logits, found)
    )
    assert after < before - 1e-3 or report.noop
    assert report.noop == torch.equal(found, world.logits)
    assert report.loss_before == pytest.approx(before, abs=1e-6)
    assert report.loss_after == pytest.approx(after, abs=1e-6)
    assert (report.rows, report.mode) == (len(world.labels), mode)
    assert report.recipe == repr(calibrator) == repr(parse(recipe)) == repr(parse(report.recipe))
    assert json.loads(json.dumps(report.as_json(), allow_nan=False))["recipe"] == report.recipe
    same = torch.equal(found.argmax(1), world.logits.argmax(1))
    assert same or not calibrator.keeps_accuracy
    right = (world.logits.argmax(1) == world.labels).sum()
    assert (found.argmax(1) == world.labels).sum() > 0.9 * right  # promised or not


@seen
@every_single
def test_a_refit_gives_the_same_bits_and_touches_nothing_else(recipe, mode, world):
    head, calibrator = copy.deepcopy(world.head), fitted(recipe, mode)
    head.weight.grad = torch.full_like(head.weight, 0.5)
    kept = [head.weight.clone(), head.bias.clone(), head.weight.grad.clone()]
    rows = [part.clone() for part in (world.features, world.logits, world.labels)]
    random = torch.get_rng_state()
    assert fit(calibrator, world.batch, head, mode=mode) is calibrator
    same_buffers(calibrator, fitted(recipe, mode))
    assert torch.equal(torch.get_rng_state(), random)
    now = [head.weight, head.bias, head.weight.grad, world.features, world.logits, world.labels]
    assert all(torch.equal(one, other) for one, other in zip(now, kept + rows, strict=True))
    assert head.bias.grad is None
    assert head.weight.requires_grad
    assert head.training
    assert not any(value.requires_grad for value in calibrator.buffers())


@seen
@every_case
def test_neither_order_nor_batches_nor_train_mode_nor_an_earlier_fit_matter(recipe, mode, world):
    """Rows mixed, in batches of none, one and many, without logits, of a head with dropout."""
    other = make_world(n=200, heat=4.0, seed=9)
    earlier = Batch(other.logits, other.labels, other.features)
    calibrator = fit(recipe, earlier, other.head, mode="sequential")
    order = torch.randperm(len(world.labels), generator=torch.Generator().manual_seed(3))
    mixed = Batch(None, world.labels, world.features).rows(order)
    edges = [0, 0, 1, 2, 700, 700, len(mixed), len(mixed)]
    parts = [mixed.rows(slice(a, b)) for a, b in pairwise(edges)]
    head = nn.Sequential(nn.Dropout(0.5), copy.deepcopy(world.head), nn.Dropout(0.3))
    head[2].eval()  # a flag that differs from its parent's must survive too
    fit(calibrator, parts, head, mode=mode)
    assert [module.training for module in head.modules()] == [True, True, True, False]
    same_fit(calibrator, fitted(recipe, mode), world, rtol=1e-5)


@every_single
def test_logit_methods_need_no_head_and_others_say_what_they_need(recipe, mode, world):
    calibrator, only_logits = parse(recipe), Batch(world.logits, world.labels)
    if calibrator.needs_features:
        with pytest.raises(InputError, match=r"works on features: pass head="):
            fit(calibrator, only_logits, mode=mode)
        with pytest.raises(InputError, match="features"):
            fit(calibrator, only_logits, world.head, mode=mode)
    elif calibrator.takes_features:  # other terms where there are features
        found = fit(calibrator, only_logits, mode=mode)
        assert not found.needs_features
        assert found.report.loss_after < found.report.loss_before
        assert fitted(recipe, mode).needs_features
    else:
        same_buffers(fit(calibrator, only_logits, mode=mode), fitted(recipe, mode))


@pytest.mark.parametrize("recipe", ["temperature", "clip | temperature"])
def test_a_failing_fit_leaves_the_head_in_its_mode(recipe, world):
    head = nn.Sequential(nn.Dropout(0.5), copy.deepcopy(world.head))
    with pytest.raises(InputError, match="labels are outside"):
        fit(recipe, Batch(None, world.labels + 100, world.features), head)
    assert head.training
    assert head[0].training
    with pytest.raises(InputError, match=r"can be read only once.*pass list\(data\)"):
        parse(recipe).fit((part for part in [world.batch]), world.head, train=world.batch)


class Stream:
    """Makes its chunks anew on every pass and watches how many are alive at once."""

    def __init__(self, batch, rows):
        self.batch, self.rows = batch, rows
        self.alive = weakref.WeakSet()
        self.most = 0

    def __iter__(self):
        for start in range(0, len(self.batch), self.rows):
            chunk = self.batch.rows(slice(start, start + self.rows))
            features = chunk.features.clone()
            self.alive.add(features)
            self.most = max(self.most, len(self.alive))
            yield Batch(chunk.logits.clone(), chunk.labels.clone(), features)
            del chunk, features


@pytest.mark.parametrize("recipe", [name for name, _ in SINGLE])
def test_features_are_streamed_never_gathered(recipe, monkeypatch):
    """With clip and auto on data larger than the rows they keep sums or copies of."""
    if parse(recipe).keeps_rows:
        pytest.skip("rows are among its fitted values")
    rows = CHUNK_ROWS if recipe in ("auto", "clip") else 256
    monkeypatch.setattr(Chunked.__init__, "__defaults__", (None, 0, rows))
    world = make_world(n=6 * rows, d=48, k=8, heat=1.6)
    gc.collect()
    stream = Stream(Batch(world.logits, world.labels, world.features), rows)
    report = fit(recipe, stream, world.head).report
    assert report.loss_after < report.loss_before
    assert stream.most <= 3, f"{stream.most} of 6 chunks were alive at once"
