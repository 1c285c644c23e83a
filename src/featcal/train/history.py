"""How a network learns: what is seen on val while it is trained, told per epoch, read and drawn."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from featcal.core.checks import InputError
from featcal.core.files import LOCK, new_file
from featcal.core.fit import undisturbed
from featcal.core.stored import json_of, made, reading
from featcal.datasets import Images, Normalisation
from featcal.metrics import accuracy, ece, nll
from featcal.report import diagram
from featcal.train.run_folder import CHECKPOINT, RECORD, said_in

ROWS = 1000  # at a time: enough to fill a GPU, little to keep
# Okabe and Ito's hues, apart for every kind of colour vision; then the same with dashes.
HUES = (
    *(diagram.BLUE, diagram.VERMILLION, "#009E73", diagram.PURPLE),
    *("#E69F00", "#56B4E9", "#000000"),
)
DASHES = ("-", "--", ":")
MAX_RUNS = len(HUES) * len(DASHES)
FEW = 30  # epochs of which each is marked
IN_LEGEND, CHARACTERS = 3, 80  # entries and characters in a line
SIZE, LINE = (7.2, 5.0), 0.2  # inches: of the panels, and of a line of the legend


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
        found = dict(vars(self))
        watched = found.pop("watched")
        return found if watched is None else {**found, **vars(watched)}

    @classmethod
    def of_json(cls, found: dict[str, Any]) -> Epoch:
        """The epoch a public form describes."""
        keys = ("epoch", "rate", "loss", "seconds")
        scores = {key: value for key, value in found.items() if key not in keys}
        own = {key: value for key, value in found.items() if key in keys}
        return made(cls, {**own, "watched": scores or None}, "epoch")  # type: ignore[no-any-return]


Report = Callable[[Epoch], None]


def looks(epochs: Iterable[Epoch]) -> list[tuple[int, Watched]]:
    """The epochs after which val was looked at, by number, and what was seen."""
    return [(epoch.epoch, epoch.watched) for epoch in epochs if epoch.watched is not None]


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
        # The record comes before the checkpoint goes: a run that ends meanwhile has the former.
        for file in (RECORD, CHECKPOINT, RECORD):
            try:
                loss, planned, epochs = cls._told(folder / file)
            except InputError as error:
                if isinstance(error.__cause__, FileNotFoundError):
                    continue
                raise
            if not epochs:
                raise InputError(
                    f"{folder} has no epoch that is over: there is nothing to show yet"
                )
            return cls(folder, loss, planned, epochs)
        if (folder / LOCK).exists():
            raise InputError(
                f"{folder} is of a run that has kept no checkpoint yet: look again when it has "
                "(--checkpoint-every)"
            )
        raise InputError(
            f"{folder} holds no run: give a folder that featcal train made, with {RECORD} or "
            f"{CHECKPOINT} in it"
        )

    @staticmethod
    def _told(path: Path) -> tuple[str, int, tuple[Epoch, ...]]:
        """The loss, the epochs planned and those that are over, as a record or checkpoint says."""
        with reading(path, "it is damaged, or of another version of featcal"):
            about: dict[str, Any]
            if path.name == RECORD:
                about = made(dict[str, Any], json_of(path.read_bytes()))
                told = made(list[dict[str, Any]], about.get("epochs"), "epochs")
            else:
                said = said_in(path)
                about, told = said.settings, said.position.history
            epochs = tuple(map(Epoch.of_json, told))
            # `write_run` takes any facts, and a record from Python may have few.
            recipe = made(dict[str, Any], about.get("recipe", {}), "recipe")
            planned = made(int, recipe.get("epochs", len(epochs)), "recipe.epochs")
            return made(str, about.get("loss", "?"), "loss"), planned, epochs

    def as_json(self) -> dict[str, Any]:
        """The public form."""
        return {
            **{"run": str(self.folder), "loss": self.loss, "planned": self.planned},
            "epochs": [epoch.as_json() for epoch in self.epochs],
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
    diagram.require_matplotlib()
    form = path.suffix[1:].lower()
    if form not in diagram.METADATA:
        raise InputError(f"picture {path} ends in neither .png nor .svg: give one of these")
    if not isinstance(runs, Mapping) or not 1 <= len(runs) <= MAX_RUNS:
        raise InputError(
            f"runs is {type(runs).__name__} of {len(runs)}: pass a dict with 1 to {MAX_RUNS} runs, "
            "such as {'focal': what train returned}"
        )
    for name, epochs in runs.items():
        if not epochs or not all(isinstance(epoch, Epoch) for epoch in epochs):
            raise InputError(
                f"runs[{name!r}] holds no epochs: pass what train returned, or the epochs of "
                "History.read(folder)"
            )
    with new_file(path, overwrite=overwrite) as draft, diagram.own_style():
        look = {"dpi": diagram.DPI, "metadata": diagram.METADATA[form]}
        _drawn(runs).savefig(draft, format=form, **look)
    return path


def _drawn(runs: Mapping[str, Sequence[Epoch]]) -> Any:  # noqa: ANN401 - a figure of matplotlib
    """Loss, accuracy, NLL and ECE, epoch by epoch; training works without matplotlib."""
    from matplotlib.figure import Figure

    names = [textwrap.fill(str(name), CHARACTERS) for name in runs]
    longest = max(map(len, names)) + 8  # with its mark
    columns = min(len(runs), max(1, min(IN_LEGEND, CHARACTERS // longest)))
    lines = -(-len(runs) // columns) + sum(name.count("\n") for name in names)
    figure = Figure(figsize=(SIZE[0], SIZE[1] + LINE * lines), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True)
    mark = "o" if max(map(len, runs.values())) <= FEW else ""
    for epochs, (dash, hue) in zip(runs.values(), product(DASHES, HUES), strict=False):
        # The panels of val have the epochs after which val was looked at.
        seen = [(number, 100 * w.accuracy, w.nll, 100 * w.ece) for number, w in looks(epochs)]
        lists: list[tuple[list[int], list[float]]] = [
            ([epoch.epoch for epoch in epochs], [epoch.loss for epoch in epochs]),
            *(([row[0] for row in seen], [row[column] for row in seen]) for column in (1, 2, 3)),
        ]
        for ax, (x, y) in zip(panels.flat, lists, strict=True):
            ax.plot(x, y, linewidth=1.2, markersize=2.5, color=hue, linestyle=dash, marker=mark)
    titles = ("training loss", "val accuracy, %", "val NLL", "val ECE, %")
    for ax, title in zip(panels.flat, titles, strict=True):
        # A panel without a point says so; matplotlib would make up a scale.
        if not any(len(line.get_xdata()) for line in ax.get_lines()):
            ax.text(0.5, 0.5, "not looked at yet", ha="center", transform=ax.transAxes)
            ax.set_yticks([])
        ax.set_title(title, loc="left", size=diagram.TEXT + 1, weight="bold")
        ax.grid(visible=True, linewidth=0.4, alpha=0.5)
        ax.spines[["top", "right"]].set_visible(False)
    for ax in panels[1]:
        ax.set_xlabel("epoch")
        ax.xaxis.get_major_locator().set_params(integer=True)
    panels[1, 1].set_ylim(bottom=0)
    look: dict[str, Any] = {"loc": "outside lower center", "ncols": columns, "frameon": False}
    legend = figure.legend(figure.axes[0].get_lines(), names, **look)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a name with dollars in it is no formula
    return figure
