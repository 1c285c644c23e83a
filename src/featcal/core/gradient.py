"""Minimising over many parameters: L-BFGS over all rows, and the weights of a mixture.

A method gives the loss of a batch as a function of its parameters and never sees a process or a
shard: each evaluation is one pass and one reduction. Gradients are asked for by
`torch.autograd.grad`, on the parameters alone, never on the head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from featcal.core import dist
from featcal.core.batch import Batch, Data, stored_logits, unchecked

Array = NDArray[np.float64]
Objective = Callable[[Tensor, Batch], Tensor]  # (parameters (p,), batch) -> the summed loss, ()
Penalty = Callable[[Tensor], Tensor]  # parameters (p,) -> (), added to the mean loss
Valued = tuple[float, Tensor]  # a loss and its gradient (p,)
Weighted = tuple[float, Array]  # a loss, and the weights (3,) that reach it

FLAT = 1e-7  # converged when no entry of the gradient of the mean loss is larger
ENOUGH = 1e-12  # what a step of the mixture may still promise, in nats per row, when it ends
ROUNDING = 1e-15  # nats per row that no sum can tell from none
STEPS = 100
STEEPEST = 300.0  # log of the largest ratio of a part to the mixture: its square is still finite


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
    flat: float = FLAT,
    measured: bool = False,
) -> Descent:
    """Minimises the mean of a summed objective, plus a penalty, from a starting point.

    Args:
        objective: the summed loss of a batch, differentiable in the parameters; the batch's logits
            come in float64.
        start: (p,), where to begin; the result is never worse.
        data: the batches, read once per evaluation.
        rows: what the sums are divided by.
        penalty: added to the mean.
        iterations: of L-BFGS, at most.
        flat: it ends where no entry of the gradient is larger.
        measured: whether the parameters are in units of the curvature: the gradient itself is then
            the first step, and not a cautious share of it.
    """
    count = 0
    best: tuple[float, Tensor, Tensor] | None = None  # the lowest value, where, and its gradient

    def valued(batch: Batch, at: Tensor) -> Tensor:
        ready = unchecked(stored_logits(batch).double(), batch.labels, batch.features)
        return _flat(lambda at: objective(at, ready), at.to(batch.labels.device))

    def evaluate(at: Tensor) -> Valued:
        """Value and gradient over all processes."""
        nonlocal count, best
        count += 1
        parts = (valued(batch, at) for batch in data if len(batch))
        sums = dist.summed(parts, len(at) + 1) / rows
        if penalty is not None:
            sums += _flat(penalty, at)
        value, gradient = float(sums[0]), sums[1:].to(at)
        if best is None or value < best[0]:
            best = value, at.clone(), gradient
        return value, gradient

    _lbfgs(
        evaluate,
        start.detach().double(),
        measured=measured,
        max_iter=iterations,
        max_eval=2 * iterations,
        tolerance_grad=flat,
        tolerance_change=1e-12,
        history_size=20,
        line_search_fn="strong_wolfe",
    )
    assert best is not None
    value, found, gradient = best
    settled = count <= iterations or float(gradient.abs().max()) <= 100 * flat
    return Descent(found, value, count, math.isfinite(value) and settled)


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
        found = _flat(lambda p: F.cross_entropy(mapped(p, logits), labels), at)
        return float(found[0]), found[1:]

    found = _lbfgs(evaluate, start.detach().to(logits), lr=0.02, max_iter=1000)
    return Descent(found.double(), evaluate(found)[0], calls, converged=calls < 1000)


def gathered(data: Data, classes: int) -> tuple[Tensor, Tensor]:
    """All logits (n, k) float32 and labels (n,) of all processes, for what cannot be streamed."""
    logits, labels = torch.zeros(0, classes), torch.zeros(0, dtype=torch.int64)
    if batches := [batch for batch in data if len(batch)]:
        logits = torch.cat([stored_logits(batch).float() for batch in batches])
        labels = torch.cat([batch.labels for batch in batches])
    return dist.gather(logits), dist.gather(labels)


class _LBFGS(torch.optim.LBFGS):
    """torch's own, set up without torch._dynamo: seconds of imports that a fit has no use for."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch does it, behind the decorator that imports."""
        add = torch.optim.Optimizer.add_param_group
        getattr(add, "__wrapped__", add)(self, param_group)


