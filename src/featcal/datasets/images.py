"""Labelled images in memory: bytes of pixels and one label per image, their cuts and their values.

A whole CIFAR is 180 MB as bytes, so that a data set stays in memory (or on the GPU) and only the
images of a step become floats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

import numpy as np
import torch
from torch import Tensor

from featcal.core.checks import ArgumentError, InputError, check_whole

Triple = tuple[float, float, float]
TestNorm = Literal["matched", "reference"]

CHUNK = 4096  # images that are counted at once, to bound the memory
PUBLISHED_VAL = 5000
CIFAR_SEED = 1
IMAGENET_SEED = 42
SHUFFLE = f"the shuffle of numpy's legacy seed {CIFAR_SEED}"


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
        check_pixels(self.pixels)
        labels, images = self.labels, len(self.pixels)
        if labels.dtype != torch.int64 or labels.shape != (images,):
            raise InputError(
                f"labels are {labels.dtype} {tuple(labels.shape)}: give torch.int64 ({images},)"
            )
        if images == 0:
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
        class_names: One name per class, by label.
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
        check_parts(self.class_names, train=self.train, test=self.test, val=self.val)


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class Splits:
    """What a training run uses.

    Attributes:
        name: What the data set is called.
        class_names: One name per class, by label.
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
        check_parts(self.class_names, **parts, held_out=self.held_out)


def check_pixels(pixels: Tensor) -> None:
    """Refuses anything but bytes (n, h, w, 3)."""
    if pixels.dtype != torch.uint8 or pixels.ndim != 4 or pixels.shape[3] != 3:
        raise InputError(
            f"pixels are {pixels.dtype} {tuple(pixels.shape)}: give torch.uint8 (images, h, w, 3)"
        )


def check_parts(class_names: tuple[str, ...], **parts: Images | None) -> None:
    """Refuses images of several sizes, labels without a class, and a class name given twice."""
    if len(set(class_names)) != len(class_names):
        raise InputError("class_names has a name twice: give every class a name of its own")
    given = {part: images for part, images in parts.items() if images is not None}
    size, classes = given["train"].size, len(class_names)
    for part, images in given.items():
        if images.size != size:
            raise InputError(f"the images of {part} are {images.size} pixels, of train {size}")
        low, high = int(images.labels.min()), int(images.labels.max())
        if low < 0 or high >= classes:
            raise InputError(f"labels of {part} go from {low} to {high}: give 0 to {classes - 1}")


# The published CIFAR runs divide by the mean of the standard deviations of single images, not by
# the standard deviation of all pixels, and feed CIFAR-100's test images with ImageNet's values
# while train and val have CIFAR-10's: val and test then differ in contrast, and what is fitted on
# val is biased for test. `test_norm="reference"` repeats that, `"matched"` does not.


@final
@dataclass(frozen=True)
class Normalisation:
    """The mean and the standard deviation of the red, green and blue of pixels from 0 to 1.

    >>> half = Normalisation((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    >>> half(torch.tensor([[[[0, 255, 255]]]], dtype=torch.uint8)).flatten().tolist()
    [-1.0, 1.0, 1.0]
    """

    mean: Triple
    std: Triple

    def __post_init__(self) -> None:
        """Refuses what cannot be divided by."""
        if len(self.mean) != 3 or len(self.std) != 3 or not all(s > 0 for s in self.std):
            raise InputError(f"mean={self.mean}, std={self.std}: give three each, std above 0")

    def __call__(self, pixels: Tensor) -> Tensor:
        """Bytes (n, h, w, 3) to float32 (n, 3, h, w) in channels-last order, on their device."""
        check_pixels(pixels)
        scaled = pixels.contiguous().to(torch.float32).div_(255)
        # Filled on the device: a copy from the host is not allowed while a CUDA graph is recorded.
        mean, std = (
            torch.stack([torch.full((), value, device=pixels.device) for value in values])
            for values in (self.mean, self.std)
        )
        return scaled.sub_(mean).div_(std).permute(0, 3, 1, 2)

    @classmethod
    def measured(cls, images: Images) -> Normalisation:
        """The values of these images: give those that are trained on, never test images."""
        # How many bytes there are of each of the 256 values: exact, in any order of the images.
        counts = torch.zeros(3, 256, dtype=torch.float64)
        for part in torch.split(images.pixels, CHUNK):
            for channel in range(3):
                found = torch.bincount(part[..., channel].flatten(), minlength=256)
                counts[channel] += found.cpu()
        levels = torch.arange(256, dtype=torch.float64) / 255
        shares = counts / counts.sum(1, keepdim=True)
        mean = shares @ levels
        std = (shares * (levels - mean[:, None]).square()).sum(1).sqrt()
        if not bool((std > 0).all()):
            raise InputError(f"std is {tuple(std.tolist())}, a channel is constant: check them")
        return cls(tuple(mean.tolist()), tuple(std.tolist()))


