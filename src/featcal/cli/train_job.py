"""A run of `featcal train`: images in, a folder out, and a line for every epoch in between."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any, final

import torch
from rich.table import Table
from torch import nn

from featcal.cli import tables
from featcal.cli.bar import progress_bar
from featcal.cli.commands import print_json
from featcal.cli.train_request import TrainRequest
from featcal.cli.train_words import as_typed, option_of
from featcal.core import dist
from featcal.core.errors import InputError
from featcal.core.fitting import undisturbed
from featcal.data import Pack
from featcal.data.collect import collect
from featcal.datasets import Splits
from featcal.report.columns import COLUMNS
from featcal.train import Engine, Epoch, train
from featcal.train.checkpoint import FILE as CHECKPOINT
from featcal.train.checkpoint import OtherRun, Position
from featcal.train.checks import Diverged
from featcal.train.finish import Pixels, scores_of, write_pack_of, write_run
from featcal.train.folder import PACK
from featcal.train.watch import Batches

DATA_SIDE = ("mixup", "smoothing")
SHOWN = ("accuracy", "ece", "nll")
HEADINGS = ("epoch", "rate", "loss", "val accuracy", "val ECE", "seconds")
WIDTHS = (9, 10, 10, 14, 10, 9)
HEADING = " ".join(map(str.rjust, HEADINGS, WIDTHS))


@final
@dataclass(frozen=True)
class Job:
    """A run with everything it needs in memory.

    Attributes:
        request: what was asked for.
        splits: the images.
        pixels: how they are normalised, train and val, and test.
        model: the network.
        engine: where it runs.
        aloud: whether people read along.
    """

    request: TrainRequest
    splits: Splits
    pixels: Pixels
    model: nn.Module
    engine: Engine
    aloud: bool

    @classmethod
    def of(cls, request: TrainRequest, aloud: bool) -> Job:
        """Reads the images, builds the network, and refuses one that could not become a pack."""
        engine = request.engine()
        with _bar():
            splits = _read(request)
        pixels, model = request.normalise(splits), request.build(splits)
        two = splits.val.rows(torch.arange(min(2, len(splits.val))))
        batches = Batches(two, pixels[0], torch.device("cpu"))
        with _fed_with(two.size, request):
            _try(model, batches)
        if not request.no_pack:
            with _or_no_pack():
                collect(model, batches, head=request.head)
        return cls(request, splits, pixels, model, engine, aloud)

    def trained(self) -> tuple[Epoch, ...]:
        """Trains the network in place."""
        request = self.request
        with _bar(), _in_options():
            return train(
                self.model,
                self.splits,
                request.loss,
                request.recipe,
                engine=self.engine,
                normalise=self.pixels[0],
                folder=request.output,
                checkpoint_every=request.checkpoint_every,
                watch_every=request.watch_every,
                report=EpochLines(request.recipe.epochs) if self.aloud else None,
                begun=self._introduce if self.aloud else None,
                about=self._about(),
            )

    def _about(self) -> dict[str, Any]:
        """What must be the same for a run to go on, besides what the loop knows."""
        request = self.request
        keys = ("network", "options", "image_size", "test_norm")
        return {"rows": self._rows(), **{key: getattr(request, key) for key in keys}}

    def _rows(self) -> dict[str, int]:
        parts = {part: getattr(self.splits, part) for part in ("train", "val", "test", "held_out")}
        return {part: len(images) for part, images in parts.items() if images is not None}

    def _introduce(self, standing: Position | None) -> None:
        for line in self._introduction(standing):
            print(line, flush=True)  # not by rich, which would write through the bar

    def _introduction(self, standing: Position | None) -> Iterator[str]:
        request, recipe = self.request, self.request.recipe
        counts = ", ".join(f"{n:,} {part.replace('_', ' ')}" for part, n in self._rows().items())
        yield f"{self.splits.name}: {counts} ({self.splits.how})"
        how = f"batch {recipe.batch}, {recipe.optimizer}, rate {recipe.lr:g}, {recipe.schedule}"
        how += f", gradients clipped to {recipe.clip_norm:g}" if recipe.clip_norm else ""
        how += "".join(f", {k} {getattr(recipe, k):g}" for k in DATA_SIDE if getattr(recipe, k))
        plural = "" if recipe.epochs == 1 else "s"
        options = "".join(f", {key} {value}" for key, value in request.options.items())
        what = f"{request.network}{options}, {request.loss!r}"
        yield f"{what}: {recipe.epochs} epoch{plural}, {how}, seed {recipe.seed}"
        where = self.engine.as_json()
        tricks = [key for key in ("compiled", "graph") if where[key]]
        several = [f"{dist.world()} processes"] if dist.world() > 1 else []
        yield ", ".join([where["device"], where["precision"], *tricks, *several])
        if standing is not None:
            steps = -(-len(self.splits.train) // recipe.batch)
            place = _place(standing, recipe.epochs, steps)
            yield f"Going on from {request.output / CHECKPOINT}: {place}"

    def facts(self, history: tuple[Epoch, ...]) -> dict[str, Any]:
        """How the network came about, for its record and its pack."""
        request, (pixels, test_pixels) = self.request, self.pixels
        seconds = [epoch.seconds for epoch in history]
        return {
            **{"dataset": self.splits.name, "network": request.network},
            "network_options": request.options_for(self.splits),
            "classes": len(self.splits.class_names),
            **{"loss": repr(request.loss), "seed": request.seed},
            "recipe": {**request.recipe.as_json(), "reduction": request.loss.reduction},
            **self.engine.as_json(),
            "test_norm": request.test_norm,
            "normalise": {"train": vars(pixels), "test": vars(test_pixels)},
            "rows": self._rows(),
            "split": self.splits.how,
            **{"seconds": sum(seconds), "seconds_epoch": median(seconds)},
        }

    def finish(self, history: tuple[Epoch, ...], facts: dict[str, Any]) -> None:
        """Writes what a run leaves, and says how the network does."""
        request, model = self.request, self.model
        with _bar():
            scores = scores_of(model, self.splits, self.pixels)
            pack = None
            if not request.no_pack:
                pack = write_pack_of(
                    model,
                    self.splits,
                    request.output,
                    normalise=self.pixels,
                    network=request.network,
                    facts=facts,
                    head=request.head,
                )
        names = {"class_names": self.splits.class_names, "image_size": self.splits.train.size}
        record = write_run(request.output, model, history, {**facts, **names, "scores": scores})
        if request.as_json:
            print_json({**record, "output": str(request.output)})
            return
        tables.console().print(_scores_table(scores))
        for line in _conclusion(request, pack):
            tables.say(line)


def _place(position: Position, epochs: int, steps: int) -> str:
    """The next step in words; an epoch whose steps are done is still to be watched."""
    if position.epoch == epochs:
        return "every epoch is done"
    if position.step == steps:
        return f"end of epoch {position.epoch + 1}"
    return f"epoch {position.epoch + 1}, step {position.step + 1} of {steps}"


@final
class EpochLines:
    """A line for every epoch that was watched, under one heading."""

    def __init__(self, epochs: int) -> None:
        self.epochs, self.begun = epochs, False

    def __call__(self, epoch: Epoch) -> None:
        """Says what is to be said of an epoch."""
        if epoch.watched is None:
            return
        seen = [COLUMNS[key].text(getattr(epoch.watched, key)) for key in ("accuracy", "ece")]
        cells = (f"{epoch.epoch}/{self.epochs}", f"{epoch.rate:.4g}", f"{epoch.loss:.4f}", *seen)
        line = " ".join(map(str.rjust, (*cells, f"{epoch.seconds:.1f}"), WIDTHS))
        # Not by rich, which would write through the bar; flushed for whoever follows a file.
        try:
            print(line if self.begun else f"{HEADING}\n{line}", flush=True)
        except BrokenPipeError:  # nobody reads any more: as Ctrl-C, so that what is done is kept
            signal.raise_signal(signal.SIGINT)
        self.begun = True


@contextmanager
def _in_options() -> Iterator[None]:
    """What to change, in the words of the command line."""
    try:
        yield
    except Diverged as error:
        raise InputError(error.sentence("--lr", "--clip-norm")) from error
    except OtherRun as error:
        raise InputError(error.sentence(option_of)) from error
    except InputError as error:
        raise as_typed(error) from error


@torch.no_grad()
def _try(model: nn.Module, batches: Batches) -> None:
    images, _ = next(iter(batches))
    with undisturbed(model):
        model(images)


@contextmanager
def _fed_with(size: tuple[int, int], request: TrainRequest) -> Iterator[None]:
    """Says what a network was fed with that cannot take it."""
    try:
        yield
    except RuntimeError as error:
        images = f"images of {size[0]} x {size[1]} pixels"
        if request.is_function:  # the traceback leads to the line
            error.add_note(f"{request.network} was given two {images}, of shape (2, 3, h, w)")
            raise
        raise InputError(
            f"{request.network} cannot take {images} ({error}): give another --image-size, or "
            "other options of the network"
        ) from error


@contextmanager
def _or_no_pack() -> Iterator[None]:
    """What to type for a network whose features cannot be had."""
    try:
        yield
    except InputError as error:
        raise InputError(
            f"{error}; here: --head PATH, or --no-pack to train without a pack"
        ) from error


def _read(request: TrainRequest) -> Splits:
    """The images; of several processes the first downloads them, and the others find them there."""
    splits = request.splits() if dist.rank() == 0 or not request.download else None
    dist.total(torch.zeros(1))  # nobody goes on before the first is done
    return request.splits() if splits is None else splits


def _bar() -> AbstractContextManager[object]:
    """The bar of the first of several processes, none for the others."""
    return progress_bar() if dist.rank() == 0 else nullcontext()


def _scores_table(scores: dict[str, dict[str, float]]) -> Table:
    table = Table(title="before calibration", title_justify="left")
    table.add_column("split")
    for key in SHOWN:
        table.add_column(COLUMNS[key].heading, justify="right")
    for split, found in scores.items():
        table.add_row(split, *(COLUMNS[key].text(found[key]) for key in SHOWN))
    return table


def _conclusion(request: TrainRequest, pack: Pack | None) -> Iterator[str]:
    """What lies where, and what to type next."""
    yield f"Wrote {request.output}"
    look = f"featcal history {shlex.quote(str(request.output))} -o history.png"
    if pack is None:
        yield "No pack was made (--no-pack): featcal collect makes one of a network of yours"
        yield f"Next: {look}"
        return
    path = shlex.quote(str(request.output / PACK))
    recipe = "temperature" if pack.manifest.head is None else '"clip | temperature"'
    yield f"Next: featcal compare {path}"
    yield f"  or: featcal fit {path} {recipe} -o cal.safetensors"
    yield f"  or: {look}"
