"""How a network does on rows it is not trained on, while it is trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import final

import torch
from torch import Tensor, nn

from featcal.core.fitting import undisturbed
from featcal.datasets import Images, Normalisation
from featcal.metrics import accuracy, ece, nll

ROWS = 1000  # at a time: enough to fill a GPU, little to keep


@final
class Batches:
    """Normalised images in their order, as pairs for `collect`; re-iterable."""

    def __init__(
        self, images: Images, normalise: Normalisation, device: torch.device, rows: int = ROWS
    ) -> None:
        self.dataset, self.normalise, self.device, self.size = images, normalise, device, rows

    def __len__(self) -> int:
        return -(-len(self.dataset) // self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(self.dataset), self.size):
            part = slice(start, start + self.size)
            pixels = self.dataset.pixels[part].to(self.device)
            yield self.normalise(pixels), self.dataset.labels[part].to(self.device)


@final
@dataclass(frozen=True)
class Watched:
    """The scores people watch."""

    nll: float
    accuracy: float
    ece: float

    @classmethod
    def of(cls, logits: Tensor, labels: Tensor) -> Watched:
        """The scores of logits (n, k)."""
        z, y = logits.cpu(), labels.cpu()
        return cls(nll(logits=z, labels=y), accuracy(logits=z, labels=y), ece(logits=z, labels=y))

    def as_json(self) -> dict[str, float]:
        """The public form."""
        return asdict(self)


@torch.no_grad()
def outputs(model: nn.Module, batches: Batches, precision: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits (n, k) and labels (n,) of all rows; the model is as it was afterwards."""
    logits, labels = [], []
    with undisturbed(model):
        for images, given in batches:
            mixed = precision != torch.float32
            with torch.autocast(images.device.type, precision, enabled=mixed):
                logits.append(model(images).float())
            labels.append(given)
    return torch.cat(logits), torch.cat(labels)
