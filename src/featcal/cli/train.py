"""featcal train and history: a network from images to a pack in one command, and how it learned."""

from __future__ import annotations

import ast
import inspect
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, final

import click
import torch
from torch import nn

from featcal.cli import app
from featcal.cli.packs import named_function
from featcal.core import dist
from featcal.core.checks import ArgumentError, InputError
from featcal.core.files import check_free
from featcal.core.fit import undisturbed
from featcal.core.progress import listen
from featcal.core.table import Table, spelled
from featcal.core.text import NO_LITERAL
from featcal.data.collect import collect
from featcal.data.resume import collect_pack
from featcal.datasets import Splits, load_images, normalisations, split
from featcal.datasets.images import default_val
from featcal.losses import LOSSES, TrainingLoss, parse_loss
from featcal.metrics.columns import COLUMNS
from featcal.models import build, network_options
from featcal.train import Engine, Epoch, History, Recipe, processes, published_loss, save_history
from featcal.train import train as run_training
from featcal.train.engine import PRECISIONS
from featcal.train.history import MAX_RUNS, Batches, Watched, looks, outputs
from featcal.train.loop import check_targets, full_precision, write_run
from featcal.train.run_folder import CHECKPOINT, PACK, Position, check_folder, made_folder

FOLDER = "folder"
PATIENCE = 5.0  # seconds; torchrun looks at its processes ten times in one
ABOVE_ZERO = click.FloatRange(0, min_open=True)
SHOWN = ("accuracy", "ece", "nll")
HEADINGS = ("epoch", "rate", "loss", "val accuracy", "val ECE", "seconds")
WIDTHS = (9, 10, 10, 14, 10, 9)
SCORES = tuple(f"val {COLUMNS[key].heading}" for key in SHOWN)
HISTORY_HEADINGS = ("run", "loss", "epochs", "training loss", *SCORES, "lowest val NLL")


