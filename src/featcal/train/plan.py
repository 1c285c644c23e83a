"""What happens to which row, decided before an epoch begins from the seed and the epoch alone.

So a run that was killed goes on with the very rows, shifts and mirrors it would have had, and the
same run on another device sees the same images. Nothing here touches the global random state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from featcal.train.recipe import Recipe

MARGIN = 4  # pixels of zeros around an image, and the furthest it is shifted


class Rows(NamedTuple):
    """The rows of one step.

    Attributes:
        images: (n,) which of them, by number.
        shift: (n, 2) where each is cut from its padded self, down and right.
        mirror: (n,) whether left and right change places.
        weight: () how much of an image stays itself when it is mixed with its neighbour; 1 for
            all. Of a whole plan, one for every step.
    """

    images: Tensor
    shift: Tensor
    mirror: Tensor
    weight: Tensor

    def to(self, device: torch.device) -> Rows:
        """The same rows on a device."""
        return Rows(*(part.to(device, non_blocking=True) for part in self))

    def of_rank(self, rank: int, world: int) -> Rows:
        """The share of one of several processes; all have as many, and what is over is left out."""
        mine = slice(rank, len(self.images) // world * world, world)
        return Rows(self.images[mine], self.shift[mine], self.mirror[mine], self.weight)


@final
@dataclass(frozen=True)
class Plan:
    """One epoch: every row once, in an order of its own, cut into batches."""

    rows: Rows
    batch: int

    @classmethod
    def of(cls, recipe: Recipe, epoch: int, rows: int) -> Plan:
        """The plan of an epoch, counted from 0."""
        # Two whole numbers in one seed: epochs are far fewer than 2^20.
        random = torch.Generator().manual_seed(recipe.seed * 2**20 + epoch)
        order = torch.randperm(rows, generator=random)
        shift = torch.randint(0, 2 * MARGIN + 1, (rows, 2), generator=random)
        mirror = torch.rand(rows, generator=random) < 0.5
        if not recipe.augment:
            shift, mirror = torch.full_like(shift, MARGIN), torch.zeros_like(mirror)
        weight = _mixing(recipe, epoch, -(-rows // recipe.batch))
        return cls(Rows(order, shift, mirror, weight), recipe.batch)

    def __len__(self) -> int:
        return len(self.rows.weight)

    def to(self, device: torch.device) -> Plan:
        """The same plan on a device."""
        return Plan(self.rows.to(device), self.batch)

    def steps(self, first: int = 0) -> Iterator[Rows]:
        """The rows of each step, from the step `first` on; the last may have fewer."""
        images, shift, mirror, weight = self.rows
        for step in range(first, len(self)):
            part = slice(step * self.batch, (step + 1) * self.batch)
            yield Rows(images[part], shift[part], mirror[part], weight[step])


def _mixing(recipe: Recipe, epoch: int, steps: int) -> Tensor:
    """A draw of Beta(alpha, alpha) for every step, one for a whole batch; 1 without mixing."""
    if recipe.mixup == 0:
        return torch.ones(steps)
    random = np.random.default_rng((recipe.seed, epoch))  # torch's own sampler takes no generator
    return torch.from_numpy(random.beta(recipe.mixup, recipe.mixup, steps)).float()
