"""Reliability diagrams with bootstrap bands: how far may each bar be off, with so few rows?

The rows are drawn again (Efron, 1979); the 2.5 % and 97.5 % quantiles of a bin's accuracy over the
resamples are its band. Where all rows of a bin are right, or all wrong, no resample can differ, and
Wilson's interval stands in: certainty from ten rows would be a lie.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor

from featcal.analysis import base
from featcal.core.batch import Head
from featcal.core.calibrator import Calibrator
from featcal.core.checks import InputError
from featcal.core.rows import bin_index, bin_sums
from featcal.data import Pack
from featcal.metrics.bins import Bins
from featcal.metrics.inputs import Predictions, Values, checked_bins, checked_class, top_label
from featcal.report.bootstrap import LEVEL, Resamples, checked_resamples, row_blocks
from featcal.report.diagram import TEXT, ReliabilityDiagram, figure, require_matplotlib

RESAMPLES = 1000
DRAWN = 10  # rows of a bin; with fewer the band is as good as everything
ALPHA = 0.3
WIDTH = 0.5  # of the band, by that of its bin


@final
@dataclass(frozen=True, eq=False)
class BandedDiagram(base.Analysis):
    """A reliability diagram and the 95 % band of the accuracy in each bin.

    Attributes:
        diagram: the numbers of every bin.
        low: (m,) lower ends, NaN where a bin is empty.
        high: (m,) upper ends.
    """

    diagram: ReliabilityDiagram = field(repr=False)
    low: Tensor = field(repr=False)
    high: Tensor = field(repr=False)

    @classmethod
    def of(
        cls,
        probs: Values | Pack | None = None,
        labels: Values | None = None,
        *,
        logits: Values | None = None,
        split: str = base.TEST,
        bins: int = 15,
        title: str = "",
        of_class: int | None = None,
        resamples: int = RESAMPLES,
        seed: int = 0,
    ) -> BandedDiagram:
        """The diagram of n predictions; see `ReliabilityDiagram.of` for the arguments.

        Args:
            probs: (n, k), or (n,) of class 1 of a binary model; or a pack, which has its labels.
            labels: (n,) the class of every row.
            logits: in place of `probs`.
            split: of a pack.
            bins: how many bins of equal width.
            title: what the predictions are.
            of_class: the class whose probability to hold against its share; None for the
                prediction's confidence against its accuracy.
            resamples: how often the rows are drawn again, 100 to 10,000.
            seed: of the resamples.
        """
        if isinstance(probs, Pack):
            with base.reading(probs, split=split) as rows:
                said, so = claims(rows, None, of_class)[0]
        else:
            said, so = _claim(of_class, probs, labels, logits)
        drawn = _drawn(len(said), resamples, seed)
        return cls.of_pairs(said, so, drawn, bins=bins, title=title, of_class=of_class)

    @classmethod
    def of_pairs(
        cls,
        said: Tensor,
        so: Tensor,
        resamples: Resamples,
        *,
        bins: int = 15,
        title: str = "",
        of_class: int | None = None,
    ) -> BandedDiagram:
        """The diagram of n probabilities and whether each came true, with given resamples."""
        m = checked_bins(bins)
        diagram = ReliabilityDiagram(Bins(*bin_sums(said, so, m).cpu()), title, of_class=of_class)
        index, right, counts = bin_index(said, m).cpu(), so.cpu(), resamples.counts
        rows = torch.zeros(m, counts.shape[1], dtype=torch.float64)
        hits = rows.clone()
        for part in row_blocks(len(counts), counts.shape[1]):
            drawn = counts[part].double()
            rows.index_add_(0, index[part], drawn)
            hits.index_add_(0, index[part][right[part]], drawn[right[part]])
        tail = torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=torch.float64)
        low, high = (hits / rows).nanquantile(tail, dim=1)
        count = torch.bincount(index, minlength=m)
        correct = torch.bincount(index[right], minlength=m)
        sure = base.wilson(correct, count)
        alike = (correct == 0) | (correct == count)  # an empty bin too: NaN either way
        return cls(diagram, torch.where(alike, sure[0], low), torch.where(alike, sure[1], high))

    def numbers(self) -> dict[str, Any]:
        """One list per column, one entry per bin."""
        diagram = self.diagram
        names = ("accuracy", "mean_confidence", "gap", "share")
        return {
            "title": diagram.title,
            "of_class": diagram.of_class,
            "rows": diagram.bins.n,
            "ece": diagram.ece,
            "overall_accuracy": diagram.overall_accuracy,
            "overall_confidence": diagram.overall_confidence,
            "edges": diagram.edges.tolist(),
            "count": [int(count) for count in diagram.bins.count.tolist()],
            **{name: getattr(diagram, name).tolist() for name in names},
            "low": self.low.tolist(),
            "high": self.high.tolist(),
        }

    def own_axes(self) -> base.Panels:
        """The diagram and the histogram below it, already drawn but for the band."""
        return figure([self.diagram])[1][0]

    def plot(self, ax: base.Panels | None = None) -> BandedDiagram:
        """Draws the diagram with its band; see `ReliabilityDiagram.plot` for the axes."""
        if ax is not None:
            self.diagram.plot(ax)
        return super().plot(ax)

    def draw(self, ax: base.Panels) -> None:
        """The band over a diagram that is there already, and its name in the legend."""
        from matplotlib.patches import Patch

        ax = base.first_axes(ax)
        color, old = base.ink(ax), ax.get_legend()
        handles = [one for one in old.legend_handles if one is not None] if old else []
        labels = [text.get_text() for text in old.get_texts()] if old else []
        handles.append(Patch(color=color, alpha=ALPHA))
        labels.append(f"{LEVEL:.0%} band".replace("%", " %"))
        ax.legend(handles, labels, loc="upper left", fontsize=TEXT, frameon=old is not None)
        edges = self.diagram.edges.tolist()
        margin = (1 - WIDTH) / 2 / len(self.low)
        for place in (self.diagram.bins.count >= DRAWN).nonzero().flatten().tolist():
            # A light area narrower than its bar, with lines at both ends that show on any ground.
            across = [edges[place] + margin, edges[place + 1] - margin]
            low, high = float(self.low[place]), float(self.high[place])
            ax.fill_between(across, low, high, color=color, alpha=ALPHA, linewidth=0, zorder=3)
            for end in (low, high):
                ax.plot(across, [end, end], color=color, linewidth=1, zorder=3)


@final
@dataclass(frozen=True, eq=False)
class BeforeAfter(base.Analysis):
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
        data: base.Source,
        calibrator: Calibrator | None,
        head: Head | None = None,
        *,
        split: str = base.TEST,
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
        with base.reading(data, head, calibrator, split=split) as rows:
            before, after = claims(rows, calibrator, of_class)
        drawn = _drawn(rows.facts.rows, resamples, seed)
        title = f"after {calibrator!r}" if calibrator else "after"
        kind: Any = {"bins": bins, "of_class": of_class}
        return cls(
            BandedDiagram.of_pairs(*before, drawn, title="before", **kind),
            BandedDiagram.of_pairs(*after, drawn, title=title, **kind),
        )

    def numbers(self) -> dict[str, Any]:
        """Both diagrams."""
        return {"before": self.before.numbers(), "after": self.after.numbers()}

    def own_axes(self) -> base.Panels:
        """Two diagrams side by side, already drawn but for the bands."""
        pairs = figure([self.before.diagram, self.after.diagram])[1]
        return [pair[0] for pair in pairs]

    def plot(self, ax: base.Panels | None = None) -> BeforeAfter:
        """Draws both, on a pair of axes where one is given."""
        if ax is None:
            return super().plot()
        require_matplotlib()
        if len(base.all_axes(ax)) != 2:
            raise InputError("ax is not a pair of axes: pass one for before and one for after")
        first, second = base.all_axes(ax)
        return replace(self, before=self.before.plot(first), after=self.after.plot(second), axes=ax)

    def draw(self, ax: base.Panels) -> None:
        """Both bands."""
        for side, axes in zip((self.before, self.after), base.all_axes(ax), strict=True):
            side.draw(axes)


Claims = tuple[Tensor, Tensor]  # (n,) probabilities, and whether each came true


def claims(
    rows: base.Rows, calibrator: Calibrator | None, of_class: int | None = None
) -> tuple[Claims, Claims]:
    """What is claimed of each row, and whether it is so, before and after a calibrator."""
    parts: list[tuple[Tensor, ...]] = []
    for batch, old, new in rows.both(calibrator):
        before = _claim(of_class, None, batch.labels, old)
        after = before if calibrator is None else _claim(of_class, None, batch.labels, new)
        parts.append((*before, *after))
    said, so, said_after, so_after = (torch.cat(column) for column in zip(*parts, strict=True))
    return (said, so), (said_after, so_after)


def _claim(
    of_class: int | None, probs: Values | None, labels: Values | None, logits: Values | None
) -> Claims:
    """The confidence and whether it was right; of one class its probability, and its rows."""
    if of_class is None:
        top = top_label(probs, labels, logits=logits)
        return top.confidence, top.correct
    seen = Predictions.of(probs, labels, logits=logits)
    label = checked_class(of_class, seen.probs.shape[1])
    return seen.probs[:, label].contiguous(), seen.labels == label


def _drawn(rows: int, resamples: int, seed: int) -> Resamples:
    if not checked_resamples(resamples):
        raise InputError("resamples is 0: a band needs some, such as 1000")
    return Resamples.draw(rows, resamples, seed)
