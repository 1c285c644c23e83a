"""What rows a calibrator from a file was fitted on, as far as its own report tells.

A report holds how many rows a fit was given and their loss before it: other rows that agree in both
are not met by accident.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from featcal.core.calibrator import Calibrator
from featcal.page.entries import Scene
from featcal.report.rows import Comparison, Row
from featcal.report.scores import Scores, evaluate

# Of a loss: as much as another number of threads moves a mean of float32 logits, and a millionth of
# what other rows would.
SAME = 1e-7


@final
@dataclass(frozen=True)
class Origins:
    """Places of calibrators from files.

    Attributes:
        seen: those that were fitted on the scored rows.
        unknown: those that were fitted neither on these nor on the fit split, or do not say.
    """

    seen: tuple[int, ...] = ()
    unknown: tuple[int, ...] = ()

    @classmethod
    def of(cls, scene: Scene, found: Comparison, files: Mapping[str, Calibrator]) -> Origins:
        """Looks at the reports of the last rows of a comparison, which are the files'."""
        places = range(len(found) - len(files), len(found))
        if not places:
            return cls()
        fitted_on = evaluate(scene.fit, None, scene.head, bins=scene.bins, resamples=0)
        seen = tuple(place for place in places if _is_of(found[place], found[0].scores))
        known = (*seen, *(place for place in places if _is_of(found[place], fitted_on)))
        return cls(seen, tuple(place for place in places if place not in known))


def _is_of(row: Row, raw: Scores) -> bool:
    """Whether the fit of a row began with these rows, by their number and their loss."""
    return any(
        report.rows == raw.n
        and math.isclose(report.loss_before, raw.metrics.get(report.loss, math.nan), rel_tol=SAME)
        for report in row.reports
    )
