"""Bayesian binning into quantiles: an average of many histograms (Naeini et al., AAAI 2015)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from featcal.core.calibrator import LogitMap
from featcal.core.errors import InputError
from featcal.core.fitting import Problem, StepReport
from featcal.core.levels import Levels, Places, equal_mass, top_levels
from featcal.core.odds import log_odds, odds_of
from featcal.core.steps import settle
from featcal.core.tables import sound, steps
from featcal.core.toplabel import with_confidence

Array = NDArray[np.float64]

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
