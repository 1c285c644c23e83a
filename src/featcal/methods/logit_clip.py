"""Logit clipping: clamp(z, -c, c), the ablation of Tao, Dong and Xu (AAAI 2025)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar, final

import numpy as np
import torch
from torch import Tensor

from featcal.core import dist
from featcal.core.batch import Batch, Data, stored_logits
from featcal.core.calibrator import LogitMap, keep_prediction
from featcal.core.checks import InputError, check_choice, check_flags
from featcal.core.fit import CRITERIA, Problem, StepReport, accuracy, applied, measure, settle
from featcal.core.progress import calm, track
from featcal.core.scalar import Minimum, Point, Walk, best_of, refine

TIES = ("keep", "first")
BETTER = 1e-7  # of the criterion: what a threshold must gain over none
SHARES = np.linspace(0.02, 0.98, 13)  # of the rows, by their largest |z|: where thresholds lie
RATIO, BELOW = 0.75, 12  # and then by steps of this ratio, so many at least,
SMALL = 0.05  # and as far as this: in nats, where whatever the network says hardly counts any more
PUBLISHED = [step / 100 for step in range(4000)]  # the grid of the published ablation


@final
class LogitClip(LogitMap):
    """z.clamp(-c, c) after the head, with one c for all classes.

    Clamping makes ties: two classes beyond c become equal, and which of them is predicted is a rule
    and no longer the network's word. c = inf is the identity; it is always a candidate, and a fit
    that ends there is reported as a no-op. The search is by what is given out, ties and all.

    Args:
        threshold: c itself, applied as given; None to have it fitted.
        criterion: what c is chosen by: "nll", "brier" or "ece".
        ties: "keep" gives the predicted class a place just ahead of its equals, so that accuracy is
            kept; "first" is the plain clamp, which predicts the first class among equals.
        reference: the published search: c = 0.00, 0.01, ..., 39.99, the smallest c among equals,
            by the NLL, and the plain clamp.
    """

    name = "logit_clip"
    title = "logit clipping"
    symbols: ClassVar[dict[str, str]] = {"threshold": "c"}
    quick = "temperature"
    threshold: Tensor

    def __init__(
        self,
        *,
        threshold: float | None = None,
        criterion: str = "nll",
        ties: str = "keep",
        reference: bool = False,
    ) -> None:
        super().__init__()
        check_choice(self.name, "criterion", criterion, CRITERIA)
        check_choice(self.name, "ties", ties, TIES)
        check_flags(self.name, reference=reference)
        if reference and (criterion != "nll" or ties != "keep"):
            raise InputError("logit_clip: reference=True fixes the search: leave the others out")
        self.criterion, self.ties, self.reference = criterion, ties, reference
        self.keeps_accuracy = ties == "keep" and not reference
        self.register_number("threshold", math.inf, threshold)

    def map_logits(self, logits: Tensor) -> Tensor:
        """clamp(z, -c, c), and the prediction put ahead where it was clamped."""
        bound = self.threshold.to(logits.dtype)
        clamped = torch.clamp(logits, -bound, bound)
        if not self.keeps_accuracy:
            return clamped
        # Ties the network made itself stay its own: only what was clamped is moved.
        return torch.where(clamped == logits, clamped, keep_prediction(clamped, logits))

    def learn(self, problem: Problem) -> list[StepReport]:
        """A scan over the sizes of the logits, then a walk."""
        if self.fixed:
            return applied(self, problem)
        self.reset()
        criterion, data = problem.criterion(self.criterion), problem.data

        def score(threshold: float) -> float:
            self.assign(threshold=threshold)
            return measure(data, criterion.after(self.map_logits))[0]

        with calm(problem.facts.rows * problem.facts.classes):
            if self.reference:
                scores = [score(c) for c in track("logit_clip: grid", PUBLISHED)]
                best = int(np.argmin(scores))
                found = Minimum(PUBLISHED[best], scores[best], len(PUBLISHED), True)
            else:
                found = search(score, data)
            before = measure(data, criterion)[0]
        self.assign(threshold=found.at)
        if not self.reference and not found.score < before - BETTER * abs(before):
            self.reset()
            loss = measure(data, problem.loss)[0]
            why = f"no-op: no threshold improves {self.criterion}, so nothing is clamped"
            return [StepReport(self.name, {"threshold": math.inf}, True, loss, loss, True, why)]
        clamped, tied = touched_share(data, found.at)
        right, right_after = measure(data, accuracy, accuracy.after(self.map_logits))
        message = f"c = {found.at:.4g} clamps {clamped:.2%} of the logits and ties the top of "
        message += f"{tied:.2%} of the rows; accuracy {right:.4f} -> {right_after:.4f}"
        details = {
            "criterion": self.criterion,
            "clamped_share": clamped,
            "rows_tied": tied,
            "accuracy_before": right,
            "accuracy_after": right_after,
        }
        values, ended = {"threshold": found.at}, (found.converged, "", details)
        always = self.reference or criterion is not problem.loss
        return [settle(self, problem, values, message, *ended, always=always)]


def search(score: Callable[[float], float], data: Data) -> Minimum:
    """Thresholds spread over the rows' own sizes, and a walk from the best."""
    rows = [stored_logits(batch).abs().amax(1).double().cpu() for batch in data if len(batch)]
    largest = dist.gather(torch.cat([torch.zeros(0, dtype=torch.float64), *rows]))
    top = float(largest.max())
    if top == 0:
        return Minimum(math.inf, math.inf, 0, True)
    at = np.quantile(largest.numpy(), SHARES)
    at = at[at > 0] if (at > 0).any() else largest[largest > 0].numpy()[:1]
    steps = max(BELOW, math.ceil(math.log(SMALL / at[0], RATIO)))
    logs = sorted({math.log(c) for c in [*at, *(at[0] * RATIO ** np.arange(1, steps + 1))]})
    points = [Point(u, score(math.exp(u))) for u in track("logit_clip: scan", logs)]
    walk = Walk(logs[0], math.log(top), evaluations=30, tolerance=1e-9)
    points, settled = refine(lambda u: score(math.exp(u)), points, walk)
    best = best_of(points)
    return Minimum(math.exp(best.at), best.score, len(points), settled)


def touched_share(data: Data, threshold: float) -> tuple[float, float]:
    """The share of logits beyond c, and of rows in which two or more share the clamped top."""

    def sums_of(batch: Batch) -> Tensor:
        logits = stored_logits(batch)
        beyond, above = logits.abs() > threshold, (logits >= threshold).sum(1)
        top = (above > 1) | (logits <= -threshold).all(1)
        whole = torch.tensor([logits.numel(), len(batch)], device=logits.device)
        return torch.cat([torch.stack([beyond.sum(), top.sum()]), whole])

    clamped, tied, size, rows = dist.summed(map(sums_of, data), 4).tolist()
    return clamped / size, tied / rows
