"""MMCE, the maximum mean calibration error: a kernel's view of confidence against correctness.

Kumar et al. (ICML 2018). The kernel is exp(-|r - r'| / 0.4) of two confidences r and r'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from featcal.core.arguments import check_choice
from featcal.losses.base import TrainingLoss
from featcal.losses.probabilities import label_logs, root, top_label

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
