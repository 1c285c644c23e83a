"""What every network here offers: features that a linear head turns into logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, final

import torch.nn.functional as F
from torch import Tensor, nn

from featcal.core.checks import InputError, check_whole


class Classifier(nn.Module, ABC):
    """A network for images (n, 3, h, w), cut where calibration by features cuts it.

    `forward(images)` is `head(features(images))` and nothing else. The published networks divide
    the logits by a `temp` on top, which is 1 in all that was published with them and is left out.

    A subclass builds its body and then sets `head`, a linear layer with a bias.

    Attributes:
        family: what kind of network this is, in a few words.
        signed: whether features may be negative; means of what a ReLU gave are not.
        head: the last layer, features (n, d) to logits (n, k).
    """

    family: ClassVar[str]
    signed: ClassVar[bool]
    head: nn.Linear

    def __init__(self, classes: int) -> None:
        super().__init__()
        check_whole(self.family, 2, classes=classes)

    @abstractmethod
    def features(self, images: Tensor) -> Tensor:
        """What enters the head, (n, d)."""

    def forward(self, images: Tensor) -> Tensor:
        """Logits (n, k)."""
        logits: Tensor = self.head(self.features(images))
        return logits

    @property
    def feature_size(self) -> int:
        """The number d of features."""
        return self.head.in_features

    def get_classifier(self) -> nn.Linear:
        """The head, under the name timm has for it."""
        return self.head


class ConvClassifier(Classifier):
    """Named parts in a row, of which the last ends in a ReLU; the features are means of its maps.

    The means are taken over whatever is left of the image, so that its size may differ from 32.

    Args:
        parts: the body in the order it runs in; each part becomes the attribute of its name.
        feature_size: how many maps the last part gives.
        classes: how many logits the head gives.
    """

    signed = False

    def __init__(self, parts: Mapping[str, nn.Module], feature_size: int, classes: int) -> None:
        super().__init__(classes)
        self._parts = tuple(parts)
        for name, part in parts.items():
            self.add_module(name, part)
        self.head = nn.Linear(feature_size, classes)

    def features(self, images: Tensor) -> Tensor:
        """The mean of every map of the last part, (n, d)."""
        maps = images
        for name in self._parts:
            # looked up on every call: calibration inside the network puts another layer there
            maps = getattr(self, name)(maps)
        return maps.mean((2, 3))


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

    The shortcut is the identity, or a 1x1 convolution and BatchNorm where the shape changes.

    Args:
        body: what is added; it ends in a BatchNorm.
        inputs: maps it takes.
        outputs: maps it gives.
        stride: by which it shrinks them.
    """

    def __init__(self, body: nn.Module, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = body
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else conv_norm(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Maps of the body's shape, none negative."""
        return F.relu(self.body(x) + self.shortcut(x))


def stages(
    name: str,
    block: Callable[[int, int, int], nn.Module],
    counts: Sequence[int],
    inputs: int,
    outputs: int,
) -> dict[str, nn.Module]:
    """Blocks in rows called `name`1, `name`2 and so on, made by `block(inputs, outputs, stride)`.

    Each row after the first has twice the maps of the one before it, at half their size.
    """
    rows: dict[str, nn.Module] = {}
    for place, count in enumerate(counts, 1):
        first = block(inputs, outputs, 1 if place == 1 else 2)
        others = (block(outputs, outputs, 1) for _ in range(count - 1))
        rows[f"{name}{place}"] = nn.Sequential(first, *others)
        inputs, outputs = outputs, 2 * outputs
    return rows


def check_blocks(family: str, blocks: Sequence[int], parts: int | None = None) -> None:
    """Refuses anything but so many whole numbers from 1 up (any number of them if None)."""
    if not isinstance(blocks, (tuple, list)) or not blocks or len(blocks) != (parts or len(blocks)):
        many = "a tuple of" if parts is None else f"a tuple of {parts}"
        raise InputError(f"{family}: blocks is {blocks!r}: give {many} whole numbers")
    for count in blocks:
        check_whole(family, 1, blocks=count)
