"""How the printed and the correct curves are drawn: hues, dashes and words that tell them apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from featcal.report import drawing as house

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from featcal.theory.figure import PrintedAgainstCorrect

WIDTH, HEIGHT = 7.2, 3.5  # inches
ROOM = 0.12  # of the height of the curves, above and below them
Look = dict[str, Any]  # keywords of matplotlib's plot
CORRECT: Look = {"color": house.BLUE, "linewidth": 2.2, "linestyle": "-"}
PRINTED: Look = {"color": house.VERMILLION, "linewidth": 1.6, "linestyle": (0, (5, 2))}
OF_PRINTED: Look = {"color": house.PURPLE, "linewidth": 1.8, "linestyle": (0, (1, 1.2))}
Curves = list[tuple[str, Tensor, Look]]


def two_panels(shown: PrintedAgainstCorrect) -> tuple[Axes, Axes]:
    """A figure that pyplot does not know, in our own style."""
    house.require_matplotlib()
    from matplotlib.figure import Figure

    with house.own_style():
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
    ax.axhline(0, color=ink, linewidth=house.EDGE, zorder=1)
    ax.axvline(shown.turning_point, color=ink, linewidth=1, linestyle=":", zorder=1)
    for label, values, look in curves:
        ax.plot(shown.sigmas.tolist(), values.tolist(), label=label, **look)
    ax.set(xlim=(0, shown.sigmas[-1].item()), ylim=_limits(shown, curves))
    _mark_turn(ax, shown, ink)
    ax.set_title(f"{what}, c = {shown.c:g}", loc="left", size=house.TEXT + 1, weight="bold")
    ax.set_xlabel("standard deviation s before the ReLU", size=house.TEXT)
    ax.legend(loc="best", fontsize=house.TEXT, frameon=False, labelcolor=ink, handlelength=3)


def _mark_turn(ax: Axes, shown: PrintedAgainstCorrect, ink: Any) -> None:  # noqa: ANN401 - a colour
    ax.annotate(
        f"s* = {shown.turning_point:.3g}",
        (shown.turning_point, 0),
        (3, 3),
        ("data", "axes fraction"),
        "offset points",
        size=house.TEXT,
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
