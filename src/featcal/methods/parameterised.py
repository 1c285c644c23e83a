"""Parameterised temperature scaling: T from a row's largest logits (Tomani et al., ECCV 2022)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import init

from featcal.core import dist
from featcal.core.batch import Batch, Chunked, Data, stored_logits
from featcal.core.calibrator import LogitMap
from featcal.core.checks import InputError, check_flags, check_whole
from featcal.core.fit import Problem, StepReport, settle
from featcal.core.gradient import Descent, Objective, Penalty, gathered, minimize
from featcal.core.loss import Loss, brier, nll
from featcal.core.progress import calm, tell
from featcal.core.rows import row_curves
from featcal.core.sample import fold_of
from featcal.core.scalar import temper

# --- The small network that reads a row's largest logits: its parameters are one flat vector.

FURTHEST = 8.0  # standard deviations at which an input is cut off
REACH = math.log(10.0)  # T stays within this factor of the common temperature

MOST = 3.0  # how much more the last unit of a layer is held back than the first

Layers = list[tuple[Tensor, Tensor]]  # weight (o, i) and bias (o,) of each layer


def top_logits(logits: Tensor, top: int) -> Tensor:
    """The largest logits of each row, the largest first: (n, min(top, k))."""
    return logits.topk(min(top, logits.shape[1]), 1).values


def top_gaps(logits: Tensor, top: int) -> Tensor:
    """How far the top logit stands above each of the next: softmax knows nothing else."""
    values = top_logits(logits, top)
    return values[:, :1] - values[:, 1:]


def standardised(gaps: Tensor, mean: Tensor, spread: Tensor) -> Tensor:
    """Gaps in units of the fit split's, cut off where that split says nothing."""
    least = torch.finfo(gaps.dtype).tiny
    return ((gaps - mean) / spread.clamp(min=least)).clamp(-FURTHEST, FURTHEST)


def log_change(network: Tensor, inputs: Tensor, sizes: list[int]) -> Tensor:
    """Log of T over the common temperature, (n,): hidden layers of tanh, then a bound."""
    *hidden, (weight, bias) = layers_of(network, sizes)
    for matrix, offset in hidden:
        inputs = torch.tanh(inputs @ matrix.T + offset)
    return REACH * torch.tanh((inputs @ weight.T + bias)[:, 0] / REACH)


def raw_temperature(network: Tensor, inputs: Tensor, sizes: list[int]) -> Tensor:
    """T itself, (n,), as the published network gives it: hidden layers of ReLU, of any sign."""
    *hidden, (weight, bias) = layers_of(network, sizes)
    for matrix, offset in hidden:
        inputs = torch.relu(inputs @ matrix.T + offset)
    return (inputs @ weight.T + bias)[:, 0]


def length(sizes: list[int]) -> int:
    """The number of parameters."""
    return sum((wide + 1) * narrow for wide, narrow in pairwise(sizes))


def layers_of(network: Tensor, sizes: list[int]) -> Layers:
    """The flat vector cut into weights and biases, in order."""
    parts = torch.split(network, [n for i, o in pairwise(sizes) for n in (i * o, o)])
    shapes = list(pairwise(sizes))
    return [
        (weight.view(o, i), bias)
        for (i, o), weight, bias in zip(shapes, parts[::2], parts[1::2], strict=True)
    ]


def held_back(sizes: list[int]) -> Tensor:
    """How strongly the penalty holds each parameter, (p,) float64; the last bias is free.

    The units of a layer are held by different amounts. Where tanh is nearly linear, units held
    alike could be mixed at no cost, and the minimum would be a flat valley without a bottom.
    """
    hold = torch.ones(length(sizes), dtype=torch.float64)
    *hidden, (_, last) = layers_of(hold, sizes)
    for weight, bias in hidden:
        factors = torch.linspace(1, MOST, len(bias), dtype=torch.float64)
        weight *= factors[:, None]
        bias *= factors
    last.zero_()
    return hold


def silent_start(sizes: list[int], seed: int) -> Tensor:
    """Random hidden layers and an output of 0 for every row, (p,): temperature scaling exactly."""
    generator = torch.Generator().manual_seed(seed)
    network = torch.randn(length(sizes), generator=generator, dtype=torch.float64)
    *hidden, (weight, bias) = layers_of(network, sizes)
    for matrix, offset in hidden:
        matrix /= math.sqrt(matrix.shape[1])
        offset.zero_()
    weight.zero_()
    bias.zero_()
    return network


