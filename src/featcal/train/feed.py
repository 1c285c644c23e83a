"""The training images where the network is, and a batch of them made by one gather.

All pixels stay on the device as bytes. Shift and mirror are index arithmetic, so that a batch costs
one kernel and no worker processes.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor
from torch.nn.functional import pad

from featcal.datasets import Images, Normalisation
from featcal.train.plan import MARGIN, Rows


@final
class Feed:
    """Batches of normalised, augmented images for the rows of a plan."""

    def __init__(self, images: Images, normalise: Normalisation, device: torch.device) -> None:
        self.height, self.width = images.pixels.shape[1:3]
        # Zeros before normalisation, as published: the border is black, not the mean.
        border = (0, 0, MARGIN, MARGIN, MARGIN, MARGIN)
        self.pixels = pad(images.pixels.to(device), border)  # (n, h + 8, w + 8, 3)
        self.labels = images.labels.to(device)
        self.normalise = normalise
        self._down = torch.arange(self.height, device=device)
        self._right = torch.arange(self.width, device=device)

    def __call__(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Images (n, 3, h, w), channels last, and their labels (n,)."""
        down = rows.shift[:, :1] + self._down  # (n, h)
        right = torch.where(rows.mirror[:, None], self._right.flip(0), self._right)
        right = rows.shift[:, 1:] + right  # (n, w)
        pixels = self.pixels[rows.images[:, None, None], down[:, :, None], right[:, None, :]]
        return self.normalise(pixels), self.labels[rows.images]


def mixed_images(images: Tensor, weight: Tensor) -> Tensor:
    """Each image with a share of the one before it; the order is random, so the partner is."""
    weight = weight.to(images.dtype)
    return weight * images + (1 - weight) * images.roll(1, 0)
