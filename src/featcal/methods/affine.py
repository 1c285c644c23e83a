"""Affine maps of logits, held near temperature scaling.

Vector and matrix scaling (Guo et al., 2017) and Dirichlet calibration (Kull et al., 2019): how
firmly a map is held is chosen by cross-validation unless it is given. Structured scaling (Berta et
al., 2025): each kind of value is held in proportion to how many there are of it, and no
cross-validation is needed.

The file reads from the outside in: the methods, the choice of how firmly to hold a map, and the
descent that fits it.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor

from featcal.core import dist
from featcal.core.batch import CHUNK_ROWS, Batch, Data, Through, stored_logits
from featcal.core.calibrator import LogitMap
from featcal.core.checks import InputError, check_strength
from featcal.core.fit import Loss, Problem, StepReport, measure, settle
from featcal.core.gradient import FLAT, Descent, minimize
from featcal.core.progress import calm, track
from featcal.core.sample import Folds, row_hash
from featcal.core.scalar import temper

LOG_TINY = math.log(2.2e-16)  # where Dirichlet calibration clips ln p
MOST_CLASSES = 300  # for more, choosing the penalty of a matrix takes minutes
FOLDS = 3
STRENGTHS = tuple(10 ** (1 - step / 2) for step in range(8))  # 10, 3.2, 1, ..., 0.0032
MIDDLE = 1.0  # the strength where there are too few rows to choose by
BEYOND = 1.01  # times the lowest loss, where the path ends: small dips and humps lie within it
ENOUGH = 2**15  # rows that choose a strength; more of them choose the same
ROUGHLY: Any = {"iterations": 12, "flat": 1e-3}  # held-out losses need fewer digits than values
SHARPER = 1000.0  # the descent ends at this fraction of its usual tolerance, in nats per row
PRODUCTS = 2**33  # of which one block is summed; more rows than make as many are sampled
BLOCKS = 2**22  # numbers in the curvature blocks of all classes, beyond which diagonals must do


class AffineMap(LogitMap):
    """weight x + offset, where x are the logits or what `inputs` makes of them.

    Any class may overtake any other, so predictions are not kept.
    """

    quick = "temperature"
    many = True
    matrix: ClassVar[bool]  # whether a class sees all inputs, or its own alone
    weight: Tensor
    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(0))
        self.register_buffer("offset", torch.zeros(0))

    def inputs(self, logits: Tensor) -> Tensor:
        """What the map is applied to, (n, k)."""
        return logits

    def map_logits(self, logits: Tensor) -> Tensor:
        """The affine map; the identity before a fit."""
        if self.weight.numel() == 0:
            return logits
        dtype = logits.dtype
        return affine(self.inputs(logits), self.weight.to(dtype), self.offset.to(dtype))

    def work(self, problem: Problem) -> float:
        """Numbers of a pass through a matrix, or without one of a chunk, as threads meet them."""
        rows, classes = problem.facts.rows, problem.facts.classes
        return rows * classes**2 / 32 if self.matrix else min(rows, CHUNK_ROWS) * classes

    def task(self, problem: Problem, loss: Loss, data: Data, diagonal: float) -> Task:
        """The fit around a diagonal map."""
        centre = by_kind(problem.facts.classes, matrix=self.matrix, diagonal=diagonal)
        return Task(
            data, problem.facts.rows, loss, centre, curvature(data, centre, problem.facts.rows)
        )

    def seen(self, problem: Problem) -> Through:
        """The data with the inputs in place of the logits."""
        return Through(problem.data, lambda b: self.inputs(stored_logits(b)), features=False)

    def settled(
        self,
        problem: Problem,
        fitted: Descent,
        message: str,
        values: dict[str, float],
        warning: str = "",
        left_out: float | None = None,
        **details: object,
    ) -> StepReport:
        """Takes the fitted map over and reports it."""
        weight, bias = parts(fitted.at)
        self.assign(weight=weight, offset=bias)
        diagonal = weight if weight.ndim == 1 else weight.diagonal()
        keys, ends = ("w_min", "w_max", "b_min", "b_max"), (*diagonal.aminmax(), *bias.aminmax())
        values |= {key: float(end) for key, end in zip(keys, ends, strict=True)}
        details = {"iterations": fitted.steps, **details}
        ended = fitted.converged, warning, details
        report = settle(self, problem, values, message, *ended, left_out=left_out)
        if report.noop or warning:
            return report
        if not report.converged:
            what = f"{self.name} had not settled after {fitted.steps} passes"
            return replace(report, warning=f"{what}: a stronger penalty makes it settle")
        return report


class HeldMap(AffineMap):
    """An affine map held near temperature scaling, by strengths that may have to be chosen."""

    chosen: ClassVar[str]  # the strength that is chosen by cross-validation unless it is given

    @abstractmethod
    def strengths(self, task: Task, inverse: float, c: float) -> dict[str, float]:
        """The strengths under their own names, with the factor c on the one to be chosen."""

    def pull(self, task: Task, inverse: float, c: float) -> Tensor:
        """The same as weights of squared deviations, (k, d + 1), in nats over all rows."""
        held = self.strengths(task, inverse, c)
        return by_kind(
            len(task.centre),
            matrix=self.matrix,
            diagonal=held["ridge"] / inverse**2,
            bias=held["bias"] * task.rows if "bias" in held else held["ridge"],
            off_diagonal=held.get("off_diagonal", 0.0) * task.rows,
        )

    def learn(self, problem: Problem) -> list[StepReport]:
        """The strength by cross-validation unless given, then L-BFGS from the temperature."""
        self.reset()
        loss, classes = problem.smooth_loss(self.name), problem.facts.classes
        given = getattr(self, self.chosen) is not None
        if self.matrix and classes > MOST_CLASSES and not given:
            raise InputError(
                f"{self.name}: {classes} classes make a matrix of {classes**2:,} values, too many "
                "to choose their penalty by cross-validation: use sms or svs, or give off_diagonal"
            )
        with calm(self.work(problem)):
            data = self.seen(problem)
            inverse, capped = temperature_start(data, loss)
            task = self.task(problem, loss, data, inverse)
            c: float = 0.0
            losses: dict[float, float] = {}
            begin = task.centre
            if not given:
                pull_of = partial(self.pull, task, inverse)
                c, losses, begin = choose_strength(task, pull_of, self.name)
            fitted = descend(task.nearer(begin), self.pull(task, inverse, c), begin)
        how, warning = f"with c = {c:.2g}, the best of {len(losses)} tried", ""
        if given:
            how = "as strongly as given"
        elif not losses:
            how = "with c = 1, for want of rows to choose by"
        if capped:
            warning = (
                f"{self.name} starts from a temperature at its cap, {1 / inverse:.4g}: "
                "the logits are no better than guessing"
            )
        message, values = f"held near T = {1 / inverse:.4g} {how}", self.strengths(task, inverse, c)
        held_out = {f"{c:.3g}": loss for c, loss in losses.items()}
        best = losses.get(c) if problem.facts.rows <= ENOUGH else None  # else that of a sample
        told = self.settled(problem, fitted, message, values, warning, best, held_out=held_out)
        return [told]


@final
class VectorScaling(HeldMap):
    """w * z + b, a factor and a bias for each class.

    Minimises the summed loss + ridge * sum_j [(T w_j - 1)^2 + b_j^2], from w = 1/T and b = 0, where
    T is the temperature by itself. Unless given, ridge is c k with the c of the lowest held-out
    loss in 3 folds, among 10, 3.2, 1, ..., 0.0032, from strong to weak until that loss is 1 % above
    its lowest. Without any pull, a class that is absent from the fit split has no best bias.

    Args:
        ridge: the pull towards temperature scaling, in nats over all rows; None to choose it, 0 for
            none, as published.
    """

    name = "vector"
    title = "vector scaling"
    symbols: ClassVar[dict[str, str]] = {"ridge": "penalty"}
    matrix = False
    chosen = "ridge"

    def __init__(self, *, ridge: float | None = None) -> None:
        super().__init__()
        self.ridge = None if ridge is None else check_strength(self.name, "ridge", ridge)

    def strengths(self, task: Task, inverse: float, c: float) -> dict[str, float]:
        """The ridge: c k unless given."""
        return {"ridge": c * len(task.centre) if self.ridge is None else self.ridge}


class PenalisedMatrix(HeldMap):
    """W x + b, penalised off the diagonal and at the bias (ODIR).

    Minimises the mean loss + off_diagonal * sum_{i != j} W_ij^2 + bias * sum_j b_j^2
    + (ridge / n) * sum_j (T W_jj - 1)^2: sums over the entries, not means. Unless given, bias is
    k / n and ridge k; off_diagonal is c T^2 k (k - 1) / n with the c of the lowest held-out loss in
    3 folds, among 10, 3.2, 1, ..., 0.0032, from strong to weak until that loss is 1 % above its
    lowest.
    """

    symbols: ClassVar[dict[str, str]] = dict.fromkeys(("ridge", "off_diagonal", "bias"), "penalty")
    matrix = True
    most_classes = MOST_CLASSES
    chosen = "off_diagonal"

    def __init__(
        self,
        *,
        off_diagonal: float | None = None,
        bias: float | None = None,
        ridge: float | None = None,
    ) -> None:
        super().__init__()
        asked = {"off_diagonal": off_diagonal, "bias": bias, "ridge": ridge}
        held = {k: None if v is None else check_strength(self.name, k, v) for k, v in asked.items()}
        self.off_diagonal, self.bias, self.ridge = held["off_diagonal"], held["bias"], held["ridge"]

    def strengths(self, task: Task, inverse: float, c: float) -> dict[str, float]:
        """Penalties in nats per row, and the ridge."""
        k, (off, bias, ridge) = len(task.centre), (self.off_diagonal, self.bias, self.ridge)
        return {
            "off_diagonal": c * k * (k - 1) / inverse**2 / task.rows if off is None else off,
            "bias": k / task.rows if bias is None else bias,
            "ridge": k if ridge is None else ridge,
        }


@final
class MatrixScaling(PenalisedMatrix):
    """W z + b on the logits, by the loss and the penalties of `PenalisedMatrix`.

    Args:
        off_diagonal: lambda, the penalty off the diagonal; None to choose it.
        bias: mu, the penalty at the bias; None for k / n.
        ridge: the pull of the diagonal towards temperature scaling, in nats over all rows; None for
            k. All three 0 is plain matrix scaling, as published.
    """

    name = "matrix"
    title = "matrix scaling"


@final
class DirichletCalibration(PenalisedMatrix):
    """W ln p + b on the log-probabilities, by the loss and the penalties of `PenalisedMatrix`.

    p is clipped below at 2.2e-16. A constant added to all logits of a row changes nothing.

    Args:
        off_diagonal: lambda, the penalty off the diagonal; None to choose it.
        bias: mu, the penalty at the bias; None for k / n.
        ridge: the pull of the diagonal towards temperature scaling, in nats over all rows; None for
            k, 0 for none, as published.
    """

    name = "dirichlet"
    title = "Dirichlet calibration"

    def inputs(self, logits: Tensor) -> Tensor:
        """Ln p, clipped."""
        return logits.log_softmax(1).clamp_min(LOG_TINY)


class StructuredScaling(AffineMap):
    """weight x + offset with x = ln[(1 - e) softmax(z / T) + e / k] and e = 1 / (n + 1).

    T is the temperature by itself; mixing in e / k bounds what one row can cost. The map is held
    near the identity: k times the penalty for the diagonal and for the bias, k (k - 1) times for
    the rest, in nats over all rows.
    """

    symbols: ClassVar[dict[str, str]] = {"temperature": "T"}
    temperature: Tensor
    floor: Tensor

    def __init__(self, *, penalty: float = 1.0) -> None:
        super().__init__()
        self.penalty = check_strength(self.name, "penalty", penalty)
        self.register_buffer("temperature", torch.ones(()))
        self.register_buffer("floor", torch.tensor(-math.inf))  # ln(e / k): fits 16 bits, unlike e

    def inputs(self, logits: Tensor) -> Tensor:
        """The smoothed log-probabilities."""
        floor = self.floor.to(logits.dtype)
        scaled = (logits / self.temperature.to(logits.dtype)).log_softmax(1)
        return torch.logaddexp(scaled + torch.log1p(-floor.exp() * logits.shape[1]), floor)

    def learn(self, problem: Problem) -> list[StepReport]:
        """Temperature and smoothing, then L-BFGS from the identity."""
        self.reset()
        loss, rows, k = problem.smooth_loss(self.name), problem.facts.rows, problem.facts.classes
        with calm(self.work(problem)):
            temperature = 1 / temperature_start(problem.data, loss)[0]
            self.assign(temperature=temperature, floor=-math.log((rows + 1) * k))
            task = self.task(problem, loss, self.seen(problem), 1.0)
            one, rest = self.penalty * k, self.penalty * k * (k - 1)
            pull = by_kind(k, matrix=self.matrix, diagonal=one, bias=one, off_diagonal=rest)
            fitted = descend(task, pull)
        moved = float((fitted.at - task.centre).abs().max())
        message = f"T = {temperature:.4g}, and no value moved by more than {moved:.3g} from there"
        return [self.settled(problem, fitted, message, {"temperature": temperature})]


@final
class StructuredVectorScaling(StructuredScaling):
    """(1 + v) * x + b on temperature-scaled, smoothed log-probabilities x.

    Minimises the mean loss + penalty * (k / n) * (sum_j v_j^2 + sum_j b_j^2).

    Args:
        penalty: lambda, the strength of the penalty.
    """

    name = "svs"
    title = "structured vector scaling"
    matrix = False


@final
class StructuredMatrixScaling(StructuredScaling):
    """(I + diag(v) + M) x + b on temperature-scaled, smoothed log-probabilities x; M_jj = 0.

    Minimises the mean loss + penalty * (k / n) * (sum_j v_j^2 + sum_j b_j^2)
    + penalty * (k (k - 1) / n) * sum_{i != j} M_ij^2.

    Args:
        penalty: lambda, the strength of the penalties.
    """

    name = "sms"
    title = "structured matrix scaling"
    matrix = True


def temperature_start(data: Data, loss: Loss) -> tuple[float, bool]:
    """1/T of the inputs, from which a fit sets out, and whether it ended at a cap."""
    found = temper(data, loss)
    return (1.0, False) if found is None else (float(found.inverse[0]), bool(found.capped[0]))


# How firmly to hold a map, chosen by cross-validation along a path of strengths.


def choose_strength(
    task: Task, pull_of: Callable[[float], Tensor], label: str
) -> tuple[float, dict[float, float], Tensor]:
    """The strength with the lowest held-out loss, the losses of all, and what it led to on average.

    The path runs from strong to weak, every fold from its own last solution, and ends where the
    held-out loss is clearly above its lowest: the expensive fits, those held weakly, are mostly
    never made.

    Args:
        task: what is fitted.
        pull_of: a strength -> the pull (k, d + 1), in nats over all rows.
        label: the work's name to whoever listens to its progress.
    """
    data = task.data
    if task.rows > ENOUGH:
        # A strength counts in nats over all rows: so many that are told apart by their content
        # choose it as well. Folds go by the high digits of a hash, this by its low ones.
        limit = int(2**16 * ENOUGH / task.rows)
        low = ((one, row_hash(stored_logits(one).bfloat16()) % 2**16) for one in task.data)
        data = [batch.rows(digits < limit) for batch, digits in low]
    folds = Folds(data, FOLDS)
    sizes = folds.sizes()
    if min(sizes) == 0:
        return MIDDLE, {}, task.centre
    every = sum(sizes)
    # In memory where they fit: finding the rows of a fold costs as much as a pass.
    held, rest = (
        [Through(part(fold), stored_logits, features=False) for fold in range(FOLDS)]
        for part in (folds.only, folds.without)
    )
    at, losses, middle = [task.centre] * FOLDS, {}, {}
    of_all = replace(task, data=data, rows=every, bend=task.bend * (every / task.rows))
    for c in track(label, STRENGTHS):
        total, pull = 0.0, pull_of(c)
        for fold, size in enumerate(sizes):
            rows = every - size
            # A share of the curvature is good enough for a metric.
            part = replace(of_all, data=rest[fold], rows=rows, bend=of_all.bend * (rows / every))
            values = at[fold] = descend(part, pull, at[fold], **ROUGHLY).at
            loss = task.loss.after(partial(mapped, values))
            total += size * measure(held[fold], loss)[0]
        losses[c], middle[c] = total / every, torch.stack(at).mean(0)
        if losses[c] > BEYOND * min(losses.values()):
            break
        of_all = of_all.nearer(middle[c])
    best = min(losses, key=losses.__getitem__)
    return best, losses, middle[best]


# Fitting a map: any smooth loss, and a pull that keeps the map near its start, a sum of squared
# deviations each with a weight of its own. The values of a map are rows (k, d + 1), one for each
# class: its weights, then its bias, with d = 1 where a class sees its own input alone and d = k
# where it sees all of them. For the NLL the problem is convex.


def affine(inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Weight x + bias for rows x (n, k); a weight (k,) acts class by class, (k, k) is a matrix."""
    return inputs * weight + bias if weight.ndim == 1 else F.linear(inputs, weight, bias)


