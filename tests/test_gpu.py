"""On a CUDA device: the same fitted values and scores as on the CPU, and models collected there."""

import copy
import inspect

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import featcal
from featcal import Batch
from featcal.heads.head import head_logits

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


def test_products_have_fewer_digits_only_where_torch_was_asked_for_them():
    val, head = demo_batch("val"), featcal.demo_pack().head
    x, weight = val.features.double(), head.weight.double()
    exact, size = x @ weight.T + head.bias.double(), x @ weight.abs().T + head.bias.abs()

    def off():  # of what a fit sees, in shares of the sizes that are summed up
        far = copy.deepcopy(head).cuda()
        found = featcal.parse("temperature").fit(on_gpu(val), far)
        seen = head_logits(val.features.cuda(), far).double().cpu()
        return float(((seen - exact).abs() / size).max()), found.report.loss_before

    plain, loss = off()
    assert plain < 258 * 2**-24
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        tf32, moved = off()
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert plain <= tf32 < 2**-10 + 2**-15
    assert moved == pytest.approx(loss, abs=1e-4)


# --- models -----------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, classes=5):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.drop = nn.Dropout(0.3)
        self.fc = nn.Linear(16, classes)

    def forward(self, x):
        return self.fc(self.drop(self.body(x).mean((2, 3))))


def made(classes=5):
    torch.manual_seed(0)
    model = Net(classes)
    model.fc.weight.data *= 30
    return model


def loader(n=600, classes=5, seed=1, **options):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, 8, 8, generator=generator)
    y = torch.randint(classes, (n,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=100, **options)


def test_collected_features_are_those_of_the_cpu_and_lie_in_main_memory():
    model = made()
    here = featcal.collect(model, loader())
    there = featcal.collect(copy.deepcopy(model).cuda(), loader(pin_memory=True))
    for ours, theirs in zip(here, there, strict=True):
        assert not theirs.features.is_cuda
        torch.testing.assert_close(theirs.features, ours.features, rtol=1e-2, atol=1e-3)  # TF32
    assert there.path == "fc"


def test_the_random_state_of_the_device_is_left_alone():
    model = made().cuda().train()
    before = torch.cuda.get_rng_state()
    featcal.collect(model, loader(shuffle=True))
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert all(part.training for part in model.modules())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_respected_by_collect_and_not_by_the_fit(dtype):
    model = made().cuda()
    with torch.autocast("cuda", dtype):
        data = featcal.collect(model, loader())
        calibrated = featcal.calibrate(model, loader(), "temperature")
    assert data[0].logits.dtype == dtype
    plain = featcal.calibrate(model, loader(), "temperature")
    found, expected = (m.fc.calibrator.temperature.item() for m in (calibrated, plain))
    assert found == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_models_take_float_inputs_and_keep_fitted_values_in_full(dtype):
    model = made().cuda().to(dtype)
    calibrated = featcal.calibrate(model, loader(), "clip | temperature").eval()
    x, _ = next(iter(loader()))
    logits = calibrated(x.cuda().to(dtype))
    assert logits.is_cuda
    assert logits.dtype == torch.float32
    assert bool(logits.isfinite().all())
    assert all(value.dtype == torch.float32 for value in calibrated.fc.calibrator.buffers())


def test_an_inner_layer_is_recomputed_on_the_device():
    model = made().cuda()
    inner = featcal.collect(model, loader(), layer="body")
    clip = featcal.FeatureClip().fit(inner, inner.head)
    clip.assign(threshold=0.7)
    attached = featcal.attach(model, clip, head=inner.path, layer="body").eval()
    x, _ = next(iter(loader()))
    with torch.no_grad():
        found, expected = (
            attached(x.cuda()),
            inner.head.eval()(inner[0].features.cuda().clamp(max=0.7)),
        )
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_a_pack_from_the_device(tmp_path):
    pack = featcal.collect_pack(
        made().cuda(), {"val": loader(), "test": loader(seed=2)}, tmp_path / "p"
    )
    assert not pack.head.weight.is_cuda
    assert pack.manifest.rows("test") == 600


def test_a_compiled_calibrated_model_equals_the_plain_one():
    calibrated = featcal.calibrate(made().cuda(), loader(), "clip | temperature").eval()
    x = next(iter(loader()))[0].cuda()
    with torch.no_grad():
        torch.testing.assert_close(
            torch.compile(calibrated)(x), calibrated(x), rtol=1e-4, atol=1e-4
        )
