"""What every network promises, tried on small members of each family."""

import copy

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_model, save_model
from torch import nn

import featcal
from featcal.models import MODELS, Classifier, build

K = 5
SMALL = {
    "resnet50": {"blocks": (1, 2, 1, 1), "width": 4},
    "densenet121": {"blocks": (2, 1, 2), "growth": 4},
    "wrn26x10": {"depth": 8, "width": 1},
    "wrn16x4": {"depth": 10, "width": 1},
    "vit": {"image_size": 16, "width": 24, "depth": 2, "heads": 3},
}
INSIDE = {
    "resnet50": "layer3",
    "densenet121": "transition1",
    "wrn26x10": "group2",
    "wrn16x4": "group1",
    "vit": "blocks.0",
}
MAPS = [name for name in SMALL if name != "vit"]


@pytest.fixture(params=SMALL)
def name(request):
    return request.param


@pytest.fixture
def model(name, lived_in):
    torch.manual_seed(0)
    return lived_in(build(name, K, **SMALL[name]))


@pytest.fixture
def images():
    return torch.randn(12, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def close(found, wanted):
    scale = float(wanted.abs().max())
    assert float((found - wanted).abs().max()) <= 1e-5 * scale


def test_every_class_is_tried_here():
    with torch.device("meta"):
        tried = {type(build(name, K, **options)) for name, options in SMALL.items()}
        assert tried == {type(build(name, K)) for name in MODELS}


@torch.no_grad()
def test_forward_is_the_head_on_the_features(model, images):
    features = model.features(images)
    assert features.shape == (12, model.feature_size)
    assert torch.equal(model(images), model.head(features))
    assert model(images).shape == (12, K)
    assert model.get_classifier() is model.head
    assert model.head.bias is not None


@torch.no_grad()
def test_features_have_the_sign_the_class_says(model, images):
    features = model.features(images)
    assert float(features.max()) > 0
    assert bool((features < 0).any()) is model.signed


def test_the_head_is_found_and_proved(model, images):
    assert featcal.find_head(model) == "head"
    assert featcal.find_head(model, inputs=images) == "head"


@torch.no_grad()
def test_channels_last_gives_the_same(model, images):
    other = copy.deepcopy(model).to(memory_format=torch.channels_last)
    close(other(images.contiguous(memory_format=torch.channels_last)), model(images))
    # a view of rows stored (n, h, w, 3), as data sets keep them
    rows = images.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    close(other(rows), model(images))


@torch.no_grad()
def test_a_pass_in_eval_mode_repeats_and_leaves_no_trace(model, images):
    before = copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    first = model(images)
    assert torch.equal(model(images), first)
    close(model(images[:3]), first[:3])
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(now, before[key]) for key, now in model.state_dict().items())


def test_the_gradient_reaches_every_parameter(name, images):
    torch.manual_seed(0)
    model = build(name, K, **SMALL[name]).train()
    F.cross_entropy(model(images), torch.arange(12) % K).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert float(parameter.grad.abs().sum()) > 0, key
        assert bool(parameter.grad.isfinite().all()), key


def trained(name, images, steps=3):
    torch.manual_seed(3)
    model = build(name, K, **SMALL[name]).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), torch.arange(12) % K)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return model.state_dict(), losses


def test_training_repeats_bit_for_bit_and_draws_nothing(name, images):
    first, losses = trained(name, images)
    after = torch.get_rng_state()
    again, _ = trained(name, images)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert losses[-1] < losses[0]
    torch.manual_seed(3)
    build(name, K, **SMALL[name])
    assert torch.equal(torch.get_rng_state(), after)  # only the first weights were drawn


@torch.no_grad()
def test_it_can_be_exported_with_any_number_of_rows(model, images):
    shapes = ({0: torch.export.Dim("rows", min=2, max=64)},)
    program = torch.export.export(model, (images[:4],), dynamic_shapes=shapes).module()
    close(program(images), model(images))


@torch.no_grad()
def test_it_is_one_graph_for_the_compiler(model, images):
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(images), model(images))
    torch.compiler.reset()


@torch.no_grad()
def test_weights_survive_safetensors(name, model, images, tmp_path):
    save_model(model, str(tmp_path / "weights.safetensors"))
    fresh = build(name, K, **SMALL[name]).eval()
    assert not torch.equal(fresh(images), model(images))
    assert load_model(fresh, str(tmp_path / "weights.safetensors")) == (set(), [])
    assert torch.equal(fresh(images), model(images))


@pytest.mark.parametrize("name", MAPS)
@torch.no_grad()
def test_images_of_another_size(name, model):
    for size in (32, 64, 40):
        assert model(torch.randn(2, 3, size, size)).shape == (2, K)
    assert model(torch.randn(2, 3, 32, 48)).shape == (2, K)


@torch.no_grad()
def test_float64_and_bfloat16(model, images):
    exact = copy.deepcopy(model).double()(images.double())
    assert exact.dtype == torch.float64
    close(model(images).double(), exact)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(images).float()
    assert float((rounded - exact).abs().mean()) < 0.05 * float(exact.abs().max())


def test_a_calibrated_network_keeps_its_contract(model, images):
    calibrated = featcal.attach(model, featcal.parse("clip | temperature"), head="head")
    assert calibrated.feature_size == model.feature_size
    assert calibrated.get_classifier() is calibrated.head
    assert torch.equal(calibrated(images), model(images))


@torch.no_grad()
def test_a_part_inside_can_be_clipped(name, model, images):
    layer, clip = INSIDE[name], featcal.FeatureClip()
    rows = featcal.collect(model, [(images, torch.arange(12) % K)], layer=layer)
    bound = float(torch.cat([batch.features for batch in rows]).abs().median())
    clip.assign(threshold=bound)
    clipped = featcal.attach(model, clip, head="head", layer=layer)
    part = model.get_submodule(layer)
    with part.register_forward_hook(lambda _, __, out: out.clamp(-bound, bound)):
        wanted = model(images)
    close(clipped(images), wanted)
    assert not torch.equal(wanted, model(images))


def test_a_network_of_ones_own_needs_features_and_a_head(images):
    class Mine(Classifier):
        family, signed = "mine", True

        def __init__(self, classes):
            super().__init__(classes)
            self.head = nn.Linear(3, classes)

        def features(self, images):
            return images.mean((2, 3))

    mine = Mine(4)
    assert mine.feature_size == 3
    assert mine(images).shape == (12, 4)
    assert featcal.find_head(mine, inputs=images) == "head"
    with pytest.raises(featcal.InputError, match="mine: classes is 1: give a whole number from 2"):
        Mine(1)


def test_a_classifier_without_features_cannot_be_made():
    class Half(Classifier):
        family, signed = "half", True

    with pytest.raises(TypeError, match="features"):
        Half(3)
