"""A model's features straight into a pack on disk; a killed run goes on where it was.

The work happens in `<pack>.partial` beside the pack. Its journal names every finished shard; a
shard, the journal and at last the folder itself appear by renaming, so that a kill at any moment
leaves either the state before or the state after.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.sampler import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from featcal.core.batch import Batch, Head
from featcal.core.checks import InputError
from featcal.core.files import LOCK, REMOVE, check_free, left_over_of, locked, publish
from featcal.core.fit import undisturbed
from featcal.core.listed import COLLECTED_ROWS
from featcal.core.progress import ROWS, shown, tell
from featcal.core.stored import json_of, made, read_tensors, reading
from featcal.data import pack
from featcal.data.collect import IGNORED, Collector, Unpack, rows_expected, unpacked
from featcal.data.pack import HEAD, MANIFEST, Gate, Layout, Pack, Part

VERSION = 1
PARTIAL = ".partial"
JOURNAL = "journal.json"
KEPT = "; what was done is kept in"
SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
# Of a DataLoader, for one that gives some of its batches.
SAME_OPTIONS = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn")


def collect_pack(
    model: nn.Module,
    loaders: Mapping[str, Iterable[Any]],
    out: Path | str,
    *,
    head: str | None = None,
    layer: str | None = None,
    unpack: Unpack | None = None,
    ignore_index: int = IGNORED,
    positions: int | None = None,
    seed: int = 0,
    dataset: str = "",
    name: str | None = None,
    class_names: Sequence[str] | None = None,
    meta: Mapping[str, Any] | None = None,
    shard_rows: int = COLLECTED_ROWS,
) -> Pack:
    """Runs the model over its loaders and writes a feature pack, a shard at a time.

    Until it is whole the pack is `<out>.partial`. A run that was killed goes on at the next shard
    when it is started again, and the pack is the same, byte for byte. The features are those of
    `collect`; a linear head is stored beside them, and for any other head the logits. Where rows
    are positions of a sample, the pack says how they were drawn, and of which sample each is.

    Args:
        model: the trained classifier; left as it was.
        loaders: a loader for every split, by name; each in a fixed order.
        out: the folder to make; it must not exist.
        head: dotted path of the last layer, when it is not found by itself.
        layer: dotted path of another layer, whose output to keep as the features.
        unpack: makes (inputs, labels) of a batch in a form `collect` does not know.
        ignore_index: the label of pixels and tokens that do not count.
        positions: how many of them to keep of a sample at most; see `collect`.
        seed: of their draw.
        dataset: the name of the data set.
        name: of the network; its class without one.
        class_names: one name per class.
        meta: anything else worth keeping, as JSON.
        shard_rows: rows of a full shard, and what a kill costs at most.
    """
    check_order(loaders)
    extra = {} if layer is None else {"layer": layer}
    called = type(model).__name__ if name is None else name
    meta = {**(meta or {}), **extra}
    about = pack.described(loaders, shard_rows, dataset, called, class_names, meta)
    rows = {split: rows_expected(whole(loader)) for split, loader in loaders.items()}
    settings = {"rows": rows, "shard_rows": shard_rows, "head": head, "layer": layer}
    settings |= {"ignore_index": ignore_index, "positions": positions, "seed": seed}
    collector = Collector(model, head, layer, unpack, ignore_index, positions, seed)
    with shown(), undisturbed(model), opened(out, settings) as partial:
        if partial is not None:
            gate = Gate(None, about.class_names, partial.layout)
            for split, loader in loaders.items():
                rest = _new_rows(partial, collector, gate, split, loader)
                checked = gate.checked(split, rest, first_row=partial.rows(split))
                for group in pack.grouped(checked, shard_rows):
                    partial.layout = gate.layout
                    done = partial.shards.setdefault(split, [])
                    done.append(gate.save(partial.folder, split, len(done), group))
                    partial.note()
                if split not in partial.whole:
                    partial.whole.append(split)
                    partial.note()
            shards = {split: partial.shards[split] for split in loaders}
            if collector.drawn:
                about = replace(about, meta=about.meta | {"drawn": collector.drawn})
            manifest = gate.manifest(about, partial.head, shards)
            pack.write_json(partial.folder / MANIFEST, manifest.to_json())
            (partial.folder / JOURNAL).unlink()
            _settle(partial.folder)
    return Pack.open(out)


def check_order(loaders: Mapping[str, Iterable[Any]]) -> None:
    """Refuses loaders whose order is another each time."""
    for split, loader in loaders.items():
        batches = getattr(loader, "batch_sampler", None)
        samplers = (getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
        if any(isinstance(sampler, SHUFFLING) for sampler in samplers):
            raise InputError(
                f"the loader of split {split!r} shuffles, and could not go on: give shuffle=False"
            )


@final
@dataclass(frozen=True, eq=False)
class Some:
    """Some of the batches of a loader, whose samples keep their numbers among all of them."""

    loader: Iterable[Any]
    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first

    def __iter__(self) -> Iterator[Any]:
        return islice(self.loader, self.first, self.end)


def whole(loader: Iterable[Any]) -> Iterable[Any]:
    """The loader that some batches are of."""
    return loader.loader if isinstance(loader, Some) else loader


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
        return sum(part.rows for part in self.shards.get(split, []))

    def groups(self, split: str) -> Tensor | None:
        """The sample of each row of a split that is safe on disk; None where a row is a sample."""
        parts = self.shards.get(split, [])
        if not parts or self.layout is None or "groups" not in self.layout["dtypes"]:
            return None
        return torch.cat([self.tensors(part)["groups"] for part in parts])

    def tensors(self, part: Part) -> dict[str, Tensor]:
        """What a finished file holds."""
        path = self.folder / part.file
        with reading(path, f"remove {self.folder.name}"):
            return read_tensors(path)[0]

    def note(self) -> None:
        """Writes the journal."""
        state = {"version": VERSION, **asdict(self)}
        del state["folder"]
        pack.write_json(self.folder / JOURNAL, state)

    def refuse(self, why: str) -> NoReturn:
        """Another model or another loader than the one this was begun with."""
        raise InputError(
            f"{self.folder} cannot be continued: {why}; give the model and the loaders it was "
            f"begun with, in the same order, or remove {self.folder.name} to begin anew"
        )


def partial_of(path: Path) -> Path:
    """The folder in which a pack is made."""
    return path.with_name(path.name + PARTIAL)


@contextmanager
def opened(path: Path | str, settings: dict[str, Any]) -> Iterator[Partial | None]:
    """The partial pack that is to become `path`, begun or continued; None if it was whole.

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
        if (folder / MANIFEST).exists() and not (folder / JOURNAL).exists():
            _settle(folder)  # killed between the last two steps
            yield None
            return
        partial = Partial(folder, settings)
        if (folder / JOURNAL).exists():
            partial = _read(folder)
            if partial.settings != settings:
                partial.refuse(f"it was begun with {partial.settings}, and now it is {settings}")
        _clear(partial)
        try:
            yield partial
        except BaseException as error:
            if not partial.shards:
                shutil.rmtree(partial.folder)
            elif isinstance(error, InputError) and folder.name not in str(error):
                raise InputError(f"{error}{KEPT} {folder}") from error
            raise


