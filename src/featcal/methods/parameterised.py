"""Parameterised temperature scaling: T from a row's largest logits (Tomani et al., ECCV 2022).

A small network reads the gaps below the top logit and moves T around the common temperature. A
penalty on its weights pulls it towards plain temperature scaling; how strong that penalty is, and
whether the network is used at all, is decided on rows left out of its fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from typing import Any, ClassVar, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featcal.core import dist
from featcal.core.batch import Batch, Chunked, Data, features_of, stored_logits
from featcal.core.calibrator import LogitMap
from featcal.core.checks import InputError, check_flags, check_whole
from featcal.core.fit import Loss, Problem, StepReport, brier, nll, settle
from featcal.core.gradient import Descent, Objective, Penalty, gathered, minimize
from featcal.core.progress import calm, tell
from featcal.core.sample import fold_of
from featcal.core.scalar import Tempered, row_curves, temper

PUBLISHED = [2, 2, 2, 2, 1]  # the widths behind the inputs in the paper's code
RATE, ROUNDS = 0.02, 1000  # of Adam there

FURTHEST = 8.0  # standard deviations at which an input is cut off
REACH = math.log(10.0)  # T stays within this factor of the common temperature
MOST = 3.0  # how much more the last unit of a layer is held back than the first

INTERVALS = 24  # between the knots of log b at which many classes are tabulated
STEP = 2 * REACH / INTERVALS
MANY = 3 * (INTERVALS + 1)  # classes above which the table is smaller than the logits

FOLDS = 4
SAMPLE = 2**14  # rows, about, on which strengths and restarts are tried; all rows settle the end
STRENGTHS = (5.0, 12.0, 30.0)  # of the penalty, in nats over all rows for weights of length sqrt 2
FIRST, NEXT, LAST = 50, 20, 100  # iterations of L-BFGS: of a start, of a step on, of the end
WORTH = 1e-6  # what a network must save per row left out to be kept

NEWTON = 15
SHARP = 1e-10  # no entry of the gradient is larger when Newton ends
LENGTHS = (1.0, 0.5, 0.25, 0.1, 0.03, 0.01)


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
    title = "parameterised temperature scaling"
    symbols: ClassVar[dict[str, str]] = {"temperature": "T"}
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
        check_whole(self.name, 1, hidden=hidden, layers=layers, restarts=restarts)
        check_whole(self.name, 2, top=top)
        check_whole(self.name, 0, seed=seed)
        self.top, self.hidden, self.layers = top, hidden, layers
        self.restarts, self.seed, self.reference = restarts, seed, reference
        if reference and (top, hidden, layers, restarts, seed) != (10, 5, 1, 3, 0):
            raise InputError("parameterised: reference=True fixes the network: leave others out")
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
            return output(network, inputs, [inputs.shape[1], *PUBLISHED], torch.relu)
        inputs = standardised(top_gaps(logits, self.top), mean, spread)
        return temperature * log_change(network, inputs, self.sizes(inputs.shape[1])).exp()

    def sizes(self, inputs: int) -> list[int]:
        """The width of each layer, inputs and output included."""
        return [inputs, *[self.hidden] * self.layers, 1]

    def learn(self, problem: Problem) -> list[StepReport]:
        """Fits the network and asks the folds whether it pays."""
        self.reset()
        if self.reference:
            self.assign(network=_published(problem, self.top))
            low, high = self._range(problem)
            died = ": the network died" if low == high else ""
            message = f"T from {low:.4g} to {high:.4g}{died}"
            return [settle(self, problem, {"T_min": low, "T_max": high}, message, always=True)]
        loss = problem.smooth_loss(self.name)
        details = {"cv": None, "cv_temperature": None, "penalty": None, "iterations": 0}
        with calm(problem.facts.rows * problem.facts.classes):
            common = temper(problem.data, loss)
            if common is not None:
                why_plain, converged = self._fit(problem, loss, common, details)
        if common is None:
            return [settle(self, problem, {}, "")]
        values = {"temperature": common.temperature}
        message = f"T = {common.temperature:.4g} for all rows, as by temperature: {why_plain}"
        if not why_plain:
            low, high = self._range(problem)
            values |= {"T_min": low, "T_max": high}
            message = (
                f"T from {low:.4g} to {high:.4g} around {common.temperature:.4g}; rows left out: "
                f"{problem.loss.name} {details['cv']:.4f}, "
                f"by temperature scaling {details['cv_temperature']:.4f}"
            )
        warning = message if common.capped.any() else ""
        return [settle(self, problem, values, message, converged, warning, details)]

    def _fit(
        self, problem: Problem, loss: Loss, common: Tempered, details: dict[str, Any]
    ) -> tuple[str, bool]:
        """Assigns the network where it pays: why not otherwise, and whether the search settled."""
        self.assign(temperature=common.temperature)
        if common.capped.any():
            return "the common temperature stopped at its cap, so there is no network", False
        known = {nll.name: row_curves, brier.name: brier_curves}.get(loss.name)
        if known is None:
            raise InputError(f"parameterised cannot be fitted by {loss.name}: choose nll or brier")
        curves = partial(known, smoothing=loss.smoothing)
        row_loss = RowLoss(curves, 1 / common.temperature, problem.facts.classes > MANY)
        trials = _Trials(self, problem, row_loss)
        if min(trials.rows[:FOLDS]) == 0:
            return "too few different rows to judge a network by", True
        costs, plain = trials.costs_left_out()
        best = int(np.argmin(costs))
        details |= {"cv": costs[best], "cv_temperature": plain, "iterations": trials.steps}
        if not costs[best] < plain - WORTH:
            return "on rows left out the network is no better", True
        network, settled = trials.fit_all(STRENGTHS[best])
        details |= {"penalty": STRENGTHS[best], "iterations": trials.steps}
        self.assign(mean=trials.mean, spread=trials.spread, network=network)
        return "", settled

    def _range(self, problem: Problem) -> tuple[float, float]:
        """The lowest and the highest T of the fit split."""
        rows = [self.row_temperatures(stored_logits(b)).cpu() for b in problem.data if len(b)]
        return dist.ends(torch.cat([torch.zeros(0), *rows]))


def _published(problem: Problem, top: int) -> Tensor:
    """1,000 steps of Adam on all rows at once, in float32, from torch's own start."""
    logits, labels = gathered(problem.data, problem.facts.classes)
    inputs = top_logits(logits, top)
    sizes = [inputs.shape[1], *PUBLISHED]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        layers = [nn.Linear(*shape) for shape in pairwise(sizes)]
    start = [part.detach().flatten() for layer in layers for part in layer.parameters()]
    network = torch.cat(start).to(logits.device)
    adam = torch.optim.Adam([network], lr=RATE)
    for _ in range(ROUNDS):
        with torch.enable_grad():
            leaf = network.detach().requires_grad_()
            scaled = logits / output(leaf, inputs, sizes, torch.relu)[:, None]
            (network.grad,) = torch.autograd.grad(F.cross_entropy(scaled, labels), leaf)
        adam.step()
    return network.detach()


