"""A small vision transformer to train from scratch (Dosovitskiy et al., ICLR 2021)."""

from __future__ import annotations

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featcal.core.checks import InputError, check_whole
from featcal.models.base import Classifier

SPREAD = 0.02  # of the places' embedding at the start


@final
class VisionTransformer(Classifier):
    """Patches and a class token through blocks of attention; features of either sign.

    The features are the class token after a last LayerNorm. There is no dropout: training can be
    repeated bit for bit. Layers start as PyTorch draws them, the token at zero. The parts are
    `patches`, `blocks`, `norm` and `head`.

    Args:
        classes: how many there are.
        image_size: height and width of the images, fixed: every patch has a learned place.
        patch: height and width of a patch, which divides those of the image.
        width: features of a token.
        depth: how many blocks.
        heads: how many parts attention has; divides the width.
    """

    family = "vision transformer"
    signed = True

    def __init__(
        self,
        classes: int,
        *,
        image_size: int = 32,
        patch: int = 4,
        width: int = 384,
        depth: int = 9,
        heads: int = 6,
    ) -> None:
        super().__init__(classes)
        sizes = {"image_size": image_size, "width": width}
        check_whole(self.family, 1, **sizes, patch=patch, depth=depth, heads=heads)
        for part, divisor, whole in (("patch", patch, "image_size"), ("heads", heads, "width")):
            if sizes[whole] % divisor:
                raise InputError(
                    f"{self.family}: {part} is {divisor}: give a number that divides "
                    f"{whole} = {sizes[whole]}"
                )
        self.image_size = image_size
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        places = (image_size // patch) ** 2 + 1
        self.places = nn.Parameter(torch.randn(1, places, width) * SPREAD)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def features(self, images: Tensor) -> Tensor:
        """The class token after the last LayerNorm, (n, d)."""
        size = self.image_size
        if images.shape[-2:] != (size, size):
            raise InputError(
                f"{self.family}: images are {tuple(images.shape[-2:])}: this network was built for "
                f"image_size={size}; build it for the size of the images, or resize them"
            )
        patches = self.patches(images).flatten(2).transpose(1, 2)  # (n, places - 1, d)
        token = self.token.expand(patches.shape[0], -1, -1)  # len() would fix n in an export
        tokens = self.blocks(torch.cat([token, patches], 1) + self.places)
        features: Tensor = self.norm(tokens[:, 0])
        return features


@final
class Block(nn.Module):
    """Attention and a two-layer network, each after a LayerNorm and each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.joined = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens of the same shape, (n, places, d)."""
        parts = self.query_key_value(self.norm(tokens)).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # each (n, heads, places, d / heads)
        seen = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        tokens = tokens + self.joined(seen)
        added: Tensor = self.mlp(tokens)
        return tokens + added
