"""What a run is refused for, before anything is trained or when it has come to nothing."""

from __future__ import annotations

from pathlib import Path
from typing import final

import torch
from torch import Tensor, nn

from featcal.core import dist
from featcal.core.arguments import check_whole
from featcal.core.errors import ArgumentError, InputError
from featcal.core.fitting import undisturbed
from featcal.datasets import Normalisation, Splits
from featcal.datasets.split import default_val
from featcal.losses import TrainingLoss
from featcal.train.engine import Engine
from featcal.train.recipe import Recipe
from featcal.train.watch import Batches


@final
class Diverged(InputError):
    """A run whose numbers are none any more; nothing that goes on from it can be."""

    def __init__(self, what: str, epoch: int, recipe: Recipe, folder: Path | None) -> None:
        self.what, self.epoch, self.recipe, self.folder = what, epoch, recipe, folder
        super().__init__(self.sentence("lr", "clip_norm"))

    def sentence(self, lr: str, clip_norm: str) -> str:
        """What to change, by the names the reader knows it under, and what is in the way of it."""
        clip = f"limit the gradients with {clip_norm}"
        if self.recipe.clip_norm is not None:
            clip = f"lower {clip_norm} ({self.recipe.clip_norm:g})"
        # Another recipe cannot go on from the checkpoint, and the same one would end here again.
        way = f"; and remove {self.folder}, which holds this run, or choose another"
        return (
            f"{self.what} after epoch {self.epoch}: lower {lr} ({self.recipe.lr:g}), "
            f"or {clip}{way if self.folder else ''}"
        )


# What people give by mistake has a name of its own, and this is what they meant.
KINDS = {
    "splits": (Splits, "the parts of the images, as in split(load_images('cifar10', 'data'))"),
    "loss": (TrainingLoss, "a loss, such as CE() or parse_loss('ce')"),
    "recipe": (Recipe, "a recipe, such as Recipe(epochs=35)"),
    "engine": (Engine, "an engine, such as Engine.best('cpu')"),
    "normalise": (Normalisation, "one normalisation, as in normalisations('cifar10')[0]"),
}


def check_kinds(**given: object) -> None:
    """Refuses arguments of another kind than they must be."""
    for name, value in given.items():
        kind, remedy = KINDS[name]
        if kind is TrainingLoss and isinstance(value, str):
            remedy = f"parse_loss({value!r})"
        if not isinstance(value, kind):
            raise InputError(f"{name} is {_what(value)}: give {remedy}")


def _what(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return repr(value) if isinstance(value, (str, int, float)) else type(value).__name__


def check_request(splits: Splits, loss: TrainingLoss, recipe: Recipe) -> None:
    """Refuses a loss and a recipe that do not go together, or not with the rows."""
    rows = len(splits.train)
    if recipe.batch > rows:
        raise ArgumentError(
            f"<batch> is {recipe.batch}, and train has {rows} rows: give a <batch> of {rows} or "
            "fewer"
        )
    if recipe.batch % dist.world():
        raise ArgumentError(
            f"<batch> is {recipe.batch}: give a multiple of the {dist.world()} processes"
        )
    if recipe.smoothing and not loss.soft_targets:
        raise ArgumentError(
            f"<smoothing> is {recipe.smoothing}, which makes probabilities of labels, and "
            f"{loss.name} takes class numbers alone: leave <smoothing> out, or choose a loss such "
            "as ce"
        )
    if loss.needs_held_out and splits.held_out is None:
        raise InputError(
            f"{loss!r} adapts to rows of its own: cut them from train, such as with "
            f"split(..., held_out={default_val(rows)})"
        )


def check_pace(watch_every: int, checkpoint_every: float) -> None:
    """Refuses looks at val and checkpoints that would never come."""
    check_whole("train", 1, watch_every=watch_every)
    number = isinstance(checkpoint_every, (int, float))
    if not number or not checkpoint_every >= 0:
        raise InputError(f"checkpoint_every is {checkpoint_every!r}: give seconds, from 0 up")


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
    whole = (given.double().sum(1) - 1).abs() < 0.01  # a sixteen-bit softmax is this far off
    if bool((given >= 0).all() & whole.all()):
        raise InputError(
            "the model gives probabilities (no number is negative, and each row adds up to 1): "
            "leave its softmax out, for losses and calibrators take logits"
        )


def check_finite(
    found: Tensor, what: str, epoch: int, recipe: Recipe, checkpoint: Path | None
) -> None:
    """Ends a run that has diverged in an epoch, counted from 0."""
    if bool(found.isfinite().all()):
        return
    kept = checkpoint is not None and checkpoint.exists()
    raise Diverged(what, epoch + 1, recipe, checkpoint.parent if checkpoint and kept else None)
