"""A model's features straight into a pack on disk; a killed run goes on where it was."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from featcal.core.batch import Batch
from featcal.core.errors import InputError
from featcal.core.fitting import undisturbed
from featcal.core.progress import ROWS, shown, tell
from featcal.data.collect import Collector
from featcal.data.layout import Gate, head_tensors
from featcal.data.loading import Unpack, left, rows_expected
from featcal.data.pack import Pack
from featcal.data.partial import Partial, opened
from featcal.data.shards import grouped
from featcal.data.write import About, check_splits

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
