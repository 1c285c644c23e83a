"""The bootstrap: how much every metric varies when the rows are drawn again, and what that tells.

Efron, "Bootstrap methods: another look at the jackknife", 1979. In this order: the resamples, told
by how often each row is drawn; the replicates of each family of metrics (means, class-wise bins,
ranks, smooth ECE); intervals; verdicts.

A sum over a resample is a product of counts and values, so no row is ever copied. Recipes share the
counts, so that the difference of two replicates is a paired one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal, final

import numpy as np
import torch
from torch import Tensor

from featcal.core import dist
from featcal.core.batch import Data, bin_edges, bin_index
from featcal.core.checks import ArgumentError, InputError, whole_number
from featcal.core.fit import plain
from featcal.core.progress import calm, tell
from featcal.metrics import Ordered, Predictions
from featcal.metrics.columns import COLUMNS
from featcal.metrics.ordered import INTERVALS, SMALLEST_WIDTH, series_terms, smoothed_area

FEWEST, MOST = 100, 10_000  # fewer leave too little beyond the 2.5 % quantile, more move no digit
MATRIX = 2**20  # numbers of one factor of a product: 8 MiB
BLOCK = 2**18  # numbers of one block of resamples: the passes over it then find it in the cache
LARGE = 2**25  # counts beyond which products over all of them pay for threads


# --- resamples ---


def checked_resamples(resamples: int) -> int:
    """The number of resamples: 0 for none, or 100 to 10,000."""
    number = whole_number(resamples)
    if number != 0 and not FEWEST <= number <= MOST:
        raise ArgumentError(f"<resamples> is {resamples!r}: give 0 for none, or {FEWEST} to {MOST}")
    return number


def checked_seed(seed: int) -> int:
    """The seed, an integer of at least 0."""
    if whole_number(seed) < 0:
        raise InputError(f"seed is {seed!r}: pass an integer of at least 0")
    return seed


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


def row_blocks(rows: int, width: int) -> Iterator[slice]:
    """Slices of the rows, such that `width` numbers per row make a matrix of moderate size."""
    step = max(1, MATRIX // width)
    for start in range(0, rows, step):
        yield slice(start, start + step)


def first_row(data: Data) -> int:
    """How many rows lie on the ranks before this one."""
    if not dist.active():
        return 0
    sizes = dist.gather(torch.tensor([sum(map(len, data))]))
    return int(sizes[: dist.rank()].sum())


# --- replicates ---


@final
class Bootstrap:
    """The replicates of every metric of one recipe, from its rows as they are scored.

    Kept of each row are its loss and squared error, and what the class-wise error needs. A row
    holds fewer than m probabilities above 1 / m. They are kept, one by one, each with its cell
    (class and bin); all the others lie in the first bin of their class, and there the sums over all
    resamples are one product of the n x k gaps with the counts: the gaps are not kept.

    Attributes:
        counts: (n, b) how often each row is drawn in each resample.
        row: the row that comes next, counted over all ranks.
        bins: m.
        seconds: spent so far, which is no part of what a recipe costs.
    """

    def __init__(self, resamples: Resamples, first_row: int, bins: int) -> None:
        self.counts, self.row, self.bins, self.seconds = resamples.counts, first_row, bins, 0.0
        self._losses: list[Tensor] = []  # (rows, 2)
        self._first: Tensor | None = None  # (k, b) summed gaps of the first bin of each class
        # (e, 3) row, cell and gap of each larger probability; a rank may have no rows at all
        self._others = [torch.zeros(0, 3, dtype=torch.float64)]

    def add(self, seen: Predictions) -> None:
        """Takes the next rows."""
        started = perf_counter()
        true = seen.probs.gather(1, seen.labels[:, None])[:, 0].double()
        squares = seen.probs.square().sum(1, dtype=torch.float64)
        losses = torch.stack([-seen.log_true.double(), squares + (1 - 2 * true)], 1)
        self._losses.append(losses.cpu())
        if self._first is None:
            shape = seen.probs.shape[1], self.counts.shape[1]
            self._first = torch.zeros(shape, dtype=torch.float64)
        for rows in row_blocks(len(seen), max(self._first.shape)):
            probs, labels = seen.probs[rows].cpu(), seen.labels[rows].cpu()
            gaps = probs.to(torch.float64, copy=True)
            gaps[torch.arange(len(labels)), labels] -= 1
            above = probs > bin_edges(self.bins, probs.dtype)[1]
            row, column = above.nonzero(as_tuple=True)
            cell = column * self.bins + bin_index(probs[row, column], self.bins)
            entries = [(self.row + row).double(), cell.double(), gaps[row, column]]
            self._others.append(torch.stack(entries, 1))
            drawn = self.counts[self.row : self.row + len(labels)]
            self._first.addmm_(gaps.masked_fill_(above, 0).T, drawn.double())
            self.row += len(labels)
        self.seconds += perf_counter() - started

    def replicates(self, ordered: Ordered, smooth_ece: float) -> dict[str, Tensor]:
        """Name -> (b,) float64, the metric on each resample; the same on every rank.

        Args:
            ordered: confidence and correctness of the rows of all ranks, in their order.
            smooth_ece: of these rows, from where the search for those of the resamples starts.
        """
        started = perf_counter()
        losses = dist.gather(torch.cat(self._losses))
        with calm(self.counts.numel(), LARGE):
            means = torch.zeros(2, self.counts.shape[1], dtype=torch.float64)
            for rows in row_blocks(*self.counts.shape):
                means.addmm_(losses.T[:, rows], self.counts[rows].double())
            nll, brier = means / len(losses)
            found = {
                "nll": nll,
                "brier": brier,
                "classwise_ece": self._classwise(len(losses)),
                "smooth_ece": smooth_replicates(ordered, self.counts, smooth_ece),
                **ranked_replicates(ordered, self.counts, self.bins),
            }
        self.seconds += perf_counter() - started
        return found

    def _classwise(self, rows: int) -> Tensor:
        """The class-wise error on each resample, (b,), once all ranks have seen their rows."""
        assert self._first is not None
        first = dist.total(self._first)
        total = first.abs().sum(0)
        entries = dist.gather(torch.cat(self._others))
        entries = entries[entries[:, 1].argsort()]
        owner = torch.div(entries[:, 1], self.bins, rounding_mode="floor")
        sizes = torch.unique_consecutive(owner, return_counts=True)[1].tolist()
        with calm(0):
            for of_class in torch.split(entries, sizes):
                row, cell, gap = of_class.unbind(1)
                gaps = torch.zeros(self.bins, len(row), dtype=torch.float64)
                gaps[cell.long() % self.bins, torch.arange(len(row))] = gap
                total += (gaps @ self.counts[row.long()].double()).abs().sum(0)
        return total / (rows * len(first))


RANKED = (
    *("accuracy", "confidence", "overconfidence", "ece", "mce", "rms_ce"),
    *("adaptive_ece", "debiased_ce", "auroc", "aurc"),
)


def ranked_replicates(ordered: Ordered, counts: Tensor, bins: int) -> dict[str, Tensor]:
    """Name -> (b,) values on the resamples, for each metric of confidence and correctness alone.

    Args:
        ordered: n rows.
        counts: (n, b) how often each row is drawn in each resample.
        bins: of the equal-width and of the equal-mass metrics.
    """
    ranks = _Ranks(ordered, bins)
    drawn = counts[ranks.order].T.contiguous()  # (b, n)
    # Made before the loop: small results that outlive a block would leave holes in the memory.
    found = torch.empty(len(RANKED), len(drawn), dtype=torch.float64)
    step = max(1, BLOCK // len(ordered))
    with calm(0):
        for start in range(0, len(drawn), step):
            tell("resampling", start, len(drawn))
            part = torch.stack(ranks.metrics(drawn[start : start + step]))
            found[:, start : start + step] = part
    tell("resampling", len(drawn), len(drawn))
    return dict(zip(RANKED, found, strict=True))


@final
class _Ranks:
    """The n rows in ascending order of confidence, in u runs of equal ones.

    A row drawn c times is a run of c equal confidences, and so is every tie of the data. Inside a
    run the cumulative confidence and the expected cumulative correctness grow linearly with the
    rank (see `metrics/ordered.py`), so their values at any rank follow from those at the ends of
    the runs: everything is a function of three cumulative sums, of the rows up to the end of each
    run, their confidences and their correctness.
    """

    def __init__(self, ordered: Ordered, bins: int) -> None:
        self.n, self.order = len(ordered), ordered.confidence.argsort()
        values, run, size = ordered.runs()
        rows = torch.stack([ordered.confidence.double(), ordered.correct.double()])
        self.values = rows[:, self.order]
        # (u + 1,) rows up to the end of each run, 0 first; None when every run is one row
        self.ends = None
        if len(values) < self.n:
            self.ends = torch.cat([size.new_zeros(1), size.cumsum(0)])
        # (m,) runs up to the end of each equal-width bin, rows up to the end of each rank group
        self.bins = torch.searchsorted(bin_index(values, bins), torch.arange(bins), right=True)
        small, larger = divmod(self.n, bins)
        self.groups = (small + (torch.arange(bins) < larger).double()).cumsum(0)
        # Runs with a wrong row; the others add nothing to AUROC and AURC.
        self.mixed = torch.unique(run[~ordered.correct])
        # (n + 1,) the sums over j = 1..k of 1/j + ... + 1/n, for k = 0..n: an error at place j
        # counts in the error rate of the k >= j most confident, 1/k in each.
        inverse = 1 / torch.arange(1, self.n + 1, dtype=torch.float64)
        tails = inverse.flip(0).cumsum(0).flip(0)
        self.harmonic = torch.cat([tails.new_zeros(1), tails.cumsum(0)])

    def metrics(self, counts: Tensor) -> list[Tensor]:
        """The metrics of RANKED, (b,) each, of some resamples; (b, n) counts of the sorted rows."""
        rows = torch.zeros(len(counts), counts.shape[1] + 1, dtype=torch.float64)
        rows[:, 1:] = counts
        sums = [rows.cumsum(1)]
        for values in self.values:
            sums.append(torch.zeros_like(rows))
            torch.mul(rows[:, 1:], values, out=sums[-1][:, 1:])
            sums[-1].cumsum_(1)
        if self.ends is not None:
            sums = [_columns(part, self.ends) for part in sums]
        confidence, accuracy = sums[1][:, -1] / self.n, sums[2][:, -1] / self.n
        # Bins of equal width; an empty one has no gap, and its total is 0.
        size, said, right = (_steps(part[:, self.bins]) for part in sums)
        total = said - right
        gap = total / size.clamp(min=1)
        ece, mce = total.abs().sum(1) / self.n, gap.abs().amax(1)
        rms_ce = ((size * gap.square()).sum(1) / self.n).sqrt()
        means = (accuracy, confidence, confidence - accuracy)
        return [*means, ece, mce, rms_ce, *self._equal_mass(*sums), *self._selective(*sums)]

    def _equal_mass(self, count: Tensor, *sums: Tensor) -> tuple[Tensor, Tensor]:
        """Adaptive ECE and debiased error."""
        # Summed confidence and expected correctness up to the end of each group: (b, m) each.
        wanted = self.groups.expand(len(count), -1).contiguous()
        end = torch.searchsorted(count, wanted).clamp(min=1)  # rank 0 lies before every run
        start = end - 1
        before = count.gather(1, start)
        share = (wanted - before) / (count.gather(1, end) - before).clamp(min=1)
        confidence, right = (
            _steps(torch.lerp(part.gather(1, start), part.gather(1, end), share)) for part in sums
        )
        total = (confidence - right).abs().sum(1) / self.n
        size = _steps(self.groups)
        some = size >= 2  # the variance of a smaller group is unknown
        size, confidence, right = size[some], confidence[:, some], right[:, some]
        accuracy = right / size
        bias = accuracy * (1 - accuracy) / (size - 1)
        square = (size * ((confidence / size - accuracy).square() - bias)).sum(1) / self.n
        return total, square.clamp(min=0).sqrt()

    def _selective(self, count: Tensor, _: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """AUROC and AURC."""
        before, after = _columns(count, self.mixed), _columns(count, self.mixed + 1)
        right_before, right_after = _columns(right, self.mixed), _columns(right, self.mixed + 1)
        size, all_right = after - before, right[:, -1]
        wrong = size - (right_after - right_before)
        # A right row beats every wrong one before its run and, by half, those of its own.
        beaten_by = all_right[:, None] - (right_before + right_after) / 2
        pairs = all_right * (self.n - all_right)
        auroc = torch.where(pairs > 0, (wrong * beaten_by).sum(1) / pairs, math.nan)
        # The most confident rows come first here and last among the sorted ones.
        areas = [self.harmonic.take((self.n - c).long()) for c in (before, after)]
        return auroc, (wrong / size.clamp(min=1) * (areas[0] - areas[1])).sum(1) / self.n


def _columns(values: Tensor, index: Tensor) -> Tensor:
    """values[:, index], which numpy takes four times as fast."""
    return torch.from_numpy(values.numpy().take(index.numpy(), 1))


def _steps(sums: Tensor) -> Tensor:
    """What cumulative sums (b, m) add at each step."""
    return torch.diff(sums, dim=-1, prepend=sums.new_zeros(*sums.shape[:-1], 1))


CLOSE = 2.0**-34  # the metric itself knows its width to 2^-32
SECANTS = 12  # most resamples need five
BISECTIONS = 40  # for the few that are left


def smooth_replicates(ordered: Ordered, counts: Tensor, smooth_ece: float) -> Tensor:
    """The smooth ECE of each of the b resamples of (n, b) counts, (b,) float64.

    The width s solves smECE_s = s, whose left side never rises with s: a secant inside a bracket,
    started at `smooth_ece`, that of the rows themselves, for all resamples side by side.
    """
    start = max(smooth_ece, SMALLEST_WIDTH)
    series = _Series(ordered, counts, start)
    # |r_s| integrates to no less than the absolute value of the integral of r_s, which has no s.
    low = series.coefficients[0].abs().clamp(SMALLEST_WIDTH, 1)
    at, high = low.clamp(min=start), torch.ones_like(low)
    last, last_gap = at.clone(), torch.full_like(at, math.nan)
    left = torch.arange(len(at))  # those not found yet
    for secant in [True] * SECANTS + [False] * BISECTIONS:
        here, known, known_gap = at[left], last[left], last_gap[left]
        gap = series.smoothed(here, left) - here
        low[left] = torch.where(gap > 0, here, low[left])
        high[left] = torch.where(gap > 0, high[left], here)
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
    small = (at <= SMALLEST_WIDTH + CLOSE).nonzero()[:, 0]
    if len(small):  # too narrow to be resolved: answered as the metric answers it
        at[small] = series.smoothed(at[small].clamp(max=SMALLEST_WIDTH), small)
    return at


@final
class _Series:
    """The cosine coefficients of b resamples, computed as far as the widths asked for need.

    See `metrics/ordered.py` for the series. Its coefficients are sums over rows, so those of all
    resamples are the counts times a table of cosines.
    """

    def __init__(self, ordered: Ordered, counts: Tensor, width: float) -> None:
        confidence = ordered.confidence.double()
        self.counts, self.angle = counts, confidence * math.pi
        self.weights = (confidence - ordered.correct.double()) / len(ordered)
        self.coefficients = torch.zeros(0, counts.shape[1], dtype=torch.float64)
        self._extend(0.8 * width)  # most resamples are a little less smooth than the data

    def smoothed(self, width: Tensor, which: Tensor) -> Tensor:
        """The integral of |r_s| of the resamples `which` at their widths, (a,) float64."""
        terms = self._extend(float(width.min()))
        step = max(1, BLOCK // max(INTERVALS, 2 * terms))
        areas = []
        for start in range(0, len(which), step):
            some = slice(start, start + step)
            areas.append(smoothed_area(self.coefficients[:terms, which[some]].T, width[some]))
        return torch.cat(areas)

    def _extend(self, width: float) -> int:
        """Computes a_k = (2/n) sum_i (f_i - y_i) cos(pi k f_i) as far as a width needs them."""
        terms = series_terms(width)
        if terms > len(self.coefficients):
            k = torch.arange(len(self.coefficients), terms, dtype=torch.float64)[:, None]
            more = torch.zeros(len(k), self.counts.shape[1], dtype=torch.float64)
            for rows in row_blocks(len(self.angle), max(more.shape)):
                table = (k * self.angle[rows]).cos_().mul_(self.weights[rows])
                more.addmm_(table, self.counts[rows].double())
            self.coefficients = torch.cat([self.coefficients, more * (1 + (k > 0).double())])
        return terms


# --- intervals and verdicts ---
#
# Binned calibration errors are biased upwards, and on a resample more so than on the data: the
# plain percentile interval may lie above the estimate altogether. docs/numerics.md says how the
# kind of interval was chosen.

LEVEL = 0.95
# A smaller difference is no finding: the same logits by another route differ by as much.
ROUNDING = 1e-7

Verdict = Literal["better", "worse", "undecided"]


@final
@dataclass(frozen=True)
class Interval:
    """Where a value lies with 95 % confidence; NaN at both ends where the resamples cannot say."""

    low: float
    high: float

    def as_json(self) -> list[float | None]:
        """[low, high], null where there is none."""
        return plain([self.low, self.high])  # type: ignore[no-any-return]


UNKNOWN = Interval(math.nan, math.nan)


def interval(estimate: float, replicates: Tensor, power: float = 0.5) -> Interval:
    """The interval of an estimate from its replicates (b,); it always holds the estimate.

    The replicates' 95 % range is shifted by their own bias onto the estimate, and lengthened on the
    side of the truth by the bias of the estimate itself. That is the larger one: where all gaps are
    noise, a replicate has the noise of the data and as much of its own, so a metric that grows as
    noise variance to the power p is 2^p times as large on it, and the bias of the estimate, which
    is then all of it, is 1 / (2^p - 1) times what the replicates show.

    Args:
        estimate: the value on the data.
        replicates: the values on the resamples, NaN where undefined.
        power: p; 1/2 for binned errors, 1/3 for the smooth one.

    >>> interval(1.0, torch.tensor([0.5, 1.0, 1.5]))
    Interval(low=0.525, high=1.475)
    """
    known = replicates[torch.isfinite(replicates)].double()
    # Where a metric is undefined on many resamples, the others are no fair sample of them.
    if math.isnan(estimate) or len(known) == 0 or len(known) < LEVEL * len(replicates):
        return UNKNOWN
    tail = (1 - LEVEL) / 2
    low, high = known.quantile(known.new_tensor([tail, 1 - tail])).tolist()
    mean = float(known.mean())
    bias = (mean - estimate) / (2**power - 1)
    return Interval(
        estimate - max(mean - low, 0) - max(bias, 0),
        estimate + max(high - mean, 0) - min(bias, 0),
    )


def metric_interval(name: str, estimate: float, replicates: Tensor) -> Interval:
    """The interval of a metric, cut where the metric cannot lie."""
    column = COLUMNS[name]
    found = interval(estimate, replicates, column.power)
    if math.isnan(found.low):
        return found
    return Interval(max(found.low, column.low), min(found.high, column.high))


@final
@dataclass(frozen=True)
class Difference:
    """A row against its baseline by one metric.

    Attributes:
        baseline: the recipe compared with.
        delta: the row's value minus the baseline's.
        interval: of delta, from the same resamples of both.
        verdict: "better" or "worse" where the interval excludes 0, else "undecided"; None for a
            metric of which neither more nor less is better, or without resamples.
    """

    baseline: str
    delta: float
    interval: Interval
    verdict: Verdict | None

    def as_json(self) -> dict[str, Any]:
        """The public form."""
        return {
            "baseline": self.baseline,
            "delta": plain(self.delta),
            "interval": self.interval.as_json(),
            "verdict": self.verdict,
        }


def verdict(name: str, found: Interval) -> Verdict | None:
    """What the interval of a difference says of a metric.

    >>> verdict("ece", Interval(-0.02, -0.01)), verdict("accuracy", Interval(-0.02, -0.01))
    ('better', 'worse')
    """
    better = COLUMNS[name].better
    if better == 0 or math.isnan(found.low):
        return None
    if found.low <= ROUNDING and found.high >= -ROUNDING:
        return "undecided"
    return "better" if better * found.low > 0 else "worse"
