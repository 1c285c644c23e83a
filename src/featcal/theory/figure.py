"""The printed entropy gain and its plotted derivative beside the correct ones, numbers first.

matplotlib is imported inside the functions alone, so that the numbers need none of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from featcal.core.checks import InputError
from featcal.report import diagram
from featcal.theory import printed
from featcal.theory.forms import entropy_gain, entropy_gain_slope, positive, turning_point

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SPAN, POINTS = (0.1, 3.0), 291  # of c; steps of a hundredth
WIDTH, HEIGHT = 7.2, 3.5  # inches
ROOM = 0.12  # of the height of the curves, above and below them
Look = dict[str, Any]  # keywords of matplotlib's plot
CORRECT: Look = {"color": diagram.BLUE, "linewidth": 2.2, "linestyle": "-"}
PRINTED: Look = {"color": diagram.VERMILLION, "linewidth": 1.6, "linestyle": (0, (5, 2))}
OF_PRINTED: Look = {"color": diagram.PURPLE, "linewidth": 1.8, "linestyle": (0, (1, 1.2))}


@final
@dataclass(frozen=True, slots=True, eq=False)
class PrintedAgainstCorrect:
    """Delta-H and its derivative in s at one threshold, as printed and as they are.

    Attributes:
        c: the threshold.
        turning_point: s*(c), beyond which the correct Delta-H falls.
        sigmas: (n,) the deviations s, increasing.
        gain: (n,) the correct Delta-H.
        printed_gain: (n,) Delta-H of Eq. (9).
        slope: (n,) the derivative of `gain`.
        slope_of_printed: (n,) the derivative of `printed_gain`.
        plotted_slope: (n,) the derivative the paper plots, Eq. (12).
        axes: of Delta-H and of the derivatives, once drawn.
    """

    c: float
    turning_point: float
    sigmas: Tensor
    gain: Tensor
    printed_gain: Tensor
    slope: Tensor
    slope_of_printed: Tensor
    plotted_slope: Tensor
    axes: tuple[Axes, Axes] | None = field(default=None, repr=False, kw_only=True)

    @classmethod
    def of(
        cls, *, c: float = 1.0, sigmas: Tensor | Sequence[float] | None = None
    ) -> PrintedAgainstCorrect:
        """The numbers at a threshold c, for deviations from c/10 to 3c unless others are given.

        >>> shown = PrintedAgainstCorrect.of(c=1.0, sigmas=[1.0])
        >>> [round(float(x), 3) for x in (shown.plotted_slope, shown.slope_of_printed, shown.slope)]
        [1.25, 0.272, -0.298]
        """
        threshold = positive("PrintedAgainstCorrect", "c", c)
        if sigmas is None:
            at = c * torch.linspace(*SPAN, POINTS, dtype=torch.float64)
        else:
            given = torch.as_tensor(sigmas, dtype=torch.float64).flatten()
            at = positive("PrintedAgainstCorrect", "sigmas", given).sort().values
        if at.numel() == 0:
            raise InputError("PrintedAgainstCorrect: sigmas is empty: give at least one deviation")
        return cls(
            c=float(threshold),
            turning_point=turning_point(float(threshold)),
            sigmas=at,
            gain=entropy_gain(threshold, at),
            printed_gain=printed.entropy_gain(threshold, at),
            slope=entropy_gain_slope(threshold, at),
            slope_of_printed=printed.entropy_gain_slope(threshold, at),
            plotted_slope=printed.plotted_slope(threshold, at),
        )

    def as_json(self) -> dict[str, Any]:
        """Everything that is drawn, as JSON can hold it."""
        return {
            "c": self.c,
            "turning_point": self.turning_point,
            "sigmas": self.sigmas.tolist(),
            "gain": {"correct": self.gain.tolist(), "printed": self.printed_gain.tolist()},
            "slope": {
                "correct": self.slope.tolist(),
                "of_printed": self.slope_of_printed.tolist(),
                "plotted": self.plotted_slope.tolist(),
            },
        }

    def plot(self, ax: Sequence[Axes] | None = None) -> PrintedAgainstCorrect:
        """Draws both panels and returns the numbers, now holding their axes.

        Args:
            ax: a pair of axes, for Delta-H and for the derivatives; None makes a figure of its
                own, which pyplot does not know: `plot().axes[0].figure`.
        """
        diagram.require_matplotlib()
        from matplotlib.figure import Figure

        count = 2 if ax is None else len(ax) if hasattr(ax, "__len__") else 1
        if count != 2:
            raise InputError(
                f"PrintedAgainstCorrect: ax has {count} axes: give a pair, for Delta-H and for "
                "the derivatives"
            )
        of_gain = [
            ("correct", self.gain, CORRECT),
            ("as printed, Eq. (9)", self.printed_gain, PRINTED),
        ]
        of_slope = [
            ("correct", self.slope, CORRECT),
            ("of Eq. (9), taken correctly", self.slope_of_printed, OF_PRINTED),
            ("as plotted, Eq. (12)", self.plotted_slope, PRINTED),
        ]
        with diagram.own_style() if ax is None else nullcontext():
            figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
            gains, slopes = figure.subplots(1, 2) if ax is None else ax
            self._panel(gains, "entropy gain ΔH", of_gain)
            self._panel(slopes, "derivative of ΔH in s", of_slope)
        return replace(self, axes=(gains, slopes))

    def _panel(self, ax: Axes, what: str, curves: list[tuple[str, Tensor, Look]]) -> None:
        ink, turn = ax.xaxis.label.get_color(), self.turning_point
        ax.axhline(0, color=ink, linewidth=diagram.EDGE, zorder=1)
        ax.axvline(turn, color=ink, linewidth=1, linestyle=":", zorder=1)
        for label, values, look in curves:
            ax.plot(self.sigmas.tolist(), values.tolist(), label=label, **look)
        # Room for 0 and for every curve from s*/2 on; the printed ones run to infinity below.
        seen = torch.stack([values for _, values, _ in curves])
        far = self.sigmas >= 0.5 * turn
        seen = seen[:, far] if bool(far.any()) else seen
        low, high = min(0.0, seen.min().item()), max(0.0, seen.max().item())
        room = ROOM * (high - low)
        ax.set(xlim=(0, self.sigmas[-1].item()), ylim=(low - room, high + room))
        ax.annotate(
            f"s* = {turn:.3g}",
            *((turn, 0), (3, 3), ("data", "axes fraction"), "offset points"),
            size=diagram.TEXT,
            color=ink,
            annotation_clip=True,
        )
        ax.set_title(f"{what}, c = {self.c:g}", loc="left", size=diagram.TEXT + 1, weight="bold")
        ax.set_xlabel("standard deviation s before the ReLU", size=diagram.TEXT)
        ax.legend(loc="best", fontsize=diagram.TEXT, frameon=False, labelcolor=ink, handlelength=3)
