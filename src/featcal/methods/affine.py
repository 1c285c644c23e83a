"""Vector and matrix scaling (Guo et al., 2017), Dirichlet calibration (Kull et al., 2019).

Affine maps that start at temperature scaling and are held near it. How firmly is a matter of rows:
unless it is given, the strength that counts most is chosen by cross-validation.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor

from featcal.core import dist
from featcal.core.batch import Batch, Data, Through, stored_logits
from featcal.core.calibrator import LogitMap
from featcal.core.checks import InputError
from featcal.core.fit import Problem, StepReport, settle
from featcal.core.gradient import minimize
from featcal.core.loss import Loss, measure
from featcal.core.progress import calm, track
from featcal.core.sample import fold_of
from featcal.core.scalar import temper

# --- Fitting an affine map of logits: any smooth loss, and a pull that keeps the map near its
# start.
#
# One descent serves vector, matrix, Dirichlet and structured scaling, which differ in their inputs,
# in the shape of the weight and in the pull: a sum of squared deviations from the start, each
# with a
# weight of its own. The values of a map are rows (k, d + 1), one for each class: its weights, then
# its bias, with d = 1 where a class sees its own input alone and d = k where it sees all of them.
# For the NLL the problem is convex.

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


# --- What all affine methods are: a weight and an offset on logits, or on what a method makes of
# them.
#
# How the values are found is in `affine_fit`, how firmly they are held in `affine_folds`.

PERFECT = 1e-6  # a mean loss that only labels separated completely can reach


class AffineMap(LogitMap):
    """weight x + offset, where x are the logits or what `inputs` makes of them.

    Any class may overtake any other, so predictions are not kept.
    """

    quick = "temperature"
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

    def check(self) -> None:
        """Weight and offset are finite and of the same classes."""
        classes = self.offset.numel()
        shapes = ((classes,), (classes, classes))
        fits = self.offset.ndim == 1 and tuple(self.weight.shape) in shapes
        finite = torch.isfinite(self.weight).all() and torch.isfinite(self.offset).all()
        if not fits or not bool(finite):
            raise InputError(
                f"{self.name}: weight {tuple(self.weight.shape)} and offset "
                f"{tuple(self.offset.shape)} must be finite and of the same classes"
            )

    def seen(self, problem: Problem) -> Through:
        """The data with the inputs in place of the logits."""
        return Through(
            problem.data, lambda batch: self.inputs(stored_logits(batch)), features=False
        )

    def settled(
        self,
        problem: Problem,
        fitted: Fitted,
        message: str,
        *,
        values: dict[str, float],
        details: dict[str, Any] | None = None,
        warning: str = "",
    ) -> StepReport:
        """Takes the fitted map over and reports it."""
        weight, bias = parts(fitted.values)
        self.assign(weight=weight, offset=bias)
        report = settle(
            self,
            problem,
            {**values, **_ranges(weight, bias)},
            message,
            converged=fitted.converged,
            warning=warning,
            details={"iterations": fitted.steps, **(details or {})},
        )
        return report if report.noop or warning else self._warned(report)

    def _warned(self, report: StepReport) -> StepReport:
        """The report, with a warning where the penalty is too weak for a minimum."""
        if report.loss_after < PERFECT:
            what = f"{self.name} fits every row of the fit split, as it will no unseen one"
            return replace(report, converged=False, warning=f"{what}: give a stronger penalty")
        if not report.converged:
            what = f"{self.name} had not settled after {report.details['iterations']} passes"
            return replace(report, warning=f"{what}: a stronger penalty makes it settle")
        return report


def _ranges(weight: Tensor, bias: Tensor) -> dict[str, float]:
    diagonal = weight if weight.ndim == 1 else weight.diagonal()
    ends = zip(("w_min", "w_max"), diagonal.aminmax(), strict=True)
    return {key: float(end) for key, end in (*ends, ("b_min", bias.min()), ("b_max", bias.max()))}


def strength(method: str, key: str, value: object) -> float:
    """The strength of a penalty, refused unless it is a finite number of at least 0."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= float(value) < math.inf:  # type: ignore[arg-type]
        raise InputError(f"{method}: {key} is {value!r}: give a finite number, 0 or above")
    return value if type(value) in (int, float) else float(value)  # type: ignore[arg-type, return-value]


