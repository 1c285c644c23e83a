"""featcal train: a network from images to a pack that can be calibrated, in one command."""

from __future__ import annotations

import ast
import inspect
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, final

import click
import torch
from rich.table import Table
from torch import nn

from featcal.cli.shared import (
    FORCE,
    HEAD,
    INTERRUPTED,
    JSON,
    OVERWRITE,
    console,
    going_on_later,
    measured,
    named_function,
    output_option,
    print_json,
    progress_bar,
    say,
    with_options,
)
from featcal.core import dist
from featcal.core.checks import ArgumentError, InputError
from featcal.core.files import check_free
from featcal.core.fit import undisturbed
from featcal.core.progress import listen
from featcal.core.text import NO_LITERAL
from featcal.data import Pack
from featcal.data.collect import collect
from featcal.datasets import ImageData, Splits, load_images, normalisations, split
from featcal.datasets.images import TestNorm, default_val
from featcal.losses import LOSSES, TrainingLoss, parse_loss
from featcal.models import MODELS, build, network_options
from featcal.report.scores import COLUMNS
from featcal.train import (
    Engine,
    Epoch,
    History,
    Recipe,
    processes,
    published_loss,
    save_history,
)
from featcal.train import train as run_training
from featcal.train.engine import PRECISIONS, launched_rank
from featcal.train.history import MAX_RUNS, Batches, check_picture, looks
from featcal.train.loop import Diverged, Pixels, scores_of, write_pack_of, write_run
from featcal.train.run_folder import FILE as CHECKPOINT
from featcal.train.run_folder import PACK, OtherRun, Position, check_folder, made_folder

# --- What the library says of a run, in the words of the command line.
#
# The library names its arguments; whoever typed a command knows options.

OPTIONS = ("loss", "precision", "image_size", "test_norm")
RECIPE = ("epochs", "lr", "batch", "clip_norm", "schedule", "seed", "mixup", "smoothing")
ARGUMENTS = ("dataset", "network")


def as_typed(error: InputError) -> InputError:
    """The same sentence with options where it had arguments."""
    if isinstance(error, ArgumentError):
        return InputError(error.sentence(_option))
    return error


def _option(argument: str) -> str:
    """--held-out for held_out, and --download for download=True."""
    return f"--{argument.partition('=')[0].replace('_', '-')}"


def option_of(setting: str) -> str:
    """What sets a setting of a run, such as --lr for recipe.lr."""
    group, _, name = setting.rpartition(".")
    if group == "options":
        return f"--network-option {name}"
    if group == "rows":
        return f"rows of {name.replace('_', ' ')}"
    if name in (RECIPE if group == "recipe" else OPTIONS):
        return _option(name)
    return name.upper() if name in ARGUMENTS else setting


# --- What `featcal train` is asked for, refused before anything is read where it cannot be.

FOLDER = "folder"


