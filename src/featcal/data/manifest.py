"""The manifest of a feature pack: what `manifest.json` may say, and where it is checked."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from featcal.core.checks import InputError

FORMAT = "featcal.pack"
VERSION = 1
MANIFEST = "manifest.json"
HEAD = "head.safetensors"
REMEDY = "copy the pack again or make it anew"

SPLIT_NAME = re.compile(r"[A-Za-z0-9_]+")
# Neither a slash nor a leading dot can appear: a manifest never points outside its own folder.
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")
SHA256 = re.compile(r"[0-9a-f]{64}")

# The type of each tensor in the manifest, and the same type in a safetensors header.
FLOATS = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"}
INTEGERS = {"uint8": "U8", "int16": "I16", "int32": "I32", "int64": "I64"}
TENSORS = {"features": FLOATS, "labels": INTEGERS, "logits": FLOATS}


@final
@dataclass(frozen=True, slots=True)
class Part:
    """One file of a pack: its name, its size, its sha256; and its rows when it is a shard."""

    file: str
    bytes: int
    sha256: str
    rows: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The part as the manifest writes it; a head has no rows."""
        return {key: value for key, value in asdict(self).items() if value is not None}


@final
@dataclass(frozen=True, slots=True)
class Manifest:
    """What a pack holds.

    Attributes:
        dataset: the name of the data set, or "".
        model: the name of the network, or "".
        class_names: one name per class, or None.
        features: d, or None when only logits are stored.
        classes: k.
        dtypes: the stored tensors (of features, labels, logits) and their types.
        meta: anything else worth keeping, as JSON.
        head: the file of the linear head, or None.
        splits: the shards of every split, in order.
    """

    dataset: str
    model: str
    class_names: tuple[str, ...] | None
    features: int | None
    classes: int
    dtypes: dict[str, str]
    meta: dict[str, Any]
    head: Part | None
    splits: dict[str, tuple[Part, ...]]

    def rows(self, split: str) -> int:
        """The rows of one split."""
        return sum(shard.rows or 0 for shard in self.splits[split])

    def parts(self) -> list[Part]:
        """Every file beside the manifest."""
        shards = [shard for shards in self.splits.values() for shard in shards]
        return shards if self.head is None else [self.head, *shards]

    def to_json(self) -> dict[str, Any]:
        """The manifest as it is written."""
        head = None if self.head is None else self.head.to_json()
        splits = {
            name: {"rows": self.rows(name), "shards": [shard.to_json() for shard in shards]}
            for name, shards in self.splits.items()
        }
        fields = {**asdict(self), "head": head, "splits": splits}
        return {"format": FORMAT, "version": VERSION, **fields}


def read_manifest(path: Path) -> Manifest:
    """Reads and checks a manifest; the files it names are not looked at.

    Raises:
        InputError: for anything but a manifest this version of featcal understands.
    """
    try:
        table = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}; {REMEDY}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid JSON ({error}): {REMEDY}") from error
    found = table.get("format") if isinstance(table, dict) else None
    if found != FORMAT:
        raise InputError(
            f'{path} is not the manifest of a feature pack: its "format" is {json.dumps(found)}, '
            f'not "{FORMAT}"; give the folder of a pack'
        )
    try:
        version = _count(table, "version")
        manifest = None if version > VERSION else _manifest(table)
    except ValueError as error:
        raise InputError(f"{path} is damaged: {error}; {REMEDY}") from error
    if manifest is None:
        raise InputError(
            f"{path} has version {version} and this featcal reads version {VERSION}: update featcal"
        )
    return manifest


def _manifest(table: dict[str, Any]) -> Manifest:
    """The manifest a JSON object describes, each field and all of them together checked."""
    width, head, names = (_value(table, key) for key in ("features", "head", "class_names"))
    manifest = Manifest(
        dataset=_value(table, "dataset", str),
        model=_value(table, "model", str),
        class_names=None if names is None else tuple(_value(table, "class_names", list)),
        features=None if width is None else _count(table, "features"),
        classes=_count(table, "classes"),
        dtypes=_value(table, "dtypes", dict),
        meta=_value(table, "meta", dict),
        head=None if head is None else _part(_value(table, "head", dict)),
        splits={
            name: _shards(name, split) for name, split in _value(table, "splits", dict).items()
        },
    )
    dtypes, files = manifest.dtypes, [part.file for part in manifest.parts()]
    known = all(str(dtype) in TENSORS.get(name, {}) for name, dtype in dtypes.items())
    named = names is None or [type(name) for name in names] == [str] * manifest.classes
    for holds, what in (
        (known and "labels" in dtypes and len(dtypes) > 1, f'"dtypes" is no pack\'s: {dtypes}'),
        ((width is None) == ("features" not in dtypes), '"features" and "dtypes" disagree'),
        (head is None or width is not None, 'it names a "head" and no features to feed it'),
        (named, '"class_names" must name every class once'),
        (manifest.splits, "it has no split"),
        (len(set(files)) == len(files), "it names a file twice"),
    ):
        if not holds:
            raise ValueError(what)
    return manifest


def _shards(name: str, split: Any) -> tuple[Part, ...]:  # noqa: ANN401 - JSON holds anything
    if not SPLIT_NAME.fullmatch(name):
        raise ValueError(f"the split name {name!r} must be letters, digits and _ only")
    rows, listed = _count(split, "rows"), _value(split, "shards", list)
    shards = tuple(_part(shard, rows=_count(shard, "rows")) for shard in listed)
    total = sum(shard.rows or 0 for shard in shards)
    if total != rows:
        raise ValueError(f"split {name!r} promises {rows} rows and its shards have {total}")
    return shards


def _part(table: Any, *, rows: int | None = None) -> Part:  # noqa: ANN401
    name, digest = _value(table, "file", str), _value(table, "sha256", str)
    if not FILE_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not the plain name of a .safetensors file inside the pack")
    if not SHA256.fullmatch(digest):
        raise ValueError(f'the "sha256" of "{name}" is not 64 hexadecimal digits')
    return Part(name, _count(table, "bytes"), digest, rows)


def _value(table: Any, key: str, kind: type | None = None) -> Any:  # noqa: ANN401
    """A field of a JSON object; of exactly this type, for JSON's true would pass for 1."""
    if type(table) is not dict or key not in table:
        raise ValueError(f'"{key}" is missing')
    if kind is not None and type(table[key]) is not kind:
        raise ValueError(f'"{key}" is {json.dumps(table[key])[:40]}: {kind.__name__} is expected')
    return table[key]


def _count(table: Any, key: str) -> int:  # noqa: ANN401
    value: int = _value(table, key, int)
    if value < 1:
        raise ValueError(f'"{key}" is {value}, and at least 1 is expected')
    return value
