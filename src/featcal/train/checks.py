"""What a run is refused for, before anything is trained or when it has come to nothing."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor, nn

from featcal.core import dist
from featcal.core.arguments import check_whole
from featcal.core.errors import InputError
from featcal.core.fitting import undisturbed
from featcal.datasets import Splits
from featcal.losses import TrainingLoss
from featcal.train.recipe import Recipe
from featcal.train.watch import Batches


class Diverged(InputError):
    """A run whose loss is no number any more; nothing that goes on from it can be."""


def check_request(splits: Splits, loss: TrainingLoss, recipe: Recipe) -> None:
    """Refuses a loss and a recipe that do not go together, or not with the rows."""
    rows = len(splits.train)
    if recipe.batch > rows:
        raise InputError(f"recipe: batch is {recipe.batch}, and train has {rows} rows: lower it")
    if recipe.batch % dist.world():
        raise InputError(
            f"recipe: batch is {recipe.batch}: give a multiple of the {dist.world()} processes"
        )
    if recipe.smoothing and not loss.soft_targets:
        raise InputError(
            f"recipe: smoothing is {recipe.smoothing}, which makes probabilities of labels, and "
            f"{loss.name} takes class numbers alone: leave smoothing out, or choose a loss such "
            "as CE()"
        )
    if loss.needs_held_out and splits.held_out is None:
        raise InputError(
            f"{loss!r} adapts to rows of its own: cut them from train with split(held_out=5000)"
        )


def check_pace(watch_every: int, checkpoint_every: float) -> None:
    """Refuses looks at val and checkpoints that would never come."""
    check_whole("train", 1, watch_every=watch_every)
    if not checkpoint_every >= 0:
        raise InputError(f"checkpoint_every is {checkpoint_every}: give seconds, from 0 up")


@torch.no_grad()
def check_logits(model: nn.Module, batches: Batches, classes: int) -> None:
    """Refuses a network that was made for other data."""
    images, _ = next(iter(batches))
    with undisturbed(model):
        given = model(images[:2])
    if not isinstance(given, Tensor) or given.ndim != 2:
        what = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
        raise InputError(f"the model gives {what} of two images: it must give logits (n, classes)")
    if given.shape[1] != classes:
        raise InputError(
            f"the model gives {given.shape[1]} logits, and there are {classes} classes: "
            f"build it for {classes}"
        )


def check_finite(loss: float, epoch: int, recipe: Recipe, checkpoint: Path | None) -> None:
    """Ends a run that has diverged, with what to change and what is in the way of it."""
    if math.isfinite(loss):
        return
    clip = "limit the gradients with clip_norm"
    if recipe.clip_norm is not None:
        clip = f"lower clip_norm ({recipe.clip_norm:g})"
    sentence = f"the loss is {loss} after epoch {epoch + 1}: lower lr ({recipe.lr:g}), or {clip}"
    if checkpoint is not None and checkpoint.exists():
        # Another recipe cannot go on from it, and the same one would end here again.
        sentence += f"; and remove {checkpoint.parent}, which holds this run, or choose another"
    raise Diverged(sentence)
