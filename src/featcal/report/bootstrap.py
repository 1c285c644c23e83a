"""The bootstrap: how much every metric varies when the rows are drawn again, and what that tells.

Efron, "Bootstrap methods: another look at the jackknife", 1979. In this order: the resamples, told
by how often each row is drawn; the replicates of each family of metrics (means, class-wise bins,
ranks, smooth ECE); intervals; verdicts.

A sum over a resample is a product of counts and values, so no row is ever copied. Recipes share the
counts, so that the difference of two replicates is a paired one.

Two things differ from the textbook. Rows that are wrong and were not seen: where all rows are right
no resample has a wrong one, and an interval would have no width. So stand-ins are drawn with the
rows: rows of the data whose label is another, as the network itself thinks likely. Rows of one
sample, such as the pixels of an image, are drawn together, and very many rows or samples are dealt
into groups, which are drawn whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import takewhile
from operator import add
from time import perf_counter
from typing import Any, Literal, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from featcal.core import dist
from featcal.core.batch import Data, Head, bin_edges, bin_index, predicted, raw_logits
from featcal.core.checks import ArgumentError, InputError, whole_number
from featcal.core.fit import plain
from featcal.core.progress import calm, tell
from featcal.core.sample import first_row
from featcal.metrics import Ordered, Predictions
from featcal.metrics.columns import COLUMNS
from featcal.metrics.ordered import INTERVALS, SMALLEST_WIDTH, series_terms, smoothed_area

FEWEST, MOST = 100, 10_000  # fewer leave too little beyond the 2.5 % quantile, more move no digit
MATRIX = 2**20  # numbers of one factor of a product: 8 MiB
BLOCK = 2**18  # numbers of one block of resamples: the passes over it then find it in the cache
LARGE = 2**25  # counts beyond which products over all of them pay for threads
SINGLY = 2**14  # rows up to which each is drawn by itself
GROUPS = 2**12  # of more rows: what they vary by is known to one part in a hundred
CELLS = 2**10  # of equal mass, in which the confidences of grouped rows are ranked
STAND_INS = 128  # for wrong rows that were not seen,
UNSEEN = 1.25  # and how many rows they weigh: of no wrong row the interval then ends at 4


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
    """How often the rows are drawn: first as they are, then in each of b resamples.

    A unit is a row; where rows belong to samples, a sample; or one of the groups that very many of
    them are dealt into.

    Attributes:
        counts: (u + j, 1 + b) float32, of u units and j stand-ins. The first column has every unit
            once and all stand-ins together `UNSEEN` times: what the resamples scatter around.
        unit: (n,) the unit of each row, counted over the ranks in their order.
        rows: (j,) the rows that the stand-ins repeat, ascending.
        labels: (j,) their labels.
        samples: that rows belong to, 0 where each is one.
    """

    counts: Tensor
    unit: Tensor
    rows: Tensor
    labels: Tensor
    samples: int = 0

    @classmethod
    def draw(
        cls, rows: int, resamples: int, seed: int = 0, samples: Tensor | None = None
    ) -> Resamples:
        """The resamples of a seed, without stand-ins: every process draws the same.

        Args:
            rows: of all processes.
            resamples: how many.
            seed: of the draws.
            samples: (n,) the number of the sample of each row; None where each row is one.

        >>> Resamples.draw(5, 100).counts.sum(0).unique().tolist()
        [5.0]
        """
        draw = np.random.default_rng(checked_seed(seed))
        size, unit, of = rows, torch.arange(rows), 0
        if samples is not None:
            numbers, unit = torch.unique(samples, return_inverse=True)
            size = of = len(numbers)
        if size > (SINGLY if samples is None else GROUPS):
            unit = torch.from_numpy(draw.permutation(size) % GROUPS)[unit]
            size = GROUPS
        counts = np.ones((1 + checked_resamples(resamples), size), dtype=np.float32)
        for counted in counts[1:]:
            counted[:] = np.bincount(draw.integers(0, size, size), minlength=size)
        none = torch.zeros(0, dtype=torch.int64)
        return cls(torch.from_numpy(counts.T.copy()), unit, none, none, of)

    @classmethod
    @torch.no_grad()
    def of(cls, data: Data, head: Head | None, rows: int, resamples: int, seed: int) -> Resamples:
        """The resamples of labelled rows, with stand-ins for wrong ones that were not seen.

        A row is chosen with the chance the network itself gives it of being wrong, to the power
        1/2, since a network may be surer than it should be by a factor of two in its logits; its
        label among the other classes as their probabilities are.
        """
        draw = np.random.default_rng([checked_seed(seed), 1])
        at, place = torch.from_numpy(draw.random(rows)), first_row(data)
        found = [torch.zeros(0, 2, dtype=torch.float64)]
        samples = [torch.zeros(0, dtype=torch.int64)]
        for batch in data:
            if batch.groups is not None:
                samples.append(batch.groups.cpu())
            probs = raw_logits(batch, head).double().softmax(1).cpu()
            probs.clamp_(min=1e-300).scatter_(1, predicted(probs)[:, None], 0)
            sums = probs.cumsum(1)
            wanted = at[place : place + len(batch), None] * sums[:, -1:]
            label = torch.searchsorted(sums, wanted).clamp(max=probs.shape[1] - 1)
            found.append(torch.cat([sums[:, -1:].sqrt(), label.double()], 1))
            place += len(batch)
        chance, label = dist.gather(torch.cat(found)).T
        of_rows = dist.gather(torch.cat(samples))
        plain = cls.draw(rows, resamples, seed, of_rows if len(of_rows) == rows else None)
        share = chance.cumsum(0) / chance.sum()
        points = (torch.arange(STAND_INS) + float(draw.random())) / STAND_INS
        chosen = torch.searchsorted(share, points.double()).clamp(max=rows - 1)
        extra = np.full((STAND_INS, 1 + resamples), UNSEEN / STAND_INS, dtype=np.float32)
        extra[:, 1:] = draw.poisson(UNSEEN / STAND_INS, (STAND_INS, resamples))
        counts = torch.cat([plain.counts, torch.from_numpy(extra)])
        return cls(counts, plain.unit, chosen, label[chosen].long(), plain.samples)

    @property
    def size(self) -> int:
        """Units, without stand-ins."""
        return len(self.counts) - len(self.rows)

    @property
    def grouped(self) -> bool:
        """Whether rows are drawn together, by samples or in groups."""
        return len(self.unit) > self.size

    @property
    def few(self) -> float:
        """By how much replicates of so few units scatter too little.

        The variance of a resample is that of the units around their own mean, and is known from as
        few: as Student's t has it (the series of Fisher and Cornish), relative to a normal number.
        """
        z, free = NORMAL, self.size - 1
        t = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
        return t / z * math.sqrt(self.size / free)

    @property
    def as_json(self) -> dict[str, float | None]:
        """What is drawn, where that is not the rows, and how many rows the stand-ins weigh."""
        groups = self.size if self.grouped and self.size != self.samples else None
        return {"groups": groups, "samples": self.samples or None, "unseen": UNSEEN}

    def units(self) -> Tensor:
        """(n + j,) the unit of each row and of each stand-in."""
        return torch.cat([self.unit, torch.arange(self.size, len(self.counts))])

    def sums(self, values: Tensor) -> Tensor:
        """(1 + b, c): the sums over each resample of (u + j, c) values of the units."""
        total = torch.zeros(self.counts.shape[1], values.shape[1], dtype=torch.float64)
        for some in row_blocks(*self.counts.shape):
            total.addmm_(self.counts[some].double().T, values[some])
        return total


@final
class Sums:
    """Sums over each resample of values that come row by row.

    Rows of a group are added up before they are drawn; single rows are drawn as they come.
    """

    def __init__(self, drawn: Resamples, width: int) -> None:
        self.drawn = drawn
        size = drawn.counts.shape[0 if drawn.grouped else 1]
        self.total = torch.zeros(size, width, dtype=torch.float64)

    def add(self, unit: Tensor, values: Tensor) -> None:
        """Adds the (r, width) values of rows or stand-ins of these units (r,)."""
        if self.drawn.grouped:
            self.total.index_add_(0, unit, values)
        else:
            self.total.addmm_(self.drawn.counts[unit].double().T, values)

    def result(self) -> Tensor:
        """(1 + b, width), once all rows are in."""
        return self.drawn.sums(self.total) if self.drawn.grouped else self.total


def row_blocks(rows: int, width: int) -> Iterator[slice]:
    """Slices of the rows, such that `width` numbers per row make a matrix of moderate size."""
    step = max(1, MATRIX // width)
    for start in range(0, rows, step):
        yield slice(start, start + step)


# --- replicates ---


@final
class Bootstrap:
    """The replicates of every metric of one recipe, from its rows as they are scored.

    A row holds fewer than m probabilities above 1 / m. For the class-wise error they are kept, one
    by one, each with its cell (class and bin); all the others lie in the first bin of their class,
    and there the sums over all resamples are one product of the n x k gaps with the counts: the
    gaps are not kept.

    Attributes:
        drawn: the resamples.
        row: the row that comes next, counted over all ranks.
        bins: m.
        seconds: spent so far, which is no part of what a recipe costs.
    """

    def __init__(self, drawn: Resamples, first_row: int, bins: int) -> None:
        self.drawn, self.row, self.bins, self.seconds = drawn, first_row, bins, 0.0
        self._means = Sums(drawn, 3)  # loss, squared error, 1
        self._first: Sums | None = None  # the gaps of the first bin of each class
        # (e, 3) unit, cell and gap of each larger probability; a rank may have no rows at all
        self._others = [torch.zeros(0, 3, dtype=torch.float64)]
        self._unseen: list[Ordered] = []
        self._spread = torch.zeros(0, dtype=torch.float64)  # (k m,) summed p (1 - p) of each cell

    def add(self, logits: Tensor, seen: Predictions) -> None:
        """Takes the next rows, given as logits and as what these predict."""
        started = perf_counter()
        if self._first is None:
            self._first = Sums(self.drawn, logits.shape[1])
            self._spread = torch.zeros(logits.shape[1] * self.bins, dtype=torch.float64)
        first, end = self.row, self.row + len(seen)
        here = ((self.drawn.rows >= first) & (self.drawn.rows < end)).nonzero()[:, 0]
        again, labels = self.drawn.rows[here] - first, self.drawn.labels[here]
        unseen = Predictions.of(logits=logits[again], labels=labels.to(logits.device))
        # Rows that are drawn singly meet their counts here, those of groups do not.
        width = max(logits.shape[1], 0 if self.drawn.grouped else self.drawn.counts.shape[1])
        with calm(0):
            for some in row_blocks(len(seen), width):
                self._spread += self._take(seen, some, self.drawn.unit[first:end][some])
            self._take(unseen, slice(None), self.drawn.size + here)
        self._unseen.append(Ordered.of_predictions(unseen))
        self.row = end
        self.seconds += perf_counter() - started

    def _take(self, seen: Predictions, some: slice, unit: Tensor) -> Tensor:
        """Adds some of the rows, those of these units; their summed p (1 - p) by cell."""
        probs, labels = seen.probs[some].cpu(), seen.labels[some].cpu()
        gaps = probs.to(torch.float64, copy=True)
        at = torch.arange(len(labels)), labels
        brier = probs.square().sum(1, dtype=torch.float64) + (1 - 2 * gaps[at])
        loss = -seen.log_true[some].double().cpu()
        self._means.add(unit, torch.stack([loss, brier, torch.ones_like(loss)], 1))
        gaps[at] -= 1
        above = probs > bin_edges(self.bins, probs.dtype)[1]
        row, column = above.nonzero(as_tuple=True)
        cell = column * self.bins + bin_index(probs[row, column], self.bins)
        self._others.append(torch.stack([unit[row].double(), cell.double(), gaps[row, column]], 1))
        assert self._first is not None
        self._first.add(unit, gaps.masked_fill_(above, 0))
        large, rest = probs[row, column].double(), probs.masked_fill(above, 0).double()
        spread = torch.zeros_like(self._spread)
        spread[:: self.bins] = (rest - rest.square()).sum(0)
        return spread.index_add_(0, cell, large - large.square())

    def chance(self, ordered: Ordered, metrics: Mapping[str, float]) -> dict[str, Chance]:
        """Name -> what chance alone does to a binned error.

        Where every probability is right, the gap of a bin has the variance v, the sum of p (1 - p),
        and the mean size of a Poisson number's deviation from its mean, which bins of a few rare
        events need and which is (2 v / pi)^(1/2) where v is large. Errors by class move together: a
        row that one class misses another one has. So do the rows of a sample: there the gaps of the
        resamples around those of the data show the noise of ECE, where it is more.

        Args:
            ordered: as in `replicates`.
            metrics: the values on the data.
        """
        sure, order = ordered.confidence.sort()
        spread = sure.double() - sure.double().square()
        at = {
            "ece": bin_index(sure, self.bins),
            "adaptive_ece": torch.arange(len(sure)) * self.bins // len(sure),
        }
        variances = {
            name: torch.zeros(self.bins, dtype=torch.float64).index_add_(0, index, spread)
            for name, index in at.items()
        }
        variances["classwise_ece"] = dist.total(self._spread)
        found = {}
        for name, value in variances.items():
            classes = len(value) // self.bins
            v, n = value.clamp(min=1e-300), len(sure) * classes
            size = 2 * ((v.floor() + 1) * v.log() - v - torch.lgamma(v.floor() + 1)).exp()
            size = size.maximum((2 * v).clamp(max=0.5))  # of one row |y - p| is 2 v on average
            noise, error = float(size.sum()) / n, float((v - size.square()).clamp(min=0).sum())
            error, bias = math.sqrt(error * min(classes, 2)) / n, noise
            if self.drawn.samples and name in at:
                gaps = (sure.double() - ordered.correct[order].double()) * self.drawn.few / n
                moved = self._moved(self.drawn.unit[order], at[name], gaps)
                noise, error = max(noise, float(moved.mean())), max(error, float(moved.std()))
            if classes == 1:  # the gaps of a few large bins are all alike, or next to it
                bias = metrics[name] - math.sqrt(max(metrics[name] ** 2 - noise**2, 0))
            found[name] = noise + NORMAL * error, bias
        return found

    def _moved(self, unit: Tensor, index: Tensor, gaps: Tensor) -> Tensor:
        """(b,) how far the summed gaps of all bins lie from those of the data, on each resample."""
        table = torch.zeros(self.drawn.size, self.bins, dtype=torch.float64)
        table.view(-1).index_add_(0, unit * self.bins + index, gaps)
        sums = self.drawn.counts[: self.drawn.size].double().T @ table
        return (sums[1:] - sums[0]).abs().sum(1)

    def replicates(self, ordered: Ordered, smooth_ece: float) -> dict[str, Tensor]:
        """Name -> (1 + b,) float64, the metric as `Resamples` draws; the same on every rank.

        Args:
            ordered: confidence and correctness of the rows of all ranks, in their order.
            smooth_ece: of these rows, from where the search for those of the resamples starts.
        """
        started = perf_counter()
        every = ordered + reduce(add, self._unseen).reduced()
        with calm(self.drawn.counts.numel(), LARGE):
            self._means.total = dist.total(self._means.total)
            nll, brier, rows = self._means.result().T
            found = {
                "nll": nll / rows,
                "brier": brier / rows,
                "classwise_ece": self._classwise() / rows,
                "smooth_ece": smooth_replicates(every, self.drawn, rows, smooth_ece),
                **ranked_replicates(every, self.drawn, self.bins),
            }
        self.seconds += perf_counter() - started
        return found

    def _classwise(self) -> Tensor:
        """The class-wise error on each resample times its rows, once all ranks have seen theirs."""
        assert self._first is not None
        self._first.total = dist.total(self._first.total)
        first = self._first.result()
        total = first.abs().sum(1)
        entries = dist.gather(torch.cat(self._others))
        entries = entries[entries[:, 1].argsort()]
        owner = torch.div(entries[:, 1], self.bins, rounding_mode="floor")
        sizes = torch.unique_consecutive(owner, return_counts=True)[1].tolist()
        units, counts = len(self.drawn.counts), None
        if self.drawn.grouped:  # most classes meet most units
            counts = self.drawn.counts.double()
        with calm(0):
            for of_class in torch.split(entries, sizes):
                if counts is not None:
                    index = (of_class[:, 1] % self.bins * units + of_class[:, 0]).long()
                    gaps = torch.zeros(self.bins * units, dtype=torch.float64)
                    gaps.index_add_(0, index, of_class[:, 2])
                    total += (gaps.view(self.bins, units) @ counts).abs().sum(0)
                    continue
                unit, place = torch.unique(of_class[:, 0].long(), return_inverse=True)
                gaps = torch.zeros(self.bins, len(unit), dtype=torch.float64)
                at = of_class[:, 1].long() % self.bins, place
                gaps.index_put_(at, of_class[:, 2], accumulate=True)
                total += (gaps @ self.drawn.counts[unit].double()).abs().sum(0)
        return total / first.shape[1]


RANKED = (
    *("accuracy", "confidence", "overconfidence", "ece", "mce", "rms_ce"),
    *("adaptive_ece", "debiased_ce", "auroc", "aurc"),
)


def ranked_replicates(ordered: Ordered, drawn: Resamples, bins: int) -> dict[str, Tensor]:
    """Name -> (1 + b,) values, for each metric of confidence and correctness alone.

    Args:
        ordered: n rows and the stand-ins.
        drawn: the resamples.
        bins: of the equal-width and of the equal-mass metrics.
    """
    ranks = _Ranks(ordered, bins, pool=drawn.grouped)
    width = drawn.counts.shape[1]
    # Made before the loop: small results that outlive a block would leave holes in the memory.
    found = torch.empty(len(RANKED), width, dtype=torch.float64)
    step = max(1, BLOCK // len(ranks.cells if drawn.grouped else ranks.order))
    with calm(0):
        steps = ranks.pooled(drawn) if drawn.grouped else drawn.counts[ranks.order].T.contiguous()
        for start in range(0, width, step):
            tell("resampling", start, width - 1)
            sums = ranks.sums(steps[start : start + step])
            found[:, start : start + step] = torch.stack(ranks.metrics(*sums))
    tell("resampling", width - 1, width - 1)
    if drawn.grouped:  # the cells blur a value a little, and all of them alike
        single = _Ranks(ordered, bins, pool=False)
        sums = single.sums(drawn.counts[drawn.units()[single.order], :1].T)
        found += torch.stack(single.metrics(*sums)) - found[:, :1]
    return dict(zip(RANKED, found, strict=True))


@final
class _Ranks:
    """The rows in ascending order of confidence, in cells of equal ones.

    A row drawn c times is a run of c equal confidences, and so is every tie of the data. Inside a
    cell the cumulative confidence and the expected cumulative correctness grow linearly with the
    rank (see `metrics/ordered.py`), so their values at any rank follow from those at the ends of
    the cells: everything is a function of three cumulative sums, of the rows up to the end of each
    cell, their confidences and their correctness. With many rows, neighbours share a cell.
    """

    def __init__(self, ordered: Ordered, bins: int, *, pool: bool) -> None:
        self.order, self.m = ordered.confidence.argsort(), bins
        values, self.cell, size = torch.unique(
            ordered.confidence, return_inverse=True, return_counts=True
        )
        if pool and len(values) > CELLS:
            # Cells of equal mass, cut at the edges of the bins as well.
            mass = torch.div((size.cumsum(0) - 1) * CELLS, len(ordered), rounding_mode="floor")
            mixed = mass * bins + bin_index(values, bins)
            place = torch.unique_consecutive(mixed, return_inverse=True)[1]
            self.cell, last = place[self.cell], torch.bincount(place).cumsum(0) - 1
            values, size = values[last], torch.bincount(self.cell)
        self.cells = values
        rows = torch.stack([ordered.confidence.double(), ordered.correct.double()])
        self.rows, self.values = rows, rows[:, self.order]
        # (c + 1,) rows up to the end of each cell, 0 first; None when every cell is one row
        self.ends = None
        if len(values) < len(ordered):
            self.ends = torch.cat([size.new_zeros(1), size.cumsum(0)])
        # (m,) cells up to the end of each equal-width bin
        self.bins = torch.searchsorted(bin_index(values, bins), torch.arange(bins), right=True)
        # Cells with a wrong row; the others add nothing to AUROC and AURC.
        self.mixed = torch.unique(self.cell[~ordered.correct])

    def pooled(self, drawn: Resamples) -> Tensor:
        """(1 + b, 3, c): rows, confidences and correctness in each cell of each resample."""
        size, unit = len(self.cells), drawn.units()
        parts = []
        for values in (torch.ones_like(self.rows[0]), *self.rows):
            table = torch.zeros(len(drawn.counts), size, dtype=torch.float64)
            table.view(-1).index_add_(0, unit * size + self.cell, values)
            parts.append(drawn.sums(table))
        return torch.stack(parts, 1)

    def sums(self, steps: Tensor) -> list[Tensor]:
        """The three cumulative sums, (b, c + 1) each, of resamples told by cell or by row."""
        if steps.ndim == 3:
            return [F.pad(part, (1, 0)).cumsum(1) for part in steps.unbind(1)]
        rows = torch.zeros(len(steps), steps.shape[1] + 1, dtype=torch.float64)
        rows[:, 1:] = steps
        sums = [rows.cumsum(1)]
        for values in self.values:
            sums.append(torch.zeros_like(rows))
            torch.mul(rows[:, 1:], values, out=sums[-1][:, 1:])
            sums[-1].cumsum_(1)
        return sums if self.ends is None else [_columns(part, self.ends) for part in sums]

    def metrics(self, count: Tensor, sure: Tensor, right: Tensor) -> list[Tensor]:
        """The metrics of RANKED, (b,) each, from the three sums."""
        n = count[:, -1]
        confidence, accuracy = sure[:, -1] / n, right[:, -1] / n
        # Bins of equal width; an empty one has no gap, and its total is 0.
        size, said, hits = (_steps(part[:, self.bins]) for part in (count, sure, right))
        total = said - hits
        gap = total / torch.where(size > 0, size, 1)
        ece, mce = total.abs().sum(1) / n, gap.abs().amax(1)
        rms_ce = ((size * gap.square()).sum(1) / n).sqrt()
        means = (accuracy, confidence, confidence - accuracy)
        equal_mass = self._equal_mass(count, sure, right)
        return [*means, ece, mce, rms_ce, *equal_mass, *self._selective(count, right)]

    def _equal_mass(self, count: Tensor, *sums: Tensor) -> tuple[Tensor, Tensor]:
        """Adaptive ECE and debiased error."""
        # Summed confidence and expected correctness up to the end of each group: (b, m) each.
        n, place = count[:, -1:], torch.arange(1.0, self.m + 1)
        small = torch.div(n, self.m, rounding_mode="floor")
        wanted = place * small + place.minimum(n - self.m * small)
        end = torch.searchsorted(count, wanted).clamp(1, count.shape[1] - 1)
        start = end - 1  # rank 0 lies before every cell
        before = count.gather(1, start)
        width = count.gather(1, end) - before
        share = (wanted - before) / torch.where(width > 0, width, 1)
        confidence, right = (
            _steps(torch.lerp(part.gather(1, start), part.gather(1, end), share)) for part in sums
        )
        total = (confidence - right).abs().sum(1) / n[:, 0]
        size = _steps(wanted)
        accuracy = right / size.clamp(min=1)
        bias = accuracy * (1 - accuracy) / (size - 1).clamp(min=1)
        square = size * ((confidence / size.clamp(min=1) - accuracy).square() - bias)
        # The variance of a smaller group is unknown.
        square = torch.where(size >= 2, square, 0.0).sum(1) / n[:, 0]
        return total, square.clamp(min=0).sqrt()

    def _selective(self, count: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """AUROC and AURC."""
        before, after = _columns(count, self.mixed), _columns(count, self.mixed + 1)
        right_before, right_after = _columns(right, self.mixed), _columns(right, self.mixed + 1)
        size, n, all_right = after - before, count[:, -1:], right[:, -1]
        wrong = size - (right_after - right_before)
        # A right row beats every wrong one before its cell and, by half, those of its own.
        beaten_by = all_right[:, None] - (right_before + right_after) / 2
        pairs = all_right * (n[:, 0] - all_right)
        auroc = torch.where(pairs > 0, (wrong * beaten_by).sum(1) / pairs, math.nan)
        # The most confident rows come first here and last among the sorted ones. An error at place
        # j counts in the error rate of the k >= j most confident, 1/k in each: the sum over j = 1,
        # ..., i of 1/j + ... + 1/n is i (1 + H_n - H_i), with the harmonic numbers H.
        areas = [
            i * (1 + torch.special.digamma(n + 1) - torch.special.digamma(i + 1))
            for i in (n - before, n - after)
        ]
        share = wrong / torch.where(size > 0, size, 1)
        return auroc, (share * (areas[0] - areas[1])).sum(1) / n[:, 0]


def _columns(values: Tensor, index: Tensor) -> Tensor:
    """values[:, index], which numpy takes four times as fast."""
    return torch.from_numpy(values.numpy().take(index.numpy(), 1))


def _steps(sums: Tensor) -> Tensor:
    """What cumulative sums (b, m) add at each step."""
    return torch.diff(sums, dim=-1, prepend=sums.new_zeros(*sums.shape[:-1], 1))


CLOSE = 2.0**-34  # the metric itself knows its width to 2^-32
SECANTS = 12  # most resamples need five
BISECTIONS = 40  # for the few that are left


def smooth_replicates(
    ordered: Ordered, drawn: Resamples, rows: Tensor, smooth_ece: float
) -> Tensor:
    """The smooth ECE of each resample, with so many rows (1 + b,) in it: (1 + b,) float64.

    The width s solves smECE_s = s, whose left side never rises with s: a secant inside a bracket,
    started at `smooth_ece`, that of the rows themselves, for all resamples side by side.
    """
    start = max(smooth_ece, SMALLEST_WIDTH)
    series = _Series(ordered, drawn, rows, start)
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

    def __init__(self, ordered: Ordered, drawn: Resamples, rows: Tensor, width: float) -> None:
        confidence = ordered.confidence.double()
        self.drawn, self.rows, self.unit = drawn, rows, drawn.units()
        self.angle, self.gaps = confidence * math.pi, confidence - ordered.correct.double()
        self.coefficients = torch.zeros(0, len(rows), dtype=torch.float64)
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
            k = torch.arange(len(self.coefficients), terms, dtype=torch.float64)
            more = Sums(self.drawn, len(k))
            for some in row_blocks(len(self.angle), max(len(k), len(self.rows))):
                table = (self.angle[some, None] * k).cos_().mul_(self.gaps[some, None])
                more.add(self.unit[some], table)
            found = (more.result() / self.rows[:, None]).T * (1 + (k > 0).double())[:, None]
            self.coefficients = torch.cat([self.coefficients, found])
        return terms


# --- intervals and verdicts ---
#
# Binned calibration errors are biased upwards, and on a resample more so than on the data: the
# plain percentile interval may lie above the estimate altogether. docs/numerics.md says how the
# kind of interval was chosen.

LEVEL = 0.95
NORMAL = 1.959964  # standard errors on either side of a normal mean
ROUNDING = 1e-7  # the same logits by another route differ by as much
FEW_WRONG = 10  # rows: with fewer, stand-ins are more than a tenth of what is known of errors
FLOOR = 1e-4  # a smaller difference is no finding: tables show 0.01 points, and 0.0001

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
# What an honest model's error may be by chance, and by how much chance has raised this one.
Chance = tuple[float, float]


def interval(
    estimate: float, replicates: Tensor, power: float = 0.5, chance: Chance = (0.0, 0.0)
) -> Interval:
    """The interval of an estimate from its replicates (1 + b,); it always holds the estimate.

    The replicates scatter around their first, the value with stand-ins for rows that were not seen.
    Their 95 % range is shifted by their own bias onto it, and lengthened on the
    side of the truth by the bias of the estimate itself. That is the larger one: where all gaps are
    noise, a replicate has the noise of the data and as much of its own, so a metric that grows as
    noise variance to the power p is 2^p times as large on it, and the bias of the estimate, which
    is then all of it, is 1 / (2^p - 1) times what the replicates show.

    Args:
        estimate: the value on the data.
        replicates: the centre, then the values on the resamples, NaN where undefined.
        power: p; 1/2 for binned errors, 1/3 for the smooth one.
        chance: of a binned error that is known for what it would be by chance: up to where it may
            be nothing else, and by how much it is raised at least.

    >>> interval(1.0, torch.tensor([1.0, 0.5, 1.0, 1.5]))
    Interval(low=0.525, high=1.475)
    """
    centre, drawn = float(replicates[0]), replicates[1:]
    known = drawn[torch.isfinite(drawn)].double()
    # Where a metric is undefined on many resamples, the others are no fair sample of them.
    if math.isnan(estimate + centre) or len(known) == 0 or len(known) < LEVEL * len(drawn):
        return UNKNOWN
    tail = (1 - LEVEL) / 2
    low, high = known.quantile(known.new_tensor([tail, 1 - tail])).tolist()
    mean = float(known.mean())
    bias = (mean - centre) / (2**power - 1)
    most, known_bias = chance
    low = centre - max(mean - low, 0) - max(bias, known_bias, 0)
    low = 0 if most > 0 and estimate < most else low
    high = centre + max(high - mean, 0) - min(bias, 0)
    return Interval(min(low, estimate), max(high, estimate))


def metric_interval(
    name: str, estimate: float, replicates: Tensor, chance: Chance = (0.0, 0.0)
) -> Interval:
    """The interval of a metric, cut where the metric cannot lie."""
    column = COLUMNS[name]
    found = interval(estimate, replicates, column.power, chance)
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
        verdict: "better" or "worse" as `marks` finds it among all rows, else "undecided"; None
            for a metric of which neither more nor less is better, or without resamples.
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


def marks(name: str, found: Sequence[tuple[float, Interval]]) -> list[Verdict | None]:
    """What the differences of several rows from their baselines say of a metric, taken together.

    An interval that ends at 0 stands for a chance of 5 %, one of twice the distance for that of a
    normal difference of twice as many standard errors. Of m differences the clearest must be told
    at a level of 5 % / m, the next at 5 % / (m - 1), and so on (Holm, 1979): the chance that any
    mark of a column is wrong is then 5 %. A difference below the digits shown is none, and nor
    is one without a width, as that of a recipe that changes nothing.

    Args:
        name: the metric.
        found: each difference and its interval.

    >>> clear = (-0.02, Interval(-0.0395, -0.0005))
    >>> marks("ece", [clear]), marks("ece", [clear, clear])
    (['better'], ['undecided', 'undecided'])
    """
    lengths = [abs(delta - (around.low if delta > 0 else around.high)) for delta, around in found]
    chances = [  # of a difference as clear as this, were there none
        math.erfc(NORMAL / math.sqrt(2) * abs(delta) / length) if length > 0 else math.nan
        for (delta, _), length in zip(found, lengths, strict=True)
    ]
    known = sorted(chance for chance in chances if not math.isnan(chance))
    limits = [(1 - LEVEL) / (len(known) - place) for place in range(len(known))]
    clear = takewhile(lambda pair: pair[0] <= pair[1], zip(known, limits, strict=True))
    most = max((chance for chance, _ in clear), default=-1.0)
    answers: list[Verdict | None] = []
    for (delta, around), chance in zip(found, chances, strict=True):
        merit = COLUMNS[name].better * delta
        if COLUMNS[name].better == 0 or math.isnan(around.low):
            answers.append(None)
        elif chance <= most and abs(delta) >= FLOOR:
            answers.append("better" if merit > 0 else "worse")
        else:
            answers.append("undecided")
    return answers