# The network: its inputs, and its parameters as one flat vector.


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


def output(
    network: Tensor, inputs: Tensor, sizes: list[int], bend: Callable[[Tensor], Tensor]
) -> Tensor:
    """What the network gives for each row of inputs (n, i): (n,)."""
    *hidden, (weight, bias) = layers_of(network, sizes)
    for matrix, offset in hidden:
        inputs = bend(inputs @ matrix.T + offset)
    return (inputs @ weight.T + bias)[:, 0]


def log_change(network: Tensor, inputs: Tensor, sizes: list[int]) -> Tensor:
    """Log of T over the common temperature, (n,): hidden layers of tanh, then a bound."""
    return REACH * torch.tanh(output(network, inputs, sizes, torch.tanh) / REACH)


def length(sizes: list[int]) -> int:
    """The number of parameters."""
    return sum((wide + 1) * narrow for wide, narrow in pairwise(sizes))


def layers_of(network: Tensor, sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    """The flat vector cut into a weight (o, i) and a bias (o,) for each layer, in order."""
    shapes = list(pairwise(sizes))
    parts = torch.split(network, [n for i, o in shapes for n in (i * o, o)])
    weights = [part.view(o, i) for (i, o), part in zip(shapes, parts[::2], strict=True)]
    return list(zip(weights, parts[1::2], strict=True))


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


@dataclass(frozen=True)
class RowLoss:
    """Each row's loss as a function of its own b = 1/T, cheap enough to be asked a thousand times.

    With few classes it is computed from the logits. With many it is tabulated once, at knots of
    log b around the common value, and read by quintic interpolation: value, slope and curvature are
    right at every knot, and a fit then costs the same for 1,000 classes as for 10.

    Attributes:
        curves: (logits, labels, b) -> value, slope and curvature in b of each row's loss, (3, n).
        inverse: b at the common temperature.
        in_table: whether there are many classes.
    """

    curves: Callable[[Tensor, Tensor, Tensor | float], Tensor]
    inverse: float
    in_table: bool

    def keep(self, batch: Batch, inputs: Tensor) -> Batch:
        """The batch with the network's inputs as features, and with what `at` reads as logits.

        A table holds value, slope and curvature in units of the knots' distance, in float32.
        """
        kept = stored_logits(batch)
        if self.in_table:
            logits, columns = kept.double(), []
            for knot in range(INTERVALS + 1):
                inverse = self.inverse * float(torch.tensor(knot * STEP - REACH).double().exp())
                value, slope, bend = self.curves(logits, batch.labels, inverse)
                first = inverse * slope * STEP
                columns += [value, first, inverse**2 * bend * STEP**2 + first * STEP]
            kept = torch.stack(columns, 1).float()
        return Batch(kept, batch.labels, inputs)

    def at(self, batch: Batch, change: Tensor) -> Tensor:
        """Each row's loss at log T = log T0 + change, (n,), twice differentiable in the change."""
        kept = stored_logits(batch).double()
        if self.in_table:
            return interpolated(kept, -change)
        inverse = self.inverse * torch.exp(-change)
        with torch.no_grad():
            value, slope, bend = self.curves(kept, batch.labels, inverse)
        # The graph holds one number per row instead of one per class.
        step = inverse - inverse.detach()
        surrogate: Tensor = value + slope * step + bend * step.square() / 2
        return surrogate


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


def brier_curves(
    logits: Tensor, labels: Tensor, inverse: Tensor | float, smoothing: float = 0.0
) -> Tensor:
    """Value, slope and curvature in b of each row's Brier score: (3, n).

    The part of a label that is spread over all classes adds a constant alone.
    """
    rowwise = inverse[:, None] if isinstance(inverse, Tensor) else inverse
    probs = (logits * rowwise).softmax(1)
    away = logits - (probs * logits).sum(1, keepdim=True)  # dp/db = p * away
    spread = (probs * away.square()).sum(1)  # d away/db = -spread
    squares, pulled = probs.square(), probs.square() * away
    true, gap = (values.gather(1, labels[:, None])[:, 0] for values in (probs, away))
    true = (1 - smoothing) * true
    value = squares.sum(1) - 2 * (true + smoothing / logits.shape[1]) + 1
    slope = 2 * pulled.sum(1) - 2 * true * gap
    bend = 4 * (pulled * away).sum(1) - 2 * squares.sum(1) * spread
    return torch.stack([value, slope, bend - 2 * true * (gap.square() - spread)])


class _Trials:
    """The rows split by fold, and networks fitted to some of the folds.

    Each strength of the penalty is tried without each fold and judged on it, beside plain
    temperature scaling fitted and judged the same way. On many rows the trials use a sample of
    them, chosen by content; the last part holds the rows beyond the sample.
    """

    def __init__(
        self, wanted: ParameterisedTemperature, problem: Problem, row_loss: RowLoss
    ) -> None:
        self.wanted, self.row_loss = wanted, row_loss
        facts, inputs = problem.facts, min(wanted.top, problem.facts.classes) - 1

        def sums_of(batch: Batch) -> Tensor:
            gaps = top_gaps(stored_logits(batch).double(), wanted.top)
            return torch.stack([gaps.sum(0), gaps.square().sum(0)])

        mean, square = dist.summed(map(sums_of, problem.data), 2, inputs) / facts.rows
        spread = (square - mean.square()).clamp(min=0).sqrt()
        spread = torch.where(spread > 1e-6 * mean.abs(), spread, 1.0)  # for a gap that never varies
        self.mean, self.spread = mean.to(facts.device), spread.to(facts.device)
        self.sizes = wanted.sizes(inputs)
        self.hold = held_back(self.sizes)
        self.parts: list[list[Batch]] = [[] for _ in range(FOLDS + 1)]
        share = max(1, round(facts.rows / SAMPLE))
        for batch in problem.data:
            if len(batch):
                gaps = top_gaps(stored_logits(batch).double(), wanted.top)
                kept = row_loss.keep(batch, standardised(gaps, self.mean, self.spread))
                group = fold_of(batch, FOLDS, share)
                for number, part in enumerate(self.parts):
                    part.append(kept.rows(group.clamp(max=FOLDS) == number))
        counts = torch.tensor([float(sum(map(len, part))) for part in self.parts])
        self.rows = [int(count) for count in dist.total(counts)]
        self.steps, self.done = 0, 0

    def objective(self, network: Tensor, batch: Batch) -> Tensor:
        """The summed loss of a batch under a network."""
        change = log_change(network, features_of(batch), self.sizes)
        return self.row_loss.at(batch, change).sum()

    def shifted(self, shift: Tensor, batch: Batch) -> Tensor:
        """The summed loss under one change of the temperature for all rows, (1,)."""
        return self.row_loss.at(batch, shift.expand(len(batch))).sum()

    def of(self, numbers: Iterable[int]) -> tuple[list[Batch], int]:
        """The rows of some parts, and how many they are."""
        chosen = list(numbers)
        batches = list(chain.from_iterable(self.parts[number] for number in chosen))
        return list(Chunked(batches)), sum(self.rows[number] for number in chosen)

    def penalty(self, strength: float, rows: int) -> Penalty:
        """The pull towards small weights, per row."""
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
                costs[number] += loss_over(self.objective, at, part) / judged
            shift = minimize(self.shifted, torch.zeros(1), data, rows).at
            plain += loss_over(self.shifted, shift, part) / judged
        return costs, plain

    def fit_all(self, strength: float) -> tuple[Tensor, bool]:
        """The best of several restarts, then all rows, and Newton's method for the last digits.

        The result then does not depend on how sums were rounded on the way.
        """
        data, rows = self.of(range(FOLDS))
        seeds = range(self.wanted.seed, self.wanted.seed + self.wanted.restarts)
        starts = (silent_start(self.sizes, seed) for seed in seeds)
        tried = [self._descend(start, data, rows, strength, FIRST) for start in starts]
        best = min(tried, key=lambda found: found.value)
        data, rows = self.of(range(FOLDS + 1))
        last = self._descend(best.at, data, rows, strength, LAST)
        sharp, flat = sharpened(self.objective, last.at, data, rows, self.penalty(strength, rows))
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


@torch.no_grad()
def loss_over(objective: Objective, at: Tensor, data: Data) -> float:
    """The summed loss over all processes."""
    return float(dist.summed(objective(at.to(b.labels.device), b) for b in data if len(b)))


def sharpened(
    objective: Objective, at: Tensor, data: Data, rows: int, penalty: Penalty
) -> tuple[Tensor, bool]:
    """Newton's method from a point close to a minimum, with shorter steps where it would lose."""
    flat, size = False, len(at)
    for _ in range(NEWTON):
        parts = (_second_order(objective, at.to(b.labels.device), b) for b in data if len(b))
        sums = dist.summed(parts, 1 + size + size**2) / rows + _second_order(penalty, at)
        value, gradient, bend = float(sums[0]), sums[1 : size + 1], sums[size + 1 :]
        flat = float(gradient.abs().max()) < SHARP
        if flat:
            break
        sizes, axes = torch.linalg.eigh(bend.view(size, size))
        floor = 1e-6 * float(sizes.abs().max())  # a direction that curves down is walked down too
        step = axes @ ((axes.T @ gradient) / sizes.abs().clamp(min=floor))
        for share in LENGTHS:
            there = at - share * step
            reached = loss_over(objective, there, data) / rows + float(penalty(there))
            if reached <= value + 1e-14 * abs(value):
                break
        else:
            break
        at = there
    return at, flat


def _second_order(function: Callable[..., Tensor], at: Tensor, *batch: Batch) -> Tensor:
    """Value, gradient and second derivatives in one flat vector, (1 + p + p^2,)."""
    with torch.enable_grad():
        leaf = at.detach().requires_grad_()
        value = function(leaf, *batch)
        (gradient,) = torch.autograd.grad(value, leaf, create_graph=True)
        eye = torch.eye(len(at)).to(gradient)
        (bend,) = torch.autograd.grad(gradient, leaf, eye, is_grads_batched=True)
    return torch.cat([value.detach().view(1), gradient.detach(), bend.flatten()])
