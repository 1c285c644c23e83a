"""Class-based temperature scaling: one temperature a class (Frenkel and Goldberger, 2021)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from featcal.core import dist
from featcal.core.batch import Batch, stored_logits
from featcal.core.calibrator import LogitMap
from featcal.core.checks import InputError, check_choice, check_flags
from featcal.core.fit import Problem, StepReport, settle
from featcal.core.gradient import gathered, minimize, published_lbfgs
from featcal.core.loss import CRITERIA, ECE_BINS, measure, nll
from featcal.core.progress import calm, tell
from featcal.core.rows import bin_index, row_curves
from featcal.core.sample import fold_of
from featcal.core.scalar import Shrinkage, Tempered, temper, temper_cells

# --- One temperature a class by NLL, pulled towards the common one by as much as the folds
# advise.
#
# A class with few rows tells little about its own temperature: log T_k ~ N(log T, s^2) with T the
# temperature of all rows. s is chosen by cross-validation on a quadratic model: one pass at T gives
# every class's slope and curvature in every fold, and from these follow the temperatures fitted
# without a fold, and what they cost on it, for any s. The fit itself then uses the exact loss.

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


# --- The greedy search for class temperatures: sweeps over classes, each tried on a grid.
#
# By predicted class a row's confidence depends on the temperature of its own class alone, so one
# pass
# tabulates every class at every temperature and the sweeps read the table. By logit every candidate
# moves every row: the rows are gathered, and what the other classes contribute is kept.

GRID = np.arange(5, 51) / 10  # 0.5, 0.6, ..., 5.0
SWEEPS = 5
LESS = 1e-12  # a candidate must be better by more than rounding

Scores = Callable[[list[int], int], Array]  # (grid index a class, class) -> score of each candidate


def greedy_by_predicted_class(problem: Problem, criterion: str, common: float) -> Array:
    """T of each predicted class, (k,), by ECE or NLL of all rows.

    Classes that no row is predicted to be stay where they start.
    """
    table = _table(problem, criterion)  # (k, g, sums)

    def scores(chosen: list[int], which: int) -> Array:
        others = table[np.arange(len(table)), chosen].sum(0) - table[which, chosen[which]]
        sums: Array = np.abs(others + table[which]).sum(1) / problem.facts.rows
        return sums

    return _sweep(scores, problem.facts.classes, common, range(problem.facts.classes))


def _table(problem: Problem, criterion: str) -> Array:
    """What each class contributes at each temperature: a gap for each bin, or its NLL."""
    classes = problem.facts.classes
    width = ECE_BINS if criterion == "ece" else 1
    table = torch.zeros(classes, len(GRID), width, dtype=torch.float64)
    for batch in problem.data:
        if len(batch):
            cell = stored_logits(batch).argmax(1).cpu()
            for column, temperature in enumerate(GRID):
                value, place = _contribution(batch, float(temperature), criterion)
                flat = table[:, column]
                flat.index_put_((cell, place), value, accumulate=True)
    found: Array = dist.total(table).numpy()
    return found


def _contribution(batch: Batch, temperature: float, criterion: str) -> tuple[Tensor, Tensor]:
    """What a row adds, and to which sum: confidence less correctness to its bin, or its NLL."""
    scaled = stored_logits(batch) / temperature
    if criterion == "nll":
        rows = F.cross_entropy(scaled, batch.labels, reduction="none")
        return rows.double().cpu(), torch.zeros_like(batch.labels).cpu()
    confidence, prediction = scaled.softmax(1).max(1)
    gap = confidence.double() - (prediction == batch.labels).double()
    return gap.cpu(), bin_index(confidence, ECE_BINS).cpu()


def greedy_by_logit(problem: Problem, criterion: str, common: float) -> Array:
    """T of each logit, (k,), by ECE or NLL of all rows, never at the cost of accuracy.

    Classes without a row of their own stay where they start.
    """
    logits, labels = gathered(problem.data, problem.facts.classes)
    rows = _Rows(logits, labels, criterion)
    present = torch.unique(labels).tolist()
    return _sweep(rows.scores, problem.facts.classes, common, present)


class _Rows:
    """All rows, of which one logit is divided by every temperature of the grid at once."""

    def __init__(self, logits: Tensor, labels: Tensor, criterion: str) -> None:
        self.logits, self.labels, self.criterion = logits, labels, criterion
        self.grid = torch.from_numpy(GRID).to(logits)

    def scores(self, chosen: list[int], which: int) -> Array:
        """The score of each candidate; infinite where it costs accuracy."""
        scaled = self.logits / self.grid[chosen]  # (n, k)
        own = self.logits[:, which, None] / self.grid  # (n, g)
        others = scaled.clone()
        others[:, which] = -torch.inf
        rival, place = others.max(1, keepdim=True)
        total = torch.logaddexp(others.logsumexp(1, keepdim=True), own)
        mine = self.labels[:, None] == which
        if self.criterion == "nll":
            true = scaled.gather(1, self.labels[:, None])
            score = (total - torch.where(mine, own, true)).mean(0, dtype=torch.float64)
        right = torch.where(
            self._ahead(own, rival, which, place), mine, place == self.labels[:, None]
        )
        if self.criterion == "ece":
            score = _ece((torch.maximum(own, rival) - total).exp(), right)
        accurate = right.sum(0)
        score[accurate < accurate[chosen[which]]] = torch.inf
        found: Array = score.cpu().numpy()
        return found

    @staticmethod
    def _ahead(own: Tensor, rival: Tensor, which: int, place: Tensor) -> Tensor:
        """Where the class is the prediction: the first among equals."""
        return (own > rival) | ((own == rival) & (which < place))


def _ece(confidence: Tensor, right: Tensor) -> Tensor:
    """ECE of each column of confidences (n, g)."""
    columns = torch.arange(confidence.shape[1], device=confidence.device) * ECE_BINS
    place = bin_index(confidence, ECE_BINS) + columns
    gaps = torch.zeros(confidence.shape[1] * ECE_BINS, dtype=torch.float64, device=place.device)
    gaps.index_add_(0, place.flatten(), (confidence.double() - right.double()).flatten())
    return gaps.view(-1, ECE_BINS).abs().sum(1) / len(confidence)


def _sweep(scores: Scores, classes: int, common: float, present: range | list[int]) -> Array:
    """Each class in turn to its best candidate, from the common T rounded to the grid."""
    start = int(np.abs(GRID - common).argmin())
    chosen = [start] * classes
    for sweep in range(SWEEPS):
        before = list(chosen)
        for which in present:
            found = scores(chosen, which)
            best = int((found <= found.min() + LESS).argmax())  # the smallest T among equals
            if found[best] < found[chosen[which]] - LESS:
                chosen[which] = best
        tell("classwise", sweep + 1, SWEEPS)
        if chosen == before:
            break
    return GRID[chosen]


READINGS = ("predicted", "logit")
CHOICES = ("nll", "ece")


@final
class ClasswiseTemperature(LogitMap):
    """softmax(z / T_c) with c the predicted class, or softmax(z_k / T_k) logit by logit.

    The first keeps every prediction, the second does not. By default T_k minimises the NLL and is
    pulled towards the temperature of all rows by as much as cross-validation advises: see
    `classwise_fit`. Classes without rows get that temperature.

    Args:
        reading: whose temperature it is: "predicted" class or each "logit".
        criterion: what T_k is chosen by: "nll", or "ece" by the greedy search.
        grid: choose by the greedy search over T_k = 0.5, 0.6, ..., 5.0 whatever the criterion.
        reference: the form behind the paper's tables: z_k / T_k from T = 1 by its L-BFGS on the
            NLL, with nothing that keeps T_k above 0.
    """

    name = "classwise"
    keeps_accuracy = True
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

    def check(self) -> None:
        """T_k is a list of finite numbers above 0."""
        found = self.temperatures
        allowed = found != 0 if self.reference else found > 0
        if found.ndim != 1 or not bool((torch.isfinite(found) & allowed).all()):
            raise InputError("classwise: T must be one finite number above 0 for each class")

    def learn(self, problem: Problem) -> list[StepReport]:
        """Newton with a pull to the common temperature, or the search that was asked for."""
        self.reset()
        with calm(problem.facts.rows * problem.facts.classes):
            found = self._search(problem)
        if found is None:
            return [settle(self, problem, {}, "")]
        self.assign(temperatures=torch.from_numpy(found.temperatures))
        own = self.criterion == problem.loss.name
        if not self.reference and not own and not self._lowers(problem):
            self.reset()
            own = True
        return [self._report(problem, found, always=self.reference or not own)]

    def _search(self, problem: Problem) -> Classwise | None:
        if self.reference:
            return _published(problem)
        by_prediction = self.reading == "predicted"
        if not self.grid and self.criterion == "nll":
            return (by_predicted_class if by_prediction else by_logit)(problem)
        common = temper(problem.data)
        if common is None:
            return None
        greedy = greedy_by_predicted_class if by_prediction else greedy_by_logit
        found = greedy(problem, self.criterion, common.temperature)
        return Classwise(found, common.temperature, None, common.steps, converged=True)

    def _lowers(self, problem: Problem) -> bool:
        criterion = CRITERIA[self.criterion]
        before, now = measure(problem.data, criterion, criterion.after(self.map_logits))
        return now < before

    def _report(self, problem: Problem, found: Classwise, *, always: bool) -> StepReport:
        low, high = float(found.temperatures.min()), float(found.temperatures.max())
        values = {"T_min": low, "T_max": high}
        if found.spread is not None:
            values["spread"] = found.spread
        return settle(
            self,
            problem,
            values,
            _what_was_found(found, low, high),
            converged=found.converged,
            warning=_capped(low) if found.capped else "",
            details={
                "criterion": self.criterion,
                "common": found.common,
                "iterations": found.steps,
            },
            always=always,
        )


def _published(problem: Problem) -> Classwise:
    classes = problem.facts.classes
    found = published_lbfgs(lambda at, z: z / at, torch.ones(classes), problem.data, classes)
    return Classwise(found.at.cpu().numpy(), None, None, found.steps, found.converged)


def _what_was_found(found: Classwise, low: float, high: float) -> str:
    if found.spread == 0:
        return f"T = {found.common:.4g} for all: the classes' own temperatures do not pay"
    return f"T from {low:.4g} to {high:.4g}" + (
        "" if found.common is None else f" around {found.common:.4g}"
    )


def _capped(temperature: float) -> str:
    return (
        f"classwise stopped at the cap T = {temperature:.4g}: the logits separate the labels "
        "completely or are no better than guessing, so no temperature is best"
    )
