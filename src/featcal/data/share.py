"""Collection by several processes: each runs its own batches, and the first joins what they made.

Every process collects a pack of its own, `<out>.parts/<rank>-of-<world>`, by the very code of one
process, so that a run that was killed goes on from complete shards. Their shards become one pack in
the order of the loaders, without being read again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DistributedSampler

from featcal.core import dist
from featcal.core.checks import InputError
from featcal.core.files import REMOVE, check_free, new_folder
from featcal.data.pack import HEAD, MANIFEST, Manifest, Pack, Part, write_json
from featcal.data.resume import Some, check_order, collect_pack

PARTS = ".parts"


def parts_of(path: Path) -> Path:
    """The folder of what the processes have collected so far."""
    return path.with_name(path.name + PARTS)


def collect_shared(
    model: nn.Module,
    loaders: Mapping[str, Iterable[Any]],
    out: Path,
    **options: Any,  # noqa: ANN401 - those of collect_pack
) -> Pack | None:
    """`collect_pack` by all processes; the pack for the first of them, None for the others.

    Raises:
        InputError: for a loader that deals its rows out by itself, or that has no length.
    """
    rank, world = dist.rank(), dist.world()
    folder = parts_of(out)
    if rank == 0:
        check_free(out, remedy=REMOVE)
        folder.mkdir(exist_ok=True)
        begun = {one.name.partition("-of-")[2].split(".")[0] for one in folder.iterdir()}
        if begun - {str(world)}:
            raise InputError(
                f"{folder} was begun by {begun.pop()} processes, and this job has {world}: start "
                f"as many, or remove {folder.name} to begin anew"
            )
    dist.total(torch.zeros(1))  # nobody goes on before the folder is there
    check_order(loaders)
    own = {name: _own(name, loader, rank, world) for name, loader in loaders.items()}
    if rank < world - 1:  # a process may have no batches, of few; the last has some of every loader
        own = {name: loader for name, loader in own.items() if len(loader)}
    mine = folder / f"{rank}-of-{world}"
    if own and not mine.exists():
        collect_pack(model, own, mine, **options)
    dist.total(torch.zeros(1))  # all are done
    if rank:
        return None
    made = [folder / f"{number}-of-{world}" for number in range(world)]
    _join(out, list(loaders), [Pack.open(path) for path in made if path.exists()])
    shutil.rmtree(folder)
    return Pack.open(out)


def _own(name: str, loader: Iterable[Any], rank: int, world: int) -> Some:
    """The batches of a loader that this process runs, one after the other."""
    if isinstance(getattr(loader, "sampler", None), DistributedSampler):
        raise InputError(
            f"the loader of split {name!r} deals out its rows by a DistributedSampler: give a "
            "plain one, whose batches featcal deals out"
        )
    try:
        count = len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError) as error:
        raise InputError(
            f"the loader of split {name!r} has no length, and processes cannot share it: collect "
            "in one process"
        ) from error
    return Some(loader, rank * count // world, (rank + 1) * count // world)


def _join(out: Path, splits: list[str], packs: list[Pack]) -> None:
    """One pack of the shards of several, which appears whole or not at all."""
    first = packs[0].manifest

    def alike(manifest: Manifest) -> object:
        head = None if manifest.head is None else manifest.head.sha256
        return replace(manifest, splits={}, head=None), head

    for pack in packs[1:]:
        if alike(pack.manifest) != alike(first):
            raise InputError(
                f"{pack.path} and {packs[0].path} hold other tensors, or have another head: give "
                f"every process the same model, and remove {pack.path.parent.name}"
            )
    with new_folder(out) as folder:
        shards: dict[str, tuple[Part, ...]] = {}
        for split in splits:
            found = [(pack, part) for pack in packs for part in pack.manifest.splits.get(split, ())]
            files = [f"{split}-{number:05d}.safetensors" for number in range(len(found))]
            for (pack, part), file in zip(found, files, strict=True):
                _link(pack.path / part.file, folder / file)
            shards[split] = tuple(
                replace(part, file=file) for (_, part), file in zip(found, files, strict=True)
            )
        if first.head is not None:
            _link(packs[0].path / first.head.file, folder / HEAD)
        write_json(folder / MANIFEST, replace(first, splits=shards).to_json())


def _link(old: Path, new: Path) -> None:
    """The same file under another name, without a copy where the file system can."""
    try:
        os.link(old, new)
    except OSError:
        shutil.copyfile(old, new)
