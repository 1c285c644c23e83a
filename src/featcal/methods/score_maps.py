"""Maps of a score to a probability, kept as tables: histogram binning, BBQ, isotonic, spline.

Histogram binning (Zadrozny and Elkan, ICML 2001) and its Bayesian average, BBQ (Naeini et al.,
2015), are step functions of the log-odds: a bin's confidence is, more or less, its accuracy.
Isotonic regression (Zadrozny and Elkan, KDD 2002; Zhang et al., 2020) is the ascending function
nearest to the hits, and spline calibration (Gupta et al., 2021) needs no bins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from featcal.core import dist
from featcal.core.batch import Batch, Data, bin_edges, stored_logits
from featcal.core.calibrator import LogitMap, keep_prediction, with_confidence
from featcal.core.checks import InputError, check_choice, check_flags, check_whole
from featcal.core.fit import Problem, StepReport, settle
from featcal.methods import score_tables as tables
from featcal.methods.score_tables import Array, Levels, Places

EDGES = ("mass", "width")
READINGS = ("top", "one_vs_rest")
CERTAIN = 20.0  # log-odds that stand for 0 and 1 where values are not smoothed
GATHERED = 2**24  # scores of all rows that are held at once
PRIOR_ROWS = 2.0  # rows the prior of BBQ counts for, over all bins of a histogram: N' in the paper
NEGLIGIBLE = 1e-7  # a histogram that weighs less could not move a float32 digit

ISOTONIC_READINGS = ("multiclass", "one_vs_rest", "top")
BETWEEN = ("line", "step")
TIE_BREAK = 2.0**-14  # of the log-odds, in the logarithm: enough for float32 to tell classes apart
PUBLISHED_TIE_BREAK = 1e-9  # of the probability, added to the fitted one
ZERO = 100.0  # log-odds whose probability is 0 or 1 beside the published tie break
ROUNDS = 8  # of pooling whole descents before a stack takes what is left

MOST_NODES = 1024  # of a spline


class StepMap(LogitMap):
    """Gives the predicted class, or each class by itself, the value of its bin."""

    keeps_accuracy = True
    many = True
    jumps = True  # a row at an edge changes bins with the last digit of its logits
    quick = "temperature"
    reading = "top"
    edges_at: Tensor
    values: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges_at", torch.empty(0))
        self.register_buffer("values", torch.empty(0))

    def map_logits(self, logits: Tensor) -> Tensor:
        """Looks up the bin's value."""
        if self.values.numel() == 0 or logits.shape[1] == 1:
            return logits
        if self.reading == "top":
            found = tables.steps(tables.log_odds(logits), self.edges_at, self.values)
            return with_confidence(logits, found.sigmoid())
        found = tables.steps(tables.class_log_odds(logits), self.edges_at, self.values)
        return logsigmoid(found).to(logits.dtype)


