"""The feature pack: features, labels and the head of a network in a folder, streamed from disk.

A pack is a directory with `manifest.json`, `head.safetensors` (weight, bias) and the shards
`<split>-00000.safetensors` (labels, and features or logits or both; groups, where a sample has
several rows). Nothing in it is a pickle.
What goes in is checked by `Gate`, batch by batch; what comes out is checked by `Pack.open`, once:
the manifest for what the files cannot tell, and the header of every file against it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict, final

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from featcal.core.batch import CHUNK_ROWS, Batch, Data, wide
from featcal.core.checks import InputError, check_batch, check_finite, check_same, check_whole
from featcal.core.files import new_file, new_folder
from featcal.core.memory import chunk_values
from featcal.core.progress import track
from featcal.core.stored import check_plain, json_of, made, reading
from featcal.heads.head import linear_of

FORMAT = "featcal.pack"
VERSION = 1
MANIFEST = "manifest.json"
FILES = (".npz", ".csv", ".tsv", ".parquet")  # what is often given where a pack is meant
HEAD = "head.safetensors"
REMEDY = "copy the pack again or make it anew"
SPLIT_NAME = re.compile(r"[A-Za-z0-9_]+")
# Neither a slash nor a leading dot can appear: a manifest never points outside its own folder.
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")
# The type of each tensor in the manifest, and the same type in a safetensors header.
FLOATS = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"}
INTEGERS = {"uint8": "U8", "int16": "I16", "int32": "I32", "int64": "I64"}
MULTI_HOT = {"multi_hot": "U8"}  # labels (rows, classes) of 0 and 1: a row may have several
TENSORS = {
    **{"features": FLOATS, "labels": INTEGERS | MULTI_HOT, "logits": FLOATS},
    "groups": {"int64": INTEGERS["int64"]},
}
SHARD_ROWS = 65_536
SMALL = 2**26  # bytes of a file whose sha256 is compared when it is first read: a tenth of a second
DEMO = Path(__file__).parents[1] / "assets" / "cifar100-wrn16x4"

Expected = dict[str, tuple[tuple[int | None, ...], str]]  # of a file's tensors: shape and type
HeadLike = nn.Linear | tuple[Tensor, Tensor | None]


@final
@dataclass(frozen=True)
class PackSplit:
    """One split of a pack: Data that is read from disk on every pass, a chunk at a time.

    Features come as float32 or wider, logits as float32, labels as int64. There is no `len`: a list
    of batches counts batches, so ask for `rows`.

    Attributes:
        part: which of how many parts of equal size, in order, to read; no row of another.
        turn: every how many chunks of these to read, counted from which one.
    """

    path: Path
    name: str
    manifest: Manifest
    checked: set[str] = field(default_factory=set, repr=False, compare=False)
    part: tuple[int, int] = (0, 1)
    turn: tuple[int, int] = (0, 1)

    @property
    def rows(self) -> int:
        """The number of labelled rows, of this part."""
        first, end = self._ends()
        return end - first

    def _ends(self) -> tuple[int, int]:
        (number, parts), rows = self.part, self.manifest.rows(self.name)
        return number * rows // parts, (number + 1) * rows // parts

    @property
    def head(self) -> nn.Linear | None:
        """The pack's head."""
        return Pack(self.path, self.manifest, self.checked).head

    def __repr__(self) -> str:
        return f"PackSplit({str(self.path)!r}, {self.name!r}: {self.rows:,} rows)"

    def __iter__(self) -> Iterator[Batch]:
        (first, last), (number, turns) = self._ends(), self.turn
        width = max(self.manifest.features or 0, self.manifest.classes)
        step = max(1, min(CHUNK_ROWS, chunk_values() // width))
        for shard in self.manifest.splits[self.name]:
            begin, end = max(first, 0), min(last, shard.rows)
            first, last = first - shard.rows, last - shard.rows
            # The chunks of this shard that are read here.
            chunks = range(begin + number * step, end, turns * step)
            number = (number - len(range(begin, end, step))) % turns
            if not chunks:
                continue
            _check_once(self.path, shard, self.checked)
            path = self.path / shard.file
            with reading(path, REMEDY), safe_open(path, framework="pt") as file:
                stored = {name: file.get_slice(name) for name in self.manifest.dtypes}
                for start in chunks:
                    read_ahead(path, (start + turns * step) / shard.rows, step / shard.rows)
                    # Views of the mapped file until they are widened.
                    some = slice(start, min(start + step, end))
                    chunk = {key: part[some] for key, part in stored.items()}
                    features, logits = chunk.get("features"), chunk.get("logits")
                    yield Batch(
                        logits=None if logits is None else logits.float(),
                        labels=chunk["labels"].to(torch.int64),
                        features=None if features is None else wide(features),
                        groups=chunk.get("groups"),
                    )


@final
@dataclass(frozen=True)
class Pack:
    """A feature pack on disk. `Pack.open` checks it; its tensors are read when they are asked for.

    Attributes:
        path: the folder.
        manifest: what it holds.
        checked: the small files whose sha256 was found right, once each.
    """

    path: Path
    manifest: Manifest
    checked: set[str] = field(default_factory=set, repr=False, compare=False)

    @classmethod
    def open(cls, path: Path | str) -> Pack:
        """Opens a pack: reads the manifest, the size and the header of every file, but no tensor.

        Raises:
            InputError: when this is not a pack, or not a whole one.
        """
        path = Path(path)
        if not (path / MANIFEST).is_file():
            why = f"it is not a folder with a {MANIFEST}"
            remedy = 'make one with "featcal pack import FILE... -o DIR"'
            if not path.exists():
                raise InputError(f"{path} does not exist: check its name; of a pack, {remedy}")
            if path.suffix in FILES:
                command = f"import {shlex.quote(str(path))} -o {shlex.quote(path.stem)}"
                remedy = f'import it with "featcal pack {command}"'
            elif (path / "pack" / MANIFEST).is_file():  # where `featcal train` leaves it
                why, remedy = "it is the folder of a run", f"give {path / 'pack'}"
            raise InputError(f"{path} is not a feature pack: {why}; {remedy}")
        manifest = _read_manifest(path / MANIFEST)
        classes, features = manifest.classes, manifest.features
        if manifest.head is not None:
            floats = "/".join(FLOATS.values())
            head: Expected = {"weight": ((classes, features), floats), "bias": ((classes,), floats)}
            _check_file(path, manifest.head, head)
        columns = {"features": (features,), "labels": (), "logits": (classes,), "groups": ()}
        columns |= {"labels": (classes,)} if manifest.several else {}
        for shard in (shard for shards in manifest.splits.values() for shard in shards):
            expected: Expected = {
                name: ((shard.rows, *columns[name]), TENSORS[name][dtype])
                for name, dtype in manifest.dtypes.items()
            }
            _check_file(path, shard, expected)
        return cls(path, manifest)

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the splits."""
        return tuple(self.manifest.splits)

    def __repr__(self) -> str:
        parts = ", ".join(f"{name} {self.manifest.rows(name):,} rows" for name in self.splits)
        return f"Pack({str(self.path)!r}: {parts}, {self.manifest.classes} classes)"

    @property
    def head(self) -> nn.Linear | None:
        """The head in the features' precision, read anew on each call; None when none is stored."""
        if self.manifest.head is None:
            return None
        double = self.manifest.dtypes.get("features") == "float64"
        dtype = torch.float64 if double else torch.float32  # what the features come in
        path = self.path / self.manifest.head.file
        _check_once(self.path, self.manifest.head, self.checked)
        with reading(path, REMEDY), safe_open(path, framework="pt") as file:
            weight, bias = (file.get_tensor(name).to(dtype) for name in ("weight", "bias"))
            for part in (weight, bias):
                check_finite("weight and bias", part, remedy="store a trained head")
        return linear_of(weight.clone(), bias.clone())

    def split(self, name: str) -> PackSplit:
        """One split, as Data."""
        if name not in self.manifest.splits:
            known = ", ".join(self.splits)
            raise InputError(f"{self.path} has no split {name!r}: choose one of {known}")
        return PackSplit(self.path, name, self.manifest, self.checked)

    def verify(self) -> None:
        """Reads every byte and compares it with the sha256 in the manifest.

        Raises:
            InputError: naming the first file that is damaged.
        """
        for part in track("verify", self.manifest.parts()):
            check_sum(self.path, part)

    def summary(self) -> dict[str, Any]:
        """What the pack holds, JSON-ready."""
        manifest = self.manifest
        splits = {
            name: {
                "rows": manifest.rows(name),
                **self._samples(name),
                "shards": len(shards),
                "bytes": sum(shard.bytes for shard in shards),
            }
            for name, shards in manifest.splits.items()
        }
        return {
            "name": self.path.resolve().name,
            "dataset": manifest.dataset,
            "model": manifest.model,
            "features": manifest.features,
            "classes": manifest.classes,
            "head": manifest.head is not None,
            "splits": splits,
            "tensors": dict(manifest.dtypes),
            "bytes": sum(part.bytes for part in manifest.parts()),
            "meta": manifest.meta,
        }

    def _samples(self, split: str) -> dict[str, int]:
        """How many samples the rows of a split belong to, where a sample has several rows."""
        if "groups" not in self.manifest.dtypes:
            return {}
        found: set[int] = set()
        for shard in self.manifest.splits[split]:
            path = self.path / shard.file
            with reading(path, REMEDY), safe_open(path, framework="pt") as file:
                found.update(file.get_tensor("groups").tolist())
        return {"samples": len(found)}


def rows_of(data: Batch | Data | Pack, split: str) -> Batch | Data:
    """A split of a pack; any other data as it is."""
    return data.split(split) if isinstance(data, Pack) else data


def demo_pack() -> Pack:
    """CIFAR-100 through a Wide-ResNet-16-4: 256 features, 5,000 rows of val and 10,000 of test.

    >>> demo_pack().splits
    ('val', 'test')
    """
    return Pack.open(DEMO)


@final
@dataclass(frozen=True, slots=True)
class Part:
    """One file of a pack: its name, its size, its sha256; and its rows when it is a shard."""

    file: str
    bytes: int
    sha256: str
    rows: int = 0

    def __post_init__(self) -> None:
        if not FILE_NAME.fullmatch(self.file):
            raise InputError(f"{self.file!r} is not the plain name of a .safetensors file")

    def to_json(self) -> dict[str, Any]:
        """The part as the manifest writes it; a head has no rows."""
        return {key: value for key, value in asdict(self).items() if value}


class Layout(TypedDict):
    """The columns and types of the tensors of a pack, as its manifest has them."""

    features: int | None
    classes: int
    dtypes: dict[str, str]


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
        dtypes: the stored tensors (of features, labels, logits, groups) and their types.
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

    def __post_init__(self) -> None:
        texts = {"dataset": self.dataset, "model": self.model}
        texts |= {f"class_names[{i}]": name for i, name in enumerate(self.class_names or ())}
        for what, value in texts.items():
            if not isinstance(value, str):
                raise InputError(f"{what} is {value!r}: it must be text")

    @property
    def several(self) -> bool:
        """Whether a row may have several labels."""
        return self.dtypes["labels"] in MULTI_HOT

    def rows(self, split: str) -> int:
        """The rows of one split."""
        return sum(shard.rows for shard in self.splits[split])

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


class _SplitEntry(TypedDict):
    rows: int
    shards: list[Part]


def _read_manifest(path: Path) -> Manifest:
    """A manifest that agrees with itself; `Pack.open` compares its numbers with the files."""
    with reading(path, REMEDY):
        table = json_of(path.read_bytes())
        found = table.pop("format", None) if isinstance(table, dict) else None
        if found != FORMAT:
            said = json.dumps(found)[:80]
            raise InputError(f'{path} is no manifest of a pack: its "format" is {said}')
        version = table.pop("version", None)
        if version != VERSION:
            said = json.dumps(version)[:80]
            raise InputError(
                f"{path} has version {said}, and {VERSION} is read here: update featcal"
            )
        entries = made(dict[str, _SplitEntry], table.get("splits"), "splits")
        plain = {key: one["shards"] for key, one in table["splits"].items()}
        manifest: Manifest = made(Manifest, {**table, "splits": plain})
        rows = {key: one["rows"] for key, one in entries.items()}
        files = [one.file for one in manifest.parts()]
        names, dtypes = manifest.class_names, manifest.dtypes
        known = all(dtype in TENSORS.get(name, ()) for name, dtype in dtypes.items())
        values = "features" in dtypes or "logits" in dtypes
        shards = [part for parts in manifest.splits.values() for part in parts]
        for holds, what in (
            (all(map(SPLIT_NAME.fullmatch, rows)), "a split has no plain name"),
            (names is None or len(names) == manifest.classes, '"class_names" name other classes'),
            (known and "labels" in dtypes and values, f'"dtypes" is {dtypes}'),
            ((manifest.features is None) == ("features" not in dtypes), '"features" is misleading'),
            (files and len(set(files)) == len(files), "it names no file, or one twice"),
            (shards and all(part.rows for part in shards), "a shard has no rows"),
            (rows == {key: manifest.rows(key) for key in rows}, '"rows" disagree with the shards'),
        ):
            if not holds:
                raise ValueError(what)
    return manifest


def read_ahead(path: Path, start: float, share: float) -> None:
    """Asks the system for a share of a file, which is read while this one is computed with."""
    if start >= 1 or not hasattr(os, "posix_fadvise"):
        return
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        span = int(size * start), int(size * share)
        os.posix_fadvise(file.fileno(), *span, os.POSIX_FADV_WILLNEED)


def sha256(path: Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    with reading(path, REMEDY), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_sum(folder: Path, part: Part) -> None:
    """Refuses a file whose bytes are not those that were written."""
    if sha256(folder / part.file) != part.sha256:
        raise InputError(f"{folder / part.file} is damaged: its sha256 has changed; {REMEDY}")


def _check_once(folder: Path, part: Part, checked: set[str]) -> None:
    """The same for a small file, the first time it is read; large ones cost too much unasked."""
    if part.bytes <= SMALL and part.file not in checked:
        check_sum(folder, part)
        checked.add(part.file)


def _check_file(folder: Path, part: Part, expected: Expected) -> None:
    """Compares the size and the header of a file with what the manifest says of it."""
    path = folder / part.file
    if not path.is_file() or path.stat().st_size != part.bytes:
        raise InputError(f"{path} is missing, or has not its {part.bytes} bytes: {REMEDY}")
    with reading(path, REMEDY), safe_open(path, framework="pt") as file:
        stored = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 - not a dict
        found = {key: (tuple(one.get_shape()), one.get_dtype()) for key, one in stored.items()}
    fits = found.keys() == expected.keys() and all(
        shape == expected[key][0] and dtype in expected[key][1].split("/")
        for key, (shape, dtype) in found.items()
    )
    if not fits:
        said, wanted = (
            ", ".join(f"{key} {kind} {shape}" for key, (shape, kind) in sorted(tensors.items()))
            for tensors in (found, expected)
        )
        raise InputError(
            f"{path} disagrees with the manifest: it has {said}, not {wanted}; {REMEDY}"
        )


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
        class_names: one name per class.
        meta: anything else worth keeping, as JSON.
        shard_rows: rows of a full shard.

    Raises:
        InputError: for data no fit could use, by split, row and value; and for an unusable `path`.
    """
    about = described(splits, shard_rows, dataset, model, class_names, meta)
    gate = Gate(None if head is None else head_tensors(head), about.class_names)
    with new_folder(path) as folder:
        shards: dict[str, list[Part]] = {}
        for name, data in track("write", list(splits.items())):
            shards[name] = []
            for batches in grouped(gate.checked(name, data), shard_rows):
                shards[name].append(gate.save(folder, name, len(shards[name]), batches))
        stored = None if gate.head is None else save_part(folder / HEAD, gate.head)
        write_json(folder / MANIFEST, gate.manifest(about, stored, shards).to_json())
    return Pack.open(path)


def described(
    splits: Mapping[str, object],
    shard_rows: int,
    dataset: str,
    model: str,
    class_names: Iterable[str] | None,
    meta: Mapping[str, Any] | None,
) -> Manifest:
    """A manifest of no files yet, in the words of whoever makes the pack; refused if unusable."""
    if not splits:
        raise InputError("splits is empty: give at least one, such as {'val': batches}")
    for name in splits:
        if not isinstance(name, str) or not SPLIT_NAME.fullmatch(name):
            raise InputError(f"split name {name!r}: use letters, digits and _ only")
    check_whole("pack", 1, shard_rows=shard_rows)
    names = None if class_names is None else tuple(class_names)
    try:
        kept = json.loads(json.dumps(dict(meta or {}), allow_nan=False))
        check_plain([kept, dataset, model, *(names or ())])
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"meta or a name cannot be written as JSON ({error}): remove that value"
        ) from error
    return Manifest(dataset, model, names, None, 0, {}, kept, None, {})


def head_tensors(head: HeadLike) -> dict[str, Tensor]:
    """Weight (k, d) and bias (k,) of a head, checked against each other; zeros for no bias."""
    given: object = (head.weight, head.bias) if isinstance(head, nn.Linear) else head
    pair = list(given) if isinstance(given, tuple) else []
    if len(pair) == 2 and pair[1] is None and isinstance(pair[0], Tensor):
        pair[1] = torch.zeros(pair[0].shape[:1], dtype=pair[0].dtype)
    shapes = [tuple(part.shape) for part in pair if isinstance(part, Tensor)]
    if [len(shape) for shape in shapes] != [2, 1] or shapes[0][:1] != shapes[1]:
        raise InputError(
            f"head is a {type(head).__name__} of tensors of shapes {shapes}: give an nn.Linear, or "
            "weight (classes, features) and bias (classes,)"
        )
    values: dict[str, Tensor] = dict(zip(("weight", "bias"), pair, strict=True))
    for name, part in values.items():
        if _dtype(part) not in FLOATS or not bool(torch.isfinite(part.float()).all()):
            raise InputError(
                f"head {name} has type {_dtype(part)}, or is NaN or infinite: give a trained head"
            )
        part = part.detach().cpu().clone(memory_format=torch.contiguous_format)
        # A sigmoid's one row: class 0 gets the logit 0, as everywhere.
        values[name] = part if len(pair[0]) > 1 else torch.cat([torch.zeros_like(part), part])
    return values


def layout_of(batch: Batch, classes: int) -> Layout:
    """Those of a batch.

    Labels take the smallest type that holds every class.
    """
    features, logits = batch.features, batch.logits
    fits = (name for name in INTEGERS if torch.iinfo(getattr(torch, name)).max >= classes - 1)
    dtypes = {} if features is None else {"features": _dtype(features)}
    dtypes["labels"] = next(fits) if batch.labels.ndim == 1 else next(iter(MULTI_HOT))
    if logits is not None:
        classes, dtypes["logits"] = logits.shape[1], _dtype(logits)
    if batch.groups is not None:
        dtypes["groups"] = "int64"
    columns = None if features is None else features.shape[1]
    return {"features": columns, "classes": classes, "dtypes": dtypes}


@final
@dataclass
class Gate:
    """Lets through the batches that fit the head, the class names and the batches before them.

    Attributes:
        head: weight and bias of the head, or None.
        class_names: one name per class, or None.
        layout: of all batches, set by the first one, or that of an earlier run.
    """

    head: dict[str, Tensor] | None
    class_names: Sequence[str] | None
    layout: Layout | None = None

    def checked(self, name: str, data: Batch | Data, *, first_row: int = 0) -> Iterator[Batch]:
        """The batches of one split, from a row on, in the types they are stored in.

        Raises:
            InputError: with the name of the split in front; also for a split without rows.
        """
        batches = [data] if isinstance(data, Batch) else data
        rows = first_row
        for batch in batches:
            try:
                stored = self._checked(batch, rows)
            except InputError as error:
                raise InputError(f"split '{name}': {error}") from error
            rows += len(stored)
            yield stored
        if rows == 0:
            raise InputError(f"split '{name}' is empty: give it rows or leave it out")

    def save(self, folder: Path, split: str, number: int, batches: list[Batch]) -> Part:
        """Writes checked batches as one shard."""
        assert self.layout is not None
        dtypes = self.layout["dtypes"]
        tensors = {key: torch.cat([getattr(part, key) for part in batches]) for key in dtypes}
        kind = "uint8" if dtypes["labels"] in MULTI_HOT else dtypes["labels"]
        tensors["labels"] = tensors["labels"].to(getattr(torch, kind))
        path = folder / f"{split}-{number:05d}.safetensors"
        return save_part(path, tensors, rows=len(tensors["labels"]))

    def manifest(
        self, about: Manifest, head: Part | None, shards: Mapping[str, Sequence[Part]]
    ) -> Manifest:
        """The manifest of a pack of these files."""
        assert self.layout is not None  # every split has a row by now
        splits = {split: tuple(parts) for split, parts in shards.items()}
        return replace(about, **self.layout, head=head, splits=splits)

    def _checked(self, batch: Batch, first_row: int) -> Batch:
        """The batch on the CPU, labels in int64 and logits no wider than they are read."""
        if not isinstance(batch, Batch):
            raise InputError(f"data holds a {type(batch).__name__}: every item must be a Batch")
        if len(batch) == 0:
            return batch
        labels, features, logits = batch.labels.cpu(), batch.features, batch.logits
        for name, values in (("features", features), ("logits", logits)):
            if values is not None and (
                values.ndim != 2 or not values.shape[1] or _dtype(values) not in FLOATS
            ):
                raise InputError(
                    f"{name} have shape {tuple(values.shape)} and type {_dtype(values)}: they must "
                    f"be (rows, columns) of {', '.join(FLOATS)}"
                )
        if not labels.is_floating_point() and labels.dtype != torch.bool:
            labels = labels.to(torch.int64)
        if logits is not None:
            narrow = torch.float32 if logits.dtype == torch.float64 else logits.dtype
            logits = logits.detach().to("cpu", narrow)
        groups = None if batch.groups is None else batch.groups.cpu()
        features = None if features is None else features.detach().cpu()
        batch = Batch(logits, labels, features, groups)
        layout = self.layout or layout_of(batch, self._classes(batch))
        classes, names = layout["classes"], self.class_names
        if names is not None and len(names) != classes:
            raise InputError(f"{len(names)} class_names for {classes} classes: name each once")
        check_batch(batch, classes=classes, first_row=first_row)
        found = layout_of(batch, classes)
        if found != layout:
            raise InputError(f"{found} after {layout}: all batches must hold the same tensors")
        self.layout = layout
        return batch

    def _classes(self, batch: Batch) -> int:
        """How many classes the first batch has, once it agrees with the head."""
        features, logits = batch.features, batch.logits
        if self.head is None:
            if logits is None:
                raise InputError("the batch has no logits: add them, or pass features and the head")
            return logits.shape[1]
        weight, bias = self.head["weight"], self.head["bias"]
        if features is None:
            raise InputError("the batch has no features for the head: add them, or leave it out")
        classes, d = len(weight), features.shape[1]
        if weight.shape[1] != d:
            turned = "it is transposed, give weight.T" if classes == d else "it is not theirs"
            raise InputError(
                f"head weight has shape {tuple(weight.shape)} and the features have {d} "
                f"columns: it must be (classes, {d}); {turned}"
            )
        if logits is not None:  # the head must be the one that made them
            few = features[:64].double()
            check_same(few @ weight.double().T + bias.double(), logits[:64])
        return classes


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


def save_part(path: Path, tensors: dict[str, Tensor], *, rows: int = 0) -> Part:
    """Writes tensors to a file that appears whole or not at all."""
    with new_file(path, overwrite=True) as temporary:
        save_file(tensors, temporary)
    return Part(path.name, path.stat().st_size, sha256(path), rows)


def write_json(path: Path, value: object) -> None:
    """Writes JSON that appears whole or not at all."""
    with new_file(path, overwrite=True) as temporary:
        temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _dtype(values: Tensor) -> str:
    return str(values.dtype).removeprefix("torch.")