def mapped(values: Tensor, inputs: Tensor) -> Tensor:
    """What the map of these values (k, d + 1) makes of inputs (n, k)."""
    return affine(inputs, *parts(values.to(inputs)))


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
class Task:
    """What a fit is about.

    Attributes:
        data: batches whose logits are the inputs x of the map.
        rows: how many, on all processes.
        loss: the loss of the map's outputs.
        centre: where the fit starts, and what the pull pulls to, (k, d + 1).
        bend: the curvature of the data at the centre, as `curvature` gives it.
    """

    data: Data
    rows: float
    loss: Loss
    centre: Tensor
    bend: Tensor

    def nearer(self, at: Tensor) -> Task:
        """The task with the curvature at these values, where that is one block and worth a pass."""
        if len(self.bend) > 1 or at is self.centre:
            return self
        return replace(self, bend=curvature(self.data, at, self.rows))


def descend(
    task: Task,
    pull: Tensor,
    begin: Tensor | None = None,
    *,
    iterations: int = 500,
    flat: float = FLAT,
) -> Descent:
    """The values (k, d + 1) that minimise the summed loss plus the pull.

    The values of a class are measured in units of their curvature, loss and pull together. Logits
    whose sum hardly varies, or a strong pull on some values and a weak one on others, would
    otherwise cost L-BFGS hundreds of steps.

    Args:
        task: data, loss and centre.
        pull: (k, d + 1), the weights of squared deviations from the centre, in nats over all rows.
        begin: where to begin, the centre unless given.
        iterations: at most.
        flat: as `minimize` takes it.
    """
    unit = task.rows / SHARPER
    if task.bend.ndim == 2:
        forth = firm((task.bend + 2 * pull) / unit).sqrt()
        back = 1 / forth
    else:
        blocks = (task.bend + torch.diag_embed((2 * pull).view(len(task.bend), -1))) / unit
        diagonal = blocks.diagonal(dim1=1, dim2=2)
        firmer = firm(diagonal.reshape(pull.shape)).view_as(diagonal)
        forth = torch.linalg.cholesky(blocks + torch.diag_embed(firmer - diagonal))
        one = torch.eye(forth.shape[1], dtype=torch.float64)
        back = torch.linalg.solve_triangular(forth, one, upper=False)

    def times(rows: Tensor, factor: Tensor) -> Tensor:
        if factor.ndim == 2:
            return rows * factor
        return torch.bmm(rows.reshape(len(factor), 1, -1), factor).view(pull.shape)

    def moved(at: Tensor) -> Tensor:
        """The deviation from the centre (k, d + 1) of a flat vector in those units."""
        return times(at.view(pull.shape), back.to(at))

    def objective(at: Tensor, batch: Batch) -> Tensor:
        values = task.centre.to(at) + moved(at)
        return task.loss(mapped(values, stored_logits(batch)), batch).sum()

    def penalty(at: Tensor) -> Tensor:
        return (pull * moved(at).square()).sum() / unit

    start = times((task.centre if begin is None else begin) - task.centre, forth).flatten()
    how: Any = {"penalty": penalty, "iterations": iterations, "flat": flat, "measured": True}
    found = minimize(objective, start, task.data, unit, **how)
    return replace(found, at=task.centre + moved(found.at))


