"""Which thresholds to sweep: from where clipping breaks a network to where it does nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from featcal.analysis.magnitudes import Magnitudes
from featcal.analysis.reading import Rows
from featcal.core.errors import InputError

LOW = 0.8  # of the features that are not 0 lie below the lowest c


def threshold_grid(
    rows: Rows, thresholds: Sequence[float] | None, fitted: Sequence[float], points: int
) -> list[float]:
    """Ascending thresholds as float32 holds them, the fitted ones among them, infinity last.

    Args:
        rows: whose features say where thresholds lie, when none are given.
        thresholds: the grid, or None.
        fitted: thresholds that must be in it.
        points: of a grid that is not given.
    """
    if thresholds is None:
        thresholds = _spread(rows, fitted, points)
    return sorted({*map(checked_threshold, thresholds), *fitted, math.inf})


def checked_threshold(threshold: float) -> float:
    """A threshold, rounded to float32 as a clip would hold it."""
    found = float(np.float32(threshold))
    if not found > 0:
        raise InputError(f"a threshold is {threshold!r}: every threshold must be above 0")
    return found


def _spread(rows: Rows, fitted: Sequence[float], points: int) -> list[float]:
    """Points of equal ratio, with room for the fitted ones on their left."""
    if isinstance(points, bool) or not isinstance(points, int) or points < 3:
        raise InputError(f"points is {points!r}: pass an integer of at least 3")
    sizes = Magnitudes.none()
    for (features,) in rows.features():
        sizes += Magnitudes.of(features)
    low, high = (sizes.quantile(share, zeros=False) for share in (LOW, 1.0))
    if math.isnan(low):  # every feature is 0: nothing to clip
        return []
    low = min(low, *(c / 2 for c in fitted))
    count = max(points - 1 - len(set(fitted) - {math.inf}), 2)
    return [float(c) for c in np.geomspace(low, max(high, 2 * low), count)]
