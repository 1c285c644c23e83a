"""Reliability diagrams with bootstrap bands: how far may each bar be off, with so few rows?

The rows are drawn again (Efron, 1979); the 2.5 % and 97.5 % quantiles of a bin's accuracy over the
resamples are its band. Where all rows of a bin are right, or all wrong, no resample can differ, and
Wilson's interval stands in: certainty from ten rows would be a lie.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from featcal.analysis.base import TEST, Analysis, first_axes, ink, reading, wilson
from featcal.core.checks import InputError
from featcal.core.rows import bin_index, bin_sums
from featcal.data import Pack
from featcal.metrics.bins import Bins
from featcal.metrics.inputs import Predictions, Values, checked_bins, checked_class
from featcal.report.bootstrap import Resamples, checked_resamples, row_blocks
from featcal.report.diagram import TEXT, ReliabilityDiagram, figure
from featcal.report.scores import LEVEL

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from featcal.analysis.base import Panels

RESAMPLES = 1000
DRAWN = 10  # rows of a bin; with fewer the band is as good as everything
ALPHA = 0.3
WIDTH = 0.5  # of the band, by that of its bin


def checked_number(resamples: int) -> int:
    """The number of resamples, at least 100."""
    if not checked_resamples(resamples):
        raise InputError("resamples is 0: a band needs some, such as 1000")
    return resamples


@final
@dataclass(frozen=True, eq=False)
class BandedDiagram(Analysis):
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
        split: str = TEST,
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
            probs, labels, logits = None, *_gathered(probs, split)
        pairs = said_and_so(Predictions.of(probs, labels, logits=logits), of_class)
        drawn = Resamples.draw(len(pairs[0]), checked_number(resamples), seed)
        return cls.of_pairs(*pairs, drawn, bins=bins, title=title, of_class=of_class)

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
        summary = Bins(*bin_sums(said, so, m).cpu())
        diagram = ReliabilityDiagram(summary, title, of_class=of_class)
        index = bin_index(said, m).cpu()
        return cls(diagram, *_band(index, so.cpu(), m, resamples.counts))

    def numbers(self) -> dict[str, Any]:
        """One list a column, an entry a bin."""
        diagram = self.diagram
        names = ("accuracy", "mean_confidence", "gap", "share")
        columns = {name: getattr(diagram, name).tolist() for name in names}
        return {
            "title": diagram.title,
            "of_class": diagram.of_class,
            "rows": diagram.bins.n,
            "ece": diagram.ece,
            "overall_accuracy": diagram.overall_accuracy,
            "overall_confidence": diagram.overall_confidence,
            "edges": diagram.edges.tolist(),
            "count": [int(count) for count in diagram.bins.count.tolist()],
            **columns,
            "low": self.low.tolist(),
            "high": self.high.tolist(),
        }

    def own_axes(self) -> Panels:
        """The diagram and the histogram below it, already drawn but for the band."""
        return figure([self.diagram])[1][0]

    def plot(self, ax: Panels | None = None) -> BandedDiagram:
        """Draws the diagram with its band; see `ReliabilityDiagram.plot` for the axes."""
        if ax is not None:
            self.diagram.plot(ax)
        return super().plot(ax)

    def draw(self, ax: Panels) -> None:
        """The band, over a diagram that is there already."""
        ax = first_axes(ax)
        edges = self.diagram.edges.tolist()
        drawn = (self.diagram.bins.count >= DRAWN).nonzero().flatten().tolist()
        _name_band(ax)
        for place in drawn:
            _draw_band(
                ax, edges[place : place + 2], float(self.low[place]), float(self.high[place])
            )


def _gathered(pack: Pack, split: str) -> tuple[Tensor, Tensor]:
    """The labels and the logits of all rows."""
    with reading(pack, None, split=split) as rows:
        parts = [(batch.labels, logits) for batch, logits in rows]
    labels, logits = (torch.cat(column) for column in zip(*parts, strict=True))
    return labels, logits


def said_and_so(seen: Predictions, of_class: int | None) -> tuple[Tensor, Tensor]:
    """What the bins are of: the confidence and whether it was right, or a class's probability."""
    if of_class is None:
        return seen.confidence, seen.correct
    label = checked_class(of_class, seen.probs.shape[1])
    return seen.probs[:, label].contiguous(), seen.labels == label


def _band(index: Tensor, right: Tensor, bins: int, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Quantiles of each bin's accuracy over the resamples.

    Args:
        index: (n,) the bin of each row.
        right: (n,) bool.
        bins: how many.
        counts: (n, b) how often each row is drawn.
    """
    rows = torch.zeros(bins, counts.shape[1], dtype=torch.float64)
    hits = rows.clone()
    for part in row_blocks(len(counts), counts.shape[1]):
        drawn = counts[part].double()
        rows.index_add_(0, index[part], drawn)
        hits.index_add_(0, index[part][right[part]], drawn[right[part]])
    tail = torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=torch.float64)
    low, high = (hits / rows).nanquantile(tail, dim=1)
    count = torch.bincount(index, minlength=bins)
    correct = torch.bincount(index[right], minlength=bins)
    sure = wilson(correct, count)
    alike = (correct == 0) | (correct == count)  # an empty bin too: NaN either way
    return torch.where(alike, sure[0], low), torch.where(alike, sure[1], high)


def _draw_band(ax: Axes, ends: list[float], low: float, high: float) -> None:
    """A light area narrower than its bar, with a line at both ends that shows on any ground."""
    color, margin = ink(ax), (1 - WIDTH) / 2 * (ends[1] - ends[0])
    across = [ends[0] + margin, ends[1] - margin]
    ax.fill_between(across, low, high, color=color, alpha=ALPHA, linewidth=0, zorder=3)
    for end in (low, high):
        ax.plot(across, [end, end], color=color, linewidth=1, zorder=3)


def _name_band(ax: Axes) -> None:
    """Puts the band into the legend of the axes, which may have one already."""
    from matplotlib.patches import Patch

    old = ax.get_legend()
    known = [] if old is None else old.legend_handles
    handles = [handle for handle in known if handle is not None]
    labels = [] if old is None else [text.get_text() for text in old.get_texts()]
    handles.append(Patch(color=ink(ax), alpha=ALPHA))
    labels.append(f"{LEVEL:.0%} band".replace("%", " %"))
    ax.legend(handles, labels, loc="upper left", fontsize=TEXT, frameon=old is not None)
