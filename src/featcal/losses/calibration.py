"""Cross-entropy plus a calibration error of the batch: of a kernel (MMCE), or of soft bins."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from featcal.losses import base

WIDTH = 0.4  # of the kernel of MMCE
EMPTY = 1e-12  # rows; a soft bin with less adds less than that to the error
FLAT = 1e-12  # below this a square counts as 0: its root is the rounding of a float32 near 1


@dataclass(frozen=True, kw_only=True, repr=False)
class Penalised(base.TrainingLoss):
    """Cross-entropy plus weight times a penalty on the batch as a whole."""

    weight: float = base.not_negative(1.0)

    def mean(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy + weight penalty."""
        return self.weight * self.penalty(logits, labels) - base.label_logs(logits, labels).mean()

    @abstractmethod
    def penalty(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The calibration error of the batch alone."""


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class MMCE(Penalised):
    """Cross-entropy plus weight times MMCE, the maximum mean calibration error of the batch.

    Kumar et al. (ICML 2018). With r the confidence, c = 1 where the prediction is right and 0
    elsewhere, v a weight for each row and the kernel k(r, r') = exp(-|r - r'| / 0.4),
    MMCE = sqrt(sum_ij v_i v_j (c_i - r_i)(c_j - r_j) k(r_i, r_j)), a norm:

    - variant "plain": v = 1/n. It vanishes where confidence is right on average.
    - variant "weighted": v = 1/m on the m right rows and 1/n' on the n' wrong ones, so that few
      wrong rows count as much as many right ones. In a batch all right or all wrong it is the
      plain one. It does not vanish at calibration, and pulls the confidence below the accuracy.

    form "published" is what the published training code computes. Plain: the square, no root.
    Weighted: the three means over pairs are divided by m^2, n'^2 and m n' once more, which leaves
    little but the wrong rows' term, and the penalty is 0 in a batch all right or all wrong. There
    the argument of the root may fall below 0, which gave NaN: here it stops at 0.

    Args:
        weight: of MMCE, at least 0.
        variant: which rows count how much; the paper's tables have the weighted one.
        form: as intended, or as published.
        reduction: "mean" or "sum"; the published sum is n times the whole, as here.
    """

    name = "mmce"
    title = "MMCE"

    weight: float = base.not_negative(2.0)
    variant: Literal["plain", "weighted"] = base.choice("plain", "weighted")
    form: Literal["intended", "published"] = base.choice("intended", "published")

    def penalty(self, logits: Tensor, labels: Tensor) -> Tensor:
        """MMCE of the batch alone."""
        confidence, right = base.top_label(logits, labels)
        rights = right.sum()
        wrongs = len(right) - rights
        if self.form == "published" and self.variant == "weighted":
            kernel = _kernel(confidence)

            def mean_again(one: Tensor, other: Tensor, count: Tensor) -> Tensor:
                mean = (one[:, None] * other * kernel).sum() / count.clamp_min(1)
                return mean / (count + 1e-5)

            sure, unsure = (1 - right) * confidence, right * (1 - confidence)
            square = mean_again(unsure, unsure, rights * rights)
            square = square + mean_again(sure, sure, wrongs * wrongs)
            square = square - 2 * mean_again(unsure, sure, rights * wrongs)
            some_of_each = rights * wrongs > 0
            return torch.where(some_of_each, (square.clamp_min(0.0) + 1e-10).sqrt(), 0.0)
        share: Tensor | float = 1 / len(right)
        if self.variant == "weighted":
            share = torch.where(right > 0, 1 / rights.clamp_min(1), 1 / wrongs.clamp_min(1))
        residual = share * (right - confidence)
        # No matrix product: autocast would take it to 16 bits.
        square = (residual[:, None] * residual * _kernel(confidence)).sum()
        return square if self.form == "published" else root(square)


def _kernel(confidence: Tensor) -> Tensor:
    return (-(confidence[:, None] - confidence).abs() / WIDTH).exp()  # (n, n)


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class SoftECE(Penalised):
    """Cross-entropy plus weight times a soft-binned calibration error of the batch.

    Soft bins give the error a gradient (Karandikar et al., NeurIPS 2021). A row of confidence r
    belongs to the bin of centre x_b by the share softmax_b(-(r - x_b)^2 / temperature). With s_b
    the sum of these shares over the rows and gap_b the mean of r - c in the bin, c = 1 where the
    prediction is right, the error is (sum_b s_b/n |gap_b|^norm)^(1/norm).

    Args:
        weight: of the error, at least 0.
        bins: of equal width, at least 1.
        temperature: above 0; the smaller, the harder the bins. 0.01 lets 15 bins overlap.
        norm: 2, as in the paper, or 1 as in ECE.
        reduction: "mean" or "sum", n times the whole.
    """

    name = "soft_ece"
    title = "Soft ECE"

    bins: int = base.whole(15)
    temperature: float = base.above_0(0.01)
    norm: int = base.choice(2, 1)

    def penalty(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The soft-binned error of the batch alone."""
        confidence, right = base.top_label(logits, labels)
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


def root(square: Tensor) -> Tensor:
    """The square root where it has a finite slope, and 0 with no slope from `FLAT` down.

    The squares here are squared norms of residuals. At 0 a norm has a kink, where 0 is a
    subgradient; the chain rule through sqrt would give 0 / 0 instead.
    """
    return torch.where(square > FLAT, square.clamp_min(FLAT).sqrt(), 0.0)