# --- How strongly to hold an affine map, chosen by cross-validation along a path of strengths.
#
# The path runs from strong to weak, every fold from its own last solution, and ends where the
# held-out loss is clearly above its lowest: the dear fits, those held weakly, are mostly never
# made.

FOLDS = 3
STRENGTHS = tuple(10 ** (1 - step / 2) for step in range(8))  # 10, 3.2, 1, ..., 0.0032
MIDDLE = 1.0  # where there are too few rows to choose by
BEYOND = 1.01  # times the lowest loss, where the path ends: small dips and humps lie within it
ITERATIONS = 12  # of a fold's descent: held-out losses need fewer digits than fitted values

PullOf = Callable[[float], Tensor]  # strength -> the pull (k, d + 1), in nats over all rows


@dataclass(frozen=True)
class Choice:
    """The strength chosen, and the held-out loss of each one tried."""

    strength: float
    losses: dict[float, float]


@dataclass(frozen=True)
class Fold:
    """The rows of one fold, or all rows but those."""

    data: Data
    fold: int
    held: bool

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.data:
            inside = fold_of(batch, FOLDS) == self.fold
            yield batch.rows(inside if self.held else ~inside)


def choose_strength(task: Task, pull_of: PullOf, label: str) -> Choice:
    """The strength with the lowest held-out loss; `label` names the work to whoever listens."""
    sizes = _fold_sizes(task.data)
    if min(sizes) == 0:
        return Choice(MIDDLE, {})
    path = _Path(task, sizes)
    losses: dict[float, float] = {}
    for strength in track(label, STRENGTHS):
        losses[strength] = path.held_out(pull_of(strength))
        if losses[strength] > BEYOND * min(losses.values()):
            break
    return Choice(min(losses, key=losses.__getitem__), losses)


class _Path:
    """The folds' fits, each of which begins where its last one ended."""

    def __init__(self, task: Task, sizes: list[int]) -> None:
        self.task, self.sizes = task, sizes
        self.at = [task.centre] * FOLDS
        self.held = [_kept(Fold(task.data, fold, held=True)) for fold in range(FOLDS)]
        self.rest = [_kept(Fold(task.data, fold, held=False)) for fold in range(FOLDS)]

    def held_out(self, pull: Tensor) -> float:
        """The mean loss of rows under the fit of the other folds."""
        task, total = self.task, 0.0
        for fold, size in enumerate(self.sizes):
            rest = task.share(self.rest[fold], task.rows - size)
            self.at[fold] = descend(rest, pull, self.at[fold], iterations=ITERATIONS).values
            total += size * self._loss(fold)
        return total / task.rows

    def _loss(self, fold: int) -> float:
        loss = self.task.loss.after(lambda x: affine(x, *parts(self.at[fold].to(x))))
        return measure(self.held[fold], loss)[0]


def _kept(rows: Fold) -> Through:
    """The same rows, in memory where they fit: finding them costs as much as a pass."""
    return Through(rows, stored_logits, features=False)


def _fold_sizes(data: Data) -> list[int]:
    sums = torch.zeros(FOLDS, dtype=torch.int64)
    for batch in data:
        sums += torch.bincount(fold_of(batch, FOLDS), minlength=FOLDS).cpu()
    return [int(size) for size in dist.total(sums)]


LOG_TINY = math.log(2.2e-16)  # where Dirichlet calibration clips ln p
MOST_CLASSES = 300  # for more, choosing the penalty of a matrix takes minutes


