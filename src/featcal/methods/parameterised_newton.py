"""Newton's method for the last digits of a small network's parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from featcal.core import dist
from featcal.core.batch import Batch, Data
from featcal.core.descend import Objective, Penalty

NEWTON = 15
SHARP = 1e-10  # no entry of the gradient is larger when Newton ends
LENGTHS = (1.0, 0.5, 0.25, 0.1, 0.03, 0.01)


@torch.no_grad()
def summed(objective: Objective, at: Tensor, data: Data) -> float:
    """The summed loss over all processes."""
    total = torch.zeros(1, dtype=torch.float64)
    for batch in data:
        if len(batch):
            total += objective(at.to(batch.labels.device), batch).cpu()
    return float(dist.total(total))


def sharpened(
    objective: Objective, at: Tensor, data: Data, rows: int, penalty: Penalty
) -> tuple[Tensor, bool]:
    """Newton's method from a point close to a minimum, with shorter steps where it would lose."""
    flat = False
    for _ in range(NEWTON):
        value, gradient, bend = _curvature(objective, at, data, rows, penalty)
        flat = float(gradient.abs().max()) < SHARP
        if flat:
            break
        sizes, axes = torch.linalg.eigh(bend)
        floor = 1e-6 * float(sizes.abs().max())  # a direction that curves down is walked down too
        step = axes @ ((axes.T @ gradient) / sizes.abs().clamp(min=floor))
        for length in LENGTHS:
            there = at - length * step
            reached = summed(objective, there, data) / rows + float(penalty(there))
            if reached <= value + 1e-14 * abs(value):
                break
        else:
            break
        at = there
    return at, flat


def _curvature(
    objective: Objective, at: Tensor, data: Data, rows: int, penalty: Penalty
) -> tuple[float, Tensor, Tensor]:
    """Mean objective and penalty, gradient (p,) and second derivatives (p, p): one pass."""
    size = len(at)
    sums = torch.zeros(1 + size + size**2, dtype=torch.float64)
    for batch in data:
        if len(batch):
            here = at.to(batch.labels.device)
            sums += _second_order(_of_batch(objective, batch), here).cpu()
    sums = dist.total(sums) / rows + _second_order(penalty, at)
    return float(sums[0]), sums[1 : size + 1], sums[size + 1 :].view(size, size)


def _of_batch(objective: Objective, batch: Batch) -> Penalty:
    return lambda at: objective(at, batch)


def _second_order(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """Value, gradient and second derivatives in one flat vector."""
    with torch.enable_grad():
        leaf = at.detach().requires_grad_()
        value = function(leaf)
        (gradient,) = torch.autograd.grad(value, leaf, create_graph=True)
        (bend,) = torch.autograd.grad(
            gradient, leaf, torch.eye(len(at)).to(gradient), is_grads_batched=True
        )
    return torch.cat([value.detach().view(1), gradient.detach(), bend.flatten()])
