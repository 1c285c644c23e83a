"""How a step of training runs: on which device, in which precision, compiled, as one CUDA graph."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot, pad

from featcal.core import dist
from featcal.core.checks import ArgumentError
from featcal.datasets import Images, Normalisation
from featcal.losses import TrainingLoss, mixed
from featcal.train.recipe import MARGIN, Recipe, Rows

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Of the compiler on a GPU, measured on ResNet-50: small kernels that do not wait for each other in
# one launch, and several tile sizes tried. Random numbers are drawn outside of those kernels, which
# cannot hold them (pytorch issue 168124).
COMPILER: dict[str, str | int | bool | Callable[..., Any]] = {
    "combo_kernels": True,
    "max_autotune_pointwise": True,
    "fallback_random": True,
}
WARM_UP = 3  # steps before a capture: libraries plan, and gradients find their place in memory
Network = Callable[[Tensor], Tensor]


@final
@dataclass(frozen=True, kw_only=True)
class Engine:
    """The device and its tricks.

    Attributes:
        device: where the network and all images are.
        precision: of the forward pass; weights and losses are float32 in any case.
        compiled: whether `torch.compile` fuses the network's kernels.
        graph: whether a step is replayed as one CUDA graph.
    """

    device: torch.device
    precision: torch.dtype
    compiled: bool
    graph: bool

    @classmethod
    def best(
        cls,
        device: str | torch.device | None = None,
        *,
        precision: str | None = None,
        compiled: bool | None = None,
        graph: bool | None = None,
    ) -> Engine:
        """The fastest there is; whatever is given is taken.

        A GPU runs in bfloat16, compiled, as a graph; several of them without the graph.
        """
        given = ("cuda" if torch.cuda.is_available() else "cpu") if device is None else device
        try:
            place = torch.device(given)
            if place == torch.device("cuda"):  # which of them torchrun says
                place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            torch.zeros(1, device=place).item()
        except (RuntimeError, AssertionError) as error:
            there = "cpu or cuda" if torch.cuda.is_available() else "cpu"
            raise ArgumentError(
                f"<device> is '{given}', which cannot be computed on here: give {there}"
            ) from error
        gpu, alone = place.type == "cuda", dist.world() == 1
        if graph and not (gpu and alone):
            raise ArgumentError("<graph> needs one process on a GPU: leave it out")
        name = precision or ("bfloat16" if gpu else "float32")
        if name not in PRECISIONS:
            raise ArgumentError(f"<precision> is {precision!r}: choose {' or '.join(PRECISIONS)}")
        return cls(
            device=place,
            precision=PRECISIONS[name],
            compiled=gpu if compiled is None else compiled,
            graph=(gpu and alone) if graph is None else graph,
        )

    def network(self, model: nn.Module) -> Network:
        """The model in its fastest form."""
        if not self.compiled:
            return model
        # No two networks share what was compiled: the cache of programs is small and would be full
        # after a few of them, and everything after that would run as it is. What the caller had
        # compiled is compiled again when it is called next.
        torch.compiler.reset()
        options = known_options() if self.device.type == "cuda" else None
        return torch.compile(model, dynamic=False, options=options)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """This device is the current one, and cuDNN tries its ways on the first batch."""
        before, cudnn = torch.backends.cudnn.benchmark, torch.backends.cudnn
        cudnn.benchmark = not cudnn.deterministic
        try:
            # Streams, graphs and random states are those of the current device, whichever it is.
            with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
                yield
        finally:
            cudnn.benchmark = before

    def as_json(self) -> dict[str, Any]:
        """The public form."""
        on_gpu = self.device.type == "cuda"
        return {
            "device": torch.cuda.get_device_name(self.device) if on_gpu else self.device.type,
            "precision": str(self.precision).removeprefix("torch."),
            "compiled": self.compiled,
            "graph": self.graph,
            "processes": dist.world(),
        }


def known_options() -> dict[str, str | int | bool | Callable[..., Any]]:
    """Those of the compiler's options that this torch has; it would refuse another."""
    from torch._inductor import list_options  # slow to import, and rarely needed

    known = set(list_options())
    return {key: value for key, value in COMPILER.items() if key in known}


@contextmanager
def processes(device: str | None = None) -> Iterator[None]:
    """Joins the other processes that torchrun started, if it did."""
    with dist.processes(gpu=device != "cpu" and torch.cuda.is_available()):
        yield


