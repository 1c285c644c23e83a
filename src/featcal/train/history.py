"""What a run said of its epochs, read back from its folder."""

from __future__ import annotations

import json
import math
import os
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from featcal.core.checks import InputError
from featcal.core.files import LOCK, new_file
from featcal.core.fit import undisturbed
from featcal.datasets import Images, Normalisation
from featcal.metrics import accuracy, ece, nll
from featcal.report.diagram import (
    BLUE,
    DPI,
    METADATA,
    PURPLE,
    TEXT,
    VERMILLION,
    own_style,
    require_matplotlib,
)
from featcal.train.run_folder import FILE as CHECKPOINT
from featcal.train.run_folder import FORMAT, RECORD, said_in

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# --- How a network does on rows it is not trained on, while it is trained.

ROWS = 1000  # at a time: enough to fill a GPU, little to keep


@final
class Batches:
    """Normalised images in their order, as pairs for `collect`; re-iterable."""

    def __init__(
        self, images: Images, normalise: Normalisation, device: torch.device, rows: int = ROWS
    ) -> None:
        self.dataset, self.normalise, self.device, self.size = images, normalise, device, rows

    def __len__(self) -> int:
        return -(-len(self.dataset) // self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(self.dataset), self.size):
            part = slice(start, start + self.size)
            pixels = self.dataset.pixels[part].to(self.device)
            yield self.normalise(pixels), self.dataset.labels[part].to(self.device)


@final
@dataclass(frozen=True)
class Watched:
    """The scores people watch."""

    nll: float
    accuracy: float
    ece: float

    @classmethod
    def of(cls, logits: Tensor, labels: Tensor) -> Watched:
        """The scores of logits (n, k)."""
        z, y = logits.cpu(), labels.cpu()
        return cls(nll(logits=z, labels=y), accuracy(logits=z, labels=y), ece(logits=z, labels=y))

    def as_json(self) -> dict[str, float]:
        """The public form."""
        return asdict(self)


@torch.no_grad()
def outputs(model: nn.Module, batches: Batches, precision: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits (n, k) and labels (n,) of all rows; the model is as it was afterwards."""
    logits, labels = [], []
    with undisturbed(model):
        for images, given in batches:
            mixed = precision != torch.float32
            with torch.autocast(images.device.type, precision, enabled=mixed):
                logits.append(model(images).float())
            labels.append(given)
    return torch.cat(logits), torch.cat(labels)


# --- What is said of an epoch, while it is told and in the record of a run.


@final
@dataclass(frozen=True)
class Epoch:
    """What is said of an epoch.

    Attributes:
        epoch: counted from 1.
        rate: the highest learning rate in it.
        loss: the mean over its rows, as the network was when it saw them.
        seconds: it took, watching not counted.
        watched: scores on the validation rows; None where they were not looked at.
    """

    epoch: int
    rate: float
    loss: float
    seconds: float
    watched: Watched | None = None

    def as_json(self) -> dict[str, Any]:
        """The public form."""
        watched = {} if self.watched is None else self.watched.as_json()
        return {**{k: v for k, v in vars(self).items() if k != "watched"}, **watched}

    @classmethod
    def of_json(cls, found: dict[str, Any]) -> Epoch:
        """The epoch a public form describes."""
        own = {key: _number(found[key]) for key in ("rate", "loss", "seconds")}
        seen = {key: _number(found[key]) for key in ("nll", "accuracy", "ece") if key in found}
        return cls(int(found["epoch"]), **own, watched=Watched(**seen) if seen else None)


def _number(value: Any) -> float:  # noqa: ANN401 - JSON
    if not math.isfinite(value):
        raise ValueError(f"{value} where a number belongs")
    return float(value)


def looks(epochs: Iterable[Epoch]) -> list[tuple[int, Watched]]:
    """The epochs after which val was looked at, by number, and what was seen."""
    return [(epoch.epoch, epoch.watched) for epoch in epochs if epoch.watched is not None]


Report = Callable[[Epoch], None]


@final
@dataclass(frozen=True)
class History:
    """The epochs of a run.

    Attributes:
        folder: of the run.
        loss: what it minimises, as text.
        planned: how many epochs it has in all.
        epochs: those that are over.
    """

    folder: Path
    loss: str
    planned: int
    epochs: tuple[Epoch, ...]

    @classmethod
    def read(cls, folder: Path | str) -> History:
        """That of a run which is finished, under way, or was killed.

        Raises:
            InputError: for a folder without a run, or one without an epoch that is over.
        """
        folder = Path(folder)
        if not os.path.isdir(folder):  # Path.is_dir raises where a name is too long
            raise InputError(f"{folder} is no folder: give that of a run of featcal train")
        loss, planned, epochs = _found_in(folder)
        if not epochs:
            raise InputError(f"{folder} has no epoch that is over: there is nothing to show yet")
        return cls(folder, loss, planned, epochs)

    def as_json(self) -> dict[str, Any]:
        """The public form."""
        return {
            **{"run": str(self.folder), "loss": self.loss, "planned": self.planned},
            "epochs": [epoch.as_json() for epoch in self.epochs],
        }


Found = tuple[str, int, tuple[Epoch, ...]]
UNREADABLE = (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError)


def _found_in(folder: Path) -> Found:
    """Loss, planned epochs and those that are over, by the record or by the checkpoint."""
    # The record comes before the checkpoint goes: a run that ends between two looks has the former.
    for file, read in ((RECORD, _recorded), (CHECKPOINT, _kept), (RECORD, _recorded)):
        try:
            return read(folder / file)
        except FileNotFoundError:
            continue
        except UNREADABLE as error:
            raise InputError(
                f"{folder / file} cannot be read ({type(error).__name__}: {error}): it is damaged, "
                "or of another version of featcal"
            ) from error
    if (folder / LOCK).exists():
        raise InputError(
            f"{folder} is of a run that has kept no checkpoint yet: look again when it has "
            "(--checkpoint-every)"
        )
    raise InputError(
        f"{folder} holds no run: give a folder that featcal train made, with {RECORD} or "
        f"{CHECKPOINT} in it"
    )


def _recorded(path: Path) -> Found:
    record = json.loads(path.read_text())
    epochs = tuple(map(Epoch.of_json, record["epochs"]))
    # `write_run` takes any facts, and a record from Python may have few.
    planned = record.get("recipe", {}).get("epochs", len(epochs))
    return str(record.get("loss", "?")), int(planned), epochs


def _kept(path: Path) -> Found:
    about = said_in(path)
    if about["format"] != FORMAT:
        raise ValueError(f"format {about['format']}, not {FORMAT}")
    settings = about["settings"]
    epochs = tuple(map(Epoch.of_json, about["position"]["history"]))
    return str(settings["loss"]), int(settings["recipe"]["epochs"]), epochs


# --- A picture of how networks learned: loss, accuracy, NLL and ECE, epoch by epoch.
#
# matplotlib is imported inside the functions alone, so that training works without it.

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
