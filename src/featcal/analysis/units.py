"""The mean feature value of every unit over confident wrong and confident right rows.

The picture that motivates feature clipping (Tao, Dong and Xu, AAAI 2025): some units are far larger
where the network is sure and wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch import Tensor

from featcal.analysis.base import HCE, LCE, Analysis, all_axes, first_axes
from featcal.analysis.groups import CONFIDENCE, Groups, groups_of
from featcal.analysis.reading import TEST, Rows, Source, reading
from featcal.core.batch import Head
from featcal.core.errors import InputError
from featcal.report.drawing import TEXT
from featcal.report.resample import checked_seed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from featcal.analysis.base import Panels

UNITS = 100  # of the paper's figure


@final
@dataclass(frozen=True, eq=False)
class UnitMeans(Analysis):
    """Mean feature values, unit by unit; NaN where a group has no rows.

    Attributes:
        groups: the rows.
        hce: (d,) means over confident wrong rows, float64.
        lce: (d,) means over confident right rows.
        chosen: (u,) the units drawn at random for the picture of a few.
        absolute: whether the means are of absolute values, as for signed features.
    """

    size: ClassVar[tuple[float, float]] = (7.0, 5.2)

    groups: Groups
    hce: Tensor = field(repr=False)
    lce: Tensor = field(repr=False)
    chosen: Tensor = field(repr=False)
    absolute: bool

    @classmethod
    def of(
        cls,
        data: Source,
        head: Head | None = None,
        *,
        split: str = TEST,
        groups: Groups | None = None,
        confidence: float = CONFIDENCE,
        units: int = UNITS,
        seed: int = 0,
        absolute: bool | None = None,
        reference: bool = False,
    ) -> UnitMeans:
        """The means over the groups of `data`.

        Args:
            data: a pack, or labelled rows with features.
            head: the classifier's last layer; a pack has its own.
            split: which rows, where the data is a pack.
            groups: of these rows, where they are known already.
            confidence: of the groups, else.
            units: how many to draw at random; all of them where there are fewer.
            seed: of the draw.
            absolute: whether to average absolute values; None to do so where a row has a negative.
            reference: draw with replacement, as the paper's figure did: some units come twice.
        """
        if isinstance(units, bool) or not isinstance(units, int) or units < 1:
            raise InputError(f"units is {units!r}: pass an integer of at least 1")
        with reading(data, head, split=split, features_for="the mean of every unit") as rows:
            found = groups_of(rows, groups, confidence)
            absolute = rows.signed() if absolute is None else bool(absolute)
            sums = _sums(rows, found, absolute=absolute)
        counts = torch.tensor(found.sizes, dtype=torch.float64)[:, None]
        hce, lce = sums / counts
        chosen = _draw(rows.facts.width, units, seed, reference=reference)
        return cls(found, hce, lce, chosen, absolute)

    @property
    def higher(self) -> float:
        """The share of all units whose mean is larger over HCE rows; NaN without both groups."""
        gap = self.hce - self.lce
        return float((gap > 0).double().mean()) if bool(gap.isfinite().all()) else float("nan")

    @property
    def which(self) -> str:
        """Which units the picture of a few shows: "100 of 2,048 units, drawn at random"."""
        if len(set(self.chosen.tolist())) == len(self.hce):
            return f"all {len(self.hce):,} units, in no order"
        return f"{len(self.chosen)} of {len(self.hce):,} units, drawn at random"

    @property
    def order(self) -> Tensor:
        """(d,) all units by their mean over LCE rows, the largest first."""
        return self.lce.nan_to_num().argsort(descending=True, stable=True)

    def numbers(self) -> dict[str, Any]:
        """The drawn units, and all units in the order of their LCE means."""
        picked, order = self.chosen, self.order
        return {
            "groups": self.groups.numbers(),
            "absolute": self.absolute,
            "mean": {"hce": float(self.hce.mean()), "lce": float(self.lce.mean())},
            "higher_share": self.higher,
            "chosen": _columns(picked, self.hce, self.lce),
            "all": _columns(order, self.hce, self.lce),
        }

    def own_axes(self) -> Panels:
        """Two panels: a few units, and all of them."""
        from matplotlib.figure import Figure

        return list(Figure(figsize=self.size, layout="constrained").subplots(2, 1))

    def draw(self, ax: Panels) -> None:
        """A few units drawn at random; on a second panel, where there is one, all units."""
        first = first_axes(ax)
        _bars(first, self.hce[self.chosen], self.lce[self.chosen])
        first.set(xlabel=self.which, ylabel=self._mean_of)
        title = f"confidence above {self.groups.confidence:g}: larger over HCE rows in "
        known = "no unit to tell" if math.isnan(self.higher) else f"{self.higher:.0%} of all units"
        first.set_title(title + known.replace("%", " %"), loc="left", size=TEXT + 1)
        handles = list(first.containers)
        first.legend(handles, self.groups.names, fontsize=TEXT, frameon=False, ncols=2)
        first.set_ylim(top=1.15 * first.get_ylim()[1])  # room for the legend
        for other in all_axes(ax)[1:2]:
            self._draw_all(other)

    def _draw_all(self, ax: Axes) -> None:
        order, places = self.order, torch.arange(len(self.order)).numpy()
        ax.fill_between(places, self.lce[order].numpy(), color=LCE[0], alpha=0.45, linewidth=0)
        ax.plot(places, self.hce[order].numpy(), ".", color=HCE[0], markersize=2.2)
        of = f"all {len(order):,} units, the largest mean over LCE rows first"
        ax.set(xlabel=of, ylabel=self._mean_of, xlim=(0, len(order)))
        lowest = float(torch.minimum(self.hce, self.lce).nan_to_num().min())
        ax.set_ylim(bottom=0 if lowest >= 0 else None)

    @property
    def _mean_of(self) -> str:
        return "mean |feature|" if self.absolute else "mean feature"


def _columns(units: Tensor, hce: Tensor, lce: Tensor) -> dict[str, Any]:
    values = {"hce": hce[units].tolist(), "lce": lce[units].tolist()}
    rounded = {name: [float(f"{v:.6g}") for v in column] for name, column in values.items()}
    return {"unit": units.tolist(), **rounded}


def _sums(rows: Rows, groups: Groups, *, absolute: bool) -> Tensor:
    """Sums of the values, or of their sizes, over both groups: (2, d)."""
    sums = torch.zeros(2, rows.facts.width, dtype=torch.float64)
    for (features,), masks in groups.along(rows.features()):
        for row, mask in zip(sums, masks, strict=True):
            values = features[mask].abs() if absolute else features[mask]
            row += values.sum(0, dtype=torch.float64).cpu()
    return sums


def _draw(width: int, units: int, seed: int, *, reference: bool) -> Tensor:
    generator = torch.Generator().manual_seed(checked_seed(seed))
    if reference:
        return torch.randint(width, (units,), generator=generator)
    return torch.randperm(width, generator=generator)[:units]


def _bars(ax: Axes, hce: Tensor, lce: Tensor) -> None:
    """HCE as outlined bars behind, LCE as full narrower ones before them: both always show."""
    places = torch.arange(len(hce)).numpy()
    hue, hatch = HCE
    ax.bar(places, hce.numpy(), 0.95, color="none", edgecolor=hue, hatch=hatch, linewidth=0.6)
    ax.bar(places, lce.numpy(), 0.5, color=LCE[0], alpha=0.9)
    ax.set(xlim=(-0.8, len(hce) - 0.2), xticks=[])
