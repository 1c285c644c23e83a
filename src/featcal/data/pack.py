"""The feature pack: features, labels and the head of a network in a folder, streamed from disk.

A pack is a directory with `manifest.json`, `head.safetensors` (weight, bias) and the shards
`<split>-00000.safetensors` (labels, and features or logits or both). Nothing in it is a pickle.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from featcal.core.batch import CHUNK_ROWS, Batch, Data, wide
from featcal.core.checks import InputError
from featcal.core.files import new_file, new_folder
from featcal.core.progress import track
from featcal.data.manifest import (
    FLOATS,
    HEAD,
    MANIFEST,
    REMEDY,
    SPLIT_NAME,
    TENSORS,
    Gate,
    HeadLike,
    Layout,
    Manifest,
    Part,
    head_tensors,
    read_manifest,
)
from featcal.heads.head import linear_of


@final
@dataclass(frozen=True)
class PackSplit:
    """One split of a pack: Data that is read from disk on every pass, a chunk at a time.

    Features come as float32 or wider, logits as float32, labels as int64. There is no `len`: a list
    of batches counts batches, so ask for `rows`.
    """

    path: Path
    name: str
    manifest: Manifest

    @property
    def rows(self) -> int:
        """The number of labelled rows."""
        return self.manifest.rows(self.name)

    def __iter__(self) -> Iterator[Batch]:
        for shard in self.manifest.splits[self.name]:
            yield from _chunks(self.path / shard.file, shard.rows or 0)


@final
@dataclass(frozen=True)
class Pack:
    """A feature pack on disk. `Pack.open` checks it; its tensors are read when they are asked for.

    Attributes:
        path: the folder.
        manifest: what it holds.
    """

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: Path | str) -> Pack:
        """Opens a pack: reads the manifest, the size and the header of every file, but no tensor.

        Raises:
            InputError: when this is not a pack, or not a whole one.
        """
        path = Path(path)
        _check_folder(path)
        manifest = read_manifest(path / MANIFEST)
        for part in manifest.parts():
            _check_size(path / part.file, part)
        if manifest.head is not None:
            _check_header(path / manifest.head.file, _head_shapes(manifest))
        for shards in manifest.splits.values():
            for shard in shards:
                _check_header(path / shard.file, _shard_shapes(manifest, shard), manifest.dtypes)
        return cls(path, manifest)

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the splits."""
        return tuple(self.manifest.splits)

    @property
    def head(self) -> nn.Linear | None:
        """The head in the features' precision, read anew on each call; None when none is stored."""
        if self.manifest.head is None:
            return None
        with _opened(self.path / self.manifest.head.file) as file:
            double = self.manifest.dtypes.get("features") == "float64"
            dtype = torch.float64 if double else torch.float32  # what the features come in
            weight, bias = (file.get_tensor(name).to(dtype) for name in ("weight", "bias"))
        return linear_of(weight.clone(), bias.clone())

    def split(self, name: str) -> PackSplit:
        """One split, as Data."""
        if name not in self.manifest.splits:
            known = ", ".join(self.splits)
            raise InputError(f"{self.path} has no split {name!r}: choose one of {known}")
        return PackSplit(self.path, name, self.manifest)

    def verify(self) -> None:
        """Reads every byte and compares it with the sha256 in the manifest.

        Raises:
            InputError: naming the first file that is damaged.
        """
        for part in track("verify", self.manifest.parts()):
            path = self.path / part.file
            if sha256(path) != part.sha256:
                raise InputError(f"{path} is damaged: its sha256 has changed; {REMEDY}")

    def summary(self) -> dict[str, Any]:
        """What the pack holds, JSON-ready."""
        manifest = self.manifest
        return {
            "name": self.path.resolve().name,
            "dataset": manifest.dataset,
            "model": manifest.model,
            "features": manifest.features,
            "classes": manifest.classes,
            "head": manifest.head is not None,
            "splits": {name: self._split_summary(name) for name in self.splits},
            "tensors": dict(manifest.dtypes),
            "bytes": sum(part.bytes for part in manifest.parts()),
            "meta": manifest.meta,
        }

    def _split_summary(self, name: str) -> dict[str, int]:
        shards = self.manifest.splits[name]
        size = sum(shard.bytes for shard in shards)
        return {"rows": self.manifest.rows(name), "shards": len(shards), "bytes": size}


