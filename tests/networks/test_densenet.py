"""DenseNet: sizes of METHODS 6.1, and the whole network written out as a reference."""

import pytest
import torch
import torch.nn.functional as F

from featcal.models import build

BLOCKS = (6, 12, 24, 16)


def counted(classes, growth=32):
    """Weights of the layers one by one."""
    maps = 2 * growth
    total = 3 * maps * 9
    for block, count in enumerate(BLOCKS):
        for _ in range(count):
            total += 2 * maps + maps * 4 * growth  # BN, 1x1
            total += 2 * 4 * growth + 4 * growth * growth * 9  # BN, 3x3
            maps += growth
        if block < 3:
            total += 2 * maps + maps * (maps // 2)  # BN, 1x1
            maps //= 2
    return total + 2 * maps + maps * classes + classes


@pytest.mark.parametrize("classes", [10, 100])
def test_parameters(classes):
    with torch.device("meta"):
        model = build("densenet121", classes)
    found = sum(parameter.numel() for parameter in model.parameters())
    assert found == counted(classes)
    if classes == 10:
        assert found == 6_956_298  # the number known for this network


def test_maps():
    shapes = {}
    with torch.device("meta"):
        model, images = build("densenet121", 10), torch.empty(2, 3, 32, 32)
    for name, part in model.named_children():
        part.register_forward_hook(
            lambda _, __, out, name=name: shapes.update({name: tuple(out.shape[1:])})
        )
    model(images)
    assert shapes == {
        "stem": (64, 32, 32),
        "block1": (256, 32, 32),
        "transition1": (128, 16, 16),
        "block2": (512, 16, 16),
        "transition2": (256, 8, 8),
        "block3": (1024, 8, 8),
        "transition3": (512, 4, 4),
        "block4": (1024, 4, 4),
        "last": (1024, 4, 4),
        "head": (10,),
    }
    assert model.feature_size == 1024


def norm_relu(maps, values):
    weight, bias, mean, var, _ = (next(values) for _ in range(5))
    return F.relu(F.batch_norm(maps, mean, var, weight, bias))


def written_out(images, state, blocks):
    """The network as METHODS 6.1 puts it, on the weights in the order they come in."""
    values = iter(state.values())
    maps = F.conv2d(images, next(values), padding=1)
    for block, count in enumerate(blocks):
        for _ in range(count):
            new = F.conv2d(norm_relu(maps, values), next(values))
            new = F.conv2d(norm_relu(new, values), next(values), padding=1)
            maps = torch.cat([new, maps], 1)
        if block < len(blocks) - 1:
            maps = F.avg_pool2d(F.conv2d(norm_relu(maps, values), next(values)), 2)
    features = F.avg_pool2d(norm_relu(maps, values), maps.shape[-1]).flatten(1)
    return F.linear(features, next(values), next(values)), list(values)


def test_it_is_the_network_written_out(lived_in):
    torch.manual_seed(0)
    blocks = (2, 3, 2, 1)
    model = lived_in(build("densenet121", 7, blocks=blocks, growth=6))
    images = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        wanted, left = written_out(images, model.state_dict(), blocks)
        torch.testing.assert_close(model(images), wanted, rtol=1e-5, atol=1e-5)
    assert left == []


def test_new_maps_come_first():
    model = build("densenet121", 3, blocks=(1,), growth=2).eval()
    maps = torch.randn(2, 4, 8, 8)
    out = model.block1(maps)
    assert out.shape == (2, 6, 8, 8)
    assert torch.equal(out[:, 2:], maps)
