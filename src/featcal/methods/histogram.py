"""Histogram binning: a bin's confidence is its accuracy (Zadrozny and Elkan, ICML 2001)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import logsigmoid

from featcal.core import dist
from featcal.core.batch import Data, stored_logits
from featcal.core.calibrator import LogitMap
from featcal.core.checks import InputError, check_choice, check_flags, check_whole
from featcal.core.fit import Problem, StepReport, settle
from featcal.core.rows import bin_edges, with_confidence
from featcal.methods.score_tables import (
    Levels,
    Places,
    class_log_odds,
    equal_mass,
    log_odds,
    odds_of,
    sound,
    stacked,
    steps,
    top_levels,
)

Array = NDArray[np.float64]

EDGES = ("mass", "width")
READINGS = ("top", "one_vs_rest")
CERTAIN = 20.0  # log-odds that stand for 0 and 1 where values are not smoothed
GATHERED = 2**24  # scores of all rows that are held at once


@final
class HistogramBinning(LogitMap):
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
    keeps_accuracy = True
    jumps = True  # a row at an edge changes bins with the last digit of its logits
    quick = "temperature"
    edges_at: Tensor
    values: Tensor

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
        self.register_buffer("edges_at", torch.empty(0))
        self.register_buffer("values", torch.empty(0))

    def map_logits(self, logits: Tensor) -> Tensor:
        """Looks up the bin's value."""
        if self.values.numel() == 0 or logits.shape[1] == 1:
            return logits
        if self.reading == "top":
            found = steps(log_odds(logits), self.edges_at, self.values)
            return with_confidence(logits, found.sigmoid())
        found = steps(class_log_odds(logits), self.edges_at, self.values)
        return logsigmoid(found).to(logits.dtype)

    def check(self) -> None:
        """Edges ascend, and there is one value more than edges."""
        dims = 1 if self.reading == "top" else 2
        if not sound(self.edges_at, self.values, dims=dims, more=1):
            shapes = f"{tuple(self.edges_at.shape)} edges and {tuple(self.values.shape)} values"
            raise InputError(f"histogram: {shapes}: edges must ascend, with one finite value more")

    def learn(self, problem: Problem) -> list[StepReport]:
        """Counts hits in bins."""
        self.reset()
        if self.reading == "top":
            edges, values = self._table(top_levels(problem.data), 1.0, 0.0)
            self.assign(edges_at=torch.tensor(edges), values=torch.tensor(values))
        else:
            self._learn_classes(problem)
        low, high = (float(value) for value in self.values.sigmoid().aminmax())
        count = self.values.shape[-1]
        message = f"bins of equal {self.edges}: {count}, with values from {low:.4g} to {high:.4g}"
        return [settle(self, problem, {"bins": count, "lowest": low, "highest": high}, message)]

    def _learn_classes(self, problem: Problem) -> None:
        """A table for each class, all made as long as the longest."""
        classes, rows = problem.facts.classes, problem.facts.rows
        floor = 1 / ((rows + 1) * classes)  # no value is 0: a row of zeros has no sum to divide by
        found = [
            self._table(levels, 2 / classes, floor)
            for levels in class_levels(problem.data, classes, max(1, GATHERED // rows))
        ]
        edges, values = map(stacked, zip(*found, strict=True))
        self.assign(edges_at=edges, values=values)

    def _table(self, levels: Levels, prior: float, floor: float) -> tuple[Array, Array]:
        """Edges and values in log-odds; `prior` of the 2 rows added for smoothing are hits."""
        if self.edges == "mass":
            cuts = equal_mass(levels, self.bins)
            edges, (rows, hits) = levels.edges(cuts), levels.parts(cuts)
            centres = np.zeros(len(rows))  # no bin is empty
        else:
            bounds = bin_edges(self.bins, torch.float64).numpy()
            edges, centres = odds_of(bounds[1:-1]), (bounds[1:] + bounds[:-1]) / 2
            place = np.searchsorted(edges.astype(np.float32), levels.at)
            rows = np.bincount(place, levels.rows, self.bins).astype(np.float64)
            hits = np.bincount(place, levels.hits, self.bins).astype(np.float64)
        added = np.array([prior, 2.0] if self.smooth else [0.0, 0.0])
        shares = np.where(rows > 0, (hits + added[0]) / np.maximum(rows + added[1], 1), centres)
        return edges, odds_of(np.clip(shares, floor, 1 - floor)).clip(-CERTAIN, CERTAIN)


def class_levels(data: Data, classes: int, width: int) -> Iterator[Levels]:
    """The levels of each class's own log-odds; `width` classes are gathered a pass."""
    for first in range(0, classes, width):
        last = min(first + width, classes)
        scores, labels = [torch.zeros(0, last - first)], [torch.zeros(0, dtype=torch.int64)]
        for batch in data:
            odds = class_log_odds(stored_logits(batch))[:, first:last]
            scores.append(odds.float().cpu())
            labels.append(batch.labels.cpu())
        every, label = dist.gather(torch.cat(scores)), dist.gather(torch.cat(labels))
        for column in range(first, last):
            yield Levels.of(every[:, column - first], label == column)


# --- Bayesian binning into quantiles: an average of many histograms (Naeini et al., AAAI 2015).

PRIOR_ROWS = 2.0  # rows the prior counts for, over all bins of a histogram: N' in the paper
NEGLIGIBLE = 1e-7  # a histogram that weighs less could not move a float32 digit


@final
class BBQ(LogitMap):
    """Averages histograms of equal mass, each weighted by its Beta-binomial marginal likelihood.

    A histogram of B bins has the prior Beta(a_b, c_b) in bin b, with a_b = 2/B times the middle of
    the bin and a_b + c_b = 2/B; its value there is the posterior mean. B runs from n^(1/3) / 10 to
    10 n^(1/3). The average is itself a step function, which is what is kept; no value is surer than
    n right rows in a row make it, (n + 1) / (n + 2). The predicted class gets the value, the others
    share the rest as before, and the prediction stays.
    """

    name = "bbq"
    keeps_accuracy = True
    jumps = True  # a row at an edge changes bins with the last digit of its logits
    quick = "temperature"
    edges_at: Tensor
    values: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges_at", torch.empty(0))
        self.register_buffer("values", torch.empty(0))

    def map_logits(self, logits: Tensor) -> Tensor:
        """Looks up the averaged value."""
        if self.values.numel() == 0:
            return logits
        found = steps(log_odds(logits), self.edges_at, self.values)
        return with_confidence(logits, found.sigmoid())

    def check(self) -> None:
        """Edges ascend, and there is one value more than edges."""
        if not sound(self.edges_at, self.values, more=1):
            shapes = f"{tuple(self.edges_at.shape)} edges and {tuple(self.values.shape)} values"
            raise InputError(f"bbq: {shapes}: edges must ascend, with one finite value more")

    def learn(self, problem: Problem) -> list[StepReport]:
        """Scores every histogram and averages those that count."""
        self.reset()
        levels = top_levels(problem.data)
        models = histograms(levels)
        weights = np.exp(_normalised(np.array([model.evidence for model in models])))
        cuts, shares = average(models, weights)
        bound = 1 / (problem.facts.rows + 2)
        odds = odds_of(shares.clip(bound, 1 - bound))
        self.assign(edges_at=torch.tensor(levels.edges(cuts)), values=torch.tensor(odds))
        bins = float(sum(w * len(model.values) for w, model in zip(weights, models, strict=True)))
        values = {"bins": bins, "steps": len(shares)}
        message = (
            f"histograms averaged: {len(models)}, with {bins:.3g} bins by weight; "
            f"steps of the average: {len(shares)}"
        )
        return [settle(self, problem, values, message)]


@dataclass(frozen=True)
class Histogram:
    """One binning: the levels it is cut after (b - 1,), its values (b,), its log-evidence."""

    cuts: Places
    values: Array
    evidence: float


def histograms(levels: Levels) -> list[Histogram]:
    """One for each number of bins from n^(1/3) / 10 to 10 n^(1/3), or as many as can be cut."""
    scale = round(math.cbrt(levels.rows.sum()), 9)  # 30, not a hair less, for 27,000 rows
    most = min(math.ceil(10 * scale), len(levels.at))
    fewest = min(max(1, math.floor(scale / 10)), most)
    return [histogram(levels, equal_mass(levels, bins)) for bins in range(fewest, most + 1)]


def histogram(levels: Levels, cuts: Places) -> Histogram:
    """The binning cut after these levels, with its posterior means and evidence."""
    rows, hits = levels.parts(cuts)
    edges = np.concatenate([[-np.inf], levels.edges(cuts), [np.inf]])
    # The middle of a bin and its complement, each from its own side: 1 - p cancels near 1.
    middle, rest = (torch.from_numpy(sign * edges).sigmoid().numpy() for sign in (1.0, -1.0))
    prior = PRIOR_ROWS / len(rows)
    right, wrong = (
        np.maximum(prior * (part[1:] + part[:-1]) / 2, 1e-300) for part in (middle, rest)
    )
    values = (hits + right) / (rows + prior)
    gain = _log_beta(hits + right, rows - hits + wrong) - _log_beta(right, wrong)
    return Histogram(cuts, values, float(gain.sum()))


def average(models: list[Histogram], weights: Array) -> tuple[Places, Array]:
    """The weighted mean of step functions, as one: where it steps, and its values."""
    kept = [(w, model) for w, model in zip(weights, models, strict=True) if w > NEGLIGIBLE]
    cuts = np.unique(np.concatenate([model.cuts for _, model in kept]))
    shares = np.zeros(len(cuts) + 1)
    for weight, model in kept:
        bin_of = np.searchsorted(model.cuts, np.concatenate([cuts, [np.iinfo(np.intp).max]]))
        shares += weight * model.values[bin_of]
    return cuts, shares / sum(weight for weight, _ in kept)


def _log_beta(a: Array, b: Array) -> Array:
    gamma = [torch.from_numpy(x).lgamma().numpy() for x in (a, b, a + b)]
    return np.asarray(gamma[0] + gamma[1] - gamma[2])


def _normalised(logs: Array) -> Array:
    """Logarithms of weights that sum to 1."""
    return np.asarray(logs - np.logaddexp.reduce(logs))
