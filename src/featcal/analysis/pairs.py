"""Reliability diagrams of the same rows before and after a calibrator, with bootstrap bands."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from featcal.analysis.bands import RESAMPLES, BandedDiagram, checked_number, said_and_so
from featcal.analysis.base import Analysis, all_axes
from featcal.analysis.reading import TEST, Source, reading
from featcal.core.batch import Head
from featcal.core.calibrator import Calibrator
from featcal.core.errors import InputError
from featcal.metrics.predictions import Predictions
from featcal.report import drawing
from featcal.report.resample import Resamples

if TYPE_CHECKING:
    from featcal.analysis.base import Panels


@final
@dataclass(frozen=True, eq=False)
class BeforeAfter(Analysis):
    """Two diagrams of the same rows, before and after a calibrator.

    Attributes:
        before: of the network's own probabilities.
        after: of the calibrated ones.
    """

    before: BandedDiagram = field(repr=False)
    after: BandedDiagram = field(repr=False)

    @classmethod
    def of(
        cls,
        data: Source,
        calibrator: Calibrator | None,
        head: Head | None = None,
        *,
        split: str = TEST,
        bins: int = 15,
        of_class: int | None = None,
        resamples: int = RESAMPLES,
        seed: int = 0,
    ) -> BeforeAfter:
        """Both diagrams of `data`, in one pass; confidence and correctness of all rows are kept.

        Args:
            data: a pack, or labelled rows that were not used to fit.
            calibrator: fitted.
            head: the classifier's last layer, when the data holds features; a pack has its own.
            split: which rows, where the data is a pack.
            bins: how many bins of equal width.
            of_class: as in `ReliabilityDiagram.of`.
            resamples: how often the rows are drawn again; the same rows for both.
            seed: of the resamples.
        """
        checked_number(resamples)
        parts: list[list[tuple[Tensor, Tensor]]] = [[], []]
        with reading(data, head, calibrator, split=split) as rows:
            for batch, *sides in rows.both(calibrator):
                for part, logits in zip(parts, sides, strict=True):
                    seen = Predictions.of(logits=logits, labels=batch.labels)
                    part.append(said_and_so(seen, of_class))
            drawn = Resamples.draw(rows.facts.rows, resamples, seed)
        titles = "before", f"after {calibrator!r}" if calibrator else "after"
        made = []
        for part, title in zip(parts, titles, strict=True):
            said, so = (torch.cat(column) for column in zip(*part, strict=True))
            kind = {"bins": bins, "title": title, "of_class": of_class}
            made.append(BandedDiagram.of_pairs(said, so, drawn, **kind))  # type: ignore[arg-type]
        return cls(*made)

    def numbers(self) -> dict[str, Any]:
        """Both diagrams."""
        return {"before": self.before.numbers(), "after": self.after.numbers()}

    def own_axes(self) -> Panels:
        """Two diagrams side by side, already drawn but for the bands."""
        pairs = drawing.figure([self.before.diagram, self.after.diagram])[1]
        return [pair[0] for pair in pairs]

    def plot(self, ax: Panels | None = None) -> BeforeAfter:
        """Draws both, on a pair of axes where one is given."""
        if ax is None:
            return super().plot()
        drawing.require_matplotlib()
        if len(all_axes(ax)) != 2:
            raise InputError("ax is not a pair of axes: pass one for before and one for after")
        both = (self.before, self.after)
        drawn = [side.plot(axes) for side, axes in zip(both, all_axes(ax), strict=True)]
        return replace(self, before=drawn[0], after=drawn[1], axes=ax)

    def draw(self, ax: Panels) -> None:
        """Both bands."""
        for side, axes in zip((self.before, self.after), all_axes(ax), strict=True):
            side.draw(axes)
