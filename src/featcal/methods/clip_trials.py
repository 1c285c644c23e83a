"""Trying thresholds: the data clipped at c, and what criterion, loss and accuracy say of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from featcal.core.batch import Batch, Data, Through, stored_logits, wide
from featcal.core.fitting import Problem
from featcal.core.loss import Loss, accuracy, measure
from featcal.core.solve import Point


@dataclass(frozen=True)
class Trial:
    """One threshold: the criterion, the fit's loss and the accuracy it gives."""

    threshold: float
    score: float
    loss: float
    accuracy: float


class Clipped:
    """The data with features clipped at c: rows that c does not touch keep their logits.

    Where the network's own logits do not fit into memory there is nothing to keep, and every row
    goes through the head: one pass a trial, never two.
    """

    def __init__(self, problem: Problem, peaks: list[Tensor], threshold: float) -> None:
        self.problem, self.peaks, self.threshold = problem, peaks, threshold

    def __iter__(self) -> Iterator[Batch]:
        kept = self.problem.data.kept
        batches = self.problem.data if kept else self.problem.source
        for peaks, batch in zip(self.peaks, batches, strict=True):
            touched = peaks > self.threshold
            logits = self._logits(batch, touched) if kept else self._head(batch)
            yield Batch(logits, batch.labels)

    def _logits(self, batch: Batch, touched: Tensor) -> Tensor:
        share = float(touched.sum()) / max(len(batch), 1)
        if share == 0:
            return stored_logits(batch)
        if share > 0.7:  # picking rows would cost more than it saves
            return self._head(batch)
        logits = stored_logits(batch).clone()
        logits[touched] = self._head(batch.rows(touched)).to(logits.dtype)
        return logits

    def _head(self, batch: Batch) -> Tensor:
        assert self.problem.head is not None
        assert batch.features is not None
        return wide(self.problem.head(batch.features.clamp(-self.threshold, self.threshold)))


class Trials:
    """Tries thresholds and remembers them; later steps are refitted where fitting is joint.

    An argmax costs as much as the loss itself, so the accuracy is left out (NaN) where nobody asks.
    """

    def __init__(
        self,
        problem: Problem,
        criterion: Loss,
        view: Callable[[float], Data],
        *,
        accuracy: bool = True,
    ) -> None:
        self.problem, self.criterion, self.view = problem, criterion, view
        self.accuracy = accuracy
        self.seen: list[Trial] = []
        self.best: tuple[Trial, Through] | None = None  # with the logits it gave

    @classmethod
    def by_head(
        cls,
        problem: Problem,
        criterion: Loss,
        peaks: list[Tensor] | None = None,
        *,
        accuracy: bool = True,
    ) -> Trials:
        """Trials whose logits come from the head."""
        peaks = [row_peaks(batch) for batch in problem.source] if peaks is None else peaks
        return cls(problem, criterion, lambda c: Clipped(problem, peaks, c), accuracy=accuracy)

    def at(self, threshold: float) -> Trial:
        """Tries one threshold, rounded to float32 as the fitted buffer will hold it."""
        threshold = float(np.float32(threshold))
        view = Through(self.view(threshold), stored_logits, features=False)
        data = self._refitted(view)
        losses = dict.fromkeys([self.criterion, self.problem.loss])
        if self.accuracy:
            losses[accuracy] = None
        values = dict(zip(losses, measure(data, *losses), strict=True))
        score, loss = values[self.criterion], values[self.problem.loss]
        self.seen.append(Trial(threshold, score, loss, values.get(accuracy, math.nan)))
        if math.isfinite(threshold) and (self.best is None or score < self.best[0].score):
            self.best = self.seen[-1], view
        return self.seen[-1]

    def complete(self, trial: Trial) -> Trial:
        """The same trial with its accuracy."""
        if not math.isnan(trial.accuracy):
            return trial
        view = Through(self.view(trial.threshold), stored_logits, features=False)
        return replace(trial, accuracy=measure(self._refitted(view), accuracy)[0])

    def point(self, log_threshold: float) -> Point:
        """The criterion at a threshold, both as the walk wants them."""
        return Point(log_threshold, self.at(math.exp(log_threshold)).score)

    def _refitted(self, view: Through) -> Data:
        then = self.problem.then
        if then is None:
            return view
        then.learn(replace(self.problem, data=view, then=None, before=None))
        return Through(view, lambda batch: then(None, lambda _: stored_logits(batch)), keep=0)


def row_peaks(batch: Batch) -> Tensor:
    """The largest activation of each row, in absolute value."""
    assert batch.features is not None
    return batch.features.abs().amax(1)
