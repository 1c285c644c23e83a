"""Dual focal loss (Tao, Dong and Xu, ICML 2023): focal loss with an eye on the next class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from featcal.losses.base import RowLoss
from featcal.losses.probabilities import NO_LABEL


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class DualFocal(RowLoss):
    """-(1 - p + p_j)^gamma log p, p_j the largest probability strictly below p, or 0 if none is.

    Classes tied with the label's are passed over, as published. Ties are told by the logits, which
    differ where probabilities have been rounded to one number. The gradient flows through p and
    p_j.

    Args:
        gamma: at least 0; 0 is cross-entropy. The authors choose it for each network.
        reduction: "mean" or "sum".
    """

    name = "dual_focal"
    title = "Dual Focal Loss"

    gamma: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._number("gamma", lambda value: value >= 0, "from 0 up")

    def rows(self, logits: Tensor, labels: Tensor) -> Tensor:
        """-(1 - p + p_j)^gamma log p."""
        logs = logits.log_softmax(1)
        log_p = -F.nll_loss(logs, labels, reduction="none", ignore_index=NO_LABEL)
        own = logits.detach().gather(1, labels[:, None])
        below = torch.where(logits.detach() < own, logs.exp(), 0.0).amax(1)
        # 1 - p + p_j is 0 when p rounds to 1: a power below 1 has an infinite slope there.
        base = (below - torch.expm1(log_p)).clamp_min(torch.finfo(logs.dtype).tiny)
        return -base.pow(self.gamma) * log_p
