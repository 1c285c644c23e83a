"""On a CUDA device: the same fitted values and scores as on the CPU. Skipped without one."""

import copy
import inspect

import pytest
import torch
from torch import nn

import featcal
from featcal import Batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def demo_batch(split):
    batches = list(featcal.demo_pack().split(split))
    return Batch(
        None, torch.cat([b.labels for b in batches]), torch.cat([b.features for b in batches])
    )


def on_gpu(batch):
    return Batch(None, batch.labels.cuda(), batch.features.cuda())


@pytest.mark.parametrize("recipe", ["clip", "temperature", "clip | temperature"])
@pytest.mark.parametrize("mode", ["joint", "sequential"])
def test_fit_and_scores_equal_those_on_the_cpu(recipe, mode):
    val, test, head = demo_batch("val"), demo_batch("test"), featcal.demo_pack().head
    here = featcal.parse(recipe).fit(val, head, mode=mode)
    there = featcal.parse(recipe).fit(on_gpu(val), copy.deepcopy(head).cuda(), mode=mode)
    for ours, theirs in zip(here.buffers(), there.buffers(), strict=True):
        assert theirs.is_cuda
        torch.testing.assert_close(theirs.cpu(), ours, rtol=2e-3, atol=0)
    assert there.report.loss_after == pytest.approx(here.report.loss_after, abs=2e-6)
    scores = featcal.evaluate(on_gpu(test), there, copy.deepcopy(head).cuda())
    expected = featcal.evaluate(test, here, head).metrics
    assert scores.metrics["nll"] == pytest.approx(expected["nll"], abs=2e-4)
    assert scores.metrics["ece"] == pytest.approx(expected["ece"], abs=1e-3)


AS_PUBLISHED = [
    f"{name}(reference=True)"
    for name, method in sorted(featcal.METHODS.items())
    if "reference" in inspect.signature(method).parameters
    and name not in ("group", "spline")  # rounding decides where they end, on any device
]


@pytest.mark.parametrize(
    "recipe", [*sorted(featcal.METHODS), *AS_PUBLISHED, "clip | group", "clip | vector"]
)
def test_every_method_says_the_same_on_the_device(recipe):
    val, head = demo_batch("val").rows(slice(0, 3000)), featcal.demo_pack().head
    far = copy.deepcopy(head).cuda()
    here = featcal.parse(recipe).fit(val, head, train=val)
    there = featcal.parse(recipe).fit(on_gpu(val), far, train=on_gpu(val))
    assert all(value.is_cuda for value in there.buffers())
    assert there.report.loss_after == pytest.approx(here.report.loss_after, abs=1e-3)
    with torch.no_grad():
        probs = there(val.features.cuda(), far).softmax(1).cpu()
        expected = here(val.features, head).softmax(1)
    # A row at an edge of a bin or of a group may fall on the other side of it.
    assert (probs - expected).abs().amax(1).quantile(0.99) < 0.02


def test_small_data_takes_the_exact_path_on_the_device_too():
    small = demo_batch("val").rows(slice(0, 200))
    head = featcal.demo_pack().head
    here = featcal.FeatureClip().fit(small, head)
    there = featcal.FeatureClip().fit(on_gpu(small), copy.deepcopy(head).cuda())
    assert there.report.loss_after == pytest.approx(here.report.loss_after, abs=1e-5)


def test_a_model_on_the_device_is_calibrated_where_it_is():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).cuda()
    inputs = torch.randn(512, 8)
    labels = torch.randint(4, (512,))
    calibrated = featcal.calibrate(model, [(inputs, labels)], "clip | temperature")
    logits = calibrated(inputs.cuda())
    assert logits.is_cuda
    assert logits.dtype == torch.float32
    assert torch.isfinite(logits).all()


def test_bfloat16_model_on_the_device():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).cuda().bfloat16()
    inputs = torch.randn(512, 8).bfloat16()
    labels = torch.randint(4, (512,))
    calibrated = featcal.calibrate(model, [(inputs, labels)], "clip | temperature")
    assert calibrated(inputs.cuda()).dtype == torch.float32