def _settle(folder: Path) -> None:
    (folder / LOCK).unlink(missing_ok=True)
    publish(folder, folder.with_name(folder.name.removesuffix(PARTIAL)))


def _read(folder: Path) -> Partial:
    """What the journal knows."""
    with reading(folder / JOURNAL, f"it is damaged, or another featcal's; remove {folder.name}"):
        state = dict(made(dict[str, Any], json_of((folder / JOURNAL).read_bytes())))
        if (version := state.pop("version", None)) != VERSION:
            raise ValueError(f"it has version {version}, not {VERSION}")
        partial: Partial = made(Partial, state, folder=folder)
        size = made(int, partial.settings.get("shard_rows"), "settings.shard_rows")
        full = [part.rows for parts in partial.shards.values() for part in parts[:-1]]
        last = [parts[-1].rows for parts in partial.shards.values() if parts]
        if {*full} - {size} or not all(0 < rows <= size for rows in last):
            raise ValueError(f"not all shards have the {size} rows it says")
        if last and partial.layout is None:
            raise ValueError("it has shards and no layout")
    return partial


def _clear(partial: Partial) -> None:
    """Checks every finished file and removes what a kill left unfinished, and nothing else."""
    folder = partial.folder
    parts = [part for parts in partial.shards.values() for part in parts]
    parts += [] if partial.head is None else [partial.head]
    for part in parts:
        if pack.sha256(folder / part.file) != part.sha256:
            raise InputError(f"{folder / part.file} is damaged: remove {folder.name}")
    splits = "|".join(partial.settings["rows"])
    ours = re.compile(rf"{HEAD}|{MANIFEST}|{JOURNAL}|({splits})-\d{{5}}\.safetensors")
    kept = {JOURNAL, LOCK, *(part.file for part in parts)}
    rest = [file for file in folder.iterdir() if file.name not in kept]
    for file in rest:
        name = file.name if file.is_file() else left_over_of(file)
        if name is None or not ours.fullmatch(name):
            raise InputError(f"{folder} holds {file.name}, which no collection wrote: move it away")
    for file in rest:
        remove = shutil.rmtree if file.is_dir() else os.unlink
        remove(file)


