"""Metrics and one-number fits of rows that stay where they are: a data set of Ray Data.

Every pass is one `map_batches`: workers read the rows and send back sums, which add up.
`dataset.materialize()` keeps the rows in the cluster's memory between passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple, dataclass
from time import perf_counter
from typing import Any, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from featcal.core.batch import CHUNK_ROWS, Batch, Head, features_of, wide
from featcal.core.calibrator import Calibrator
from featcal.core.checks import InputError, check_batch
from featcal.core.fit import FitReport, StepReport
from featcal.core.sample import size_counts, size_quantile
from featcal.core.scalar import Point, best_of, vertex
from featcal.core.text import parse
from featcal.heads.head import as_head
from featcal.metrics import Bins, ClassBins, Predictions, ProperSums
from featcal.metrics.columns import COLUMNS
from featcal.metrics.inputs import checked_bins
from featcal.report.scores import Scores, calibrated_logits

SCAN, CLOSER = 33, 17  # values of the first look, and of each of two closer ones
HOTTEST, GAIN = 100.0, 1e-7  # the highest T, and nats below which a gain is rounding


@final
@dataclass(frozen=True)
class Rows:
    """Labelled rows in Ray.

    Attributes:
        dataset: a `ray.data.Dataset`.
        head: the network's last layer, where the rows hold features; None for logits.
        values: the column of the features or logits; it has that name by default.
        labels: the column of the class numbers.
    """

    dataset: Any
    head: Head | None = None
    values: str | None = None
    labels: str = "label"

    def evaluate(self, calibrator: Calibrator | None = None, *, bins: int = 15) -> Scores:
        """The scores of all rows, by every metric whose summary does not grow with the rows."""
        m = checked_bins(bins)

        def sums(logits: Tensor, batch: Batch) -> Tensor:
            seen = Predictions.of(logits=logits, labels=batch.labels)
            proper = torch.tensor(astuple(ProperSums.of_predictions(seen)), dtype=torch.float64)
            binned = [one.of_predictions(seen, bins=m).stacked() for one in (Bins, ClassBins)]
            return torch.cat([proper, *(part.flatten() for part in binned)])

        total = self._total(sums, calibrator)[0]
        known: dict[type, Any] = {
            ProperSums: ProperSums(*total[:4].tolist()),
            Bins: Bins(*total[4 : 4 + 3 * m].view(3, m)),
            ClassBins: ClassBins(*total[4 + 3 * m :].view(3, -1, m)),
        }
        shown = {name: one for name, one in COLUMNS.items() if one.summary in known}
        metrics = {name: one.of(known[one.summary], m) for name, one in shown.items()}
        return Scores(known[Bins].n, metrics, known[Bins])

    def fit(self, recipe: str = "temperature") -> Calibrator:
        """A calibrator by NLL: `temperature`, `clip` or `clip | temperature`, step by step.

        Three passes over the rows for each step, and one more for a clip; a threshold is found to
        half a percent, by 67 products of the head.
        """
        started, whole, name = perf_counter(), parse(recipe), repr(parse(recipe))
        if name not in ("temperature", "clip", "clip | temperature"):
            raise InputError(f"{name} is not fitted in Ray: choose clip, temperature or both")
        if whole.needs_features and self.head is None:
            raise InputError(f"{name} works on features: pass head=, the last layer")
        first, *rest = whole.steps_in_order()
        one, (rows, classes, width) = self._learned(first, None)
        steps = (one, *(self._learned(step, first)[0] for step in rest))
        told = one.loss_before, steps[-1].loss_after, perf_counter() - started
        whole.report = FitReport(name, "sequential", "nll", rows, steps, *told, classes, width)
        return whole

    def _learned(self, step: Calibrator, done: Calibrator | None) -> tuple[StepReport, list[int]]:
        """A scan of values and closer looks around the best; rows, classes and features, too."""
        head, clips, (name,) = as_head(self.head), step.name == "clip", step.symbols
        same, low, high = 1.0, 1 / HOTTEST, HOTTEST
        if clips:
            counts = self._total(lambda _, b: size_counts(features_of(b)).double(), None)[0].long()
            low, high = (size_quantile(counts, share, zeros=False) for share in (0.2, 1.0))
            same, low, high = math.inf, low / 8, 1.01 * high

        def look(values: list[float]) -> tuple[list[Point], list[int]]:
            def sums(logits: Tensor, batch: Batch) -> Tensor:
                def changed(v: float) -> Tensor:
                    x = features_of(batch).clamp(-v, v) if clips else None
                    return logits / v if x is None or head is None else wide(head(x))

                losses = [F.cross_entropy(changed(v), batch.labels) for v in values]
                return len(batch) * torch.stack(losses).double()

            total, *sizes = self._total(sums, done)
            return list(map(Point, map(math.log, values), (total / sizes[0]).tolist())), sizes

        (before, *points), sizes = look([same, *np.geomspace(low, high, SCAN).tolist()])
        for apart in (math.log(high / low) / (SCAN - 1) * closer for closer in (1, 2 / CLOSER)):
            around = best_of(points).at + np.linspace(-apart, apart, CLOSER)
            points, _ = look(np.exp(around).tolist())
        best = best_of(points)
        # The NLL is smooth in T and not in c.
        value, after = math.exp(best.at if clips else vertex(points)), best.score
        noop, inner = not after < before.score - GAIN, low < value < high
        value, after = (same, before.score) if noop else (value, after)
        step.assign(**{name: value})
        why = f"no-op: no {name} lowers nll" if noop else f"{step.symbols[name]} = {value:.4g}"
        told = (step.name, {name: value}, noop, before.score, after, noop or inner, why)
        return StepReport(*told), sizes

    def _total(
        self, sums: Callable[[Tensor, Batch], Tensor], calibrator: Calibrator | None
    ) -> tuple[Tensor, int, int, int]:
        """Sums of calibrated logits and their batch over all rows; rows, classes and features."""
        head, labels = as_head(self.head), self.labels
        values = self.values or ("logits" if head is None else "features")
        known = self.dataset.columns() or []
        if {values, labels} - {*known}:
            raise InputError(f"the data set has {known}: name the columns with values= and labels=")

        @torch.no_grad()
        def work(block: dict[str, Any]) -> dict[str, Any]:
            found, y = torch.tensor(np.stack(block[values])), torch.tensor(block[labels])
            batch = Batch(found, y) if head is None else Batch(None, y, wide(found))
            logits = calibrated_logits(batch, calibrator, head)
            check_batch(batch, classes=logits.shape[1])
            width = 0 if head is None else found.shape[1]
            sizes = torch.tensor([len(batch), logits.shape[1], width, 1]).double()
            return {"sums": torch.cat([sizes, sums(logits, batch)]).numpy()[None]}

        passed = self.dataset.map_batches(work, batch_size=CHUNK_ROWS, batch_format="numpy")
        total = torch.stack([torch.tensor(row["sums"]) for row in passed.iter_rows()]).sum(0)
        classes, width = (total[1:3] / total[3]).int().tolist()
        return total[4:], int(total[0]), classes, width
