"""Networks to train and calibrate, by name; each has `features()` and a linear `head`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from functools import partial

from featcal.core.checks import InputError
from featcal.models.base import Classifier, ConvClassifier
from featcal.models.densenet import DenseNet
from featcal.models.resnet import ResNet
from featcal.models.vit import VisionTransformer
from featcal.models.wide_resnet import PostActivationWideResNet, PreActivationWideResNet

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
