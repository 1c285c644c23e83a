"""Fitting an affine map of logits: any smooth loss, and a pull that keeps the map near its start.

One descent serves vector, matrix, Dirichlet and structured scaling, which differ in their inputs,
in the shape of the weight and in the pull: a sum of squared deviations from the start, each with a
weight of its own. The values of a map are rows (k, d + 1), one for each class: its weights, then
its bias, with d = 1 where a class sees its own input alone and d = k where it sees all of them.
For the NLL the problem is convex.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from featcal.core import dist
from featcal.core.batch import Batch, Data, stored_logits
from featcal.core.descend import minimize
from featcal.core.loss import Loss
from featcal.core.tempering import temper

SHARPER = 1000.0  # the descent ends at this fraction of its usual tolerance, in nats a row
BLOCKS = 2**22  # numbers in the curvature blocks of all classes, beyond which diagonals must do


def affine(inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Weight x + bias for rows x (n, k); a weight (k,) acts class by class, (k, k) is a matrix."""
    return inputs * weight + bias if weight.ndim == 1 else F.linear(inputs, weight, bias)


def parts(values: Tensor) -> tuple[Tensor, Tensor]:
    """Weight, (k,) or (k, k), and bias (k,) of values (k, d + 1)."""
    weight, bias = values[:, :-1], values[:, -1]
    return weight[:, 0] if weight.shape[1] == 1 else weight, bias


def by_kind(
    classes: int, *, matrix: bool, diagonal: float, bias: float = 0.0, off_diagonal: float = 0.0
) -> Tensor:
    """The same number for all values of a kind, (k, d + 1) float64."""
    width = classes + 1 if matrix else 2
    values = torch.full((classes, width), off_diagonal, dtype=torch.float64)
    if matrix:
        values.fill_diagonal_(diagonal)
    else:
        values[:, 0] = diagonal
    values[:, -1] = bias
    return values


@dataclass(frozen=True)
class Start:
    """Temperature scaling, from which a fit sets out: 1/T, and 1 or -1 where it ended at a cap."""

    inverse: float
    capped: int


def temperature_start(data: Data, loss: Loss) -> Start:
    """The temperature of the inputs; 1 where none matters."""
    found = temper(data, loss)
    if found is None:
        return Start(1.0, 0)
    return Start(float(found.inverse[0]), int(found.capped[0]))


@dataclass(frozen=True)
class Task:
    """What a fit is about.

    Attributes:
        data: batches whose logits are the inputs x of the map.
        rows: how many, on all processes.
        loss: the loss of the map's outputs.
        centre: where the fit starts, and what the pull pulls to, (k, d + 1).
        bend: the curvature of the summed NLL in the values of each class at the centre:
            (k, d + 1, d + 1), or its diagonals (k, d + 1) where that is too much.
    """

    data: Data
    rows: float
    loss: Loss
    centre: Tensor
    bend: Tensor

    @classmethod
    def of(cls, data: Data, rows: float, loss: Loss, centre: Tensor) -> Task:
        """Reads the data once for the curvature."""
        return cls(data, rows, loss, centre, _curvature(data, centre))

    def share(self, data: Data, rows: float) -> Task:
        """The task on some of the rows; a share of the curvature is good enough for a metric."""
        return replace(self, data=data, rows=rows, bend=self.bend * (rows / self.rows))


@dataclass(frozen=True)
class Fitted:
    """Where a fit ended: the values (k, d + 1), the passes it took, and whether it settled."""

    values: Tensor
    steps: int
    converged: bool


def descend(
    task: Task, pull: Tensor, begin: Tensor | None = None, *, iterations: int = 500
) -> Fitted:
    """Minimises the summed loss plus the pull.

    The values of a class are measured in units of their curvature, loss and pull together. Logits
    whose sum hardly varies, or a strong pull on some values and a weak one on others, would
    otherwise cost L-BFGS hundreds of steps.

    Args:
        task: data, loss and centre.
        pull: (k, d + 1), the weights of squared deviations from the centre, in nats over all rows.
        begin: where to begin, the centre unless given.
        iterations: at most.
    """
    unit = task.rows / SHARPER
    metric = _Metric(task.bend, pull, unit)

    def objective(at: Tensor, batch: Batch) -> Tensor:
        values = task.centre.to(at) + metric.moved(at)
        return task.loss(affine(stored_logits(batch), *parts(values)), batch).sum()

    def penalty(at: Tensor) -> Tensor:
        return (pull * metric.moved(at).square()).sum() / unit

    start = metric.measured((task.centre if begin is None else begin) - task.centre)
    found = minimize(objective, start, task.data, unit, penalty=penalty, iterations=iterations)
    values = task.centre + metric.moved(found.at)
    return Fitted(values, found.steps, found.converged)


class _Metric:
    """Values of a map measured in units of their curvature, and back."""

    def __init__(self, bend: Tensor, pull: Tensor, unit: float) -> None:
        self.shape = pull.shape
        if bend.ndim == 2:
            self.forth = _firm((bend + 2 * pull) / unit).sqrt()
            self.back = 1 / self.forth
            return
        blocks = (bend + torch.diag_embed(2 * pull)) / unit
        diagonal = blocks.diagonal(dim1=1, dim2=2)
        blocks = blocks + torch.diag_embed(_firm(diagonal) - diagonal)
        self.forth = torch.linalg.cholesky(blocks)  # (k, d + 1, d + 1)
        one = torch.eye(self.shape[1], dtype=torch.float64)
        self.back = torch.linalg.solve_triangular(self.forth, one, upper=False)

    def moved(self, at: Tensor) -> Tensor:
        """The deviation (k, d + 1) of a flat vector in units of the metric."""
        return _apply(at.view(self.shape), self.back.to(at))

    def measured(self, deviation: Tensor) -> Tensor:
        """The flat vector of a deviation (k, d + 1)."""
        return _apply(deviation, self.forth).flatten()


def _apply(rows: Tensor, factor: Tensor) -> Tensor:
    return rows * factor if factor.ndim == 2 else torch.bmm(rows[:, None], factor)[:, 0]


def _firm(bend: Tensor) -> Tensor:
    """Curvatures (k, d + 1) kept off zero, where a class without rows or pull would leave them."""
    own, most = bend.amax(1, keepdim=True), bend.max()
    return bend + 1e-12 * own + (1e-10 * most if float(most) > 0 else 1.0)


def _curvature(data: Data, centre: Tensor) -> Tensor:
    """See `Task.bend`: one pass, one reduction."""
    classes, width = centre.shape
    blocks = classes * width**2 <= BLOCKS
    sums = torch.zeros(classes, *([width] * (1 + blocks)), dtype=torch.float64)
    for batch in data:
        if len(batch):
            inputs = stored_logits(batch).double()
            probs = affine(inputs, *parts(centre.to(inputs))).softmax(1)
            sums += _bend(probs * (1 - probs), inputs, width, blocks=blocks).cpu()
    return dist.total(sums)


def _bend(spread: Tensor, inputs: Tensor, width: int, *, blocks: bool) -> Tensor:
    """Sums of p (1 - p) x x' over rows, with x = (inputs a class sees, 1)."""
    if width == 2:
        slant = (spread * inputs).sum(0)
        own, bias = (spread * inputs.square()).sum(0), spread.sum(0)
        return torch.stack([own, slant, slant, bias], 1).view(-1, 2, 2)
    seen = torch.cat([inputs, torch.ones_like(inputs[:, :1])], 1)  # (n, d + 1)
    if not blocks:
        return spread.T @ seen.square()
    return torch.stack([(seen * weight[:, None]).T @ seen for weight in spread.T])
