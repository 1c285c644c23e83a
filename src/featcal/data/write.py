"""Writing a feature pack: batches of any length go in, shards of one length come out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from featcal.core.batch import Batch, Data
from featcal.core.disk import new_folder
from featcal.core.errors import InputError
from featcal.core.progress import track
from featcal.data.layout import Gate, HeadLike, Layout, head_tensors
from featcal.data.manifest import HEAD, MANIFEST, SPLIT_NAME, Manifest, Part
from featcal.data.pack import Pack, sha256

SHARD_ROWS = 65_536


def write_pack(
    path: Path | str,
    splits: Mapping[str, Batch | Data],
    *,
    head: HeadLike | None = None,
    dataset: str = "",
    model: str = "",
    class_names: Sequence[str] | None = None,
    meta: Mapping[str, Any] | None = None,
    shard_rows: int = SHARD_ROWS,
) -> Pack:
    """Writes a feature pack and opens it; after an error nothing is left on disk.

    Each split is read once, so a generator will do, and at most two shards of it are in memory.
    Features keep their type; logits keep theirs up to float32, the type they are read in.

    Args:
        path: the folder to make; it must not exist.
        splits: the data of every split, by name; all must hold the same tensors.
        head: the linear head, or its weight (k, d) and bias (k,); no bias is stored as zeros.
        dataset: the name of the data set.
        model: the name of the network.
        class_names: one name a class.
        meta: anything else worth keeping, as JSON.
        shard_rows: rows of a full shard.

    Raises:
        InputError: for data no fit could use, by split, row and value; and for an unusable `path`.
    """
    _check_splits(splits, shard_rows)
    names, kept = _class_names(class_names), _json(meta)
    texts = {"dataset": _text("dataset", dataset), "model": _text("model", model)}
    gate = Gate(head_tensors(head), names)
    with new_folder(path) as folder:
        shards = {
            name: _write_split(folder, name, gate, data, shard_rows)
            for name, data in track("write", list(splits.items()))
        }
        stored = None if gate.head is None else _save(folder / HEAD, gate.head)
        assert gate.layout is not None  # every split has a row by now
        manifest = Manifest(
            **texts,
            class_names=names,
            features=gate.layout.features,
            classes=gate.layout.classes,
            dtypes=gate.layout.dtypes,
            meta=kept,
            head=stored,
            splits=shards,
        )
        _write_manifest(folder / MANIFEST, manifest)
    return Pack.open(path)


def _check_splits(splits: Mapping[str, object], shard_rows: int) -> None:
    if not splits:
        raise InputError("splits is empty: give at least one, such as {'val': batches}")
    for name in splits:
        if not isinstance(name, str) or not SPLIT_NAME.fullmatch(name):
            raise InputError(f"split name {name!r}: use letters, digits and _ only")
    if shard_rows < 1:
        raise InputError(f"shard_rows is {shard_rows}: it must be at least 1")


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InputError(f"{name} is {value!r}: it must be text")
    return value


def _class_names(names: Sequence[str] | None) -> tuple[str, ...] | None:
    if names is None:
        return None
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise InputError("class_names must be a list of text: give one name a class")
    return tuple(names)


def _json(meta: Mapping[str, Any] | None) -> dict[str, Any]:
    """The values as the manifest will give them back, or an error before the work begins."""
    try:
        return dict(json.loads(json.dumps(dict(meta or {}), allow_nan=False)))
    except (TypeError, ValueError) as error:
        raise InputError(f"meta cannot be written as JSON ({error}): remove that value") from error


def _write_split(
    folder: Path, name: str, gate: Gate, data: Batch | Data, shard_rows: int
) -> tuple[Part, ...]:
    shards = []
    for number, batches in enumerate(_grouped(gate.checked(name, data), shard_rows)):
        assert gate.layout is not None
        tensors = _merged(batches, gate.layout)
        path = folder / f"{name}-{number:05d}.safetensors"
        shards.append(_save(path, tensors, rows=len(tensors["labels"])))
    return tuple(shards)


def _grouped(batches: Iterable[Batch], rows: int) -> Iterator[list[Batch]]:
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


def _merged(batches: list[Batch], layout: Layout) -> dict[str, Tensor]:
    columns = {name: [getattr(batch, name) for batch in batches] for name in layout.dtypes}
    merged = {name: torch.cat(values) for name, values in columns.items()}
    merged["labels"] = merged["labels"].to(getattr(torch, layout.dtypes["labels"]))
    return merged


def _write_manifest(path: Path, manifest: Manifest) -> None:
    path.write_text(json.dumps(manifest.to_json(), indent=1) + "\n", encoding="utf-8")
    path.chmod(0o644)


def _save(path: Path, tensors: dict[str, Tensor], *, rows: int | None = None) -> Part:
    try:
        save_file(tensors, path)
        path.chmod(0o644)  # save_file's 0o600 would hide the pack from everyone else
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"output {path.name} cannot be written ({error}): free some space or choose "
            "another folder"
        ) from error
    return Part(path.name, path.stat().st_size, sha256(path), rows)
