"""DenseNet with bottlenecks and compression (Huang, Liu, van der Maaten, Weinberger, CVPR 2017)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from featcal.core.checks import check_whole
from featcal.models.base import ConvClassifier, check_blocks, conv

BOTTLENECK = 4  # maps between the two convolutions of a layer, for each new one


@final
class DenseNet(ConvClassifier):
    """Blocks of layers that each add maps to all that came before, halved in between.

    Weights start as PyTorch draws them. The parts are `stem`, `block1`, `transition1`, `block2` and
    so on, `last` (BatchNorm and ReLU after the last block) and `head`.

    Args:
        classes: how many there are.
        blocks: dense layers in each block: (6, 12, 24, 16) for DenseNet-121.
        growth: maps that a layer adds; the stem gives twice as many.
    """

    family = "DenseNet"

    def __init__(
        self, classes: int, *, blocks: Sequence[int] = (6, 12, 24, 16), growth: int = 32
    ) -> None:
        check_whole(self.family, 1, growth=growth)
        check_blocks(self.family, blocks)
        maps = 2 * growth
        parts: dict[str, nn.Module] = {"stem": conv(3, maps, 3)}
        for place, count in enumerate(blocks, 1):
            layers = (DenseLayer(maps + growth * before, growth) for before in range(count))
            parts[f"block{place}"] = nn.Sequential(*layers)
            maps += growth * count
            if place < len(blocks):
                halved = conv(maps, maps // 2, 1), nn.AvgPool2d(2)
                parts[f"transition{place}"] = nn.Sequential(*norm_relu(maps), *halved)
                maps //= 2
        parts["last"] = nn.Sequential(*norm_relu(maps))
        super().__init__(parts, maps, classes)


@final
class DenseLayer(nn.Module):
    """`growth` new maps, then the maps they were made of."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        between = BOTTLENECK * growth
        self.body = nn.Sequential(
            *(*norm_relu(inputs), conv(inputs, between, 1)),
            *(*norm_relu(between), conv(between, growth, 3)),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps (n, growth + inputs, h, w)."""
        return torch.cat([self.body(x), x], 1)


def norm_relu(maps: int) -> tuple[nn.Module, nn.Module]:
    """BatchNorm and ReLU."""
    return nn.BatchNorm2d(maps), nn.ReLU()
