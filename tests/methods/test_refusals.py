"""Arguments and fitted values no method can use are refused, and the culprit is named."""

import math

import numpy as np
import pytest
import torch

from featcal import METHODS, Batch, InputError, load, parse, save

WRONG = {
    "density": "neighbours=0; references='all'; features='both'; reference=True, neighbours=7",
    "group": (
        "partitions=0; groups=1; min_rows=2.5; min_rows=10000000000000000000000; seed=-1; "
        "base='isotonic'; features='raw'; held_out=1; reference=True, base='ensemble'; "
        "reference=True, min_rows=500"
    ),
    "histogram": "bins=0; bins=True; edges='equal'; reading='all'",
    "isotonic": (
        "reading='all'; between='spline'; reference=True, reading='top'; "
        "reference=True, between='step'"
    ),
    "parameterised": "top=1; hidden=0; layers=1.5; restarts=True; seed=-1; reference=True, top=3",
    "proximity": (
        "neighbours=0; references=2.0; how='kde'; features=None; mirror=1; "
        "reference=True, how='bin_mean_shift'"
    ),
    "sample": "terms='all'; terms=1; terms=('norm',); terms='norm, norm'",
    "spline": "knots=1; knots=True; reference=1; knots=1000000000",
}
NAN = math.nan
ARGUMENTS = [
    *(("clip", {"min_accuracy": value}, "min_accuracy") for value in (0, 1.01, NAN, "0.99", True)),
    *(("clip", {"criterion": value}, "criterion is .*: choose nll") for value in ("NLL", None, 3)),
    ("clip", {"reference": 1}, "reference"),
    ("temperature", {"criterion": "mse"}, "criterion"),
    ("temperature", {"grid": 1}, "grid"),
    ("temperature", {"reference": None}, "reference"),
    ("temperature", {"reference": True, "grid": True}, "reference=True fixes"),
    ("temperature", {"reference": True, "criterion": "nll"}, "reference=True fixes"),
    ("classwise", {"reading": "class"}, "reading is .*: choose predicted or logit"),
    ("classwise", {"criterion": "brier"}, "criterion is .*: choose nll or ece"),
    ("classwise", {"grid": 1}, "grid"),
    ("classwise", {"reference": True, "reading": "logit"}, "reference=True fixes"),
    ("ensemble", {"criterion": "ece"}, "criterion is .*: choose nll or brier"),
    ("ensemble", {"reference": True, "criterion": "brier"}, "leave criterion out"),
    ("logit_clip", {"ties": "last"}, "ties is .*: choose keep or first"),
    ("logit_clip", {"reference": True, "ties": "first"}, "reference=True fixes"),
    *(("vector", {"ridge": value}, "ridge is") for value in (-1, NAN, True, "1", 1e308)),
    *(("matrix", {key: math.inf}, key) for key in ("ridge", "off_diagonal", "bias")),
    ("svs", {"penalty": None}, "penalty"),
]


@pytest.mark.parametrize("method", WRONG)
def test_wrong_arguments_are_refused_by_name(method):
    for arguments in WRONG[method].split("; "):
        culprit = arguments.split("=")[0]
        with pytest.raises(InputError, match=f"{method}: {culprit}"):
            parse(f"{method}({arguments})")


@pytest.mark.parametrize(("method", "arguments", "culprit"), ARGUMENTS, ids=str)
def test_arguments_are_refused(method, arguments, culprit):
    with pytest.raises(InputError, match=f"{method}: .*{culprit}"):
        METHODS[method](**arguments)


CLIPS = ("clip", "logit_clip", "norm_clip")
FIXED = [("temperature", "temperature"), *((clip, "threshold") for clip in CLIPS)]


@pytest.mark.filterwarnings("ignore::featcal.CalibrationWarning")  # of a step that harms
@pytest.mark.parametrize(("method", "key"), FIXED)
def test_what_a_recipe_may_fix_can_be_saved_and_loaded(method, key, tmp_path):
    """Smaller numbers are 0 in float32, and what they gave was saved and never loaded."""
    for value in (0, 1e-300, 1e-45, 9e-31, 1.1e30, 1e308, 10**400, True, "1"):
        with pytest.raises(InputError, match=f"{key} is .* from 1e-30 to 1e\\+30"):
            METHODS[method](**{key: value})
    features = torch.randn(200, 4).relu()
    batch, head = Batch(None, torch.arange(200) % 3, features), torch.nn.Linear(4, 3)
    for value in (1e-30, 1, 1e30):
        fitted = METHODS[method](**{key: value}).fit(batch, head.requires_grad_(False))
        save(fitted, tmp_path / f"{value}.safetensors")
        assert load(tmp_path / f"{value}.safetensors").report == fitted.report


@pytest.mark.parametrize("method", ["vector", "matrix", "dirichlet"])
def test_the_strongest_penalty_is_taken(method):
    assert METHODS[method](ridge=1e6).ridge == 1e6
    assert METHODS[method](ridge=0).ridge == 0


def test_numbers_of_numpy_are_shown_as_pythons():
    assert repr(METHODS["clip"](min_accuracy=np.float64(0.99))) == "clip(min_accuracy=0.99)"
    assert repr(METHODS["vector"](ridge=np.float64(0.5))) == "vector(ridge=0.5)"
    assert repr(METHODS["clip"](min_accuracy=1)) == "clip(min_accuracy=1)"
