"""How a network is trained: the published recipe, and the same in less time.

Mukhoti et al., "Calibrating Deep Neural Networks using Focal Loss", NeurIPS 2020, whose networks
the feature clipping paper calibrates: 350 epochs of SGD, the rate divided by ten twice.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from featcal.core.checks import InputError, check_choice, check_flags, check_whole
from featcal.losses import Brier, TrainingLoss

EPOCHS = 350
# The published loop stepped its schedule before each epoch, so that the rate fell one epoch early.
DROPS = (149 / EPOCHS, 249 / EPOCHS)
CLIP_NORM = 2.0
SHARE = 5  # warm-up is at most a fifth of a run, unless somebody says otherwise
BY_LENGTH = -1


@final
@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides what comes out of a run besides data, network and loss.

    Attributes:
        epochs: passes over the training rows.
        batch: rows of a step, on all processes together.
        optimizer: "sgd", or "adamw" for transformers.
        lr: the highest learning rate.
        momentum: of SGD.
        weight_decay: on every parameter, as published.
        schedule: "steps" divides the rate by ten at each of `drops`; "cosine" lowers it to zero.
        drops: parts of the run after which the rate falls, to the nearest epoch; never at the
            start, nor two in one epoch, so that the shortest runs have the full rate, too.
        warmup: epochs over which the rate rises from nothing; by default (-1) one, and none in a
            run of less than five, which would hardly have the full rate otherwise. `lasting`
            changes the epochs and the warm-up together.
        clip_norm: the longest gradient; None for no limit.
        augment: whether images are shifted by up to four pixels and mirrored.
        mixup: the parameter of the Beta distribution images are mixed by; 0 for no mixing.
        smoothing: how much of each label is spread over all classes, for losses that take
            probabilities as targets.
        seed: of the weights, the order of the rows and their augmentation.
    """

    epochs: int = EPOCHS
    batch: int = 128
    optimizer: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4
    schedule: str = "steps"
    drops: tuple[float, ...] = DROPS
    warmup: int = BY_LENGTH
    clip_norm: float | None = None
    augment: bool = True
    mixup: float = 0.0
    smoothing: float = 0.0
    seed: int = 1

    def __post_init__(self) -> None:
        check_whole("recipe", 1, epochs=self.epochs, batch=self.batch)
        if self.warmup == BY_LENGTH:
            object.__setattr__(self, "warmup", min(1, self.epochs // SHARE))
        check_whole("recipe", 0, warmup=self.warmup, seed=self.seed)
        check_flags("recipe", augment=self.augment)
        if self.seed >= 2**40:
            raise InputError(f"recipe: seed is {self.seed}: give one below 2^40")
        check_choice("recipe", "optimizer", self.optimizer, ("sgd", "adamw"))
        check_choice("recipe", "schedule", self.schedule, ("steps", "cosine"))
        _check_range("lr", self.lr, above=0.0)
        _check_range("momentum", self.momentum, below=1.0)
        _check_range("weight_decay", self.weight_decay)
        _check_range("mixup", self.mixup)
        _check_range("smoothing", self.smoothing, below=1.0)
        _check_range("clip_norm", 1.0 if self.clip_norm is None else self.clip_norm, above=0.0)
        if not isinstance(self.drops, tuple) or any(not 0 < drop <= 1 for drop in self.drops):
            raise InputError(f"recipe: drops is {self.drops}: give a tuple of parts of the run")

    @classmethod
    def for_network(cls, network: str, **changes: Any) -> Recipe:  # noqa: ANN401 - our own fields
        """What a network is trained with unless somebody says otherwise.

        >>> Recipe.for_network("vit").optimizer
        'adamw'
        """
        if network == "vit":
            vit = cls(optimizer="adamw", lr=1e-3, weight_decay=0.05, schedule="cosine", warmup=5)
            return replace(vit, **changes)
        return cls(**changes)

    def scaled(self, budget: float) -> Recipe:
        """The same run in a part of its epochs; the drops keep their places.

        >>> Recipe().scaled(0.1).epochs
        35
        """
        if not 0 < budget <= 1:
            raise InputError(f"budget is {budget}: give a part above 0 and at most 1")
        return self.lasting(max(1, round(self.epochs * budget)))

    def lasting(self, epochs: int) -> Recipe:
        """The same run in so many epochs; warm-up is at most a fifth of them, rounded down.

        >>> [Recipe().lasting(epochs).warmup for epochs in (4, 5, 350)]
        [0, 1, 1]
        """
        return replace(self, epochs=epochs, warmup=min(self.warmup, epochs // SHARE))

    @property
    def falls(self) -> tuple[int, ...]:
        """The epochs, counted from 0, that begin with a lower rate.

        >>> Recipe().falls, Recipe(epochs=2).falls
        ((149, 249), (1, 2))
        """
        found: list[int] = []
        for drop in sorted(self.drops):
            earliest = found[-1] + 1 if found else 1
            found.append(max(earliest, math.floor(drop * self.epochs + 0.5)))
        return tuple(found)

    def published(self) -> Recipe:
        """With the gradient clipped, for the summed losses of the published networks.

        Both or neither: sums over a batch without the clip are another optimiser.

        Raises:
            InputError: for a recipe that the published code could not have run.
        """
        if self.optimizer != "sgd":
            raise InputError(
                f"the published code trained by SGD, and this recipe has {self.optimizer}: leave "
                "published out, or choose another network"
            )
        return replace(self, clip_norm=CLIP_NORM, warmup=0)

    def rate_at(self, epoch: float) -> float:
        """The learning rate at a moment, counted in epochs from the start.

        >>> [round(Recipe(warmup=0).rate_at(e), 4) for e in (0, 148, 149, 249)]
        [0.1, 0.1, 0.01, 0.001]
        """
        if epoch < self.warmup:
            return self.lr * max(epoch, 1e-3) / self.warmup
        if self.schedule == "cosine":
            done = (epoch - self.warmup) / max(self.epochs - self.warmup, 1)
            return self.lr * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
        return self.lr * 0.1 ** sum(epoch >= fall for fall in self.falls)

    def as_json(self) -> dict[str, Any]:
        """The public form."""
        return {**asdict(self), "drops": list(self.drops)}


def published_loss(loss: TrainingLoss) -> TrainingLoss:
    """The loss summed as in the published code, but for Brier, a mean there; its form stays."""
    return replace(loss, reduction="mean" if isinstance(loss, Brier) else "sum")


def _check_range(
    key: str, value: object, *, above: float | None = None, below: float = math.inf
) -> None:
    least = 0.0 if above is None else above
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not least <= value < below or value == above:  # type: ignore[operator]
        limit = f"above {above:g}" if above is not None else "from 0 up"
        end = f" and below {below:g}" if below < math.inf else ""
        raise InputError(f"recipe: {key} is {value!r}: give a number {limit}{end}")


# What happens to which row is decided before an epoch begins, from the seed and the epoch alone. So
# a run that was killed goes on with the very rows, shifts and mirrors it would have had, and the
# same run on another device sees the same images. Nothing here touches the global random state.

MARGIN = 4  # pixels of zeros around an image, and the furthest it is shifted


class Rows(NamedTuple):
    """The rows of one step.

    Attributes:
        images: (n,) which of them, by number.
        shift: (n, 2) where each is cut from its padded self, down and right.
        mirror: (n,) whether left and right change places.
        weight: () how much of an image stays itself when it is mixed with its neighbour; 1 for
            all.
    """

    images: Tensor
    shift: Tensor
    mirror: Tensor
    weight: Tensor

    def of_rank(self, rank: int, world: int) -> Rows:
        """The share of one of several processes; all have as many, and what is over is left out."""
        mine = slice(rank, len(self.images) // world * world, world)
        return Rows(self.images[mine], self.shift[mine], self.mirror[mine], self.weight)


def steps_of(
    recipe: Recipe, epoch: int, rows: int, device: torch.device | str = "cpu"
) -> list[Rows]:
    """The steps of an epoch, counted from 0: every row once, in an order of its own.

    The last step may have fewer rows.
    """
    # Two whole numbers in one seed: epochs are far fewer than 2^20.
    random = torch.Generator().manual_seed(recipe.seed * 2**20 + epoch)
    order = torch.randperm(rows, generator=random)
    shift = torch.randint(0, 2 * MARGIN + 1, (rows, 2), generator=random)
    mirror = torch.rand(rows, generator=random) < 0.5
    if not recipe.augment:
        shift, mirror = torch.full_like(shift, MARGIN), torch.zeros_like(mirror)
    weight = torch.ones(-(-rows // recipe.batch))  # one per step, for its whole batch
    if recipe.mixup:  # torch's own sampler takes no generator
        beta = np.random.default_rng((recipe.seed, epoch)).beta
        weight = torch.from_numpy(beta(recipe.mixup, recipe.mixup, len(weight))).float()
    whole = (part.to(device, non_blocking=True) for part in (order, shift, mirror, weight))
    order, shift, mirror, weight = whole
    starts = range(0, rows, recipe.batch)
    parts = (slice(start, start + recipe.batch) for start in starts)
    return [Rows(order[p], shift[p], mirror[p], w) for p, w in zip(parts, weight, strict=True)]