def _lbfgs(
    evaluate: Callable[[Tensor], Valued],
    start: Tensor,
    *,
    measured: bool = False,
    **options: object,
) -> Tensor:
    """Runs torch's L-BFGS over one flat parameter."""
    parameter = start.clone()
    optimizer = _LBFGS([parameter], **options)  # type: ignore[arg-type]
    if measured:  # as after a first step that led nowhere: only that one is shortened
        none = torch.zeros_like(start)
        lists: dict[str, Any] = {"old_dirs": [], "old_stps": [], "ro": []}
        past = {"n_iter": 1, "d": none, "t": 1.0, "H_diag": 1.0, "prev_flat_grad": none, **lists}
        optimizer.state[parameter].update(func_evals=0, prev_loss=math.inf, **past)

    def closure() -> float:
        value, parameter.grad = evaluate(parameter)
        return value

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return parameter.detach()


def _flat(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """Value, then gradient, of a differentiable function: (1 + p,)."""
    with torch.enable_grad():
        leaf = at.detach().requires_grad_()
        value = function(leaf)
        (gradient,) = torch.autograd.grad(value, leaf)
    return torch.cat([value.detach().view(1).to(gradient), gradient])


def likeliest_weights(parts: Tensor, rows: int) -> Weighted:
    """The weights of a mixture of three parts that fit best, and the mean NLL they reach.

    The NLL of a mixture is convex in its weights. Each pass over the rows gives the slope and the
    curvature; the step goes to the lowest point of that quadratic on the simplex, which three
    unknowns allow to find exactly. The fixed points are those of EM, and so is the promise never to
    lose; EM itself creeps wherever a weight goes to 0, as it does on most networks.

    Args:
        parts: log-probabilities of what happened under each part, (n, 3), this process's rows.
        rows: of all processes.
    """

    def curve(weights: Array) -> tuple[float, Array, Array]:
        """Mean NLL of a mixture, its slope (3,) and its curvature (3, 3) in the weights."""
        mixed = torch.logsumexp(parts + torch.from_numpy(weights).to(parts).log(), 1)
        ratios = (parts - mixed[:, None]).clamp(max=STEEPEST).exp()
        sums = torch.cat([-mixed.sum().view(1), -ratios.sum(0), (ratios.T @ ratios).flatten()])
        found = (dist.total(sums) / rows).cpu().numpy()
        return float(found[0]), found[1:4], found[4:].reshape(3, 3)

    weights = np.full(3, 1 / 3)  # inside, where no part of the mixture has a ratio above 3
    value, slope, bend = curve(weights)
    for _ in range(STEPS):
        # What is left to gain is at most the steepest descent to a corner: convexity.
        if weights @ slope - slope.min() < ENOUGH:
            break
        step = simplex_minimum(bend, slope - bend @ weights) - weights
        if -float(slope @ step) < ROUNDING:
            break
        for length in 0.5 ** np.arange(40):
            there = curve(weights + length * step)
            if there[0] <= value + 1e-4 * length * float(slope @ step):
                break
        else:
            break  # a gain below rounding
        weights = weights + length * step
        value, slope, bend = there
    return value, weights


def simplex_minimum(bend: Array, slope: Array) -> Array:
    """The w >= 0 with sum 1 that minimises w'Bw / 2 + s'w: the best of all faces' own minima.

    Corners come first and win ties, so that parts that add nothing get no weight.
    """
    best, at = math.inf, np.zeros(3)
    for size in (1, 2, 3):
        for chosen in combinations(range(3), size):
            face = list(chosen)
            system = np.zeros((size + 1, size + 1))
            system[:size, :size] = bend[np.ix_(face, face)]
            system[size, :size] = system[:size, size] = 1
            weights = np.zeros(3)
            weights[face] = np.linalg.lstsq(system, np.append(-slope[face], 1.0))[0][:size]
            total = weights.sum()
            if total <= 0 or weights.min() < 0:
                continue  # outside the simplex
            weights = weights / total
            value = float(weights @ bend @ weights / 2 + slope @ weights)
            if value < best - 1e-15 * abs(value):
                best, at = value, weights
    return at
