"""How a reliability diagram looks: its marks, its histogram, the panels of a figure.

matplotlib is imported inside the functions alone, so that featcal works without it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from featcal.core.errors import InputError
from featcal.report.panels import Grid

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.typing import ColorType

    from featcal.report.diagram import ReliabilityDiagram

    Pair = tuple[Axes, Axes]

# Okabe and Ito's hues, apart for every kind of colour vision; hatching tells them apart in grey.
BLUE, VERMILLION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#A0A0A0"
OVER, UNDER = (VERMILLION, "/////"), (PURPLE, "....")
TINT = 0.3  # a gap is a light ground under hatching in the full hue
ENOUGH_ROWS = 100  # the standard error of an accuracy is then at most 5 points
FAINTEST = 0.25
TEXT = 8  # points; nothing is smaller
EDGE = 0.6  # points
DASHES = (0, (4, 2))
TICKS = (0, 0.2, 0.4, 0.6, 0.8, 1)
STYLE: dict[str, Any] = {
    "font.size": TEXT,
    "axes.linewidth": EDGE,
    "hatch.linewidth": 0.8,
    "svg.hashsalt": "featcal",  # element names are random without it
}

YLABEL = (-0.18, 0.5)  # of the axes: beyond tick labels of three decimals
TITLE_CHARACTERS, TITLE_LINES = 27, 2
HEADROOM = 1.6  # of the tallest bar of the histogram, for two rows of labels
LABEL_ROOM = 0.42  # of the width of the axes, for the longer of the labels


def require_matplotlib() -> None:
    """Refuses to draw where matplotlib is missing, with the way to get it."""
    try:
        import matplotlib  # noqa: F401 - only to see whether it is there
    except ImportError as error:
        raise InputError(
            "pictures need matplotlib, which is not installed: pip install 'featcal[report]'"
        ) from error


@contextmanager
def own_style() -> Iterator[None]:
    """Our own look, whatever the user's matplotlibrc says; afterwards all is as it was."""
    from matplotlib import style

    with style.context(["default", STYLE]):
        yield


def figure(diagrams: Sequence[ReliabilityDiagram]) -> tuple[Figure, list[Pair]]:
    """A figure that pyplot does not know, with a panel for each diagram and one legend."""
    from matplotlib.figure import Figure

    handles = legend_handles(diagrams)
    title_lines = max(len(_wrapped(diagram.title)) for diagram in diagrams)
    grid = Grid(len(diagrams), title_lines, len(handles))
    figure = Figure(figsize=grid.size)
    figure.legend(handles=handles, loc="lower center", ncols=grid.legend_columns, frameon=False)
    tallest = max(float(diagram.share.max()) for diagram in diagrams)
    pairs: list[Pair] = []
    for panel, diagram in enumerate(diagrams):
        above, below = grid.boxes(panel)
        first = pairs[0] if pairs else (None, None)
        top = figure.add_axes(above, sharex=first[0], sharey=first[0])
        low = figure.add_axes(below, sharex=top, sharey=first[1])
        draw_diagram(top, diagram)
        draw_histogram(low, diagram, tallest=tallest)
        _tidy_labels((top, low), leftmost=panel % grid.columns == 0)
        pairs.append((top, low))
    return figure, pairs


def _tidy_labels(pair: Pair, *, leftmost: bool) -> None:
    pair[0].tick_params(labelbottom=False)
    for axes in pair:
        axes.yaxis.set_label_coords(*YLABEL)
        axes.yaxis.label.set_visible(leftmost)
        axes.tick_params(labelleft=leftmost)


def draw_diagram(ax: Axes, diagram: ReliabilityDiagram) -> None:
    """Draws the bars, the gaps, the diagonal and the numbers above them."""
    _draw_bars(ax, diagram)
    _draw_gaps(ax, diagram, diagram.gap > 0, OVER)
    _draw_gaps(ax, diagram, diagram.gap < 0, UNDER)
    ax.plot([0, 1], [0, 1], color=ax.get_facecolor(), linewidth=2, solid_capstyle="butt")
    ax.plot([0, 1], [0, 1], color=_ink(), linewidth=1.1, linestyle=DASHES)
    ax.set(xlim=(0, 1), ylim=(0, 1), xticks=TICKS, yticks=TICKS, aspect="equal")
    ax.set_ylabel(diagram.wording.y)
    ax.annotate(
        diagram.caption, (0, 1), (0, 5), "axes fraction", "offset points", size=TEXT, va="bottom"
    )
    title = "\n".join(_wrapped(diagram.title))
    ax.set_title(title, loc="left", size=TEXT + 2, weight="bold", pad=31, parse_math=False)


def _draw_bars(ax: Axes, diagram: ReliabilityDiagram) -> None:
    filled = (diagram.share > 0).nonzero().flatten()
    ground = ax.get_facecolor()
    hues = [_mixed(BLUE, strength, ground) for strength in _strengths(diagram, filled)]
    _bars(ax, diagram, filled, diagram.accuracy, color=hues, edgecolor=ground)


def _draw_gaps(ax: Axes, diagram: ReliabilityDiagram, where: Tensor, look: tuple[str, str]) -> None:
    """From accuracy to mean confidence in some bins."""
    chosen = where.nonzero().flatten()
    hue, hatch = look
    strengths, ground = _strengths(diagram, chosen), ax.get_facecolor()
    _bars(
        ax,
        diagram,
        chosen,
        diagram.gap,
        bottom=diagram.accuracy[chosen].tolist(),
        color=[_mixed(hue, TINT * strength, ground) for strength in strengths],
        edgecolor=[_mixed(hue, strength, ground) for strength in strengths],
        hatch=hatch,
    )


