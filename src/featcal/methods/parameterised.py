"""Parameterised temperature scaling: T from a row's largest logits (Tomani et al., ECCV 2022)."""

from __future__ import annotations

import math
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from featcal.core import dist
from featcal.core.arguments import check_flags, check_whole
from featcal.core.batch import stored_logits
from featcal.core.calibrator import LogitMap
from featcal.core.descend import gathered
from featcal.core.errors import InputError
from featcal.core.fitting import Problem, StepReport
from featcal.core.steps import settle
from featcal.core.threads import calm
from featcal.methods.parameterised_fit import Fitted, Wanted, fit_network
from featcal.methods.parameterised_network import (
    default_start,
    length,
    log_change,
    raw_temperature,
    standardised,
    top_gaps,
    top_logits,
)

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
