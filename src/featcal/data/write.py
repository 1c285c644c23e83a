"""Writing a feature pack from batches that are at hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from featcal.core.batch import Batch, Data
from featcal.core.disk import new_folder
from featcal.core.errors import InputError
from featcal.core.progress import track
from featcal.data.layout import Gate, HeadLike, Layout, head_tensors
from featcal.data.manifest import HEAD, MANIFEST, SPLIT_NAME, Manifest, Part
from featcal.data.pack import Pack
from featcal.data.shards import SHARD_ROWS, grouped, save_part, save_shard, write_manifest


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
    check_splits(splits, shard_rows)
    about = About.checked(dataset, model, class_names, meta)
    gate = Gate(head_tensors(head), about.class_names)
    with new_folder(path) as folder:
        shards = {
            name: _write_split(folder, name, gate, data, shard_rows)
            for name, data in track("write", list(splits.items()))
        }
        stored = None if gate.head is None else save_part(folder / HEAD, gate.head)
        assert gate.layout is not None  # every split has a row by now
        write_manifest(folder / MANIFEST, about.manifest(gate.layout, stored, shards))
    return Pack.open(path)


def check_splits(splits: Mapping[str, object], shard_rows: int) -> None:
    """Refuses names of splits no pack can have, and shards of no rows."""
    if not splits:
        raise InputError("splits is empty: give at least one, such as {'val': batches}")
    for name in splits:
        if not isinstance(name, str) or not SPLIT_NAME.fullmatch(name):
            raise InputError(f"split name {name!r}: use letters, digits and _ only")
    if shard_rows < 1:
        raise InputError(f"shard_rows is {shard_rows}: it must be at least 1")


@final
@dataclass(frozen=True)
class About:
    """What a pack is about, in the words of whoever makes it."""

    dataset: str
    model: str
    class_names: tuple[str, ...] | None
    meta: dict[str, Any]

    @classmethod
    def checked(
        cls,
        dataset: object,
        model: object,
        class_names: Sequence[str] | None,
        meta: Mapping[str, Any] | None,
    ) -> About:
        """The same words, or an error before the work begins."""
        return cls(
            _text("dataset", dataset), _text("model", model), _names(class_names), _json(meta)
        )

    def manifest(
        self, layout: Layout, head: Part | None, splits: dict[str, tuple[Part, ...]]
    ) -> Manifest:
        """The manifest of a pack of these files."""
        return Manifest(
            dataset=self.dataset,
            model=self.model,
            class_names=self.class_names,
            features=layout.features,
            classes=layout.classes,
            dtypes=layout.dtypes,
            meta=self.meta,
            head=head,
            splits=splits,
        )


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InputError(f"{name} is {value!r}: it must be text")
    return value


def _names(names: Sequence[str] | None) -> tuple[str, ...] | None:
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
    for number, batches in enumerate(grouped(gate.checked(name, data), shard_rows)):
        assert gate.layout is not None
        shards.append(save_shard(folder, f"{name}-{number:05d}", batches, gate.layout))
    return tuple(shards)
