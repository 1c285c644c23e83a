"""Feature clipping: head(clamp(x, -c, c)), c by validation NLL (Tao, Dong and Xu, AAAI 2025)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from featcal.core import dist
from featcal.core.arguments import check_choice, check_flags
from featcal.core.batch import Data
from featcal.core.calibrator import Calibrator, FeatureMap
from featcal.core.errors import InputError
from featcal.core.fitting import Problem, StepReport
from featcal.core.loss import CRITERIA, accuracy, confidence, measure
from featcal.methods.clip_search import Search, published_grid, search
from featcal.methods.clip_trials import Trial

SHARE = 0.99  # the accuracy guard of the published code


@final
class FeatureClip(FeatureMap):
    """x.clamp(-c, c) before the head, with one c for the whole network.

    For features after a ReLU the lower bound never acts. c = inf is the identity; it is always a
    candidate, and a fit that ends there is reported as a no-op. Clipping is not accuracy
    preserving: `min_accuracy` keeps it from costing too much.

    Args:
        criterion: what c is chosen by: "nll", "brier" or "ece".
        min_accuracy: the share of the unclipped accuracy that must remain, such as 0.99; None for
            no guard.
        reference: the published search instead: c = 0.01, 0.02, ..., 20.00, the accuracy above
            0.99 of the unclipped one, the smallest c among equals.
    """

    name = "clip"
    threshold: Tensor

    def __init__(
        self,
        *,
        criterion: str = "nll",
        min_accuracy: float | None = None,
        reference: bool = False,
    ) -> None:
        super().__init__()
        check_choice(self.name, "criterion", criterion, CRITERIA)
        check_flags(self.name, reference=reference)
        if min_accuracy is not None and not _is_share(min_accuracy):
            raise InputError(
                f"clip: min_accuracy is {min_accuracy!r}: give a share of the unclipped accuracy, "
                "above 0 and at most 1, such as 0.99"
            )
        self.criterion = criterion
        plain = min_accuracy is None or type(min_accuracy) in (int, float)
        self.min_accuracy = min_accuracy if plain else float(min_accuracy)  # type: ignore[arg-type]
        self.reference = reference
        self.register_buffer("threshold", torch.tensor(math.inf))

    def map_features(self, features: Tensor) -> Tensor:
        """clamp(x, -c, c)."""
        bound = self.threshold.to(features.dtype)
        return torch.clamp(features, -bound, bound)

    def check(self) -> None:
        """C is one number above 0, or infinite."""
        if self.threshold.numel() != 1 or not float(self.threshold) > 0:
            raise InputError(f"clip: threshold is {self.threshold.tolist()}: it must be above 0")

    def learn(self, problem: Problem) -> list[StepReport]:
        """Searches c; see `clip_search`."""
        criterion = CRITERIA[self.criterion]
        problem = replace(problem, then=_refittable(problem))
        find = published_grid if self.reference else search
        guard = self.min_accuracy or (SHARE if self.reference else 0.0)
        found = find(problem, criterion, guard)
        self.assign(threshold=found.best.threshold)
        return [self._report(problem, found)]

    def _report(self, problem: Problem, found: Search) -> StepReport:
        best, before = found.best, found.before
        noop = math.isinf(best.threshold)
        sure, right = measure(problem.data, confidence, accuracy) if noop else (0.0, 0.0)
        clipped, touched = (0.0, 0.0) if noop else clipped_share(problem.source, best.threshold)
        return StepReport(
            self.name,
            {"threshold": best.threshold},
            noop=noop,
            loss_before=before.loss,
            loss_after=best.loss,
            converged=found.converged,
            message=self._why_noop(sure, right, problem)
            if noop
            else _what_changed(best, before, clipped, problem.then),
            details={
                "criterion": self.criterion,
                "criterion_before": before.score,
                "criterion_after": best.score,
                "accuracy_before": before.accuracy,
                "accuracy_after": best.accuracy,
                "clipped_share": clipped,
                "rows_touched": touched,
                "fitted_with": None if problem.then is None else repr(problem.then),
            },
        )

    def _why_noop(self, sure: float, right: float, problem: Problem) -> str:
        if problem.then is not None:
            return (
                f"no-op: no threshold helps once {problem.then!r} is refitted: nothing is clipped"
            )
        if sure < right:
            return (
                "no-op: no threshold helps; on the whole clipping lowers confidence, and this "
                "network is underconfident on the fit split "
                f"(mean confidence {sure:.3f}, accuracy {right:.3f})"
            )
        guard = f" and keeps {self.min_accuracy} of the accuracy" if self.min_accuracy else ""
        return f"no-op: no threshold improves {self.criterion}{guard}, so nothing is clipped"


def _refittable(problem: Problem) -> Calibrator | None:
    """The later steps, where refitting them for every threshold costs no product of the head.

    Steps that act on logits, while the logits of a threshold fit into memory; any others are fitted
    after the clip has been chosen for itself.
    """
    dear = float(dist.largest(torch.tensor(float(not problem.data.kept))))
    then = problem.then
    return None if then is None or then.needs_features or dear else then


def _is_share(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1


def clipped_share(data: Data, threshold: float) -> tuple[float, float]:
    """The share of activations beyond the threshold, and of rows with at least one."""
    sums = torch.zeros(4, dtype=torch.float64)
    for batch in data:
        assert batch.features is not None
        sizes = batch.features.abs()
        clipped, touched = (sizes > threshold).count_nonzero(), sizes.amax(1) > threshold
        counts = (clipped, touched.sum(), sizes.numel(), len(batch))
        sums += torch.tensor([float(count) for count in counts], dtype=torch.float64)
    beyond, rows_beyond, activations, rows = dist.total(sums).tolist()
    return beyond / activations, rows_beyond / rows


def _what_changed(best: Trial, before: Trial, clipped: float, then: Calibrator | None) -> str:
    refitted = "" if then is None else f", with {then!r} refitted for every threshold"
    return (
        f"c = {best.threshold:.4g} clips {clipped:.2%} of the activations; "
        f"accuracy {before.accuracy:.4f} -> {best.accuracy:.4f}{refitted}"
    )