def firm(bend: Tensor) -> Tensor:
    """Curvatures (k, d + 1) kept off zero, where a class without rows or pull would leave them."""
    own, most = bend.amax(1, keepdim=True), bend.max()
    return bend + 1e-12 * own + (1e-10 * most if float(most) > 0 else 1.0)


def curvature(data: Data, centre: Tensor, rows: float) -> Tensor:
    """The curvature of the summed NLL at the centre, in blocks of values; one pass, one reduction.

    With x = (inputs a class sees, 1): where a class sees its own input alone, one block of all
    values, (1, 2 k, 2 k), from a sample where the rows are many, since classes pull at each other;
    otherwise a block of each class, the sums of p (1 - p) x x' over rows (k, d + 1, d + 1), or
    their diagonals (k, d + 1) where that is too much.
    """
    classes, width = centre.shape
    whole, blocks = width == 2 and (2 * classes) ** 2 <= BLOCKS, classes * width**2 <= BLOCKS
    shape = (1, 2 * classes, 2 * classes) if whole else (classes, *([width] * (1 + blocks)))
    limit = min(PRODUCTS / (rows * (2 * classes) ** 2), 1) if whole else 1

    def bend_of(batch: Batch) -> Tensor:
        inputs = stored_logits(batch).double()
        if limit < 1:
            inputs = inputs[row_hash(inputs.bfloat16()) % 2**16 < limit * 2**16]
        probs = mapped(centre, inputs).softmax(1)
        spread = probs if whole else probs * (1 - probs)
        if width == 2:
            slant = (spread * inputs).sum(0)
            own, bias = (spread * inputs.square()).sum(0), spread.sum(0)
            bend = torch.stack([own, slant, slant, bias], 1).view(-1, 2, 2)
            if whole:
                both = torch.stack([probs * inputs, probs], 2).flatten(1)  # (n, 2 k)
                bend = (torch.block_diag(*bend) - both.T @ both) / limit  # type: ignore[no-untyped-call]
            return bend
        seen = torch.cat([inputs, torch.ones_like(inputs[:, :1])], 1)  # (n, k + 1)
        if blocks:
            return torch.stack([(seen * weight[:, None]).T @ seen for weight in spread.T])
        return spread.T @ seen.square()

    return dist.summed(map(bend_of, data), *shape)