def default_start(sizes: list[int], seed: int) -> Tensor:
    """What torch gives fresh linear layers, in order, after `manual_seed`: (p,)."""
    generator = torch.Generator().manual_seed(seed)
    network = torch.empty(length(sizes))
    for weight, bias in layers_of(network, sizes):
        init.kaiming_uniform_(weight, a=math.sqrt(5), generator=generator)
        bound = 1 / math.sqrt(weight.shape[1])
        init.uniform_(bias, -bound, bound, generator=generator)
    return network


# --- Each row's loss as a function of its own b = 1/T, cheap enough to be asked for a thousand
# times.
#
# With few classes it is computed from the logits. With many it is tabulated once, at knots of log b
# around the common value, and read by quintic interpolation: value, slope and curvature are right
# at
# every knot, and a network's fit then costs the same for 1,000 classes as for 10.

INTERVALS = 24
STEP = 2 * REACH / INTERVALS  # between knots of log b
MANY = 3 * (INTERVALS + 1)  # classes above which the table is smaller than the logits

Curves = Callable[[Tensor, Tensor, Tensor | float], Tensor]  # logits, labels, b -> (3, n)
RowLoss = Callable[[Batch, Tensor], Tensor]  # (batch, log T over the common T (n,)) -> (n,)


@dataclass(frozen=True)
class Tabulated:
    """How the rows of a fit are kept, and what a change of their temperature costs them."""

    curves: Curves
    inverse: float  # b at the common temperature
    in_table: bool

    def keep(self, batch: Batch, inputs: Tensor) -> Batch:
        """The batch with the network's inputs as features, and with what `loss` reads as logits."""
        logits = stored_logits(batch)
        return Batch(self._table(batch) if self.in_table else logits, batch.labels, inputs)

    def loss(self, batch: Batch, change: Tensor) -> Tensor:
        """Each row's loss at log T = log T0 + change, (n,), twice differentiable in the change."""
        if self.in_table:
            return interpolated(stored_logits(batch).double(), -change)
        inverse = self.inverse * torch.exp(-change)
        with torch.no_grad():
            logits = stored_logits(batch).double()
            value, slope, bend = self.curves(logits, batch.labels, inverse)
        # The graph holds one number a row instead of one for each class.
        step = inverse - inverse.detach()
        surrogate: Tensor = value + slope * step + bend * step.square() / 2
        return surrogate

    def _table(self, batch: Batch) -> Tensor:
        """Value, slope and curvature in units of the knots' distance: (n, 3 * knots) float32."""
        logits = stored_logits(batch).double()
        columns = []
        for knot in range(INTERVALS + 1):
            inverse = self.inverse * float(torch.tensor(knot * STEP - REACH).double().exp())
            value, slope, bend = self.curves(logits, batch.labels, inverse)
            first = inverse * slope * STEP
            columns += [value, first, inverse**2 * bend * STEP**2 + first * STEP]
        return torch.stack(columns, 1).float()


def tabulated(loss: Loss, inverse: float, classes: int) -> Tabulated:
    """How to keep rows for this loss."""
    known = {nll.name: row_curves, brier.name: brier_curves}
    if loss.name not in known:
        raise InputError(f"parameterised cannot be fitted by {loss.name}: choose nll or brier")
    return Tabulated(known[loss.name], inverse, in_table=classes > MANY)


def interpolated(table: Tensor, log_b: Tensor) -> Tensor:
    """The quintic through both knots around each row's log b, (n,)."""
    place = (log_b + REACH) / STEP
    left = place.detach().floor().clamp(0, INTERVALS - 1)
    t = place - left
    columns = 3 * left.long()[:, None] + torch.arange(6, device=table.device)
    f0, d0, c0, f1, d1, c1 = table.gather(1, columns).unbind(1)
    rise = f1 - f0
    cubic = 10 * rise - 6 * d0 - 4 * d1 - 1.5 * c0 + 0.5 * c1
    quartic = -15 * rise + 8 * d0 + 7 * d1 + 1.5 * c0 - c1
    quintic = 6 * rise - 3 * d0 - 3 * d1 - 0.5 * c0 + 0.5 * c1
    found: Tensor = f0 + t * (d0 + t * (c0 / 2 + t * (cubic + t * (quartic + t * quintic))))
    return found


