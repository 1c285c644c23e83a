"""A picture of how networks learned: loss, accuracy, NLL and ECE, epoch by epoch.

matplotlib is imported inside the functions alone, so that training works without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, product
from pathlib import Path
from typing import TYPE_CHECKING

from featcal.core.disk import new_file
from featcal.core.errors import InputError
from featcal.report.diagram import DPI, METADATA
from featcal.report.drawing import TEXT, own_style, require_matplotlib
from featcal.train.epoch import Epoch
from featcal.train.watch import Watched

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's hues, apart for every kind of colour vision; then the same with dashes.
HUES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", ":")
MAX_RUNS = len(HUES) * len(DASHES)
FEW = 30  # epochs of which each is marked
IN_LEGEND, CHARACTERS = 3, 105  # entries and characters in a line
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
        form = path.suffix[1:]
        _drawn(runs).savefig(draft, format=form, dpi=DPI, metadata=METADATA[form])
    return path


def check_picture(path: Path) -> None:
    """Refuses a path whose ending is of no kind of picture that is made here."""
    if path.suffix[1:] not in METADATA:
        raise InputError(f"picture {path} ends in {path.suffix!r}: give .png or .svg")


def _check_runs(runs: Mapping[str, Sequence[Epoch]]) -> None:
    if not 1 <= len(runs) <= MAX_RUNS:
        raise InputError(f"runs has {len(runs)} entries: pass 1 to {MAX_RUNS}")
    for name, epochs in runs.items():
        if not epochs:
            raise InputError(f"runs[{name!r}] has no epochs: leave it out")


def _drawn(runs: Mapping[str, Sequence[Epoch]]) -> Figure:
    from matplotlib.figure import Figure

    longest = max(map(len, runs)) + 8  # with its mark
    columns = min(len(runs), max(1, min(IN_LEGEND, CHARACTERS // longest)))
    height = SIZE[1] + LINE * -(-len(runs) // columns)
    figure = Figure(figsize=(SIZE[0], height), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True)
    looks = cycle(product(DASHES, HUES))
    for epochs, (dash, hue) in zip(runs.values(), looks, strict=False):
        _draw_run(list(panels.flat), epochs, hue, dash)
    for ax, title in zip(panels.flat, ("training loss", *SEEN), strict=True):
        ax.set_title(title, loc="left", size=TEXT + 1, weight="bold")
        ax.grid(visible=True, linewidth=0.4, alpha=0.5)
        ax.spines[["top", "right"]].set_visible(False)
    for ax in panels[1]:
        ax.set_xlabel("epoch")
        ax.xaxis.get_major_locator().set_params(integer=True)
    panels[1, 1].set_ylim(bottom=0)
    handles = panels[0, 0].get_lines()
    figure.legend(handles, list(runs), loc="outside lower center", ncols=columns, frameon=False)
    return figure


def _draw_run(panels: Sequence[Axes], epochs: Sequence[Epoch], hue: str, dash: str) -> None:
    """A line in each panel; those of val have the epochs after which val was looked at."""
    seen = [(epoch.epoch, epoch.watched) for epoch in epochs if epoch.watched is not None]
    losses = ([epoch.epoch for epoch in epochs], [epoch.loss for epoch in epochs])
    scores = (
        ([number for number, _ in seen], [score(watched) for _, watched in seen])
        for score in SEEN.values()
    )
    for ax, (x, y) in zip(panels, (losses, *scores), strict=True):
        mark = "o" if len(x) <= FEW else None
        ax.plot(x, y, dash, color=hue, linewidth=1.2, marker=mark, markersize=2.5)