@click.command()
@click.argument("dataset", metavar="DATASET", type=click.Choice(["cifar10", "cifar100", FOLDER]))
@click.argument("network", metavar="NETWORK")
@app.output_option("The folder to make.")
@click.option(
    "--data",
    required=True,
    type=app.PATH,
    help="The folder of the images: CIFAR's binary archive, or train/CLASS/ and test/CLASS/.",
)
@click.option(
    *("--loss", "loss_text"),
    default="ce",
    help=f'{", ".join(sorted(LOSSES))}; with arguments as in "focal(gamma=3)".',
)
@click.option(
    "--budget",
    type=click.FloatRange(0, 1, min_open=True),
    help="A part of the epochs, such as 0.1.  [default: 1]",
)
@click.option("--epochs", type=app.COUNT, help="How many, instead of the published.")
@click.option(
    "--published", is_flag=True, help="Summed losses, gradients clipped to 2, no warm-up."
)
@click.option("--lr", type=ABOVE_ZERO, help="The highest learning rate.  [default: the network's]")
@click.option("--batch", type=app.COUNT, help="Rows of a step.  [default: 128]")
@click.option(
    "--clip-norm", type=ABOVE_ZERO, help="The longest gradient.  [default: any; --published: 2]"
)
@click.option(
    "--schedule", type=click.Choice(["steps", "cosine"]), help="How the learning rate falls."
)
@click.option(
    "--seed",
    default=1,
    type=app.FROM_ZERO,
    help="Of the weights, the order of the images and their shifts.",
)
@click.option("--mixup", type=click.FloatRange(0), help="Mix images by Beta(A, A).  [default: 0]")
@click.option(
    "--smoothing",
    type=click.FloatRange(0, 1, max_open=True),
    help="The part of a label spread over all classes.",
)
@click.option(
    "--val",
    type=app.COUNT,
    help="Training images kept for calibration.  [default: a tenth, at most 5000]",
)
@click.option(
    "--held-out",
    type=app.FROM_ZERO,
    help="More of them for a loss that adapts.  [default: for adafocal as many as in val, at "
    "most a tenth; else 0]",
)
@click.option(
    "--test-norm",
    default="matched",
    type=click.Choice(["matched", "reference"]),
    help="How test images are normalised; reference is the published mismatch.",
)
@click.option("--image-size", type=app.COUNT, help="Of a folder's images, in pixels.")
@click.option("--download", is_flag=True, help="Get CIFAR where the data is not there.")
@click.option(
    *("--network-option", "given_options"),
    multiple=True,
    metavar="NAME=VALUE",
    help="An option of the network, such as width=2; repeat for more.",
)
@app.HEAD
@click.option("--device", help="cpu, cuda, ...  [default: a GPU where there is one]")
@click.option(
    "--precision",
    type=click.Choice(list(PRECISIONS)),
    help="Of the forward pass.  [default: bfloat16 on a GPU]",
)
@click.option("--compile/--no-compile", "compiled", default=None, help="By torch.compile.")
@click.option("--graph/--no-graph", default=None, help="Steps as one CUDA graph.")
@click.option("--no-pack", is_flag=True, help="Write the weights alone, no features.")
@click.option(
    "--watch-every", default=1, type=app.COUNT, help="Epochs between two looks at val, each a line."
)
@click.option(
    "--checkpoint-every",
    default=60.0,
    type=click.FloatRange(0),
    metavar="SECONDS",
    help="What a kill costs at most; 0 for every step.",
)
@app.JSON
def train(**options: Any) -> None:  # noqa: ANN401 - Run has them by their names
    """Train NETWORK on DATASET with a loss that aims at calibration, and make a pack of it.

    DATASET is cifar10, cifar100 or folder. NETWORK is resnet50, resnet110, densenet121, wrn26x10,
    wrn16x4 or vit, or package.module:function, called with the number of classes. 350 epochs as
    published, unless --budget or --epochs says otherwise. A run that was killed goes on where it
    was when the same command is given again; torchrun starts it on several GPUs.

    Example: featcal train cifar10 wrn16x4 -o run --data data --loss "focal(gamma=3)" --budget 0.1
    """
    run, first = Run(**options), dist.launched()[0] == 0
    with _as_one(run.output, first), ExitStack() as stack:
        run.check()
        with processes(run.device):
            if first:
                stack.enter_context(made_folder(run.output))
            run.prepare()
            history = run.train(aloud=first and not run.as_json)
            facts = run.facts(history)
        # Outside of the group: the rest is for one process, and nothing may wait for the others.
        if first:
            run.finish(history, facts)
    if not first:
        # Without the end that Python makes: with torch 2.13 that aborted in one of forty runs
        # ("terminate called without an active exception"; a thread of torch, we think, that still
        # wanted Python), and ended the others, too.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


@contextmanager
def _as_one(output: Path, first: bool) -> Iterator[None]:
    """Of several processes the first speaks; the others draw no bar, and go quietly."""
    if first:
        with app.going_on_later(output / CHECKPOINT):
            yield
        return
    try:
        with listen(lambda *_: None):
            yield
    except InputError:
        # The first refuses the same, and torchrun ends the others with it. Were one of them to
        # leave at once, torchrun would end the first, maybe before it has spoken; what one of them
        # alone refuses is said late.
        time.sleep(PATIENCE)
        raise
    except KeyboardInterrupt:
        raise click.exceptions.Exit(app.INTERRUPTED) from None


