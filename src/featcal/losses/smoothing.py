"""Label smoothing (Szegedy et al., CVPR 2016): part of each target goes to other classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

from torch import Tensor

from featcal.core.arguments import check_choice
from featcal.losses.base import RowLoss
from featcal.losses.probabilities import target_logs


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class LabelSmoothing(RowLoss):
    """Cross-entropy with smoothed targets.

    spread "others": 1 - alpha on the label, alpha / (k - 1) on each other class, as published.
    spread "all": alpha / k on every class and 1 - alpha more on the label, as in torch. The first
    with alpha is the second with alpha k / (k - 1). Soft targets are smoothed by the same linear
    map of their mass.

    Args:
        alpha: the mass taken from the label, from 0 to below 1; 0 is cross-entropy.
        spread: which classes share it.
        reduction: "mean" or "sum".
    """

    name = "label_smoothing"
    title = "LS-0.05"
    soft_targets = True

    alpha: float = 0.05
    spread: Literal["others", "all"] = "others"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._number("alpha", lambda value: 0 <= value < 1, "from 0 to below 1")
        check_choice(self.name, "spread", self.spread, ("others", "all"))

    def rows(self, logits: Tensor, labels: Tensor) -> Tensor:
        """-sum_k t_k log q_k of the smoothed targets t."""
        classes = logits.shape[1]
        alpha = self.alpha * (classes / (classes - 1) if self.spread == "others" else 1.0)
        uniform = logits.log_softmax(1).mean(1)
        return -(1 - alpha) * target_logs(logits, labels) - alpha * uniform