def brier_curves(logits: Tensor, labels: Tensor, inverse: Tensor | float) -> Tensor:
    """Value, slope and curvature in b of each row's Brier score: (3, n)."""
    rowwise = inverse[:, None] if isinstance(inverse, Tensor) else inverse
    probs = (logits * rowwise).softmax(1)
    away = logits - (probs * logits).sum(1, keepdim=True)  # dp/db = p * away
    spread = (probs * away.square()).sum(1)  # d away/db = -spread
    squares, pulled = probs.square(), probs.square() * away
    true, gap = (values.gather(1, labels[:, None])[:, 0] for values in (probs, away))
    value = squares.sum(1) - 2 * true + 1
    slope = 2 * pulled.sum(1) - 2 * true * gap
    bend = 4 * (pulled * away).sum(1) - 2 * squares.sum(1) * spread
    return torch.stack([value, slope, bend - 2 * true * (gap.square() - spread)])


# --- Newton's method for the last digits of a small network's parameters.

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


# --- Fitting the network: how strongly to hold it back is left to folds, and so is whether to use
# it.
#
# A penalty on the weights pulls the network towards plain temperature scaling. Each strength is
# tried
# without each fold and judged on it, beside plain temperature scaling fitted and judged the same
# way.
# The one that wins is fitted to all rows: restarts by L-BFGS, then Newton's method to the last
# digits
# of the best, so that the result does not depend on how sums were rounded on the way. On many rows
# the trials use a sample of them, chosen by content.

FOLDS = 4
SAMPLE = 2**14  # rows, about, on which strengths and restarts are tried; all rows settle the end
STRENGTHS = (5.0, 12.0, 30.0)  # of the penalty, in nats over all rows for weights of length sqrt 2
FIRST, NEXT, LAST = 50, 20, 100  # iterations of L-BFGS: of a start, of a step on, of the end
WORTH = 1e-6  # what a network must save on rows left out, a row, to be kept


@dataclass(frozen=True)
class Wanted:
    """What the network shall look like, and how it is sought."""

    top: int
    hidden: int
    layers: int
    restarts: int
    seed: int

    def sizes(self, inputs: int) -> list[int]:
        """The width of each layer, inputs and output included."""
        return [inputs, *[self.hidden] * self.layers, 1]


def _nothing() -> Tensor:
    return torch.zeros(0)


@dataclass(frozen=True)
class Fitted:
    """What was found; an empty network is plain temperature scaling.

    Attributes:
        temperature: the common one, around which the network moves.
        mean: of each gap, (top - 1,).
        spread: its standard deviation.
        network: the parameters, (p,).
        why_plain: why there is no network, where there is none.
        strength: of the penalty.
        cv: the mean loss of rows left out, with the network.
        cv_plain: the same by temperature scaling.
        steps: evaluations of the loss.
        converged: whether the search ended by its own rule.
        capped: whether the common temperature stopped at its cap.
    """

    temperature: float
    mean: Tensor = field(default_factory=_nothing)
    spread: Tensor = field(default_factory=_nothing)
    network: Tensor = field(default_factory=_nothing)
    why_plain: str = ""
    strength: float | None = None
    cv: float | None = None
    cv_plain: float | None = None
    steps: int = 0
    converged: bool = True
    capped: bool = False


def fit_network(problem: Problem, loss: Loss, wanted: Wanted) -> Fitted | None:
    """The network that pays, or plain temperature scaling; None where no temperature matters."""
    common = temper(problem.data, loss)
    if common is None:
        return None
    plain = Fitted(common.temperature)
    if common.capped.any():
        why = "the common temperature stopped at its cap, so there is no network"
        return replace(plain, why_plain=why, converged=False, capped=True)
    mean, spread = _moments(problem, wanted.top)
    rows = tabulated(loss, 1 / common.temperature, problem.facts.classes)
    parts = _by_fold(problem, rows, wanted.top, (mean, spread))
    trials = _Trials(parts, rows.loss, wanted, wanted.sizes(len(mean)))
    if min(trials.rows[:FOLDS]) == 0:
        return replace(plain, why_plain="too few different rows to judge a network by")
    costs, cv_plain = trials.costs_left_out()
    best = int(np.argmin(costs))
    plain = replace(plain, cv=costs[best], cv_plain=cv_plain, steps=trials.steps)
    if not costs[best] < cv_plain - WORTH:
        return replace(plain, why_plain="on rows left out the network is no better")
    network, settled = trials.fit_all(STRENGTHS[best])
    return replace(
        plain,
        mean=mean,
        spread=spread,
        network=network,
        strength=STRENGTHS[best],
        steps=trials.steps,
        converged=settled,
    )


