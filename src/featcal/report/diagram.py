"""Reliability diagrams: the numbers first, the picture of exactly those numbers second.

Niculescu-Mizil and Caruana, "Predicting Good Probabilities With Supervised Learning", 2005.
matplotlib is imported inside the functions alone, so that featcal works without it.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
from torch import Tensor

from featcal.core.checks import InputError
from featcal.core.files import new_file
from featcal.metrics.bins import Bins, ClassBins
from featcal.metrics.inputs import Values, checked_rows

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.typing import ColorType

    Pair = tuple[Axes, Axes]
    Panels = Axes | Sequence[Axes]

MAX_PANELS = 6
DPI = 150
# Without these fields a file depends on its numbers alone, not on the day or the version.
METADATA: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "svg": {"Creator": None, "Date": None},
}


@final
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ReliabilityDiagram:
    """Accuracy against confidence, bin by bin; per-bin numbers are (m,), NaN where a bin is empty.

    With `of_class` it is the curve people know of binary models: the probability of that class is
    the confidence, and the share of its rows the accuracy.

    Attributes:
        bins: the summary that is drawn.
        title: what the predictions are, such as "before".
        of_class: the class the bins are of, or None for the predicted one of each row.
        axes: the diagram and its histogram (or None), once drawn.
    """

    bins: Bins
    title: str = ""
    of_class: int | None = field(default=None, kw_only=True)
    axes: tuple[Axes, Axes | None] | None = field(default=None, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        checked_rows(self.bins.n)

    def __repr__(self) -> str:
        of = "" if self.of_class is None else f" of class {self.of_class}"
        told = f"{self.bins.n:,} rows{of}, ECE {self.bins.ece:.2%}"
        return f"ReliabilityDiagram({', '.join(filter(None, [self.title, told]))})"

    @classmethod
    def of(
        cls,
        probs: Values | None = None,
        labels: Values | None = None,
        *,
        logits: Values | None = None,
        bins: int = 15,
        title: str = "",
        of_class: int | None = None,
    ) -> ReliabilityDiagram:
        """The diagram of n predictions, given as probabilities or as logits.

        Args:
            probs: (n, k), or (n,) of class 1 of a binary model.
            labels: (n,) the class of every row.
            logits: in place of `probs`.
            bins: how many bins of equal width.
            title: what the predictions are.
            of_class: the class whose probability to hold against its share of the rows; None for
                the confidence of the prediction against its accuracy.

        >>> import torch
        >>> print(ReliabilityDiagram.of(torch.tensor([[0.75, 0.25]]), torch.tensor([0])).caption)
        ECE 25.0 %
        accuracy 100.0 %  confidence 75.0 %
        """
        if of_class is None:
            return cls(Bins.of(probs, labels, logits=logits, bins=bins), title)
        classes = ClassBins.of(probs, labels, logits=logits, bins=bins)
        return cls(classes.of_class(of_class), title, of_class=of_class)

    @property
    def wording(self) -> Wording:
        """What the numbers are called in the picture."""
        if self.of_class is None:
            names = ("confidence", "accuracy")
            return Wording(*names, *names, "ECE", "overconfident", "underconfident")
        of = f"class {self.of_class}"
        names, axes = ("probability", "share"), (f"probability of {of}", f"share of {of}")
        return Wording(*names, *axes, f"{of}: ECE", "too high", "too low")

    @property
    def edges(self) -> Tensor:
        """The m + 1 edges of the bins."""
        return self.bins.edges

    @property
    def accuracy(self) -> Tensor:
        """The share of right rows in each bin; with `of_class`, of rows of that class."""
        return self.bins.accuracy

    @property
    def mean_confidence(self) -> Tensor:
        """The mean confidence in each bin."""
        return self.bins.mean_confidence

    @property
    def gap(self) -> Tensor:
        """Mean confidence minus accuracy in each bin, positive where overconfident."""
        return self.bins.gap

    @property
    def share(self) -> Tensor:
        """The share of all rows in each bin, 0 where it is empty."""
        return self.bins.count / self.bins.n

    @property
    def ece(self) -> float:
        """Expected calibration error."""
        return self.bins.ece

    @property
    def overall_accuracy(self) -> float:
        """The accuracy over all rows."""
        return float(self.bins.correct.sum()) / self.bins.n

    @property
    def overall_confidence(self) -> float:
        """The mean confidence over all rows."""
        return float(self.bins.confidence.sum()) / self.bins.n

    @property
    def caption(self) -> str:
        """The numbers over the whole, as they stand above the picture."""
        words = self.wording
        return (
            f"{words.error} {self.ece:.1%}\n"
            f"{words.so} {self.overall_accuracy:.1%}  {words.said} {self.overall_confidence:.1%}"
        ).replace("%", " %")

    def plot(self, ax: Panels | None = None) -> ReliabilityDiagram:
        """Draws the diagram and returns it, now holding its axes: `plot().axes[0].figure`.

        Args:
            ax: axes for the diagram, or a pair of axes for the diagram and the histogram of the
                confidence below it; None makes a figure of pyplot, which `plt.show()` shows.
        """
        require_matplotlib()
        if ax is None:
            with own_style():
                return replace(self, axes=figure([self], shown=True)[1][0])
        given = all_axes(ax)
        if len(given) not in (1, 2):
            raise InputError(
                f"ax has {len(given)} axes: pass one, or two for diagram and histogram"
            )
        diagram, histogram = given[0], given[1] if len(given) == 2 else None
        draw_diagram(diagram, self)
        handles = legend_handles([self])
        brief = [str(handle.get_label()).partition(":")[0] for handle in handles]
        diagram.legend(handles, brief, loc="best", fontsize=TEXT)
        if histogram is None or not diagram.get_shared_x_axes().joined(diagram, histogram):
            diagram.set_xlabel(self.wording.x)
        if histogram is not None:
            draw_histogram(histogram, self, tallest=float(self.share.max()))
        return replace(self, axes=(diagram, histogram))

    def save(self, path: Path | str, *, overwrite: bool = False) -> Path:
        """Writes the picture to a .png or .svg file and returns its path."""
        path = Path(path)
        form = path.suffix.lower().removeprefix(".")
        if form not in METADATA:
            raise InputError(f"path {path} is of no known format: end it in .png or .svg")
        stem = path.with_suffix("")
        return save_comparison([self], stem, formats=[form], overwrite=overwrite)[0]

    def _repr_png_(self) -> bytes | None:
        """The picture a notebook shows, unless pyplot shows it already."""
        return notebook_png(self, lambda: figure([self])[0])


def all_axes(ax: Panels | None) -> list[Axes]:
    """The axes a caller gave as one, as a list or as the array `subplots` returns."""
    from matplotlib.axes import Axes

    assert ax is not None
    return [ax] if isinstance(ax, Axes) else list(np.ravel(np.asarray(ax, dtype=object)))


def notebook_png(picture: Any, drawn: Callable[[], Figure]) -> bytes | None:  # noqa: ANN401
    """The picture a notebook shows; None without matplotlib, and where pyplot shows it already.

    Args:
        picture: has `axes` once it was drawn.
        drawn: draws it on a figure that pyplot does not know.
    """
    if picture.axes is not None and all_axes(picture.axes)[0].figure.canvas.manager is not None:
        return None
    try:
        require_matplotlib()
    except InputError:
        return None
    file = io.BytesIO()
    with own_style():
        drawn().savefig(file, format="png", dpi=DPI)
    return file.getvalue()


def save_comparison(
    diagrams: Sequence[ReliabilityDiagram],
    path_stem: Path | str,
    *,
    formats: Sequence[str] = ("png", "svg"),
    overwrite: bool = False,
) -> list[Path]:
    """Writes a picture of 1 to 6 diagrams side by side, `<path_stem>.<format>` for each format.

    The same numbers give the same bytes. Either every file appears or none.

    Raises:
        InputError: for a number of diagrams or a format that cannot be drawn, a path that exists
            or cannot be written, or when matplotlib is missing.
    """
    require_matplotlib()
    if not 1 <= len(diagrams) <= MAX_PANELS:
        raise InputError(f"diagrams has {len(diagrams)} entries: pass 1 to {MAX_PANELS}")
    if len({diagram.of_class for diagram in diagrams}) > 1:
        raise InputError("diagrams are of different classes: give all of them the same of_class=")
    if isinstance(formats, str) or not formats or not set(formats) <= set(METADATA):
        raise InputError(f"formats is {formats!r}: pass a list of one or more of 'png' and 'svg'")
    paths = {form: Path(f"{path_stem}.{form}") for form in formats}
    with ExitStack() as files, own_style():
        # The files are renamed when the stack unwinds, after the last of them has been drawn.
        drafts = {
            form: files.enter_context(new_file(path, overwrite=overwrite))
            for form, path in paths.items()
        }
        drawn, _ = figure(diagrams)
        for form, draft in drafts.items():
            drawn.savefig(draft, format=form, dpi=DPI, metadata=METADATA[form])
    return list(paths.values())


class Wording(NamedTuple):
    """The names of what a model says and of what is so.

    Attributes:
        said: what the model says of a row, short.
        so: what turns out to be so, short.
        x: the same as the name of an axis.
        y: the same as the name of an axis.
        error: the mean gap between the two.
        above: a bin in which the model says too much.
        below: a bin in which it says too little.
    """

    said: str
    so: str
    x: str
    y: str
    error: str
    above: str
    below: str


# How it looks. Okabe and Ito's hues, apart for every kind of colour vision; hatching tells them
# apart in grey.
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
# Inches. Fixed places, not a layout engine: the two axes of a panel line up to the pixel.
SIDE, HISTOGRAM, BETWEEN, APART = 2.5, 0.85, 0.12, 0.32
LEFT, RIGHT, HEAD, FOOT, LINE = 0.78, 0.2, 0.5, 0.48, 0.18
MAX_IN_ROW = 4


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


def figure(
    diagrams: Sequence[ReliabilityDiagram], *, shown: bool = False
) -> tuple[Figure, list[Pair]]:
    """A figure with a panel for each diagram and one legend; pyplot knows it where it is shown."""
    from matplotlib.figure import Figure

    handles = legend_handles(diagrams)
    panels = len(diagrams)
    columns = panels if panels <= MAX_IN_ROW else -(-panels // 2)
    rows = -(-panels // columns)
    in_line = len(handles) if columns >= MAX_IN_ROW else min(len(handles), columns)
    bottom = 0.1 + LINE * -(-len(handles) // in_line)  # the height of the legend
    title_lines = max(len(_wrapped(diagram.title)) for diagram in diagrams)
    row_height = FOOT + HISTOGRAM + BETWEEN + SIDE + HEAD + LINE * title_lines
    width = LEFT + columns * (SIDE + APART) - APART + RIGHT
    height = bottom + rows * row_height
    made: Callable[..., Figure] = Figure
    if shown:
        from matplotlib import pyplot

        made = pyplot.figure
    figure = made(figsize=(width, height))
    figure.legend(handles=handles, loc="lower center", ncols=in_line, frameon=False)
    tallest = max(float(diagram.share.max()) for diagram in diagrams)
    pairs: list[Pair] = []
    for panel, diagram in enumerate(diagrams):
        row, column = divmod(panel, columns)
        x = LEFT + column * (SIDE + APART)
        y = bottom + (rows - 1 - row) * row_height + FOOT
        above = y + HISTOGRAM + BETWEEN
        first = pairs[0] if pairs else (None, None)
        upper = (x / width, above / height, SIDE / width, SIDE / height)
        top = figure.add_axes(upper, sharex=first[0], sharey=first[0])
        lower = (x / width, y / height, SIDE / width, HISTOGRAM / height)
        low = figure.add_axes(lower, sharex=top, sharey=first[1])
        draw_diagram(top, diagram)
        draw_histogram(low, diagram, tallest=tallest)
        top.tick_params(labelbottom=False)
        for axes in (top, low):
            axes.yaxis.set_label_coords(*YLABEL)
            axes.yaxis.label.set_visible(column == 0)
            axes.tick_params(labelleft=column == 0)
        pairs.append((top, low))
    return figure, pairs


def draw_diagram(ax: Axes, diagram: ReliabilityDiagram) -> None:
    """Draws the bars, the gaps, the diagonal and the numbers above them."""
    ground = ax.get_facecolor()
    filled = (diagram.share > 0).nonzero().flatten()
    hues = [_mixed(BLUE, strength, ground) for strength in _strengths(diagram, filled)]
    _bars(ax, diagram, filled, diagram.accuracy, color=hues, edgecolor=ground)
    for where, (hue, hatch) in ((diagram.gap > 0, OVER), (diagram.gap < 0, UNDER)):
        chosen = where.nonzero().flatten()
        strengths = _strengths(diagram, chosen)
        _bars(  # from accuracy to mean confidence
            ax,
            diagram,
            chosen,
            diagram.gap,
            bottom=diagram.accuracy[chosen].tolist(),
            color=[_mixed(hue, TINT * strength, ground) for strength in strengths],
            edgecolor=[_mixed(hue, strength, ground) for strength in strengths],
            hatch=hatch,
        )
    ax.plot([0, 1], [0, 1], color=ground, linewidth=2, solid_capstyle="butt")
    ax.plot([0, 1], [0, 1], color=_ink(), linewidth=1.1, linestyle=DASHES)
    ax.set(xlim=(0, 1), ylim=(0, 1), xticks=TICKS, yticks=TICKS, aspect="equal")
    ax.set_ylabel(diagram.wording.y)
    ax.annotate(
        diagram.caption, (0, 1), (0, 5), "axes fraction", "offset points", size=TEXT, va="bottom"
    )
    title = "\n".join(_wrapped(diagram.title))
    ax.set_title(title, loc="left", size=TEXT + 2, weight="bold", pad=31, parse_math=False)


def draw_histogram(ax: Axes, diagram: ReliabilityDiagram, *, tallest: float) -> None:
    """Draws the share of samples in each bin, to the scale of the tallest bar of all panels."""
    from matplotlib.ticker import MaxNLocator

    filled = (diagram.share > 0).nonzero().flatten()
    _bars(ax, diagram, filled, diagram.share, color=GREY, edgecolor=ax.get_facecolor())
    ax.set(xlim=(0, 1), xticks=TICKS, xlabel=diagram.wording.x, ylabel="share of\nsamples")
    ax.set_ylim(0, tallest * HEADROOM)
    ticks = MaxNLocator(3, steps=[1, 2, 5, 10]).tick_values(0, tallest)
    ax.set_yticks([tick for tick in ticks if tick <= tallest])
    # Both means have a line with a label, on two rows above the bars, so that the labels never
    # meet. They stand on the side that has room for both, and the nearer line ends below the label
    # that passes over it.
    accuracy, confidence = diagram.overall_accuracy, diagram.overall_confidence
    leftwards = accuracy + confidence > 1
    heights = (1.0, 0.8) if (accuracy > confidence) == leftwards else (0.8, 1.0)
    for name, x, color, line, height in (
        (diagram.wording.so, accuracy, BLUE, "-", heights[0]),
        (diagram.wording.said, confidence, _ink(), DASHES, heights[1]),
    ):
        ax.axvline(x, 0, height, color=color, linewidth=1.4, linestyle=line)
        left = x > (LABEL_ROOM if leftwards else 1 - LABEL_ROOM)
        ax.annotate(
            f"{name} {x:.2f}",
            (x, height),
            (-3 if left else 3, -1.5),
            ("data", "axes fraction"),
            "offset points",
            color=color,
            size=TEXT,
            ha="right" if left else "left",
            va="top",
            # Between two far lines a label may reach the other one: it then covers a piece of it.
            bbox={"facecolor": ax.get_facecolor(), "edgecolor": "none", "pad": 0.5},
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


def legend_handles(diagrams: Sequence[ReliabilityDiagram]) -> list[Artist]:
    """What the marks mean; the last entry only where there are such bins."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    words = diagrams[0].wording
    gaps = (
        (OVER, f"{words.above}: from {words.so} up to {words.said}"),
        (UNDER, f"{words.below}: from {words.said} up to {words.so}"),
    )
    handles: list[Artist] = [Patch(color=BLUE, label=words.y)]
    for (hue, hatch), label in gaps:
        ground = _mixed(hue, TINT, "white")
        handles.append(
            Patch(facecolor=ground, edgecolor=hue, hatch=hatch, linewidth=EDGE, label=label)
        )
    handles.append(
        Line2D([], [], color=_ink(), linewidth=1.1, linestyle=DASHES, label="perfect calibration")
    )
    counts = [count for diagram in diagrams for count in diagram.bins.count.tolist()]
    if any(0 < count < ENOUGH_ROWS for count in counts):
        faint = _mixed(BLUE, 2 * FAINTEST, "white")
        handles.append(Patch(color=faint, label=f"few samples: under {ENOUGH_ROWS} in the bin"))
    return handles


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