class HeldMap(AffineMap):
    """An affine map held near temperature scaling, by strengths that may have to be chosen."""

    matrix: ClassVar[bool]

    @abstractmethod
    def given(self) -> float | None:
        """The strength that is to be chosen unless it is given."""

    @abstractmethod
    def strengths(self, task: Task, start: Start, c: float) -> dict[str, float]:
        """The strengths under their own names, with the factor c on the one to be chosen."""

    @abstractmethod
    def pull(self, task: Task, start: Start, c: float) -> Tensor:
        """The same as weights of squared deviations, (k, d + 1), in nats over all rows."""

    def learn(self, problem: Problem) -> list[StepReport]:
        """The strength by cross-validation unless given, then L-BFGS from the temperature."""
        self.reset()
        loss, facts = problem.smooth_loss(self.name), problem.facts
        self._refuse_many(facts.classes)
        with calm(facts.rows * facts.classes * (facts.classes / 32 if self.matrix else 1)):
            data = self.seen(problem)
            start = temperature_start(data, loss)
            centre = by_kind(facts.classes, matrix=self.matrix, diagonal=start.inverse)
            task = Task.of(data, facts.rows, loss, centre)
            choice = self._choose(task, start)
            fitted = descend(task, self.pull(task, start, choice.strength))
        return [
            self.settled(
                problem,
                fitted,
                f"held near T = {1 / start.inverse:.4g} {self._how(choice)}",
                values=self.strengths(task, start, choice.strength),
                details={"held_out": {f"{c:.3g}": loss for c, loss in choice.losses.items()}},
                warning=_cap_warning(self.name, start),
            )
        ]

    def _refuse_many(self, classes: int) -> None:
        if self.matrix and classes > MOST_CLASSES and self.given() is None:
            raise InputError(
                f"{self.name}: {classes} classes make a matrix of {classes**2:,} values, too many "
                "to choose their penalty by cross-validation: use sms or svs, or give off_diagonal"
            )

    def _choose(self, task: Task, start: Start) -> Choice:
        if self.given() is not None:
            return Choice(0.0, {})
        return choose_strength(task, lambda c: self.pull(task, start, c), self.name)

    def _how(self, choice: Choice) -> str:
        if self.given() is not None:
            return "as strongly as given"
        if not choice.losses:
            return "with c = 1, for want of rows to choose by"
        return f"with c = {choice.strength:.2g}, the best of {len(choice.losses)} tried"


def _cap_warning(method: str, start: Start) -> str:
    if not start.capped:
        return ""
    why = "separate the labels completely" if start.capped > 0 else "are no better than guessing"
    return (
        f"{method} starts from a temperature at its cap, {1 / start.inverse:.4g}: the logits {why}"
    )


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
    matrix = False

    def __init__(self, *, ridge: float | None = None) -> None:
        super().__init__()
        self.ridge = None if ridge is None else strength(self.name, "ridge", ridge)

    def given(self) -> float | None:
        """The ridge."""
        return self.ridge

    def strengths(self, task: Task, start: Start, c: float) -> dict[str, float]:
        """The ridge: c k unless given."""
        return {"ridge": c * len(task.centre) if self.ridge is None else self.ridge}

    def pull(self, task: Task, start: Start, c: float) -> Tensor:
        """The ridge on w and b."""
        ridge = self.strengths(task, start, c)["ridge"]
        slope = ridge / start.inverse**2
        return by_kind(len(task.centre), matrix=False, diagonal=slope, bias=ridge)


class PenalisedMatrix(HeldMap):
    """W x + b, penalised off the diagonal and at the bias (ODIR).

    Minimises the mean loss + off_diagonal * sum_{i != j} W_ij^2 + bias * sum_j b_j^2
    + (ridge / n) * sum_j (T W_jj - 1)^2: sums over the entries, not means. Unless given, bias is
    k / n and ridge k; off_diagonal is c T^2 k (k - 1) / n with the c of the lowest held-out loss in
    3 folds, among 10, 3.2, 1, ..., 0.0032, from strong to weak until that loss is 1 % above its
    lowest.
    """

    matrix = True

    def __init__(
        self,
        *,
        off_diagonal: float | None = None,
        bias: float | None = None,
        ridge: float | None = None,
    ) -> None:
        super().__init__()
        asked = {"off_diagonal": off_diagonal, "bias": bias, "ridge": ridge}
        held = {k: None if v is None else strength(self.name, k, v) for k, v in asked.items()}
        self.off_diagonal, self.bias, self.ridge = held["off_diagonal"], held["bias"], held["ridge"]

    def given(self) -> float | None:
        """The penalty off the diagonal."""
        return self.off_diagonal

    def strengths(self, task: Task, start: Start, c: float) -> dict[str, float]:
        """Penalties in nats a row, and the ridge."""
        k, (off, bias, ridge) = len(task.centre), (self.off_diagonal, self.bias, self.ridge)
        chosen = c * k * (k - 1) / start.inverse**2 / task.rows
        return {
            "off_diagonal": chosen if off is None else off,
            "bias": k / task.rows if bias is None else bias,
            "ridge": k if ridge is None else ridge,
        }

    def pull(self, task: Task, start: Start, c: float) -> Tensor:
        """Each penalty on its own kind of values."""
        held = self.strengths(task, start, c)
        return by_kind(
            len(task.centre),
            matrix=True,
            diagonal=held["ridge"] / start.inverse**2,
            bias=held["bias"] * task.rows,
            off_diagonal=held["off_diagonal"] * task.rows,
        )


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

    def inputs(self, logits: Tensor) -> Tensor:
        """Ln p, clipped."""
        return logits.log_softmax(1).clamp_min(LOG_TINY)


