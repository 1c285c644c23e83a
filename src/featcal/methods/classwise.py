"""Class-based temperature scaling: one temperature a class (Frenkel and Goldberger, 2021)."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from featcal.core.arguments import check_choice, check_flags
from featcal.core.calibrator import LogitMap
from featcal.core.descend import published_lbfgs
from featcal.core.errors import InputError
from featcal.core.fitting import Problem, StepReport
from featcal.core.loss import CRITERIA, measure
from featcal.core.steps import settle
from featcal.core.tempering import temper
from featcal.core.threads import calm
from featcal.methods.classwise_fit import Classwise, by_logit, by_predicted_class
from featcal.methods.classwise_search import greedy_by_logit, greedy_by_predicted_class

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
