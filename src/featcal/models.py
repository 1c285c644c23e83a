"""Networks to train and calibrate, by name; each has `features()` and a linear `head`.

ResNet with bottleneck blocks (He et al., CVPR 2016), Wide ResNet (Zagoruyko and Komodakis, BMVC
2016) in the two forms that go by this name, DenseNet with bottlenecks and compression (Huang et
al., CVPR 2017), and a small vision transformer (Dosovitskiy et al., ICLR 2021).
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from typing import ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featcal.core.checks import InputError, check_whole

__all__ = [
    "MODELS",
    "Classifier",
    "ConvClassifier",
    "DenseNet",
    "PostActivationWideResNet",
    "PreActivationWideResNet",
    "ResNet",
    "VisionTransformer",
    "build",
]

EXPANSION = 4  # maps a bottleneck of ResNet gives, for each of those it works on
STEM = 16  # maps of a wide ResNet's stem, and a widening factor's worth of its first group
BOTTLENECK = 4  # maps between the two convolutions of a dense layer, for each new one
SPREAD = 0.02  # of the embedding of a transformer's places at the start


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


@final
class ResNet(ConvClassifier):
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
        check_blocks(self.family, blocks, 4)
        stem, outputs = conv_norm_relu(3, width, 3), EXPANSION * width
        layers = stages("layer", _bottleneck, blocks, width, outputs)
        super().__init__({"stem": stem, **layers}, 8 * outputs, classes)


def _bottleneck(inputs: int, outputs: int, stride: int) -> Residual:
    planes = outputs // EXPANSION
    body = nn.Sequential(
        conv_norm_relu(inputs, planes, 1),
        conv_norm_relu(planes, planes, 3, stride),
        conv_norm(planes, outputs, 1),
    )
    return Residual(body, inputs, outputs, stride)


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


MODELS: dict[str, Callable[..., Classifier]] = {
    "resnet50": partial(ResNet, blocks=(3, 4, 6, 3)),
    "resnet110": partial(ResNet, blocks=(3, 4, 26, 3)),
    "densenet121": partial(DenseNet, blocks=(6, 12, 24, 16)),
    "wrn26x10": partial(PostActivationWideResNet, depth=26, width=10),
    "wrn16x4": partial(PreActivationWideResNet, depth=16, width=4),
    "vit": VisionTransformer,
}


def build(name: str, classes: int, **options: object) -> Classifier:
    """A fresh network; its weights are drawn from torch's global random state.

    >>> build("wrn16x4", 10, width=1).feature_size
    64

    Args:
        name: a key of `MODELS`.
        classes: how many there are, two or more.
        **options: what the network's class takes by name, in place of its default.

    Raises:
        InputError: for a name or an option there is not, and for a size that cannot be.
    """
    if name not in MODELS:
        near = get_close_matches(str(name), MODELS, n=1)
        meant = f"did you mean {near[0]}? There are" if near else "there are"
        raise InputError(f"no network is called {name!r}; {meant} {', '.join(MODELS)}")
    known = network_options(name)
    for key in options:
        if key not in known:
            listed = ", ".join(f"{option}={value!r}" for option, value in known.items())
            raise InputError(f"{name} has no option {key!r}: it takes {listed}")
    return MODELS[name](classes, **options)


def network_options(name: str) -> dict[str, object]:
    """The options of a network with their defaults.

    >>> network_options("resnet110")
    {'blocks': (3, 4, 26, 3), 'width': 64}
    """
    arguments = inspect.signature(MODELS[name]).parameters.values()
    return {argument.name: argument.default for argument in arguments if argument.name != "classes"}
