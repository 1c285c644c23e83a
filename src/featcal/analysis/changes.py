"""What a calibrator does to single answers: how sure they are, how undecided, and which change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch import Tensor

from featcal.analysis import base
from featcal.core.batch import predicted
from featcal.core.checks import InputError
from featcal.metrics.inputs import top_label
from featcal.report.bootstrap import Interval
from featcal.report.diagram import DASHES, TEXT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 0.22  # of a bar; levels lie 1 apart
LEVELS = (0.80, 0.90, 0.95, 0.99)  # of the paper's table


@final
@dataclass(frozen=True, eq=False)
class ConfidentCounts(base.Effect):
    """Rows with a confidence above each of l levels, strictly.

    Attributes:
        rows: all rows.
        recipe: of the calibrator, "none" without one.
        levels: the l levels.
        before: (2, l) int64, right rows and wrong ones by the network's own probabilities.
        after: (2, l) the same by the calibrated ones.
    """

    size: ClassVar[tuple[float, float]] = (5.8, 2.9)

    rows: int
    recipe: str
    levels: tuple[float, ...]
    before: Tensor
    after: Tensor

    @classmethod
    def of_rows(cls, rows: base.Rows, *, levels: Sequence[float] = LEVELS) -> ConfidentCounts:
        """The counts, above each of some levels of the confidence."""
        marks = tuple(base.checked_level(level) for level in levels)
        if not marks:
            raise InputError("levels is empty: pass at least one confidence, such as 0.95")
        counts = torch.zeros(2, 2, len(marks), dtype=torch.int64)
        for batch, *both in rows.both():
            for count, logits in zip(counts, both, strict=True):
                top = top_label(logits=logits, labels=batch.labels)
                for place, level in enumerate(marks):
                    sure = top.confidence > level
                    count[0, place] += (sure & top.correct).sum().cpu()
                    count[1, place] += (sure & ~top.correct).sum().cpu()
        return cls(rows.facts.rows, rows.recipe, marks, *counts)

    def numbers(self) -> dict[str, Any]:
        """One list per column."""
        columns = {
            f"{kind}_{when}": counts[row].tolist()
            for when, counts in (("before", self.before), ("after", self.after))
            for row, kind in enumerate(("right", "wrong"))
        }
        return {"rows": self.rows, "recipe": self.recipe, "levels": list(self.levels), **columns}

    def draw(self, ax: Axes, *_: Axes) -> None:
        """Bars of right and wrong rows, light before and full after, on a log scale."""
        from matplotlib.colors import to_rgba

        columns = (
            ("right before", self.before[0], base.LCE, 0.35),
            ("right after", self.after[0], base.LCE, 0.9),
            ("wrong before", self.before[1], base.HCE, 0.2),
            ("wrong after", self.after[1], base.HCE, 0.7),
        )
        upright: Any = {"ha": "center", "va": "bottom", "rotation": 90, "size": TEXT}
        for column, (word, counts, (hue, hatch), alpha) in enumerate(columns):
            look: Any = {"facecolor": to_rgba(hue, alpha), "edgecolor": hue, "linewidth": 0.6}
            places = [level + (column - 1.5) * WIDTH for level in range(len(self.levels))]
            ax.bar(places, counts.tolist(), 0.95 * WIDTH, label=word, hatch=hatch, **look)
            for place, height in zip(places, counts.tolist(), strict=True):
                at = (place, max(height, 0.5))
                ax.annotate(f"{height:,}", at, (0, 3), textcoords="offset points", **upright)
        ax.set_xticks(range(len(self.levels)), [f"> {level:g}" for level in self.levels])
        ax.set(xlabel="confidence", ylabel=f"rows of {self.rows:,}", yscale="log")
        ax.set_ylim(0.5, 15 * max(self.rows, 1))  # room for numbers that stand upright
        base.set_title(ax, self.recipe)
        ax.legend(fontsize=TEXT, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))


FEW = 30  # rows of a group below which the normal theory behind the interval is rough


@final
@dataclass(frozen=True, eq=False)
class EntropyGrowth(base.Effect):
    """Mean entropies in nats, of HCE and of LCE rows; NaN for a group without rows.

    The paper's own evidence: clipping makes wrong rows uncertain and leaves right ones nearly as
    they were (Tao, Dong and Xu, AAAI 2025).

    Attributes:
        groups: the rows.
        recipe: of the calibrator.
        before: (2,) means of the network's own probabilities.
        after: (2,) means of the calibrated ones.
        spread: (2,) standard deviations of the growth over the rows of a group.
    """

    size: ClassVar[tuple[float, float]] = (3.6, 3.0)

    groups: base.Groups
    recipe: str
    before: Tensor
    after: Tensor
    spread: Tensor = field(repr=False)

    @classmethod
    def of_rows(
        cls,
        rows: base.Rows,
        *,
        groups: base.Groups | None = None,
        confidence: float = base.CONFIDENCE,
    ) -> EntropyGrowth:
        """The entropies of the groups, in one pass beyond that for the groups.

        Args:
            rows: all of them.
            groups: of these rows, where they are known already.
            confidence: of the groups, else.
        """
        # Of each group: rows, and the sums of entropy before, after, and of their difference
        # squared.
        sums = torch.zeros(2, 4, dtype=torch.float64)
        found = base.groups_of(rows, groups, confidence)
        pairs = ((old, new) for _, old, new in rows.both())
        for (old, new), masks in found.along(pairs):
            for row, mask in zip(sums, masks, strict=True):
                was, became = base.entropies(old[mask]), base.entropies(new[mask])
                parts = was.sum(), became.sum(), (became - was).square().sum()
                row += torch.stack([was.new_tensor(float(len(was))), *parts]).cpu()
        n, before, after, squares = sums.T
        growth = (after - before) / n
        variance = (squares - n * growth.square()).clamp(min=0) / (n - 1)
        spread = torch.where(n > 1, variance.sqrt(), math.nan)
        return cls(found, rows.recipe, before / n, after / n, spread)

    @property
    def growth(self) -> Tensor:
        """(2,) by how much the mean entropy grew."""
        return self.after - self.before

    @property
    def gap(self) -> float:
        """By how much more the entropy of HCE rows grew than that of LCE rows."""
        return float(self.growth[0] - self.growth[1])

    @property
    def interval(self) -> Interval:
        """95 % interval of `gap` by normal theory: 1.96 standard errors to either side.

        The two groups are independent samples with variances of their own. Unknown where a group
        has fewer than two rows; rough where `few`.
        """
        counts = torch.tensor(self.groups.sizes, dtype=torch.float64)
        return base.around(self.gap, float((self.spread.square() / counts).sum().sqrt()))

    @property
    def few(self) -> bool:
        """Whether a group has so few rows that the interval is rough."""
        return min(self.groups.sizes) < FEW

    def numbers(self) -> dict[str, Any]:
        """The table of the paper, with the interval."""
        columns = ("before", "after", "growth")
        return {
            "groups": self.groups.numbers(),
            "recipe": self.recipe,
            **{
                group: {name: float(getattr(self, name)[row]) for name in columns}
                for row, group in enumerate(("hce", "lce"))
            },
            "gap": self.gap,
            "interval": self.interval.as_json(),
            "few": self.few,
        }

    def draw(self, ax: Axes, *_: Axes) -> None:
        """An arrow from before to after for each group."""
        for place, hue in enumerate((base.HCE[0], base.LCE[0])):
            start, end = float(self.before[place]), float(self.after[place])
            if math.isnan(start):
                continue
            arrow = {"arrowstyle": "-|>", "color": hue, "linewidth": 2.0, "shrinkA": 4}
            ax.annotate("", (place, end), (place, start), arrowprops=arrow)
            ax.plot(place, start, "o", markerfacecolor="none", color=hue)
            ax.plot(place, end, "o", color=hue)
            upwards = end >= start  # the two labels lean away from each other
            for value, word, above in ((start, "before", not upwards), (end, "after", upwards)):
                look: Any = {"va": "bottom" if above else "top", "textcoords": "offset points"}
                ax.annotate(f"{word} {value:.4f}", (place, value), (9, 1 if above else -1), **look)
        ax.set_xticks([0, 1], [name.replace(", ", "\n") for name in self.groups.names])
        top = max(float(torch.cat([self.before, self.after]).nan_to_num().max()), 1e-3)
        ax.set(xlim=(-0.4, 1.9), ylim=(-0.06 * top, 1.15 * top))
        ax.set_ylabel("mean softmax entropy, nats")
        title = f"{self.recipe}: a group has no rows"
        if not math.isnan(self.gap):
            title = f"{self.recipe}: HCE grows by {self.gap:+.4f} more than LCE"
        if not math.isnan(self.interval.low):
            title += f"\n95 %: {self.interval.low:+.4f} to {self.interval.high:+.4f}"
        base.set_title(ax, title, color=base.ink(ax))


TOLD = 200  # rows in the JSON form, the most confident before first


@final
@dataclass(frozen=True, eq=False)
class ChangedPredictions(base.Effect):
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
    def of_rows(cls, rows: base.Rows) -> ChangedPredictions:
        """The changed rows."""
        parts, done = [], 0
        for batch, old, new in rows.both():
            before, after = predicted(old), predicted(new)
            at = (before != after).nonzero().flatten()
            sure = [logits[at].double().softmax(1).amax(1) for logits in (old, new)]
            columns = (at + done, batch.labels[at], before[at], after[at], *sure)
            parts.append([column.cpu() for column in columns])
            done += len(batch)
        return cls(done, rows.recipe, *(torch.cat(column) for column in zip(*parts, strict=True)))

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
        kinds = {kind: getattr(self, kind) for kind in ("fixed", "broken", "other")}
        order = self.sure_before.argsort(descending=True, stable=True)[:TOLD]
        names = ("rows", "labels", "before", "after", "sure_before", "sure_after")
        columns = {name: getattr(self, name)[order].tolist() for name in names}
        kind = [next(name for name in kinds if kinds[name][row]) for row in order.tolist()]
        return {
            "n": self.n,
            "recipe": self.recipe,
            "changed": len(self.rows),
            **{name: int(mask.sum()) for name, mask in kinds.items()},
            "accuracy_change": self.accuracy_change,
            "told": {**columns, "kind": kind},
        }

    def draw(self, ax: Axes, *_: Axes) -> None:
        """The confidence before against that after, a mark for each kind of change."""
        looks = (
            ("fixed", self.fixed, "o", base.LCE[0]),
            ("broken", self.broken, "X", base.HCE[0]),
            ("wrong either way", self.other, ".", base.ink(ax)),
        )
        for name, chosen, mark, hue in looks:
            x, y = self.sure_before[chosen].tolist(), self.sure_after[chosen].tolist()
            label = f"{name}: {len(x):,}"
            ax.plot(x, y, mark, color=hue, markersize=5, alpha=0.75, label=label, linestyle="none")
        ax.plot([0, 1], [0, 1], color=base.ink(ax), linewidth=0.8, linestyle=DASHES)
        ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
        ax.set(xlabel="confidence before", ylabel="confidence after")
        base.set_title(ax, f"{self.recipe}: {len(self.rows):,} of {self.n:,} predictions changed")
        ax.legend(fontsize=TEXT, loc="best")
