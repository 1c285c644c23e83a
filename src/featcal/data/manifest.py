"""The manifest of a feature pack: what `manifest.json` may say, read with suspicion."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar, final

import torch
from torch import Tensor, nn

from featcal.core.batch import Batch, Data
from featcal.core.checks import InputError
from featcal.core.fit import check_batch, check_same

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


# --- What all batches of a pack share, and the refusal of a batch that does not share it.

HeadLike = nn.Linear | tuple[Tensor, Tensor | None]


@final
@dataclass(frozen=True, slots=True)
class Layout:
    """The columns and types of the stored tensors: d or None, k, and a type a tensor."""

    features: int | None
    classes: int
    dtypes: dict[str, str]

    def __str__(self) -> str:
        columns = {"features": self.features, "logits": self.classes}
        stored = [name for name in columns if name in self.dtypes]
        return " and ".join(f"{self.dtypes[name]} {name} (n, {columns[name]})" for name in stored)


@final
class Gate:
    """Lets through the batches that fit the head, the class names and the batches before them."""

    def __init__(self, head: dict[str, Tensor] | None, class_names: tuple[str, ...] | None) -> None:
        self.head = head
        self.class_names = class_names
        self.layout: Layout | None = None

    def go_on(self, layout: Layout | None) -> None:
        """Takes over the layout of batches that came before, None where there were none."""
        self.layout = layout
        if layout is not None:
            self._check_names(layout.classes)

    def checked(self, name: str, data: Batch | Data, *, first_row: int = 0) -> Iterator[Batch]:
        """The batches of one split, from a row on, in the types they are stored in.

        Raises:
            InputError: with the name of the split in front; also for a split without rows.
        """
        rows = first_row
        for batch in _batches(name, data):
            try:
                stored = self._check(batch, rows)
            except InputError as error:
                raise InputError(f"split '{name}': {error}") from error
            rows += len(stored)
            yield stored
        if rows == 0:
            raise InputError(f"split '{name}' is empty: give it rows or leave it out")

    def _check(self, batch: Batch, first_row: int) -> Batch:
        if not isinstance(batch, Batch):
            raise InputError(f"data holds a {type(batch).__name__}: every item must be a Batch")
        if len(batch) == 0:
            return batch
        batch = _plain(batch)
        layout = self.layout or self._first(batch)
        check_batch(batch, classes=layout.classes, first_row=first_row)
        found = _layout(batch, layout.classes)
        if found != layout:
            raise InputError(
                f"{found} after {layout}: all batches of a pack must store the same tensors"
            )
        self.layout = layout
        return batch

    def _first(self, batch: Batch) -> Layout:
        """The layout the first batch sets, once it agrees with the head and the class names."""
        if self.head is not None:
            _check_head(self.head["weight"], batch)
            _check_made_by(self.head, batch.rows(slice(0, 64)))
        classes = self._classes(batch)
        self._check_names(classes)
        return _layout(batch, classes)

    def _check_names(self, classes: int) -> None:
        if self.class_names is not None and len(self.class_names) != classes:
            raise InputError(
                f"{len(self.class_names)} class_names for {classes} classes: give one name a class"
            )

    def _classes(self, batch: Batch) -> int:
        if self.head is not None:
            return len(self.head["weight"])
        if batch.logits is not None:
            return batch.logits.shape[1]
        raise InputError("the batch has features and no logits: pass the head of the network")


def _check_made_by(head: dict[str, Tensor], batch: Batch) -> None:
    """Where logits are stored beside features, the head must be the one that made them."""
    if batch.features is not None and batch.logits is not None:
        weight, bias = (head[name].double() for name in ("weight", "bias"))
        check_same(batch.features.double() @ weight.T + bias, batch.logits)


def head_tensors(head: HeadLike | None) -> dict[str, Tensor] | None:
    """Weight (k, d) and bias (k,) of a head, checked against each other; zeros for no bias."""
    if head is None:
        return None
    weight, bias = (head.weight, head.bias) if isinstance(head, nn.Linear) else _pair(head)
    if bias is None:
        bias = torch.zeros(weight.shape[:1], dtype=weight.dtype)
    if weight.ndim != 2 or bias.shape != weight.shape[:1]:
        raise InputError(
            f"head weight has shape {tuple(weight.shape)} and bias {tuple(bias.shape)}: "
            "they must be (classes, features) and (classes,)"
            + ("; give weight.T" if bias.shape == weight.shape[1:] else "")
        )
    values = {"weight": _head_values("weight", weight), "bias": _head_values("bias", bias)}
    if len(weight) > 1:
        return values
    # A sigmoid's one row: class 0 gets the logit 0, as everywhere.
    return {name: torch.cat([torch.zeros_like(row), row]) for name, row in values.items()}


def _pair(head: object) -> tuple[Tensor, Tensor | None]:
    if isinstance(head, tuple) and len(head) == 2:
        weight, bias = head
        if isinstance(weight, Tensor) and (bias is None or isinstance(bias, Tensor)):
            return weight, bias
    raise InputError(f"head is {type(head).__name__}: give an nn.Linear or (weight, bias) tensors")


def _head_values(name: str, values: Tensor) -> Tensor:
    _check_type(f"head {name}", values)
    if not bool(torch.isfinite(values.float()).all()):
        raise InputError(f"head {name} is NaN or infinite in float32: give a trained head")
    return values.detach().cpu().clone(memory_format=torch.contiguous_format)


def _check_type(name: str, values: Tensor) -> None:
    if _dtype(values) not in FLOATS:
        raise InputError(f"{name} has type {_dtype(values)}: give one of {', '.join(FLOATS)}")


def _dtype(values: Tensor) -> str:
    return str(values.dtype).removeprefix("torch.")


def _batches(name: str, data: Batch | Data) -> Data:
    if isinstance(data, Batch):
        return [data]
    if isinstance(data, Iterable):
        return data
    raise InputError(
        f"split '{name}': data is {type(data).__name__}: pass a Batch or a list of Batches"
    )


def _plain(batch: Batch) -> Batch:
    """The batch on the CPU, detached, labels in int64 and logits no wider than they are read."""
    if batch.features is None and batch.logits is None:
        raise InputError("the batch has neither logits nor features: give one of them")
    for name, values in (("features", batch.features), ("logits", batch.logits)):
        if values is not None:
            _check_matrix(name, values)
    labels, features, logits = batch.labels.cpu(), batch.features, batch.logits
    if not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool):
        labels = labels.to(torch.int64)
    if logits is not None:
        narrow = torch.float32 if logits.dtype == torch.float64 else logits.dtype
        logits = logits.detach().to("cpu", narrow)
    return Batch(logits, labels, None if features is None else features.detach().cpu())


def _check_matrix(name: str, values: Tensor) -> None:
    _check_type(name, values)
    if values.ndim != 2 or values.shape[1] == 0:
        raise InputError(f"{name} have shape {tuple(values.shape)}: they must be (rows, columns)")


def _check_head(weight: Tensor, batch: Batch) -> None:
    """Refuses a head that cannot have made this batch."""
    if batch.features is None:
        raise InputError("the batch has no features for the head: add them or leave the head out")
    (classes, columns), d = weight.shape, batch.features.shape[1]
    if columns != d:
        remedy = "it is transposed, give weight.T" if classes == d else "this is not their head"
        raise InputError(
            f"head weight has shape {tuple(weight.shape)} and the features have {d} columns: "
            f"it must be (classes, {d}); {remedy}"
        )
    if batch.logits is not None and batch.logits.shape[1] != classes:
        raise InputError(
            f"head gives {classes} classes and the logits have {batch.logits.shape[1]}: "
            "this is not the head that made them"
        )


def _layout(batch: Batch, classes: int) -> Layout:
    dtypes = {} if batch.features is None else {"features": _dtype(batch.features)}
    dtypes["labels"] = _label_dtype(classes)
    if batch.logits is not None:
        classes = batch.logits.shape[1]
        dtypes["logits"] = _dtype(batch.logits)
    return Layout(None if batch.features is None else batch.features.shape[1], classes, dtypes)


def _label_dtype(classes: int) -> str:
    """The smallest type that holds every label."""
    fits = (name for name in INTEGERS if torch.iinfo(getattr(torch, name)).max >= classes - 1)
    return next(fits)
