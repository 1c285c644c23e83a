"""Calibration class by class, or group by group: for whom are the probabilities wrong?

Rows are told apart by what is known when a prediction is used: the predicted class, or a group the
caller names (a hospital, a camera, an age band). By the true class one would condition on the
answer, and every class would look miscalibrated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from featcal.analysis import base
from featcal.core.batch import Head
from featcal.core.calibrator import Calibrator
from featcal.core.checks import InputError
from featcal.core.rows import bin_index, predicted
from featcal.metrics.bins import Bins
from featcal.metrics.inputs import checked_bins
from featcal.report.diagram import DASHES, ENOUGH_ROWS

SHOWN = 20  # groups in a picture


@final
@dataclass(frozen=True, eq=False)
class GroupCalibration(base.Analysis):
    """Accuracy and confidence in each of g groups of rows; NaN in a group without rows.

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
    def of(
        cls,
        data: base.Source,
        calibrator: Calibrator | None = None,
        head: Head | None = None,
        *,
        split: str = base.TEST,
        groups: Tensor | Sequence[int] | None = None,
        names: Sequence[str] | None = None,
        by: str | None = None,
        bins: int = 15,
    ) -> GroupCalibration:
        """The groups of `data`, in one pass.

        Args:
            data: a pack, or labelled rows.
            calibrator: fitted; None for the network as it is.
            head: the classifier's last layer, when the data holds features; a pack has its own.
            split: which rows, where the data is a pack.
            groups: (n,) integers from 0 on, the group of each row in the order of the data; None
                for the class that is predicted.
            names: of the groups, or of the classes; None for their numbers.
            by: what pictures call the groups.
            bins: of each group's ECE.
        """
        m = checked_bins(bins)
        with base.reading(data, head, calibrator, split=split) as rows:
            known = None if groups is None else _checked_groups(groups, rows.facts.rows)
            count = rows.facts.classes if known is None else int(known.max()) + 1
            called = _checked_names(names, count)
            sums = torch.zeros(len(called), 3, m, dtype=torch.float64)
            done = 0
            for batch, _, logits in rows.both(calibrator):
                classes = predicted(logits)
                sure, right = logits.softmax(1).amax(1), classes == batch.labels
                group = classes.cpu() if known is None else known[done : done + len(batch)]
                cell = group * 3 * m + bin_index(sure, m).cpu()
                for place, values in enumerate((torch.ones_like(sure), sure, right)):
                    sums.view(-1).index_add_(0, cell + place * m, values.double().cpu())
                done += len(batch)
        kind = by or ("predicted class" if known is None else "group")
        return cls(repr(calibrator) if calibrator else "none", called, sums, kind)

    def bins(self, group: int) -> Bins:
        """The bins of one group, for a diagram of it."""
        return Bins(*self.sums[group])

    @property
    def count(self) -> Tensor:
        """(g,) rows."""
        return self.sums[:, 0].sum(1)

    @property
    def accuracy(self) -> Tensor:
        """(g,) the share of right rows."""
        return self.sums[:, 2].sum(1) / self.count

    @property
    def confidence(self) -> Tensor:
        """(g,) the mean confidence."""
        return self.sums[:, 1].sum(1) / self.count

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
    def ece(self) -> Tensor:
        """(g,) the expected calibration error within each group."""
        return (self.sums[:, 1] - self.sums[:, 2]).abs().sum(1) / self.count

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

    def draw(self, ax: base.Panels) -> None:
        """The worst groups with their intervals; hollow where there are few rows."""
        ax = base.first_axes(ax)
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


def _checked_groups(groups: Tensor | Sequence[int], rows: int) -> Tensor:
    found = torch.as_tensor(groups).cpu()
    whole = not found.is_floating_point() and found.dtype != torch.bool
    if found.shape != (rows,) or not whole or int(found.min()) < 0:
        raise InputError(
            f"groups are {found.dtype} of shape {tuple(found.shape)}, the least of them "
            f"{found.min()}: pass one integer from 0 up for each of the {rows} rows"
        )
    return found.long()


def _checked_names(names: Sequence[str] | None, count: int) -> tuple[str, ...]:
    if names is None:
        return tuple(map(str, range(count)))
    if isinstance(names, str) or len(names) < count:
        raise InputError(f"names has {len(names)} entries for {count} groups: pass one for each")
    return tuple(map(str, names))
