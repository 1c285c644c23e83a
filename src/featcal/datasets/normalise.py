"""Bytes to what a network is fed: (pixel / 255 - mean) / std by channel, and the published values.

The published CIFAR runs divide by the mean of the standard deviations of single images, not by the
standard deviation of all pixels, and feed CIFAR-100's test images with ImageNet's values while
train and val have CIFAR-10's: val and test then differ in contrast, and what is fitted on val is
biased for test. `test_norm="reference"` repeats that, `"matched"` does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from featcal.core.errors import InputError
from featcal.datasets.images import Images

Triple = tuple[float, float, float]
TestNorm = Literal["matched", "reference"]
CHUNK = 4096  # images that are counted at once, to bound the memory


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
            raise InputError(
                f"Normalisation: mean={self.mean}, std={self.std}: give three numbers each, red, "
                "green, blue, with std above 0"
            )

    def __call__(self, pixels: Tensor) -> Tensor:
        """Bytes (n, h, w, 3) to float32 (n, 3, h, w) in channels-last order, on their device."""
        if pixels.dtype != torch.uint8 or pixels.ndim != 4 or pixels.shape[3] != 3:
            raise InputError(
                f"Normalisation: pixels are {pixels.dtype} of shape {tuple(pixels.shape)}: give "
                "torch.uint8 of shape (images, height, width, 3)"
            )
        scaled = pixels.contiguous().to(torch.float32).div_(255)
        scaled.sub_(_row(self.mean, pixels.device)).div_(_row(self.std, pixels.device))
        return scaled.permute(0, 3, 1, 2)

    @classmethod
    def measured(cls, images: Images) -> Normalisation:
        """The values of these images: give those that are trained on, never test images."""
        counts = torch.stack([_counts(images.pixels[..., channel]) for channel in range(3)])
        levels = torch.arange(256, dtype=torch.float64) / 255
        shares = counts / counts.sum(1, keepdim=True)
        mean = shares @ levels
        std = (shares * (levels - mean[:, None]).square()).sum(1).sqrt()
        if not bool((std > 0).all()):
            raise InputError(
                f"Normalisation.measured: std is {tuple(std.tolist())}, a channel is the same in "
                "every pixel of the images: check them, or in Python give the values with "
                "Normalisation(mean, std)"
            )
        return cls(_triple(mean), _triple(std))


def _row(values: Triple, device: torch.device) -> Tensor:
    # Filled on the device: a copy from the host is not allowed while a CUDA graph is recorded.
    return torch.stack(
        [torch.full((), value, dtype=torch.float32, device=device) for value in values]
    )


def _counts(channel: Tensor) -> Tensor:
    """How many bytes there are of each of the 256 values: exact, in any order of the images."""
    parts = [channel[i : i + CHUNK] for i in range(0, len(channel), CHUNK)]
    counts = [torch.bincount(part.flatten(), minlength=256) for part in parts]
    return torch.stack(counts).sum(0).to("cpu", torch.float64)


def _triple(values: Tensor) -> Triple:
    red, green, blue = values.tolist()
    return red, green, blue


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
            raise InputError(
                "test_norm='reference' repeats published values and measure replaces them: give "
                "one of the two"
            )
        own = Normalisation.measured(measure)
        return own, own
    if name not in PUBLISHED:
        raise InputError(
            f"name={name!r} has no published normalisation (known: {', '.join(PUBLISHED)}): give "
            "the training images, as in measure=splits.train"
        )
    test = PUBLISHED if test_norm == "matched" else PUBLISHED_TEST
    return PUBLISHED[name], test[name]
