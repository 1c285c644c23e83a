"""Temperature scaling: softmax(z / T) (Guo et al., ICML 2017)."""

from __future__ import annotations

import math
from typing import final

import numpy as np
import torch
from torch import Tensor

from featcal.core.calibrator import LogitMap
from featcal.core.checks import InputError, check_choice, check_flags
from featcal.core.fit import Problem, StepReport
from featcal.core.gradient import published_lbfgs
from featcal.core.loss import CRITERIA, Loss, measure
from featcal.core.progress import calm
from featcal.core.scalar import LOGIT_SCALE, Tempered, temper

ONE_THREAD = 2**25  # logits up to which one thread is quick, and never waits for a busy machine
GRID = np.arange(1, 101) / 10  # the temperatures of the grid search: 0.1, 0.2, ..., 10.0


@final
class Temperature(LogitMap):
    """z / T with one T > 0 for all classes; the order of a row's logits never reverses.

    T minimises the loss of the fit (NLL) or another criterion: see `core.tempering`.

    Args:
        criterion: what T is chosen by: "nll", "brier" or "ece"; None for the loss of the fit.
        grid: choose T among 0.1, 0.2, ..., 10.0, as the focal-loss study did.
        reference: the search behind the paper's tables: L-BFGS from T = 1 with step 0.02 and no
            line search, which stops a little short of the minimum.
    """

    name = "temperature"
    keeps_accuracy = True
    temperature: Tensor

    def __init__(
        self, *, criterion: str | None = None, grid: bool = False, reference: bool = False
    ) -> None:
        super().__init__()
        if criterion is not None:
            check_choice(self.name, "criterion", criterion, CRITERIA)
        check_flags(self.name, grid=grid, reference=reference)
        if reference and (grid or criterion is not None):
            raise InputError("temperature: reference=True fixes the search: leave the others out")
        self.criterion, self.grid, self.reference = criterion, grid, reference
        self.register_buffer("temperature", torch.ones(()))

    def map_logits(self, logits: Tensor) -> Tensor:
        """Divides by T."""
        return logits / self.temperature.to(logits.dtype)

    def check(self) -> None:
        """T is one finite number above 0."""
        if self.temperature.numel() != 1 or not 0 < float(self.temperature) < math.inf:
            raise InputError(
                f"temperature: T is {self.temperature.tolist()}: it must be finite and above 0"
            )

    def learn(self, problem: Problem) -> list[StepReport]:
        """Newton for the NLL; a scan and a walk in log T for any other loss."""
        self.reset()
        before, scale = problem.loss_before(), measure(problem.data, LOGIT_SCALE)[0]
        criterion = problem.loss if self.criterion is None else CRITERIA[self.criterion]
        with calm(problem.facts.rows * problem.facts.classes, ONE_THREAD):
            found = self._search(problem, criterion, scale)
        if found is None:
            return [_unchanged(before, "each row's logits are all equal: no temperature matters")]
        return [self._report(problem, criterion, before, found)]

    def _search(self, problem: Problem, criterion: Loss, scale: float) -> Tempered | None:
        if self.reference:
            return _published(problem)
        if self.grid:
            return _on_grid(problem, criterion)
        return temper(problem.data, criterion, scale=scale)

    def _report(
        self, problem: Problem, criterion: Loss, before: float, found: Tempered
    ) -> StepReport:
        temperature, after = found.temperature, found.loss
        own = criterion is problem.loss
        if not self.reference and not after < (
            before if own else measure(problem.data, criterion)[0]
        ):
            return _unchanged(before, "T = 1 is already the best temperature")
        self.assign(temperature=temperature)
        if not own:
            after = measure(problem.data, problem.loss.after(self.map_logits))[0]
        message = f"T = {temperature:.4g}: " + (
            "the network was overconfident" if temperature > 1 else "the network was underconfident"
        )
        warning = ""
        if found.capped.any():
            message = warning = _capped(temperature, at_top=bool(found.capped[0] > 0))
        elif not found.converged and not self.reference:
            message = warning = (
                f"the search for T had not settled when it stopped at {temperature:.4g}"
            )
        return StepReport(
            self.name,
            {"temperature": temperature},
            noop=False,
            loss_before=before,
            loss_after=after,
            converged=found.converged,
            message=message,
            warning=warning,
            details={"iterations": found.steps, "criterion": criterion.name},
        )


def _unchanged(loss: float, why: str) -> StepReport:
    return StepReport("temperature", {"temperature": 1.0}, True, loss, loss, True, why)


def _capped(temperature: float, *, at_top: bool) -> str:
    why = (
        "the logits separate the labels completely, so the likelihood keeps growing as T falls"
        if at_top
        else "the logits are no better than guessing, so the likelihood keeps growing with T"
    )
    return f"temperature stopped at its cap T = {temperature:.4g}: {why}"


def _on_grid(problem: Problem, criterion: Loss) -> Tempered:
    """The best of 100 temperatures; the smallest among equals."""
    scores = [_at(problem, criterion, float(t)) for t in GRID]
    best = int(np.argmin(scores))
    return Tempered(1 / GRID[best : best + 1], scores[best], len(GRID), True, np.zeros(1))


def _at(problem: Problem, criterion: Loss, temperature: float) -> float:
    return measure(problem.data, criterion.after(lambda logits: logits / temperature))[0]


def _published(problem: Problem) -> Tempered:
    """L-BFGS on T itself, by the paper's settings."""
    data, classes = problem.data, problem.facts.classes
    found = published_lbfgs(lambda at, logits: logits / at, torch.ones(1), data, classes)
    inverse = 1 / found.at.cpu().numpy()
    return Tempered(inverse, found.value, found.steps, found.converged, np.zeros(1))