def _by_fold(
    problem: Problem, rows: Tabulated, top: int, moments: tuple[Tensor, Tensor]
) -> list[list[Batch]]:
    """The rows of each fold, then those beyond the sample, with what a fit needs of them."""
    groups = FOLDS * max(1, round(problem.facts.rows / SAMPLE))
    parts: list[list[Batch]] = [[] for _ in range(FOLDS + 1)]
    for batch in problem.data:
        if len(batch):
            gaps = top_gaps(stored_logits(batch).double(), top)
            kept, group = rows.keep(batch, standardised(gaps, *moments)), fold_of(batch, groups)
            for number, part in enumerate(parts):
                part.append(kept.rows(group.clamp(max=FOLDS) == number))
    return parts


def _moments(problem: Problem, top: int) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each gap over all rows; 1 for a gap that never varies."""
    inputs = min(top, problem.facts.classes) - 1
    sums = torch.zeros(2, inputs, dtype=torch.float64)
    for batch in problem.data:
        gaps = top_gaps(stored_logits(batch).double(), top)
        sums += torch.stack([gaps.sum(0), gaps.square().sum(0)]).cpu()
    mean, square = dist.total(sums) / problem.facts.rows
    spread = (square - mean.square()).clamp(min=0).sqrt()
    spread = torch.where(spread > 1e-6 * mean.abs(), spread, 1.0)
    return mean.to(problem.facts.device), spread.to(problem.facts.device)


class _Trials:
    """The rows split by fold, and networks fitted to some of the folds."""

    def __init__(
        self, parts: list[list[Batch]], row_loss: RowLoss, wanted: Wanted, sizes: list[int]
    ) -> None:
        self.parts, self.row_loss, self.wanted, self.sizes = parts, row_loss, wanted, sizes
        self.hold = held_back(self.sizes)
        counts = torch.tensor([float(sum(map(len, part))) for part in parts])
        self.rows = [int(count) for count in dist.total(counts)]
        self.steps, self.done = 0, 0

    def objective(self, network: Tensor, batch: Batch) -> Tensor:
        """The summed loss of a batch under a network."""
        assert batch.features is not None
        return self.row_loss(batch, log_change(network, batch.features, self.sizes)).sum()

    def shifted(self, shift: Tensor, batch: Batch) -> Tensor:
        """The summed loss under one change of the temperature for all rows, (1,)."""
        return self.row_loss(batch, shift.expand(len(batch))).sum()

    def of(self, numbers: Iterable[int]) -> tuple[list[Batch], int]:
        """The rows of some parts, and how many they are."""
        chosen = list(numbers)
        batches = list(chain.from_iterable(self.parts[number] for number in chosen))
        return list(Chunked(batches)), sum(self.rows[number] for number in chosen)

    def penalty(self, strength: float, rows: int) -> Penalty:
        """The pull towards small weights, a row."""
        return lambda network: strength / (2 * rows) * (self.hold * network.square()).sum()

    def costs_left_out(self) -> tuple[list[float], float]:
        """The mean loss on each fold of what was fitted to the others.

        For each strength of the penalty, and without a network.
        """
        costs, plain, judged = [0.0] * len(STRENGTHS), 0.0, sum(self.rows[:FOLDS])
        for fold, part in enumerate(self.parts[:FOLDS]):
            data, rows = self.of(number for number in range(FOLDS) if number != fold)
            at = silent_start(self.sizes, self.wanted.seed)
            for number, strength in enumerate(STRENGTHS):  # the next starts where the last ended
                at = self._descend(at, data, rows, strength, FIRST if number == 0 else NEXT).at
                costs[number] += summed(self.objective, at, part) / judged
            shift = minimize(self.shifted, torch.zeros(1), data, rows).at
            plain += summed(self.shifted, shift, part) / judged
        return costs, plain

    def fit_all(self, strength: float) -> tuple[Tensor, bool]:
        """The best of several restarts, then all rows and the last digits."""
        data, rows = self.of(range(FOLDS))
        seeds = range(self.wanted.seed, self.wanted.seed + self.wanted.restarts)
        starts = (silent_start(self.sizes, seed) for seed in seeds)
        tried = [self._descend(start, data, rows, strength, FIRST) for start in starts]
        best = min(tried, key=lambda found: found.value)
        data, rows = self.of(range(FOLDS + 1))
        last = self._descend(best.at, data, rows, strength, LAST)
        penalty = self.penalty(strength, rows)
        sharp, flat = sharpened(self.objective, last.at, data, rows, penalty)
        return sharp, flat or last.converged

    def _descend(
        self, start: Tensor, data: Data, rows: int, strength: float, iterations: int
    ) -> Descent:
        """L-BFGS from a start; counts and tells."""
        penalty = self.penalty(strength, rows)
        found = minimize(self.objective, start, data, rows, penalty=penalty, iterations=iterations)
        self.steps, self.done = self.steps + found.steps, self.done + 1
        tell("parameterised", self.done, FOLDS * len(STRENGTHS) + self.wanted.restarts + 1)
        return found


DEFAULTS = {"top": 10, "hidden": 5, "layers": 1, "restarts": 3, "seed": 0}
PUBLISHED = [2, 2, 2, 2, 1]  # the widths behind the inputs in the paper's code
RATE, ROUNDS = 0.02, 1000  # of Adam there


@final
class ParameterisedTemperature(LogitMap):
    """z / T(z), with T(z) from a small network that reads the gaps below the top logit.

    The network starts as temperature scaling and is kept only where it does better on rows it was
    not fitted to; otherwise this is temperature scaling, and the report says so. T is above 0 by
    construction, one for the whole row, so the order of its logits never reverses.

    Args:
        top: how many of the largest logits the network reads.
        hidden: units of a hidden layer.
        layers: hidden layers.
        restarts: starting points from which the network is fitted; the best fit is kept.
        seed: of the starting points.
        reference: the network behind the paper's tables: raw logits, four hidden layers of two
            ReLU, T of any sign, 1,000 steps of Adam from torch's own start at seed 1. It tends to
            die and to give one T for all rows.
    """

    name = "parameterised"
    keeps_accuracy = True
    quick = "temperature"
    temperature: Tensor
    mean: Tensor
    spread: Tensor
    network: Tensor

    def __init__(
        self,
        *,
        top: int = 10,
        hidden: int = 5,
        layers: int = 1,
        restarts: int = 3,
        seed: int = 0,
        reference: bool = False,
    ) -> None:
        super().__init__()
        check_flags(self.name, reference=reference)
        given = {"top": top, "hidden": hidden, "layers": layers, "restarts": restarts, "seed": seed}
        check_whole(self.name, 1, hidden=hidden, layers=layers, restarts=restarts)
        check_whole(self.name, 2, top=top)
        check_whole(self.name, 0, seed=seed)
        if reference and given != DEFAULTS:
            raise InputError("parameterised: reference=True fixes the network: leave others out")
        self.top, self.hidden, self.layers = top, hidden, layers
        self.restarts, self.seed, self.reference = restarts, seed, reference
        self.keeps_accuracy = not reference
        self.register_buffer("temperature", torch.ones(()))
        for key in ("mean", "spread", "network"):
            self.register_buffer(key, torch.zeros(0))

    def map_logits(self, logits: Tensor) -> Tensor:
        """Divides each row by its own T."""
        if self.network.numel() == 0:
            return logits / self.temperature.to(logits.dtype)
        return logits / self.row_temperatures(logits)[:, None]

    def row_temperatures(self, logits: Tensor) -> Tensor:
        """T of each row, (n,), where there is a network."""
        fitted = (self.temperature, self.mean, self.spread, self.network)
        temperature, mean, spread, network = (values.to(logits.dtype) for values in fitted)
        if self.reference:
            inputs = top_logits(logits, self.top)
            return raw_temperature(network, inputs, [inputs.shape[1], *PUBLISHED])
        inputs = standardised(top_gaps(logits, self.top), mean, spread)
        sizes = self._wanted().sizes(inputs.shape[1])
        return temperature * log_change(network, inputs, sizes).exp()

    def _wanted(self) -> Wanted:
        return Wanted(self.top, self.hidden, self.layers, self.restarts, self.seed)

    def check(self) -> None:
        """T is one finite number above 0; the network, where there is one, is whole and finite."""
        if self.temperature.numel() != 1 or not 0 < float(self.temperature) < math.inf:
            raise InputError(
                f"parameterised: T is {self.temperature.tolist()}: it must be finite and above 0"
            )
        if not all(bool(torch.isfinite(part).all()) for part in self.buffers()):
            raise InputError("parameterised: the network holds NaN or infinite values")
        whole = self._is_published_whole() if self.reference else self._is_whole()
        if self.network.ndim != 1 or not (whole or self.network.numel() == 0):
            raise InputError("parameterised: the network's size is not that of its layers")
        if self.reference and self.network.numel() and float(self.network[-1]) == 0:
            raise InputError("parameterised: the network's last offset is 0, and so may T be")

    def _is_published_whole(self) -> bool:
        """Whether the network is one of some number of classes."""
        lengths = [length([inputs, *PUBLISHED]) for inputs in range(1, self.top + 1)]
        return self.network.numel() in lengths

    def _is_whole(self) -> bool:
        whole = self.network.numel() == length(self._wanted().sizes(self.mean.numel()))
        return whole and self.mean.shape == self.spread.shape and bool((self.spread > 0).all())

    def learn(self, problem: Problem) -> list[StepReport]:
        """Fits the network and asks the folds whether it pays: see `parameterised_fit`."""
        self.reset()
        if self.reference:
            return [self._learn_published(problem)]
        loss = problem.smooth_loss(self.name)
        with calm(problem.facts.rows * problem.facts.classes):
            found = fit_network(problem, loss, self._wanted())
        if found is None:
            return [settle(self, problem, {}, "")]
        self.assign(temperature=found.temperature, network=found.network)
        self.assign(mean=found.mean, spread=found.spread)
        return [self._report(problem, found)]

    def _report(self, problem: Problem, found: Fitted) -> StepReport:
        values = {"temperature": found.temperature}
        message = f"T = {found.temperature:.4g} for all rows, as by temperature: {found.why_plain}"
        if found.network.numel():
            low, high = self._range(problem)
            values |= {"T_min": low, "T_max": high}
            message = (
                f"T from {low:.4g} to {high:.4g} around {found.temperature:.4g}; rows left out: "
                f"{problem.loss.name} {found.cv:.4f}, by temperature scaling {found.cv_plain:.4f}"
            )
        return settle(
            self,
            problem,
            values,
            message,
            converged=found.converged,
            warning=message if found.capped else "",
            details={
                "cv": found.cv,
                "cv_temperature": found.cv_plain,
                "penalty": found.strength,
                "iterations": found.steps,
            },
        )

    def _range(self, problem: Problem) -> tuple[float, float]:
        """The lowest and the highest T of the fit split."""
        ends = torch.full((2,), -math.inf, dtype=torch.float64)
        for batch in problem.data:
            if len(batch):
                rows = self.row_temperatures(stored_logits(batch)).double()
                ends = torch.maximum(ends, torch.stack([-rows.min(), rows.max()]).cpu())
        lowest, highest = dist.largest(ends).tolist()
        return -lowest, highest

    def _learn_published(self, problem: Problem) -> StepReport:
        self.assign(network=_published(problem, self.top))
        low, high = self._range(problem)
        message = f"T from {low:.4g} to {high:.4g}" + (": the network died" if low == high else "")
        return settle(self, problem, {"T_min": low, "T_max": high}, message, always=True)


def _published(problem: Problem, top: int) -> Tensor:
    """1,000 steps of Adam on all rows at once, in float32, from torch's own start."""
    logits, labels = gathered(problem.data, problem.facts.classes)
    inputs = top_logits(logits, top)
    sizes = [inputs.shape[1], *PUBLISHED]
    network = default_start(sizes, seed=1).to(logits.device)
    adam = torch.optim.Adam([network], lr=RATE)
    for _ in range(ROUNDS):
        with torch.enable_grad():
            leaf = network.detach().requires_grad_()
            scaled = logits / raw_temperature(leaf, inputs, sizes)[:, None]
            (network.grad,) = torch.autograd.grad(F.cross_entropy(scaled, labels), leaf)
        adam.step()
    return network.detach()
