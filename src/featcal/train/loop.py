"""The training loop: any network, any loss, one or several processes, killed or not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

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
from featcal.core.stored import reading
from featcal.datasets import Normalisation, Splits, normalisations
from featcal.datasets.images import PUBLISHED, default_val
from featcal.losses import TrainingLoss
from featcal.report.compare import versions
from featcal.train import run_folder
from featcal.train.engine import Engine, Feed, GraphStep, Step, optimizer_of, set_rate
from featcal.train.history import Batches, Epoch, Report, Watched, outputs
from featcal.train.recipe import Recipe, Rows, steps_of

EVERY = 60.0  # seconds between two checkpoints: what a kill costs at most
Begun = Callable[[run_folder.Position | None], None]


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
    folder = None if folder is None else Path(folder)
    for name, value, kind, remedy in (
        ("splits", splits, Splits, "those of split(load_images('cifar10', 'data'))"),
        ("loss", loss, TrainingLoss, "a loss, such as CE() or parse_loss('ce')"),
        ("recipe", recipe, Recipe, "a recipe, such as Recipe(epochs=35)"),
    ):
        if not isinstance(value, kind):
            raise InputError(f"{name} is of type {type(value).__name__}: give {remedy}")
    check_whole("train", 1, watch_every=watch_every)
    if not checkpoint_every >= 0:
        raise InputError(f"checkpoint_every is {checkpoint_every!r}: give seconds, from 0 up")
    if folder is not None:
        if not folder.is_dir():
            raise InputError(f"folder {folder} does not exist: make it first, or pass None")
        run_folder.check_unfinished(folder)
    check_targets(loss, recipe)
    rows, world, batch = len(splits.train), dist.world(), recipe.batch
    if batch > rows:
        raise ArgumentError(
            f"<batch> is {batch}, and train has {rows} rows: give a <batch> of {rows} or fewer"
        )
    if batch % world:
        raise ArgumentError(f"<batch> is {batch}: give a multiple of the {world} processes")
    if loss.needs_held_out and splits.held_out is None:
        raise ArgumentError(
            f"{loss!r} adapts to rows of its own: cut them from train, by a <held_out> such as "
            f"{default_val(rows)}"
        )
    if normalise is None:
        measure = None if splits.name in PUBLISHED else splits.train
        normalise = normalisations(splits.name, measure=measure)[0]
    # A run's own random numbers, for networks that draw some; those outside are left alone.
    devices = [engine.device] if engine.device.type == "cuda" else []
    with torch.random.fork_rng(devices), engine.at_work():
        torch.manual_seed(recipe.seed)
        trainer = Trainer(model, splits, loss, recipe, engine, normalise)
        standing = None
        if folder is not None:
            standing = trainer.go_on_from(folder, checkpoint_every, about or {})
        if begun is not None and dist.rank() == 0:
            begun(standing)
        return trainer.run(watch_every, report)


def check_targets(loss: TrainingLoss, recipe: Recipe) -> None:
    """Refuses smoothed labels for a loss that cannot take them."""
    if recipe.smoothing and not loss.soft_targets:
        raise ArgumentError(
            f"<smoothing> makes probabilities of labels, and {loss.name} takes class numbers "
            "alone: leave it out, or choose a loss such as ce"
        )


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
        device = engine.device
        self.model: nn.Module = model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.splits, self.recipe, self.engine = splits, recipe, engine
        self.optimizer = optimizer_of(model, recipe)
        feed = Feed(splits.train, normalise, device)
        whole = self.model
        if dist.world() > 1:  # averages the gradients over the processes
            ids = [device] if device.type == "cuda" else None
            whole = nn.parallel.DistributedDataParallel(self.model, device_ids=ids)
        state = {key: value.clone() for key, value in loss.state().items()}
        self.loss = loss.restored(state).to(device)  # its state is changed in place
        self.step = Step(
            whole, engine.network(whole), feed, self.loss, self.optimizer, recipe, engine.precision
        )
        self.take = GraphStep(self.step) if engine.graph else self.step
        self.val = Batches(splits.val, normalise, device)
        held = splits.held_out
        self.held_out = None if held is None else Batches(held, normalise, device)
        self._check_logits(len(splits.class_names))
        self.position = run_folder.Position()
        self.asked: list[int] = []  # signals to stop
        self.checkpoint: run_folder.Checkpoint | None = None
        self.every, self.kept = EVERY, monotonic()
        self.settings = {
            **{"dataset": splits.name, "rows": len(splits.train), "loss": repr(loss)},
            **{"recipe": recipe.as_json(), "precision": str(engine.precision)},
        }

    @torch.no_grad()
    def _check_logits(self, classes: int) -> None:
        """Refuses a network that was made for other data."""
        images, _ = next(iter(self.val))
        with undisturbed(self.model):
            given = self.model(images[:2])
        if not isinstance(given, Tensor) or given.ndim != 2 or given.shape[1] != classes:
            what = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
            raise InputError(
                f"the model gives {what} of two images: it must give logits (n, {classes}), one "
                "per class"
            )
        whole = (given.double().sum(1) - 1).abs() < 0.01  # a sixteen-bit softmax is this far off
        if bool((given >= 0).all() & whole.all()):
            raise InputError(
                "the model gives probabilities (no number is negative, and each row adds up to 1): "
                "leave its softmax out, for losses and calibrators take logits"
            )

    def go_on_from(
        self, folder: Path, every: float, about: Mapping[str, Any]
    ) -> run_folder.Position | None:
        """Takes up the state in a folder, if there is one, and keeps it there from now on."""
        self.every, self.kept = every, monotonic()
        self.checkpoint = run_folder.Checkpoint(folder, {**self.settings, **about}, self.splits)
        found = self.checkpoint.restore(self.model, self.optimizer)
        if found is None:
            return None
        self.position, state = found
        with reading(self.checkpoint.path, run_folder.REMEDY):
            for epoch in self.position.history:
                Epoch.of_json(epoch)
            self.loss = self.loss.restored(state).to(self.engine.device)
        return self.position

    def run(self, watch_every: int, report: Report | None) -> tuple[Epoch, ...]:
        """Every epoch that is left."""
        # Of several processes each would stop at a step of its own.
        alone = self.checkpoint is not None and dist.world() == 1
        with run_folder.noted(self.asked) if alone else nullcontext():
            while self.position.epoch < self.recipe.epochs:
                done = self._epoch()
                last = done.epoch == self.recipe.epochs
                if last or done.epoch % watch_every == 0:
                    done = replace(done, watched=Watched.of(*self._outputs(self.val)))
                history = (*self.position.history, done.as_json())
                self.position = run_folder.Position(epoch=done.epoch, history=history)
                if last:
                    self._keep()
                if report is not None and dist.rank() == 0:
                    report(done)
                self._stop_if_asked()
        self._stop_if_asked()
        self.model.eval()
        return tuple(Epoch.of_json(found) for found in self.position.history)

    def _epoch(self) -> Epoch:
        """Every step that is left of the epoch; then the loss adapts to its own rows."""
        epoch, first, recipe = self.position.epoch, self.position.step, self.recipe
        rows, device = len(self.splits.train), self.engine.device
        steps = steps_of(recipe, epoch, rows, device)
        self.step.loss = self.loss.at(epoch / recipe.epochs)
        total = torch.tensor(self.position.total, dtype=torch.float64, device=device)
        self.model.train()
        started = monotonic() - self.position.seconds
        rates = [recipe.rate_at(epoch + step / len(steps)) for step in range(len(steps))]
        for step, batch in enumerate(steps[first:], start=first):
            set_rate(self.optimizer, rates[step])
            if dist.rank():
                # Random numbers by rank and step: each process drops other units, and goes on after
                # a kill as if it had not stopped, for the checkpoint has those of the first alone.
                place = np.random.SeedSequence((recipe.seed, dist.rank(), epoch, step))
                torch.manual_seed(int(place.generate_state(1, np.uint64)[0]))
            total += self._taken(batch)
            tell("training", epoch * len(steps) + step + 1, recipe.epochs * len(steps))
            if self.asked or monotonic() - self.kept >= self.every:
                self._check_finite(total, f"the loss is {total.item()}")
                seconds = monotonic() - started
                self.position = replace(
                    self.position, step=step + 1, total=total.item(), seconds=seconds
                )
                self._stop_if_asked()
                self._keep()
        # What is over when processes share the last batch is seen by none of them.
        loss = total.item() / (rows - rows % recipe.batch % dist.world())
        seconds = monotonic() - started
        self._check_finite(torch.tensor(loss), f"the loss is {loss}")
        if dist.world() > 1:  # every process must watch the same network
            for buffer in self.model.buffers():
                torch_dist.broadcast(buffer, 0)
        if self.held_out is not None and self.loss.needs_held_out:
            adapted = self.loss.updated(*self._outputs(self.held_out)).state()
            for key, kept in self.loss.state().items():
                kept.copy_(adapted[key])  # in place: a captured graph reads it where it lies
        return Epoch(epoch + 1, max(rates), loss, seconds)

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

    def _outputs(self, batches: Batches) -> tuple[Tensor, Tensor]:
        """Logits and labels; weights can be beyond all numbers before the mean loss is."""
        logits, labels = outputs(self.model, batches, self.engine.precision)
        self._check_finite(logits, "the network's outputs are NaN or infinite")
        return logits, labels

    def _check_finite(self, found: Tensor, what: str) -> None:
        """Ends a run that has diverged; nothing that goes on from it can be mended."""
        if bool(found.isfinite().all()):
            return
        way = ""
        if self.checkpoint is not None and self.checkpoint.path.exists():
            # Another recipe cannot go on from it, and the same one would end here again.
            folder = self.checkpoint.path.parent
            way = f"; and remove {folder}, which holds this run, or choose another"
        raise ArgumentError(
            f"{what} after epoch {self.position.epoch + 1}: lower <lr> ({self.recipe.lr:g}), or "
            f"limit the gradients with <clip_norm>{way}"
        )

    def _stop_if_asked(self) -> None:
        if self.asked:
            self._keep()
            raise KeyboardInterrupt

    def _keep(self) -> None:
        if self.checkpoint is not None and dist.rank() == 0:
            self.checkpoint.save(self.model, self.optimizer, self.loss.state(), self.position)
        self.kept = monotonic()


def write_run(
    folder: Path | str, model: nn.Module, history: Sequence[Epoch], facts: dict[str, Any]
) -> dict[str, Any]:
    """Writes the weights and then the record, and removes the checkpoint.

    Raises:
        InputError: where the folder holds a finished run; nothing is written then, for weights
            and record must be of one run.
    """
    folder = Path(folder)
    run_folder.check_unfinished(folder)
    weights = {key: value.detach().cpu().clone() for key, value in model.state_dict().items()}
    with new_file(folder / run_folder.WEIGHTS, overwrite=True) as temporary:
        save_file({key: value.contiguous() for key, value in weights.items()}, temporary)
    record = {**facts, "versions": versions(), "epochs": [epoch.as_json() for epoch in history]}
    with new_file(folder / run_folder.RECORD) as temporary:
        temporary.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
    (folder / run_folder.CHECKPOINT).unlink(missing_ok=True)
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
