"""Reports, and the mode of a head around a fit."""

import json
import math
import random

import numpy as np
import pytest
import torch
from torch import nn

from featcal import Batch, Temperature
from featcal.core.fit import Counted, FitReport, StepReport, evaluating, exact, plain, undisturbed


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


def test_a_report_is_noop_only_if_every_step_is():
    assert report(step(noop=True), step(noop=True)).noop
    assert not report(step(noop=True), step(noop=False)).noop


def test_a_record_gives_the_report_back():
    first = report(step(details={}), step(name="temperature", values={"t": 2.5}, details={}))
    record = json.loads(json.dumps(first.as_record(), allow_nan=False))
    assert FitReport.of_record(record) == first


def test_a_noop_survives_the_record():
    first = report(step(values={"threshold": math.inf}, noop=True, details={}))
    again = FitReport.of_record(json.loads(json.dumps(first.as_record(), allow_nan=False)))
    assert again == first
    assert again.as_json() == first.as_json()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (math.inf, None),
        (-math.inf, None),
        (math.nan, None),
        (1.5, 1.5),
        (3, 3),
        (True, True),
        (None, None),
        ("inf", "inf"),
        ((1, [math.nan]), [1, [None]]),
        ({"a": {"b": math.inf}}, {"a": {"b": None}}),
    ],
)
def test_plain_knows_what_json_has_no_word_for(value, expected):
    assert plain(value) == expected


def test_counted_counts_rows():
    head = Counted(lambda x: x * 2)
    assert torch.equal(head(torch.ones(3, 2)), torch.full((3, 2), 2.0))
    head(torch.ones(4, 2))
    assert head.rows == 7


def test_evaluating_restores_every_flag_also_after_an_error():
    module = nn.Sequential(nn.Dropout(), nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)))
    module[1].eval()
    flags = [part.training for part in module.modules()]
    stops = pytest.raises(RuntimeError, match="stop")
    with stops, evaluating(module):
        assert not any(part.training for part in module.modules())
        raise RuntimeError("stop")
    assert [part.training for part in module.modules()] == flags


def test_evaluating_leaves_other_heads_alone():
    with evaluating(None), evaluating(lambda x: x):
        pass


# --- undisturbed and exact --------------------------------------------------------------------


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


def test_undisturbed_blocks_stand_inside_each_other(module):
    with undisturbed(module):
        first = draws()
        with undisturbed(module):
            inner = draws()
        assert draws() == inner
        assert not module.training
    assert draws() == first
    assert module.training


def test_undisturbed_keeps_a_flag_that_eval_itself_would_set_otherwise():
    class Frozen(nn.Module):
        def train(self, mode=True):
            super().train(mode)
            self.note = mode
            return self

    model = Frozen().train()
    model.training = False
    with undisturbed(model):
        assert not model.training
    assert not model.training


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


@pytest.mark.gpu
def test_undisturbed_restores_the_generator_of_the_gpu():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model = nn.Linear(2, 2, device="cuda")
    state = torch.cuda.get_rng_state()
    with undisturbed(model):
        torch.rand(3, device="cuda")
    assert torch.equal(torch.cuda.get_rng_state(), state)


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


def test_a_fit_under_autocast_is_the_fit_without():
    draw = torch.Generator().manual_seed(0)
    head = nn.Linear(6, 3)
    features = torch.randn(80, 6, generator=draw)
    with torch.no_grad():
        probs = (head(features) / 2).softmax(1)
    batch = Batch(None, torch.multinomial(probs, 1, generator=draw)[:, 0], features)
    plain = Temperature().fit(batch, head)
    with torch.autocast("cpu", torch.bfloat16):
        found = Temperature().fit(batch, head)
    assert torch.equal(found.temperature, plain.temperature)
