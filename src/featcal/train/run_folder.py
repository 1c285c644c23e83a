"""Everything a run needs to go on as if it had never stopped, in one safetensors file."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from featcal.core.checks import InputError
from featcal.core.files import LOCK, REMOVE, check_free, left_over_of, locked, new_file
from featcal.datasets import Images, Splits

FILE = "checkpoint.safetensors"
FORMAT = 2
KEY = "featcal.train"
NAMED = 5  # differences of two runs; of more it is enough to know that there are
REMEDY = "choose another folder, or remove this one"
HASHED = 2**28  # bytes of pixels: all of CIFAR, in a fifth of a second; of more, a spread sample


@final
class OtherRun(InputError):
    """A checkpoint of a run with other settings."""

    def __init__(self, path: Path, differences: dict[str, tuple[Any, Any]]) -> None:
        self.path, self.differences = path, differences
        super().__init__(self.sentence(str))

    def sentence(self, name_of: Callable[[str], str]) -> str:
        """What the file has and the run has not, by the names the reader knows it under."""
        told = [
            f"{name_of(key)} = {theirs}, not {ours}"
            for key, (theirs, ours) in self.differences.items()
        ]
        more = f" and {len(told) - NAMED} more" if len(told) > NAMED else ""
        return f"{self.path} is of a run with {'; '.join(told[:NAMED])}{more}: {REMEDY}"


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
class Checkpoint:
    """The file of a run; written whole or not at all.

    Attributes:
        path: the file.
        settings: what the run is; a file with other settings is refused.
        images: the fingerprints of its images; a file with others is refused.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], images: dict[str, str]) -> None:
        self.path, self.images = folder / FILE, images
        self.settings = json.loads(json.dumps(settings))  # as they will be read back

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: dict[str, Tensor],
        position: Position,
    ) -> None:
        """Writes the state in place of the one before."""
        tensors = {f"model.{key}": value for key, value in model.state_dict().items()}
        for index, state in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{key}": torch.as_tensor(v) for key, v in state.items()}
        tensors |= {f"loss.{key}": value for key, value in loss.items()}
        tensors |= {f"random.{key}": value for key, value in _random_state().items()}
        about = {"format": FORMAT, "settings": self.settings, "images": self.images}
        about["position"] = vars(position)
        # Copies: safetensors refuses tensors that share memory, such as tied weights.
        plain = torch.contiguous_format
        copies = {k: v.detach().cpu().clone(memory_format=plain) for k, v in tensors.items()}
        with new_file(self.path, overwrite=True) as temporary:
            save_file(copies, temporary, {KEY: json.dumps(about)})

    def restore(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[Position, dict[str, Tensor]] | None:
        """Puts the state into model and optimiser; None where there is no file yet.

        Raises:
            InputError: for the file of another run, or one that cannot be read.
        """
        if not self.path.exists():
            return None
        try:
            with safe_open(self.path, "pt") as file:
                about = _said(file)
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError) as error:
            raise self._refused(f"cannot be read ({error})") from error
        self._check(about)
        try:
            model.load_state_dict(_under("model", tensors))
        except RuntimeError as error:
            raise self._refused("is of another network") from error
        _restore_optimizer(optimizer, _under("optimizer", tensors))
        _set_random_state(_under("random", tensors))
        found = about["position"]
        return Position(**{**found, "history": tuple(found["history"])}), _under("loss", tensors)

    def _check(self, about: Any) -> None:  # noqa: ANN401 - JSON
        if not isinstance(about, dict) or about.get("format") != FORMAT:
            raise self._refused("is no checkpoint of this version of featcal train")
        theirs, ours = _flat(about["settings"]), _flat(self.settings)
        pairs = {key: (theirs.get(key), ours.get(key)) for key in sorted({*theirs, *ours})}
        others = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
        if others:
            raise OtherRun(self.path, others)
        for part, found in self.images.items():
            if about["images"].get(part) != found:
                raise self._refused(f"is of a run with other images in {part.replace('_', ' ')}")

    def _refused(self, why: str) -> InputError:
        return InputError(f"{self.path} {why}: {REMEDY}")


