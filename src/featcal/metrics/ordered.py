"""Metrics that need every confidence: equal-mass bins, cumulative and smooth errors, abstention.

Equal confidences have no order. Wherever rows are ranked, each row of a tied run counts with the
run's mean correctness, its expected value over all orders, so that no metric depends on the order
in which rows arrived.

There may be very many rows: 5 bytes are kept of each, 4 or 8 more are sorted, and the rest is done
to some rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from featcal.core import dist
from featcal.metrics.inputs import (
    Predictions,
    TopLabel,
    Values,
    checked_bins,
    checked_rows,
    top_label,
)

ROWS = 2**16  # at a time

# Of the smooth calibration error.
MAX_TERMS = 8192
NEGLIGIBLE = 1e-12  # the damping below which a term is left out
REACH = math.sqrt(-2 * math.log(NEGLIGIBLE)) / math.pi  # terms needed at width s: REACH / s
SMALLEST_WIDTH = REACH / MAX_TERMS  # 2.9e-4
INTERVALS = 4096  # of the grid |r| is integrated on, at least
BISECTIONS = 32  # the width is known to 2^-32
TURNS = 64  # products before a cosine is computed afresh, so that rounding cannot pile up


@final
@dataclass(frozen=True, slots=True, eq=False)
class Ordered:
    """Every row's confidence (n,), in the precision it came in, and correctness (n,) bool."""

    confidence: Tensor
    correct: Tensor

    @classmethod
    def of(cls, probs: Values = None, labels: Values = None, *, logits: Values = None) -> Ordered:
        """The rows of n predictions, given as probabilities or as logits."""
        return cls.of_predictions(top_label(probs, labels, logits=logits))

    @classmethod
    def of_predictions(cls, predictions: Predictions | TopLabel) -> Ordered:
        """The rows of predictions that are already read."""
        return cls(predictions.confidence.cpu(), predictions.correct.cpu())

    def __len__(self) -> int:
        return len(self.confidence)

    def __add__(self, other: Ordered) -> Ordered:
        # No rows must not widen the other's precision, which decides ties.
        if len(self) == 0 or len(other) == 0:
            return self if len(self) else other
        return Ordered(
            torch.cat([self.confidence, other.confidence]),
            torch.cat([self.correct, other.correct]),
        )

    def reduced(self) -> Ordered:
        """The rows of all processes."""
        # Ranks exchange one type: a rank without rows does not know the precision of the others.
        width = float(self.confidence.dtype.itemsize if len(self) else 0)
        widest = float(dist.largest(torch.tensor(width)))
        confidence = self.confidence.to(torch.float64 if widest == 8 else torch.float32)
        correct = dist.gather(self.correct.view(torch.uint8)).view(torch.bool)
        return Ordered(dist.gather(confidence), correct)

    def runs(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The distinct confidences, ascending, with all rows and the right rows of each.

        Some at a time, of `ROWS` rows together at most; a longer run comes by itself.

        >>> rows = Ordered(torch.tensor([0.75, 0.5, 0.75]), torch.tensor([True, True, False]))
        >>> [[part.tolist() for part in parts] for parts in rows.runs()]
        [[[0.5, 0.75], [1, 2], [1, 1]]]
        """
        # Numbers in [0, 1] lie in the order of their bits, of which the highest is not needed: the
        # correctness finds room, and one array is sorted in its place.
        kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[self.confidence.dtype.itemsize]
        keys = (self.confidence.contiguous().view(kind) * 2).add_(self.correct)
        keys.numpy().sort()
        start = 0
        while start < len(keys):
            part = keys[start : start + ROWS]
            bits, size = torch.unique_consecutive(part >> 1, return_counts=True)
            if start + ROWS < len(keys) and len(bits) > 1:  # the last run may go on
                bits, size = bits[:-1], size[:-1]
            ends = size.cumsum(0)
            right = torch.diff(F.pad((part & 1).cumsum(0), (1, 0))[F.pad(ends, (1, 0))])
            if len(bits) == 1:
                wrong, rows = (
                    torch.searchsorted(keys[start:], 2 * bits + key, right=True) for key in (0, 1)
                )
                size, right = rows, rows - wrong
            yield bits.view(self.confidence.dtype), size, right
            start += int(size.sum())

    def ranked(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Ascending confidences and expected correctness in float64, of up to `ROWS` rows a time.

        >>> rows = Ordered(torch.tensor([0.75, 0.5, 0.75]), torch.tensor([True, True, False]))
        >>> [(values.tolist(), correct.tolist()) for values, correct in rows.ranked()]
        [([0.5, 0.75, 0.75], [1.0, 0.5, 0.5])]
        """
        for values, size, right in self.runs():
            rows = int(size.sum())
            for start in range(0, rows, ROWS):
                some = size.clamp(max=min(ROWS, rows - start))  # cuts a run that comes by itself
                yield (
                    values.double().repeat_interleave(some),
                    (right.double() / size).repeat_interleave(some),
                )

    def groups(self, *, bins: int = 15) -> Tensor:
        """Count, summed confidence and summed correctness of m rank groups: (3, m) float64.

        The sorted rows are cut into groups of nearly equal size, the larger ones first.
        """
        m, rank = checked_bins(bins), 0
        small, larger = divmod(len(self), m)
        ends = (small + (torch.arange(m) < larger).long()).cumsum(0)
        sums = torch.zeros(3, m, dtype=torch.float64)
        for confidence, correct in self.ranked():
            at = torch.arange(rank, rank + len(correct))
            rows = torch.stack([torch.ones_like(confidence), confidence, correct])
            sums.index_add_(1, torch.searchsorted(ends, at, right=True), rows)
            rank += len(correct)
        return sums


def adaptive_ece_of(ordered: Ordered, *, bins: int = 15, reference: bool = False) -> float:
    """The calibration error over groups of nearly equal size (Nguyen and O'Connor, 2015).

    Args:
        ordered: the rows.
        bins: the number of groups.
        reference: do what the published tables did. Their edges are interpolated in the sorted
            confidences and their bins are (lo, hi], so all rows at the smallest confidence are
            dropped while n still counts them, and tied confidences leave bins empty.
    """
    n = checked_rows(len(ordered))
    if not reference:
        _, confidence, correct = ordered.groups(bins=bins)
        return float((confidence - correct).abs().sum()) / n
    order, m = ordered.confidence.sort().values, checked_bins(bins)
    # Points past the last row take its value, as the published interpolation did.
    at = torch.linspace(0, n, m + 1, dtype=torch.float64).clamp(max=n - 1)
    low, high = order[at.floor().long()].double(), order[at.ceil().long()].double()
    edges = (low + (high - low) * at.frac()).to(order.dtype)
    index = torch.bucketize(ordered.confidence, edges) - 1
    kept = index >= 0
    gap = ordered.confidence.double() - ordered.correct.double()
    sums = torch.zeros(m, dtype=torch.float64).index_add_(0, index[kept], gap[kept])
    return float(sums.abs().sum()) / n


def debiased_ce_of(ordered: Ordered, *, bins: int = 15) -> float:
    """Root mean square calibration error over rank groups, less its sampling bias.

    With confidence p_b and accuracy a_b of group b of n_b rows (Kumar, Liang and Ma, 2019),

        CE^2 = sum_b (n_b / n) [(p_b - a_b)^2 - a_b (1 - a_b) / (n_b - 1)],

    floored at 0; a group of fewer than two rows adds nothing.
    """
    n = checked_rows(len(ordered))
    sums = ordered.groups(bins=bins)
    count, confidence, correct = sums[:, sums[0] >= 2]
    accuracy = correct / count
    bias = accuracy * (1 - accuracy) / (count - 1)
    square = (count * ((confidence / count - accuracy).square() - bias)).sum() / n
    return float(square.clamp(min=0).sqrt())


def ks_error_of(ordered: Ordered) -> float:
    """Largest distance between cumulative confidence and correctness (Gupta et al., 2021).

    Within a tied run the difference grows linearly, so its maximum lies at the end of a run.
    """
    n = checked_rows(len(ordered))
    so_far, most = torch.zeros(1, dtype=torch.float64), 0.0
    for confidence, correct in ordered.ranked():
        gaps = torch.cat([so_far, confidence - correct]).cumsum(0)
        so_far, most = gaps[-1:], max(most, float(gaps.abs().max()))
    return most / n


def smooth_ece_of(ordered: Ordered) -> float:
    """Smooth calibration error, without bins (Blasiok and Nakkiran, "Smooth ECE", 2023).

    The width s at which the smoothed residual's integral equals s itself:

        r_s(t) = (1/n) sum_i K_s(t, f_i) (f_i - y_i),   smECE_s = integral of |r_s| over [0, 1]

    A Gaussian of width s reflected for ever at 0 and 1 is the heat kernel of [0, 1], so r_s is a
    cosine series with a factor exp(-(pi k s)^2 / 2) on term k: a few coefficients of the data,
    computed once, give it exactly for every s. smECE_s never rises with s, so the fixed point is
    found by bisection. One under 2.9e-4, the smallest width the terms resolve, is answered by smECE
    at that width.
    """
    checked_rows(len(ordered))
    residual = _Residual(ordered.confidence, ordered.correct)
    low, high = SMALLEST_WIDTH, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if residual.smoothed(middle) > middle else (low, middle)
    return residual.smoothed(SMALLEST_WIDTH) if low == SMALLEST_WIDTH else low


@final
class _Residual:
    """The cosine coefficients of f - y over f, computed as far as the widths asked for need."""

    def __init__(self, confidence: Tensor, correct: Tensor) -> None:
        self.rows = list(
            zip(torch.split(confidence, ROWS), torch.split(correct, ROWS), strict=True)
        )
        self.n = len(confidence)
        sums = [self._weights(*some).sum() for some in self.rows]
        self.coefficients = torch.stack(sums).sum().view(1)

    def _weights(self, confidence: Tensor, correct: Tensor) -> Tensor:
        return (confidence.double() - correct.double()) / self.n

    def smoothed(self, width: float) -> float:
        """The integral of |r_s|."""
        terms = series_terms(width)
        self._extend(terms)
        return float(
            smoothed_area(
                self.coefficients[None, :terms], torch.tensor([width], dtype=torch.float64)
            )
        )

    def _extend(self, terms: int) -> None:
        """Adds a_k = (2/n) sum_i (f_i - y_i) cos(pi k f_i) up to the wanted number of terms."""
        first = len(self.coefficients)
        if terms <= first:
            return
        more = torch.zeros(terms - first, dtype=torch.float64)
        for confidence, correct in self.rows:
            angle, weights = confidence.double() * math.pi, self._weights(confidence, correct)
            turn = torch.polar(torch.ones_like(angle), angle)
            for start in range(first, terms, TURNS):
                # cos(k x) is the real part of exp(ix)^k: a product costs a tenth of a cosine.
                wave = torch.polar(2 * weights, start * angle)
                sums = [wave.sum()]
                sums += [wave.mul_(turn).sum() for _ in range(min(TURNS, terms - start) - 1)]
                more[start - first :][: len(sums)] += torch.stack(sums).real
        self.coefficients = torch.cat([self.coefficients, more])


def series_terms(width: float) -> int:
    """How many terms of the series the widths down to this one need."""
    return min(MAX_TERMS, math.ceil(REACH / max(width, SMALLEST_WIDTH))) + 1


def smoothed_area(coefficients: Tensor, width: Tensor) -> Tensor:
    """The integral of |r_s| by the trapezoidal rule: (a, terms) coefficients, (a,) widths -> (a,).

    >>> smoothed_area(torch.tensor([[0.25, 0.0]], dtype=torch.float64), torch.ones(1)).item()
    0.25
    """
    terms = coefficients.shape[1]
    k = torch.arange(terms, dtype=torch.float64)
    damping = torch.exp(-0.5 * (math.pi * width[:, None] * k).square())
    # A power of two, for the FFT, with two intervals or more to the shortest half wave.
    intervals = max(INTERVALS, 1 << (2 * terms - 3).bit_length())
    # sum_k c_k cos(pi k t) at t = 0, 1 / intervals, ..., 1, by one inverse FFT.
    spectrum = torch.zeros(len(width), intervals + 1, dtype=torch.complex128)
    spectrum[:, :terms] = coefficients * damping / 2
    spectrum[:, 0] *= 2
    curve: Tensor = torch.fft.irfft(spectrum, n=2 * intervals, norm="forward")
    curve = curve[:, : intervals + 1].abs()
    return (curve.sum(1) - (curve[:, 0] + curve[:, -1]) / 2) / intervals


def auroc_of(ordered: Ordered) -> float:
    """The chance that a right row is more confident than a wrong one; ties count one half.

    NaN when all rows are right or all are wrong: there is nothing to separate.
    """
    checked_rows(len(ordered))
    n_right = int(ordered.correct.count_nonzero())
    pairs = n_right * (len(ordered) - n_right)
    won, below = 0.0, 0.0
    for _, size, all_right in ordered.runs():
        right, wrong = all_right.double(), (size - all_right).double()
        won += float((right * (below + wrong.cumsum(0) - wrong / 2)).sum())
        below += float(wrong.sum())
    return won / pairs if pairs else math.nan


def aurc_of(ordered: Ordered) -> float:
    """Area under the risk-coverage curve: the mean over k of the error of the k most confident.

    Within a tied run the expected number of errors grows linearly, which `Ordered.ranked` gives.
    """
    n = checked_rows(len(ordered))
    area, left, above = 0.0, n, float(n - int(ordered.correct.count_nonzero()))
    for _, correct in ordered.ranked():
        wrong = 1 - correct
        above, left = above - float(wrong.sum()), left - len(wrong)
        errors = above + wrong.flip(0).cumsum(0)
        area += float((errors / torch.arange(left + 1, left + 1 + len(wrong))).sum())
    return area / n


def e_aurc_of(ordered: Ordered) -> float:
    """AURC above that of a perfect order at the same error e (Geifman et al., 2019).

    The perfect order's area is taken in the limit of many rows, e + (1 - e) ln(1 - e); with few
    rows a perfect order therefore ends near 0, not at it.
    """
    aurc = aurc_of(ordered)
    accuracy = ordered.correct.count_nonzero().double() / len(ordered)
    return aurc - float(1 - accuracy + torch.xlogy(accuracy, accuracy))


def adaptive_ece(
    probs: Values = None,
    labels: Values = None,
    *,
    logits: Values = None,
    bins: int = 15,
    reference: bool = False,
) -> float:
    """Equal-mass calibration error, see `adaptive_ece_of`.

    >>> adaptive_ece(torch.tensor([[0.75, 0.25]]), torch.tensor([0]))
    0.25
    """
    ordered = Ordered.of(probs, labels, logits=logits)
    return adaptive_ece_of(ordered, bins=bins, reference=reference)


def debiased_ce(
    probs: Values = None, labels: Values = None, *, logits: Values = None, bins: int = 15
) -> float:
    """Debiased root mean square calibration error, see `debiased_ce_of`."""
    return debiased_ce_of(Ordered.of(probs, labels, logits=logits), bins=bins)


def ks_error(probs: Values = None, labels: Values = None, *, logits: Values = None) -> float:
    """Kolmogorov-Smirnov calibration error, see `ks_error_of`."""
    return ks_error_of(Ordered.of(probs, labels, logits=logits))


def smooth_ece(probs: Values = None, labels: Values = None, *, logits: Values = None) -> float:
    """Smooth calibration error of the confidence, see `smooth_ece_of`.

    >>> round(smooth_ece(torch.tensor([[1.0, 0.0]]), torch.tensor([1])), 6)  # sure and wrong
    1.0
    """
    return smooth_ece_of(Ordered.of(probs, labels, logits=logits))


def auroc(probs: Values = None, labels: Values = None, *, logits: Values = None) -> float:
    """Area under the ROC curve of confidence for right against wrong, see `auroc_of`.

    >>> auroc(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
    1.0
    """
    return auroc_of(Ordered.of(probs, labels, logits=logits))


def aurc(probs: Values = None, labels: Values = None, *, logits: Values = None) -> float:
    """Area under the risk-coverage curve, see `aurc_of`."""
    return aurc_of(Ordered.of(probs, labels, logits=logits))


def e_aurc(probs: Values = None, labels: Values = None, *, logits: Values = None) -> float:
    """Excess area under the risk-coverage curve, see `e_aurc_of`."""
    return e_aurc_of(Ordered.of(probs, labels, logits=logits))
