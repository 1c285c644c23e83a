"""What featcal train does: a run from images to a pack, and what it says meanwhile.

Apart from its options, for it needs torch all over.
"""

from __future__ import annotations

import ast
import inspect
import shlex
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from statistics import median
from types import SimpleNamespace
from typing import Any, final

import torch
from torch import nn

from featcal.cli import app
from featcal.cli.packs import named_function
from featcal.cli.train import FOLDER, SHOWN, train
from featcal.core import dist
from featcal.core.checks import ArgumentError, InputError
from featcal.core.fit import undisturbed
from featcal.core.table import Table, spelled
from featcal.core.text import NO_LITERAL
from featcal.data.collect import collect
from featcal.data.resume import collect_pack
from featcal.datasets import Splits, load_images, normalisations, split
from featcal.datasets.images import default_val
from featcal.losses import TrainingLoss, parse_loss
from featcal.metrics.columns import COLUMNS
from featcal.models import build, network_options
from featcal.train import Engine, Epoch, Recipe, published_loss
from featcal.train import train as run_training
from featcal.train.history import Batches, Watched, outputs
from featcal.train.loop import check_targets, full_precision, write_run
from featcal.train.run_folder import CHECKPOINT, PACK, Position, check_folder

HEADINGS = ("epoch", "rate", "loss", "val accuracy", "val ECE", "seconds")
WIDTHS = (9, 10, 10, 14, 10, 9)


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
