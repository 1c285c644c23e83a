"""What every network here offers: features that a linear head turns into logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from featcal.core.arguments import check_whole


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
