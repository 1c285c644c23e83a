"""The training loop: any network, any loss, one or several processes, killed or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

from featcal.core import dist
from featcal.core.errors import ArgumentError
from featcal.core.progress import tell
from featcal.datasets import Normalisation, Splits, normalisations
from featcal.datasets.normalise import PUBLISHED
from featcal.losses import TrainingLoss
from featcal.train.checkpoint import Checkpoint, Position, fingerprints
from featcal.train.checks import (
    check_finite,
    check_kinds,
    check_logits,
    check_pace,
    check_request,
)
from featcal.train.engine import Engine
from featcal.train.epoch import Epoch, Report
from featcal.train.feed import Feed
from featcal.train.folder import check_place
from featcal.train.graph import GraphStep
from featcal.train.interrupt import Interrupts
from featcal.train.plan import Plan, Rows
from featcal.train.recipe import Recipe
from featcal.train.step import Step, optimizer_of, set_rate
from featcal.train.watch import Batches, Watched, outputs

EVERY = 60.0  # seconds between two checkpoints: what a kill costs at most
Begun = Callable[[Position | None], None]


def train(
    model: nn.Module,
    splits: Splits,
    loss: TrainingLoss,
    recipe: Recipe,
    *,
    engine: Engine | None = None,
    normalise: Normalisation | None = None,
    folder: Path | str | None = None,
    checkpoint_every: float = EVERY,
    watch_every: int = 1,
    report: Report | None = None,
    begun: Begun | None = None,
    about: Mapping[str, Any] | None = None,
) -> tuple[Epoch, ...]:
    """Trains a model in place and returns what was said of every epoch.

    With a folder, the state is kept there now and then, and a run that was killed goes on from it
    when it is started again; on a CPU it then ends with the same weights, bit for bit. Ctrl-C,
    SIGTERM and SIGHUP wait for the end of a step then, the state is kept, and KeyboardInterrupt is
    raised; a second one does not wait.

    Args:
        model: makes logits (n, k) of images (n, 3, h, w); moved to the device, and in eval mode
            at the end.
        splits: train rows, and val rows to watch. `held_out` rows for losses that ask for them.
        loss: what to minimise.
        recipe: how.
        engine: where; the best there is without one.
        normalise: of the pixels; the published one of the data set without it, or that of the
            training images where none is published.
        folder: where the checkpoint lies; None for no files at all. One with a finished run is
            refused.
        checkpoint_every: seconds between two checkpoints.
        watch_every: epochs between two looks at val; the last is always looked at.
        report: called with every epoch.
        begun: called once nothing is left to refuse, with where a killed run stands that is gone
            on with, or None for a new one.
        about: more that must be the same for a killed run to go on, as JSON: the network's name.
    """
    engine = Engine.best() if engine is None else engine
    check_kinds(splits=splits, loss=loss, recipe=recipe, engine=engine)
    check_request(splits, loss, recipe)
    check_pace(watch_every, checkpoint_every)
    folder = None if folder is None else Path(folder)
    if folder is not None:
        check_place(folder)
    pixels = _own(splits) if normalise is None else normalise
    check_kinds(normalise=pixels)
    with _random_numbers(recipe.seed, engine.device), engine.at_work():
        trainer = Trainer(model, splits, loss, recipe, engine, pixels)
        trainer.settings |= about or {}
        going_on = trainer.go_on_from(folder, checkpoint_every)
        if begun is not None and dist.rank() == 0:
            begun(trainer.position if going_on else None)
        return trainer.run(watch_every, report)


def _own(splits: Splits) -> Normalisation:
    """The published values of a data set that has some, or those of its training images."""
    measure = None if splits.name in PUBLISHED else splits.train
    return normalisations(splits.name, measure=measure)[0]


@contextmanager
def _random_numbers(seed: int, device: torch.device) -> Iterator[None]:
    """A run's own random numbers, for networks that draw some; those outside are left alone."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _seed_of(place: tuple[int, ...]) -> int:
    return int(np.random.SeedSequence(place).generate_state(1, np.uint64)[0])


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
        check_logits(model, self.val, len(splits.class_names))
        held = splits.held_out
        self.held_out = None if held is None else Batches(held, normalise, engine.device)
        self.position = Position()
        self.splits, self.interrupts = splits, Interrupts()
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

    def go_on_from(self, folder: Path | None, every: float) -> bool:
        """Takes up the state in a folder, if there is one, and keeps it there from now on."""
        self.every, self.kept = every, monotonic()
        if folder is None:
            return False
        self.checkpoint = Checkpoint(folder, self.settings, fingerprints(self.splits))
        found = self.checkpoint.restore(self.model, self.optimizer)
        if found is None:
            return False
        self.position, state = found
        self.loss = self.loss.restored(state).to(self.engine.device)
        return True

    def run(self, watch_every: int, report: Report | None) -> tuple[Epoch, ...]:
        """Every epoch that is left."""
        # Of several processes each would stop at a step of its own.
        alone = self.checkpoint is not None and dist.world() == 1
        with self.interrupts.held() if alone else nullcontext():
            while self.position.epoch < self.recipe.epochs:
                done = self._watched_epoch(watch_every)
                if done.epoch == self.recipe.epochs:
                    self._keep()
                if report is not None and dist.rank() == 0:
                    report(done)
                self._stop_if_asked()
        self._stop_if_asked()
        self.model.eval()
        return tuple(Epoch.of_json(found) for found in self.position.history)

    def _watched_epoch(self, watch_every: int) -> Epoch:
        done = self._epoch()
        last = done.epoch == self.recipe.epochs
        if last or done.epoch % watch_every == 0:
            done = replace(done, watched=self._watched())
        history = (*self.position.history, done.as_json())
        self.position = Position(epoch=done.epoch, history=history)
        return done

    def _epoch(self) -> Epoch:
        epoch, first = self.position.epoch, self.position.step
        plan = Plan.of(self.recipe, epoch, self.rows).to(self.engine.device)
        self.step.loss = self.loss.at(epoch / self.recipe.epochs)
        total = torch.tensor(self.position.total, dtype=torch.float64, device=self.engine.device)
        self.model.train()
        started = monotonic() - self.position.seconds
        rates = [self.recipe.rate_at(epoch + step / len(plan)) for step in range(len(plan))]
        for step, rows in enumerate(plan.steps(first), start=first):
            set_rate(self.optimizer, rates[step])
            self._draw_as_at(epoch, step)
            total += self._taken(rows)
            tell("training", epoch * len(plan) + step + 1, self.recipe.epochs * len(plan))
            if self.interrupts.asked or monotonic() - self.kept >= self.every:
                self._stand(step + 1, total.item(), monotonic() - started)
                self._stop_if_asked()
                self._keep()
        # What is over when processes share the last batch is seen by none of them.
        loss = total.item() / (self.rows - self.rows % self.recipe.batch % dist.world())
        seconds = monotonic() - started
        self._check_finite(torch.tensor(loss), f"the loss is {loss}")
        self._adapt()
        return Epoch(epoch + 1, max(rates), loss, seconds)

    def _check_finite(self, found: Tensor, what: str) -> None:
        path = None if self.checkpoint is None else self.checkpoint.path
        check_finite(found, what, self.position.epoch, self.recipe, path)

    def _draw_as_at(self, epoch: int, step: int) -> None:
        """Gives every process but the first random numbers by its rank and the step.

        Each drops other units, and goes on after a kill as if it had not stopped: the state of
        random numbers in the checkpoint is that of the first alone.
        """
        if dist.rank():
            torch.manual_seed(_seed_of((self.recipe.seed, dist.rank(), epoch, step)))

    def _stand(self, step: int, total: float, seconds: float) -> None:
        self.position = replace(self.position, step=step, total=total, seconds=seconds)

    def _stop_if_asked(self) -> None:
        if self.interrupts.asked:
            self._keep()
            raise KeyboardInterrupt

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
            raise ArgumentError(
                f"the last batch of an epoch has one row, and the network cannot learn from it "
                f"({error}): choose another <batch> than {self.recipe.batch}"
            ) from error
        return dist.total(loss.double() * len(mine.images))

    def _adapt(self) -> None:
        """Lets the loss look at its own rows; every process must see the same network there."""
        self._same_statistics()
        if self.held_out is not None and self.loss.needs_held_out:
            adapted = self.loss.updated(*self._outputs(self.held_out)).state()
            for key, kept in self.loss.state().items():
                kept.copy_(adapted[key])  # in place: a captured graph reads it where it lies

    def _same_statistics(self) -> None:
        if dist.world() > 1:
            for buffer in self.model.buffers():
                torch_dist.broadcast(buffer, 0)

    def _watched(self) -> Watched:
        return Watched.of(*self._outputs(self.val))

    def _outputs(self, batches: Batches) -> tuple[Tensor, Tensor]:
        """Logits and labels; weights can be beyond all numbers before the mean loss is."""
        logits, labels = outputs(self.model, batches, self.engine.precision)
        self._check_finite(logits, "the network's outputs are NaN or infinite")
        return logits, labels

    def _keep(self) -> None:
        if self.checkpoint is not None and dist.rank() == 0:
            self.checkpoint.save(self.model, self.optimizer, self.loss.state(), self.position)
        self.kept = monotonic()
