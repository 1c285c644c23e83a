"""ResNet with bottleneck blocks for small images (He, Zhang, Ren and Sun, CVPR 2016)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import nn

from featcal.core.checks import check_whole
from featcal.models import base

EXPANSION = 4  # maps a bottleneck gives, for each of those it works on


@final
class ResNet(base.ConvClassifier):
    """A 3x3 stem that keeps the size, and four layers of bottlenecks that end in 1/8 of it.

    Weights start as PyTorch draws them. The parts are `stem`, `layer1` to `layer4` and `head`.

    Args:
        classes: how many there are.
        blocks: bottlenecks in each of the four layers: (3, 4, 6, 3) for ResNet-50. What the
            literature on calibration calls ResNet-110 has (3, 4, 26, 3), and is not the
            network of three stages by that name.
        width: maps of the stem; layer i works on width x 2^(i - 1) and gives four times as many.
    """

    family = "bottleneck ResNet"

    def __init__(
        self, classes: int, *, blocks: Sequence[int] = (3, 4, 6, 3), width: int = 64
    ) -> None:
        check_whole(self.family, 1, width=width)
        base.check_blocks(self.family, blocks, 4)
        stem, outputs = base.conv_norm_relu(3, width, 3), EXPANSION * width
        layers = base.stages("layer", _bottleneck, blocks, width, outputs)
        super().__init__({"stem": stem, **layers}, 8 * outputs, classes)


def _bottleneck(inputs: int, outputs: int, stride: int) -> base.Residual:
    planes = outputs // EXPANSION
    body = nn.Sequential(
        base.conv_norm_relu(inputs, planes, 1),
        base.conv_norm_relu(planes, planes, 3, stride),
        base.conv_norm(planes, outputs, 1),
    )
    return base.Residual(body, inputs, outputs, stride)
