"""Labelled images in memory: the bytes of the pixels and one label an image, checked once.

A whole CIFAR is 180 MB as bytes, so that a data set stays in memory (or on the GPU) and only the
images of a step become floats (`normalise.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from featcal.core.errors import InputError


@final
@dataclass(frozen=True, eq=False)
class Images:
    """Images and their labels.

    Attributes:
        pixels: The images, red, green, blue: bytes (n, h, w, 3).
        labels: The class of each: int64 (n,).
    """

    pixels: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        """Refuses shapes and types that are not those above."""
        pixels, labels = self.pixels, self.labels
        if pixels.dtype != torch.uint8 or pixels.ndim != 4 or pixels.shape[3] != 3:
            raise InputError(
                f"pixels are {pixels.dtype} of shape {tuple(pixels.shape)}: give torch.uint8 of "
                "shape (images, height, width, 3)"
            )
        if labels.dtype != torch.int64 or labels.shape != (len(pixels),):
            raise InputError(
                f"labels are {labels.dtype} of shape {tuple(labels.shape)}: give torch.int64 of "
                f"shape ({len(pixels)},), one label an image"
            )
        if len(pixels) == 0:
            raise InputError("pixels hold no image: give at least one")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.pixels.shape[1], self.pixels.shape[2]

    def rows(self, index: Tensor) -> Images:
        """The images at `index`, in its order."""
        index = index.to(self.labels.device)
        return Images(self.pixels[index], self.labels[index])

    def to(self, device: torch.device | str) -> Images:
        """The same images on another device."""
        return Images(self.pixels.to(device), self.labels.to(device))


@final
@dataclass(frozen=True, eq=False)
class ImageData:
    """A data set as it is published: its own parts, nothing cut yet.

    Attributes:
        name: What it is called in packs and tables.
        class_names: One name a class, by label.
        train: The images to train on.
        test: The images to judge by.
        val: The images to fit calibrators on, where the data set has such a part of its own.
        how: Where that part comes from.
        note: What else there is to say of how it was read.
    """

    name: str
    class_names: tuple[str, ...]
    train: Images
    test: Images
    val: Images | None = None
    how: str = "val: the data set's own"
    note: str = ""

    def __post_init__(self) -> None:
        """Refuses parts that do not belong together."""
        parts = {"train": self.train, "test": self.test}
        check_parts(parts if self.val is None else parts | {"val": self.val}, self.class_names)


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class Splits:
    """What a training run uses.

    Attributes:
        name: What the data set is called.
        class_names: One name a class, by label.
        train: The images the network is trained on.
        val: The images that calibrators are fitted on.
        test: The images that judge.
        train_index: The place of each image of `train` in the training part of the data set.
        val_index: The same of `val`; None where the data set has a val part of its own.
        held_out: Images cut from the training part for a loss that watches its own calibration
            (AdaFocal), so that val stays unseen until calibrators are fitted.
        held_out_index: The place of each of them in the training part.
        how: A sentence that says which seeds and counts made the cut.
    """

    name: str
    class_names: tuple[str, ...]
    train: Images
    val: Images
    test: Images
    train_index: Tensor
    val_index: Tensor | None
    held_out: Images | None = None
    held_out_index: Tensor | None = None
    how: str = ""

    def __post_init__(self) -> None:
        """Refuses parts that do not belong together."""
        parts = {"train": self.train, "val": self.val, "test": self.test}
        held = {} if self.held_out is None else {"held_out": self.held_out}
        check_parts(parts | held, self.class_names)


def check_parts(parts: dict[str, Images], class_names: tuple[str, ...]) -> None:
    """Refuses images of several sizes, and labels without a class."""
    if len(set(class_names)) != len(class_names):
        raise InputError("class_names has a name twice: give every class a name of its own")
    size = parts["train"].size
    for part, images in parts.items():
        if images.size != size:
            raise InputError(
                f"the images of {part} are {images.size} and those of train {size} pixels: give "
                "all the same size"
            )
        check_labels(images.labels, len(class_names), f"the labels of {part}")


def check_labels(labels: Tensor, classes: int, where: str) -> None:
    """Refuses labels that are not 0, ..., classes - 1."""
    if len(labels) == 0:
        raise InputError(f"{where}: there is none: give one label an image")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise InputError(
            f"{where} go from {low} to {high} and there are {classes} classes: labels must be "
            f"0 to {classes - 1}; check that the file belongs to this data set"
        )


def check_count(images: int, labels: int, where: str) -> None:
    """Refuses images and labels of different number."""
    if images != labels:
        raise InputError(
            f"{where} has {images} images and {labels} labels: one of the files is incomplete, "
            "copy them again"
        )
