"""What every network promises, tried on small members of each family; and what is refused."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import featcal
from featcal.models import MODELS, Classifier, build, network_options

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
    assert float(features.max()) > 0
    assert bool((features < 0).any()) is model.signed
    assert featcal.find_head(model) == featcal.find_head(model, inputs=images) == "head"


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


def trained(name, images, steps=3):
    torch.manual_seed(3)
    model = build(name, K, **SMALL[name]).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), torch.arange(12) % K)
        loss.backward()
        assert all(bool(p.grad.isfinite().all() and p.grad.any()) for p in model.parameters())
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
    """Traced, not compiled: the backend runs the graph as it is."""
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(images), model(images))
    torch.compiler.reset()


@pytest.mark.parametrize("name", MAPS)
@torch.no_grad()
def test_images_of_another_size(name, model):
    assert model(torch.randn(2, 3, 32, 40)).shape == (2, K)


@torch.no_grad()
def test_float64_and_bfloat16(model, images):
    exact = copy.deepcopy(model).double()(images.double())
    assert exact.dtype == torch.float64
    close(model(images).double(), exact)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(images).float()
    assert float((rounded - exact).abs().mean()) < 0.05 * float(exact.abs().max())


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
    assert clipped.feature_size == model.feature_size
    assert clipped.get_classifier() is clipped.head


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

    class Half(Classifier):
        family, signed = "half", True

    with pytest.raises(TypeError, match="features"):
        Half(3)


def test_options_take_the_place_of_defaults():
    assert network_options("resnet110") == {"blocks": (3, 4, 26, 3), "width": 64}
    assert build("resnet50", 2, width=2, blocks=[1, 1, 1, 1]).feature_size == 64


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("resnet-50", {}, "no network is called 'resnet-50'; did you mean resnet50? There are res"),
        ("alexnet_v2", {}, "no network is called 'alexnet_v2'; there are resnet50, resnet110, "),
        ("resnet50", {"depth": 3}, "has no option 'depth': it takes blocks=(3, 4, 6, 3), width=64"),
        ("resnet50", {"width": 1.5}, "width is 1.5: give a whole number from 1 up"),
        ("resnet50", {"blocks": (3, 4, 6)}, "blocks is (3, 4, 6): give a tuple of 4 whole numbers"),
        ("resnet50", {"blocks": (3, 4, 0, 3)}, "blocks is 0: give a whole number from 1 up"),
        ("densenet121", {"blocks": ()}, "blocks is (): give a tuple of whole numbers"),
        ("densenet121", {"growth": True}, "growth is True: give a whole number from 1 up"),
        ("wrn26x10", {"depth": 27}, "depth is 27: give 2 more than a multiple of 6, such as 26"),
        ("wrn26x10", {"depth": 2}, "depth is 2: give a whole number from 8 up"),
        ("wrn16x4", {"depth": 26}, "depth is 26: give 4 more than a multiple of 6, such as 22"),
        ("vit", {"patch": 5}, "patch is 5: give a number that divides image_size = 32"),
        ("vit", {"heads": 7}, "heads is 7: give a number that divides width = 384"),
        *((name, {"classes": 1}, "classes is 1: give a whole number from 2 up") for name in MODELS),
        ("vit", {"classes": "10"}, "classes is '10': give a whole number from 2 up"),
    ],
)
def test_what_cannot_be_built(name, options, text):
    with pytest.raises(featcal.InputError) as caught, torch.device("meta"):
        build(name, **{"classes": 10, **options})
    assert text in str(caught.value)
