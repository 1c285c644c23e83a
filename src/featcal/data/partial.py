"""A pack in the making: shards that are done stay, so that a killed run goes on at the next one.

The work happens in `<pack>.partial` beside the pack. Its journal names every finished shard; a
shard, the journal and at last the folder itself appear by renaming, so that a kill at any moment
leaves either the state before or the state after.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final

from featcal.core.batch import Batch
from featcal.core.disk import REMOVE, check_free
from featcal.core.errors import InputError
from featcal.data.layout import Layout
from featcal.data.manifest import HEAD, MANIFEST, Manifest, Part
from featcal.data.pack import sha256
from featcal.data.shards import save_part, save_shard, write_json, write_manifest

JOURNAL = "journal.json"
LOCK = ".lock"


@final
@dataclass
class Partial:
    """The folder of a pack that is not whole yet, and what is in it so far.

    Attributes:
        folder: where the files are.
        settings: what the pack is made of; a run with other settings cannot go on with it.
        layout: of the tensors, once a shard is written.
        head: the file of the head, once it is known.
        shards: the finished shards of every split.
        whole: the splits that need no more rows.
    """

    folder: Path
    settings: dict[str, Any]
    layout: Layout | None = None
    head: Part | None = None
    shards: dict[str, list[Part]] = field(default_factory=dict)
    whole: list[str] = field(default_factory=list)

    def rows(self, split: str) -> int:
        """Rows of a split that are safe on disk."""
        return sum(part.rows or 0 for part in self.shards.get(split, []))

    def add_head(self, tensors: dict[str, Any]) -> None:
        """Writes the head."""
        self.head = save_part(self.folder / HEAD, tensors)
        self._note()

    def add_shard(self, split: str, batches: list[Batch], layout: Layout) -> None:
        """Writes the next shard of a split."""
        self.layout = layout
        done = self.shards.setdefault(split, [])
        done.append(save_shard(self.folder, f"{split}-{len(done):05d}", batches, layout))
        self._note()

    def close(self, split: str) -> None:
        """Notes that a split has all its rows."""
        self.whole.append(split)
        self._note()

    def finish(self, path: Path, manifest: Manifest) -> None:
        """Turns the folder into the pack."""
        write_manifest(self.folder / MANIFEST, manifest)
        (self.folder / JOURNAL).unlink()
        _settle(self.folder, path)

    def _note(self) -> None:
        state = asdict(self)
        del state["folder"]
        write_json(self.folder / JOURNAL, state)


def partial_of(path: Path) -> Path:
    """The folder in which a pack is made."""
    return path.with_name(f"{path.name}.partial")


@contextmanager
def opened(path: Path | str, settings: dict[str, Any]) -> Iterator[Partial | None]:
    """The partial pack that is to become `path`, begun or gone on with; None if it was whole.

    Raises:
        InputError: when `path` exists, when another process is at work on it, and when what was
            begun there was something else.
    """
    path = check_free(path, remedy=REMOVE)
    folder = partial_of(path)
    folder.mkdir(exist_ok=True)
    with _locked(folder):
        if (folder / MANIFEST).exists() and not (folder / JOURNAL).exists():
            _settle(folder, path)  # killed between the last two steps
            yield None
            return
        partial = _resumed(folder, settings)
        _clear(partial)
        try:
            yield partial
        except BaseException:
            if not partial.shards:  # nothing to go on with
                shutil.rmtree(folder)
            raise


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time; the lock of a process that is killed goes with it."""
    try:
        import fcntl
    except ImportError:  # pragma: no cover - Windows has no such locks
        yield
        return
    file = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        raise InputError(
            f"{folder} is being written by another process: wait for it or choose another name"
        ) from error
    try:
        yield
    finally:
        os.close(file)


def _settle(folder: Path, path: Path) -> None:
    (folder / LOCK).unlink(missing_ok=True)
    os.rename(folder, path)


def _resumed(folder: Path, settings: dict[str, Any]) -> Partial:
    """What the journal knows, refused when it belongs to another pack."""
    if not (folder / JOURNAL).exists():
        return Partial(folder, settings)
    partial = _read(folder)
    for key, value in settings.items():
        if partial.settings.get(key) != value:
            raise InputError(
                f"{folder} was begun with {key} {partial.settings.get(key)!r} and now it is "
                f"{value!r}: go on as it was begun, or remove {folder.name} to begin anew"
            )
    return partial


def _read(folder: Path) -> Partial:
    try:
        state = json.loads((folder / JOURNAL).read_text(encoding="utf-8"))
        layout, head = state["layout"], state["head"]
        return Partial(
            folder,
            state["settings"],
            None if layout is None else Layout(**layout),
            None if head is None else Part(**head),
            {name: [Part(**part) for part in parts] for name, parts in state["shards"].items()},
            state["whole"],
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{folder / JOURNAL} is damaged: remove {folder.name}") from error


def _clear(partial: Partial) -> None:
    """Checks every finished file and removes what a kill left unfinished, and nothing else."""
    parts = [part for parts in partial.shards.values() for part in parts]
    parts += [] if partial.head is None else [partial.head]
    for part in parts:
        if sha256(partial.folder / part.file) != part.sha256:
            raise InputError(
                f"{partial.folder / part.file} is damaged: remove {partial.folder.name}"
            )
    kept = {JOURNAL, LOCK, *(part.file for part in parts)}
    for file in partial.folder.iterdir():
        ours = file.suffix in (".safetensors", ".tmp") or file.name == MANIFEST
        if file.name not in kept and not ours:
            raise InputError(
                f"{partial.folder} holds {file.name}, which no collection wrote: move it away"
            )
    for file in partial.folder.iterdir():
        if file.name not in kept:
            file.unlink()
