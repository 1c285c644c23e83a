"""Logit clipping: clamp(z, -c, c), the ablation of Tao, Dong and Xu (AAAI 2025)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import final

import numpy as np
import torch
from torch import Tensor

from featcal.core import dist
from featcal.core.batch import Data, stored_logits
from featcal.core.calibrator import LogitMap
from featcal.core.checks import InputError, check_choice, check_flags
from featcal.core.fit import Problem, StepReport, settle
from featcal.core.loss import CRITERIA, Loss, accuracy, measure
from featcal.core.progress import calm, track
from featcal.core.rows import keep_prediction
from featcal.core.scalar import Minimum, Point, Walk, best_of, refine

Score = Callable[[float], float]  # a threshold -> the criterion there

TIES = ("keep", "first")
BETTER = 1e-7  # of the criterion: what a threshold must gain over none
SHARES = np.linspace(0.02, 0.98, 13)  # of the rows, by their largest |z|: where thresholds lie
RATIO, BELOW = 0.75, 12  # and then by steps of this ratio, so many at least,
SMALL = 0.05  # and as far as this: in nats, where whatever the network says hardly counts any more


@final
class LogitClip(LogitMap):
    """z.clamp(-c, c) after the head, with one c for all classes.

    Clamping makes ties: two classes beyond c become equal, and which of them is predicted is a rule
    and no longer the network's word. c = inf is the identity; it is always a candidate, and a fit
    that ends there is reported as a no-op. The search is by what is given out, ties and all.

    Args:
        criterion: what c is chosen by: "nll", "brier" or "ece".
        ties: "keep" gives the predicted class a place just ahead of its equals, so that accuracy is
            kept; "first" is the plain clamp, which predicts the first class among equals.
        reference: the published search: c = 0.00, 0.01, ..., 39.99, the smallest c among equals,
            by the NLL, and the plain clamp.
    """

    name = "logit_clip"
    quick = "temperature"
    threshold: Tensor

    def __init__(
        self, *, criterion: str = "nll", ties: str = "keep", reference: bool = False
    ) -> None:
        super().__init__()
        check_choice(self.name, "criterion", criterion, CRITERIA)
        check_choice(self.name, "ties", ties, TIES)
        check_flags(self.name, reference=reference)
        if reference and (criterion != "nll" or ties != "keep"):
            raise InputError("logit_clip: reference=True fixes the search: leave the others out")
        self.criterion, self.ties, self.reference = criterion, ties, reference
        self.keeps_accuracy = ties == "keep" and not reference
        self.register_buffer("threshold", torch.tensor(math.inf))

    def map_logits(self, logits: Tensor) -> Tensor:
        """clamp(z, -c, c), and the prediction put ahead where it was clamped."""
        return self._clamped(logits, self.threshold.to(logits.dtype))

    def _clamped(self, logits: Tensor, bound: Tensor) -> Tensor:
        clamped = torch.clamp(logits, -bound, bound)
        if not self.keeps_accuracy:
            return clamped
        # Ties the network made itself stay its own: only what was clamped is moved.
        return torch.where(clamped == logits, clamped, keep_prediction(clamped, logits))

    def check(self) -> None:
        """One c, not below 0."""
        if self.threshold.numel() != 1 or not float(self.threshold) >= 0:
            raise InputError(
                f"logit_clip: threshold is {self.threshold.tolist()}: it must not be below 0"
            )

    def learn(self, problem: Problem) -> list[StepReport]:
        """A scan over the sizes of the logits, then a walk."""
        self.reset()
        criterion = CRITERIA[self.criterion]

        def score(threshold: float) -> float:
            bound = torch.tensor(threshold, dtype=torch.float32)
            return measure(problem.data, criterion.after(lambda z: self._clamped(z, bound.to(z))))[
                0
            ]

        with calm(problem.facts.rows * problem.facts.classes):
            found = _published(score) if self.reference else _search(score, problem.data)
            before = measure(problem.data, criterion)[0]
        if not self.reference and not found.score < before - BETTER * abs(before):
            return [self._unchanged(problem)]
        self.assign(threshold=found.at)
        return [self._report(problem, criterion, found)]

    def _unchanged(self, problem: Problem) -> StepReport:
        loss = measure(problem.data, problem.loss)[0]
        why = f"no-op: no threshold improves {self.criterion}, so nothing is clamped"
        return StepReport(self.name, {"threshold": math.inf}, True, loss, loss, True, why)

    def _report(self, problem: Problem, criterion: Loss, found: Minimum) -> StepReport:
        clamped, tied = _touched(problem.data, found.at)
        before, after = measure(problem.data, accuracy, accuracy.after(self.map_logits))
        return settle(
            self,
            problem,
            {"threshold": found.at},
            f"c = {found.at:.4g} clamps {clamped:.2%} of the logits and ties the top of "
            f"{tied:.2%} of the rows; accuracy {before:.4f} -> {after:.4f}",
            converged=found.converged,
            details={
                "criterion": criterion.name,
                "clamped_share": clamped,
                "rows_tied": tied,
                "accuracy_before": before,
                "accuracy_after": after,
            },
            always=self.reference or criterion is not problem.loss,
        )


def _search(score: Score, data: Data) -> Minimum:
    """Thresholds spread over the rows' own sizes, and a walk from the best."""
    largest = largest_sizes(data)
    if not len(largest) or float(largest.max()) == 0:
        return Minimum(math.inf, math.inf, 0, True)
    at = np.quantile(largest.numpy(), SHARES)
    at = at[at > 0] if (at > 0).any() else largest[largest > 0].numpy()[:1]
    steps = max(BELOW, math.ceil(math.log(SMALL / at[0], RATIO)))
    logs = sorted({math.log(c) for c in [*at, *(at[0] * RATIO ** np.arange(1, steps + 1))]})
    points = [Point(u, score(math.exp(u))) for u in track("logit_clip: scan", logs)]
    walk = Walk(logs[0], math.log(float(largest.max())), evaluations=30, tolerance=1e-9)
    points, settled = refine(lambda u: score(math.exp(u)), points, walk)
    best = best_of(points)
    return Minimum(math.exp(best.at), best.score, len(points), settled)


def largest_sizes(data: Data) -> Tensor:
    """The largest |z| of each row, (n,) float64, of all processes."""
    rows = [stored_logits(batch).abs().amax(1).double().cpu() for batch in data if len(batch)]
    return dist.gather(torch.cat([torch.zeros(0, dtype=torch.float64), *rows]))


def _published(score: Score) -> Minimum:
    """The grid of the published ablation; the first c among equals."""
    grid = [step / 100 for step in range(4000)]
    scores = [score(c) for c in track("logit_clip: grid", grid)]
    best = int(np.argmin(scores))
    return Minimum(grid[best], scores[best], len(grid), True)


def _touched(data: Data, threshold: float) -> tuple[float, float]:
    """The share of logits beyond c, and of rows in which two or more share the clamped top."""
    sums = torch.zeros(4, dtype=torch.float64)
    for batch in data:
        logits = stored_logits(batch)
        beyond, above = logits.abs() > threshold, (logits >= threshold).sum(1)
        top = (above > 1) | (logits <= -threshold).all(1)
        counts = (beyond.sum(), top.sum(), logits.numel(), len(batch))
        sums += torch.tensor([float(count) for count in counts], dtype=torch.float64)
    clamped, tied, size, rows = dist.total(sums).tolist()
    return clamped / size, tied / rows
