"""Class-based temperature scaling: one temperature per class (Frenkel and Goldberger, 2021).

By NLL, each class's temperature is pulled towards the common one by as much as the folds advise; by
a greedy search, as published, classes are tried on a grid one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from featcal.core import dist
from featcal.core.batch import Batch, bin_index, stored_logits
from featcal.core.calibrator import LogitMap
from featcal.core.checks import InputError, check_choice, check_flags
from featcal.core.fit import ECE_BINS, Problem, StepReport, settle
from featcal.core.gradient import Array, gathered, minimize, published_lbfgs
from featcal.core.progress import calm, tell
from featcal.core.sample import fold_of
from featcal.core.scalar import Shrinkage, row_curves, temper, temper_cells

READINGS = ("predicted", "logit")
CHOICES = ("nll", "ece")
FOLDS = 10
SPREADS = (0.0, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8)  # of log T_k; 0 is plain temperature scaling
GRID = np.arange(5, 51) / 10  # of the greedy search: 0.5, 0.6, ..., 5.0
SWEEPS = 5
LESS = 1e-12  # a candidate must be better by more than rounding


@final
class ClasswiseTemperature(LogitMap):
    """softmax(z / T_c) with c the predicted class, or softmax(z_k / T_k) logit by logit.

    The first keeps every prediction, the second does not. By default T_k minimises the NLL and is
    pulled towards the temperature of all rows by as much as cross-validation advises. Classes
    without rows get that temperature.

    Args:
        reading: whose temperature it is: "predicted" class or each "logit".
        criterion: what T_k is chosen by: "nll", or "ece" by the greedy search.
        grid: choose by the greedy search over T_k = 0.5, 0.6, ..., 5.0 whatever the criterion.
        reference: the form behind the paper's tables: z_k / T_k from T = 1 by its L-BFGS on the
            NLL, with nothing that keeps T_k above 0.
    """

    name = "classwise"
    title = "class-based temperature scaling"
    keeps_accuracy = True
    many = True
    temperatures: Tensor

    def __init__(
        self,
        *,
        reading: str = "predicted",
        criterion: str = "nll",
        grid: bool = False,
        reference: bool = False,
    ) -> None:
        super().__init__()
        check_choice(self.name, "reading", reading, READINGS)
        check_choice(self.name, "criterion", criterion, CHOICES)
        check_flags(self.name, grid=grid, reference=reference)
        if reference and (grid or criterion != "nll" or reading != "predicted"):
            raise InputError("classwise: reference=True fixes the search: leave the others out")
        self.reading, self.criterion = reading, criterion
        self.grid, self.reference = grid, reference
        self.keeps_accuracy = reading == "predicted" and not reference
        if not self.keeps_accuracy or grid or criterion == "ece":
            self.quick = "temperature"
        self.register_buffer("temperatures", torch.zeros(0))

    def map_logits(self, logits: Tensor) -> Tensor:
        """Divides by the temperatures."""
        if self.temperatures.numel() == 0:
            return logits
        temperatures = self.temperatures.to(logits.dtype)
        if not self.keeps_accuracy:
            return logits / temperatures
        return logits / temperatures[logits.argmax(1)][:, None]

    def learn(self, problem: Problem) -> list[StepReport]:
        """Newton with a pull to the common temperature, or the search that was asked for."""
        self.reset()
        with calm(problem.facts.rows * problem.facts.classes):
            found = self._search(problem)
        if found is None:
            return [settle(self, problem, {}, "")]
        self.assign(temperatures=torch.from_numpy(found.temperatures))
        low, high = float(found.temperatures.min()), float(found.temperatures.max())
        around = "" if found.common is None else f" around {found.common:.4g}"
        message, warning = f"T from {low:.4g} to {high:.4g}{around}", ""
        if found.spread == 0:
            message = f"T = {found.common:.4g} for all: the classes' own temperatures do not pay"
        if found.capped:
            warning = (
                f"classwise stopped at the cap T = {low:.4g}: the logits are no better than "
                "guessing, so no temperature is best"
            )
        values = {"T_min": low, "T_max": high}
        if found.spread is not None:
            values["spread"] = found.spread
        details = {"criterion": self.criterion, "common": found.common, "iterations": found.steps}
        ended, always = (found.converged, warning, details), self.reference
        by = problem.criterion(self.criterion)
        return [settle(self, problem, values, message, *ended, always=always, criterion=by)]

    def _search(self, problem: Problem) -> Classwise | None:
        """The temperatures by the search that was asked for; None where none matters."""
        data, classes = problem.data, problem.facts.classes
        if self.reference:
            end = published_lbfgs(lambda at, z: z / at, torch.ones(classes), data, classes)
            return Classwise(end.at.cpu().numpy(), None, None, end.steps, end.converged)
        if not self.grid and self.criterion == "nll":
            return shrunk(problem, self.reading)
        common = temper(data, problem.criterion("nll"))
        if common is None:
            return None
        greedy = greedy_by_prediction if self.reading == "predicted" else greedy_by_logit
        found = greedy(problem, self.criterion, common.temperature)
        return Classwise(found, common.temperature, None, common.steps, converged=True)


@dataclass(frozen=True)
class Classwise:
    """What was found: T_k (k,), the common T and the spread, passes over the data, how it ended."""

    temperatures: Array
    common: float | None
    spread: float | None
    steps: int
    converged: bool
    capped: bool = False


def shrunk(problem: Problem, reading: str) -> Classwise | None:
    """T_k by NLL, pulled towards the common T; None where no temperature matters.

    A class with few rows tells little about its own temperature: log T_k ~ N(log T, s^2) with T the
    temperature of all rows. s is chosen by cross-validation on a quadratic model: one pass at T
    gives every class's slope and curvature in every fold, and from these follow the temperatures
    fitted without a fold, and what they cost on it, for any s. The fit itself then uses the exact
    loss.
    """
    data, rows, classes = problem.data, problem.facts.rows, problem.facts.classes
    loss = problem.criterion("nll")
    common = temper(data, loss)
    if common is None:
        return None
    temperature, capped = common.temperature, bool(common.capped.any())
    inverse, centre = 1 / temperature, math.log(temperature)
    spread = 0.0 if capped else best_spread(*fold_curves(problem, inverse, reading))
    if spread == 0:
        each, steps = np.full(classes, temperature), common.steps + 1
        return Classwise(each, temperature, 0.0, steps, common.converged, capped)
    if reading == "predicted":
        pull = Shrinkage(inverse, spread)
        cells = temper_cells(data, predicted_class, classes, pull, smoothing=loss.smoothing)
        assert cells is not None
        steps = common.steps + cells.steps + 1
        return Classwise(1 / cells.inverse, temperature, spread, steps, cells.converged)

    def objective(log_t: Tensor, batch: Batch) -> Tensor:
        return loss(stored_logits(batch) * torch.exp(-log_t), batch)[0]

    def penalty(log_t: Tensor) -> Tensor:
        return (log_t - centre).square().sum() / (2 * spread**2 * rows)

    start = torch.full((classes,), centre, dtype=torch.float64)
    found = minimize(objective, start, data, rows, penalty=penalty)
    steps = common.steps + found.steps + 1
    return Classwise(found.at.exp().cpu().numpy(), temperature, spread, steps, found.converged)


def predicted_class(batch: Batch) -> Tensor:
    """The cell of a row: the class it is predicted to be, (n,)."""
    return stored_logits(batch).argmax(1)


def fold_curves(problem: Problem, inverse: float, reading: str) -> tuple[Array, Array]:
    """Slopes and curvatures of the summed NLL in b / b0, at b = b0: (folds, classes) each.

    In the temperature of a row's predicted class, or in the factor of each logit alone.
    """
    classes, smoothing = problem.facts.classes, problem.loss.smoothing

    def sums_of(batch: Batch) -> Tensor:
        logits, fold = stored_logits(batch), fold_of(batch, FOLDS)
        if reading == "predicted":
            curves = row_curves(logits, batch.labels, inverse, smoothing)[1:].double()
            cell = fold * classes + predicted_class(batch)
            return curves.new_zeros(2, FOLDS * classes).index_add_(1, cell, curves)
        probs = (logits * inverse).softmax(1)
        bend = logits.square() * probs * (1 - probs)
        share = torch.full_like(probs[:, :1], smoothing - 1)
        miss = probs.scatter_add(1, batch.labels[:, None], share) - smoothing / classes
        curves = torch.stack([logits * miss, bend]).double()
        return curves.new_zeros(2, FOLDS, classes).index_add_(1, fold, curves)

    slopes, bends = dist.summed(map(sums_of, problem.data), 2, FOLDS, classes).numpy()
    return slopes * inverse, bends * inverse**2


def best_spread(slopes: Array, bends: Array) -> float:
    """The spread whose temperatures, fitted without a fold, cost least on it.

    Args:
        slopes: of the summed NLL of each fold and class, in b / b0 and at b = b0, (f, k).
        bends: the curvatures there, (f, k).
    """
    slope, bend = slopes.sum(0) - slopes, bends.sum(0) - bends  # without the fold
    total = bend.sum(1, keepdims=True)
    centre = -slope.sum(1, keepdims=True) / np.where(total > 0, total, 1)  # (f, 1), near 0
    costs = []
    for spread in SPREADS:
        pull = math.inf if spread == 0 else spread**-2
        step = centre - (slope + bend * centre) / (bend + pull)
        costs.append((slopes * step + bends * step**2 / 2).sum())
    return SPREADS[int(np.argmin(costs))]


# The greedy search: sweeps over classes, each tried on a grid. By predicted class a row's
# confidence depends on the temperature of its own class alone, so one pass tabulates every class at
# every temperature and the sweeps read the table. By logit every candidate moves every row: the
# rows are gathered, and what the other classes contribute is kept.


def sweep(
    scores: Callable[[list[int], int], Array], classes: int, common: float, present: Sequence[int]
) -> Array:
    """Each class in turn to its best candidate, from the common T rounded to the grid.

    Args:
        scores: (a grid index per class, a class) -> the score of each candidate for that class.
        classes: how many.
        common: T of all rows.
        present: the classes to sweep over; the others stay where they start.
    """
    chosen = [int(np.abs(GRID - common).argmin())] * classes
    for done in range(SWEEPS):
        before = list(chosen)
        for which in present:
            found = scores(chosen, which)
            best = int((found <= found.min() + LESS).argmax())  # the smallest T among equals
            if found[best] < found[chosen[which]] - LESS:
                chosen[which] = best
        tell("classwise", done + 1, SWEEPS)
        if chosen == before:
            break
    return GRID[chosen]


def greedy_by_prediction(problem: Problem, criterion: str, common: float) -> Array:
    """T of each predicted class, (k,), by ECE or NLL of all rows."""
    classes, bins = problem.facts.classes, ECE_BINS if criterion == "ece" else 1
    # What each class contributes at each temperature: a gap for each bin, or its NLL.

    def sums_of(batch: Batch) -> Tensor:
        cell = predicted_class(batch)
        sums = cell.new_zeros(classes, len(GRID), bins, dtype=torch.float64)
        for column, temperature in enumerate(GRID.tolist()):
            scaled = stored_logits(batch) / temperature
            if criterion == "nll":
                share = problem.loss.smoothing
                value = F.cross_entropy(
                    scaled, batch.labels, reduction="none", label_smoothing=share
                ).double()
                place = torch.zeros_like(batch.labels)
            else:
                confidence, prediction = scaled.softmax(1).max(1)
                value = confidence.double() - (prediction == batch.labels).double()
                place = bin_index(confidence, bins)
            sums[:, column].index_put_((cell, place), value, accumulate=True)
        return sums

    table: Array = dist.summed(map(sums_of, problem.data), classes, len(GRID), bins).numpy()

    def scores(chosen: list[int], which: int) -> Array:
        others = table[np.arange(classes), chosen].sum(0) - table[which, chosen[which]]
        found: Array = np.abs(others + table[which]).sum(1) / problem.facts.rows
        return found

    return sweep(scores, classes, common, range(classes))


def greedy_by_logit(problem: Problem, criterion: str, common: float) -> Array:
    """T of each logit, (k,), by ECE or NLL of all rows, never at the cost of accuracy."""
    logits, labels = gathered(problem.data, problem.facts.classes)
    grid = torch.from_numpy(GRID).to(logits)

    def scores(chosen: list[int], which: int) -> Array:
        """The score of each candidate; infinite where it costs accuracy."""
        scaled = logits / grid[chosen]  # (n, k)
        own = logits[:, which, None] / grid  # (n, g)
        others = scaled.clone()
        others[:, which] = -torch.inf
        rival, place = others.max(1, keepdim=True)
        total = torch.logaddexp(others.logsumexp(1, keepdim=True), own)
        mine = labels[:, None] == which
        ahead = (own > rival) | ((own == rival) & (which < place))  # the first among equals
        right = torch.where(ahead, mine, place == labels[:, None])
        if criterion == "nll":
            true = torch.where(mine, own, scaled.gather(1, labels[:, None]))
            score = (total - true).mean(0, dtype=torch.float64)
        else:
            confidence = (torch.maximum(own, rival) - total).exp()
            columns = torch.arange(len(grid), device=grid.device) * ECE_BINS
            place = (bin_index(confidence, ECE_BINS) + columns).flatten()
            gaps = torch.zeros(len(grid) * ECE_BINS, dtype=torch.float64, device=place.device)
            gaps.index_add_(0, place, (confidence.double() - right.double()).flatten())
            score = gaps.view(-1, ECE_BINS).abs().sum(1) / len(confidence)
        accurate = right.sum(0)
        score[accurate < accurate[chosen[which]]] = torch.inf
        found: Array = score.cpu().numpy()
        return found

    return sweep(scores, problem.facts.classes, common, torch.unique(labels).tolist())
