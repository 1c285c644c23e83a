"""Minimising over many parameters: full-batch L-BFGS, one pass and one reduction an evaluation.

A method gives the loss of a batch as a function of its parameters and never sees a process or a
shard. Gradients are asked for by `torch.autograd.grad`, on the parameters alone, never on the head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from featcal.core import dist
from featcal.core.batch import Batch, Data, stored_logits

Objective = Callable[[Tensor, Batch], Tensor]  # (parameters (p,), batch) -> the summed loss, ()
Penalty = Callable[[Tensor], Tensor]  # parameters (p,) -> (), added to the mean loss
Valued = tuple[float, Tensor]  # a loss and its gradient (p,)

FLAT = 1e-7  # converged when no entry of the gradient of the mean loss is larger


@dataclass(frozen=True)
class Descent:
    """Where a descent ended: parameters (p,) float64, loss with penalty, evaluations, settled."""

    at: Tensor
    value: float
    steps: int
    converged: bool


def minimize(
    objective: Objective,
    start: Tensor,
    data: Data,
    rows: float,
    *,
    penalty: Penalty | None = None,
    iterations: int = 200,
) -> Descent:
    """Minimises the mean of a summed objective, plus a penalty, from a starting point.

    Args:
        objective: the summed loss of a batch, differentiable in the parameters; the batch's logits
            come in float64.
        start: (p,), where to begin; the result is never worse.
        data: the batches, read once an evaluation.
        rows: what the sums are divided by.
        penalty: added to the mean.
        iterations: of L-BFGS, at most.
    """
    evaluate = _Evaluation(objective, data, rows, penalty)
    at = start.detach().double()
    first = evaluate(at)
    found = _lbfgs(
        evaluate,
        at,
        max_iter=iterations,
        max_eval=2 * iterations,
        tolerance_grad=FLAT,
        tolerance_change=1e-12,
        history_size=20,
        line_search_fn="strong_wolfe",
    )
    value, gradient = evaluate(found)
    if not value <= first[0]:  # a line search that lost its way in rounding
        found, (value, gradient) = at, first
    settled = evaluate.count < iterations or float(gradient.abs().max()) <= 100 * FLAT
    return Descent(found, value, evaluate.count, math.isfinite(value) and settled)


def published_lbfgs(
    mapped: Callable[[Tensor, Tensor], Tensor], start: Tensor, data: Data, classes: int
) -> Descent:
    """The search behind the paper's tables: L-BFGS with step 0.02, no line search, in float32.

    All rows at once, 1,000 iterations at most; rounding ends it a little short of the minimum.

    Args:
        mapped: (parameters (p,), logits (n, k)) -> logits (n, k).
        start: (p,), where to begin.
        data: the batches, gathered.
        classes: k, which a process without rows cannot know.
    """
    logits, labels = gathered(data, classes)
    calls = 0

    def evaluate(at: Tensor) -> Valued:
        nonlocal calls
        calls += 1
        return _valued(lambda p: F.cross_entropy(mapped(p, logits), labels), at)

    found = _lbfgs(evaluate, start.detach().to(logits), lr=0.02, max_iter=1000)
    return Descent(found.double(), evaluate(found)[0], calls, converged=calls < 1000)


def gathered(data: Data, classes: int) -> tuple[Tensor, Tensor]:
    """All logits (n, k) float32 and labels (n,) of all processes, for what cannot be streamed."""
    batches = [batch for batch in data if len(batch)]
    none = torch.zeros(0, classes), torch.zeros(0, dtype=torch.int64)
    if batches:
        logits = torch.cat([stored_logits(batch).float() for batch in batches])
        none = logits, torch.cat([batch.labels for batch in batches])
    return dist.gather(none[0]), dist.gather(none[1])


def _lbfgs(evaluate: Callable[[Tensor], Valued], start: Tensor, **options: object) -> Tensor:
    """Runs torch's L-BFGS over one flat parameter."""
    parameter = start.clone()
    optimizer = torch.optim.LBFGS([parameter], **options)  # type: ignore[arg-type]

    def closure() -> float:
        value, parameter.grad = evaluate(parameter)
        return value

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return parameter.detach()


def _valued(function: Callable[[Tensor], Tensor], at: Tensor) -> Valued:
    """Value and gradient of a differentiable function."""
    with torch.enable_grad():
        leaf = at.detach().requires_grad_()
        value = function(leaf)
        (gradient,) = torch.autograd.grad(value, leaf)
    return float(value.detach()), gradient


class _Evaluation:
    """Value and gradient of the mean objective plus penalty, reduced over all processes."""

    def __init__(
        self, objective: Objective, data: Data, rows: float, penalty: Penalty | None
    ) -> None:
        self.objective, self.data, self.rows, self.penalty = objective, data, rows, penalty
        self.count = 0

    def __call__(self, at: Tensor) -> Valued:
        self.count += 1
        sums = torch.zeros(len(at) + 1, dtype=torch.float64)
        for batch in self.data:
            if len(batch):
                ready = replace(batch, logits=stored_logits(batch).double())
                sums += _flat(partial(self._of_batch, ready), at)
        sums = dist.total(sums) / self.rows
        if self.penalty is not None:
            sums += _flat(self.penalty, at)
        return float(sums[0]), sums[1:].to(at)

    def _of_batch(self, batch: Batch, at: Tensor) -> Tensor:
        return self.objective(at.to(batch.labels.device), batch)


def _flat(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """Value, then gradient, on the CPU: (1 + p,) float64."""
    value, gradient = _valued(function, at)
    return torch.cat([torch.tensor([value], dtype=torch.float64), gradient.double().cpu()])
