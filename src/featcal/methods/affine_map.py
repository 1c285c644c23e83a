"""What all affine methods are: a weight and an offset on logits, or on what a method makes of them.

How the values are found is in `affine_fit`, how firmly they are held in `affine_folds`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from featcal.core.batch import Through, stored_logits
from featcal.core.calibrator import LogitMap
from featcal.core.errors import InputError
from featcal.core.fitting import Problem, StepReport
from featcal.core.steps import settle
from featcal.methods.affine_fit import Fitted, affine, parts

PERFECT = 1e-6  # a mean loss that only labels separated completely can reach


class AffineMap(LogitMap):
    """weight x + offset, where x are the logits or what `inputs` makes of them.

    Any class may overtake any other, so predictions are not kept.
    """

    quick = "temperature"
    weight: Tensor
    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(0))
        self.register_buffer("offset", torch.zeros(0))

    def inputs(self, logits: Tensor) -> Tensor:
        """What the map is applied to, (n, k)."""
        return logits

    def map_logits(self, logits: Tensor) -> Tensor:
        """The affine map; the identity before a fit."""
        if self.weight.numel() == 0:
            return logits
        dtype = logits.dtype
        return affine(self.inputs(logits), self.weight.to(dtype), self.offset.to(dtype))

    def check(self) -> None:
        """Weight and offset are finite and of the same classes."""
        classes = self.offset.numel()
        shapes = ((classes,), (classes, classes))
        fits = self.offset.ndim == 1 and tuple(self.weight.shape) in shapes
        finite = torch.isfinite(self.weight).all() and torch.isfinite(self.offset).all()
        if not fits or not bool(finite):
            raise InputError(
                f"{self.name}: weight {tuple(self.weight.shape)} and offset "
                f"{tuple(self.offset.shape)} must be finite and of the same classes"
            )

    def seen(self, problem: Problem) -> Through:
        """The data with the inputs in place of the logits."""
        return Through(
            problem.data, lambda batch: self.inputs(stored_logits(batch)), features=False
        )

    def settled(
        self,
        problem: Problem,
        fitted: Fitted,
        message: str,
        *,
        values: dict[str, float],
        details: dict[str, Any] | None = None,
        warning: str = "",
    ) -> StepReport:
        """Takes the fitted map over and reports it."""
        weight, bias = parts(fitted.values)
        self.assign(weight=weight, offset=bias)
        report = settle(
            self,
            problem,
            {**values, **_ranges(weight, bias)},
            message,
            converged=fitted.converged,
            warning=warning,
            details={"iterations": fitted.steps, **(details or {})},
        )
        return report if report.noop or warning else self._warned(report)

    def _warned(self, report: StepReport) -> StepReport:
        """The report, with a warning where the penalty is too weak for a minimum."""
        if report.loss_after < PERFECT:
            what = f"{self.name} fits every row of the fit split, as it will no unseen one"
            return replace(report, converged=False, warning=f"{what}: give a stronger penalty")
        if not report.converged:
            what = f"{self.name} had not settled after {report.details['iterations']} passes"
            return replace(report, warning=f"{what}: a stronger penalty makes it settle")
        return report


def _ranges(weight: Tensor, bias: Tensor) -> dict[str, float]:
    diagonal = weight if weight.ndim == 1 else weight.diagonal()
    ends = zip(("w_min", "w_max"), diagonal.aminmax(), strict=True)
    return {key: float(end) for key, end in (*ends, ("b_min", bias.min()), ("b_max", bias.max()))}


def strength(method: str, key: str, value: object) -> float:
    """The strength of a penalty, refused unless it is a finite number of at least 0."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= float(value) < math.inf:  # type: ignore[arg-type]
        raise InputError(f"{method}: {key} is {value!r}: give a finite number, 0 or above")
    return value if type(value) in (int, float) else float(value)  # type: ignore[arg-type, return-value]
