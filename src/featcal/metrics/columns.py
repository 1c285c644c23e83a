"""Every metric once: its names, its summary and formula, how it is printed, which way is better.

Evaluations, comparisons, the bootstrap, the page and the bridges all read this registry.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from featcal.core.checks import InputError
from featcal.metrics.bins import Bins, ClassBins, ProperSums
from featcal.metrics.inputs import checked_rows
from featcal.metrics.ordered import (
    Ordered,
    adaptive_ece_of,
    aurc_of,
    auroc_of,
    debiased_ce_of,
    smooth_ece_of,
)


@final
@dataclass(frozen=True)
class Column:
    """One metric as tables show it.

    Attributes:
        name: its key in `Scores.metrics` and in JSON.
        heading: over a column.
        title: where there is room.
        summary: what has to be known of the rows.
        of: the metric of such a summary and a number of bins.
        better: +1 where higher is better, -1 where lower is, 0 where neither is: a mean confidence
            is no merit, and overconfidence is judged by its size, as the calibration errors are.
        percent: whether it is shown as percent with two digits, else with four.
        low: its smallest possible value.
        high: its largest.
        power: of the noise variance it grows by where all is noise, see `report/bootstrap.py`.
        wide: whether its 95 % interval holds the truth in more than 97 % of some simulated settings
            (docs/trust.md) where more than a few rows are wrong: it may be longer than it need be.
    """

    name: str
    heading: str
    title: str
    summary: type[Bins | ClassBins | Ordered | ProperSums]
    of: Callable[[Any, int], float]
    better: int = -1
    percent: bool = True
    low: float = 0.0
    high: float = 1.0
    power: float = 0.5
    wide: bool = False

    @property
    def unit(self) -> str:
        """The heading with its unit, for cells that hold numbers alone."""
        return f"{self.heading} %" if self.percent else self.heading

    def number(self, value: float) -> str:
        """The value alone: 4.68 for 0.0468, or 1.0312."""
        if math.isnan(value):
            return "n/a"
        # Adding 0 turns a rounded -0.00 into 0.00.
        return f"{round(100 * value, 2) + 0:.2f}" if self.percent else f"{round(value, 4) + 0:.4f}"

    def text(self, value: float) -> str:
        """The value with its unit: 4.68 %."""
        number = self.number(value)
        return f"{number} %" if self.percent and number != "n/a" else number

    def merit(self, value: float) -> float:
        """A number that is larger for the better value, by which rows are sorted."""
        if math.isnan(value):
            return -math.inf
        return self.better * value if self.better else -abs(value)


_ALL = (
    Column("accuracy", "accuracy", "accuracy", ProperSums, lambda sums, _: sums.accuracy, +1),
    Column(
        *("confidence", "confidence", "mean confidence", Bins),
        lambda bins, _: float(bins.confidence.sum()) / checked_rows(bins.n),
        0,
    ),
    Column(
        *("overconfidence", "overconfidence", "overconfidence (confidence - accuracy)", Bins),
        lambda bins, _: bins.overconfidence,
        0,
        low=-1.0,
    ),
    Column("ece", "ECE", "ECE (equal-width bins)", Bins, lambda bins, _: bins.ece, wide=True),
    Column(
        *("adaptive_ece", "adaptive ECE", "adaptive ECE (equal-mass bins)", Ordered),
        lambda rows, bins: adaptive_ece_of(rows, bins=bins),
        wide=True,
    ),
    Column(
        *("classwise_ece", "classwise ECE", "classwise ECE", ClassBins),
        lambda bins, _: bins.ece,
        wide=True,
    ),
    Column("mce", "MCE", "MCE (worst bin)", Bins, lambda bins, _: bins.mce),
    Column("rms_ce", "RMS-CE", "RMS calibration error", Bins, lambda bins, _: bins.rms_ce),
    Column(
        *("debiased_ce", "debiased CE", "debiased RMS calibration error", Ordered),
        lambda rows, bins: debiased_ce_of(rows, bins=bins),
    ),
    # Smoothed noise of width s is as s^-1/2, and the width is the metric itself.
    Column(
        *("smooth_ece", "smooth ECE", "smooth ECE (no bins)", Ordered),
        lambda rows, _: smooth_ece_of(rows),
        power=1 / 3,
    ),
    Column("nll", "NLL", "NLL", ProperSums, lambda sums, _: sums.nll, percent=False, high=math.inf),
    Column(
        *("brier", "Brier", "Brier score", ProperSums),
        lambda sums, _: sums.brier,
        percent=False,
        high=2.0,
    ),
    Column(
        *("auroc", "AUROC", "AUROC of correctness", Ordered),
        lambda rows, _: auroc_of(rows),
        +1,
        percent=False,
    ),
    Column(
        *("aurc", "AURC", "AURC (area under risk-coverage)", Ordered),
        lambda rows, _: aurc_of(rows),
        percent=False,
    ),
)
COLUMNS = {column.name: column for column in _ALL}
USUAL = ("accuracy", "ece", "adaptive_ece", "nll", "brier")


def columns(names: tuple[str, ...] = USUAL) -> list[Column]:
    """The columns of these metrics.

    Raises:
        InputError: for a name that no metric has.
    """
    for name in names:
        if name not in COLUMNS:
            raise InputError(f"metric is {name!r}: choose one of {', '.join(sorted(COLUMNS))}")
    return [COLUMNS[name] for name in names]
