"""MMCE, the maximum mean calibration error: a kernel's view of confidence against correctness.

Kumar et al. (ICML 2018). The kernel is exp(-|r - r'| / 0.4) of two confidences r and r'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from featcal.core.checks import InputError, check_choice, check_whole
from featcal.losses.base import TrainingLoss, label_logs, root, top_label

WIDTH = 0.4


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class MMCE(TrainingLoss):
    """Cross-entropy plus weight times MMCE of the batch.

    With r the confidence, c = 1 where the prediction is right and 0 elsewhere, and v a weight for
    each row, MMCE = sqrt(sum_ij v_i v_j (c_i - r_i)(c_j - r_j) k(r_i, r_j)), a norm:

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

    weight: float = 2.0
    variant: Literal["plain", "weighted"] = "plain"
    form: Literal["intended", "published"] = "intended"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._number("weight", lambda value: value >= 0, "from 0 up")
        check_choice(self.name, "variant", self.variant, ("weighted", "plain"))
        check_choice(self.name, "form", self.form, ("intended", "published"))

    def mean(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy + weight MMCE."""
        return self.weight * self.penalty(logits, labels) - label_logs(logits, labels).mean()

    def penalty(self, logits: Tensor, labels: Tensor) -> Tensor:
        """MMCE of the batch alone."""
        confidence, right = top_label(logits, labels)
        if self.form == "published" and self.variant == "weighted":
            return _published_weighted(confidence, right)
        share = _weights(right) if self.variant == "weighted" else 1 / len(right)
        square = _pair_sum(share * (right - confidence), confidence)
        return square if self.form == "published" else root(square)


def _weights(right: Tensor) -> Tensor:
    """1/m on the right rows, 1/n' on the wrong ones."""
    rights = right.sum()
    wrongs = len(right) - rights
    return torch.where(right > 0, 1 / rights.clamp_min(1), 1 / wrongs.clamp_min(1))


def _kernel(confidence: Tensor) -> Tensor:
    return (-(confidence[:, None] - confidence).abs() / WIDTH).exp()  # (n, n)


def _pair_sum(values: Tensor, confidence: Tensor) -> Tensor:
    """sum_ij v_i v_j k(r_i, r_j); no matrix product, which autocast would take to 16 bits."""
    return (values[:, None] * values * _kernel(confidence)).sum()


def _published_weighted(confidence: Tensor, right: Tensor) -> Tensor:
    kernel, rights = _kernel(confidence), right.sum()
    wrongs = len(right) - rights
    sure, unsure = (1 - right) * confidence, right * (1 - confidence)
    pairs = ((unsure, unsure, rights * rights), (sure, sure, wrongs * wrongs))
    first, second = (_mean_again(a, b, kernel, count) for a, b, count in pairs)
    third = _mean_again(unsure, sure, kernel, rights * wrongs)
    square = (first + second - 2 * third).clamp_min(0.0)
    return torch.where(rights * wrongs > 0, (square + 1e-10).sqrt(), 0.0)


def _mean_again(left: Tensor, right: Tensor, kernel: Tensor, count: Tensor) -> Tensor:
    """The mean over `count` pairs, divided by their number again."""
    mean = (left[:, None] * right * kernel).sum() / count.clamp_min(1)
    return mean / (count + 1e-5)


# --- Soft bins give the calibration error a gradient (Karandikar et al., NeurIPS 2021).

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
