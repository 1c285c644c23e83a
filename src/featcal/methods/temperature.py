"""Temperature scaling: softmax(z / T) (Guo et al., ICML 2017)."""

from __future__ import annotations

import math
from functools import partial
from typing import ClassVar, final

import numpy as np
import torch
from torch import Tensor

from featcal.core.calibrator import LogitMap
from featcal.core.checks import InputError, check_choice, check_flags
from featcal.core.fit import CRITERIA, Loss, Problem, StepReport, applied, measure
from featcal.core.gradient import published_lbfgs
from featcal.core.progress import calm
from featcal.core.scalar import Tempered, temper

GRID = np.arange(1, 101) / 10  # the temperatures of the grid search: 0.1, 0.2, ..., 10.0


@final
class Temperature(LogitMap):
    """z / T with one T > 0 for all classes; the order of a row's logits never reverses.

    T minimises the loss of the fit (NLL) or another criterion: see `core.scalar.temper`.

    Args:
        temperature: T itself, applied as given; None to have it fitted.
        criterion: what T is chosen by: "nll", "brier" or "ece"; None for the loss of the fit.
        grid: choose T among 0.1, 0.2, ..., 10.0, as the focal-loss study did.
        reference: the search behind the paper's tables: L-BFGS from T = 1 with step 0.02 and no
            line search, which stops a little short of the minimum.
    """

    name = "temperature"
    title = "temperature scaling"
    symbols: ClassVar[dict[str, str]] = {"temperature": "T"}
    keeps_accuracy = True
    temperature: Tensor

    def __init__(
        self,
        *,
        temperature: float | None = None,
        criterion: str | None = None,
        grid: bool = False,
        reference: bool = False,
    ) -> None:
        super().__init__()
        if criterion is not None:
            check_choice(self.name, "criterion", criterion, CRITERIA)
        check_flags(self.name, grid=grid, reference=reference)
        if reference and (grid or criterion is not None):
            raise InputError("temperature: reference=True fixes the search: leave the others out")
        self.criterion, self.grid, self.reference = criterion, grid, reference
        self.register_number("temperature", 1.0, temperature)

    def map_logits(self, logits: Tensor) -> Tensor:
        """Divides by T."""
        return logits / self.temperature.to(logits.dtype)

    def learn(self, problem: Problem) -> list[StepReport]:
        """Newton for the NLL; a scan and a walk in log T for any other loss."""
        if self.fixed:
            return applied(self, problem)
        near = 1 / float(self.temperature) if problem.warm else None
        self.reset()
        # In a refit for what an earlier step tries, nobody asks what the loss was without T.
        data, before = problem.data, math.inf if problem.warm else problem.loss_before()
        named = self.criterion is not None
        criterion = problem.criterion(str(self.criterion)) if named else problem.loss
        own = criterion is problem.loss
        with calm(problem.facts.rows * problem.facts.classes):
            found = self._search(problem, criterion, near)
        why = "each row's logits are all equal: no temperature matters"
        if found is not None and not self.reference:
            unscaled = before if own else measure(data, criterion)[0]
            if not found.loss < unscaled:
                found, why = None, "T = 1 is already the best temperature"
        if found is None:
            before = problem.loss_before()
            return [StepReport(self.name, {"temperature": 1.0}, True, before, before, True, why)]
        temperature = found.temperature
        self.assign(temperature=temperature)
        after = found.loss if own else measure(data, problem.loss.after(self.map_logits))[0]
        side, warning = "over" if temperature > 1 else "under", ""
        if found.capped.any():
            warning = (
                f"temperature stopped at its cap T = {temperature:.4g}: the logits are no better "
                "than guessing, so no temperature is best"
            )
        elif not found.converged and not self.reference:
            warning = f"the search for T had not settled when it stopped at {temperature:.4g}"
        message = warning or f"T = {temperature:.4g}: the network was {side}confident"
        values, ended = {"temperature": temperature}, (found.converged, message, warning)
        details = {"iterations": found.steps, "criterion": criterion.name}
        return [StepReport(self.name, values, False, before, after, *ended, details)]

    def _search(self, problem: Problem, criterion: Loss, near: float | None) -> Tempered | None:
        """The best T by the search that was asked for; None where no temperature matters."""
        data = problem.data
        if self.reference:
            start, classes = torch.ones(1), problem.facts.classes
            end = published_lbfgs(lambda at, logits: logits / at, start, data, classes)
            return Tempered(
                1 / end.at.cpu().numpy(), end.value, end.steps, end.converged, np.zeros(1)
            )
        if self.grid:  # the smallest among equals
            losses = [criterion.after(partial(torch.div, other=t)) for t in GRID.tolist()]
            scores = [measure(data, loss)[0] for loss in losses]
            best = int(np.argmin(scores))
            return Tempered(1 / GRID[best : best + 1], scores[best], len(GRID), True, np.zeros(1))
        return temper(data, criterion, start=near)