def said_in(path: Path) -> Any:  # noqa: ANN401 - JSON
    """What a checkpoint says of its run, without its tensors; None for another file."""
    with safe_open(path, "pt") as file:
        return _said(file)


def _said(file: Any) -> Any:  # noqa: ANN401 - an open file of safetensors has no public type
    return json.loads((file.metadata() or {}).get(KEY, "null"))


def fingerprints(splits: Splits) -> dict[str, str]:
    """A hash of the images a run trains on, watches and adapts to, and of their labels."""
    parts = {"train": splits.train, "val": splits.val, "held_out": splits.held_out}
    return {part: _fingerprint(images) for part, images in parts.items() if images is not None}


def _fingerprint(images: Images) -> str:
    every = -(-images.pixels.numel() // HASHED)
    found = hashlib.sha256()
    for tensor in (images.labels, images.pixels[::every]):
        found.update(tensor.cpu().contiguous().numpy().data)
    return found.hexdigest()[:16]


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of settings under names such as recipe.lr, so that a difference can be named."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            flat |= {f"{key}.{name}": found for name, found in value.items()}
        else:
            flat[key] = value
    return flat


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    start = f"{prefix}."
    return {key[len(start) :]: value for key, value in tensors.items() if key.startswith(start)}


def _restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    for weight, kept in optimizer.state.items():
        for key, value in kept.items():
            if value.shape == weight.shape:  # in the weight's own order of memory, as it was
                kept[key] = torch.empty_like(weight).copy_(value)


def _random_state() -> dict[str, Tensor]:
    """For networks that draw random numbers of their own, such as for dropout."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


# --- The folder of a run: what lies in it, who may write there, and when it is taken.

WEIGHTS, RECORD, PACK = "model.safetensors", "run.json", "pack"


def check_unfinished(folder: Path) -> None:
    """Refuses a folder that holds a finished run: nothing is trained that could not be written."""
    if (folder / RECORD).exists():
        raise InputError(f"{folder} holds a finished run ({RECORD}): {REMOVE}")


def check_place(folder: Path) -> None:
    """Refuses a folder that no checkpoint can be kept in."""
    if not folder.is_dir():
        raise InputError(f"folder {folder} does not exist: make it first, or pass None")
    check_unfinished(folder)


def check_folder(folder: Path) -> bool:
    """Whether a folder holds a run to go on with.

    Raises:
        InputError: where it holds a finished run, or anything else.
    """
    check_unfinished(folder)
    if (folder / FILE).exists():
        return True
    if not folder.is_dir() or not all(p.name == LOCK or _is_temporary(p) for p in folder.iterdir()):
        check_free(folder, remedy=REMOVE)
    return False


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
    return left_over_of(path) in (FILE, WEIGHTS, RECORD)


# --- Ctrl-C between two steps: half a step cannot be kept, a whole one can.

# Ctrl-C; what Slurm and docker send before they kill; a terminal that was closed.
NAMES = ("SIGINT", "SIGTERM", "SIGHUP")
NUMBERS = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]


@final
class Interrupts:
    """Whether somebody has asked the run to stop.

    Attributes:
        asked: True from the first signal on. A second one does not wait for the end of the step.
    """

    def __init__(self) -> None:
        self.asked = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Notes signals in the block instead of ending it; other threads never see one."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        found = {number: signal.getsignal(number) for number in NUMBERS}
        # What is ignored (nohup) stays so, and what is not Python's cannot be put back.
        before = {n: was for n, was in found.items() if was not in (signal.SIG_IGN, None)}

        def note(number: int, frame: FrameType | None) -> None:
            if self.asked:
                signal.signal(number, before[number])
                signal.raise_signal(number)
            self.asked = True

        for number in before:
            signal.signal(number, note)
        try:
            yield
        finally:
            for number, was in before.items():
                signal.signal(number, was)
