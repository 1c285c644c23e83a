"""The training loop: any network, any loss, one or several processes, killed or not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any, final

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

from featcal.core import dist
from featcal.core.arguments import check_whole
from featcal.core.errors import InputError
from featcal.core.fitting import undisturbed
from featcal.core.progress import tell
from featcal.datasets import Normalisation, Splits, normalisations
from featcal.losses import TrainingLoss
from featcal.train.checkpoint import Checkpoint, Position
from featcal.train.engine import Engine
from featcal.train.feed import Feed
from featcal.train.graph import GraphStep
from featcal.train.plan import Plan, Rows
from featcal.train.recipe import Recipe
from featcal.train.step import Step, optimizer_of, set_rate
from featcal.train.watch import Batches, Watched, outputs

EVERY = 60.0  # seconds between two checkpoints: what a kill costs at most


@final
@dataclass(frozen=True)
class Epoch:
    """What is said of an epoch.

    Attributes:
        epoch: counted from 1.
        rate: the learning rate it began with.
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
        own = {key: found[key] for key in ("epoch", "rate", "loss", "seconds")}
        seen = {key: found[key] for key in ("nll", "accuracy", "ece") if key in found}
        return cls(**own, watched=Watched(**seen) if seen else None)


Report = Callable[[Epoch], None]


def train(
    model: nn.Module,
    splits: Splits,
    loss: TrainingLoss,
    recipe: Recipe,
    *,
    engine: Engine | None = None,
    normalise: Normalisation | None = None,
    folder: Path | None = None,
    checkpoint_every: float = EVERY,
    watch_every: int = 1,
    report: Report | None = None,
    about: Mapping[str, Any] | None = None,
) -> tuple[Epoch, ...]:
    """Trains a model in place and returns what was said of every epoch.

    With a folder, the state is kept there now and then, and a run that was killed goes on from it
    when it is started again; on a CPU it then ends with the same weights, bit for bit.

    Args:
        model: makes logits (n, k) of images (n, 3, h, w); moved to the device, and in eval mode
            at the end.
        splits: train rows, and val rows to watch. `held_out` rows for losses that ask for them.
        loss: what to minimise.
        recipe: how.
        engine: where; the best there is without one.
        normalise: of the pixels; the data set's own without it.
        folder: where the checkpoint lies; None for no files at all.
        checkpoint_every: seconds between two checkpoints.
        watch_every: epochs between two looks at val; the last is always looked at.
        report: called with every epoch.
        about: more that must be the same for a killed run to go on, as JSON: the network's name.
    """
    engine = Engine.best() if engine is None else engine
    _check_batch(recipe, len(splits.train))
    if loss.needs_held_out and splits.held_out is None:
        raise InputError(
            f"{loss!r} adapts to rows of its own: cut them from train with split(held_out=5000)"
        )
    pixels = normalisations(splits.name)[0] if normalise is None else normalise
    check_whole("train", 1, watch_every=watch_every)
    if not checkpoint_every >= 0:
        raise InputError(f"checkpoint_every is {checkpoint_every}: give seconds, from 0 up")
    with _random_numbers(recipe.seed, engine.device), engine.at_work():
        trainer = Trainer(model, splits, loss, recipe, engine, pixels)
        trainer.settings |= about or {}
        trainer.go_on_from(folder, checkpoint_every)
        return trainer.run(watch_every, report)


def _check_batch(recipe: Recipe, rows: int) -> None:
    if recipe.batch > rows:
        raise InputError(f"recipe: batch is {recipe.batch}, and train has {rows} rows: lower it")
    if recipe.batch % dist.world():
        raise InputError(
            f"recipe: batch is {recipe.batch}: give a multiple of the {dist.world()} processes"
        )


@torch.no_grad()
def _check_logits(model: nn.Module, batches: Batches, classes: int) -> None:
    """Refuses a network that was made for other data, before anything is trained."""
    images, _ = next(iter(batches))
    with undisturbed(model):
        given = model(images[:2])
    if not isinstance(given, Tensor) or given.ndim != 2:
        what = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
        raise InputError(f"the model gives {what} of two images: it must give logits (n, classes)")
    if given.shape[1] != classes:
        raise InputError(
            f"the model gives {given.shape[1]} logits, and there are {classes} classes: "
            f"build it for {classes}"
        )


