"""One step of training: images in, a little better network out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot, pad

from featcal.core import dist
from featcal.datasets import Images, Normalisation
from featcal.losses import TrainingLoss, mixed
from featcal.train.recipe import MARGIN, Recipe, Rows

# --- The training images where the network is, and a batch of them made by one gather.
#
# All pixels stay on the device as bytes. Shift and mirror are index arithmetic, so that a batch
# costs
# one kernel and no worker processes.


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


# --- A whole step as one CUDA graph: hundreds of small kernels for the price of one launch.

WARM_UP = 3  # steps: libraries make their plans and gradients find their place in memory


@final
class GraphStep:
    """The same as a `Step`, replayed from a graph for batches of the usual size.

    A batch of another size, the last of an epoch, runs as it is. The graph is captured again when
    the loss is another one.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self._captured: TrainingLoss | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._rows: Rows | None = None
        self._loss: Tensor | None = None

    def __call__(self, rows: Rows) -> Tensor:
        """Takes the step; the loss a row before it."""
        if not self.step.is_usual(rows):
            return self.step(rows)
        if self._captured is not self.step.loss:
            self._capture(rows)
        assert self._rows is not None
        assert self._graph is not None
        assert self._loss is not None
        for ours, given in zip(self._rows, rows, strict=True):
            ours.copy_(given)
        self._graph.replay()
        return self._loss

    def _capture(self, rows: Rows) -> None:
        self._graph = None  # gives its memory back first
        self._rows = Rows(*(part.clone() for part in rows))
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), unchanged(self.step.model, self.step.optimizer):
            for _ in range(WARM_UP):
                self.step(self._rows)
        torch.cuda.current_stream().wait_stream(stream)
        self.step.optimizer.zero_grad(set_to_none=True)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):  # torch's own may be of another device
            self._loss = self.step(self._rows)
        self._captured = self.step.loss


@contextmanager
def unchanged(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Puts weights, statistics and the optimiser's memory back, in place."""
    before = [(part, part.detach().clone()) for part in (*model.parameters(), *model.buffers())]
    state = {id(w): _copied(optimizer.state.get(w, {})) for w in model.parameters()}
    try:
        yield
    finally:
        with torch.no_grad():
            for part, value in before:
                part.copy_(value)
            for weight in model.parameters():
                _put_back(optimizer.state.get(weight, {}), state[id(weight)])


def _copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in state.items() if isinstance(value, Tensor)}


def _put_back(state: dict[str, Tensor], before: dict[str, Tensor]) -> None:
    """What was there before as it was; what was made meanwhile at zero, as at birth."""
    for key, value in state.items():
        if isinstance(value, Tensor):
            value.copy_(before[key]) if key in before else value.zero_()