def optimizer_of(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """The optimiser of a recipe; on a GPU in one kernel, with a rate that a graph can read."""
    weights = list(model.parameters())
    on_gpu = weights[0].is_cuda
    lr = torch.tensor(recipe.lr, device=weights[0].device) if on_gpu else recipe.lr
    shared: dict[str, Any] = {"lr": lr, "weight_decay": recipe.weight_decay, "fused": on_gpu}
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(weights, **shared, capturable=on_gpu)
    return torch.optim.SGD(weights, **shared, momentum=recipe.momentum)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Changes the learning rate in place, for a captured graph reads it where it lies."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


@final
class Feed:
    """Batches of normalised, augmented images for the rows of a plan.

    All pixels stay on the device as bytes. Shift and mirror are index arithmetic, so that a batch
    costs one kernel and no worker processes.
    """

    def __init__(self, images: Images, normalise: Normalisation, device: torch.device) -> None:
        height, width = images.size
        # Zeros before normalisation, as published: the border is black, not the mean.
        border = (0, 0, MARGIN, MARGIN, MARGIN, MARGIN)
        self.pixels = pad(images.pixels.to(device), border)  # (n, h + 8, w + 8, 3)
        self.labels = images.labels.to(device)
        self.normalise = normalise
        self._down = torch.arange(height, device=device)
        self._right = torch.arange(width, device=device)

    def __call__(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Images (n, 3, h, w), channels last, and their labels (n,)."""
        down = rows.shift[:, :1] + self._down  # (n, h)
        right = torch.where(rows.mirror[:, None], self._right.flip(0), self._right)
        right = rows.shift[:, 1:] + right  # (n, w)
        pixels = self.pixels[rows.images[:, None, None], down[:, :, None], right[:, None, :]]
        return self.normalise(pixels), self.labels[rows.images]


@final
@dataclass(eq=False)
class Step:
    """Forward, loss, backward, clip, update; everything on the device, nothing read back.

    Attributes:
        model: makes logits of images.
        network: the same, compiled for batches of the usual size; the model itself where it is not.
        loss: of the batch; replaced between epochs by losses that change.
    """

    model: nn.Module
    network: Network
    feed: Feed
    loss: TrainingLoss
    optimizer: torch.optim.Optimizer
    recipe: Recipe
    precision: torch.dtype

    def is_usual(self, rows: Rows) -> bool:
        """Whether a batch is of the size that the network is compiled for."""
        return len(rows.images) * dist.world() == self.recipe.batch

    def __call__(self, rows: Rows) -> Tensor:
        """Takes the step; the loss per row before it, detached."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._loss(rows)
        summed = self.loss.reduction == "sum"
        # The gradients of several processes are averaged, which is right for means alone.
        whole = loss * dist.world() if summed else loss
        whole.backward()  # type: ignore[no-untyped-call]
        if self.recipe.clip_norm is not None:
            weights = self.optimizer.param_groups[0]["params"]
            nn.utils.clip_grad_norm_(weights, self.recipe.clip_norm, foreach=True)
        self.optimizer.step()
        return loss.detach() / len(rows.images) if summed else loss.detach()

    def _loss(self, rows: Rows) -> Tensor:
        images, targets = self.feed(rows)
        if self.recipe.mixup:  # each with the one before it: the order is random, so the partner is
            weight = rows.weight.to(images.dtype)
            images = weight * images + (1 - weight) * images.roll(1, 0)
        device = images.device.type
        with torch.autocast(device, self.precision, enabled=self.precision != torch.float32):
            logits = self.network(images) if self.is_usual(rows) else self.model(images)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        share, classes = self.recipe.smoothing, logits.shape[1]
        if share:
            targets = one_hot(targets, classes) * (1 - share) + share / classes
        if self.recipe.mixup:
            return mixed(self.loss, logits, targets, targets.roll(1, 0), rows.weight)
        return self.loss(logits, targets)


@final
class GraphStep:
    """The same as a `Step`, replayed from a CUDA graph for batches of the usual size.

    Hundreds of small kernels for the price of one launch. A batch of another size, the last of an
    epoch, runs as it is. The graph is captured again when the loss is another one.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self._captured: TrainingLoss | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._rows: Rows | None = None
        self._loss: Tensor | None = None

    def __call__(self, rows: Rows) -> Tensor:
        """Takes the step; the loss per row before it."""
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
    weights = list(model.parameters())
    parts = [*weights, *model.buffers()]
    before = [part.detach().clone() for part in parts]

    def tensors(weight: Tensor) -> dict[str, Tensor]:
        state = optimizer.state.get(weight, {})
        return {key: value for key, value in state.items() if isinstance(value, Tensor)}

    kept = [{key: value.clone() for key, value in tensors(w).items()} for w in weights]
    try:
        yield
    finally:
        with torch.no_grad():
            for part, value in zip(parts, before, strict=True):
                part.copy_(value)
            for weight, state in zip(weights, kept, strict=True):
                for key, value in tensors(weight).items():
                    # What was made meanwhile is reset to zero, as the optimiser starts it.
                    value.copy_(state[key]) if key in state else value.zero_()
