"""What `featcal train` is asked for, refused before anything is read where it cannot be."""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from featcal.cli.target import named_function
from featcal.cli.train_words import as_typed
from featcal.core.call_text import NO_LITERAL
from featcal.core.errors import InputError
from featcal.datasets import ImageData, Splits, load_images, normalisations, split
from featcal.datasets.normalise import TestNorm
from featcal.datasets.split import default_val
from featcal.losses import TrainingLoss, parse_loss
from featcal.models import MODELS, build, network_options
from featcal.train import Engine, Recipe, published_loss
from featcal.train.finish import Pixels
from featcal.train.folder import check_folder

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