def _bars(
    ax: Axes,
    diagram: ReliabilityDiagram,
    chosen: Tensor,
    heights: Tensor,
    **look: Any,  # noqa: ANN401 - keywords of matplotlib's bar
) -> None:
    """One bar, as wide as the bin, for each chosen bin."""
    bins = len(diagram.share)
    x, height = diagram.edges[chosen].tolist(), heights[chosen].tolist()
    # The edges of narrow bars would cover them if they were not thinner.
    ax.bar(x, height, 1 / bins, align="edge", linewidth=min(EDGE, 15 / bins), **look)


def draw_histogram(ax: Axes, diagram: ReliabilityDiagram, *, tallest: float) -> None:
    """Draws the share of samples in each bin, to the scale of the tallest bar of all panels."""
    from matplotlib.ticker import MaxNLocator

    filled = (diagram.share > 0).nonzero().flatten()
    _bars(ax, diagram, filled, diagram.share, color=GREY, edgecolor=ax.get_facecolor())
    ax.set(xlim=(0, 1), xticks=TICKS, xlabel=diagram.wording.x, ylabel="share of\nsamples")
    ax.set_ylim(0, tallest * HEADROOM)
    ticks = MaxNLocator(3, steps=[1, 2, 5, 10]).tick_values(0, tallest)
    ax.set_yticks([tick for tick in ticks if tick <= tallest])
    _draw_means(ax, diagram)


def _draw_means(ax: Axes, diagram: ReliabilityDiagram) -> None:
    """Two lines with a label each, on two rows above the bars, so that the labels never meet.

    The labels stand on the side that has room for both, and the nearer line ends below the label
    that passes over it.
    """
    accuracy, confidence = diagram.overall_accuracy, diagram.overall_confidence
    leftwards = accuracy + confidence > 1
    accuracy_above = (accuracy > confidence) == leftwards
    heights = (1.0, 0.8) if accuracy_above else (0.8, 1.0)
    for name, x, color, line, height in (
        (diagram.wording.so, accuracy, BLUE, "-", heights[0]),
        (diagram.wording.said, confidence, _ink(), DASHES, heights[1]),
    ):
        ax.axvline(x, 0, height, color=color, linewidth=1.4, linestyle=line)
        _label_line(ax, x, height, f"{name} {x:.2f}", color=color, leftwards=leftwards)


def _label_line(
    ax: Axes, x: float, height: float, text: str, *, color: str, leftwards: bool
) -> None:
    leftwards = x > LABEL_ROOM if leftwards else x > 1 - LABEL_ROOM
    ax.annotate(
        text,
        (x, height),
        (-3 if leftwards else 3, -1.5),
        ("data", "axes fraction"),
        "offset points",
        color=color,
        size=TEXT,
        ha="right" if leftwards else "left",
        va="top",
        # Between two far lines a label may reach the other one: it then covers a piece of it.
        bbox={"facecolor": ax.get_facecolor(), "edgecolor": "none", "pad": 0.5},
    )


def legend_handles(diagrams: Sequence[ReliabilityDiagram]) -> list[Artist]:
    """What the marks mean; the last entry only where there are such bins."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    words = diagrams[0].wording
    handles: list[Artist] = [
        Patch(color=BLUE, label=words.y),
        _gap_patch(OVER, f"{words.above}: from {words.so} up to {words.said}"),
        _gap_patch(UNDER, f"{words.below}: from {words.said} up to {words.so}"),
        Line2D([], [], color=_ink(), linewidth=1.1, linestyle=DASHES, label="perfect calibration"),
    ]
    counts = [count for diagram in diagrams for count in diagram.bins.count.tolist()]
    if any(0 < count < ENOUGH_ROWS for count in counts):
        faint = _mixed(BLUE, 2 * FAINTEST, "white")
        handles.append(Patch(color=faint, label=f"few samples: under {ENOUGH_ROWS} in the bin"))
    return handles


def _gap_patch(look: tuple[str, str], label: str) -> Patch:
    from matplotlib.patches import Patch

    hue, hatch = look
    ground = _mixed(hue, TINT, "white")
    return Patch(facecolor=ground, edgecolor=hue, hatch=hatch, linewidth=EDGE, label=label)


def _strengths(diagram: ReliabilityDiagram, chosen: Tensor) -> list[float]:
    """How strongly to draw some bins: as sure as their accuracy is, so that noise is not loud."""
    return (diagram.bins.count[chosen] / ENOUGH_ROWS).sqrt().clamp(FAINTEST, 1).tolist()


def _ink() -> str:
    """The colour of text, so that lines show on a dark style too."""
    from matplotlib import rcParams

    return str(rcParams["axes.labelcolor"])


def _mixed(hue: str, strength: float, ground: ColorType) -> tuple[float, float, float]:
    """A hue thinned with its ground: opaque, so that marks below do not shine through."""
    from matplotlib.colors import to_rgb

    pairs = zip(to_rgb(hue), to_rgb(ground), strict=True)
    red, green, blue = (strength * full + (1 - strength) * thin for full, thin in pairs)
    return red, green, blue


def _wrapped(title: str) -> list[str]:
    return textwrap.wrap(title, TITLE_CHARACTERS, max_lines=TITLE_LINES, placeholder=" …")
