"""What a comparison holds: a row for every recipe, and their paired differences."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final, overload

import numpy as np
import torch

from featcal.core.calibrator import Calibrator
from featcal.core.fitting import FitReport
from featcal.report import render
from featcal.report.columns import COLUMNS
from featcal.report.intervals import UNKNOWN, Difference, interval, verdict
from featcal.report.scores import Scores
from featcal.version import __version__


@final
@dataclass(frozen=True)
class Row:
    """One recipe: what was fitted, how it scores on unseen rows, and the seconds both took.

    Attributes:
        recipe: its text.
        calibrator: what was fitted; None for "none", and where there is one for each fold.
        scores: on rows it was not fitted on.
        seconds: of fitting and scoring, resampling not counted; a step that several recipes share
            counts in each.
        folds: with cross-fitting, the calibrator of each fold.
    """

    recipe: str
    calibrator: Calibrator | None
    scores: Scores
    seconds: float
    folds: tuple[Calibrator, ...] = ()

    @property
    def reports(self) -> list[FitReport]:
        """The report of each fit: none, one, or one a fold."""
        fitted = (self.calibrator, *self.folds)
        return [c.report for c in fitted if c is not None and c.report is not None]

    def as_json(self) -> dict[str, Any]:
        """The public form of a row of `featcal compare --json`."""
        fits = [report.as_json() for report in self.reports]
        intervals = {name: found.as_json() for name, found in self.scores.intervals.items()}
        return {
            "recipe": self.recipe,
            "n": self.scores.n,
            "metrics": self.scores.as_json()["metrics"],
            "intervals": intervals or None,
            "fit": fits[0] if fits and not self.folds else None,
            **({"fits": fits} if self.folds else {}),
            "seconds": self.seconds,
        }


@final
@dataclass(frozen=True, eq=False, repr=False)
class Comparison(Sequence[Row]):
    """The rows of a comparison, in order; iterates, counts and indexes like a list of them.

    Attributes:
        rows: one a recipe.
        against: for each row the index of the row it is compared with; None for a baseline.
        settings: how the numbers came about, JSON-ready.
    """

    rows: tuple[Row, ...]
    against: tuple[int | None, ...]
    settings: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        return self.rows[index]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __repr__(self) -> str:
        return render.markdown(self)

    def difference(self, index: int, metric: str) -> Difference | None:
        """Row `index` against its baseline by one metric; None when it has none.

        Both were resampled with the same rows, so the interval is that of paired differences.
        """
        other = self.against[index]
        if other is None:
            return None
        mine, base = self.rows[index].scores, self.rows[other].scores
        delta = mine.metrics[metric] - base.metrics[metric]
        found = UNKNOWN
        if metric in mine.replicates and metric in base.replicates:
            pairs = mine.replicates[metric] - base.replicates[metric]
            found = interval(delta, pairs, COLUMNS[metric].power)
        return Difference(self.rows[other].recipe, delta, found, verdict(metric, found))

    def sorted_by(self, metric: str) -> Comparison:
        """The same rows, the best by this metric first; equal ones stay in order."""
        merits = [COLUMNS[metric].merit(row.scores.metrics[metric]) for row in self.rows]
        order = sorted(range(len(self)), key=lambda index: -merits[index])
        place = {old: new for new, old in enumerate(order)}
        against = (self.against[index] for index in order)
        return replace(
            self,
            rows=tuple(self.rows[index] for index in order),
            against=tuple(None if other is None else place[other] for other in against),
        )

    def as_json(self) -> dict[str, Any]:
        """Everything, as `featcal compare --json` prints it."""
        rows = [self._row_json(index) for index in range(len(self))]
        return {"rows": rows, "settings": self.settings}

    def _row_json(self, index: int) -> dict[str, Any]:
        body = self.rows[index].as_json()
        found = {name: self.difference(index, name) for name in self.rows[index].scores.metrics}
        differences = {name: d.as_json() for name, d in found.items() if d is not None}
        return {**body, "differences": differences or None}


def versions() -> dict[str, str]:
    """What computed the numbers."""
    return {
        "featcal": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
