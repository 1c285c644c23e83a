"""A picture of how networks learned: loss, accuracy, NLL and ECE, epoch by epoch.

matplotlib is imported inside the functions alone, so that training works without it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from featcal.core.disk import new_file
from featcal.core.errors import InputError
from featcal.report.diagram import DPI, METADATA
from featcal.report.drawing import BLUE, PURPLE, TEXT, VERMILLION, own_style, require_matplotlib
from featcal.train.epoch import Epoch, looks
from featcal.train.watch import Watched

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's hues, apart for every kind of colour vision; then the same with dashes.
HUES = (BLUE, VERMILLION, "#009E73", PURPLE, "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", ":")
MAX_RUNS = len(HUES) * len(DASHES)
FEW = 30  # epochs of which each is marked
IN_LEGEND, CHARACTERS = 3, 80  # entries and characters in a line
SIZE, LINE = (7.2, 5.0), 0.2  # inches: of the panels, and of a line of the legend
SEEN: dict[str, Callable[[Watched], float]] = {
    "val accuracy, %": lambda seen: 100 * seen.accuracy,
    "val NLL": lambda seen: seen.nll,
    "val ECE, %": lambda seen: 100 * seen.ece,
}


def save_history(
    runs: Mapping[str, Sequence[Epoch]], path: Path | str, *, overwrite: bool = False
) -> Path:
    """Writes a picture of what `train` returned for each run, by the names they have in the legend.

    The training loss is each run's own, and losses of different kinds cannot be compared; the
    scores on val can. The same numbers give the same bytes.

    Args:
        runs: 1 to 21, each with at least one epoch.
        path: ends in .png or .svg.
        overwrite: whether a file may be replaced.

    Raises:
        InputError: for another ending or number of runs, a run without epochs, a path that exists
            or cannot be written, or when matplotlib is missing.
    """
    path = Path(path)
    require_matplotlib()
    check_picture(path)
    _check_runs(runs)
    with new_file(path, overwrite=overwrite) as draft, own_style():
        form = _form(path)
        _drawn(runs).savefig(draft, format=form, dpi=DPI, metadata=METADATA[form])
    return path


def check_picture(path: Path) -> None:
    """Refuses a path whose ending is of no kind of picture that is made here."""
    if _form(path) not in METADATA:
        raise InputError(f"picture {path} ends in neither .png nor .svg: give one of these")


def _form(path: Path) -> str:
    return path.suffix[1:].lower()


def _check_runs(runs: Any) -> None:  # noqa: ANN401 - whatever was passed
    if not isinstance(runs, Mapping):
        kind = type(runs).__name__
        raise InputError(f"runs is a {kind}: pass a dict, such as {{'focal': what train returned}}")
    if not 1 <= len(runs) <= MAX_RUNS:
        raise InputError(f"runs has {len(runs)} entries: pass 1 to {MAX_RUNS}")
    for name, epochs in runs.items():
        given = epochs if isinstance(epochs, Sequence) else [epochs]
        others = [epoch for epoch in given if not isinstance(epoch, Epoch)]
        if others:
            raise InputError(
                f"runs[{name!r}] holds a {type(others[0]).__name__}: pass what train returned, or "
                "the epochs of History.read(folder)"
            )
        if not given:
            raise InputError(f"runs[{name!r}] has no epochs: leave it out")


def _drawn(runs: Mapping[str, Sequence[Epoch]]) -> Figure:
    from matplotlib.figure import Figure

    names = [textwrap.fill(str(name), CHARACTERS) for name in runs]
    longest = max(map(len, names)) + 8  # with its mark
    columns = min(len(runs), max(1, min(IN_LEGEND, CHARACTERS // longest)))
    lines = -(-len(runs) // columns) + sum(name.count("\n") for name in names)
    figure = Figure(figsize=(SIZE[0], SIZE[1] + LINE * lines), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True)
    mark = "o" if max(map(len, runs.values())) <= FEW else ""
    for epochs, (dash, hue) in zip(runs.values(), product(DASHES, HUES), strict=False):
        _draw_run(list(panels.flat), epochs, color=hue, linestyle=dash, marker=mark)
    for ax, title in zip(panels.flat, ("training loss", *SEEN), strict=True):
        _tidy(ax, title)
    for ax in panels[1]:
        ax.set_xlabel("epoch")
        ax.xaxis.get_major_locator().set_params(integer=True)
    panels[1, 1].set_ylim(bottom=0)
    _add_legend(figure, names, columns)
    return figure


def _draw_run(panels: Sequence[Axes], epochs: Sequence[Epoch], **look: Any) -> None:  # noqa: ANN401
    """A line in each panel; those of val have the epochs after which val was looked at."""
    seen = looks(epochs)
    losses = ([epoch.epoch for epoch in epochs], [epoch.loss for epoch in epochs])
    scores = (
        ([number for number, _ in seen], [score(watched) for _, watched in seen])
        for score in SEEN.values()
    )
    for ax, (x, y) in zip(panels, (losses, *scores), strict=True):
        ax.plot(x, y, linewidth=1.2, markersize=2.5, **look)


def _tidy(ax: Axes, title: str) -> None:
    """A panel without a point says so; matplotlib would make up a scale."""
    if not any(np.size(line.get_xdata()) for line in ax.get_lines()):
        ax.text(0.5, 0.5, "not looked at yet", ha="center", transform=ax.transAxes)
        ax.set_yticks([])
    ax.set_title(title, loc="left", size=TEXT + 1, weight="bold")
    ax.grid(visible=True, linewidth=0.4, alpha=0.5)
    ax.spines[["top", "right"]].set_visible(False)


def _add_legend(figure: Figure, names: list[str], columns: int) -> None:
    handles, look = figure.axes[0].get_lines(), {"ncols": columns, "frameon": False}
    legend = figure.legend(handles, names, loc="outside lower center", **look)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a name with dollars in it is no formula
