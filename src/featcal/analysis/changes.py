"""Which predictions a calibrator changed: clipping may, and each such row should be looked at."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch import Tensor

from featcal.analysis.base import (
    HCE,
    LCE,
    TEST,
    Analysis,
    Source,
    all_axes,
    first_axes,
    ink,
    reading,
)
from featcal.analysis.reliability import RESAMPLES, BandedDiagram, checked_number, said_and_so
from featcal.core.batch import Head
from featcal.core.calibrator import Calibrator
from featcal.core.checks import InputError
from featcal.core.rows import predicted
from featcal.metrics.inputs import Predictions
from featcal.report.bootstrap import Resamples
from featcal.report.diagram import DASHES, TEXT, figure, require_matplotlib

if TYPE_CHECKING:
    from featcal.analysis.base import Panels

TOLD = 200  # rows in the JSON form, the most confident before first


@final
@dataclass(frozen=True, eq=False)
class ChangedPredictions(Analysis):
    """The c rows whose predicted class is another one after calibration; (c,) each.

    Attributes:
        n: all rows.
        recipe: of the calibrator.
        rows: their places in the data.
        labels: their true classes.
        before: the classes predicted by the network.
        after: the classes predicted after calibration.
        sure_before: the confidence in the class predicted before, float64.
        sure_after: the confidence in the class predicted after.
    """

    size: ClassVar[tuple[float, float]] = (3.6, 3.4)

    n: int
    recipe: str
    rows: Tensor = field(repr=False)
    labels: Tensor = field(repr=False)
    before: Tensor = field(repr=False)
    after: Tensor = field(repr=False)
    sure_before: Tensor = field(repr=False)
    sure_after: Tensor = field(repr=False)

    @classmethod
    def of(
        cls,
        data: Source,
        calibrator: Calibrator | None,
        head: Head | None = None,
        *,
        split: str = TEST,
    ) -> ChangedPredictions:
        """The changed rows of `data`, in one pass.

        Args:
            data: a pack, or labelled rows.
            calibrator: fitted, such as a clip.
            head: the classifier's last layer, when the data holds features; a pack has its own.
            split: which rows, where the data is a pack.
        """
        parts, done = [], 0
        with reading(data, head, calibrator, split=split) as rows:
            for batch, old, new in rows.both(calibrator):
                parts.append(_changes(batch.labels, old, new, first_row=done))
                done += len(batch)
        columns = [torch.cat(column) for column in zip(*parts, strict=True)]
        return cls(done, repr(calibrator) if calibrator else "none", *columns)

    @property
    def fixed(self) -> Tensor:
        """(c,) bool: wrong before, right after."""
        return self.after == self.labels

    @property
    def broken(self) -> Tensor:
        """(c,) bool: right before, wrong after."""
        return self.before == self.labels

    @property
    def other(self) -> Tensor:
        """(c,) bool: from one wrong class to another."""
        return ~(self.fixed | self.broken)

    @property
    def accuracy_change(self) -> float:
        """Accuracy after minus accuracy before."""
        return (int(self.fixed.sum()) - int(self.broken.sum())) / self.n

    def numbers(self) -> dict[str, Any]:
        """The counts, and the rows with the highest confidence before."""
        kinds = ("fixed", "broken", "other")
        counts = {kind: int(getattr(self, kind).sum()) for kind in kinds}
        order = self.sure_before.argsort(descending=True, stable=True)[:TOLD]
        names = ("rows", "labels", "before", "after", "sure_before", "sure_after")
        columns = {name: getattr(self, name)[order].tolist() for name in names}
        kind = ["fixed" if f else "broken" if b else "other" for f, b in self._kinds(order)]
        return {
            "n": self.n,
            "recipe": self.recipe,
            "changed": len(self.rows),
            **counts,
            "accuracy_change": self.accuracy_change,
            "told": {**columns, "kind": kind},
        }

    def _kinds(self, order: Tensor) -> list[list[bool]]:
        return torch.stack([self.fixed, self.broken], 1)[order].tolist()

    def draw(self, ax: Panels) -> None:
        """The confidence before against that after, a mark for each kind of change."""
        ax = first_axes(ax)
        looks = (
            ("fixed", self.fixed, "o", LCE[0]),
            ("broken", self.broken, "X", HCE[0]),
            ("wrong either way", self.other, ".", ink(ax)),
        )
        for name, chosen, mark, hue in looks:
            x, y = self.sure_before[chosen].tolist(), self.sure_after[chosen].tolist()
            label = f"{name}: {len(x):,}"
            ax.plot(x, y, mark, color=hue, markersize=5, alpha=0.75, label=label, linestyle="none")
        ax.plot([0, 1], [0, 1], color=ink(ax), linewidth=0.8, linestyle=DASHES)
        ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
        ax.set(xlabel="confidence before", ylabel="confidence after")
        title = f"{self.recipe}: {len(self.rows):,} of {self.n:,} predictions changed"
        ax.set_title(title, loc="left", size=TEXT + 1, parse_math=False)
        ax.legend(fontsize=TEXT, loc="best")


def _changes(labels: Tensor, old: Tensor, new: Tensor, *, first_row: int) -> tuple[Tensor, ...]:
    before, after = predicted(old), predicted(new)
    rows = (before != after).nonzero().flatten()
    sure = [logits[rows].double().softmax(1).amax(1) for logits in (old, new)]
    found = (rows + first_row, labels[rows], before[rows], after[rows], *sure)
    return tuple(column.cpu() for column in found)


# --- Reliability diagrams of the same rows before and after a calibrator, with bootstrap bands.


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
        pairs = figure([self.before.diagram, self.after.diagram])[1]
        return [pair[0] for pair in pairs]

    def plot(self, ax: Panels | None = None) -> BeforeAfter:
        """Draws both, on a pair of axes where one is given."""
        if ax is None:
            return super().plot()
        require_matplotlib()
        if len(all_axes(ax)) != 2:
            raise InputError("ax is not a pair of axes: pass one for before and one for after")
        both = (self.before, self.after)
        drawn = [side.plot(axes) for side, axes in zip(both, all_axes(ax), strict=True)]
        return replace(self, before=drawn[0], after=drawn[1], axes=ax)

    def draw(self, ax: Panels) -> None:
        """Both bands."""
        for side, axes in zip((self.before, self.after), all_axes(ax), strict=True):
            side.draw(axes)