@final
@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """The arguments and options of the command, under their own names."""

    dataset: str
    network: str
    output: Path
    data: Path
    loss_text: str = "ce"
    budget: float | None = None
    epochs: int | None = None
    published: bool = False
    lr: float | None = None
    batch: int | None = None
    clip_norm: float | None = None
    schedule: str | None = None
    mixup: float | None = None
    smoothing: float | None = None
    seed: int = 1
    val: int | None = None
    held_out: int | None = None
    test_norm: TestNorm = "matched"
    image_size: int | None = None
    download: bool = False
    given_options: tuple[str, ...] = ()
    head: str | None = None
    device: str | None = None
    precision: str | None = None
    compiled: bool | None = None
    graph: bool | None = None
    no_pack: bool = False
    watch_every: int = 1
    checkpoint_every: float = 60.0
    as_json: bool = False

    def check(self) -> bool:
        """Refuses what cannot be done; whether a run is there to go on with."""
        going_on = check_folder(self.output)
        self._check_data()
        self._check_network()  # first: its module may hold a loss of the user's own
        loss, recipe = self.loss, self.recipe
        if recipe.smoothing and not loss.soft_targets:
            raise InputError(
                f"--smoothing makes probabilities of labels, and {loss.name} takes class "
                "numbers alone: leave it out, or choose a loss such as ce"
            )
        self.engine()
        return going_on

    def _check_data(self) -> None:
        if self.dataset == FOLDER:
            if self.image_size is None:
                raise InputError(
                    "--image-size is missing: give the height and width that images are cut to, "
                    "such as --image-size 32"
                )
            if self.download:
                raise InputError("--download gets CIFAR alone: leave it out for a folder")
            if self.test_norm != "matched":
                raise InputError(
                    f"--test-norm {self.test_norm} is for CIFAR alone: leave it out for a folder"
                )
        elif self.image_size is not None:
            raise InputError(
                f"--image-size is for folders alone, and {self.dataset} has 32 x 32 pixels: leave "
                "it out"
            )

    def _check_network(self) -> None:
        if self.is_function:
            named_function(self.network, "a network")
            return
        if self.network not in MODELS:
            try:
                build(self.network, 2)
            except InputError as error:
                raise InputError(f"{error}; or name a function, package.module:function") from error
        with torch.device("meta"):  # no memory, no random numbers
            build(self.network, 2, **self.options)

    @property
    def is_function(self) -> bool:
        """Whether the network is a function of the user's."""
        return ":" in self.network

    @cached_property
    def loss(self) -> TrainingLoss:
        """What to minimise; with --published a sum."""
        loss = parse_loss(self.loss_text)
        return published_loss(loss) if self.published else loss

    @cached_property
    def recipe(self) -> Recipe:
        """The network's own recipe with what the options change."""
        if self.budget is not None and self.epochs is not None:
            raise InputError("--budget and --epochs contradict each other: give one")
        keys = ("lr", "batch", "schedule", "mixup", "smoothing", "seed")
        given = {key: getattr(self, key) for key in keys if getattr(self, key) is not None}
        recipe = Recipe.for_network(self.network, **given)
        recipe = recipe.published() if self.published else recipe
        if self.clip_norm is not None:
            recipe = replace(recipe, clip_norm=self.clip_norm)
        if self.budget is not None:
            return recipe.scaled(self.budget)
        return recipe if self.epochs is None else recipe.lasting(self.epochs)

    @cached_property
    def options(self) -> dict[str, Any]:
        """The network's options; a value that is no Python literal is text."""
        found: dict[str, Any] = {}
        for text in self.given_options:
            key, equals, value = text.partition("=")
            if not (key.isidentifier() and equals):
                raise InputError(
                    f"--network-option {text!r} is not NAME=VALUE: write for example width=2"
                )
            try:
                found[key] = ast.literal_eval(value)
            except NO_LITERAL:
                found[key] = value
        return found

    def engine(self) -> Engine:
        """Where to run; asked for anew once the processes know each other."""
        return Engine.best(
            self.device, precision=self.precision, compiled=self.compiled, graph=self.graph
        )

    def splits(self) -> Splits:
        """The images, read and cut."""
        try:
            found = load_images(
                self.dataset, self.data, download=self.download, image_size=self.image_size
            )
            return split(found, val=self.val, held_out=self._held_out(found))
        except InputError as error:
            raise as_typed(error) from error

    def _held_out(self, found: ImageData) -> int:
        if self.held_out is None:
            return self._as_many_as_val(found) if self.loss.needs_held_out else 0
        if self.held_out == 0 and self.loss.needs_held_out:
            raise InputError(
                f"--held-out 0: {self.loss.name} adapts to rows that are not trained on: give some"
            )
        return self.held_out

    def _as_many_as_val(self, found: ImageData) -> int:
        """What the published AdaFocal adapts to is val itself; a large one would cost too much."""
        images = len(found.train)
        val = (self.val or default_val(images)) if found.val is None else len(found.val)
        return max(1, min(val, images // 10))

    def normalise(self, splits: Splits) -> Pixels:
        """The published values of CIFAR; those of the training images of any other data."""
        if self.dataset == FOLDER:
            return normalisations(splits.name, measure=splits.train)
        return normalisations(self.dataset, self.test_norm)

    def options_for(self, splits: Splits) -> dict[str, Any]:
        """The network's options with what the images ask of it: all that it is built again by."""
        if self.is_function or "image_size" not in network_options(self.network):
            return self.options
        return {"image_size": splits.train.size[0], **self.options}

    def build(self, splits: Splits) -> nn.Module:
        """The network for these images, with weights drawn by the seed."""
        classes = len(splits.class_names)
        torch.manual_seed(self.seed)
        if not self.is_function:
            return build(self.network, classes, **self.options_for(splits))
        function = named_function(self.network)
        try:
            inspect.signature(function).bind(classes, **self.options)
        except TypeError as error:
            raise InputError(
                f"{self.network} cannot be called with the number of classes and the options "
                f"{self.options or '(none)'} ({error}): let it take (classes, ...)"
            ) from error
        model = function(classes, **self.options)
        if not isinstance(model, nn.Module):
            raise InputError(
                f"{self.network} returned {type(model).__name__}: return the network, a "
                "torch.nn.Module, for a number of classes"
            )
        return model


# --- A run of `featcal train`: images in, a folder out, and a line for every epoch in between.

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
            return run_training(
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
        console().print(_scores_table(scores))
        for line in _conclusion(request, pack):
            say(line)


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
    for part, found in scores.items():
        table.add_row(part, *(COLUMNS[key].text(found[key]) for key in SHOWN))
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


PATIENCE = 5.0  # seconds; torchrun looks at its processes ten times in one
ABOVE_ZERO = click.FloatRange(0, min_open=True)
TRAIN_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    output_option("The folder to make."),
    click.option(
        "--data",
        required=True,
        type=click.Path(path_type=Path),
        help="The folder of the images; docs/datasets.md says what may lie there.",
    ),
    click.option(
        "--loss",
        "loss_text",
        default="ce",
        show_default=True,
        help=f'{", ".join(sorted(LOSSES))}; with arguments as in "focal(gamma=3)".',
    ),
    click.option(
        "--budget",
        type=click.FloatRange(0, 1, min_open=True),
        help="A part of the epochs, such as 0.1.  [default: 1]",
    ),
    click.option("--epochs", type=click.IntRange(1), help="How many, instead of the published."),
    click.option(
        "--published", is_flag=True, help="Summed losses, gradients clipped to 2, no warm-up."
    ),
    click.option(
        "--lr", type=ABOVE_ZERO, help="The highest learning rate.  [default: the network's]"
    ),
    click.option("--batch", type=click.IntRange(1), help="Rows of a step.  [default: 128]"),
    click.option(
        "--clip-norm", type=ABOVE_ZERO, help="The longest gradient.  [default: any; --published: 2]"
    ),
    click.option(
        "--schedule", type=click.Choice(["steps", "cosine"]), help="How the learning rate falls."
    ),
    click.option(
        "--seed",
        default=1,
        show_default=True,
        type=click.IntRange(min=0),
        help="Of the weights, the order of the images and their shifts.",
    ),
    click.option(
        "--mixup", type=click.FloatRange(0), help="Mix images by Beta(A, A).  [default: 0]"
    ),
    click.option(
        "--smoothing",
        type=click.FloatRange(0, 1, max_open=True),
        help="The part of a label spread over all classes.",
    ),
    click.option(
        "--val",
        type=click.IntRange(1),
        help="Training images kept for calibration.  [default: a tenth, at most 5000]",
    ),
    click.option(
        "--held-out",
        type=click.IntRange(0),
        help="More of them for a loss that adapts.  [default: for adafocal as many as in val, at "
        "most a tenth; else 0]",
    ),
    click.option(
        "--test-norm",
        default="matched",
        show_default=True,
        type=click.Choice(["matched", "reference"]),
        help="How test images are normalised; reference is the published mismatch.",
    ),
    click.option("--image-size", type=click.IntRange(1), help="Of a folder's images, in pixels."),
    click.option("--download", is_flag=True, help="Get CIFAR where the data is not there."),
    click.option(
        "--network-option",
        "given_options",
        multiple=True,
        metavar="NAME=VALUE",
        help="An option of the network, such as width=2; repeat for more.",
    ),
    HEAD,
    click.option("--device", help="cpu, cuda, ...  [default: a GPU where there is one]"),
    click.option(
        "--precision",
        type=click.Choice(list(PRECISIONS)),
        help="Of the forward pass.  [default: bfloat16 on a GPU]",
    ),
    click.option("--compile/--no-compile", "compiled", default=None, help="By torch.compile."),
    click.option("--graph/--no-graph", default=None, help="Steps as one CUDA graph."),
    click.option("--no-pack", is_flag=True, help="Write the weights alone, no features."),
    click.option(
        "--watch-every",
        default=1,
        show_default=True,
        type=click.IntRange(1),
        help="Epochs between two looks at val, each a line.",
    ),
    click.option(
        "--checkpoint-every",
        default=60.0,
        show_default=True,
        type=click.FloatRange(0),
        metavar="SECONDS",
        help="What a kill costs at most; 0 for every step.",
    ),
    JSON,
)


@click.command()
@click.argument("dataset", metavar="DATASET", type=click.Choice(["cifar10", "cifar100", FOLDER]))
@click.argument("network", metavar="NETWORK")
@with_options(TRAIN_OPTIONS)
def train(**options: Any) -> None:  # noqa: ANN401 - TrainRequest names them and their types
    """Train NETWORK on DATASET with a loss that aims at calibration, and make a pack of it.

    DATASET is cifar10, cifar100 or folder. NETWORK is resnet50, resnet110, densenet121, wrn26x10,
    wrn16x4 or vit, or package.module:function, called with the number of classes. 350 epochs as
    published, unless --budget or --epochs says otherwise. A run that was killed goes on where it
    was when the same command is given again; torchrun starts it on several GPUs.

    Example: featcal train cifar10 wrn16x4 -o run --data data --loss "focal(gamma=3)" --budget 0.1
    """
    request = TrainRequest(**options)
    with _in_turn(), ExitStack() as stack:
        request.check()
        with processes(request.device):
            first = dist.rank() == 0
            stack.enter_context(_heard(request, first))
            if first:
                stack.enter_context(made_folder(request.output))
            job = Job.of(request, first and not request.as_json)
            history = job.trained()
            facts = job.facts(history)
        # Outside of the group: the rest is for one process, and nothing may wait for the others.
        if first:
            job.finish(history, facts)
    if not first:
        _leave()


def _leave() -> None:
    """Ends a process that has done its part, without the end that Python makes.

    With torch 2.13 that end aborted in one of forty runs ("terminate called without an active
    exception"; a thread of torch, we think, that still wanted Python), and ended the others, too.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@contextmanager
def _in_turn() -> Iterator[None]:
    """Of several processes that refuse the same, the first says so.

    The others wait for torchrun to end them with it. Were they to leave at once, torchrun would
    end the first, maybe before it has spoken; what one of them alone refuses is said late.
    """
    try:
        yield
    except InputError:
        if launched_rank() > 0:
            time.sleep(PATIENCE)
        raise


@contextmanager
def _heard(request: TrainRequest, first: bool) -> Iterator[None]:
    """Of several processes the first speaks; the others draw no bar, and go quietly."""
    if first:
        with going_on_later(request.output / CHECKPOINT):
            yield
        return
    try:
        with listen(lambda *_: None):
            yield
    except KeyboardInterrupt:
        raise click.exceptions.Exit(INTERRUPTED) from None


# --- featcal history: how runs of `featcal train` have learned, as a table and a picture.

SCORES = tuple(f"val {COLUMNS[key].heading}" for key in SHOWN)
HISTORY_HEADINGS = ("run", "loss", "epochs", "training loss", *SCORES, "lowest val NLL")


@click.command()
@click.argument(
    "folders", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@output_option(f"Picture to write, .png or .svg, of up to {MAX_RUNS} runs.", required=False)
@FORCE
@JSON
def history(folders: tuple[Path, ...], output: Path | None, force: bool, as_json: bool) -> None:
    """Show how each RUN has learned so far, and draw loss, accuracy, NLL and ECE by epoch.

    RUN is a folder that "featcal train" made or is at work in. Training losses of different kinds
    cannot be compared; scores on val can.

    Example: featcal history run-ce run-focal -o history.png
    """
    folders = tuple(dict.fromkeys(folders))
    if output is not None:
        _check_output(output, len(folders), force)
    runs = [History.read(folder) for folder in folders]
    names = _names(folders)
    if output is not None:
        labels = (f"{name}: {run.loss}" for name, run in zip(names, runs, strict=True))
        by_name = dict(zip(labels, (run.epochs for run in runs), strict=True))
        save_history(by_name, output, overwrite=force)
    if as_json:
        picture = None if output is None else str(output)
        print_json({"runs": [run.as_json() for run in runs], "output": picture})
        return
    _show([(name, *_cells(run)) for name, run in zip(names, runs, strict=True)])
    typed = " ".join(shlex.quote(str(folder)) for folder in folders)
    say(f"Wrote {output}" if output else f"Draw it: featcal history {typed} -o history.png")


def _check_output(output: Path, runs: int, force: bool) -> None:
    check_picture(output)
    if runs > MAX_RUNS:
        raise InputError(f"{runs} runs are given, and -o draws at most {MAX_RUNS}: give fewer")
    check_free(output, overwrite=force, remedy=OVERWRITE)


def _names(folders: Sequence[Path]) -> list[str]:
    """The folders without what all of them begin with, which tells none apart."""
    if len(folders) == 1 or len({folder.is_absolute() for folder in folders}) > 1:
        return list(map(str, folders))
    shared = os.path.commonpath([folder.parent for folder in folders])
    return [str(folder.relative_to(shared)) if shared else str(folder) for folder in folders]


def _cells(run: History) -> Iterator[str]:
    """The loss of the last epoch, the scores when val was last looked at, and the lowest NLL."""
    last, found = run.epochs[-1], looks(run.epochs)
    stale = found and found[-1][0] != last.epoch
    yield run.loss
    yield f"{last.epoch} of {run.planned}" + (f", val after {found[-1][0]}" if stale else "")
    yield f"{last.loss:.4f}"
    if not found:
        yield from ("-",) * (len(SHOWN) + 1)
        return
    for key in SHOWN:
        yield COLUMNS[key].text(getattr(found[-1][1], key))
    epoch, lowest = min(found, key=lambda pair: pair[1].nll)
    yield f"{COLUMNS['nll'].text(lowest.nll)} (epoch {epoch})"


def _show(rows: Sequence[Sequence[str]]) -> None:
    """A line a run where the terminal is wide enough, else a few: no number is ever cut."""
    table = Table()
    for heading in HISTORY_HEADINGS:
        table.add_column(heading, justify="left" if heading in HISTORY_HEADINGS[:2] else "right")
    for row in rows:
        table.add_row(*row)
    if measured(table) <= console().width:
        console().print(table)
        return
    for name, *cells in rows:
        say(name)
        for heading, cell in zip(HISTORY_HEADINGS[1:], cells, strict=True):
            say(f"  {heading}: {cell}")