@contextmanager
def _random_numbers(seed: int, device: torch.device) -> Iterator[None]:
    """A run's own random numbers, for networks that draw some; those outside are left alone."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


class Trainer:
    """A run under way."""

    def __init__(
        self,
        model: nn.Module,
        splits: Splits,
        loss: TrainingLoss,
        recipe: Recipe,
        engine: Engine,
        normalise: Normalisation,
    ) -> None:
        self.model: nn.Module = model.to(engine.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.recipe, self.engine, self.rows = recipe, engine, len(splits.train)
        self.optimizer = optimizer_of(model, recipe)
        feed = Feed(splits.train, normalise, engine.device)
        whole = self._together()
        state = {key: value.clone() for key, value in loss.state().items()}
        self.loss = loss.restored(state).to(engine.device)  # its state is changed in place
        self.step = Step(
            whole, engine.network(whole), feed, self.loss, self.optimizer, recipe, engine.precision
        )
        self.take = GraphStep(self.step) if engine.graph else self.step
        self.val = Batches(splits.val, normalise, engine.device)
        _check_logits(model, self.val, len(splits.class_names))
        held = splits.held_out
        self.held_out = None if held is None else Batches(held, normalise, engine.device)
        self.position = Position()
        self.checkpoint: Checkpoint | None = None
        self.settings = {
            **{"dataset": splits.name, "rows": self.rows, "loss": repr(loss)},
            **{"recipe": recipe.as_json(), "precision": str(engine.precision)},
        }

    def _together(self) -> nn.Module:
        """The model, or what averages its gradients over the processes."""
        if dist.world() == 1:
            return self.model
        device = self.engine.device
        ids = [device] if device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(self.model, device_ids=ids)

    def go_on_from(self, folder: Path | None, every: float) -> None:
        """Takes up the state in a folder, if there is one, and keeps it there from now on."""
        self.every, self.kept = every, monotonic()
        if folder is None:
            return
        if not folder.is_dir():
            raise InputError(f"folder {folder} does not exist: make it first, or pass None")
        self.checkpoint = Checkpoint(folder, self.settings)
        found = self.checkpoint.restore(self.model, self.optimizer)
        if found is not None:
            self.position, state = found
            self.loss = self.loss.restored(state).to(self.engine.device)

    def run(self, watch_every: int, report: Report | None) -> tuple[Epoch, ...]:
        """Every epoch that is left."""
        while self.position.epoch < self.recipe.epochs:
            done = self._epoch()
            last = done.epoch == self.recipe.epochs
            if last or done.epoch % watch_every == 0:
                done = replace(done, watched=self._watched())
            history = (*self.position.history, done.as_json())
            self.position = Position(epoch=done.epoch, history=history)
            if last:
                self._keep()
            if report is not None and dist.rank() == 0:
                report(done)
        self.model.eval()
        return tuple(Epoch.of_json(found) for found in self.position.history)

    def _epoch(self) -> Epoch:
        epoch, first = self.position.epoch, self.position.step
        plan = Plan.of(self.recipe, epoch, self.rows).to(self.engine.device)
        self.step.loss = self.loss.at(epoch / self.recipe.epochs)
        total = torch.tensor(self.position.total, dtype=torch.float64, device=self.engine.device)
        self.model.train()
        started = monotonic()
        for step, rows in enumerate(plan.steps(first), start=first):
            set_rate(self.optimizer, self.recipe.rate_at(epoch + step / len(plan)))
            total += self._taken(rows)
            tell("training", epoch * len(plan) + step + 1, self.recipe.epochs * len(plan))
            if monotonic() - self.kept >= self.every:
                self.position = replace(self.position, step=step + 1, total=total.item())
                self._keep()
        # What is over when processes share the last batch is seen by none of them.
        loss = total.item() / (self.rows - self.rows % self.recipe.batch % dist.world())
        seconds = monotonic() - started
        self._check_finite(loss, epoch)
        self._adapt()
        return Epoch(epoch + 1, self.recipe.rate_at(epoch), loss, seconds)

    def _taken(self, rows: Rows) -> Tensor:
        """Takes a step; the summed loss of its rows on all processes."""
        mine = rows.of_rank(dist.rank(), dist.world())
        if not len(mine.images):
            return torch.zeros((), device=self.engine.device)
        try:
            loss = self.take(mine)
        except ValueError as error:
            if len(mine.images) > 1:
                raise
            # Batch normalisation of one row with maps of one pixel: there is nothing to average.
            raise InputError(
                f"the last batch of an epoch has one row, and the network cannot learn from it "
                f"({error}): choose another batch than {self.recipe.batch}"
            ) from error
        return dist.total(loss.double() * len(mine.images))

    def _check_finite(self, loss: float, epoch: int) -> None:
        if not math.isfinite(loss):
            raise InputError(
                f"the loss is {loss} after epoch {epoch + 1}: lower lr ({self.recipe.lr:g}), or "
                "limit the gradients with clip_norm"
            )

    def _adapt(self) -> None:
        """Lets the loss look at its own rows; every process must see the same network there."""
        self._same_statistics()
        if self.held_out is not None and self.loss.needs_held_out:
            found = outputs(self.model, self.held_out, self.engine.precision)
            adapted = self.loss.updated(*found).state()
            for key, kept in self.loss.state().items():
                kept.copy_(adapted[key])  # in place: a captured graph reads it where it lies

    def _same_statistics(self) -> None:
        if dist.world() > 1:
            for buffer in self.model.buffers():
                torch_dist.broadcast(buffer, 0)

    def _watched(self) -> Watched:
        return Watched.of(*outputs(self.model, self.val, self.engine.precision))

    def _keep(self) -> None:
        if self.checkpoint is not None and dist.rank() == 0:
            self.checkpoint.save(self.model, self.optimizer, self.loss.state(), self.position)
        self.kept = monotonic()