# --- Structured scaling: temperature, smoothing, then a penalised affine map (Berta et al.,
# 2025).
#
# Each kind of value is held in proportion to how many there are of it: k for the diagonal and for
# the
# bias, k (k - 1) for the rest, in nats over all rows. With few rows the map stays close to
# temperature scaling, and no cross-validation is needed.


class StructuredScaling(AffineMap):
    """weight x + offset with x = ln[(1 - e) softmax(z / T) + e / k] and e = 1 / (n + 1).

    T is the temperature by itself; mixing in e / k bounds what one row can cost.
    """

    matrix: bool
    temperature: Tensor
    floor: Tensor

    def __init__(self, *, penalty: float = 1.0) -> None:
        super().__init__()
        self.penalty = strength(self.name, "penalty", penalty)
        self.register_buffer("temperature", torch.ones(()))
        self.register_buffer("floor", torch.tensor(-math.inf))  # ln(e / k): fits 16 bits, unlike e

    def inputs(self, logits: Tensor) -> Tensor:
        """The smoothed log-probabilities."""
        floor = self.floor.to(logits.dtype)
        scaled = (logits / self.temperature.to(logits.dtype)).log_softmax(1)
        return torch.logaddexp(scaled + torch.log1p(-floor.exp() * logits.shape[1]), floor)

    def check(self) -> None:
        """T is finite and above 0, the floor a log-probability; see also `AffineMap`."""
        super().check()
        temperature, floor = float(self.temperature), float(self.floor)
        if not 0 < temperature < math.inf or not floor < 0:
            raise InputError(
                f"{self.name}: T is {temperature} and the floor {floor}: T must be finite and "
                "above 0, and the floor a log-probability"
            )

    def learn(self, problem: Problem) -> list[StepReport]:
        """Temperature and smoothing, then L-BFGS from the identity."""
        self.reset()
        loss, facts, k = problem.smooth_loss(self.name), problem.facts, problem.facts.classes
        with calm(facts.rows * k * (k / 32 if self.matrix else 1)):
            start = temperature_start(problem.data, loss)
            self.assign(temperature=1 / start.inverse, floor=-math.log((facts.rows + 1) * k))
            centre = by_kind(k, matrix=self.matrix, diagonal=1.0)
            task = Task.of(self.seen(problem), facts.rows, loss, centre)
            one, rest = self.penalty * k, self.penalty * k * (k - 1)
            pull = by_kind(k, matrix=self.matrix, diagonal=one, bias=one, off_diagonal=rest)
            fitted = descend(task, pull)
        moved = float((fitted.values - centre).abs().max())
        temperature = 1 / start.inverse
        message = f"T = {temperature:.4g}, and no value moved by more than {moved:.3g} from there"
        values = {"temperature": temperature}
        return [self.settled(problem, fitted, message, values=values)]


@final
class StructuredVectorScaling(StructuredScaling):
    """(1 + v) * x + b on temperature-scaled, smoothed log-probabilities x.

    Minimises the mean loss + penalty * (k / n) * (sum_j v_j^2 + sum_j b_j^2).

    Args:
        penalty: lambda, the strength of the penalty.
    """

    name = "svs"
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
    matrix = True
