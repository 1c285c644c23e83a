"""How many rows are confident, and how many of those are right: before and after a calibrator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch import Tensor

from featcal.analysis.base import (
    CONFIDENCE,
    HCE,
    LCE,
    TEST,
    Analysis,
    Groups,
    Source,
    Z,
    checked_level,
    entropies,
    first_axes,
    groups_of,
    ink,
    reading,
)
from featcal.core.batch import Head
from featcal.core.calibrator import Calibrator
from featcal.core.checks import InputError
from featcal.metrics.inputs import TopLabel, top_label
from featcal.report.diagram import TEXT
from featcal.report.scores import UNKNOWN, Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from featcal.analysis.base import Panels

WIDTH = 0.22  # of a bar; levels lie 1 apart
LEVELS = (0.80, 0.90, 0.95, 0.99)  # of the paper's table


@final
@dataclass(frozen=True, eq=False)
class ConfidentCounts(Analysis):
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
    def of(
        cls,
        data: Source,
        calibrator: Calibrator | None = None,
        head: Head | None = None,
        *,
        split: str = TEST,
        levels: Sequence[float] = LEVELS,
    ) -> ConfidentCounts:
        """The counts over `data`, in one pass.

        Args:
            data: a pack, or labelled rows.
            calibrator: fitted; None for the network as it is.
            head: the classifier's last layer, when the data holds features; a pack has its own.
            split: which rows, where the data is a pack.
            levels: of the confidence.
        """
        marks = tuple(checked_level(level) for level in levels)
        if not marks:
            raise InputError("levels is empty: pass at least one confidence, such as 0.95")
        before = torch.zeros(2, len(marks), dtype=torch.int64)
        after = before.clone()
        with reading(data, head, calibrator, split=split) as rows:
            for batch, old, new in rows.both(calibrator):
                for found, logits in ((before, old), (after, new)):
                    found += _above(top_label(logits=logits, labels=batch.labels), marks)
            count = rows.facts.rows
        return cls(count, repr(calibrator) if calibrator else "none", marks, before, after)

    def numbers(self) -> dict[str, Any]:
        """One list a column."""
        columns = {
            f"{kind}_{when}": counts[row].tolist()
            for when, counts in (("before", self.before), ("after", self.after))
            for row, kind in enumerate(("right", "wrong"))
        }
        return {"rows": self.rows, "recipe": self.recipe, "levels": list(self.levels), **columns}

    def draw(self, ax: Panels) -> None:
        """Bars of right and wrong rows, light before and full after, on a log scale."""
        ax = first_axes(ax)
        places = torch.arange(len(self.levels), dtype=torch.float64)
        columns = (
            ("right before", self.before[0], LCE, 0.35),
            ("right after", self.after[0], LCE, 0.9),
            ("wrong before", self.before[1], HCE, 0.2),
            ("wrong after", self.after[1], HCE, 0.7),
        )
        for place, (word, counts, look, alpha) in enumerate(columns):
            _bars(ax, places + (place - 1.5) * WIDTH, counts, look, alpha, word)
        ax.set_xticks(places.tolist(), [f"> {level:g}" for level in self.levels])
        ax.set(xlabel="confidence", ylabel=f"rows of {self.rows:,}", yscale="log")
        ax.set_ylim(0.5, 15 * max(self.rows, 1))  # room for numbers that stand upright
        ax.set_title(self.recipe, loc="left", size=TEXT + 1, parse_math=False)
        ax.legend(fontsize=TEXT, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))


def _above(top: TopLabel, levels: Sequence[float]) -> Tensor:
    """(2, l) right rows and wrong ones above each level."""
    counts = [
        [int((chosen & (top.confidence > level)).sum()) for level in levels]
        for chosen in (top.correct, ~top.correct)
    ]
    return torch.tensor(counts, dtype=torch.int64)


def _bars(
    ax: Axes, places: Tensor, counts: Tensor, look: tuple[str, str], alpha: float, word: str
) -> None:
    from matplotlib.colors import to_rgba

    hue, hatch = look
    heights = counts.tolist()
    ax.bar(
        places.tolist(),
        heights,
        0.95 * WIDTH,
        facecolor=to_rgba(hue, alpha),
        edgecolor=hue,
        hatch=hatch,
        linewidth=0.6,
        label=word,
    )
    for place, height in zip(places.tolist(), heights, strict=True):
        at = (place, max(height, 0.5))
        look_of: dict[str, Any] = {"ha": "center", "va": "bottom", "rotation": 90, "size": TEXT}
        ax.annotate(f"{height:,}", at, (0, 3), textcoords="offset points", **look_of)


# --- Softmax entropy of confident wrong and confident right rows, before and after a calibrator.
#
# The paper's own evidence: clipping makes wrong rows uncertain and leaves right ones nearly as they
# were (Tao, Dong and Xu, AAAI 2025). How much more the entropy of wrong rows grows comes with an
# interval.

FEW = 30  # rows of a group below which the normal theory behind the interval is rough


@final
@dataclass(frozen=True, eq=False)
class EntropyGrowth(Analysis):
    """Mean entropies in nats, of HCE and of LCE rows; NaN for a group without rows.

    Attributes:
        groups: the rows.
        recipe: of the calibrator.
        before: (2,) means of the network's own probabilities.
        after: (2,) means of the calibrated ones.
        spread: (2,) standard deviations of the growth over the rows of a group.
    """

    size: ClassVar[tuple[float, float]] = (3.6, 3.0)

    groups: Groups
    recipe: str
    before: Tensor
    after: Tensor
    spread: Tensor = field(repr=False)

    @classmethod
    def of(
        cls,
        data: Source,
        calibrator: Calibrator | None,
        head: Head | None = None,
        *,
        split: str = TEST,
        groups: Groups | None = None,
        confidence: float = CONFIDENCE,
    ) -> EntropyGrowth:
        """The entropies of the groups of `data`, in one pass beyond that for the groups.

        Args:
            data: a pack, or labelled rows.
            calibrator: fitted, such as a clip; None changes nothing.
            head: the classifier's last layer, when the data holds features; a pack has its own.
            split: which rows, where the data is a pack.
            groups: of these rows, where they are known already.
            confidence: of the groups, else.
        """
        with reading(data, head, calibrator, split=split) as rows:
            found = groups_of(rows, groups, confidence)
            # Rows, and the sums of entropy before, after, and of their difference squared.
            sums = torch.zeros(2, 4, dtype=torch.float64)
            pairs = ((old, new) for _, old, new in rows.both(calibrator))
            for (old, new), masks in found.along(pairs):
                for row, mask in zip(sums, masks, strict=True):
                    row += _sums(old[mask], new[mask]).cpu()
        n, before, after, squares = sums.T
        growth = (after - before) / n
        variance = (squares - n * growth.square()).clamp(min=0) / (n - 1)
        spread = torch.where(n > 1, variance.sqrt(), math.nan)
        return cls(found, repr(calibrator) if calibrator else "none", before / n, after / n, spread)

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
        error = float((self.spread.square() / counts).sum().sqrt())
        if math.isnan(error):
            return UNKNOWN
        return Interval(self.gap - Z * error, self.gap + Z * error)

    @property
    def few(self) -> bool:
        """Whether a group has so few rows that the interval is rough."""
        return min(self.groups.sizes) < FEW

    def numbers(self) -> dict[str, Any]:
        """The table of the paper, with the interval."""
        table = {
            name: {
                "before": float(self.before[row]),
                "after": float(self.after[row]),
                "growth": float(self.growth[row]),
            }
            for row, name in enumerate(("hce", "lce"))
        }
        known = {"interval": self.interval.as_json(), "few": self.few}
        made = {"groups": self.groups.numbers(), "recipe": self.recipe}
        return {**made, **table, "gap": self.gap, **known}

    def draw(self, ax: Panels) -> None:
        """An arrow from before to after for each group."""
        ax = first_axes(ax)
        for place, (hue, _) in enumerate((HCE, LCE)):
            start, end = float(self.before[place]), float(self.after[place])
            if math.isnan(start):
                continue
            arrow = {"arrowstyle": "-|>", "color": hue, "linewidth": 2.0, "shrinkA": 4}
            ax.annotate("", (place, end), (place, start), arrowprops=arrow)
            ax.plot(place, start, "o", markerfacecolor="none", color=hue)
            ax.plot(place, end, "o", color=hue)
            upwards = end >= start  # the two labels lean away from each other
            for value, word, above in ((start, "before", not upwards), (end, "after", upwards)):
                look: dict[str, Any] = {"va": "bottom" if above else "top"}
                shift = (9, 1 if above else -1)
                text = f"{word} {value:.4f}"
                ax.annotate(text, (place, value), shift, textcoords="offset points", **look)
        wrong, right = (name.replace(", ", "\n") for name in self.groups.names)
        ax.set_xticks([0, 1], [wrong, right])
        top = float(self.after.nan_to_num().max().clamp(min=self.before.nan_to_num().max()))
        ax.set(xlim=(-0.4, 1.9), ylim=(-0.06 * max(top, 1e-3), 1.15 * max(top, 1e-3)))
        ax.set_ylabel("mean softmax entropy, nats")
        ax.set_title(self._title, loc="left", size=TEXT + 1, color=ink(ax))

    @property
    def _title(self) -> str:
        if math.isnan(self.gap):
            return f"{self.recipe}: a group has no rows"
        low, high = self.interval.low, self.interval.high
        known = "" if math.isnan(low) else f"\n95 %: {low:+.4f} to {high:+.4f}"
        return f"{self.recipe}: HCE grows by {self.gap:+.4f} more than LCE{known}"


def _sums(before: Tensor, after: Tensor) -> Tensor:
    old, new = entropies(before), entropies(after)
    rows = old.new_tensor(float(len(old)))
    return torch.stack([rows, old.sum(), new.sum(), (new - old).square().sum()])
