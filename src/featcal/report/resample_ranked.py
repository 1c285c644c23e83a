"""Replicates of every metric of the confidence: three cumulative sums over the sorted rows.

A row drawn c times is a run of c equal confidences, and so is every tie of the data. Inside a run
the cumulative confidence and the expected cumulative correctness grow linearly with the rank (see
`metrics/ordered.py`), so their values at any rank follow from those at the ends of the runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from featcal.core.binning import bin_index
from featcal.core.progress import tell
from featcal.core.threads import calm
from featcal.metrics import Ordered

NAMES = (
    *("accuracy", "confidence", "overconfidence", "ece", "mce", "rms_ce"),
    *("adaptive_ece", "debiased_ce", "auroc", "aurc"),
)
BLOCK = 2**18  # numbers of one block of resamples: the passes over it then find it in the cache


def ranked_replicates(ordered: Ordered, counts: Tensor, bins: int) -> dict[str, Tensor]:
    """Name -> (b,) values on the resamples, for each metric of confidence and correctness alone.

    Args:
        ordered: n rows.
        counts: (n, b) how often each row is drawn in each resample.
        bins: of the equal-width and of the equal-mass metrics.
    """
    runs = _Runs.of(ordered, bins)
    drawn = counts[runs.order].T.contiguous()  # (b, n)
    # Made before the loop: small results that outlive a block would leave holes in the memory.
    found = torch.empty(len(NAMES), len(drawn), dtype=torch.float64)
    step = max(1, BLOCK // len(ordered))
    with calm(0):
        for start in range(0, len(drawn), step):
            tell("resampling", start, len(drawn))
            part = runs.drawn(drawn[start : start + step]).metrics()
            found[:, start : start + step] = torch.stack([part[name] for name in NAMES])
    tell("resampling", len(drawn), len(drawn))
    return dict(zip(NAMES, found, strict=True))


@final
@dataclass(frozen=True, eq=False)
class _Runs:
    """The rows in ascending order of confidence, u runs of equal ones.

    Attributes:
        order: (n,) the rows, sorted.
        values: (2, n) float64 confidence and correctness of the sorted rows.
        ends: (u + 1,) rows up to the end of each run, 0 first; None when every run is one row.
        bins: (m,) runs up to the end of each equal-width bin.
        groups: (m,) rows up to the end of each equal-mass group.
        mixed: runs with a wrong row; the others add nothing to AUROC and AURC.
        harmonic: (n + 1,) see `_harmonic`.
    """

    order: Tensor
    values: Tensor
    ends: Tensor | None
    bins: Tensor
    groups: Tensor
    mixed: Tensor
    harmonic: Tensor

    @classmethod
    def of(cls, ordered: Ordered, bins: int) -> _Runs:
        n, order = len(ordered), ordered.confidence.argsort()
        confidence, correct = ordered.confidence[order], ordered.correct[order]
        values, run, size = torch.unique_consecutive(
            confidence, return_inverse=True, return_counts=True
        )
        small, larger = divmod(n, bins)
        return cls(
            order,
            torch.stack([confidence.double(), correct.double()]),
            None if len(values) == n else torch.cat([size.new_zeros(1), size.cumsum(0)]),
            torch.searchsorted(bin_index(values, bins), torch.arange(bins), right=True),
            (small + (torch.arange(bins) < larger).double()).cumsum(0),
            run[~correct].unique(),
            _harmonic(n),
        )

    def drawn(self, counts: Tensor) -> _Drawn:
        """The cumulative sums of some resamples; (b, n) counts of the sorted rows."""
        rows = torch.zeros(len(counts), counts.shape[1] + 1, dtype=torch.float64)
        rows[:, 1:] = counts
        sums = [rows.cumsum(1)]
        for values in self.values:
            sums.append(torch.zeros_like(rows))
            torch.mul(rows[:, 1:], values, out=sums[-1][:, 1:])
            sums[-1].cumsum_(1)
        if self.ends is not None:
            sums = [_columns(part, self.ends) for part in sums]
        return _Drawn(self, *sums)


def _harmonic(n: int) -> Tensor:
    """The sums over j = 1..k of 1/j + ... + 1/n, for k = 0..n: (n + 1,) float64.

    An error at place j counts in the error rate of the k >= j most confident, 1/k in each.
    """
    inverse = 1 / torch.arange(1, n + 1, dtype=torch.float64)
    tails = inverse.flip(0).cumsum(0).flip(0)
    return torch.cat([tails.new_zeros(1), tails.cumsum(0)])


def _columns(values: Tensor, index: Tensor) -> Tensor:
    """values[:, index], which numpy takes four times as fast."""
    return torch.from_numpy(values.numpy().take(index.numpy(), 1))


def _steps(sums: Tensor) -> Tensor:
    """What cumulative sums (b, m) add at each step."""
    return torch.diff(sums, dim=-1, prepend=sums.new_zeros(*sums.shape[:-1], 1))


@final
@dataclass(frozen=True, eq=False)
class _Drawn:
    """Some resamples: sums over the first 0, 1, ..., u runs, each (b, u + 1) float64."""

    runs: _Runs
    count: Tensor
    confidence: Tensor
    right: Tensor

    @property
    def n(self) -> int:
        return len(self.runs.order)

    def metrics(self) -> dict[str, Tensor]:
        """Name -> (b,)."""
        accuracy, confidence = self.right[:, -1] / self.n, self.confidence[:, -1] / self.n
        return {
            "accuracy": accuracy,
            "confidence": confidence,
            "overconfidence": confidence - accuracy,
            **self._equal_width(),
            **self._equal_mass(),
            **self._selective(),
        }

    def _equal_width(self) -> dict[str, Tensor]:
        sums = (self.count, self.confidence, self.right)
        count, confidence, right = (_steps(part[:, self.runs.bins]) for part in sums)
        total = confidence - right
        gap = total / count.clamp(min=1)  # an empty bin has no gap, and its total is 0
        return {
            "ece": total.abs().sum(1) / self.n,
            "mce": gap.abs().amax(1),
            "rms_ce": ((count * gap.square()).sum(1) / self.n).sqrt(),
        }

    def _equal_mass(self) -> dict[str, Tensor]:
        confidence, right = map(_steps, self._up_to(self.runs.groups))
        total = (confidence - right).abs().sum(1) / self.n
        count = _steps(self.runs.groups)
        some = count >= 2  # the variance of a smaller group is unknown
        count, confidence, right = count[some], confidence[:, some], right[:, some]
        share = right / count
        bias = share * (1 - share) / (count - 1)
        square = (count * ((confidence / count - share).square() - bias)).sum(1) / self.n
        return {"adaptive_ece": total, "debiased_ce": square.clamp(min=0).sqrt()}

    def _up_to(self, ranks: Tensor) -> list[Tensor]:
        """Summed confidence and expected correctness of the first `ranks` rows: (b, m) each."""
        wanted = ranks.expand(len(self.count), -1).contiguous()
        end = torch.searchsorted(self.count, wanted).clamp(min=1)  # rank 0 lies before every run
        start = end - 1
        before = self.count.gather(1, start)
        share = (wanted - before) / (self.count.gather(1, end) - before).clamp(min=1)
        sums = (self.confidence, self.right)
        return [torch.lerp(part.gather(1, start), part.gather(1, end), share) for part in sums]

    def _selective(self) -> dict[str, Tensor]:
        start, end = self.runs.mixed, self.runs.mixed + 1
        before, after = _columns(self.count, start), _columns(self.count, end)
        right_before, right_after = _columns(self.right, start), _columns(self.right, end)
        size, right = after - before, self.right[:, -1]
        wrong = size - (right_after - right_before)
        # A right row beats every wrong one before its run and, by half, those of its own.
        beaten_by = right[:, None] - (right_before + right_after) / 2
        pairs = right * (self.n - right)
        # The most confident rows come first here and last among the sorted ones.
        areas = [self.runs.harmonic.take((self.n - c).long()) for c in (before, after)]
        error = wrong / size.clamp(min=1)
        return {
            "auroc": torch.where(pairs > 0, (wrong * beaten_by).sum(1) / pairs, math.nan),
            "aurc": (error * (areas[0] - areas[1])).sum(1) / self.n,
        }
