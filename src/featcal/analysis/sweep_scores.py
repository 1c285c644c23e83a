"""What a sweep keeps of one split: a few sums for every threshold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from featcal.analysis.reading import entropies
from featcal.core.binning import bin_sums
from featcal.core.toplabel import predicted
from featcal.metrics.bins import Bins


@final
@dataclass(frozen=True, eq=False)
class SweepScores:
    """Scores of one split at t thresholds; float64.

    Attributes:
        rows: of the split.
        groups: how many of them are HCE and LCE, by the unclipped logits.
        sums: (t, 3, m) rows, summed confidence and right rows in m bins of the confidence.
        nll: (t,) mean negative log-likelihood.
        entropy: (t, 2) mean softmax entropy of HCE and of LCE rows, NaN for a group without rows.
    """

    rows: int
    groups: tuple[int, int]
    sums: Tensor
    nll: Tensor
    entropy: Tensor

    @property
    def ece(self) -> Tensor:
        """(t,) expected calibration error."""
        return (self.sums[:, 1] - self.sums[:, 2]).abs().sum(1) / self.rows

    @property
    def accuracy(self) -> Tensor:
        """(t,) the share of right rows."""
        return self.sums[:, 2].sum(1) / self.rows

    @property
    def confidence(self) -> Tensor:
        """(t,) the mean confidence."""
        return self.sums[:, 1].sum(1) / self.rows

    def bins(self, place: int) -> Bins:
        """The bins at one threshold, for its reliability diagram."""
        return Bins(*self.sums[place])

    def as_json(self) -> dict[str, Any]:
        """One list a column; per threshold and bin three numbers, from which all can be drawn."""
        count, confidence, correct = self.sums.unbind(1)
        names = ("ece", "nll", "accuracy", "confidence")
        wrong, right = self.entropy.T
        return {
            "rows": self.rows,
            "hce": self.groups[0],
            "lce": self.groups[1],
            **{name: _rounded(getattr(self, name), 7) for name in names},
            "entropy": {"hce": _rounded(wrong, 7), "lce": _rounded(right, 7)},
            "bins": {
                "count": count.long().tolist(),
                "confidence": [_rounded(row, 4) for row in confidence],
                "correct": correct.long().tolist(),
            },
        }


def _rounded(values: Tensor, digits: int) -> list[float]:
    return [round(value, digits) for value in values.tolist()]


@final
class Tally:
    """Sums for t thresholds while rows come in."""

    def __init__(self, thresholds: int, bins: int) -> None:
        self.bins = torch.zeros(thresholds, 3, bins, dtype=torch.float64)
        self.nll = torch.zeros(thresholds, dtype=torch.float64)
        self.entropy = torch.zeros(thresholds, 2, dtype=torch.float64)

    def add(self, place: int, logits: Tensor, labels: Tensor, masks: Sequence[Tensor]) -> None:
        """Adds rows at one threshold.

        Args:
            place: of the threshold.
            logits: (n, k) of the rows.
            labels: (n,).
            masks: which of the rows are HCE, and which are LCE.
        """
        sure, right = logits.softmax(1).amax(1), predicted(logits) == labels
        self.bins[place] += bin_sums(sure, right, self.bins.shape[2]).cpu()
        losses = F.cross_entropy(logits, labels, reduction="none")
        self.nll[place] += losses.sum(dtype=torch.float64).cpu()
        for group, mask in enumerate(masks):
            self.entropy[place, group] += entropies(logits[mask]).sum().cpu()

    def scores(self, rows: int, groups: tuple[int, int]) -> SweepScores:
        """The scores, once all rows are in."""
        sizes = torch.tensor(groups, dtype=torch.float64)
        return SweepScores(rows, groups, self.bins, self.nll / rows, self.entropy / sizes)
