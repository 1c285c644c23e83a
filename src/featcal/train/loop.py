"""The training loop: any network, any loss, one or several processes, killed or not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any, final

import numpy as np
import torch
import torch.distributed as torch_dist
from safetensors.torch import save_file
from torch import Tensor, nn

from featcal.core import dist
from featcal.core.checks import ArgumentError, InputError, check_whole
from featcal.core.files import new_file
from featcal.core.fit import undisturbed
from featcal.core.progress import tell
from featcal.data import Pack
from featcal.data.resume import collect_pack
from featcal.datasets import Normalisation, Splits, normalisations
from featcal.datasets.images import PUBLISHED, default_val
from featcal.losses import TrainingLoss
from featcal.report.compare import versions
from featcal.train.engine import Engine
from featcal.train.history import Batches, Epoch, Report, Watched, outputs
from featcal.train.recipe import Plan, Recipe, Rows
from featcal.train.run_folder import FILE as CHECKPOINT
from featcal.train.run_folder import (
    PACK,
    RECORD,
    WEIGHTS,
    Checkpoint,
    Interrupts,
    Position,
    check_place,
    check_unfinished,
    fingerprints,
)
from featcal.train.step import Feed, GraphStep, Step, optimizer_of, set_rate

# --- What a run is refused for, before anything is trained or when it has come to nothing.


@final
class Diverged(InputError):
    """A run whose numbers are none any more; nothing that goes on from it can be."""

    def __init__(self, what: str, epoch: int, recipe: Recipe, folder: Path | None) -> None:
        self.what, self.epoch, self.recipe, self.folder = what, epoch, recipe, folder
        super().__init__(self.sentence("lr", "clip_norm"))

    def sentence(self, lr: str, clip_norm: str) -> str:
        """What to change, by the names the reader knows it under, and what is in the way of it."""
        clip = f"limit the gradients with {clip_norm}"
        if self.recipe.clip_norm is not None:
            clip = f"lower {clip_norm} ({self.recipe.clip_norm:g})"
        # Another recipe cannot go on from the checkpoint, and the same one would end here again.
        way = f"; and remove {self.folder}, which holds this run, or choose another"
        return (
            f"{self.what} after epoch {self.epoch}: lower {lr} ({self.recipe.lr:g}), "
            f"or {clip}{way if self.folder else ''}"
        )


# What people give by mistake has a name of its own, and this is what they meant.
KINDS = {
    "splits": (Splits, "the parts of the images, as in split(load_images('cifar10', 'data'))"),
    "loss": (TrainingLoss, "a loss, such as CE() or parse_loss('ce')"),
    "recipe": (Recipe, "a recipe, such as Recipe(epochs=35)"),
    "engine": (Engine, "an engine, such as Engine.best('cpu')"),
    "normalise": (Normalisation, "one normalisation, as in normalisations('cifar10')[0]"),
}


def check_kinds(**given: object) -> None:
    """Refuses arguments of another kind than they must be."""
    for name, value in given.items():
        kind, remedy = KINDS[name]
        if kind is TrainingLoss and isinstance(value, str):
            remedy = f"parse_loss({value!r})"
        if not isinstance(value, kind):
            raise InputError(f"{name} is {_what(value)}: give {remedy}")


def _what(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return repr(value) if isinstance(value, (str, int, float)) else type(value).__name__


def check_request(splits: Splits, loss: TrainingLoss, recipe: Recipe) -> None:
    """Refuses a loss and a recipe that do not go together, or not with the rows."""
    rows = len(splits.train)
    if recipe.batch > rows:
        raise ArgumentError(
            f"<batch> is {recipe.batch}, and train has {rows} rows: give a <batch> of {rows} or "
            "fewer"
        )
    if recipe.batch % dist.world():
        raise ArgumentError(
            f"<batch> is {recipe.batch}: give a multiple of the {dist.world()} processes"
        )
    if recipe.smoothing and not loss.soft_targets:
        raise ArgumentError(
            f"<smoothing> is {recipe.smoothing}, which makes probabilities of labels, and "
            f"{loss.name} takes class numbers alone: leave <smoothing> out, or choose a loss such "
            "as ce"
        )
    if loss.needs_held_out and splits.held_out is None:
        raise InputError(
            f"{loss!r} adapts to rows of its own: cut them from train, such as with "
            f"split(..., held_out={default_val(rows)})"
        )


def check_pace(watch_every: int, checkpoint_every: float) -> None:
    """Refuses looks at val and checkpoints that would never come."""
    check_whole("train", 1, watch_every=watch_every)
    number = isinstance(checkpoint_every, (int, float))
    if not number or not checkpoint_every >= 0:
        raise InputError(f"checkpoint_every is {checkpoint_every!r}: give seconds, from 0 up")


@torch.no_grad()
def check_logits(model: nn.Module, batches: Batches, classes: int) -> None:
    """Refuses a network that was made for other data."""
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
    whole = (given.double().sum(1) - 1).abs() < 0.01  # a sixteen-bit softmax is this far off
    if bool((given >= 0).all() & whole.all()):
        raise InputError(
            "the model gives probabilities (no number is negative, and each row adds up to 1): "
            "leave its softmax out, for losses and calibrators take logits"
        )


def check_finite(
    found: Tensor, what: str, epoch: int, recipe: Recipe, checkpoint: Path | None
) -> None:
    """Ends a run that has diverged in an epoch, counted from 0."""
    if bool(found.isfinite().all()):
        return
    kept = checkpoint is not None and checkpoint.exists()
    raise Diverged(what, epoch + 1, recipe, checkpoint.parent if checkpoint and kept else None)


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


# --- What a run leaves: the weights, a record of how they came about, and a pack to calibrate on.

Pixels = tuple[Normalisation, Normalisation]  # of train and val, and of test


def write_pack_of(
    model: nn.Module,
    splits: Splits,
    folder: Path,
    *,
    normalise: Pixels,
    network: str,
    facts: dict[str, Any],
    head: str | None = None,
) -> Pack:
    """The features of val and test in full float32, whatever the network was trained in.

    A pack that is there already is of this very run, which was killed between this and its record.
    """
    if (folder / PACK).exists():
        return Pack.open(folder / PACK)
    with full_precision():
        return collect_pack(
            model,
            _loaders(model, splits, normalise),
            folder / PACK,
            head=head,
            dataset=splits.name,
            name=network,
            class_names=splits.class_names,
            meta=facts,
        )


def scores_of(model: nn.Module, splits: Splits, normalise: Pixels) -> dict[str, dict[str, float]]:
    """How the finished network does on val and on test, in full float32."""
    with full_precision():
        return {
            split: Watched.of(*outputs(model, loader, torch.float32)).as_json()
            for split, loader in _loaders(model, splits, normalise).items()
        }


def _loaders(model: nn.Module, splits: Splits, normalise: Pixels) -> dict[str, Batches]:
    device = next(model.parameters()).device
    parts = {"val": (splits.val, normalise[0]), "test": (splits.test, normalise[1])}
    return {split: Batches(*part, device) for split, part in parts.items()}


def write_run(
    folder: Path | str, model: nn.Module, history: Sequence[Epoch], facts: dict[str, Any]
) -> dict[str, Any]:
    """Writes the weights and then the record, and removes the checkpoint.

    Raises:
        InputError: where the folder holds a finished run; nothing is written then, for weights
            and record must be of one run.
    """
    folder = Path(folder)
    check_unfinished(folder)
    weights = {key: value.detach().cpu().clone() for key, value in model.state_dict().items()}
    with new_file(folder / WEIGHTS, overwrite=True) as temporary:
        save_file({key: value.contiguous() for key, value in weights.items()}, temporary)
    record = {**facts, "versions": versions(), "epochs": [epoch.as_json() for epoch in history]}
    with new_file(folder / RECORD) as temporary:
        temporary.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
    (folder / CHECKPOINT).unlink(missing_ok=True)
    return record


@contextmanager
def full_precision() -> Iterator[None]:
    """No TF32 in the block: ten bits of a product are too few to fit thresholds on."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before
