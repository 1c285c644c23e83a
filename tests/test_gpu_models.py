"""A model on a CUDA device: collected, calibrated, kept and compiled there. Skipped without one."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import featcal

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


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
    assert calibrated(x.cuda().to(dtype)).dtype == torch.float32
    assert all(value.dtype == torch.float32 for value in calibrated.fc.calibrator.buffers())


def test_a_compiled_calibrated_model_equals_the_plain_one():
    calibrated = featcal.calibrate(made().cuda(), loader(), "clip | temperature").eval()
    x = next(iter(loader()))[0].cuda()
    with torch.no_grad():
        torch.testing.assert_close(
            torch.compile(calibrated)(x), calibrated(x), rtol=1e-4, atol=1e-4
        )


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


def test_one_logit_on_the_device():
    calibrated = featcal.calibrate(made(1).cuda(), loader(classes=2), "clip | temperature").eval()
    x, _ = next(iter(loader()))
    assert calibrated(x.cuda()).shape == (100, 1)


def test_a_pack_from_the_device(tmp_path):
    pack = featcal.collect_pack(
        made().cuda(), {"val": loader(), "test": loader(seed=2)}, tmp_path / "p"
    )
    assert not pack.head.weight.is_cuda
    assert pack.manifest.rows("test") == 600
