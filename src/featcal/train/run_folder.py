"""The folder of a run: its checkpoint, who may write there, when it is taken, and Ctrl-C.

A checkpoint is one safetensors file with all that a run needs to go on as if it had never stopped.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, final

import torch
from safetensors import safe_open
from torch import Tensor, nn

from featcal.core.checks import ArgumentError, InputError
from featcal.core.files import LOCK, REMOVE, check_free, left_over_of, locked, new_file
from featcal.core.stored import json_of, made, read_tensors, reading, save_tensors
from featcal.datasets import Splits

CHECKPOINT, WEIGHTS = "checkpoint.safetensors", "model.safetensors"
RECORD, PACK = "run.json", "pack"
FORMAT = 2
KEY = "featcal.train"
REMEDY = "choose another folder, or remove this one"
HASHED = 2**28  # bytes of pixels: all of CIFAR, in a fifth of a second; of more, a spread sample
# Ctrl-C; what Slurm and docker send before they kill; a terminal that was closed.
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")


@final
@dataclass(frozen=True)
class Position:
    """Where a run stands.

    Attributes:
        epoch: the one under way, counted from 0.
        step: of the epoch, the next to take.
        total: the summed losses of the epoch's rows so far.
        seconds: of the epoch so far.
        history: what was said of every epoch before.
    """

    epoch: int = 0
    step: int = 0
    total: float = 0.0
    seconds: float = 0.0
    history: tuple[dict[str, Any], ...] = ()


@final
@dataclass(frozen=True)
class About:
    """What a checkpoint says of its run; its tensors are apart."""

    format: int
    settings: dict[str, Any]
    images: dict[str, str]
    position: Position


@final
class Checkpoint:
    """The file of a run; written whole or not at all.

    Attributes:
        path: the file.
        settings: what the run is; a file with other settings is refused.
        images: the fingerprints of its images; a file with others is refused.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], splits: Splits) -> None:
        self.path = folder / CHECKPOINT
        self.settings = json.loads(json.dumps(settings))  # as they will be read back
        self.images = fingerprints(splits)

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: dict[str, Tensor],
        position: Position,
    ) -> None:
        """Writes the state in place of the one before."""
        groups: dict[str, dict[str, Any]] = {"model": model.state_dict(), "loss": loss}
        for index, state in optimizer.state_dict()["state"].items():
            groups[f"optimizer.{index}"] = state
        # For networks that draw random numbers of their own, such as for dropout.
        groups["random"] = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            groups["random"]["cuda"] = torch.cuda.get_rng_state()
        # Copies: safetensors refuses tensors that share memory, such as tied weights.
        tensors = {
            f"{group}.{key}": torch.as_tensor(value)
            .detach()
            .cpu()
            .clone(memory_format=torch.contiguous_format)
            for group, values in groups.items()
            for key, value in values.items()
        }
        about = vars(About(FORMAT, self.settings, self.images, position))
        with new_file(self.path, overwrite=True) as temporary:
            save_tensors(temporary, tensors, {KEY: json.dumps(about, default=vars)})

    def restore(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[Position, dict[str, Tensor]] | None:
        """Puts the state into model and optimiser; None where there is no file yet.

        Raises:
            InputError: for the file of another run, or one that cannot be read.
        """
        if not self.path.exists():
            return None
        with reading(self.path, REMEDY):
            return self._restored(model, optimizer)

    def _restored(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[Position, dict[str, Tensor]]:
        tensors, texts = read_tensors(self.path)
        about = about_of(texts)
        self._check(about)

        def group(name: str) -> dict[str, Tensor]:
            start = f"{name}."
            found = {key: value for key, value in tensors.items() if key.startswith(start)}
            return {key.removeprefix(start): value for key, value in found.items()}

        try:
            model.load_state_dict(group("model"))
        except RuntimeError as error:
            raise InputError(f"{self.path} is of another network: {REMEDY}") from error
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in group("optimizer").items():
            index, _, name = key.partition(".")
            state.setdefault(int(index), {})[name] = value
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": state, "param_groups": groups})
        for weight, kept in optimizer.state.items():
            for key, value in kept.items():
                if value.shape == weight.shape:  # in the weight's own order of memory, as it was
                    kept[key] = torch.empty_like(weight).copy_(value)
        torch.set_rng_state(tensors["random.cpu"])
        if "random.cuda" in tensors and torch.cuda.is_available():
            torch.cuda.set_rng_state(tensors["random.cuda"])
        return about.position, group("loss")

    def _check(self, about: About) -> None:
        theirs, ours = _flat(about.settings), _flat(self.settings)
        keys = [key for key in sorted({*theirs, *ours}) if theirs.get(key) != ours.get(key)]
        if keys:
            told = (f"<{key}> = {theirs.get(key)}, not {ours.get(key)}" for key in keys)
            raise ArgumentError(f"{self.path} is of a run with {'; '.join(told)}: {REMEDY}")
        for part, found in self.images.items():
            if about.images.get(part) != found:
                which = part.replace("_", " ")
                raise InputError(f"{self.path} is of a run with other images in {which}: {REMEDY}")


def said_in(path: Path) -> About:
    """What a checkpoint says of its run, without its tensors."""
    with safe_open(path, "pt") as file:
        return about_of(file.metadata() or {})


def about_of(texts: Mapping[str, str]) -> About:
    """What the texts of a checkpoint say.

    Raises:
        ValueError: for those of another file, or of another version.
    """
    found = json_of(texts.get(KEY, "null"))
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError("it is no checkpoint of this version of featcal train")
    about: About = made(About, found)
    if len(about.position.history) != about.position.epoch:
        raise ValueError(f"it tells of {len(about.position.history)} epochs")
    return about


def fingerprints(splits: Splits) -> dict[str, str]:
    """A hash of the images a run trains on, watches and adapts to, and of their labels."""
    found = {}
    for part in ("train", "val", "held_out"):
        images = getattr(splits, part)
        if images is not None:
            every = -(-images.pixels.numel() // HASHED)
            digest = hashlib.sha256()
            for tensor in (images.labels, images.pixels[::every]):
                digest.update(tensor.cpu().contiguous().numpy().data)
            found[part] = digest.hexdigest()[:16]
    return found


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of settings under names such as recipe.lr, so that a difference can be named."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            flat |= {f"{key}.{name}": found for name, found in value.items()}
        else:
            flat[key] = value
    return flat


def check_unfinished(folder: Path) -> None:
    """Refuses a folder that holds a finished run: nothing is trained that could not be written.

    What a kill after the record left of the work goes.
    """
    if (folder / RECORD).exists():
        with suppress(InputError, OSError), made_folder(folder):
            (folder / CHECKPOINT).unlink(missing_ok=True)
        raise InputError(f"{folder} holds a finished run ({RECORD}): {REMOVE}")


def check_folder(folder: Path) -> None:
    """Refuses a folder that holds a finished run, or anything but a run to go on with."""
    check_unfinished(folder)
    if (folder / CHECKPOINT).exists():
        return
    if not folder.is_dir() or not all(p.name == LOCK or _is_temporary(p) for p in folder.iterdir()):
        check_free(folder, remedy=REMOVE)


@contextmanager
def made_folder(folder: Path) -> Iterator[None]:
    """The folder for one process alone, without what a kill left half written in it.

    A folder that is made here is gone again where nothing came of it.
    """
    new = not folder.exists()
    folder.mkdir(exist_ok=True)
    with locked(folder):
        for path in filter(_is_temporary, list(folder.iterdir())):
            shutil.rmtree(path, ignore_errors=True)
        try:
            yield
        finally:
            (folder / LOCK).unlink(missing_ok=True)
            if new and not any(folder.iterdir()):
                folder.rmdir()


def _is_temporary(path: Path) -> bool:
    return left_over_of(path) in (CHECKPOINT, WEIGHTS, RECORD)


@contextmanager
def noted(asked: list[int]) -> Iterator[None]:
    """Notes signals to stop in a list instead of ending the block.

    Half a step cannot be kept, a whole one can. A second signal does not wait for the end of the
    step; threads other than the main one never see any.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in SIGNALS if hasattr(signal, name)]
    found = {number: signal.getsignal(number) for number in numbers}
    # What is ignored (nohup) stays so, and what is not Python's cannot be put back.
    before = {n: was for n, was in found.items() if was not in (signal.SIG_IGN, None)}

    def note(number: int, _: FrameType | None) -> None:
        if asked:
            signal.signal(number, before[number])
            signal.raise_signal(number)
        asked.append(number)

    for number in before:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, was in before.items():
            signal.signal(number, was)
