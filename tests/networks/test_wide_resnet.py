"""Wide ResNet: the published post-activation form, and the classic one of the demo network."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from featcal.models import build


def counted(blocks, width, classes, *, post):
    """Weights of the layers one by one; a norm follows a convolution, or comes before it."""
    total, inputs = 3 * 16 * 9 + (2 * 16 if post else 0), 16
    for outputs in (16 * width, 32 * width, 64 * width):
        for block in range(blocks):
            total += inputs * outputs * 9 + outputs * outputs * 9
            total += 4 * outputs if post else 2 * inputs + 2 * outputs
            if block == 0 and inputs != outputs:
                total += inputs * outputs + (2 * outputs if post else 0)
            inputs = outputs
    return total + (0 if post else 2 * inputs) + inputs * classes + classes


@pytest.mark.parametrize("classes", [10, 100])
@pytest.mark.parametrize(("name", "blocks", "width"), [("wrn26x10", 4, 10), ("wrn16x4", 2, 4)])
def test_parameters(name, blocks, width, classes):
    with torch.device("meta"):
        model = build(name, classes)
    found = sum(parameter.numel() for parameter in model.parameters())
    assert found == counted(blocks, width, classes, post=name == "wrn26x10")
    if (name, classes) == ("wrn16x4", 10):
        assert round(found / 1e6, 2) == 2.75  # the number known for this network
    if (name, classes) == ("wrn26x10", 10):
        assert round(found / 1e6, 1) == 36.5  # that of WRN-28-10, which counts its layers otherwise


@pytest.mark.parametrize(
    ("name", "width", "names"),
    [
        ("wrn26x10", 10, ["stem", "group1", "group2", "group3", "head"]),
        ("wrn16x4", 4, ["stem", "group1", "group2", "group3", "last", "head"]),
    ],
)
def test_maps(name, width, names):
    shapes = {}
    with torch.device("meta"):
        model, images = build(name, 10), torch.empty(2, 3, 32, 32)
    for part_name, part in model.named_children():
        part.register_forward_hook(
            lambda _, __, out, key=part_name: shapes.update({key: tuple(out.shape[1:])})
        )
    model(images)
    assert list(shapes) == names
    assert shapes["stem"] == (16, 32, 32)
    assert shapes["group1"] == (16 * width, 32, 32)
    assert shapes["group2"] == (32 * width, 16, 16)
    assert shapes["group3"] == shapes[names[-2]] == (64 * width, 8, 8)
    assert model.feature_size == 64 * width


def norm(maps, part):
    return F.batch_norm(maps, part.running_mean, part.running_var, part.weight, part.bias)


def layers(block):
    """Convolutions and norms of a block in the order they are listed in."""
    convs = [part for part in block.modules() if isinstance(part, nn.Conv2d)]
    return convs, [part for part in block.modules() if isinstance(part, nn.BatchNorm2d)]


def post_activation(x, block, stride):
    (first, second, *way), (norm1, norm2, *norm3) = layers(block)
    out = F.relu(norm(F.conv2d(x, first.weight, stride=stride, padding=1), norm1))
    out = norm(F.conv2d(out, second.weight, padding=1), norm2)
    passed = norm(F.conv2d(x, way[0].weight, stride=stride), norm3[0]) if way else x
    return F.relu(out + passed)


def pre_activation(x, block, stride):
    (first, second, *way), (norm1, norm2) = layers(block)
    active = F.relu(norm(x, norm1))
    out = F.relu(norm(F.conv2d(active, first.weight, stride=stride, padding=1), norm2))
    out = F.conv2d(out, second.weight, padding=1)
    return out + (F.conv2d(active, way[0].weight, stride=stride) if way else x)


FORMS = {
    "wrn26x10": ({"depth": 14, "width": 2}, post_activation),
    "wrn16x4": ({"depth": 16, "width": 2}, pre_activation),
}


@pytest.mark.parametrize("name", FORMS)
@torch.no_grad()
def test_it_is_the_network_written_out(name, lived_in):
    torch.manual_seed(0)
    options, form = FORMS[name]
    model, images = lived_in(build(name, 5, **options)), torch.randn(3, 3, 32, 32)
    stem, *norms = (part for part in model.stem.modules() if list(part.parameters(recurse=False)))
    maps = F.conv2d(images, stem.weight, padding=1)
    maps = F.relu(norm(maps, norms[0])) if norms else maps
    for group, stride in ((model.group1, 1), (model.group2, 2), (model.group3, 2)):
        assert len(group) == 2
        maps = form(form(maps, group[0], stride), group[1], 1)
    if name == "wrn16x4":
        maps = F.relu(norm(maps, model.last[0]))
    features = maps.flatten(2).mean(-1)
    torch.testing.assert_close(model.features(images), features, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_negative_values_leave_a_block_before_the_activation_only(lived_in):
    images = torch.randn(3, 3, 16, 16)
    for name, negative in (("wrn26x10", False), ("wrn16x4", True)):
        model = lived_in(build(name, 5, **FORMS[name][0]))
        maps = model.stem(images)
        for group in (model.group1, model.group2, model.group3):
            for block in group:
                maps = block(maps)
                assert bool((maps < 0).any()) is negative
        assert float(model.features(images).min()) >= 0


@torch.no_grad()
def test_a_block_that_adds_nothing_passes_its_input_on():
    maps = torch.randn(2, 32, 8, 8)
    for name in FORMS:
        block = build(name, 5, **FORMS[name][0]).eval().group1[1]
        for parameter in block.parameters():
            parameter.zero_()
        # the sum is the input: the classic form gives it as it is, the other one cuts it at 0
        assert torch.equal(block(maps), maps if name == "wrn16x4" else maps.relu())


def test_first_weights():
    torch.manual_seed(0)
    model = build("wrn26x10", 10, depth=8, width=4)
    for part in model.modules():
        if isinstance(part, nn.Conv2d):
            fan_out = part.out_channels * part.kernel_size[0] * part.kernel_size[1]
            wanted = (2 / fan_out) ** 0.5
            assert float(part.weight.detach().std()) == pytest.approx(wanted, rel=0.15)
        if isinstance(part, nn.BatchNorm2d):
            assert bool((part.weight == 1).all())
            assert bool((part.bias == 0).all())
