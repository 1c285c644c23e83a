"""Cross-entropy, the Brier score, and cross-entropy that rewards entropy or smooths its labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from featcal.losses.base import RowLoss, checked, choice, label_logs, not_negative


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class CE(RowLoss):
    """Cross-entropy: -log p of the label's class, or -sum_k t_k log q_k of soft targets."""

    name = "ce"
    title = "Cross Entropy"
    soft_targets = True

    def rows(self, logits: Tensor, labels: Tensor) -> Tensor:
        """-log p."""
        return -target_logs(logits, labels)


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Brier(RowLoss):
    """The Brier score, sum_k (q_k - t_k)^2, from 0 to 2.

    The published recipe sums the other losses over a batch but averages this one: reduction "mean"
    is its published form.
    """

    name = "brier"
    title = "Brier Loss"
    soft_targets = True

    def rows(self, logits: Tensor, labels: Tensor) -> Tensor:
        """sum_k (q_k - t_k)^2."""
        probs = logits.softmax(1)
        if labels.is_floating_point():
            targets = labels.to(probs.dtype)
        else:
            targets = torch.zeros_like(probs).scatter(1, labels[:, None], 1.0)
        return (probs - targets).square().sum(1)


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class MaxEntropy(RowLoss):
    """Cross-entropy less beta times the entropy of the prediction, -sum_k q_k log q_k.

    The confidence penalty of Pereyra et al. (2017).

    Args:
        beta: the weight of the entropy, at least 0; 0 is cross-entropy.
        reduction: "mean" or "sum".
    """

    name = "max_entropy"
    title = "Entropy Penalty"
    soft_targets = True

    beta: float = not_negative(0.1)

    def rows(self, logits: Tensor, labels: Tensor) -> Tensor:
        """-log p - beta H(q)."""
        logs = logits.log_softmax(1)
        entropy = -(logs.exp() * logs).sum(1)
        return -target_logs(logits, labels) - self.beta * entropy


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class LabelSmoothing(RowLoss):
    """Cross-entropy with smoothed targets (Szegedy et al., CVPR 2016).

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

    alpha: float = checked(0.05, lambda value: 0 <= value < 1, "give a number from 0 to below 1")
    spread: Literal["others", "all"] = choice("others", "all")

    def rows(self, logits: Tensor, labels: Tensor) -> Tensor:
        """-sum_k t_k log q_k of the smoothed targets t."""
        classes = logits.shape[1]
        alpha = self.alpha * (classes / (classes - 1) if self.spread == "others" else 1.0)
        uniform = logits.log_softmax(1).mean(1)
        return -(1 - alpha) * target_logs(logits, labels) - alpha * uniform


def target_logs(logits: Tensor, labels: Tensor) -> Tensor:
    """sum_k t_k log q_k of each row: (n,); log p where labels are class numbers."""
    if not labels.is_floating_point():
        return label_logs(logits, labels)
    return (labels.to(logits.dtype) * logits.log_softmax(1)).sum(1)