@final
class HistogramBinning(StepMap):
    """Cuts the confidences into bins and gives each row the accuracy of its bin.

    Bins are (lo, hi] and kept in log-odds. An empty bin keeps its centre.

    Args:
        bins: how many.
        edges: "mass" for bins of equal mass, cut at quantiles, rows of equal confidence together;
            "width" for bins of equal width.
        reading: "top" bins the predicted class's confidence: it becomes the bin's value, the other
            classes share the rest as before, and the prediction stays, at the price of a confidence
            just above the runner-up's where the bin's value is lower. "one_vs_rest" bins each
            class's probability for itself and divides a row by its sum; predictions may change.
            Bins of equal mass are too coarse for it when there are many classes.
        smooth: (hits + 1) / (rows + 2) instead of hits / rows, and (hits + 2/k) / (rows + 2) for
            "one_vs_rest", whose k values make up one row.
    """

    name = "histogram"
    title = "histogram binning"

    def __init__(
        self, *, bins: int = 15, edges: str = "mass", reading: str = "top", smooth: bool = True
    ) -> None:
        super().__init__()
        check_whole(self.name, 1, bins=bins)
        check_choice(self.name, "edges", edges, EDGES)
        check_choice(self.name, "reading", reading, READINGS)
        check_flags(self.name, smooth=smooth)
        self.bins, self.edges, self.reading, self.smooth = bins, edges, reading, smooth
        self.keeps_accuracy = reading == "top"

    def learn(self, problem: Problem) -> list[StepReport]:
        """Counts hits in bins."""
        self.reset()
        if self.reading == "top":
            levels = tables.top_levels(problem.data)
            edges, values = map(torch.tensor, self._table(levels, 1.0, 0.0))
        else:
            edges, values = map(tables.stacked, zip(*self._class_tables(problem), strict=True))
        self.assign(edges_at=edges, values=values)
        low, high = (float(value) for value in self.values.sigmoid().aminmax())
        count = self.values.shape[-1]
        message = f"bins of equal {self.edges}: {count}, with values from {low:.4g} to {high:.4g}"
        return [settle(self, problem, {"bins": count, "lowest": low, "highest": high}, message)]

    def _class_tables(self, problem: Problem) -> list[tuple[Array, Array]]:
        """A table per class, from as many classes per pass as can be gathered at once."""
        classes, rows = problem.facts.classes, problem.facts.rows
        floor = 1 / ((rows + 1) * classes)  # no value is 0: a row of zeros has no sum to divide by
        found = []
        width = max(1, GATHERED // rows)
        for first in range(0, classes, width):
            last = min(first + width, classes)
            scores, labels = [torch.zeros(0, last - first)], [torch.zeros(0, dtype=torch.int64)]
            for batch in problem.data:
                odds = tables.class_log_odds(stored_logits(batch))[:, first:last]
                scores.append(odds.float().cpu())
                labels.append(batch.labels.cpu())
            every, label = dist.gather(torch.cat(scores)), dist.gather(torch.cat(labels))
            for number, column in enumerate(every.T, first):
                found.append(self._table(Levels.of(column, label == number), 2 / classes, floor))
        return found

    def _table(self, levels: Levels, prior: float, floor: float) -> tuple[Array, Array]:
        """Edges and values in log-odds; `prior` of the 2 rows added for smoothing are hits."""
        if self.edges == "mass":
            cuts = tables.equal_mass(levels, self.bins)
            edges, (rows, hits) = levels.edges(cuts), levels.parts(cuts)
            centres = np.zeros(len(rows))  # no bin is empty
        else:
            bounds = bin_edges(self.bins, torch.float64).numpy()
            edges, centres = tables.odds_of(bounds[1:-1]), (bounds[1:] + bounds[:-1]) / 2
            place = np.searchsorted(edges.astype(np.float32), levels.at)
            rows = np.bincount(place, levels.rows, self.bins).astype(np.float64)
            hits = np.bincount(place, levels.hits, self.bins).astype(np.float64)
        more_hits, more_rows = (prior, 2.0) if self.smooth else (0.0, 0.0)
        shares = np.where(rows > 0, (hits + more_hits) / np.maximum(rows + more_rows, 1), centres)
        return edges, tables.odds_of(np.clip(shares, floor, 1 - floor)).clip(-CERTAIN, CERTAIN)


@final
class BBQ(StepMap):
    """Averages histograms of equal mass, each weighted by its Beta-binomial marginal likelihood.

    A histogram of B bins has the prior Beta(a_b, c_b) in bin b, with a_b = 2/B times the middle of
    the bin and a_b + c_b = 2/B; its value there is the posterior mean. B runs from n^(1/3) / 10 to
    10 n^(1/3). The average is itself a step function, which is what is kept; no value is surer than
    n right rows in a row make it, (n + 1) / (n + 2). The predicted class gets the value, the others
    share the rest as before, and the prediction stays.
    """

    name = "bbq"
    title = "Bayesian binning into quantiles"

    def learn(self, problem: Problem) -> list[StepReport]:
        """Scores every histogram and averages those that count."""
        self.reset()
        levels = tables.top_levels(problem.data)
        scale = round(math.cbrt(levels.rows.sum()), 9)  # 30, not a hair less, for 27,000 rows
        most = min(math.ceil(10 * scale), len(levels.at))
        fewest = min(max(1, math.floor(scale / 10)), most)
        cuts = [tables.equal_mass(levels, bins) for bins in range(fewest, most + 1)]
        values, logs = zip(*(posterior(levels, cut) for cut in cuts), strict=True)
        weights = np.exp(np.array(logs) - np.logaddexp.reduce(logs))
        kept = [number for number, weight in enumerate(weights) if weight > NEGLIGIBLE]
        ends = np.unique(np.concatenate([cuts[number] for number in kept]))
        shares = np.zeros(len(ends) + 1)
        for number in kept:
            bin_of = np.searchsorted(cuts[number], np.append(ends, np.iinfo(np.intp).max))
            shares += weights[number] * values[number][bin_of]
        shares /= sum(weights[number] for number in kept)
        bound = 1 / (problem.facts.rows + 2)
        odds = tables.odds_of(shares.clip(bound, 1 - bound))
        self.assign(edges_at=torch.tensor(levels.edges(ends)), values=torch.tensor(odds))
        bins = float(sum(w * len(value) for w, value in zip(weights, values, strict=True)))
        message = (
            f"histograms averaged: {len(cuts)}, with {bins:.3g} bins by weight; "
            f"steps of the average: {len(shares)}"
        )
        return [settle(self, problem, {"bins": bins, "steps": len(shares)}, message)]


def posterior(levels: Levels, cuts: Places) -> tuple[Array, float]:
    """The posterior means of the bins cut after these levels, and the histogram's log-evidence."""
    rows, hits = levels.parts(cuts)
    edges = np.concatenate([[-np.inf], levels.edges(cuts), [np.inf]])
    # The middle of a bin and its complement, each from its own side: 1 - p cancels near 1.
    middle, rest = (torch.from_numpy(sign * edges).sigmoid().numpy() for sign in (1.0, -1.0))
    prior = PRIOR_ROWS / len(rows)
    right, wrong = (
        np.maximum(prior * (part[1:] + part[:-1]) / 2, 1e-300) for part in (middle, rest)
    )

    def log_beta(a: Array, b: Array) -> Array:
        gamma = [torch.from_numpy(x).lgamma().numpy() for x in (a, b, a + b)]
        return np.asarray(gamma[0] + gamma[1] - gamma[2])

    gain = log_beta(hits + right, rows - hits + wrong) - log_beta(right, wrong)
    return (hits + right) / (rows + prior), float(gain.sum())


@final
class Isotonic(LogitMap):
    """An ascending map of probabilities, fitted by pooling adjacent violators on log-odds.

    The ascending function nearest to the hits is constant on blocks. Lines from the centre of a
    block to that of the next (centred isotonic regression, Oron and Flournoy, 2017) take its jumps
    away, so that rounding cannot carry a row across one and different scores stay different.
    Beyond the outermost blocks the map is constant. No value is 0 or 1: they end at 1 / ((n + 1) k)
    and (n + 1) / (n + 2), beyond every other value n rows can give.

    Args:
        reading: "multiclass" fits one map to all n k pairs of a row and a class (IRM): the
            predicted class gets its fitted value, the others share the rest in proportion to
            theirs, and the prediction stays. "one_vs_rest" fits one map to each class and divides a
            row by its sum (IROvA); predictions may change, and the map of a rare class is coarse.
            "top" fits one map to the predicted classes alone; the others share the rest as before.
        between: "line" from the centre of a block to that of the next, in log-odds; "step" halfway
            between the blocks.
        reference: as published: the map is flat on each block and linear in the probability from
            one block to the next, 1e-9 p is added to break ties, and a row is divided by its sum.
            float32 cannot hold that tie break, so that predictions may change.
    """

    name = "isotonic"
    title = "isotonic regression"
    keeps_accuracy = True
    many = True
    quick = "temperature"
    nodes: Tensor
    values: Tensor

    def __init__(
        self, *, reading: str = "multiclass", between: str = "line", reference: bool = False
    ) -> None:
        super().__init__()
        check_choice(self.name, "reading", reading, ISOTONIC_READINGS)
        check_choice(self.name, "between", between, BETWEEN)
        check_flags(self.name, reference=reference)
        if reference and (reading == "top" or between != "line"):
            raise InputError(
                "isotonic: reference=True is multiclass or one_vs_rest, with lines of its own: "
                "leave between out and choose one of these readings"
            )
        self.reading, self.between, self.reference = reading, between, reference
        self.keeps_accuracy = reading != "one_vs_rest" and not reference
        self.jumps = between == "step"
        self.register_buffer("nodes", torch.empty(0))
        self.register_buffer("values", torch.empty(0))

    def map_logits(self, logits: Tensor) -> Tensor:
        """Looks up the fitted probabilities and makes a row of them."""
        if self.values.numel() == 0 or logits.shape[1] == 1:
            return logits
        look_up = tables.lines if self.between == "line" else tables.steps
        if self.reading == "top":
            found = look_up(tables.log_odds(logits), self.nodes, self.values)
            return with_confidence(logits, found.sigmoid())
        odds = tables.class_log_odds(logits)
        if self.reference:
            fitted = tables.lines(odds, self.nodes, self.values.float().sigmoid(), probable=True)
            nudge = logits.log_softmax(1) + math.log(PUBLISHED_TIE_BREAK)
            return torch.logaddexp(fitted.to(logits.dtype).log(), nudge)
        found = look_up(odds, self.nodes, self.values)
        fitted = logsigmoid(found).to(logits.dtype)
        if self.reading == "one_vs_rest":
            return fitted
        ranked = keep_prediction(fitted + TIE_BREAK * odds, logits)
        return with_confidence(ranked, found.amax(1).sigmoid())

    def learn(self, problem: Problem) -> list[StepReport]:
        """Pools adjacent violators and keeps the blocks as a table."""
        self.reset()
        fits = fit_blocks(problem.data, self.reading, problem.facts.classes)
        parts = zip(*(self._table(fit, problem) for fit in fits), strict=True)
        nodes, values = map(tables.stacked, parts)
        counts = [len(fit.share) for fit in fits]
        message = f"one fit a class, of {min(counts)} to {max(counts)} blocks"
        if self.reading != "one_vs_rest":
            nodes, values = nodes[0], values[0]
            message = f"blocks of the fit: {counts[0]}"
        self.assign(nodes=nodes, values=values)
        always = self.reference and problem.facts.classes > 1
        return [settle(self, problem, {"blocks": sum(counts)}, message, always=always)]

    def _table(self, fit: Blocks, problem: Problem) -> tuple[Array, Array]:
        """Where the map has its nodes or edges, and its values, in log-odds."""
        if self.reference:
            ends = np.stack([fit.low, fit.high], 1).ravel()
            return ends, tables.odds_of(fit.share).clip(-ZERO, ZERO).repeat(2)
        rows, classes = problem.facts.rows, problem.facts.classes
        low = 1 / (rows + 2) if self.reading == "top" else 1 / ((rows + 1) * classes)
        values = tables.odds_of(fit.share.clip(low, 1 - 1 / (rows + 2)))
        if self.between == "step":
            return tables.halfway(fit.high[:-1], fit.low[1:]), values
        times = 2 if len(values) == 1 else 1  # a line needs two ends
        return fit.centre.repeat(times), values.repeat(times)


@dataclass(frozen=True)
class Blocks:
    """The blocks of one isotonic fit, ascending.

    Attributes:
        low: (b,) the lowest log-odds in each block.
        high: (b,) the highest.
        centre: (b,) the log-odds of the block's mean probability.
        share: (b,) its share of hits.
    """

    low: Array
    high: Array
    centre: Array
    share: Array


def fit_blocks(data: Data, reading: str, classes: int) -> list[Blocks]:
    """One isotonic fit, or one per class, without holding more than n numbers.

    Between two neighbouring positives (pairs of a row and its label) the fit is constant, so all it
    needs of the many negatives is how many lie in each gap: one pass gathers the n positives, a
    second one counts the rest. Slot 2j + 1 of a fit is its j-th positive, slot 2j the gap before.

    Args:
        data: the batches, read twice.
        reading: "top" for pairs of predicted class and whether it is right, "multiclass" for all
            pairs of a row and a class, "one_vs_rest" for the pairs of each class by themselves.
        classes: k.
    """
    parts = [torch.zeros(0, 2, dtype=torch.float64)]
    for batch in data:
        scores, hit = _pairs(batch, reading)
        parts.append(torch.stack([scores[hit].double(), hit.nonzero()[:, 1].double()], 1))
    found, fit_of = dist.gather(torch.cat(parts)).unbind(1)
    every = [found[fit_of == fit] for fit in range(classes if reading == "one_vs_rest" else 1)]
    positives = [Levels.of(scores, torch.ones_like(scores)) for scores in every]
    known = [torch.from_numpy(np.append(levels.at, np.inf)).float() for levels in positives]
    *starts, slots = np.cumsum([0, *(2 * len(at) - 1 for at in known)]).tolist()
    sums = torch.zeros(2, slots, dtype=torch.float64)  # negatives: count, summed p
    ends = torch.full((2, slots), -torch.inf)  # the largest of score and of -score
    for batch in data:
        scores, hit = _pairs(batch, reading)
        for column, (at, start) in enumerate(zip(known, starts, strict=True)):
            misses = scores[:, column][~hit[:, column]]
            place = torch.searchsorted(at, misses)
            slot = start + 2 * place + (at[place] == misses)
            sums[0].index_add_(0, slot, torch.ones_like(misses, dtype=torch.float64))
            sums[1].index_add_(0, slot, misses.double().sigmoid())
            ends.scatter_reduce_(1, slot.expand(2, -1), torch.stack([misses, -misses]), "amax")
    counted = torch.cat([dist.total(sums), dist.largest(ends)]).numpy()
    parts_of = np.split(counted, starts[1:], axis=1)
    return [_blocks(*pair) for pair in zip(positives, parts_of, strict=True)]


def _pairs(batch: Batch, reading: str) -> tuple[Tensor, Tensor]:
    """Scores and hits of all pairs, one column per fit: float32 and bool."""
    logits = stored_logits(batch)
    if reading == "top":
        scores, hit = tables.log_odds(logits)[:, None], (logits.argmax(1) == batch.labels)[:, None]
    else:
        scores = tables.class_log_odds(logits)
        hit = batch.labels[:, None] == torch.arange(logits.shape[1], device=logits.device)
        if reading == "multiclass":
            scores, hit = scores.reshape(-1, 1), hit.reshape(-1, 1)
    return scores.float().cpu(), hit.cpu()


def _blocks(positives: Levels, negatives: Array) -> Blocks:
    """The isotonic fit of positives and negatives (4, slots) together."""
    rows, mass, high, low = negatives.copy()
    at, hits = positives.at, np.zeros_like(rows)
    hits[1::2] = positives.rows
    rows += hits
    mass[1::2] += positives.rows * torch.from_numpy(at).sigmoid().numpy()
    high[1::2], low[1::2] = at, -at
    rows, hits, mass, high, low = (part[rows > 0] for part in (rows, hits, mass, high, low))
    starts = pool(hits, rows)
    last = np.append(starts[1:], len(rows)) - 1
    rows, hits, mass = (np.add.reduceat(part, starts) for part in (rows, hits, mass))
    low, high = -low[starts], high[last]
    centre = tables.odds_of(mass / rows).clip(low, high)  # the mean, and never outside by rounding
    return Blocks(low, high, centre, hits / rows)


def pool(sums: Array, weights: Array) -> Places:
    """The first place of each block of the isotonic fit, whose values are the blocks' means.

    Pool adjacent violators (Ayer et al., 1955). Every descent, however long, ends up in one block:
    a few rounds pool whole descents, then a stack joins each place with the blocks before it while
    they are higher.

    Args:
        sums: (l,) summed targets of each place.
        weights: (l,) their weights, above 0.

    >>> pool(np.array([1.0, 3.0, 2.0, 4.0]), np.ones(4)).tolist()
    [0, 1, 3]
    """
    firsts: Places = np.arange(len(sums))
    for _ in range(ROUNDS):
        means = sums / weights
        first = np.flatnonzero(np.append(True, means[1:] > means[:-1]))
        firsts = firsts[first]
        sums, weights = np.add.reduceat(sums, first), np.add.reduceat(weights, first)
    blocks: list[tuple[int, float, float]] = []  # first place, sum, weight
    for place, total, weight in zip(firsts.tolist(), sums.tolist(), weights.tolist(), strict=True):
        block = place, total, weight
        while blocks and blocks[-1][1] / blocks[-1][2] >= block[1] / block[2]:
            before = blocks.pop()
            block = before[0], before[1] + block[1], before[2] + block[2]
        blocks.append(block)
    return np.array([block[0] for block in blocks])


@final
class Spline(LogitMap):
    """Adds h'(t) to the predicted class's confidence; the other classes share the rest as before.

    With scores in ascending order, h(t) is the sum of (hit - score) over the first share t of the
    rows, divided by n. Its slope at t is how far the score there is from the truth, so a spline
    fitted to h needs no bins: the recalibrated score is s + h'(t).

    h is a natural cubic spline in t, fitted by least squares. Between the confidences of the fit
    split the shift is linear in the confidence, and constant beyond them; at most 1,024 of them
    are kept, at equal steps of t. Confidences end at 1 / (n + 2) and (n + 1) / (n + 2). The map
    need not ascend; the prediction stays. Rows of equal confidence count with their mean.

    Args:
        knots: of the spline, equally spaced over t from 0 to 1.
        reference: as published: all confidences are kept, the two weights of the interpolation are
            swapped, and results end at 0 and 1.
    """

    name = "spline"
    title = "spline calibration"
    keeps_accuracy = True
    quick = "temperature"
    nodes: Tensor
    shifts: Tensor
    bound: Tensor

    def __init__(self, *, knots: int = 6, reference: bool = False) -> None:
        super().__init__()
        check_whole(self.name, 2, knots=knots)
        check_flags(self.name, reference=reference)
        self.knots, self.reference = knots, reference
        self.jumps = reference  # swapped weights: the two sides of a node do not meet
        self.register_buffer("nodes", torch.empty(0))  # log-odds, ascending
        self.register_buffer("shifts", torch.empty(0))  # of the confidence
        self.register_buffer("bound", torch.zeros(()))

    def map_logits(self, logits: Tensor) -> Tensor:
        """Shifts the confidence."""
        if self.shifts.numel() == 0:
            return logits
        odds, bound = tables.log_odds(logits).float(), self.bound.float()
        if self.reference:
            # Between a and b the published code gives the value of a at b, and that of b at a.
            nodes = self.nodes.float()
            values = nodes.sigmoid() + self.shifts.float()
            right = torch.bucketize(odds, nodes).clamp(1, len(nodes) - 1)
            here = tables.lines(odds, nodes, values, probable=True)
            inside = (odds > nodes[0]) & (odds < nodes[-1])
            found = torch.where(inside, values[right] + values[right - 1] - here, here)
        else:
            found = odds.sigmoid() + tables.lines(odds, self.nodes, self.shifts, probable=True)
        return with_confidence(logits, torch.minimum(torch.maximum(found, bound), 1 - bound))

    def learn(self, problem: Problem) -> list[StepReport]:
        """Fits the spline and keeps its slope at the confidences of the fit split."""
        self.reset()
        levels = tables.top_levels(problem.data)
        shifts = fitted_shifts(levels, self.knots, published=self.reference)
        kept = slice(None) if self.reference else thinned(levels, MOST_NODES)
        nodes, shifts = levels.at[kept], shifts[kept]
        times = 2 if len(nodes) == 1 else 1  # a line needs two ends
        self.assign(
            nodes=torch.tensor(nodes.repeat(times)),
            shifts=torch.tensor(shifts.repeat(times)),
            bound=0.0 if self.reference else 1 / (problem.facts.rows + 2),
        )
        low, high = float(shifts.min()), float(shifts.max())
        message = f"confidences move by {low:+.4g} to {high:+.4g}"
        values = {"shift_min": low, "shift_max": high}
        always = self.reference and problem.facts.classes > 1
        return [settle(self, problem, values, message, always=always)]


def fitted_shifts(levels: Levels, knots: int, *, published: bool = False) -> Array:
    """h'(t) of each level, the mean over its rows.

    The i-th row stands between t = (i - 1) / n and i / n: h is known at these ends, its slope is
    taken halfway. The published code has n equal steps from 0 to 1 and takes both at them.
    """
    rows = levels.rows.astype(np.int64)
    count = int(rows.sum())
    scores = torch.from_numpy(levels.at).sigmoid().numpy()
    sums = (levels.hits / levels.rows - scores).repeat(rows).cumsum() / count
    known = halfway = np.linspace(0, 1, count)
    if not published:
        known, halfway = np.arange(count + 1) / count, (np.arange(count) + 0.5) / count
        sums = np.concatenate([[0.0], sums])
    knots = max(2, min(knots, len(known)))
    at_knots = np.linalg.lstsq(natural_spline(known, knots)[0], sums, rcond=None)[0]
    slopes = natural_spline(halfway, knots)[1] @ at_knots
    return np.asarray(np.add.reduceat(slopes, rows.cumsum() - rows) / rows)


def natural_spline(t: Array, knots: int) -> tuple[Array, Array]:
    """Value and slope at t of the natural cubic spline through given values at its knots.

    Both are linear in the values: (n, knots) matrices to multiply them with. `bends` are the second
    derivatives at the knots, times width^2 / 6: continuous slopes ask for m[j-1] + 4 m[j] + m[j+1]
    = y[j-1] - 2 y[j] + y[j+1], and a natural spline has none at either end.
    """
    width = 1 / (knots - 1)
    left = np.clip((t / width).astype(np.int64), 0, knots - 2)
    b = (t / width - left)[:, None]  # the part of the way to the next knot
    a = 1 - b
    inner = knots - 2
    unit, bends = np.eye(knots), np.zeros((knots, knots))
    if inner:
        system = 4 * np.eye(inner) + np.eye(inner, k=1) + np.eye(inner, k=-1)
        second = np.eye(inner, knots) - 2 * np.eye(inner, knots, 1) + np.eye(inner, knots, 2)
        bends[1:-1] = np.linalg.solve(system, second)
    start, end, bend_start, bend_end = unit[left], unit[left + 1], bends[left], bends[left + 1]
    value = a * start + b * end
    value += (a**3 - a) * bend_start + (b**3 - b) * bend_end
    slope = end - start + (1 - 3 * a**2) * bend_start + (3 * b**2 - 1) * bend_end
    return value, slope / width


def thinned(levels: Levels, most: int) -> Places:
    """Levels at equal steps of t, first and last among them.

    What is left out lies within max |h''| / (most - 1) of the line that takes its place.
    """
    ends = levels.rows.cumsum()
    ranks = np.linspace(0, ends[-1] - 1, most).round()
    return np.unique(np.searchsorted(ends, ranks, side="right"))