@final
class Run(SimpleNamespace):
    """The arguments and options of the command under their own names, and what becomes of them.

    `check` refuses what it can before an image is read; `prepare` adds the engine, the splits,
    the rows of each of their parts, the pixels' normalisation (train and val, and test), and the
    model.
    """

    def check(self) -> None:
        """Refuses what cannot be done, before any image is read."""
        check_folder(self.output)
        if self.is_function:  # first: its module may hold a loss of the user's own
            named_function(self.network, "a network")
        else:
            with torch.device("meta"):  # no memory, no random numbers
                build(self.network, 2, **self.options)
        check_targets(self.loss, self.recipe)
        self._engine()

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

    def _engine(self) -> Engine:
        """Where to run; asked for anew once the processes know each other."""
        return Engine.best(
            self.device, precision=self.precision, compiled=self.compiled, graph=self.graph
        )

    def prepare(self) -> None:
        """Reads the images, builds the network, and refuses one that could not become a pack."""
        self.engine = self._engine()
        with app.progress_bar():
            # Of several processes the first downloads, and the others find the images there.
            waits = self.download and dist.rank() > 0
            splits = None if waits else self._splits()
            dist.total(torch.zeros(1))  # nobody goes on before the first is done
            self.splits = splits = self._splits() if splits is None else splits
        parts = {part: getattr(splits, part) for part in ("train", "val", "test", "held_out")}
        self.rows = {part: len(images) for part, images in parts.items() if images is not None}
        measure = splits.train if self.dataset == FOLDER else None
        self.pixels = normalisations(splits.name, self.test_norm, measure=measure)
        # All that the network is built again by: its options, and what the images ask of it.
        self.network_options = self.options
        if not self.is_function and "image_size" in network_options(self.network):
            self.network_options = {"image_size": splits.train.size[0], **self.options}
        torch.manual_seed(self.seed)
        self.model = self._model(len(splits.class_names))
        self._try()

    def _splits(self) -> Splits:
        """The images, read and cut."""
        data = load_images(
            self.dataset, self.data, download=self.download, image_size=self.image_size
        )
        held_out = self.held_out
        if held_out is None:
            # What the published AdaFocal adapts to is val itself; a large one would cost too much.
            images = len(data.train)
            val = (self.val or default_val(images)) if data.val is None else len(data.val)
            held_out = max(1, min(val, images // 10)) if self.loss.needs_held_out else 0
        return split(data, val=self.val, held_out=held_out)

    def _model(self, classes: int) -> nn.Module:
        """A fresh network, its weights drawn from torch's random state."""
        if not self.is_function:
            return build(self.network, classes, **self.network_options)
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

    def _try(self) -> None:
        """Feeds two images to the network."""
        val = self.splits.val
        two = val.rows(torch.arange(min(2, len(val))))
        batches = Batches(two, self.pixels[0], torch.device("cpu"))
        try:
            if self.no_pack:
                with torch.no_grad(), undisturbed(self.model):
                    self.model(next(iter(batches))[0])
            else:
                collect(self.model, batches, head=self.head)
        except InputError as error:
            raise InputError(
                f"{error}; here: --head PATH, or --no-pack to train without a pack"
            ) from error
        except RuntimeError as error:
            images = f"images of {two.size[0]} x {two.size[1]} pixels"
            if self.is_function:  # the traceback leads to the line
                error.add_note(f"{self.network} was given two {images}, of shape (2, 3, h, w)")
                raise
            size = "another --image-size, or " if self.dataset == FOLDER else "another network, or "
            raise InputError(
                f"{self.network} cannot take {images} ({error}): give {size}other options of the "
                "network"
            ) from error

    def train(self, *, aloud: bool) -> tuple[Epoch, ...]:
        """Trains the network in place; aloud where people read along."""
        keys = ("rows", "network", "options", "image_size", "test_norm")
        try:
            with app.progress_bar():
                return run_training(
                    self.model,
                    self.splits,
                    self.loss,
                    self.recipe,
                    engine=self.engine,
                    normalise=self.pixels[0],
                    folder=self.output,
                    checkpoint_every=self.checkpoint_every,
                    watch_every=self.watch_every,
                    report=_epoch_lines(self.recipe.epochs) if aloud else None,
                    begun=self._introduce if aloud else None,
                    about={key: getattr(self, key) for key in keys},
                )
        except ArgumentError as error:
            raise InputError(error.sentence(setting_name)) from error

    def _introduce(self, standing: Position | None) -> None:
        recipe = self.recipe
        counts = ", ".join(f"{n:,} {part.replace('_', ' ')}" for part, n in self.rows.items())
        options = "".join(f", {key} {value}" for key, value in self.options.items())
        what = f"{self.network}{options}, {self.loss!r}: {recipe.epochs} epoch"
        what += f"{'' if recipe.epochs == 1 else 's'}, batch {recipe.batch}, {recipe.optimizer}, "
        what += f"rate {recipe.lr:g}, {recipe.schedule}"
        what += f", gradients clipped to {recipe.clip_norm:g}" if recipe.clip_norm else ""
        for key in ("mixup", "smoothing"):
            what += f", {key} {getattr(recipe, key):g}" if getattr(recipe, key) else ""
        where = self.engine.as_json()
        tricks = [key for key in ("compiled", "graph") if where[key]]
        several = [f"{dist.world()} processes"] if dist.world() > 1 else []
        lines = [
            f"{self.splits.name}: {counts} ({self.splits.how})",
            f"{what}, seed {recipe.seed}",
            ", ".join([where["device"], where["precision"], *tricks, *several]),
        ]
        if standing is not None:
            steps = -(-len(self.splits.train) // recipe.batch)
            place = f"epoch {standing.epoch + 1}, step {standing.step + 1} of {steps}"
            if standing.epoch == recipe.epochs:
                place = "every epoch is done"
            elif standing.step == steps:  # what is still to be watched
                place = f"end of epoch {standing.epoch + 1}"
            lines.append(f"Going on from {self.output / CHECKPOINT}: {place}")
        # Not by rich, which would write through the bar.
        print(spelled("\n".join(lines)), flush=True)

    def facts(self, history: tuple[Epoch, ...]) -> dict[str, Any]:
        """How the network came about, for its record and its pack."""
        seconds = [epoch.seconds for epoch in history]
        return {
            **{"dataset": self.splits.name, "network": self.network},
            "network_options": self.network_options,
            "classes": len(self.splits.class_names),
            **{"loss": repr(self.loss), "seed": self.seed},
            "recipe": {**self.recipe.as_json(), "reduction": self.loss.reduction},
            **self.engine.as_json(),
            "test_norm": self.test_norm,
            "normalise": dict(zip(("train", "test"), map(vars, self.pixels), strict=True)),
            **{"rows": self.rows, "split": self.splits.how},
            **{"seconds": sum(seconds), "seconds_epoch": median(seconds)},
        }

    def finish(self, history: tuple[Epoch, ...], facts: dict[str, Any]) -> None:
        """Scores the network, writes what a run leaves, and says what to type next.

        Val and test are seen in full float32, whatever the network was trained in.
        """
        output, splits, device = self.output, self.splits, next(self.model.parameters()).device
        parts = zip(("val", "test"), (splits.val, splits.test), self.pixels, strict=True)
        loaders = {name: Batches(images, pixels, device) for name, images, pixels in parts}
        record = {**facts, "class_names": splits.class_names, "image_size": splits.train.size}
        with app.progress_bar(), full_precision():
            record["scores"] = {
                name: dict(vars(Watched.of(*outputs(self.model, loader, torch.float32))))
                for name, loader in loaders.items()
            }
            # One that is there already is of this very run, killed between this and its record.
            if not self.no_pack and not (output / PACK).exists():
                about = {"dataset": splits.name, "name": self.network, "meta": facts}
                about |= {"class_names": splits.class_names, "head": self.head}
                collect_pack(self.model, loaders, output / PACK, **about)
            record = write_run(output, self.model, history, record)
        headings = ("split", *(COLUMNS[key].heading for key in SHOWN))
        rows = tuple(
            (part, *(COLUMNS[key].text(found[key]) for key in SHOWN))
            for part, found in record["scores"].items()
        )
        look = f"featcal history {shlex.quote(str(output))} -o history.png"
        next_steps = [
            "No pack was made (--no-pack): featcal collect makes one of a network of yours",
            f"Next: {look}",
        ]
        if not self.no_pack:
            path = shlex.quote(str(output / PACK))
            next_steps = [
                f"Next: featcal compare {path}",
                f"  or: featcal fit {path} auto -o cal.safetensors",
                f"  or: {look}",
            ]
        if self.as_json:
            app.print_json({**record, "output": str(output)})
        else:
            app.say(Table("before calibration", headings, rows), f"Wrote {output}", *next_steps)


def setting_name(setting: str) -> str:
    """What sets a setting of a run, such as --lr for recipe.lr."""
    group, _, name = setting.rpartition(".")
    if group == "options":
        return f"--network-option {name}"
    if group == "rows":
        return f"rows of {name.replace('_', ' ')}"
    if setting in ("dataset", "network"):
        return setting.upper()
    known = any(app.option_of(name) in parameter.opts for parameter in train.params)
    return app.option_of(name) if known else setting


def _epoch_lines(epochs: int) -> Callable[[Epoch], None]:
    """Prints a line for every epoch that was watched, under one heading."""
    heading = [" ".join(map(str.rjust, HEADINGS, WIDTHS))]

    def tell(epoch: Epoch) -> None:
        if epoch.watched is None:
            return
        seen = [COLUMNS[key].text(getattr(epoch.watched, key)) for key in ("accuracy", "ece")]
        cells = (f"{epoch.epoch}/{epochs}", f"{epoch.rate:.4g}", f"{epoch.loss:.4f}", *seen)
        line = " ".join(map(str.rjust, (*cells, f"{epoch.seconds:.1f}"), WIDTHS))
        # Not by rich, which would write through the bar; flushed for whoever follows a file.
        try:
            print("\n".join([*heading, line]), flush=True)
        except BrokenPipeError:  # nobody reads any more: as Ctrl-C, so that what is done is kept
            signal.raise_signal(signal.SIGINT)
        heading.clear()

    return tell


@click.command()
@click.argument("folders", metavar="RUN...", nargs=-1, required=True, type=app.PATH)
@app.output_option(f"Picture to write, .png or .svg, of up to {MAX_RUNS} runs.", required=False)
@app.FORCE
@app.answered
def history(folders: tuple[Path, ...], output: Path | None, force: bool) -> app.Answer:
    """Show how each RUN has learned so far, and draw loss, accuracy, NLL and ECE by epoch.

    RUN is a folder that "featcal train" made or is at work in. Training losses of different kinds
    cannot be compared; scores on val can.

    Example: featcal history run-ce run-focal -o history.png
    """
    if output is not None:
        check_free(output, overwrite=force)
    runs = {str(folder): History.read(folder) for folder in folders}
    if output is not None:
        named = {f"{name}: {run.loss}": run.epochs for name, run in runs.items()}
        save_history(named, output, overwrite=force)
    rows = tuple((name, *_cells(run)) for name, run in runs.items())
    picture = None if output is None else str(output)
    return {"runs": [run.as_json() for run in runs.values()], "output": picture}, [
        Table("", HISTORY_HEADINGS, rows),
        f"Wrote {output}"
        if output
        else f"Draw it: featcal history {shlex.join(runs)} -o history.png",
    ]


def _cells(run: History) -> list[str]:
    """The loss of the last epoch, the scores when val was last looked at, and the lowest NLL."""
    last, found = run.epochs[-1], looks(run.epochs)
    stale = found and found[-1][0] != last.epoch
    epochs = f"{last.epoch} of {run.planned}" + (f", val after {found[-1][0]}" if stale else "")
    scores = ["-"] * (len(SHOWN) + 1)
    if found:
        epoch, lowest = min(found, key=lambda pair: pair[1].nll)
        scores = [COLUMNS[key].text(getattr(found[-1][1], key)) for key in SHOWN]
        scores.append(f"{COLUMNS['nll'].text(lowest.nll)} (epoch {epoch})")
    return [run.loss, epochs, f"{last.loss:.4f}", *scores]
