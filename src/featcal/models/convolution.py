"""The pieces the convolutional networks share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch.nn.functional as F
from torch import Tensor, nn

from featcal.core.arguments import check_whole
from featcal.core.errors import InputError


def conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    """A convolution that keeps the size of the map where the stride is 1; a norm has the bias."""
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


def conv_norm(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    """Convolution and BatchNorm."""
    return nn.Sequential(conv(inputs, outputs, size, stride), nn.BatchNorm2d(outputs))


def conv_norm_relu(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    """Convolution, BatchNorm and ReLU.

    No ReLU here works in place: what any layer gave can be looked at after the pass.
    """
    return conv_norm(inputs, outputs, size, stride).append(nn.ReLU())


@final
class Residual(nn.Module):
    """relu(body(x) + shortcut(x)): the sum is taken before the activation.

    Args:
        body: what is added; it ends in a BatchNorm.
        shortcut: the identity, or convolution and BatchNorm where the shape changes.
    """

    def __init__(self, body: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.body, self.shortcut = body, shortcut

    def forward(self, x: Tensor) -> Tensor:
        """Maps of the body's shape, none negative."""
        return F.relu(self.body(x) + self.shortcut(x))


def shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    """The identity, or a 1x1 convolution and BatchNorm where the shape changes."""
    same = inputs == outputs and stride == 1
    return nn.Identity() if same else conv_norm(inputs, outputs, 1, stride)


def check_blocks(family: str, blocks: Sequence[int], parts: int | None = None) -> None:
    """Refuses anything but so many whole numbers from 1 up (any number of them if None)."""
    if not isinstance(blocks, (tuple, list)) or not blocks or len(blocks) != (parts or len(blocks)):
        many = "a tuple of" if parts is None else f"a tuple of {parts}"
        raise InputError(f"{family}: blocks is {blocks!r}: give {many} whole numbers")
    for count in blocks:
        check_whole(family, 1, blocks=count)
