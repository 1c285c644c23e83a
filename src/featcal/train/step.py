"""One step of training: images in, a little better network out."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from featcal.core import dist
from featcal.losses import TrainingLoss, mixed
from featcal.train.feed import Feed, mixed_images
from featcal.train.plan import Rows
from featcal.train.recipe import Recipe

Network = Callable[[Tensor], Tensor]


def optimizer_of(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """The optimiser of a recipe; on a GPU in one kernel, with a rate that a graph can read."""
    weights = list(model.parameters())
    on_gpu = weights[0].is_cuda
    lr = torch.tensor(recipe.lr, device=weights[0].device) if on_gpu else recipe.lr
    decay = recipe.weight_decay
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(
            weights, lr=lr, weight_decay=decay, fused=on_gpu, capturable=on_gpu
        )
    return torch.optim.SGD(
        weights, lr=lr, momentum=recipe.momentum, weight_decay=decay, fused=on_gpu
    )


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Changes the learning rate in place, for a captured graph reads it where it lies."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


@final
class Step:
    """Forward, loss, backward, clip, update; everything on the device, nothing read back.

    Attributes:
        model: makes logits of images.
        network: the same, compiled for batches of the usual size; the model itself where it is not.
        loss: of the batch; replaced between epochs by losses that change.
    """

    def __init__(
        self,
        model: nn.Module,
        network: Network,
        feed: Feed,
        loss: TrainingLoss,
        optimizer: torch.optim.Optimizer,
        recipe: Recipe,
        precision: torch.dtype,
    ) -> None:
        self.model, self.network, self.feed, self.loss = model, network, feed, loss
        self.optimizer, self.recipe, self.precision = optimizer, recipe, precision
        self._weights = [w for group in optimizer.param_groups for w in group["params"]]

    def __call__(self, rows: Rows) -> Tensor:
        """Takes the step; the loss a row before it, detached."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._loss(rows)
        # The gradients of several processes are averaged, which is right for means alone.
        whole = loss * dist.world() if self.loss.reduction == "sum" else loss
        whole.backward()  # type: ignore[no-untyped-call]
        if self.recipe.clip_norm is not None:
            nn.utils.clip_grad_norm_(self._weights, self.recipe.clip_norm, foreach=True)
        self.optimizer.step()
        loss = loss.detach()
        return loss / len(rows.images) if self.loss.reduction == "sum" else loss

    def is_usual(self, rows: Rows) -> bool:
        """Whether a batch is of the size that the network is compiled for."""
        return len(rows.images) * dist.world() == self.recipe.batch

    def _loss(self, rows: Rows) -> Tensor:
        images, labels = self.feed(rows)
        if self.recipe.mixup:
            images = mixed_images(images, rows.weight)
        device = images.device.type
        with torch.autocast(device, self.precision, enabled=self.precision != torch.float32):
            logits = self.network(images) if self.is_usual(rows) else self.model(images)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        targets = self._targets(labels, logits.shape[1])
        if self.recipe.mixup:
            return mixed(self.loss, logits, targets, targets.roll(1, 0), rows.weight)
        return self.loss(logits, targets)

    def _targets(self, labels: Tensor, classes: int) -> Tensor:
        share = self.recipe.smoothing
        if not share:
            return labels
        return one_hot(labels, classes) * (1 - share) + share / classes