CIFAR = Normalisation((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
IMAGENET = Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
PUBLISHED = {"cifar10": CIFAR, "cifar100": CIFAR, "imagenet": IMAGENET}
PUBLISHED_TEST = PUBLISHED | {"cifar100": IMAGENET}


def normalisations(
    name: str, test_norm: TestNorm = "matched", *, measure: Images | None = None
) -> tuple[Normalisation, Normalisation]:
    """The values for train and val, and those for test.

    Args:
        name: The data set: cifar10, cifar100, imagenet, or any other with `measure`.
        test_norm: "matched" (test as train), or "reference" (as published: differs for the test
            images of CIFAR-100 alone).
        measure: Training images whose values are used in place of the published ones.
    """
    if test_norm not in ("matched", "reference"):
        raise InputError(f"test_norm={test_norm!r}: give 'matched' or 'reference'")
    if measure is not None:
        if test_norm == "reference":
            raise ArgumentError(
                "<test_norm> reference repeats published values of CIFAR, and here the training "
                "images are measured: leave it out"
            )
        own = Normalisation.measured(measure)
        return own, own
    if name not in PUBLISHED:
        raise InputError(
            f"name={name!r} has no published normalisation: give images, as in measure=splits.train"
        )
    test = PUBLISHED if test_norm == "matched" else PUBLISHED_TEST
    return PUBLISHED[name], test[name]


# Which images train, which calibrate. CIFAR (the code of Mukhoti et al., NeurIPS 2020, and of all
# who compare with it): the indices of the 50,000 training images, shuffled by numpy's legacy
# generator with seed 1; the first 5,000 are val. ImageNet (the code of Tao et al., AAAI 2025): the
# 50,000 official validation images, shuffled by torch with seed 42; the first fifth is val, the
# rest is test. Neither touches a global generator.


def published_split(n: int = 50_000, val: int = PUBLISHED_VAL) -> tuple[Tensor, Tensor]:
    """The published cut of CIFAR's training images.

    Args:
        n: How many images there are.
        val: How many of them are not trained on.

    Returns:
        The indices to train on, and those of val, both in the order of the shuffle.
    """
    check_whole("published_split", 2, n=n)
    return _cut(n, val=val)


def _cut(n: int, **named: int) -> tuple[Tensor, Tensor]:
    """What is left of the indices of `n` images, and the first of their shuffle: so many."""
    check_whole("split", 1, **named)
    ((name, count),) = named.items()
    if count >= n:
        raise ArgumentError(f"<{name}> is {count} of {n} images: leave at least one to train on")
    order = list(range(n))  # a list as in the published code
    np.random.RandomState(CIFAR_SEED).shuffle(order)
    index = torch.tensor(order)
    return index[count:], index[:count]


def imagenet_split(n: int = 50_000) -> tuple[Tensor, Tensor]:
    """The published cut of ImageNet's validation images: the indices of val and of test."""
    check_whole("imagenet_split", 5, n=n)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(IMAGENET_SEED))
    return order[: n // 5], order[n // 5 :]


def default_val(images: int) -> int:
    """Of CIFAR's training images the published 5,000; of a small data set as large a part."""
    return max(1, min(PUBLISHED_VAL, images // 10))


def split(data: ImageData, *, val: int | None = None, held_out: int = 0) -> Splits:
    """Cuts a data set into what a training run uses.

    Args:
        data: The data set as published.
        val: How many training images are kept for calibration, by `published_split`; by default
            `default_val` of them, or none where the data set has a val part of its own, which is
            then used.
        held_out: How many more are kept for a loss that watches its own calibration (AdaFocal):
            cut from what would be trained on, never from val.

    Raises:
        InputError: where the counts leave nothing to train on, or are no whole numbers.
    """
    check_whole("split", 0, held_out=held_out)
    images, own = len(data.train), data.val
    train, val_index, held_index, how = torch.arange(images), None, None, data.how
    if own is None:
        count = default_val(images) if val is None else val
        train, val_index = _cut(images, val=count)
        own = data.train.rows(val_index)
        how = f"val: {count} of {images} training images, the first in {SHUFFLE}"
    elif val is not None:
        raise ArgumentError(f"<val> is {val}, and {data.name} has its own val part: leave it out")
    if held_out:
        left = len(train)
        rest, held = _cut(left, held_out=held_out)
        train, held_index = train[rest], train[held]
        which = "training images" if val_index is None else "that are left"
        how += f"; held out: {held_out} of the {left} {which}, the first in {SHUFFLE}"
    return Splits(
        name=data.name,
        class_names=data.class_names,
        train=data.train.rows(train),
        val=own,
        test=data.test,
        train_index=train,
        val_index=val_index,
        held_out=None if held_index is None else data.train.rows(held_index),
        held_out_index=held_index,
        how=f"{how}; {data.note}" if data.note else how,
    )
