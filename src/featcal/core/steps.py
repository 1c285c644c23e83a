"""Fitting steps in reading order: what each one is given, and what it leaves to the next."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial, reduce
from operator import or_
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from featcal.core.batch import Batch, Through, stored_logits
from featcal.core.fitting import Problem, Stepped, StepReport, rows_asked
from featcal.core.loss import measure

if TYPE_CHECKING:
    from featcal.core.calibrator import Calibrator

Mode = Literal["joint", "sequential"]
MODES: tuple[Mode, ...] = ("joint", "sequential")


def run_steps(steps: list[Calibrator], problem: Problem, mode: Mode) -> list[StepReport]:
    """Fits steps in reading order, each on the head the steps before it left.

    Joint fitting hands a step the later ones, to be refitted for every value it tries: the search
    over its own values then sees the loss of the whole pipeline, and no alternation is needed.
    """
    reports: list[StepReport] = []
    counted = 0  # the pass for the network's own logits counts with the first step
    for done, step in enumerate(steps):
        rest = steps[done + 1 :]
        later = reduce(or_, rest) if rest else None
        then = reduce(or_, (part.stand_in() for part in rest)) if rest and mode == "joint" else None
        started = perf_counter()
        learned = step.learn(replace(problem, then=then))
        passes = math.ceil((rows_asked(problem.head) - counted) / problem.facts.rows)
        counted, spent = rows_asked(problem.head), perf_counter() - started
        reports += [replace(part, head_passes=passes, seconds=spent) for part in learned]
        problem = after(problem, step, later)
    return reports


def after(problem: Problem, step: Calibrator, later: Calibrator | None = None) -> Problem:
    """The problem the later steps see: the head with this step on it."""
    head = None if problem.head is None else Stepped(step, problem.head)
    keep_features = later is not None and later.needs_features
    if head is not None and step.needs_features:
        data = Through(problem.source, head.of_batch, features=keep_features)
    else:
        data = Through(problem.data, partial(_on_logits, step), features=keep_features)
    return replace(problem, data=data, head=head, before=None)


def _on_logits(step: Calibrator, batch: Batch) -> Tensor:
    """What a step that needs no features makes of the logits at hand."""
    return step(batch.features, lambda _: stored_logits(batch))  # type: ignore[no-any-return]


def settle(
    step: Calibrator,
    problem: Problem,
    values: dict[str, Any],
    message: str,
    *,
    converged: bool = True,
    warning: str = "",
    details: dict[str, Any] | None = None,
    always: bool = False,
) -> StepReport:
    """Measures a step as it was just fitted; one that does not lower the loss goes back to birth.

    Args:
        step: the step, with its fitted values assigned.
        problem: what it was fitted to.
        values: the fitted values a reader wants to see, ready for JSON.
        message: one sentence for a person.
        converged: whether the search ended by its own rule.
        warning: what a person should look at before using the result.
        details: further figures, ready for JSON.
        always: keep the values whatever they do, as published forms and other criteria demand.
    """
    before = problem.loss_before()
    now = measure(after(problem, step).data, problem.loss)[0]
    details = {} if details is None else details
    if always or now < before:
        return StepReport(
            step.name, values, False, before, now, converged, message, warning, details
        )
    step.reset()
    why = f"no-op: {step.name} does not lower {problem.loss.name} on the fit split"
    return StepReport(step.name, {}, True, before, before, converged, why, details=details)
