"""Histogram binning (Zadrozny and Elkan, ICML 2001) and its Bayesian average, BBQ (Naeini, 2015).

Both are step functions of the log-odds: a bin's confidence is, more or less, its accuracy.
"""

from __future__ import annotations

import math
from typing import final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from featcal.core import dist
from featcal.core.batch import stored_logits
from featcal.core.calibrator import LogitMap
from featcal.core.checks import check_choice, check_flags, check_whole
from featcal.core.fit import Problem, StepReport, settle
from featcal.core.rows import bin_edges, with_confidence
from featcal.methods import score_tables as tables
from featcal.methods.score_tables import Array, Levels, Places

EDGES = ("mass", "width")
READINGS = ("top", "one_vs_rest")
CERTAIN = 20.0  # log-odds that stand for 0 and 1 where values are not smoothed
GATHERED = 2**24  # scores of all rows that are held at once
PRIOR_ROWS = 2.0  # rows the prior of BBQ counts for, over all bins of a histogram: N' in the paper
NEGLIGIBLE = 1e-7  # a histogram that weighs less could not move a float32 digit


class StepMap(LogitMap):
    """Gives the predicted class, or each class by itself, the value of its bin."""

    keeps_accuracy = True
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

    def sound(self) -> bool:
        """Whether edges ascend, with one value more than edges."""
        columns = self.reading == "one_vs_rest"
        return tables.is_table(self.edges_at, self.values, columns=columns, more=1)


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
