"""How a sweep of thresholds looks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from featcal.analysis.base import HCE, LCE, first_axes, ink
from featcal.report.drawing import BLUE, DASHES, GREY, TEXT, VERMILLION

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from featcal.analysis.base import Panels
    from featcal.analysis.sweep import ClipSweep


def draw_curves(sweep: ClipSweep, panels: Sequence[Axes]) -> None:
    """ECE, NLL, accuracy and entropy over c, as many of them as there are panels."""
    splits = (("val", GREY, DASHES), ("test", BLUE, "-"))
    columns = (("ECE, %", "ece", 100), ("NLL, nats", "nll", 1), ("accuracy, %", "accuracy", 100))
    for ax, (title, name, scale) in zip(panels, columns, strict=False):
        pair = [getattr(split, name) * scale for split in (sweep.val, sweep.test)]
        _curves(ax, sweep, pair, splits)
        ax.set_ylabel(title)
    _name_marks(panels[0], sweep)
    if len(panels) > len(columns):
        wrong, right = sweep.test.groups
        names = f"HCE of test, {wrong:,} rows", f"LCE of test, {right:,} rows"
        looks = ((names[0], HCE[0], DASHES), (names[1], LCE[0], "-"))
        _curves(panels[3], sweep, list(sweep.test.entropy.T), looks)
        panels[3].set_ylabel("mean entropy, nats")
        panels[3].legend(fontsize=TEXT, frameon=False)
    for ax in panels[2:] if len(panels) > len(columns) else panels:
        ax.set_xlabel("threshold c")
    panels[0].set_title(sweep.recipe, loc="left", size=TEXT + 1, parse_math=False)


def _name_marks(ax: Axes, sweep: ClipSweep) -> None:
    """The legend: both splits, and what the lines and marks are."""
    from matplotlib.lines import Line2D

    color = ink(ax)
    handles, _ = ax.get_legend_handles_labels()
    dotted: Any = {"color": color, "linewidth": 0.9, "linestyle": ":"}
    handles.append(Line2D([], [], label="no clipping", **dotted))
    if math.isfinite(float(sweep.thresholds[sweep.best])):
        mark: Any = {"color": color, "markersize": 5, "linestyle": "none", "marker": "D"}
        handles.append(Line2D([], [], label=f"lowest {sweep.criterion.upper()} on val", **mark))
    ax.legend(handles=handles, fontsize=TEXT, frameon=False)


def draw_trade(sweep: ClipSweep, ax: Panels) -> None:
    """ECE against accuracy on test: down and to the right is better."""
    ax = first_axes(ax)
    accuracy, ece = (100 * sweep.test.accuracy).tolist(), (100 * sweep.test.ece).tolist()
    finite = sweep.thresholds[:-1].log().numpy()
    ax.plot(accuracy[:-1], ece[:-1], color=GREY, linewidth=0.8, zorder=1)
    look: dict[str, Any] = {"cmap": "viridis", "edgecolors": ink(ax), "linewidths": 0.5}
    ax.scatter(accuracy[:-1], ece[:-1], s=24, c=finite, zorder=2, **look)
    marks = (
        ("no clipping", -1, "*", 130),
        (f"best on val, {_c(sweep, sweep.best)}", sweep.best, "D", 42),
    )
    for label, place, mark, area in marks:
        look = {"facecolors": "none", "edgecolors": ink(ax), "linewidths": 1.3}
        point = accuracy[place], ece[place]
        ax.scatter(*point, s=area, marker=mark, label=label, zorder=3, **look)
    for place in _spaced(len(finite)):
        at = (accuracy[place], ece[place])
        ax.annotate(_c(sweep, place), at, (6, -2), textcoords="offset points", size=TEXT)
    ax.set(xlabel="accuracy on test, %", ylabel="ECE on test, %")
    ax.set_title(sweep.recipe, loc="left", size=TEXT + 1, parse_math=False)
    ax.legend(fontsize=TEXT, frameon=False)


def _spaced(count: int) -> list[int]:
    """A few places to name, the lowest first."""
    return sorted({0, count // 8} & set(range(count)))


def _c(sweep: ClipSweep, place: int) -> str:
    c = float(sweep.thresholds[place])
    return "c = ∞" if math.isinf(c) else f"c = {c:.3g}"


def _curves(
    ax: Axes,
    sweep: ClipSweep,
    columns: Sequence[Tensor],
    looks: Sequence[tuple[str, str, object]],
) -> None:
    """Two curves over c, each with its value at no clipping, the best c and the fitted one."""
    c = sweep.thresholds[:-1].tolist()
    for column, (label, hue, line) in zip(columns, looks, strict=True):
        values = column.tolist()
        ax.plot(c, values[:-1], color=hue, linestyle=line, linewidth=1.5, label=label)
        ax.axhline(values[-1], color=hue, linewidth=0.9, linestyle=":")
        if math.isfinite(float(sweep.thresholds[sweep.best])):
            at = (float(sweep.thresholds[sweep.best]), values[sweep.best])
            ax.plot(*at, "D", color=hue, markersize=5, markeredgecolor=ink(ax))
    fitted = float(sweep.thresholds[sweep.fitted])
    if math.isfinite(fitted):
        ax.axvline(
            fitted,
            color=VERMILLION,
            linewidth=1.0,
            linestyle="-.",
            label=f"fitted c = {fitted:.3g}",
        )
    _log_ticks(ax)


def _log_ticks(ax: Axes) -> None:
    """Ticks at 1, 2 and 5 times powers of ten, as plain numbers: a sweep spans a decade or two."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_minor_locator(NullLocator())
