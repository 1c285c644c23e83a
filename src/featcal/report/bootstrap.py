"""The bootstrap of one recipe: the replicates of every metric, from rows as they are scored."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import final

import numpy as np
import torch
from torch import Tensor

from featcal.core import dist
from featcal.core.batch import Data
from featcal.core.checks import InputError
from featcal.core.progress import calm, tell
from featcal.core.rows import bin_edges, bin_index
from featcal.metrics import Ordered, Predictions, smooth_ece_of
from featcal.metrics.ordered import INTERVALS, MAX_TERMS, REACH, SMALLEST_WIDTH

# --- Resamples: the same rows drawn again with replacement, told by how often each row is drawn.
#
# Efron, "Bootstrap methods: another look at the jackknife", 1979. A sum over a resample is then a
# product of counts and values, and no row is ever copied. Recipes share the counts, so that the
# difference of two replicates is a paired one.

FEWEST, MOST = 100, 10_000  # fewer leave too little beyond the 2.5 % quantile, more move no digit
MATRIX = 2**20  # numbers of one factor of a product: 8 MiB


def checked_resamples(resamples: int) -> int:
    """The number of resamples: 0 for none, or 100 to 10,000."""
    number = _integer(resamples)
    if number != 0 and not FEWEST <= number <= MOST:
        raise InputError(f"resamples is {resamples!r}: pass 0 for none, or {FEWEST} to {MOST}")
    return number


def checked_seed(seed: int) -> int:
    """The seed, an integer of at least 0."""
    if _integer(seed) < 0:
        raise InputError(f"seed is {seed!r}: pass an integer of at least 0")
    return _integer(seed)


def _integer(value: int) -> int:
    try:
        return -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return -1


@final
@dataclass(frozen=True, eq=False)
class Resamples:
    """How often each of n rows is drawn in each of b resamples: (n, b) uint8, columns sum to n.

    Row i is row i of the data, counted over the ranks in their order.
    """

    counts: Tensor

    @classmethod
    def draw(cls, rows: int, resamples: int, seed: int = 0) -> Resamples:
        """The resamples of a seed: they depend on nothing else, and every process draws the same.

        >>> Resamples.draw(5, 100).counts.sum(0).unique().tolist()
        [5]
        """
        draw = np.random.default_rng(checked_seed(seed))
        # A byte is enough: a row drawn 256 times is rarer than one resample in 10^500.
        counts = np.empty((checked_resamples(resamples), rows), dtype=np.uint8)
        for counted in counts:
            counted[:] = np.bincount(draw.integers(0, rows, rows), minlength=rows)
        return cls(torch.from_numpy(counts.T.copy()))


def weighted_sums(values: Tensor, counts: Tensor) -> Tensor:
    """The sums of (v, n) values over the resamples of (n, b) counts: (v, b) float64."""
    sums = torch.zeros(len(values), counts.shape[1], dtype=torch.float64)
    for rows in row_blocks(len(counts), counts.shape[1]):
        sums.addmm_(values[:, rows], counts[rows].double())
    return sums


def row_blocks(rows: int, width: int) -> Iterator[slice]:
    """Slices of the rows, such that `width` numbers a row make a matrix of moderate size."""
    step = max(1, MATRIX // width)
    for start in range(0, rows, step):
        yield slice(start, start + step)


# --- Replicates of the class-wise calibration error, summed while the predictions stream by.
#
# A row holds fewer than m probabilities above 1 / m. They are kept, one by one, each with its cell
# (class and bin); all the others lie in the first bin of their class, and there the sums over
# all resamples are one product of the n x k gaps with the counts, and the gaps need not be kept.


@final
class ClassReplicates:
    """Sums over the rows seen so far, for b resamples.

    Attributes:
        counts: (n, b) how often each row is drawn in each resample.
        row: the row that comes next, counted over all ranks.
        bins: m.
    """

    def __init__(self, counts: Tensor, first_row: int, bins: int) -> None:
        self.counts, self.row, self.bins = counts, first_row, bins
        self._first: Tensor | None = None  # (k, b) summed gaps of the first bin of each class
        # (e, 3) row, cell and gap of each larger probability; a rank may have no rows at all
        self._others = [torch.zeros(0, 3, dtype=torch.float64)]

    def add(self, seen: Predictions) -> None:
        """Takes the next rows."""
        k = seen.probs.shape[1]
        if self._first is None:
            self._first = torch.zeros(k, self.counts.shape[1], dtype=torch.float64)
        for rows in row_blocks(len(seen), max(self._first.shape)):
            self._add(self._first, seen.probs[rows].cpu(), seen.labels[rows].cpu())

    def _add(self, first: Tensor, probs: Tensor, labels: Tensor) -> None:
        gaps = probs.to(torch.float64, copy=True)
        gaps[torch.arange(len(labels)), labels] -= 1
        above = probs > bin_edges(self.bins, probs.dtype)[1]
        row, column = above.nonzero(as_tuple=True)
        cell = column * self.bins + bin_index(probs[row, column], self.bins)
        entries = [(self.row + row).double(), cell.double(), gaps[row, column]]
        self._others.append(torch.stack(entries, 1))
        drawn = self.counts[self.row : self.row + len(labels)]
        first.addmm_(gaps.masked_fill_(above, 0).T, drawn.double())
        self.row += len(labels)

    def replicates(self, rows: int) -> Tensor:
        """The class-wise error on each resample, (b,), once all ranks have seen their rows."""
        assert self._first is not None
        first = dist.total(self._first)
        total = first.abs().sum(0)
        entries = dist.gather(torch.cat(self._others))
        with calm(0):
            for few in _by_class(entries, self.bins):
                total += self._of_class(few)
        return total / (rows * len(first))

    def _of_class(self, entries: Tensor) -> Tensor:
        """The summed |gap| of the cells of one class, all but the first, (b,)."""
        row, cell, gap = entries.unbind(1)
        gaps = torch.zeros(self.bins, len(row), dtype=torch.float64)
        gaps[cell.long() % self.bins, torch.arange(len(row))] = gap
        return (gaps @ self.counts[row.long()].double()).abs().sum(0)


def _by_class(entries: Tensor, bins: int) -> list[Tensor]:
    """Row, cell and gap of the entries, those of one class at a time."""
    entries = entries[entries[:, 1].argsort()]
    owner = torch.div(entries[:, 1], bins, rounding_mode="floor")
    _, size = torch.unique_consecutive(owner, return_counts=True)
    ends = size.cumsum(0).tolist()
    return [entries[start:end] for start, end in zip([0, *ends], ends, strict=False)]


# --- Replicates of every metric of the confidence: three cumulative sums over the sorted rows.
#
# A row drawn c times is a run of c equal confidences, and so is every tie of the data. Inside a run
# the cumulative confidence and the expected cumulative correctness grow linearly with the rank (see
# `metrics/ordered.py`), so their values at any rank follow from those at the ends of the runs.

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


# --- Replicates of the smooth calibration error: one product gives the series of every resample.
#
# See `metrics/kernel.py` for the cosine series. Its coefficients are sums over rows, so those of
# all
# resamples are the counts times a table of cosines; the fixed points are then found side by side.

BLOCK = 2**18  # numbers of one block of curves: 4 MiB of complex ones
CLOSE = 2.0**-34  # the metric itself knows its width to 2^-32
SECANTS = 12  # most resamples need five
BISECTIONS = 40  # for the few that are left


def smooth_replicates(ordered: Ordered, counts: Tensor) -> Tensor:
    """The smooth ECE of each of the b resamples of (n, b) counts, (b,) float64.

    The width s solves smECE_s = s, whose left side never rises with s: a secant inside a bracket,
    started at the width of the rows themselves.
    """
    start = max(smooth_ece_of(ordered), SMALLEST_WIDTH)
    series = _Series(ordered, counts, start)
    # |r_s| integrates to no less than the absolute value of the integral of r_s, which has no s.
    low = series.coefficients[0].abs().clamp(SMALLEST_WIDTH, 1)
    found = _fixed_points(series, low, start)
    small = (found <= SMALLEST_WIDTH + CLOSE).nonzero()[:, 0]
    if len(small):  # too narrow to be resolved: answered as the metric answers it
        found[small] = series.smoothed(found[small].clamp(max=SMALLEST_WIDTH), small)
    return found


def _fixed_points(series: _Series, low: Tensor, start: float) -> Tensor:
    """The width s of each resample at which the integral of |r_s| is s, to 2^-34: (b,)."""
    at, high = low.clamp(min=start), torch.ones_like(low)
    last, last_gap = at.clone(), torch.full_like(at, math.nan)
    left = torch.arange(len(at))  # those not found yet
    for secant in [True] * SECANTS + [False] * BISECTIONS:
        here, known, known_gap = at[left], last[left], last_gap[left]
        gap = series.smoothed(here, left) - here
        low[left], high[left] = (
            torch.where(gap > 0, here, low[left]),
            torch.where(gap > 0, high[left], here),
        )
        slope = (gap - known_gap) / (here - known)
        # With one point only: smECE_s falls by 0 (bias) to 1/2 (noise) where it meets s.
        wanted = here - gap / torch.where(slope < 0, slope, -1.25)
        inside = (wanted > low[left]) & (wanted < high[left])
        wanted = torch.where(inside & secant, wanted, (low[left] + high[left]) / 2)
        at[left], last[left], last_gap[left] = wanted, here, gap
        moved = (wanted - here).abs() > CLOSE
        left = left[moved & (high[left] - low[left] > CLOSE)]
        if len(left) == 0:
            break
    return at


@final
class _Series:
    """The cosine coefficients of b resamples, computed as far as the widths asked for need."""

    def __init__(self, ordered: Ordered, counts: Tensor, width: float) -> None:
        confidence = ordered.confidence.double()
        self.counts, self.angle = counts, confidence * math.pi
        self.weights = (confidence - ordered.correct.double()) / len(ordered)
        self.coefficients = torch.zeros(0, counts.shape[1], dtype=torch.float64)
        self._extend(_terms(0.8 * width))  # most resamples are a little less smooth than the data

    def smoothed(self, width: Tensor, which: Tensor) -> Tensor:
        """The integral of |r_s| of the resamples `which` at their widths, (a,) float64."""
        terms = _terms(float(width.min()))
        self._extend(terms)
        intervals = max(INTERVALS, 1 << (2 * terms - 3).bit_length())
        k = torch.arange(terms, dtype=torch.float64)
        step = max(1, BLOCK // intervals)
        areas = []
        for start in range(0, len(which), step):
            some = slice(start, start + step)
            damping = torch.exp(-0.5 * (math.pi * width[some, None] * k).square())
            areas.append(_area(self.coefficients[:terms, which[some]].T * damping, intervals))
        return torch.cat(areas)

    def _extend(self, terms: int) -> None:
        """Adds coefficients a_k = (2/n) sum_i (f_i - y_i) cos(pi k f_i) until there are `terms`."""
        if terms <= len(self.coefficients):
            return
        k = torch.arange(len(self.coefficients), terms, dtype=torch.float64)[:, None]
        more = torch.zeros(len(k), self.counts.shape[1], dtype=torch.float64)
        for rows in row_blocks(len(self.angle), max(more.shape)):
            table = (k * self.angle[rows]).cos_().mul_(self.weights[rows])
            more.addmm_(table, self.counts[rows].double())
        self.coefficients = torch.cat([self.coefficients, more * (1 + (k > 0).double())])


def _terms(width: float) -> int:
    return min(MAX_TERMS, math.ceil(REACH / max(width, SMALLEST_WIDTH))) + 1


def _area(coefficients: Tensor, intervals: int) -> Tensor:
    """The trapezoidal integral over [0, 1] of |sum_k c_k cos(pi k t)|: (a, terms) -> (a,)."""
    spectrum = torch.zeros(len(coefficients), intervals + 1, dtype=torch.complex128)
    spectrum[:, : coefficients.shape[1]] = coefficients / 2
    spectrum[:, 0] *= 2
    curve: Tensor = torch.fft.irfft(spectrum, n=2 * intervals, norm="forward")
    curve = curve[:, : intervals + 1].abs()
    return (curve.sum(1) - (curve[:, 0] + curve[:, -1]) / 2) / intervals


LARGE = 2**25  # counts beyond which products over all of them pay for threads


@final
class Bootstrap:
    """Kept of each row: its loss and squared error, and what the class-wise error needs.

    Attributes:
        seconds: spent so far, which is no part of what a recipe costs.
    """

    def __init__(self, resamples: Resamples, first_row: int, bins: int) -> None:
        self.counts, self.bins = resamples.counts, bins
        self.classes = ClassReplicates(self.counts, first_row, bins)
        self.losses: list[Tensor] = []  # (rows, 2)
        self.seconds = 0.0

    def add(self, seen: Predictions) -> None:
        """Takes the next rows."""
        started = perf_counter()
        true = seen.probs.gather(1, seen.labels[:, None])[:, 0].double()
        squares = seen.probs.square().sum(1, dtype=torch.float64)
        losses = torch.stack([-seen.log_true.double(), squares + (1 - 2 * true)], 1)
        self.losses.append(losses.cpu())
        self.classes.add(seen)
        self.seconds += perf_counter() - started

    def replicates(self, ordered: Ordered) -> dict[str, Tensor]:
        """Name -> (b,) float64, the metric on each resample; the same on every rank.

        Args:
            ordered: confidence and correctness of the rows of all ranks, in their order.
        """
        started = perf_counter()
        losses = dist.gather(torch.cat(self.losses))
        with calm(self.counts.numel(), LARGE):
            nll, brier = weighted_sums(losses.T, self.counts) / len(losses)
            found = {
                "nll": nll,
                "brier": brier,
                "classwise_ece": self.classes.replicates(len(losses)),
                "smooth_ece": smooth_replicates(ordered, self.counts),
                **ranked_replicates(ordered, self.counts, self.bins),
            }
        self.seconds += perf_counter() - started
        return found


def first_row(data: Data) -> int:
    """How many rows lie on the ranks before this one."""
    if not dist.active():
        return 0
    sizes = dist.gather(torch.tensor([sum(map(len, data))]))
    return int(sizes[: dist.rank()].sum())
