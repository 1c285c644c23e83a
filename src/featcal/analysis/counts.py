"""How many rows are confident, and how many of those are right: before and after a calibrator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch import Tensor

from featcal.analysis.base import HCE, LCE, Analysis, first_axes
from featcal.analysis.groups import checked_level
from featcal.analysis.reading import TEST, Source, reading
from featcal.core.batch import Head
from featcal.core.calibrator import Calibrator
from featcal.core.errors import InputError
from featcal.metrics.predictions import TopLabel, top_label
from featcal.report.drawing import TEXT

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
