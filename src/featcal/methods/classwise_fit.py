"""One temperature a class by NLL, pulled towards the common one by as much as the folds advise.

A class with few rows tells little about its own temperature: log T_k ~ N(log T, s^2) with T the
temperature of all rows. s is chosen by cross-validation on a quadratic model: one pass at T gives
every class's slope and curvature in every fold, and from these follow the temperatures fitted
without a fold, and what they cost on it, for any s. The fit itself then uses the exact loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from featcal.core import dist
from featcal.core.batch import Batch, stored_logits
from featcal.core.curves import row_curves
from featcal.core.descend import minimize
from featcal.core.fitting import Problem
from featcal.core.folds import fold_of
from featcal.core.loss import nll
from featcal.core.tempering import Shrinkage, Tempered, temper, temper_cells

Array = NDArray[np.float64]

FOLDS = 10
SPREADS = (0.0, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8)  # of log T_k; 0 is plain temperature scaling


@dataclass(frozen=True)
class Classwise:
    """What was found: T_k (k,), the common T and the spread, passes over the data, how it ended."""

    temperatures: Array
    common: float | None
    spread: float | None
    steps: int
    converged: bool
    capped: bool = False


FoldSums = tuple[Array, Array]  # slopes and curvatures of each fold and class, (f, k) both


def predicted_class(batch: Batch) -> Tensor:
    """The cell of a row: the class it is predicted to be, (n,)."""
    return stored_logits(batch).argmax(1)


def by_predicted_class(problem: Problem) -> Classwise | None:
    """Divides by T of the predicted class; None where no temperature matters."""
    common = temper(problem.data)
    if common is None:
        return None
    inverse, classes = 1 / common.temperature, problem.facts.classes
    spread = 0.0 if common.capped.any() else best_spread(*_sums_by_prediction(problem, inverse))
    if spread == 0:
        return _all_alike(common, classes)
    found = temper_cells(problem.data, predicted_class, classes, Shrinkage(inverse, spread))
    assert found is not None
    steps = common.steps + found.steps + 1
    return Classwise(1 / found.inverse, common.temperature, spread, steps, found.converged)


def by_logit(problem: Problem) -> Classwise | None:
    """Divides each logit by its own T; None where no temperature matters."""
    common = temper(problem.data)
    if common is None:
        return None
    inverse, classes = 1 / common.temperature, problem.facts.classes
    spread = 0.0 if common.capped.any() else best_spread(*_sums_by_logit(problem, inverse))
    if spread == 0:
        return _all_alike(common, classes)
    centre, rows = math.log(common.temperature), problem.facts.rows

    def objective(log_t: Tensor, batch: Batch) -> Tensor:
        return nll(stored_logits(batch) * torch.exp(-log_t), batch)[0]

    def penalty(log_t: Tensor) -> Tensor:
        return (log_t - centre).square().sum() / (2 * spread**2 * rows)

    start = torch.full((classes,), centre, dtype=torch.float64)
    found = minimize(objective, start, problem.data, rows, penalty=penalty)
    steps = common.steps + found.steps + 1
    temperatures: Array = found.at.exp().cpu().numpy()
    return Classwise(temperatures, common.temperature, spread, steps, found.converged)


def _all_alike(common: Tempered, classes: int) -> Classwise:
    """Plain temperature scaling."""
    each = np.full(classes, common.temperature)
    capped = bool(common.capped.any())
    return Classwise(each, common.temperature, 0.0, common.steps + 1, common.converged, capped)


def _sums_by_prediction(problem: Problem, inverse: float) -> FoldSums:
    """Of rows in the temperature of their predicted class."""
    classes = problem.facts.classes
    sums = torch.zeros(2, FOLDS * classes, dtype=torch.float64)
    for batch in problem.data:
        if len(batch):
            _, slope, bend = row_curves(stored_logits(batch), batch.labels, inverse).double()
            cell = fold_of(batch, FOLDS) * classes + predicted_class(batch)
            sums.index_add_(1, cell.cpu(), torch.stack([slope, bend]).cpu())
    return _relative(sums.view(2, FOLDS, classes), inverse)


def _sums_by_logit(problem: Problem, inverse: float) -> FoldSums:
    """Of rows in the factor of each logit alone."""
    sums = torch.zeros(2, FOLDS, problem.facts.classes, dtype=torch.float64)
    for batch in problem.data:
        if len(batch):
            logits = stored_logits(batch)
            probs = (logits * inverse).softmax(1)
            bend = logits.square() * probs * (1 - probs)
            miss = probs.scatter_add(1, batch.labels[:, None], torch.full_like(probs[:, :1], -1.0))
            fold = fold_of(batch, FOLDS).cpu()
            sums[0].index_add_(0, fold, (logits * miss).double().cpu())
            sums[1].index_add_(0, fold, bend.double().cpu())
    return _relative(sums, inverse)


def _relative(sums: Tensor, inverse: float) -> FoldSums:
    """Slopes and bends in b turned into those in b / b0, over all processes."""
    slopes, bends = dist.total(sums).numpy()
    return slopes * inverse, bends * inverse**2


def best_spread(slopes: Array, bends: Array) -> float:
    """The spread whose temperatures, fitted without a fold, cost least on it.

    Args:
        slopes: of the summed NLL of each fold and class, in b / b0 and at b = b0, (f, k).
        bends: the curvatures there, (f, k).
    """
    costs = [_cost_left_out(slopes, bends, spread) for spread in SPREADS]
    return SPREADS[int(np.argmin(costs))]


def _cost_left_out(slopes: Array, bends: Array, spread: float) -> float:
    """What the quadratic model of each fold says of temperatures fitted to the others."""
    slope, bend = slopes.sum(0) - slopes, bends.sum(0) - bends  # without the fold
    rows = bend.sum(1, keepdims=True)
    centre = -slope.sum(1, keepdims=True) / np.where(rows > 0, rows, 1)  # (f, 1), near 0
    pull = math.inf if spread == 0 else spread**-2
    own = -(slope + bend * centre) / (bend + pull)  # beyond the centre
    step = centre + own
    return float((slopes * step + bends * step**2 / 2).sum())