def sha256(path: Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}; {REMEDY}") from error


def _chunks(path: Path, rows: int) -> Iterator[Batch]:
    """The batches of one shard; the slices are views of the mapped file until they are widened."""
    with _opened(path) as file:
        stored = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        for start in range(0, rows, CHUNK_ROWS):
            chunk = {name: part[start : start + CHUNK_ROWS] for name, part in stored.items()}
            yield _batch(chunk)


def _batch(chunk: Mapping[str, Tensor]) -> Batch:
    features, logits = chunk.get("features"), chunk.get("logits")
    return Batch(
        logits=None if logits is None else logits.float(),
        labels=chunk["labels"].to(torch.int64),
        features=None if features is None else wide(features),
    )


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A safetensors file; what is wrong with it is an InputError that names it."""
    try:
        file = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} cannot be read ({error}): {REMEDY}") from error
    with file as opened:
        yield opened


def _check_folder(path: Path) -> None:
    if path.suffix == ".npz" and path.is_file():
        command = f"featcal pack import {shlex.quote(str(path))} -o {shlex.quote(path.stem)}"
        raise InputError(f'{path} is an .npz file, not a feature pack: import it with "{command}"')
    if (path / MANIFEST).is_file():
        return
    inside = path / "pack"  # where `featcal train` leaves the one of a run
    if (inside / MANIFEST).is_file():
        raise InputError(f"{path} is not a feature pack, but the folder of a run: give {inside}")
    why = f"it has no {MANIFEST}"
    if not path.is_dir():
        why = "it is a file, not a folder" if path.exists() else "it does not exist"
    raise InputError(
        f'{path} is not a feature pack: {why}; make one with "featcal pack import FILE... -o DIR"'
    )


def _check_size(path: Path, part: Part) -> None:
    if not path.is_file():
        raise InputError(f"{path} is missing: {REMEDY}")
    size = path.stat().st_size
    if size != part.bytes:
        what = "truncated" if size < part.bytes else "not the file that was written"
        raise InputError(
            f"{path} has {size} bytes and the manifest says {part.bytes}: it is {what}; {REMEDY}"
        )


def _head_shapes(manifest: Manifest) -> dict[str, list[int | None]]:
    return {"weight": [manifest.classes, manifest.features], "bias": [manifest.classes]}


def _shard_shapes(manifest: Manifest, shard: Part) -> dict[str, list[int | None]]:
    shapes: dict[str, list[int | None]] = {
        "features": [shard.rows, manifest.features],
        "labels": [shard.rows],
        "logits": [shard.rows, manifest.classes],
    }
    return {name: shapes[name] for name in manifest.dtypes}


def _check_header(
    path: Path, shapes: Mapping[str, list[int | None]], dtypes: Mapping[str, str] | None = None
) -> None:
    """Compares the header of a file with the manifest; a head may have any floating type."""
    with _opened(path) as file:
        if set(file.keys()) != set(shapes):
            _disagree(path, f"it holds {', '.join(file.keys())}", ", ".join(shapes))
        for name, shape in shapes.items():
            stored = file.get_slice(name)
            found, dtype = stored.get_shape(), stored.get_dtype()
            if found != shape:
                _disagree(path, f"its {name} have shape {found}", str(shape))
            allowed = [TENSORS[name][dtypes[name]]] if dtypes else list(FLOATS.values())
            if dtype not in allowed:
                _disagree(path, f"its {name} are {dtype}", " or ".join(allowed))


def _disagree(path: Path, found: str, expected: str) -> None:
    raise InputError(f"{path} disagrees with the manifest: {found}, not {expected}; {REMEDY}")


# --- The shards of a pack: batches of any length go in, files of one length come out, each whole.

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


# --- Writing a feature pack from batches that are at hand.


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


# --- The pack that travels inside featcal, so that every command has something to run on.

DEMO = Path(__file__).parents[1] / "assets" / "cifar100-wrn16x4"


def demo_pack() -> Pack:
    """CIFAR-100 through a Wide-ResNet-16-4: 256 features, 5,000 rows of val and 10,000 of test.

    >>> demo_pack().splits
    ('val', 'test')
    """
    return Pack.open(DEMO)
