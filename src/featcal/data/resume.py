"""A model's features straight into a pack on disk; a killed run goes on where it was."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn, final

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from featcal.core.batch import Batch
from featcal.core.checks import InputError
from featcal.core.files import LOCK, REMOVE, check_free, left_over_of, locked
from featcal.core.fit import undisturbed
from featcal.core.progress import ROWS, shown, tell
from featcal.data.collect import Collector, Unpack, left, rows_expected
from featcal.data.manifest import HEAD, MANIFEST, Gate, Layout, Part, head_tensors, read_manifest
from featcal.data.pack import (
    About,
    Pack,
    check_splits,
    grouped,
    save_part,
    save_shard,
    sha256,
    write_json,
    write_manifest,
)

# --- A pack in the making: shards that are done stay, so that a killed run goes on at the next
# one.
#
# The work happens in `<pack>.partial` beside the pack. Its journal names every finished shard; a
# shard, the journal and at last the folder itself appear by renaming, so that a kill at any moment
# leaves either the state before or the state after.

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


COLLECTED_ROWS = 8192  # in a shard: what a kill costs, and what is in memory at a time
SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def collect_pack(
    model: nn.Module,
    loaders: Mapping[str, Iterable[Any]],
    out: Path | str,
    *,
    head: str | None = None,
    layer: str | None = None,
    unpack: Unpack | None = None,
    dataset: str = "",
    name: str | None = None,
    class_names: Sequence[str] | None = None,
    meta: Mapping[str, Any] | None = None,
    shard_rows: int = COLLECTED_ROWS,
) -> Pack:
    """Runs the model over its loaders and writes a feature pack, a shard at a time.

    Until it is whole the pack is `<out>.partial`. A run that was killed goes on at the next shard
    when it is started again, and the pack is the same, byte for byte. The features are those of
    `collect`; a linear head is stored beside them, and for any other head the logits.

    Args:
        model: the trained classifier; left as it was.
        loaders: a loader for every split, by name; each in a fixed order.
        out: the folder to make; it must not exist.
        head: dotted path of the last layer, when it is not found by itself.
        layer: dotted path of another layer, whose output to keep as the features.
        unpack: makes (inputs, labels) of a batch in a form `collect` does not know.
        dataset: the name of the data set.
        name: of the network; its class without one.
        class_names: one name a class.
        meta: anything else worth keeping, as JSON.
        shard_rows: rows of a full shard, and what a kill costs at most.
    """
    check_splits(loaders, shard_rows)
    for split, loader in loaders.items():
        _check_order(split, loader)
    extra = {} if layer is None else {"layer": layer}
    called = type(model).__name__ if name is None else name
    about = About.checked(dataset, called, class_names, {**(meta or {}), **extra})
    rows = {split: rows_expected(loader) for split, loader in loaders.items()}
    settings = {"rows": rows, "shard_rows": shard_rows, "head": head, "layer": layer}
    collector = Collector(model, head=head, layer=layer, unpack=unpack)
    gate = Gate(None, about.class_names)
    with shown(), undisturbed(model), opened(out, settings) as partial:
        if partial is not None:
            gate.go_on(partial.layout)
            for split, loader in loaders.items():
                _collect_split(partial, collector, gate, split, loader)
            partial.finish(about)
    return Pack.open(out)


def _check_order(split: str, loader: object) -> None:
    batches = getattr(loader, "batch_sampler", None)
    samplers = (getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    if any(isinstance(sampler, SHUFFLING) for sampler in samplers):
        raise InputError(
            f"the loader of split {split!r} shuffles, and a killed run could not go on with it: "
            "make it with shuffle=False"
        )


def _collect_split(
    partial: Partial, collector: Collector, gate: Gate, split: str, loader: Iterable[Any]
) -> None:
    rest = _rest_of(partial, collector, gate, split, loader)
    batches = gate.checked(split, rest, first_row=partial.rows(split))
    for group in grouped(batches, partial.settings["shard_rows"]):
        assert gate.layout is not None
        partial.add_shard(split, group, gate.layout)
    if split not in partial.whole:
        partial.close(split)


@torch.no_grad()
def _rest_of(
    partial: Partial, collector: Collector, gate: Gate, split: str, loader: Iterable[Any]
) -> Iterator[Batch]:
    """The rows of a split that are not on disk yet; whole batches run, so that rounding is too."""
    done, expected, end = partial.rows(split), rows_expected(loader), 0
    for start, pair in left(collector.model, loader, done, collector.unpack):
        batch = collector.one(*pair)
        _know_head(partial, collector, gate)
        if gate.head is not None:
            batch = Batch(None, batch.labels, batch.features)  # the head makes the logits
        end = start + len(batch)
        if start < done:
            _check_unchanged(partial, split, start, batch.rows(slice(0, done - start)))
        if split in partial.whole and end > done:
            break
        yield batch.rows(slice(max(done - start, 0), None))
        tell(f"collecting {split}{ROWS}", max(end, done), max(expected, end, done))
    if end < done or (split in partial.whole and end != done):
        _refuse(partial, f"the loader of {split!r} has other than the {done} rows that are stored")


def _know_head(partial: Partial, collector: Collector, gate: Gate) -> None:
    """Stores a linear head, once; a run that goes on must have the same."""
    linear = isinstance(collector.head, nn.Linear)
    if partial.layout is not None and linear != (partial.head is not None):
        _refuse(partial, "the last layer is of another kind")
    if gate.head is not None or not isinstance(collector.head, nn.Linear):
        return
    gate.head = head_tensors(collector.head)
    assert gate.head is not None
    if partial.head is None:
        partial.add_head(gate.head)
        return
    stored = load_file(partial.folder / partial.head.file)
    if any(not torch.equal(stored[key], value) for key, value in gate.head.items()):
        _refuse(partial, "the last layer has other weights")


def _check_unchanged(partial: Partial, split: str, start: int, batch: Batch) -> None:
    """Compares rows of a batch with what an earlier run stored of them."""
    size = partial.settings["shard_rows"]
    for first in range(start - start % size, start + len(batch), size):
        stored = load_file(partial.folder / partial.shards[split][first // size].file)
        rows = slice(max(start - first, 0), start + len(batch) - first)
        theirs = batch.rows(slice(max(first - start, 0), first + size - start))
        for name, values in stored.items():
            if not _alike(values[rows], getattr(theirs, name)):
                _refuse(
                    partial, f"rows from {first + rows.start} on of {split!r} have other {name}"
                )


def _alike(stored: Tensor, found: Tensor | None) -> bool:
    """Whether values are the same but for the rounding of another machine."""
    if found is None or found.shape != stored.shape:
        return False
    if stored.is_floating_point() and found.dtype != stored.dtype:
        return False
    return torch.allclose(found.double(), stored.double(), 1e-3, 1e-4)


def _refuse(partial: Partial, why: str) -> NoReturn:
    folder = partial.folder
    raise InputError(
        f"{folder} cannot be gone on with: {why}; give the model and the loaders it was begun "
        f"with, in the same order, or remove {folder.name} to begin anew"
    )
