"""The face of the package, and the summaries over two processes."""

import inspect

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from metric_cases import labelled_logits

from featcal import metrics
from featcal.metrics import Bins, ClassBins, Ordered, Predictions, ProperSums

SUMMARIES = (Bins, ClassBins, Ordered, ProperSums)
FUNCTIONS = [
    "ece",
    "mce",
    "rms_ce",
    "classwise_ece",
    "adaptive_ece",
    "debiased_ce",
    "ks_error",
    "smooth_ece",
    "nll",
    "brier",
    "accuracy",
    "auroc",
    "aurc",
    "e_aurc",
]


def test_every_public_name_exists_and_is_documented():
    assert sorted(metrics.__all__) == metrics.__all__
    assert all(getattr(metrics, name).__doc__ for name in metrics.__all__)


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


@pytest.mark.parametrize("summary", SUMMARIES)
def test_summaries_share_one_shape(summary):
    for name in ("of", "of_predictions", "reduced", "__add__"):
        assert callable(getattr(summary, name))
    assert list(inspect.signature(summary.of).parameters)[:3] == ["probs", "labels", "logits"]


def as_rows(summary):
    return [torch.as_tensor(getattr(summary, name)).double() for name in summary.__slots__]


def reduce_on_rank(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    logits, labels = labelled_logits(15, 41, 3, dtype="float32")
    part = slice(0, 30) if rank == 0 else slice(30, None)
    mine = Predictions.of(logits=logits[part], labels=labels[part])
    none = Predictions.of(logits=logits[:0].double(), labels=labels[:0])
    whole = Predictions.of(logits=logits, labels=labels)
    alone = whole if rank == 0 else none
    for summary in SUMMARIES:
        expected = as_rows(summary.of_predictions(whole))
        for part in (mine, alone):
            got = as_rows(summary.of_predictions(part).reduced())
            torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-12)
    assert Ordered.of_predictions(alone).reduced().confidence.dtype == torch.float32
    dist.destroy_process_group()


def test_two_processes_make_the_whole_even_when_one_has_no_rows(tmp_path):
    mp.spawn(reduce_on_rank, args=(str(tmp_path),), nprocs=2)
