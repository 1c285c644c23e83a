"""Softmax entropy of confident wrong and confident right rows, before and after a calibrator.

The paper's own evidence: clipping makes wrong rows uncertain and leaves right ones nearly as they
were (Tao, Dong and Xu, AAAI 2025). How much more the entropy of wrong rows grows comes with an
interval.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch import Tensor

from featcal.analysis.base import HCE, LCE, Analysis, first_axes, ink
from featcal.analysis.groups import CONFIDENCE, Groups, groups_of
from featcal.analysis.reading import TEST, Source, entropies, reading
from featcal.analysis.shares import Z
from featcal.core.batch import Head
from featcal.core.calibrator import Calibrator
from featcal.report.drawing import TEXT
from featcal.report.intervals import UNKNOWN, Interval

if TYPE_CHECKING:
    from featcal.analysis.base import Panels


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
