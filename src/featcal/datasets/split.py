"""Which images train, which calibrate: the published cuts, by their own seeds.

CIFAR (the code of Mukhoti et al., NeurIPS 2020, and of all who compare with it): the indices of
the 50,000 training images, shuffled by numpy's legacy generator with seed 1; the first 5,000 are
val. ImageNet (the code of Tao et al., AAAI 2025): the 50,000 official validation images, shuffled
by torch with seed 42; the first fifth is val, the rest is test. Neither touches a global generator.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from featcal.core.arguments import check_whole
from featcal.core.errors import ArgumentError, InputError
from featcal.datasets.images import ImageData, Images, Splits

PUBLISHED_VAL = 5000
CIFAR_SEED = 1
IMAGENET_SEED = 42
LEAST_FIFTH = 5  # images, below which a fifth of them is none
SHUFFLE = f"the shuffle of numpy's legacy seed {CIFAR_SEED}"


def published_split(n: int = 50_000, val: int = PUBLISHED_VAL) -> tuple[Tensor, Tensor]:
    """The published cut of CIFAR's training images.

    Args:
        n: How many images there are.
        val: How many of them are not trained on.

    Returns:
        The indices to train on, and those of val, both in the order of the shuffle.
    """
    check_whole("published_split", 2, n=n)
    check_whole("published_split", 1, val=val)
    if val >= n:
        raise InputError(
            f"published_split: val={val} of n={n} images leaves nothing to train on: give a val "
            f"from 1 to {n - 1}"
        )
    order = list(range(n))  # a list as in the published code
    np.random.RandomState(CIFAR_SEED).shuffle(order)
    index = torch.tensor(order)
    return index[val:], index[:val]


def imagenet_split(n: int = 50_000) -> tuple[Tensor, Tensor]:
    """The published cut of ImageNet's validation images: the indices of val and of test."""
    check_whole("imagenet_split", LEAST_FIFTH, n=n)
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
    if val is not None:
        check_whole("split", 1, val=val)
    rest, val_index, how = _train_and_val(data, val)
    train, held_index = _held_out(rest, held_out)
    if held_index is not None:
        which = "training images" if val_index is None else "that are left"
        how += f"; held out: {held_out} of the {len(rest)} {which}, the first in {SHUFFLE}"
    how += f"; {data.note}" if data.note else ""
    return Splits(
        name=data.name,
        class_names=data.class_names,
        train=data.train.rows(train),
        val=_val_images(data, val_index),
        test=data.test,
        train_index=train,
        val_index=val_index,
        held_out=None if held_index is None else data.train.rows(held_index),
        held_out_index=held_index,
        how=how,
    )


def _train_and_val(data: ImageData, val: int | None) -> tuple[Tensor, Tensor | None, str]:
    if data.val is not None:
        if val is not None:
            raise ArgumentError(
                f"<val> is {val}, and {data.name} has a val part of its own of {len(data.val)} "
                "images: leave <val> out"
            )
        return torch.arange(len(data.train)), None, data.how
    images = len(data.train)
    count = default_val(images) if val is None else val
    if count >= images:
        raise ArgumentError(
            f"<val> is {count} of {images} training images and leaves nothing to train on: give "
            f"a <val> from 1 to {images - 1}"
        )
    train, index = published_split(images, count)
    how = f"val: {count} of {images} training images, the first in {SHUFFLE}"
    return train, index, how


def _held_out(train: Tensor, held_out: int) -> tuple[Tensor, Tensor | None]:
    if held_out == 0:
        return train, None
    if held_out >= len(train):
        raise ArgumentError(
            f"<held_out> is {held_out} of {len(train)} images to train on: give 0 (none) or at "
            f"most {len(train) - 1}"
        )
    rest, held = published_split(len(train), held_out)
    return train[rest], train[held]


def _val_images(data: ImageData, index: Tensor | None) -> Images:
    if index is not None:
        return data.train.rows(index)
    assert data.val is not None
    return data.val
