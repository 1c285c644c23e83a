"""Structured scaling: temperature, smoothing, then a penalised affine map (Berta et al., 2025).

Each kind of value is held in proportion to how many there are of it: k for the diagonal and for the
bias, k (k - 1) for the rest, in nats over all rows. With few rows the map stays close to
temperature scaling, and no cross-validation is needed.
"""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from featcal.core.errors import InputError
from featcal.core.fitting import Problem, StepReport
from featcal.core.threads import calm
from featcal.methods.affine_fit import Task, by_kind, descend, temperature_start
from featcal.methods.affine_map import AffineMap, strength


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
