"""A whole step as one CUDA graph: hundreds of small kernels for the price of one launch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor, nn

from featcal.losses import TrainingLoss
from featcal.train.plan import Rows
from featcal.train.step import Step

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
