"""Confident rows, wrong and right: high and low calibration error (Tao, Dong and Xu, AAAI 2025).

A single row has no calibration error. A wrong row with a high confidence stands for a high one
(HCE), a right row with a high confidence for a low one (LCE). The network's own logits decide; the
same rows are looked at after any calibration.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar, final

import torch
from torch import Tensor

from featcal.analysis.base import HCE, LCE, Analysis, first_axes, ink
from featcal.analysis.reading import TEST, Rows, Source, reading
from featcal.core.batch import Head
from featcal.core.errors import InputError
from featcal.data import Pack
from featcal.metrics.inputs import Values
from featcal.metrics.predictions import top_label
from featcal.report.drawing import DASHES, TEXT

if TYPE_CHECKING:
    from featcal.analysis.base import Panels

Item = TypeVar("Item", bound=tuple[Tensor, ...])

CONFIDENCE = 0.95
BARS = 40


@final
@dataclass(frozen=True, eq=False)
class Groups(Analysis):
    """Which of n rows are HCE and which LCE.

    Attributes:
        confidence: rows above it, strictly, are in one of the groups.
        sure: (n,) the confidence of each row, by the unclipped logits.
        right: (n,) bool, whether its prediction is the label.
    """

    confidence: float
    sure: Tensor = field(repr=False)
    right: Tensor = field(repr=False)

    @classmethod
    def of(
        cls,
        logits: Values | Pack,
        labels: Values | None = None,
        confidence: float = CONFIDENCE,
        *,
        split: str = TEST,
    ) -> Groups:
        """The groups of n rows of logits (n, k) with their labels, or of a split of a pack.

        >>> logits = torch.tensor([[0.0, 5.0], [5.0, 0.0], [0.0, 0.1]])
        >>> Groups.of(logits, torch.tensor([1, 1, 0])).sizes
        (1, 1)
        """
        if isinstance(logits, Pack):
            return cls.of_data(logits, confidence=confidence, split=split)
        top = top_label(logits=logits, labels=labels)
        return cls(checked_level(confidence), top.confidence.cpu(), top.correct.cpu())

    @classmethod
    def of_data(
        cls,
        data: Source,
        head: Head | None = None,
        confidence: float = CONFIDENCE,
        *,
        split: str = TEST,
    ) -> Groups:
        """The groups of the rows of `data`, by the network's own logits, in one pass."""
        with reading(data, head, split=split) as rows:
            return cls.of_rows(rows, confidence)

    @classmethod
    def of_rows(cls, rows: Rows, confidence: float = CONFIDENCE) -> Groups:
        """The groups of rows that are being read."""
        tops = [top_label(logits=logits, labels=batch.labels) for batch, logits in rows]
        sure = torch.cat([top.confidence.cpu() for top in tops])
        right = torch.cat([top.correct.cpu() for top in tops])
        return cls(checked_level(confidence), sure, right)

    def __len__(self) -> int:
        return len(self.sure)

    def at(self, confidence: float) -> Groups:
        """The same rows, grouped at another confidence."""
        return replace(self, confidence=checked_level(confidence), axes=None)

    @property
    def hce(self) -> Tensor:
        """(n,) bool: wrong, with a confidence above the level."""
        return ~self.right & (self.sure > self.confidence)

    @property
    def lce(self) -> Tensor:
        """(n,) bool: right, with a confidence above the level."""
        return self.right & (self.sure > self.confidence)

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of HCE rows and of LCE rows."""
        return int(self.hce.sum()), int(self.lce.sum())

    @property
    def names(self) -> tuple[str, str]:
        """The groups with their sizes, as pictures call them."""
        wrong, right = self.sizes
        return f"HCE: wrong, {wrong:,} rows", f"LCE: right, {right:,} rows"

    def along(self, stream: Iterable[Item]) -> Iterator[tuple[Item, list[Tensor]]]:
        """Each item of a stream of these rows with its part of `hce` and of `lce`.

        Args:
            stream: tuples whose first entry is a tensor with a row for each row.
        """
        done, both = 0, (self.hce, self.lce)
        for item in stream:
            part = slice(done, done + len(item[0]))
            yield item, [mask[part].to(item[0].device) for mask in both]
            done += len(item[0])

    def checked(self, rows: Rows) -> Groups:
        """These groups, refused where they are of other data."""
        if len(self) != rows.facts.rows:
            raise InputError(
                f"groups are of {len(self)} rows and the data has {rows.facts.rows}: "
                "make them from the same data, Groups.of_data(data, head)"
            )
        return self

    def numbers(self) -> dict[str, Any]:
        """Sizes, and the share of the confident rows that are wrong."""
        wrong, right = self.sizes
        return {
            "confidence": self.confidence,
            "rows": len(self),
            "hce": wrong,
            "lce": right,
            "wrong_share": wrong / (wrong + right) if wrong + right else float("nan"),
        }

    def draw(self, ax: Panels) -> None:
        """How confident right and wrong rows are, with the groups' level marked."""
        ax = first_axes(ax)
        edges = torch.linspace(float(self.sure.min()) if len(self) else 0, 1, BARS + 1)
        for (hue, hatch), name, rows in (
            (LCE, self.names[1], self.right),
            (HCE, self.names[0], ~self.right),
        ):
            look: dict[str, Any] = {"color": hue, "alpha": 0.55, "label": name}
            if hatch:
                look = {"facecolor": "none", "edgecolor": hue, "hatch": hatch, "label": name}
            ax.hist(self.sure[rows].numpy(), bins=edges.tolist(), **look)
        ax.axvline(self.confidence, color=ink(ax), linewidth=1.1, linestyle=DASHES)
        ax.set(xlabel="confidence", ylabel="rows", yscale="log", xlim=(float(edges[0]), 1))
        ax.legend(title=f"above {self.confidence:g}", fontsize=TEXT, frameon=False)


def groups_of(rows: Rows, groups: Groups | None, confidence: float) -> Groups:
    """The groups a caller gave, or those of the rows at a confidence."""
    return Groups.of_rows(rows, confidence) if groups is None else groups.checked(rows)


def checked_level(confidence: float) -> float:
    """A level of the confidence, from 0 up to but not including 1."""
    number = isinstance(confidence, (int, float)) and not isinstance(confidence, bool)
    if not number or not 0 <= confidence < 1:
        raise InputError(f"confidence is {confidence!r}: pass a number in 0..1, such as 0.95")
    return float(confidence)
