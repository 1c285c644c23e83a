"""Soft bins give the calibration error a gradient (Karandikar et al., NeurIPS 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from featcal.core.arguments import check_whole
from featcal.core.errors import InputError
from featcal.losses.base import TrainingLoss
from featcal.losses.probabilities import label_logs, root, top_label

EMPTY = 1e-12  # rows; a bin with less adds less than that to the error


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class SoftECE(TrainingLoss):
    """Cross-entropy plus weight times a soft-binned calibration error of the batch.

    A row of confidence r belongs to the bin of centre x_b by the share softmax_b(-(r - x_b)^2 /
    temperature). With s_b the sum of these shares over the rows and gap_b the mean of r - c in
    the bin, c = 1 where the prediction is right, the error is (sum_b s_b/n |gap_b|^norm)^(1/norm).

    Args:
        weight: of the error, at least 0.
        bins: of equal width, at least 1.
        temperature: above 0; the smaller, the harder the bins. 0.01 lets 15 bins overlap.
        norm: 2, as in the paper, or 1 as in ECE.
        reduction: "mean" or "sum", n times the whole.
    """

    name = "soft_ece"
    title = "Soft ECE"

    weight: float = 1.0
    bins: int = 15
    temperature: float = 0.01
    norm: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        self._number("weight", lambda value: value >= 0, "from 0 up")
        self._number("temperature", lambda value: value > 0, "above 0")
        check_whole(self.name, 1, bins=self.bins, norm=self.norm)
        if self.norm > 2:
            raise InputError(f"{self.name}: norm is {self.norm}: choose 1 or 2")

    def mean(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy + weight error."""
        return self.weight * self.penalty(logits, labels) - label_logs(logits, labels).mean()

    def penalty(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The soft-binned error of the batch alone."""
        confidence, right = top_label(logits, labels)
        shares = self.shares(confidence)
        gaps = (shares * (confidence - right)[:, None]).sum(0) / len(right)  # (m,), s_b/n gap_b
        if self.norm == 1:
            return gaps.abs().sum()
        mass = shares.sum(0).clamp_min(EMPTY) / len(right)
        return root((gaps.square() / mass).sum())

    def shares(self, confidence: Tensor) -> Tensor:
        """How much of each row belongs to each bin: (n,) -> (n, m), rows sum to 1."""
        centres = torch.arange(self.bins, dtype=confidence.dtype, device=confidence.device)
        distance = confidence[:, None] - (centres + 0.5) / self.bins
        return (-distance.square() / self.temperature).softmax(1)
