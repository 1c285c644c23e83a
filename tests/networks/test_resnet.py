"""ResNet: sizes of METHODS 6.1, torchvision's network as the reference, and clipping inside."""

import pytest
import torch
from torch import nn

import featcal
from featcal.models import build

BLOCKS = {"resnet50": (3, 4, 6, 3), "resnet110": (3, 4, 26, 3)}


def counted(blocks, classes):
    """Weights of the layers one by one: convolutions without bias, two numbers a map in a norm."""
    total, inputs = 3 * 64 * 9 + 2 * 64, 64
    for planes, count in zip((64, 128, 256, 512), blocks, strict=True):
        outputs = 4 * planes
        for block in range(count):
            total += inputs * planes + 2 * planes  # 1x1
            total += planes * planes * 9 + 2 * planes  # 3x3
            total += planes * outputs + 2 * outputs  # 1x1
            if block == 0:  # each layer changes the number of maps
                total += inputs * outputs + 2 * outputs
            inputs = outputs
    return total + inputs * classes + classes


@pytest.mark.parametrize("classes", [10, 100])
@pytest.mark.parametrize("name", BLOCKS)
def test_parameters(name, classes):
    with torch.device("meta"):
        model = build(name, classes)
    found = sum(parameter.numel() for parameter in model.parameters())
    assert found == counted(BLOCKS[name], classes)
    if (name, classes) == ("resnet50", 10):
        assert found == 23_520_842  # the number known for this network


def shapes_of(model, names, images):
    """What each part gives for the images."""
    shapes = {}
    for name in names:
        part = model.get_submodule(name)
        part.register_forward_hook(lambda _, __, out, name=name: shapes.update({name: out.shape}))
    model(images)
    return {name: tuple(shape[1:]) for name, shape in shapes.items()}


@pytest.mark.parametrize("name", BLOCKS)
def test_maps(name):
    with torch.device("meta"):
        model, images = build(name, 10), torch.empty(2, 3, 32, 32)
    names = ("stem", "layer1", "layer2", "layer3", "layer4")
    assert shapes_of(model, names, images) == {
        "stem": (64, 32, 32),
        "layer1": (256, 32, 32),
        "layer2": (512, 16, 16),
        "layer3": (1024, 8, 8),
        "layer4": (2048, 4, 4),
    }
    assert model.feature_size == 2048
    assert [len(model.get_submodule(name)) for name in names[1:]] == list(BLOCKS[name])
    assert [name for name, _ in model.named_children()] == [*names, "head"]


@pytest.mark.parametrize("blocks", [(3, 4, 6, 3), (1, 1, 2, 1)])
def test_it_is_torchvision_s_network_with_a_stem_for_small_images(blocks, lived_in):
    from model_packages import package

    models = package("torchvision").models
    torch.manual_seed(0)
    ours = lived_in(build("resnet50", 10, blocks=blocks))
    theirs = models.ResNet(models.resnet.Bottleneck, list(blocks), num_classes=10).eval()
    theirs.conv1, theirs.maxpool = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.Identity()
    # both list a bottleneck's three layers and then its shortcut
    values, keys = ours.state_dict().values(), theirs.state_dict()
    theirs.load_state_dict(dict(zip(keys, values, strict=True)))
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images), rtol=1e-5, atol=1e-5)


def overconfident():
    """A small network with logits far too large for labels that are half noise."""
    torch.manual_seed(0)
    model = build("resnet50", 4, blocks=(1, 1, 1, 1), width=4).eval()
    images = torch.randn(240, 3, 16, 16)
    with torch.no_grad():
        model(images)
        spread = model.features(images)
        model.head.weight.mul_(6 / spread.std(0).clamp(min=1e-3))
        model.head.bias.copy_(-(spread.mean(0) @ model.head.weight.T))
        labels = (model(images) / 8 + torch.randn(240, 4)).argmax(1)
    return model, [(images[i : i + 60], labels[i : i + 60]) for i in range(0, 240, 60)]


@pytest.mark.parametrize("layer", ["layer3", "layer2", "stem"])
def test_a_layer_inside_can_be_clipped(layer):
    model, loader = overconfident()
    calibrated = featcal.calibrate(model, loader, "clip", layer=layer)
    threshold = calibrated.state_dict()[f"{layer}.calibrator.threshold"]
    images = loader[0][0]
    part = model.get_submodule(layer)
    hook = part.register_forward_hook(lambda _, __, maps: maps.clamp(max=float(threshold)))
    with torch.no_grad():
        wanted = model(images)
        hook.remove()
        assert bool(threshold.isfinite())
        torch.testing.assert_close(calibrated(images), wanted, rtol=1e-5, atol=1e-5)
        assert not torch.equal(calibrated(images), model(images))


def test_what_a_layer_gave_is_still_there_after_the_pass():
    model = build("resnet50", 4, blocks=(1, 1, 1, 1), width=2).eval()
    kept = []
    norm = model.stem[1]
    assert isinstance(norm, nn.BatchNorm2d)
    norm.register_forward_hook(lambda _, __, out: kept.append((out, out.clone())))
    model(torch.randn(2, 3, 16, 16))
    ((seen, then),) = kept
    assert torch.equal(seen, then)
