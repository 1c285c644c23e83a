"""The printed entropy gain and its plotted derivative beside the correct ones, numbers first.

matplotlib is imported inside the functions alone, so that the numbers need none of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from featcal.core.checks import InputError
from featcal.report.diagram import (
    BLUE,
    EDGE,
    PURPLE,
    TEXT,
    VERMILLION,
    own_style,
    require_matplotlib,
)
from featcal.theory import printed
from featcal.theory.forms import entropy_gain, entropy_gain_slope, positive, turning_point

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# --- How the printed and the correct curves are drawn: hues, dashes and words that tell them
# apart.

WIDTH, HEIGHT = 7.2, 3.5  # inches
ROOM = 0.12  # of the height of the curves, above and below them
Look = dict[str, Any]  # keywords of matplotlib's plot
CORRECT: Look = {"color": BLUE, "linewidth": 2.2, "linestyle": "-"}
PRINTED: Look = {"color": VERMILLION, "linewidth": 1.6, "linestyle": (0, (5, 2))}
OF_PRINTED: Look = {"color": PURPLE, "linewidth": 1.8, "linestyle": (0, (1, 1.2))}
Curves = list[tuple[str, Tensor, Look]]


def two_panels(shown: PrintedAgainstCorrect) -> tuple[Axes, Axes]:
    """A figure that pyplot does not know, in our own style."""
    require_matplotlib()
    from matplotlib.figure import Figure

    with own_style():
        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        gains, slopes = figure.subplots(1, 2)
        draw(shown, gains, slopes)
    return gains, slopes


def draw(shown: PrintedAgainstCorrect, gains: Axes, slopes: Axes) -> None:
    """Draws Delta-H on one pair of axes and its derivatives on the other."""
    of_gain: Curves = [
        ("correct", shown.gain, CORRECT),
        ("as printed, Eq. (9)", shown.printed_gain, PRINTED),
    ]
    of_slope: Curves = [
        ("correct", shown.slope, CORRECT),
        ("of Eq. (9), taken correctly", shown.slope_of_printed, OF_PRINTED),
        ("as plotted, Eq. (12)", shown.plotted_slope, PRINTED),
    ]
    _panel(gains, shown, "entropy gain ΔH", of_gain)
    _panel(slopes, shown, "derivative of ΔH in s", of_slope)


def _panel(ax: Axes, shown: PrintedAgainstCorrect, what: str, curves: Curves) -> None:
    ink = ax.xaxis.label.get_color()
    ax.axhline(0, color=ink, linewidth=EDGE, zorder=1)
    ax.axvline(shown.turning_point, color=ink, linewidth=1, linestyle=":", zorder=1)
    for label, values, look in curves:
        ax.plot(shown.sigmas.tolist(), values.tolist(), label=label, **look)
    ax.set(xlim=(0, shown.sigmas[-1].item()), ylim=_limits(shown, curves))
    _mark_turn(ax, shown, ink)
    ax.set_title(f"{what}, c = {shown.c:g}", loc="left", size=TEXT + 1, weight="bold")
    ax.set_xlabel("standard deviation s before the ReLU", size=TEXT)
    ax.legend(loc="best", fontsize=TEXT, frameon=False, labelcolor=ink, handlelength=3)


def _mark_turn(ax: Axes, shown: PrintedAgainstCorrect, ink: Any) -> None:  # noqa: ANN401 - a colour
    ax.annotate(
        f"s* = {shown.turning_point:.3g}",
        (shown.turning_point, 0),
        (3, 3),
        ("data", "axes fraction"),
        "offset points",
        size=TEXT,
        color=ink,
        annotation_clip=True,
    )


def _limits(shown: PrintedAgainstCorrect, curves: Curves) -> tuple[float, float]:
    """Room for 0 and for every curve from s*/2 on; the printed ones run to infinity below."""
    values = torch.stack([values for _, values, _ in curves])
    far = shown.sigmas >= 0.5 * shown.turning_point
    seen = values[:, far] if bool(far.any()) else values
    low, high = min(0.0, seen.min().item()), max(0.0, seen.max().item())
    room = ROOM * (high - low)
    return low - room, high + room


SPAN, POINTS = (0.1, 3.0), 291  # of c; steps of a hundredth


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
        if not math.isfinite(c):
            raise InputError(f"PrintedAgainstCorrect: c is {c!r}: give a finite number above 0")
        threshold = positive("PrintedAgainstCorrect", "c", c)
        at = _deviations(c, sigmas)
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
        if ax is None:
            return replace(self, axes=two_panels(self))
        count = len(ax) if hasattr(ax, "__len__") else 1
        if count != 2:
            raise InputError(
                f"PrintedAgainstCorrect: ax has {count} axes: give a pair, for Delta-H and for the "
                "derivatives"
            )
        draw(self, ax[0], ax[1])
        return replace(self, axes=(ax[0], ax[1]))


def _deviations(c: float, sigmas: Tensor | Sequence[float] | None) -> Tensor:
    """The deviations in increasing order."""
    if sigmas is None:
        return c * torch.linspace(*SPAN, POINTS, dtype=torch.float64)
    given = torch.as_tensor(sigmas, dtype=torch.float64).flatten()
    if given.numel() == 0:
        raise InputError("PrintedAgainstCorrect: sigmas is empty: give at least one deviation")
    return positive("PrintedAgainstCorrect", "sigmas", given).sort().values
