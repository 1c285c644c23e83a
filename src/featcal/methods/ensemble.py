"""Ensemble temperature scaling: scaled, plain and uniform mixed (Zhang et al., ICML 2020).

Given t, the weights are a convex problem of three numbers that needs no more of a row than the
probabilities of its true class; so t alone is searched, with the best weights at every t.
"""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from featcal.core.arguments import check_choice, check_flags
from featcal.core.calibrator import LogitMap
from featcal.core.descend import published_lbfgs
from featcal.core.errors import InputError
from featcal.core.fitting import Problem, StepReport
from featcal.core.loss import CRITERIA, Loss, measure
from featcal.core.steps import settle
from featcal.core.threads import calm
from featcal.core.toplabel import keep_prediction
from featcal.methods.ensemble_weights import Array, Mixture, best_mixture

SMOOTH = [name for name, loss in CRITERIA.items() if loss.smooth]


@final
class EnsembleTemperature(LogitMap):
    """p = w0 softmax(z / t) + w1 softmax(z) + w2 / k, with w >= 0 and w0 + w1 + w2 = 1.

    Every part keeps the order of a row, so the prediction stays.

    Args:
        criterion: what t and w are chosen by: "nll" or "brier" (the original's squared error).
        reference: the form behind the paper's tables, which mixes logits instead of probabilities:
            w0 z / t + w1 z + w2 / k, t and then w by its L-BFGS. One scale in three parts, so it
            can do no more than temperature scaling.
    """

    name = "ensemble"
    keeps_accuracy = True
    quick = "temperature"
    temperature: Tensor
    weights: Tensor

    def __init__(self, *, criterion: str = "nll", reference: bool = False) -> None:
        super().__init__()
        check_choice(self.name, "criterion", criterion, SMOOTH)
        check_flags(self.name, reference=reference)
        if reference and criterion != "nll":
            raise InputError("ensemble: reference=True is fitted by nll: leave criterion out")
        self.criterion, self.reference = criterion, reference
        self.keeps_accuracy = not reference  # nothing there keeps the scale above 0
        self.register_buffer("temperature", torch.ones(()))
        self.register_buffer("weights", torch.zeros(0))

    def map_logits(self, logits: Tensor) -> Tensor:
        """The logarithm of the mixture."""
        if self.weights.numel() == 0:
            return logits
        temperature, weights = self.temperature.to(logits.dtype), self.weights.to(logits.dtype)
        if self.reference:
            return _mixed_logits(weights, logits / temperature, logits)
        scaled, plain = (logits / temperature).log_softmax(1), logits.log_softmax(1)
        parts = torch.stack([scaled, plain, torch.full_like(plain, -math.log(logits.shape[1]))])
        mixed = torch.logsumexp(parts + weights.log()[:, None, None], 0)  # (3, n, k) -> (n, k)
        return keep_prediction(mixed, logits)

    def check(self) -> None:
        """T is one finite number above 0, and w three that are shares of 1."""
        temperature, weights = self.temperature, self.weights.double()
        lone = float(temperature) if temperature.numel() == 1 else math.nan
        if not 0 < (abs(lone) if self.reference else lone) < math.inf:
            raise InputError(
                f"ensemble: T is {temperature.tolist()}: it must be finite and above 0"
            )
        shares = self.reference or (bool((weights >= 0).all()) and abs(weights.sum() - 1) < 0.01)
        right = tuple(weights.shape) == (3,) and bool(torch.isfinite(weights).all()) and shares
        if weights.numel() and not right:
            raise InputError(f"ensemble: w is {weights.tolist()}: it must be three shares of 1")

    def learn(self, problem: Problem) -> list[StepReport]:
        """Searches t, with the best weights for every t; see `ensemble_weights`."""
        self.reset()
        criterion = CRITERIA[self.criterion]
        with calm(problem.facts.rows * problem.facts.classes):
            found = _published(problem) if self.reference else best_mixture(problem, criterion)
        if found is None:
            return [settle(self, problem, {}, "")]
        self.assign(temperature=found.temperature, weights=torch.from_numpy(found.weights))
        own = criterion is problem.loss
        if not self.reference and not own and not self._lowers(problem, criterion):
            self.reset()
            own = True
        return [self._report(problem, found, always=self.reference or not own)]

    def _lowers(self, problem: Problem, criterion: Loss) -> bool:
        before, now = measure(problem.data, criterion, criterion.after(self.map_logits))
        return now < before

    def _report(self, problem: Problem, found: Mixture, *, always: bool) -> StepReport:
        shares = dict(zip(("w0", "w1", "w2"), found.weights.tolist(), strict=True))
        return settle(
            self,
            problem,
            {"temperature": found.temperature, **shares},
            _what_was_found(found),
            converged=found.converged,
            warning=_doubt(found),
            details={"criterion": self.criterion, "iterations": found.steps},
            always=always,
        )


def _mixed_logits(weights: Tensor, scaled: Tensor, plain: Tensor) -> Tensor:
    return weights[0] * scaled + weights[1] * plain + weights[2] / plain.shape[1]


def _published(problem: Problem) -> Mixture:
    """T with w = (1, 0, 0), then w with t fixed, both as the paper's code does it."""
    data, classes = problem.data, problem.facts.classes
    first = published_lbfgs(lambda at, logits: logits / at, torch.ones(1), data, classes)
    temperature = float(first.at)
    second = published_lbfgs(
        lambda at, logits: _mixed_logits(at, logits / temperature, logits),
        torch.tensor([1.0, 0.0, 0.0]),
        data,
        classes,
    )
    settled = first.converged and second.converged
    weights: Array = second.at.cpu().numpy()
    return Mixture(temperature, weights, second.value, first.steps + second.steps, settled, False)


def _what_was_found(found: Mixture) -> str:
    if found.weights.tolist() == [1, 0, 0]:
        return f"T = {found.temperature:.4g} and no other part: the same as temperature scaling"
    scaled, plain, uniform = found.weights.tolist()
    return (
        f"T = {found.temperature:.4g} for {scaled:.2%} of the mixture, the network's own "
        f"probabilities for {plain:.2%}, the uniform ones for {uniform:.2%}"
    )


def _doubt(found: Mixture) -> str:
    if found.weights[2] == 1:
        return (
            "ensemble gives every row uniform probabilities: the logits are no better than guessing"
        )
    return found.capped * (
        f"ensemble stopped at the cap T = {found.temperature:.4g}: the logits separate the labels "
        "completely or are no better than guessing, so no temperature is best"
    )
