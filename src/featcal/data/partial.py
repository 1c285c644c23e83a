"""A pack in the making: shards that are done stay, so that a killed run goes on at the next one.

The work happens in `<pack>.partial` beside the pack. Its journal names every finished shard; a
shard, the journal and at last the folder itself appear by renaming, so that a kill at any moment
leaves either the state before or the state after.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final

from featcal.core.batch import Batch
from featcal.core.disk import LOCK, REMOVE, check_free, left_over_of, locked
from featcal.core.errors import InputError
from featcal.data.layout import Layout
from featcal.data.manifest import HEAD, MANIFEST, Part, read_manifest
from featcal.data.pack import sha256
from featcal.data.shards import save_part, save_shard, write_json, write_manifest
from featcal.data.write import About

VERSION = 1
PARTIAL = ".partial"
JOURNAL = "journal.json"


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

    def finish(self, about: About) -> None:
        """Turns the folder into the pack."""
        assert self.layout is not None  # every split has a row by now
        shards = {split: tuple(self.shards[split]) for split in self.settings["rows"]}
        write_manifest(self.folder / MANIFEST, about.manifest(self.layout, self.head, shards))
        (self.folder / JOURNAL).unlink()
        _settle(self.folder)

    def _note(self) -> None:
        state = {"version": VERSION, **asdict(self)}
        del state["folder"]
        write_json(self.folder / JOURNAL, state)


def partial_of(path: Path) -> Path:
    """The folder in which a pack is made."""
    return path.with_name(path.name + PARTIAL)


@contextmanager
def opened(path: Path | str, settings: dict[str, Any]) -> Iterator[Partial | None]:
    """The partial pack that is to become `path`, begun or gone on with; None if it was whole.

    Raises:
        InputError: when `path` exists, when another process is at work on it, and when what was
            begun there was something else.
    """
    path = check_free(path, remedy=REMOVE).absolute()  # the folder may change under a loader
    folder = partial_of(path)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is in the way of the work on {path.name}: move it away")
    folder.mkdir(exist_ok=True)
    with locked(folder):
        if _whole(folder, settings):
            _settle(folder)  # killed between the last two steps
            yield None
            return
        partial = _resumed(folder, settings)
        _clear(partial)
        with _kept(partial):
            yield partial


@contextmanager
def _kept(partial: Partial) -> Iterator[None]:
    """Says that what is done is kept when something goes wrong, and removes what is nothing."""
    try:
        yield
    except BaseException as error:
        if not partial.shards:
            shutil.rmtree(partial.folder)
        elif isinstance(error, InputError) and partial.folder.name not in str(error):
            raise InputError(f"{error}; what was done is kept in {partial.folder}") from error
        raise


def _whole(folder: Path, settings: dict[str, Any]) -> bool:
    """Whether only the new name is missing; refused when other splits are asked for."""
    if not (folder / MANIFEST).exists() or (folder / JOURNAL).exists():
        return False
    found = list(read_manifest(folder / MANIFEST).splits)
    if found != list(settings["rows"]):
        raise InputError(
            f"{folder} is a whole pack of {', '.join(found)}: rename it to {folder.stem}, or "
            "remove it to begin anew"
        )
    return True


def _settle(folder: Path) -> None:
    (folder / LOCK).unlink(missing_ok=True)
    os.rename(folder, folder.with_name(folder.name.removesuffix(PARTIAL)))


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
        version, layout, head = (state[key] for key in ("version", "layout", "head"))
        partial = Partial(
            folder,
            state["settings"],
            None if layout is None else Layout(**layout),
            None if head is None else Part(**head),
            {name: [Part(**part) for part in parts] for name, parts in state["shards"].items()},
            state["whole"],
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{folder / JOURNAL} is damaged: remove {folder.name}") from error
    if version != VERSION:
        raise InputError(
            f"{folder / JOURNAL} has version {version} and this featcal goes on with {VERSION}: "
            f"finish it with the featcal that began it, or remove {folder.name}"
        )
    return partial


def _clear(partial: Partial) -> None:
    """Checks every finished file and removes what a kill left unfinished, and nothing else."""
    parts = [part for parts in partial.shards.values() for part in parts]
    parts += [] if partial.head is None else [partial.head]
    for part in parts:
        if sha256(partial.folder / part.file) != part.sha256:
            raise InputError(
                f"{partial.folder / part.file} is damaged: remove {partial.folder.name}"
            )
    splits = "|".join(partial.settings["rows"])
    ours = re.compile(rf"{HEAD}|{MANIFEST}|{JOURNAL}|({splits})-\d{{5}}\.safetensors")
    kept = {JOURNAL, LOCK, *(part.file for part in parts)}
    rest = [file for file in partial.folder.iterdir() if file.name not in kept]
    for file in rest:
        name = file.name if file.is_file() else left_over_of(file)
        if name is None or not ours.fullmatch(name):
            raise InputError(
                f"{partial.folder} holds {file.name}, which no collection wrote: move it away"
            )
    for file in rest:
        remove = shutil.rmtree if file.is_dir() else os.unlink
        remove(file)
