"""The small vision transformer: sizes, torch's own encoder as the reference, no randomness."""

import pytest
import torch
from torch import nn

from featcal import InputError
from featcal.models import build

SMALL = {"image_size": 16, "patch": 4, "width": 24, "depth": 2, "heads": 3}


def counted(classes, width=384, depth=9, patch=4, image=32):
    block = 2 * 2 * width  # two LayerNorms
    block += width * 3 * width + 3 * width + width * width + width  # attention
    block += width * 4 * width + 4 * width + 4 * width * width + width  # the two layers after it
    tokens = (image // patch) ** 2 + 1
    start = 3 * patch * patch * width + width + width + tokens * width
    return start + depth * block + 2 * width + width * classes + classes


@pytest.mark.parametrize("classes", [10, 100])
def test_parameters(classes):
    with torch.device("meta"):
        model = build("vit", classes)
    assert sum(parameter.numel() for parameter in model.parameters()) == counted(classes)
    assert model.feature_size == 384
    assert len(model.blocks) == 9


def test_tokens():
    with torch.device("meta"):
        model, images = build("vit", 10), torch.empty(2, 3, 32, 32)
    shapes = []
    model.blocks.register_forward_hook(lambda _, __, out: shapes.append(tuple(out.shape)))
    model(images)
    assert shapes == [(2, 65, 384)]


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
    model, images = build("vit", 5, **SMALL), torch.randn(3, 3, 16, 16)
    patches = model.patches(images).flatten(2).transpose(1, 2)
    tokens = torch.cat([model.token.expand(3, 1, 24), patches], 1) + model.places
    wanted = torch_s_own(model).train()(tokens)  # in training mode there is no fast path
    torch.testing.assert_close(model.blocks(tokens), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model.features(images), model.norm(wanted[:, 0]))


@torch.no_grad()
def test_patches_are_read_row_by_row():
    model = build("vit", 5, **SMALL)
    images = torch.randn(1, 3, 16, 16)
    patches = model.patches(images).flatten(2).transpose(1, 2)[0]
    for row in range(4):
        for column in range(4):
            pixels = images[0, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
            wanted = (model.patches.weight * pixels).sum((1, 2, 3)) + model.patches.bias
            torch.testing.assert_close(patches[4 * row + column], wanted, rtol=1e-4, atol=1e-5)


def test_first_weights():
    model = build("vit", 5, **SMALL)
    assert not model.token.any()
    assert model.places.std().item() == pytest.approx(0.02, rel=0.25)


@torch.no_grad()
def test_training_mode_changes_nothing():
    model, images = build("vit", 5, **SMALL), torch.randn(4, 3, 16, 16)
    assert torch.equal(model.train()(images), model.eval()(images))
    assert not any(isinstance(part, nn.Dropout) for part in model.modules())


def test_features_are_normalised_and_signed():
    model = build("vit", 5, **SMALL)
    features = model.features(torch.randn(4, 3, 16, 16))
    assert bool((features < 0).any(1).all())
    torch.testing.assert_close(features.mean(1), torch.zeros(4), rtol=0, atol=1e-5)
    torch.testing.assert_close(features.var(1, unbiased=False), torch.ones(4), rtol=1e-3, atol=0)


def test_images_of_another_size():
    assert build("vit", 5, **{**SMALL, "image_size": 64})(torch.randn(2, 3, 64, 64)).shape == (2, 5)
    with pytest.raises(InputError, match=r"images are \(32, 32\).*built for image_size=16; build"):
        build("vit", 5, **SMALL)(torch.randn(2, 3, 32, 32))
