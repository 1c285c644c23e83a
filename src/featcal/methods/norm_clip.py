"""Norm clipping: z * min(1, c / ||x||), so that no row counts as longer than c.

Long feature vectors come with large logits, whether the row is right or not. For a linear head
without a bias this is the head of x shortened to length c; done to the logits it keeps every
prediction, suits any head and costs no further product of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from torch import Tensor

from featcal.core import dist
from featcal.core.batch import (
    Batch,
    Data,
    Head,
    Through,
    features_of,
    stored_logits,
    unchecked,
    wide,
)
from featcal.core.calibrator import Calibrator
from featcal.core.fit import Problem, StepReport, applied, measure, refitted, refitting
from featcal.core.progress import calm
from featcal.core.sample import hashed_sample
from featcal.core.scalar import Point, Walk, best_of, minimize_log, refine
from featcal.heads.head import head_logits

GAIN = 1e-7  # nats: a smaller gain over c = inf is rounding
SAMPLE = 2**12  # rows that are scanned; more tell a scan nothing new
LOWEST = 100.0  # how far below the typical norm thresholds are tried
POINTS = 21  # of the scan


@final
class NormClip(Calibrator):
    """z * min(1, c / ||x||), with one c for the whole network; the prediction stays.

    Rows no longer than c stay as they are. c = inf is the identity; it is always a candidate, and a
    fit that ends there is reported as a no-op.

    Args:
        threshold: c itself, applied as given; None to have it fitted.
    """

    name = "norm_clip"
    title = "norm clipping"
    symbols: ClassVar[dict[str, str]] = {"threshold": "c"}
    keeps_accuracy = True
    quick = "temperature"
    any_head = True
    threshold: Tensor

    def __init__(self, *, threshold: float | None = None) -> None:
        super().__init__()
        self.register_number("threshold", math.inf, threshold)

    def forward(self, features: Tensor, head: Head) -> Tensor:
        """The head's logits, divided where the row is longer than c."""
        logits = head_logits(features, head)
        return toned(logits, norms_of(features).to(logits.dtype), self.threshold.to(logits.dtype))

    def learn(self, problem: Problem) -> list[StepReport]:
        """A scan and a walk over log c on a sample, then a walk on all rows."""
        if self.fixed:
            return applied(self, problem)
        self.reset()
        with calm(problem.facts.rows * problem.facts.classes):
            norms = [norms_of(features_of(batch)) for batch in problem.data]
            problem = refitting(problem)
            every = torch.cat([torch.zeros(0), *(part[:, 0].cpu() for part in norms)]).double()
            every = dist.gather(every)
            if len(every) <= SAMPLE:  # the loss is flat at c, and float32 hides its fifth digit
                norms = [part.double() for part in norms]
            score = scored(problem, norms)
            before = score(math.inf)
            silent = not float(every.max())
            best, settled = (Point(0.0, before), True) if silent else search(problem, score, every)
        if not best.score < before - GAIN:
            why = f"no-op: no threshold improves {problem.loss.name}, so no row is changed"
            if problem.then is None:  # the loss as all else measures it: nothing was changed
                before = problem.loss_before()
            return [StepReport(self.name, {"threshold": math.inf}, True, before, before, True, why)]
        c = math.exp(best.at)
        self.assign(threshold=c)
        touched, longest = float((every > c).double().mean()), float(every.max())
        message = f"c = {c:.4g}: {touched:.2%} of the rows are longer, and their logits are "
        message += f"divided by up to {longest / c:.3g}"
        details: dict[str, object] = {"rows_touched": touched, "fitted_with": None}
        if problem.then is not None:
            details["fitted_with"] = repr(problem.then)
            message += f", with {problem.then!r} refitted for every threshold"
        losses = (before, best.score, settled)
        return [StepReport(self.name, {"threshold": c}, False, *losses, message, details=details)]


def norms_of(features: Tensor) -> Tensor:
    """||x|| of each row, (n, 1)."""
    norms: Tensor = torch.linalg.vector_norm(wide(features), dim=1, keepdim=True)
    return norms


def toned(logits: Tensor, norms: Tensor, threshold: Tensor | float) -> Tensor:
    """The logits, times c / ||x|| where that is below 1."""
    return logits * (threshold / norms).clamp(max=1)


@dataclass(frozen=True, eq=False)
class Toned:
    """Rows with the logits of a threshold."""

    data: Data
    norms: list[Tensor]
    threshold: float

    def __iter__(self) -> Iterator[Batch]:
        for batch, norms in zip(self.data, self.norms, strict=True):
            logits = toned(stored_logits(batch), norms, self.threshold)
            yield unchecked(logits, batch.labels, None, batch.groups)


def scored(problem: Problem, norms: list[Tensor]) -> Callable[[float], float]:
    """The loss at a threshold, the later steps refitted where fitting is joint."""
    data = Through(problem.data, stored_logits, features=False)  # the norms are all they say

    def score(threshold: float) -> float:
        view, loss = refitted(problem, Toned(data, norms, threshold))
        return measure(view, problem.loss)[0] if loss is None else loss

    return score


def search(problem: Problem, score: Callable[[float], float], norms: Tensor) -> tuple[Point, bool]:
    """The best log threshold with its loss on all rows, and whether the search settled."""
    top, typical = float(norms.max()), float(norms[norms > 0].median())
    # Below every norm all rows are of one length, and a later temperature undoes what c does.
    low = max(typical / LOWEST, 0.0 if problem.then is None else 0.9 * float(norms.min()))
    if len(norms) <= SAMPLE:
        found = minimize_log(score, low, top, points=POINTS)
        return Point(math.log(found.at), found.score), found.converged
    facts = problem.facts
    part = hashed_sample(
        problem.data, SAMPLE, width=facts.width, classes=facts.classes, device=facts.device
    )
    few = replace(problem, source=[part], data=Through([part], stored_logits))
    rough = scored(few, [norms_of(features_of(part))])
    start = math.log(minimize_log(rough, low, top, points=POINTS).at)
    walk = Walk(math.log(low), math.log(top), evaluations=20, tolerance=1e-8)
    points, settled = refine(
        lambda u: score(math.exp(u)), [Point(start, score(math.exp(start)))], walk
    )
    return best_of(points), settled
