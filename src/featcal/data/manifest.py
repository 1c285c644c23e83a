"""The manifest of a feature pack: what `manifest.json` may say, read with suspicion."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar, final

from featcal.core.errors import InputError

FORMAT = "featcal.pack"
VERSION = 1
MANIFEST = "manifest.json"
HEAD = "head.safetensors"

SPLIT_NAME = re.compile(r"[A-Za-z0-9_]+")
# Neither a slash nor a leading dot can appear: a manifest never points outside its own folder.
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")
SHA256 = re.compile(r"[0-9a-f]{64}")

# The type of each tensor in the manifest, and the same type in a safetensors header.
FLOATS = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"}
INTEGERS = {"uint8": "U8", "int16": "I16", "int32": "I32", "int64": "I64"}
TENSORS = {"features": FLOATS, "labels": INTEGERS, "logits": FLOATS}
REMEDY = "copy the pack again or make it anew"

Kind = TypeVar("Kind")


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
        class_names: one name a class, or None.
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
        splits = {
            name: {"rows": self.rows(name), "shards": [shard.to_json() for shard in shards]}
            for name, shards in self.splits.items()
        }
        return {
            "format": FORMAT,
            "version": VERSION,
            "dataset": self.dataset,
            "model": self.model,
            "class_names": None if self.class_names is None else list(self.class_names),
            "features": self.features,
            "classes": self.classes,
            "dtypes": self.dtypes,
            "meta": self.meta,
            "head": None if self.head is None else self.head.to_json(),
            "splits": splits,
        }


def read_manifest(path: Path) -> Manifest:
    """Reads and checks a manifest; the files it names are not looked at.

    Raises:
        InputError: for anything but a manifest this version of featcal understands.
    """
    fields = _Fields(str(path), _load(path))
    found = fields.table.get("format")
    if found != FORMAT:
        raise InputError(
            f'{path} is not the manifest of a feature pack: its "format" is {_short(found)}, not '
            f'"{FORMAT}"; give the folder of a pack'
        )
    version = fields.count("version")
    if version > VERSION:
        raise InputError(
            f"{path} has version {version} and this featcal reads version {VERSION}: update featcal"
        )
    return _manifest(fields)


def _load(path: Path) -> object:
    try:
        return json.loads(path.read_bytes().decode(), parse_constant=_refuse_constant)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}; {REMEDY}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid JSON ({error}): {REMEDY}") from error


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _manifest(fields: _Fields) -> Manifest:
    head = fields.value("head")
    manifest = Manifest(
        dataset=fields.get("dataset", str),
        model=fields.get("model", str),
        class_names=_class_names(fields),
        features=None if fields.value("features") is None else fields.count("features"),
        classes=fields.count("classes"),
        dtypes=_dtypes(fields),
        meta=fields.get("meta", dict),
        head=None if head is None else _part(fields.child("head")),
        splits=_splits(fields.child("splits")),
    )
    _check_whole(fields, manifest)
    return manifest


def _check_whole(fields: _Fields, manifest: Manifest) -> None:
    """What no field can tell alone."""
    if (manifest.features is None) == ("features" in manifest.dtypes):
        fields.refuse('"features" and "dtypes" disagree on whether features are stored')
    if manifest.head is not None and manifest.features is None:
        fields.refuse('it names a "head" and no features to feed it')
    if manifest.class_names is not None and len(manifest.class_names) != manifest.classes:
        fields.refuse(f"{len(manifest.class_names)} class names for {manifest.classes} classes")
    name, times = Counter(part.file for part in manifest.parts()).most_common(1)[0]
    if times > 1:
        fields.refuse(f'it names the file "{name}" {times} times')


def _class_names(fields: _Fields) -> tuple[str, ...] | None:
    if fields.value("class_names") is None:
        return None
    names = fields.get("class_names", list)
    if not all(isinstance(name, str) for name in names):
        fields.refuse('"class_names" must hold text only')
    return tuple(names)


def _dtypes(fields: _Fields) -> dict[str, str]:
    dtypes: dict[str, str] = fields.get("dtypes", dict)
    for name, dtype in dtypes.items():
        if not isinstance(dtype, str) or dtype not in TENSORS.get(name, {}):
            fields.refuse(f'"dtypes" says {name!r} is {dtype!r}, which no pack stores')
    if "labels" not in dtypes or len(dtypes) < 2:
        fields.refuse('"dtypes" must name labels, and features or logits')
    return dtypes


def _splits(fields: _Fields) -> dict[str, tuple[Part, ...]]:
    if not fields.table:
        fields.refuse("it has no split")
    return {name: _shards(fields, name) for name in fields.table}


def _shards(fields: _Fields, name: str) -> tuple[Part, ...]:
    if not SPLIT_NAME.fullmatch(name):
        fields.refuse(f"the split name {name!r} must be letters, digits and _ only")
    split = fields.child(name)
    rows = split.count("rows")
    found = [_Fields(split.where, shard) for shard in split.get("shards", list)]
    shards = tuple(_part(shard, rows=shard.count("rows")) for shard in found)
    total = sum(shard.rows or 0 for shard in shards)
    if total != rows:
        split.refuse(f"{rows} rows are promised and its shards have {total}")
    return shards


def _part(fields: _Fields, *, rows: int | None = None) -> Part:
    name, digest = fields.get("file", str), fields.get("sha256", str)
    if not FILE_NAME.fullmatch(name):
        fields.refuse(f"{name!r} is not the plain name of a .safetensors file inside the pack")
    if not SHA256.fullmatch(digest):
        fields.refuse(f'the "sha256" of "{name}" is not 64 hexadecimal digits')
    return Part(name, fields.count("bytes"), digest, rows)


@final
class _Fields:
    """A JSON object that says where it was found when one of its fields is wrong."""

    def __init__(self, where: str, value: object) -> None:
        self.where = where
        if not isinstance(value, dict):
            self.refuse(f"an object is expected, not {_short(value)}")
        self.table: dict[str, Any] = value

    def refuse(self, what: str) -> NoReturn:
        raise InputError(f"{self.where} is damaged: {what}; {REMEDY}")

    def value(self, key: str) -> Any:  # noqa: ANN401 - JSON holds anything
        if key not in self.table:
            self.refuse(f'"{key}" is missing')
        return self.table[key]

    def get(self, key: str, kind: type[Kind]) -> Kind:
        value = self.value(key)
        # Not isinstance: JSON's true would pass for the number 1.
        if type(value) is not kind:
            self.refuse(f'"{key}" is {_short(value)}, and {kind.__name__} is expected')
        return value

    def count(self, key: str) -> int:
        value = self.get(key, int)
        if value < 1:
            self.refuse(f'"{key}" is {value}, and at least 1 is expected')
        return value

    def child(self, key: str) -> _Fields:
        return _Fields(f'{self.where}, "{key}",', self.value(key))


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
