"""Each network against its reference: torchvision, torch's own encoder, or itself written out."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import featcal
from featcal.models import build

PATCHES = {"image_size": 16, "patch": 4, "width": 24, "depth": 2, "heads": 3}


@pytest.mark.parametrize(
    ("name", "parameters", "features"),
    [  # weights counted layer by layer; 23.5, 7.0, 36.5 and 2.75 million are the known sizes
        ("resnet50", 23_520_842, 2048),
        ("resnet110", 45_864_522, 2048),
        ("densenet121", 6_956_298, 1024),
        ("wrn26x10", 36_481_434, 640),
        ("wrn16x4", 2_748_890, 256),
        ("vit", 16_018_954, 384),
    ],
)
def test_sizes(name, parameters, features):
    with torch.device("meta"):
        model = build(name, 10)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert model.feature_size == features


def test_it_is_torchvision_s_network_with_a_stem_for_small_images(lived_in):
    blocks = (2, 1, 2, 1)
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


def test_what_a_layer_gave_is_still_there_after_the_pass():
    model = build("resnet50", 4, blocks=(1, 1, 1, 1), width=2).eval()
    kept = []
    norm = model.stem[1]
    assert isinstance(norm, nn.BatchNorm2d)
    norm.register_forward_hook(lambda _, __, out: kept.append((out, out.clone())))
    model(torch.randn(2, 3, 16, 16))
    ((seen, then),) = kept
    assert torch.equal(seen, then)


def their_norm_relu(maps, values):
    weight, bias, mean, var, _ = (next(values) for _ in range(5))
    return F.relu(F.batch_norm(maps, mean, var, weight, bias))


def densenet_written_out(images, state, blocks):
    """The network as METHODS 6.1 puts it, on the weights in the order they come in."""
    values = iter(state.values())
    maps = F.conv2d(images, next(values), padding=1)
    for block, count in enumerate(blocks):
        for _ in range(count):
            new = F.conv2d(their_norm_relu(maps, values), next(values))
            new = F.conv2d(their_norm_relu(new, values), next(values), padding=1)
            maps = torch.cat([new, maps], 1)
        if block < len(blocks) - 1:
            maps = F.avg_pool2d(F.conv2d(their_norm_relu(maps, values), next(values)), 2)
    features = F.avg_pool2d(their_norm_relu(maps, values), maps.shape[-1]).flatten(1)
    return F.linear(features, next(values), next(values)), list(values)


def test_densenet_is_the_network_written_out(lived_in):
    torch.manual_seed(0)
    blocks = (2, 3, 2, 1)
    model = lived_in(build("densenet121", 7, blocks=blocks, growth=6))
    images = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        wanted, left = densenet_written_out(images, model.state_dict(), blocks)
        torch.testing.assert_close(model(images), wanted, rtol=1e-5, atol=1e-5)
    assert left == []


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
def test_a_wide_resnet_is_the_network_written_out(name, lived_in):
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


def test_first_weights_of_the_published_form():
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


def torch_s_own(model):
    """torch's encoder layers with the same weights."""
    layers = []
    for block in model.blocks:
        layer = nn.TransformerEncoderLayer(
            *(24, 3, 96, 0.0, "gelu"), batch_first=True, norm_first=True
        )
        after, first, _, second = block.mlp
        pairs = (
            (layer.norm1, block.norm),
            (layer.self_attn.out_proj, block.joined),
            (layer.norm2, after),
            (layer.linear1, first),
            (layer.linear2, second),
        )
        for theirs, ours in pairs:
            theirs.load_state_dict(ours.state_dict())
        layer.self_attn.in_proj_weight = block.query_key_value.weight
        layer.self_attn.in_proj_bias = block.query_key_value.bias
        layers.append(layer)
    return nn.Sequential(*layers)


@torch.no_grad()
def test_its_blocks_are_torch_s_encoder_layers():
    torch.manual_seed(0)
    model, images = build("vit", 5, **PATCHES), torch.randn(3, 3, 16, 16)
    patches = model.patches(images).flatten(2).transpose(1, 2)
    tokens = torch.cat([model.token.expand(3, 1, 24), patches], 1) + model.places
    wanted = torch_s_own(model).train()(tokens)  # in training mode there is no fast path
    torch.testing.assert_close(model.blocks(tokens), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model.features(images), model.norm(wanted[:, 0]))


@torch.no_grad()
def test_the_transformer_draws_no_numbers_and_gives_normalised_features():
    model, images = build("vit", 5, **PATCHES), torch.randn(4, 3, 16, 16)
    assert not model.token.any()
    assert model.places.std().item() == pytest.approx(0.02, rel=0.25)
    assert torch.equal(model.train()(images), model.eval()(images))
    features = model.features(images)
    torch.testing.assert_close(features.mean(1), torch.zeros(4), rtol=0, atol=1e-5)
    torch.testing.assert_close(features.var(1, unbiased=False), torch.ones(4), rtol=1e-3, atol=0)
    with pytest.raises(featcal.InputError, match=r"images are \(32, 32\).*built for image_size=16"):
        model(torch.randn(2, 3, 32, 32))
