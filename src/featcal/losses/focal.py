"""Focal losses, -(1 - p)^gamma log p: less weight on rows that are sure already.

Lin et al. (ICCV 2017) for detection; Mukhoti et al. (NeurIPS 2020) for calibration, with a gamma
that depends on the row (FLSD) or on the epoch (FLSc). The gradient flows through (1 - p) as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, final

import torch
from torch import Tensor

from featcal.core.arguments import check_flags
from featcal.core.errors import InputError
from featcal.losses.base import RowLoss, number
from featcal.losses.lambert import balancing_gamma
from featcal.losses.probabilities import label_logs, log_rest

STAGES = (100 / 350, 250 / 350)  # where the published FLSc changes gamma, of 350 epochs


def focal_rows(log_p: Tensor, gamma: Tensor | float) -> Tensor:
    """-(1 - p)^gamma log p of each row, gamma one number or one a row."""
    return -(gamma * log_rest(log_p)).exp() * log_p


def _not_negative(value: float) -> bool:
    return value >= 0


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Focal(RowLoss):
    """-(1 - p)^gamma log p.

    Args:
        gamma: at least 0; 0 is cross-entropy.
        reduction: "mean" or "sum".
    """

    name = "focal"
    title = "Focal Loss"

    gamma: float = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._number("gamma", _not_negative, "from 0 up")

    def rows(self, logits: Tensor, labels: Tensor) -> Tensor:
        """-(1 - p)^gamma log p."""
        return focal_rows(label_logs(logits, labels), self.gamma)


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class FLSD(RowLoss):
    """Focal loss with a gamma for each row, chosen by p without gradient.

    gamma is `low` where p is below the threshold and `high` elsewhere; the defaults are FLSD-53.
    In the closed form, rows below the threshold have the gamma at which focal loss pulls exactly
    as hard as cross-entropy (`balancing_gamma`, the Lambert W rule) instead of `low`.

    Args:
        low: gamma where p is low.
        high: gamma where p is high.
        threshold: the p from which on it is high, from 0 to 1; to 0.5 in the closed form, which
            has no gamma above 0 beyond.
        closed_form: a gamma of its own for each row below the threshold.
        reduction: "mean" or "sum".
    """

    name = "flsd"
    title = "FLSD-53"

    low: float = 5.0
    high: float = 3.0
    threshold: float = 0.2
    closed_form: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._number("low", _not_negative, "from 0 up")
        self._number("high", _not_negative, "from 0 up")
        check_flags(self.name, closed_form=self.closed_form)
        most = 0.5 if self.closed_form else 1.0
        self._number("threshold", lambda value: 0 <= value <= most, f"from 0 to {most:g}")

    def gammas(self, probs: Tensor) -> Tensor:
        """The gamma of each row, given p of its label's class: (n,) -> (n,), without gradient."""
        probs = probs.detach()
        low = balancing_gamma(probs) if self.closed_form else torch.full_like(probs, self.low)
        return torch.where(probs < self.threshold, low, self.high)

    def rows(self, logits: Tensor, labels: Tensor) -> Tensor:
        """-(1 - p)^gamma(p) log p."""
        log_p = label_logs(logits, labels)
        return focal_rows(log_p, self.gammas(log_p.exp()))


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class FLSc(RowLoss):
    """Focal loss whose gamma falls in three stages of training; the defaults are FLSc-531.

    The stages change at 100/350 and 250/350 of training, as published. `at` gives the focal loss
    of a stage; called by itself the loss is that of the first stage.

    Args:
        gammas: one for each stage, at least 0.
        reduction: "mean" or "sum".
    """

    name = "flsc"
    title = "FLSc-531"

    gammas: tuple[float, float, float] = (5.0, 3.0, 1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        given: object = self.gammas
        if not isinstance(given, (tuple, list)) or len(given) != len(STAGES) + 1:
            raise InputError(f"{self.name}: gammas is {given!r}: give three, as in (5, 3, 1)")
        kept = tuple(number(self.name, "gammas", g, _not_negative, "from 0 up") for g in given)
        object.__setattr__(self, "gammas", kept)

    def at(self, progress: float) -> Focal:
        """The focal loss at this share of training, from 0 to 1."""
        inside = number(self.name, "progress", progress, lambda v: 0 <= v <= 1, "from 0 to 1")
        stage = sum(inside >= change for change in STAGES)
        return _focal(self.gammas[stage], self.reduction)

    def rows(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Those of the first stage."""
        return self.at(0.0).rows(logits, labels)


@lru_cache
def _focal(gamma: float, reduction: Literal["mean", "sum"]) -> Focal:
    """One object for a whole stage, so that a captured graph lasts as long."""
    return Focal(gamma=gamma, reduction=reduction)
