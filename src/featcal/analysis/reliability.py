"""Calibration in bins with bands, and group by group: how far off, for whom, and how sure is that?

The rows are drawn again (Efron, 1979); the 2.5 % and 97.5 % quantiles of a bin's accuracy over the
resamples are its band. Where all rows of a bin are right, or all wrong, no resample can differ, and
Wilson's interval stands in: certainty from ten rows would be a lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch import Tensor

from featcal.analysis import base
from featcal.core.batch import bin_index, bin_sums, predicted
from featcal.core.checks import InputError
from featcal.data import Pack
from featcal.metrics.bins import Bins
from featcal.metrics.inputs import Predictions, Values, checked_bins, checked_class, top_label
from featcal.report.bootstrap import LEVEL, Resamples, checked_resamples
from featcal.report.diagram import DASHES, ENOUGH_ROWS, TEXT, ReliabilityDiagram, all_axes, figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from featcal.report.diagram import Panels

RESAMPLES = 1000
DRAWN = 10  # rows of a bin; with fewer the band is as good as everything
ALPHA = 0.3
WIDTH = 0.5  # of the band, by that of its bin
SHOWN = 20  # groups in a picture


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
                claim = claims(rows, of_class)[0]
        else:
            claim = _claim(of_class, probs, labels, logits)
        drawn = _drawn(len(claim[0]), resamples, seed)
        return cls.of_claims(claim, drawn, bins, title, of_class)

    @classmethod
    def of_claims(
        cls, claim: Claims, drawn: Resamples, bins: int, title: str, of_class: int | None = None
    ) -> BandedDiagram:
        """The diagram of n probabilities and whether each came true, with given resamples."""
        m, (said, so) = checked_bins(bins), claim
        diagram = ReliabilityDiagram(Bins(*bin_sums(said, so, m).cpu()), title, of_class=of_class)
        index, right = bin_index(said, m).cpu(), so.cpu()
        cell = index + m * right  # wrong rows of each bin, then right ones
        table = torch.zeros(len(drawn.counts), 2 * m, dtype=torch.float64)
        table.view(-1).index_add_(
            0, drawn.unit.long() * 2 * m + cell, torch.ones(1).double().expand(len(cell))
        )
        misses, hits = torch.split(drawn.sums(table)[1:].T, m)
        rows = misses + hits
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

    def own_axes(self) -> Panels:
        """The diagram and the histogram below it, already drawn but for the band."""
        return figure([self.diagram])[1][0]

    def plot(self, ax: Panels | None = None) -> BandedDiagram:
        """Draws the diagram with its band; see `ReliabilityDiagram.plot` for the axes."""
        if ax is not None:
            self.diagram.plot(ax)
        return super().plot(ax)

    def draw(self, ax: Axes, *_: Axes) -> None:
        """The band over a diagram that is there already, and its name in the legend."""
        from matplotlib.patches import Patch

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
class BeforeAfter(base.Effect):
    """Two diagrams of the same rows, before and after a calibrator.

    Attributes:
        before: of the network's own probabilities.
        after: of the calibrated ones.
    """

    before: BandedDiagram = field(repr=False)
    after: BandedDiagram = field(repr=False)

    @classmethod
    def of_rows(
        cls,
        rows: base.Rows,
        *,
        bins: int = 15,
        of_class: int | None = None,
        resamples: int = RESAMPLES,
        seed: int = 0,
    ) -> BeforeAfter:
        """Both diagrams; confidence and correctness of all rows are kept.

        Args:
            rows: all of them.
            bins: how many bins of equal width.
            of_class: as in `ReliabilityDiagram.of`.
            resamples: how often the rows are drawn again; the same rows for both.
            seed: of the resamples.
        """
        before, after = claims(rows, of_class)
        drawn = _drawn(rows.facts.rows, resamples, seed)
        title = f"after {rows.recipe}" if rows.calibrator else "after"
        return cls(
            BandedDiagram.of_claims(before, drawn, bins, "before", of_class),
            BandedDiagram.of_claims(after, drawn, bins, title, of_class),
        )

    def numbers(self) -> dict[str, Any]:
        """Both diagrams."""
        return {"before": self.before.numbers(), "after": self.after.numbers()}

    def own_axes(self) -> Panels:
        """Two diagrams side by side, already drawn but for the bands."""
        return [pair[0] for pair in figure([self.before.diagram, self.after.diagram])[1]]

    def plot(self, ax: Panels | None = None) -> BeforeAfter:
        """Draws both, on a pair of axes where one is given."""
        if ax is not None:
            given = all_axes(ax)
            if len(given) != 2:
                raise InputError("ax is not a pair of axes: pass one for before and one for after")
            for side, axes in zip((self.before, self.after), given, strict=True):
                side.diagram.plot(axes)
        return super().plot(ax)

    def draw(self, ax: Axes, *others: Axes) -> None:
        """Both bands."""
        for side, axes in zip((self.before, self.after), (ax, *others), strict=True):
            side.draw(axes)


Claims = tuple[Tensor, Tensor]  # (n,) probabilities, and whether each came true


def claims(rows: base.Rows, of_class: int | None = None) -> tuple[Claims, Claims]:
    """What is claimed of each row, and whether it is so, before and after the calibrator."""
    parts: list[tuple[Tensor, ...]] = []
    for batch, old, new in rows.both():
        before = _claim(of_class, None, batch.labels, old)
        after = before if rows.calibrator is None else _claim(of_class, None, batch.labels, new)
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


@final
@dataclass(frozen=True, eq=False)
class GroupCalibration(base.Binned, base.Effect):
    """Accuracy and confidence in each of g groups of rows; NaN in a group without rows.

    Rows are told apart by what is known when a prediction is used: the predicted class, or a group
    the caller names (a hospital, a camera, an age band). By the true class one would condition on
    the answer, and every class would look miscalibrated.

    Attributes:
        recipe: of the calibrator, "none" without one.
        names: of the g groups.
        sums: (g, 3, m) count, summed confidence and right rows, in m bins of the confidence.
        by: what the groups are, such as "predicted class".
    """

    size: ClassVar[tuple[float, float]] = (4.6, 4.4)

    recipe: str
    names: tuple[str, ...]
    sums: Tensor = field(repr=False)
    by: str = "predicted class"

    @classmethod
    def of_rows(
        cls,
        rows: base.Rows,
        *,
        groups: Tensor | Sequence[int] | None = None,
        names: Sequence[str] | None = None,
        by: str | None = None,
        bins: int = 15,
    ) -> GroupCalibration:
        """The groups of the rows.

        Args:
            rows: all of them.
            groups: (n,) integers from 0 on, the group of each row in the order of the data; None
                for the class that is predicted.
            names: of the groups, or of the classes; None for their numbers.
            by: what pictures call the groups.
            bins: of each group's ECE.
        """
        m, n, count = checked_bins(bins), rows.facts.rows, rows.facts.classes
        known = None if groups is None else torch.as_tensor(groups).cpu()
        if known is not None:
            whole = not known.is_floating_point() and known.dtype != torch.bool
            if known.shape != (n,) or not whole or int(known.min()) < 0:
                raise InputError(
                    f"groups are {known.dtype} of shape {tuple(known.shape)}, the least of them "
                    f"{known.min()}: pass one integer from 0 up for each of the {n} rows"
                )
            known, count = known.long(), int(known.max()) + 1
        called = tuple(map(str, range(count))) if names is None else tuple(map(str, names))
        if isinstance(names, str) or len(called) < count:
            raise InputError(
                f"names has {len(called)} entries for {count} groups: pass one for each"
            )
        sums, done = torch.zeros(len(called), 3, m, dtype=torch.float64), 0
        for batch, _, logits in rows.both():
            classes = predicted(logits)
            sure, right = logits.softmax(1).amax(1), classes == batch.labels
            group = classes.cpu() if known is None else known[done : done + len(batch)]
            cell = group * 3 * m + bin_index(sure, m).cpu()
            for place, values in enumerate((torch.ones_like(sure), sure, right)):
                sums.view(-1).index_add_(0, cell + place * m, values.double().cpu())
            done += len(batch)
        kind = by or ("predicted class" if known is None else "group")
        return cls(rows.recipe, called, sums, kind)

    @property
    def overconfidence(self) -> Tensor:
        """(g,) mean confidence minus accuracy."""
        return self.confidence - self.accuracy

    @property
    def interval(self) -> Tensor:
        """(g, 2) 95 % intervals of the overconfidence, by Wilson's interval of the accuracy."""
        low, high = base.wilson(self.sums[:, 2].sum(1), self.count)
        return torch.stack([self.confidence - high, self.confidence - low], 1)

    @property
    def few(self) -> Tensor:
        """(g,) bool: too few rows to say much, under 100."""
        return self.count < ENOUGH_ROWS

    def worst(self, most: int | None = None) -> list[int]:
        """Groups by how far from 0 their overconfidence is at least, the farthest first.

        "At least" is by the interval; among groups whose interval holds 0 the larger gap comes
        first. Groups of few rows come behind all others, since among many of them some are far off
        by chance. Empty groups are left out.
        """
        low, high = self.interval.T
        sure = torch.maximum(low, -high).clamp(min=0)
        gap = self.overconfidence.abs()
        filled = (self.count > 0).nonzero().flatten().tolist()
        order = sorted(
            filled, key=lambda g: (bool(self.few[g]), -float(sure[g]), -float(gap[g]), g)
        )
        return order[:most]

    def numbers(self) -> dict[str, Any]:
        """One row per group, in the order of the groups, and their order from the worst on."""
        columns = ("accuracy", "confidence", "overconfidence", "interval", "ece")
        values = {name: getattr(self, name).tolist() for name in columns}
        rows = [
            {
                "name": name,
                "count": int(self.count[group]),
                "few": bool(self.few[group]),
                **{column: values[column][group] for column in columns},
            }
            for group, name in enumerate(self.names)
        ]
        return {"recipe": self.recipe, "by": self.by, "groups": rows, "worst": self.worst()}

    def draw(self, ax: Axes, *_: Axes) -> None:
        """The worst groups with their intervals; hollow where there are few rows."""
        chosen = self.worst(SHOWN)
        gap, interval = 100 * self.overconfidence, 100 * self.interval
        for place, group in enumerate(chosen):
            hue = base.HCE[0] if float(gap[group]) > 0 else base.LCE[0]
            face = "none" if bool(self.few[group]) else hue
            low, high = interval[group].tolist()
            ax.plot([low, high], [place, place], color=hue, linewidth=1.3)
            ax.plot(float(gap[group]), place, "o", color=hue, markerfacecolor=face, markersize=5)
        names = [f"{self.names[group]} ({int(self.count[group]):,})" for group in chosen]
        ax.set_yticks(range(len(chosen)), names, parse_math=False)
        ax.axvline(0, color=base.ink(ax), linewidth=1, linestyle=DASHES)
        ax.invert_yaxis()
        ax.set(xlabel="mean confidence minus accuracy, points", ylabel=f"{self.by} (rows)")
        shown = "" if len(chosen) == len(self.names) else f", the worst {len(chosen)}"
        hollow = bool(self.few[chosen].any())
        title = f"{self.recipe}{shown}" + (f"; hollow: under {ENOUGH_ROWS} rows" if hollow else "")
        base.set_title(ax, title)
