"""Reports, and the mode of a head around a fit."""

import json
import math

import pytest
import torch
from torch import nn

from featcal.core.fitting import Counted, FitReport, StepReport, evaluating, plain


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
