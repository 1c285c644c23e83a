"""The shards of a pack: batches of any length go in, files of one length come out, each whole."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from featcal.core.batch import Batch
from featcal.core.disk import new_file
from featcal.core.errors import InputError
from featcal.data.layout import Layout
from featcal.data.manifest import Manifest, Part
from featcal.data.pack import sha256

SHARD_ROWS = 65_536


def grouped(batches: Iterable[Batch], rows: int) -> Iterator[list[Batch]]:
    """Cuts and collects batches into groups of exactly `rows` rows; the last may be shorter."""
    group: list[Batch] = []
    free = rows
    for batch in batches:
        while len(batch):
            piece, batch = batch.rows(slice(0, free)), batch.rows(slice(free, None))
            group.append(piece)
            free -= len(piece)
            if free == 0:
                yield group
                group, free = [], rows
    if group:
        yield group


def save_shard(folder: Path, name: str, batches: list[Batch], layout: Layout) -> Part:
    """Writes one shard; its name ends in the number of the shard."""
    tensors = _merged(batches, layout)
    return save_part(folder / f"{name}.safetensors", tensors, rows=len(tensors["labels"]))


def _merged(batches: list[Batch], layout: Layout) -> dict[str, Tensor]:
    columns = {name: [getattr(batch, name) for batch in batches] for name in layout.dtypes}
    merged = {name: torch.cat(values) for name, values in columns.items()}
    merged["labels"] = merged["labels"].to(getattr(torch, layout.dtypes["labels"]))
    return merged


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Writes the manifest, whole or not at all."""
    write_json(path, manifest.to_json())


def write_json(path: Path, value: object) -> None:
    """Writes JSON that appears whole or not at all."""
    try:
        with new_file(path, overwrite=True) as temporary:
            temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, error) from error


def save_part(path: Path, tensors: dict[str, Tensor], *, rows: int | None = None) -> Part:
    """Writes tensors to a file that appears whole or not at all."""
    try:
        with new_file(path, overwrite=True) as temporary:
            save_file(tensors, temporary)
    except (SafetensorError, OSError) as error:
        raise _unwritable(path, error) from error
    return Part(path.name, path.stat().st_size, sha256(path), rows)


def _unwritable(path: Path, error: Exception) -> InputError:
    return InputError(
        f"output {path.name} cannot be written ({error}): free some space or choose another folder"
    )
