"""Wide ResNet (Zagoruyko and Komodakis, BMVC 2016), in the two forms that go by this name.

The literature on calibration has post-activation blocks, as in the first ResNet; the paper itself
has pre-activation blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch.nn.functional as F
from torch import Tensor, nn

from featcal.core.checks import InputError, check_whole
from featcal.models.base import ConvClassifier, Residual, conv, conv_norm, conv_norm_relu, stages

STEM = 16  # maps of the stem, and a widening factor's worth of the first group


@final
class PostActivationWideResNet(ConvClassifier):
    """Conv-BN-ReLU-conv-BN, the sum, and ReLU: the form of the published WRN-26-10.

    Convolutions start He-normal by what they give (fan out). The parts are `stem`, `group1` to
    `group3` and `head`.

    Args:
        classes: how many there are.
        depth: 2 more than a multiple of 6.
        width: the widening factor.
    """

    family = "post-activation wide ResNet"

    def __init__(self, classes: int, *, depth: int = 26, width: int = 10) -> None:
        stem = conv_norm_relu(3, STEM, 3)
        groups = _groups(self.family, _post_activation, depth, width, rest=2)
        super().__init__({"stem": stem, **groups}, 4 * STEM * width, classes)
        for part in self.modules():
            if isinstance(part, nn.Conv2d):
                nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")


@final
class PreActivationWideResNet(ConvClassifier):
    """BN-ReLU-conv-BN-ReLU-conv and the sum, with BN-ReLU at the very end: the classic form.

    Weights start as PyTorch draws them. The parts are `stem`, `group1` to `group3`, `last`
    (BatchNorm and ReLU after the last group) and `head`.

    Args:
        classes: how many there are.
        depth: 4 more than a multiple of 6.
        width: the widening factor.
    """

    family = "pre-activation wide ResNet"

    def __init__(self, classes: int, *, depth: int = 16, width: int = 4) -> None:
        stem, maps = conv(3, STEM, 3), 4 * STEM * width
        groups = _groups(self.family, PreActivation, depth, width, rest=4)
        last = nn.Sequential(nn.BatchNorm2d(maps), nn.ReLU())
        super().__init__({"stem": stem, **groups, "last": last}, maps, classes)


@final
class PreActivation(nn.Module):
    """The block of the classic form; a changed shape takes its shortcut from the first BN-ReLU."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(inputs)
        self.body = nn.Sequential(
            conv(inputs, outputs, 3, stride),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            conv(outputs, outputs, 3),
        )
        same = inputs == outputs and stride == 1
        self.shortcut = None if same else conv(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """The sum as it is, of either sign."""
        active = F.relu(self.norm(x))
        added: Tensor = self.body(active)
        return added + (x if self.shortcut is None else self.shortcut(active))


def _post_activation(inputs: int, outputs: int, stride: int) -> nn.Module:
    first, second = conv_norm_relu(inputs, outputs, 3, stride), conv_norm(outputs, outputs, 3)
    return Residual(nn.Sequential(first, second), inputs, outputs, stride)


def _groups(
    family: str, block: Callable[[int, int, int], nn.Module], depth: int, width: int, rest: int
) -> dict[str, nn.Module]:
    """Three groups of blocks of two convolutions each; `rest` layers stand outside of them."""
    check_whole(family, 1, width=width)
    check_whole(family, rest + 6, depth=depth)
    if (depth - rest) % 6:
        raise InputError(
            f"{family}: depth is {depth}: give {rest} more than a multiple of 6, such as "
            f"{rest + 6 * ((depth - rest) // 6)}"
        )
    return stages("group", block, [(depth - rest) // 6] * 3, STEM, STEM * width)
