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
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from featcal.core.batch import ON, Data, Head, bin_edges, bin_index, predicted, raw_logits
from featcal.core.checks import ArgumentError, InputError, whole_number
from featcal.core.fit import plain
from featcal.core.progress import calm, tell
from featcal.core.sample import first_row
from featcal.metrics import Ordered, Predictions
from featcal.metrics.columns import COLUMNS
from featcal.metrics.ordered import INTERVALS, ROWS, SMALLEST_WIDTH, series_terms, smoothed_area

FEWEST, MOST = 100, 10_000  # fewer leave too little beyond the 2.5 % quantile, more move no digit
MATRIX = 2**20  # numbers of one factor of a product: 8 MiB
BLOCK = 2**18  # numbers of one block of resamples: the passes over it then find it in the cache
TABLE = 2**23  # numbers of one table of gaps by class, bin and unit: 64 MiB
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
        unit: (n,) int16, the unit of each row, counted over the ranks in their order.
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
        size, of = rows, 0
        if samples is not None:
            numbers = torch.from_numpy(np.unique(samples.numpy()))
            size = of = len(numbers)
        many = size > (SINGLY if samples is None else GROUPS)
        dealt = np.resize(np.arange(GROUPS if many else size, dtype=np.int16), size)
        if many:
            draw.shuffle(dealt)
            size = GROUPS
        unit = torch.from_numpy(dealt)
        if samples is not None:
            parts = torch.split(samples, ROWS)
            unit = torch.cat([unit[torch.searchsorted(numbers, part)] for part in parts])
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
        stream = np.random.PCG64([checked_seed(seed), 1])
        draw, first = np.random.Generator(stream), first_row(data)
        stream.advance(first)  # a number for each row
        chance, label = torch.empty(rows, dtype=torch.float64), torch.empty(rows, dtype=torch.int32)
        samples, own = [torch.zeros(0, dtype=torch.int64)], 0
        for batch in data:
            if batch.groups is not None:
                samples.append(batch.groups.cpu())
            probs = raw_logits(batch, head).double().softmax(1).cpu()
            probs.clamp_(min=1e-300).scatter_(1, predicted(probs)[:, None], 0)
            sums, here = probs.cumsum(1), slice(own, own + len(batch))
            wanted = torch.from_numpy(draw.random(len(batch)))[:, None] * sums[:, -1:]
            label[here] = torch.searchsorted(sums, wanted)[:, 0].clamp(max=probs.shape[1] - 1)
            chance[here] = sums[:, -1].sqrt()
            own = here.stop
        stream.advance(rows - first - own)
        chance, label = chance[:own], label[:own]
        totals = dist.gather(chance.sum().view(1))  # of each process
        share = chance.cumsum_(0).add_(totals[: dist.rank()].sum()).div_(totals.sum())
        points = (torch.arange(STAND_INS) + float(draw.random())) / STAND_INS
        chosen = dist.total(torch.searchsorted(share, points.double())).clamp(max=rows - 1)
        mine = (chosen >= first) & (chosen < first + own)
        labels = torch.zeros_like(chosen)
        labels[mine] = label[chosen[mine] - first].long()
        labels = dist.total(labels)
        del chance, label, share
        of_rows = dist.gather(torch.cat(samples))
        plain = cls.draw(rows, resamples, seed, of_rows if len(of_rows) == rows else None)
        extra = np.full((STAND_INS, 1 + resamples), UNSEEN / STAND_INS, dtype=np.float32)
        extra[:, 1:] = draw.poisson(UNSEEN / STAND_INS, (STAND_INS, resamples))
        counts = torch.cat([plain.counts, torch.from_numpy(extra)])
        return cls(counts, plain.unit, chosen, labels, plain.samples)

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
        """(n + j,) int16, the unit of each row and of each stand-in."""
        return torch.cat([self.unit, torch.arange(self.size, len(self.counts), dtype=torch.int16)])

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

    A row holds fewer than m probabilities above 1 / m; all the others lie in the first bin of their
    class, where the sums over all resamples are one product of the n x k gaps with the counts. The
    gaps of the larger ones are added up by class, bin and unit where these are few, else kept.

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
        # Of each larger probability: (units, k m) its gap, or (e,) cell and unit as one number, and
        # its gap; a rank may have no rows at all.
        self._table: Tensor | None = None
        self._keys = [torch.zeros(0, dtype=torch.int64)]
        self._gaps = [torch.zeros(0, dtype=torch.float64)]
        self._unseen = [Ordered(torch.zeros(0), torch.zeros(0, dtype=torch.bool))]
        self._spread = torch.zeros(0, dtype=torch.float64)  # (k m,) summed p (1 - p) of each cell

    def add(self, logits: Tensor, seen: Predictions) -> None:
        """Takes the next rows, given as logits and as what these predict."""
        started = perf_counter()
        if self._first is None:
            self._first = Sums(self.drawn, logits.shape[1])
            self._spread = torch.zeros(logits.shape[1] * self.bins, dtype=torch.float64)
            size = len(self.drawn.counts), len(self._spread)
            if self.drawn.grouped and math.prod(size) <= TABLE:
                self._table = torch.zeros(size, dtype=torch.float64)
        first, end = self.row, self.row + len(seen)
        here = ((self.drawn.rows >= first) & (self.drawn.rows < end)).nonzero()[:, 0]
        again, labels = self.drawn.rows[here] - first, self.drawn.labels[here]
        unseen = Predictions.of(logits=logits[again], labels=labels.to(logits.device))
        # Rows that are drawn singly meet their counts here, those of groups do not.
        width = max(logits.shape[1], 0 if self.drawn.grouped else self.drawn.counts.shape[1])
        with calm(0):
            for some in row_blocks(len(seen), width):
                self._spread += self._take(seen, some, self.drawn.unit[first:end][some].long())
            self._take(unseen, slice(None), self.drawn.size + here)
        if len(unseen):
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
        on = 1 + ON * torch.finfo(probs.dtype).eps  # the edge, as in `bin_index`
        above = probs > bin_edges(self.bins, probs.dtype)[1] * on
        row, column = above.nonzero(as_tuple=True)
        cell = column * self.bins + bin_index(probs[row, column], self.bins)
        if self._table is not None:
            index = unit[row] * self._table.shape[1] + cell
            self._table.view(-1).index_add_(0, index, gaps[row, column])
        else:
            self._keys.append(cell * len(self.drawn.counts) + unit[row])
            self._gaps.append(gaps[row, column])
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
        names, rank = ("ece", "adaptive_ece"), 0
        variances = {name: torch.zeros(self.bins, dtype=torch.float64) for name in names}
        for sure, _ in ordered.ranked():
            spread, place = sure - sure.square(), torch.arange(rank, rank + len(sure))
            index = bin_index(sure.to(ordered.confidence.dtype), self.bins)
            variances["ece"].index_add_(0, index, spread)
            variances["adaptive_ece"].index_add_(0, place * self.bins // len(ordered), spread)
            rank += len(sure)
        moved = self._moved(ordered) if self.drawn.samples else {}
        variances["classwise_ece"] = dist.total(self._spread)
        found = {}
        for name, value in variances.items():
            classes = len(value) // self.bins
            v, n = value.clamp(min=1e-300), len(ordered) * classes
            size = 2 * ((v.floor() + 1) * v.log() - v - torch.lgamma(v.floor() + 1)).exp()
            size = size.maximum((2 * v).clamp(max=0.5))  # of one row |y - p| is 2 v on average
            noise, error = float(size.sum()) / n, float((v - size.square()).clamp(min=0).sum())
            error, bias = math.sqrt(error * min(classes, 2)) / n, noise
            if name in moved:
                noise = max(noise, float(moved[name].mean()))
                error = max(error, float(moved[name].std()))
            if classes == 1:  # the gaps of a few large bins are all alike, or next to it
                bias = metrics[name] - math.sqrt(max(metrics[name] ** 2 - noise**2, 0))
            found[name] = noise + NORMAL * error, bias
        return found

    def _moved(self, ordered: Ordered) -> dict[str, Tensor]:
        """Name -> (b,) how far the gaps of all bins lie from those of the data, on each resample.

        A run of equal confidences that lies in several bins of equal mass is shared among them.
        """
        n, m = len(ordered), self.bins

        def place(values: Tensor, start: Tensor, end: Tensor) -> Tensor:
            return (bin_index(values, m) * m + start * m // n) * m + (end - 1) * m // n

        places, cells, size, _ = _cells(ordered, place)
        end, edge = size.cumsum(0)[:, None], -(-torch.arange(m + 1) * n // m)
        inside = end.minimum(edge[1:]) - (end - size[:, None]).maximum(edge[:-1])
        shares = {
            "ece": F.one_hot(places // m**2, m).double(),
            "adaptive_ece": inside.clamp(min=0) / size[:, None].double(),
        }
        scale, counts = self.drawn.few / n, self.drawn.counts[: self.drawn.size].double().T
        gaps = _table(
            ordered, self.drawn.unit, self.drawn.size, cells, lambda sure, right: sure - right
        )
        found = {}
        for name, share in shares.items():
            sums = counts @ (gaps @ share)
            found[name] = scale * (sums[1:] - sums[0]).abs().sum(1)
        return found

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
        with calm(0):
            if self._table is not None:
                total += self.drawn.sums(dist.total(self._table)).abs().sum(1)
                return total / first.shape[1]
            keys = dist.gather(torch.cat(self._keys))
            self._keys.clear()
            gaps = dist.gather(torch.cat(self._gaps))
            self._gaps.clear()
            units = len(self.drawn.counts)
            if self.drawn.grouped:  # most cells meet most units
                empty, parts = (
                    torch.ones(len(self._spread), dtype=torch.bool),
                    torch.split(keys, ROWS),
                )
                for part in parts:
                    empty[torch.div(part, units, rounding_mode="floor")] = False
                before = empty.cumsum(0)
                for part in parts:  # empty cells are left out
                    part -= before[torch.div(part, units, rounding_mode="floor")] * units
                step = max(1, TABLE // 2 // units) * units
                for start in range(0, int((~empty).sum()) * units, step):
                    some = (keys >= start) & (keys < start + step)
                    table = torch.zeros(step, dtype=torch.float64)
                    table.index_add_(0, keys[some] - start, gaps[some])
                    total += self.drawn.sums(table.view(-1, units).T).abs().sum(1)
                return total / first.shape[1]
            order = keys.argsort()
            keys, gaps = keys[order], gaps[order]
            of_class = torch.div(keys, units * self.bins, rounding_mode="floor")
            sizes = torch.unique_consecutive(of_class, return_counts=True)[1].tolist()
            for key, gap in zip(torch.split(keys, sizes), torch.split(gaps, sizes), strict=True):
                unit, place = torch.unique(key % units, return_inverse=True)
                cell = torch.div(key, units, rounding_mode="floor") % self.bins
                table = torch.zeros(self.bins, len(unit), dtype=torch.float64)
                table.index_put_((cell, place), gap, accumulate=True)
                total += (table @ self.drawn.counts[unit].double()).abs().sum(0)
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
    ranks = _Pooled(ordered, drawn, bins) if drawn.grouped else _Ranks(ordered, drawn)
    width = drawn.counts.shape[1]
    # Made before the loop: small results that outlive a block would leave holes in the memory.
    found = torch.empty(len(RANKED), width, dtype=torch.float64)
    step = max(1, BLOCK // ranks.steps.shape[-1])
    with calm(0):
        for start in range(0, width, step):
            tell("resampling", start, width - 1)
            sums = ranks.sums(ranks.steps[start : start + step])
            block = _Ranked(sums[0][:, -1], sums[2][:, -1], bins)
            block.add(ranks.cells, ranks.mixed, sums)
            found[:, start : start + step] = torch.stack(block.metrics())
    tell("resampling", width - 1, width - 1)
    if drawn.grouped:  # the cells blur a value a little, and all of them alike
        found += _undrawn(ordered, drawn, bins) - found[:, :1]
    return dict(zip(RANKED, found, strict=True))


@final
class _Ranks:
    """The rows in ascending order of confidence, in cells of equal ones.

    A row drawn c times is a run of c equal confidences, and so is every tie of the data. Inside a
    cell the cumulative confidence and the expected cumulative correctness grow linearly with the
    rank (see `metrics/ordered.py`), so their values at any rank follow from those at the ends of
    the cells: everything is a function of three cumulative sums, of the rows up to the end of each
    cell, their confidences and their correctness.
    """

    def __init__(self, ordered: Ordered, drawn: Resamples) -> None:
        order = ordered.confidence.argsort()
        self.cells, cell, size = torch.unique(
            ordered.confidence, return_inverse=True, return_counts=True
        )
        self.steps = drawn.counts[order].T.contiguous()
        self.values = torch.stack([ordered.confidence.double(), ordered.correct.double()])[:, order]
        # (c + 1,) rows up to the end of each cell, 0 first; None when every cell is one row
        self.ends = None
        if len(self.cells) < len(ordered):
            self.ends = torch.cat([size.new_zeros(1), size.cumsum(0)])
        # Cells with a wrong row; the others add nothing to AUROC and AURC.
        self.mixed = torch.unique(cell[~ordered.correct])

    def sums(self, steps: Tensor) -> list[Tensor]:
        """The three cumulative sums, (b, c + 1) each, of resamples told by how often rows come."""
        rows = torch.zeros(len(steps), steps.shape[1] + 1, dtype=torch.float64)
        rows[:, 1:] = steps
        sums = [rows.cumsum(1)]
        for values in self.values:
            sums.append(torch.zeros_like(rows))
            torch.mul(rows[:, 1:], values, out=sums[-1][:, 1:])
            sums[-1].cumsum_(1)
        return sums if self.ends is None else [_columns(part, self.ends) for part in sums]


@final
class _Pooled:
    """Many rows in few cells of nearly equal mass, cut at the edges of the bins as well."""

    def __init__(self, ordered: Ordered, drawn: Resamples, bins: int) -> None:
        distinct = sum(len(values) for values, _, _ in ordered.runs())

        def place(values: Tensor, _: Tensor, end: Tensor) -> Tensor:
            if distinct <= CELLS:
                return end
            mass = torch.div((end - 1) * CELLS, len(ordered), rounding_mode="floor")
            return mass * bins + bin_index(values, bins)

        _, self.cells, _, wrong = _cells(ordered, place)
        self.mixed = wrong.nonzero()[:, 0]
        parts, unit = [], drawn.units()
        for what in (
            lambda sure, _: torch.ones_like(sure),
            lambda sure, _: sure,
            lambda _, right: right,
        ):
            parts.append(drawn.sums(_table(ordered, unit, len(drawn.counts), self.cells, what)))
        # (1 + b, 3, c) rows, confidences and correctness in each cell of each resample
        self.steps = torch.stack(parts, 1)

    def sums(self, steps: Tensor) -> list[Tensor]:
        """The three cumulative sums, (b, c + 1) each, of resamples told by cell."""
        return [F.pad(part, (1, 0)).cumsum(1) for part in steps.unbind(1)]


def _undrawn(ordered: Ordered, drawn: Resamples, bins: int) -> Tensor:
    """(10, 1): the metrics of RANKED of all rows once and what stand-ins weigh, without pooling."""
    rows, weight = len(drawn.unit), float(drawn.counts[-1, 0])
    unseen = ordered.confidence[rows:]
    # Runs count every row and stand-in once: this is too much.
    more = (1 - weight) * torch.stack([torch.ones(len(unseen)), ordered.correct[rows:]]).double()
    n, right = (
        torch.tensor([every], dtype=torch.float64) - surplus
        for every, surplus in zip(
            (len(ordered), int(ordered.correct.count_nonzero())), more.sum(1), strict=True
        )
    )
    found, so_far = _Ranked(n, right, bins), torch.zeros(3, 1, dtype=torch.float64)
    for values, size, correct in ordered.runs():
        here = (unseen >= values[0]) & (unseen <= values[-1])
        count = torch.stack([size, correct]).double()
        count.index_add_(1, torch.searchsorted(values, unseen[here]), more[:, here], alpha=-1)
        steps = torch.stack([count[0], count[0] * values.double(), count[1]])
        sums = torch.cat([so_far, steps], 1).cumsum(1)
        found.add(values, (size > correct).nonzero()[:, 0], list(sums[:, None]))
        so_far = sums[:, -1:]
    return torch.stack(found.metrics())


def _cells(ordered: Ordered, place: Callable[[Tensor, Tensor, Tensor], Tensor]) -> list[Tensor]:
    """The places, highest confidences, rows and wrong rows of cells: of neighbours at one place.

    Args:
        ordered: the rows.
        place: of runs, from their values and the rows up to their starts and up to their ends.
    """

    def joined(places: Tensor, *parts: Tensor) -> list[Tensor]:
        _, at, count = torch.unique_consecutive(places, return_inverse=True, return_counts=True)
        last, (values, *numbers) = count.cumsum(0) - 1, parts
        sums = [torch.zeros_like(last).index_add_(0, at, number) for number in numbers]
        return [places[last], values[last], *sums]

    found, rows = [], 0
    for values, size, right in ordered.runs():
        end = rows + size.cumsum(0)
        found.append(joined(place(values, end - size, end), values, size, size - right))
        rows = int(end[-1])
    return joined(*map(torch.cat, zip(*found, strict=True)))


def _table(
    ordered: Ordered,
    unit: Tensor,
    units: int,
    cells: Tensor,
    what: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """(units, c) float64: what confidence and correctness say, summed by unit and cell."""
    table = torch.zeros(units, len(cells), dtype=torch.float64)
    parts = (ordered.confidence, ordered.correct, unit)
    for sure, right, of in zip(*(torch.split(part, ROWS) for part in parts), strict=True):
        index = of.long() * len(cells) + torch.searchsorted(cells, sure)
        table.view(-1).index_add_(0, index, what(sure.double(), right.double()))
    return table


@final
class _Ranked:
    """The metrics of RANKED on b resamples, from cells in ascending order, some at a time.

    Attributes:
        n: (b,) the rows of each resample,
        right: and those that are right.
    """

    def __init__(self, n: Tensor, right: Tensor, bins: int) -> None:
        self.n, self.right, self.m = n, right, bins
        rows, place = n[:, None], torch.arange(1.0, bins + 1)
        small = torch.div(rows, bins, rounding_mode="floor")
        self.wanted = place * small + place.minimum(rows - bins * small)
        self.bins = torch.zeros(3, len(n), bins, dtype=torch.float64)
        self.groups = torch.zeros(2, len(n), bins, dtype=torch.float64)
        self.sure = self.won = self.area = torch.zeros_like(n)

    def add(self, values: Tensor, mixed: Tensor, sums: list[Tensor]) -> None:
        """Adds c cells.

        Args:
            values: (c,) their confidences.
            mixed: which of them have a wrong row; the others add nothing to AUROC and AURC.
            sums: the three cumulative sums, (b, 1 + c) each, from before the first of them.
        """
        # Bins of equal width.
        ends = torch.searchsorted(bin_index(values, self.m), torch.arange(self.m), right=True)
        for so_far, part in zip(self.bins, sums, strict=True):
            so_far += torch.diff(part[:, ends], prepend=part[:, :1])
        # Summed confidence and expected correctness up to the end of each group: (b, m) each.
        count, sure, right = sums
        here = (self.wanted > count[:, :1]) & (self.wanted <= count[:, -1:])
        end = torch.searchsorted(count, self.wanted).clamp(1, count.shape[1] - 1)
        start = end - 1  # rank 0 lies before every cell
        before = count.gather(1, start)
        width = count.gather(1, end) - before
        share = (self.wanted - before) / torch.where(width > 0, width, 1)
        for so_far, part in zip(self.groups, (sure, right), strict=True):
            at = torch.lerp(part.gather(1, start), part.gather(1, end), share)
            so_far += torch.where(here, at, 0.0)
        self.sure = sure[:, -1]
        self._selective(count, right, mixed)

    def _selective(self, count: Tensor, right: Tensor, mixed: Tensor) -> None:
        """AUROC and AURC."""
        before, after = _columns(count, mixed), _columns(count, mixed + 1)
        right_before, right_after = _columns(right, mixed), _columns(right, mixed + 1)
        size, n = after - before, self.n[:, None]
        wrong = size - (right_after - right_before)
        # A right row beats every wrong one before its cell and, by half, those of its own.
        beaten_by = self.right[:, None] - (right_before + right_after) / 2
        self.won = self.won + (wrong * beaten_by).sum(1)
        # The most confident rows come first here and last among the sorted ones. An error at place
        # j counts in the error rate of the k >= j most confident, 1/k in each: the sum over j = 1,
        # ..., i of 1/j + ... + 1/n is i (1 + H_n - H_i), with the harmonic numbers H.
        areas = [
            i * (1 + torch.special.digamma(n + 1) - torch.special.digamma(i + 1))
            for i in (n - before, n - after)
        ]
        share = wrong / torch.where(size > 0, size, 1)
        self.area = self.area + (share * (areas[0] - areas[1])).sum(1)

    def metrics(self) -> list[Tensor]:
        """The metrics, (b,) each, once all cells are in."""
        n = self.n
        confidence, accuracy = self.sure / n, self.right / n
        # An empty bin has no gap, and its total is 0.
        size, said, hits = self.bins
        total = said - hits
        gap = total / torch.where(size > 0, size, 1)
        ece, mce = total.abs().sum(1) / n, gap.abs().amax(1)
        rms_ce = ((size * gap.square()).sum(1) / n).sqrt()
        means = (accuracy, confidence, confidence - accuracy)
        pairs = self.right * (n - self.right)
        auroc = torch.where(pairs > 0, self.won / pairs, math.nan)
        return [*means, ece, mce, rms_ce, *self._equal_mass(), auroc, self.area / n]

    def _equal_mass(self) -> tuple[Tensor, Tensor]:
        """Adaptive ECE and debiased error."""
        size, confidence, right = map(_steps, (self.wanted, *self.groups))
        total = (confidence - right).abs().sum(1) / self.n
        accuracy = right / size.clamp(min=1)
        bias = accuracy * (1 - accuracy) / (size - 1).clamp(min=1)
        square = size * ((confidence / size.clamp(min=1) - accuracy).square() - bias)
        # The variance of a smaller group is unknown.
        square = torch.where(size >= 2, square, 0.0).sum(1) / self.n
        return total, square.clamp(min=0).sqrt()


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
        self.ordered, self.drawn, self.rows, self.unit = ordered, drawn, rows, drawn.units()
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
            for some in row_blocks(len(self.unit), max(len(k), len(self.rows))):
                sure = self.ordered.confidence[some, None].double()
                gaps = sure - self.ordered.correct[some, None].double()
                more.add(self.unit[some].long(), (sure * math.pi * k).cos_().mul_(gaps))
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
