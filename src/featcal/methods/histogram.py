"""Histogram binning: a bin's confidence is its accuracy (Zadrozny and Elkan, ICML 2001)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import logsigmoid

from featcal.core import dist
from featcal.core.arguments import check_choice, check_flags, check_whole
from featcal.core.batch import Data, stored_logits
from featcal.core.binning import bin_edges
from featcal.core.calibrator import LogitMap
from featcal.core.errors import InputError
from featcal.core.fitting import Problem, StepReport
from featcal.core.levels import Levels, equal_mass, top_levels
from featcal.core.odds import class_log_odds, log_odds, odds_of
from featcal.core.steps import settle
from featcal.core.tables import sound, stacked, steps
from featcal.core.toplabel import with_confidence

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