@torch.no_grad()
def _new_rows(
    partial: Partial, collector: Collector, gate: Gate, split: str, loader: Iterable[Any]
) -> Iterator[Batch]:
    """The rows of a split that are not on disk yet.

    Whole batches run, so that their rounding is that of a run that was never killed.
    """
    done, expected, end = partial.rows(split), rows_expected(whole(loader)), 0
    if isinstance(loader, Some):
        expected = expected * len(loader) // max(len(loader.loader), 1)  # type: ignore[arg-type]
    groups = partial.groups(split)
    last = None if groups is None else int(groups[-1])
    for before, first, inputs, labels in _batches_left(collector, loader, done, last):
        batch = collector.one(inputs, labels, range(first, first + len(labels)))
        start = first - before if batch.groups is None else end
        if groups is not None and first <= groups[-1]:
            start = int(torch.searchsorted(groups, first))
        if gate.head is None:
            gate.head = _known_head(partial, collector.head)
        if gate.head is not None:
            batch = replace(batch, logits=None)  # the head makes them
        end = start + len(batch)
        if start < done:
            _check_unchanged(partial, split, start, batch.rows(slice(0, done - start)))
        if split in partial.whole and end > done:
            break
        yield batch.rows(slice(max(done - start, 0), None))
        tell(f"collecting {split}{ROWS}", max(end, done), max(expected, end, done))
    if end < done or (split in partial.whole and end != done):
        partial.refuse(f"the loader of {split!r} has other than the {done} rows that are stored")


def _batches_left(
    collector: Collector, loader: Iterable[Any], done: int, last: int | None
) -> Iterator[tuple[int, int, Any, Tensor]]:
    """The batches whose samples are not all done, and two before: their numbers, inputs, labels.

    The two are the first batch and the one that ends what is done, to see whether they are what
    they were. Where a plain DataLoader says which samples the others are, they are not even loaded.

    Args:
        collector: of the model.
        loader: of all batches.
        done: samples that are done, where each is a row.
        last: the number of the last one that is done, where they have several rows.

    Yields:
        How many samples come before those of this loader, the number of the first of the batch,
        and the batch.
    """
    every = whole(loader)
    first, stop = (loader.first, loader.end) if isinstance(loader, Some) else (0, None)
    if (
        (done or every is not loader)
        and isinstance(every, DataLoader)
        and type(every).__iter__ is DataLoader.__iter__
        and every.batch_sampler is not None
        and not isinstance(every.dataset, IterableDataset)
    ):
        indices = [list(batch) for batch in islice(every.batch_sampler, stop)]
        starts = [0, *accumulate(map(len, indices))]
        wanted = starts[first] + done if last is None else last
        numbers = range(first, len(indices))
        kept = [i for i in numbers if i == first or starts[i + 1] >= wanted]
        options = {name: getattr(every, name) for name in SAME_OPTIONS}
        rest = DataLoader(every.dataset, batch_sampler=[indices[i] for i in kept], **options)
        batches = unpacked(collector.model, rest, collector.unpack)
        for i, (inputs, labels) in zip(kept, batches, strict=True):
            yield starts[first], starts[i], inputs, labels
        return
    before, end = 0, 0
    batches = unpacked(collector.model, every, collector.unpack)
    for place, (inputs, labels) in enumerate(islice(batches, stop)):
        start, end = end, end + len(labels)
        if place < first:
            before = end
        elif end > start and (start == before or end >= (before + done if last is None else last)):
            yield before, start, inputs, labels


def _known_head(partial: Partial, head: Head | None) -> dict[str, Tensor] | None:
    """The tensors of a linear head, stored once; a run that goes on must have the same."""
    if partial.layout is not None and isinstance(head, nn.Linear) != (partial.head is not None):
        partial.refuse("the last layer is of another kind")
    if not isinstance(head, nn.Linear):
        return None
    tensors = pack.head_tensors(head)
    if partial.head is None:
        partial.head = pack.save_part(partial.folder / HEAD, tensors)
        partial.note()
    stored = partial.tensors(partial.head)
    same = (torch.equal(stored[key], value) for key, value in tensors.items())
    if stored.keys() != tensors.keys() or not all(same):
        partial.refuse("the last layer has other weights")
    return tensors


def _check_unchanged(partial: Partial, split: str, start: int, batch: Batch) -> None:
    """Compares rows with what an earlier run stored, up to the rounding of another machine."""
    size = partial.settings["shard_rows"]
    for first in range(start - start % size, start + len(batch), size):
        stored = partial.tensors(partial.shards[split][first // size])
        rows = slice(max(start - first, 0), start + len(batch) - first)
        found = batch.rows(slice(max(first - start, 0), first + size - start))
        for name, values in stored.items():
            old, new = values[rows], getattr(found, name, None)
            if new is None:
                partial.refuse(f"{split!r} has {name}")
            kinds = [(part.shape, part.is_floating_point() and part.dtype) for part in (old, new)]
            if kinds[0] != kinds[1] or not torch.allclose(new.double(), old.double(), 1e-3, 1e-4):
                where = f"rows from {first + rows.start} on of {split!r}"
                partial.refuse(f"{where} have other {name}")
