"""From files of logits, probabilities or features to a feature pack, whatever their format.

Files of arrays (.npz, .npy, .safetensors, .parquet with columns of lists) hold for every split
`<split>_labels`, and `<split>_logits` or `<split>_probs` or `<split>_features` (or features and
logits); a bare `logits` or `labels` belongs to the split that the file is named for. Beside these
`weight` (k, d) and `bias` (k,) of the head, which features need, and `class_names` and `meta` (JSON
text, whose `dataset` and `model` name the pack). Nothing is read before it is used, and no pickle
ever. Tables are read by `featcal.data.tables`. What the values must be is checked where a pack is
written, by `Gate`.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from sys import maxsize
from typing import Any, cast, final

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from featcal.core.batch import CHUNK_ROWS, Batch, Chunked, zero_or_one
from featcal.core.checks import InputError, Kind
from featcal.core.files import REMOVE, check_free
from featcal.data.manifest import SPLIT_NAME
from featcal.data.pack import Gate, Pack, head_tensors, write_pack
from featcal.data.tables import (
    Contents,
    Reading,
    about,
    listed,
    noted,
    open_parquet,
    scored,
    table_contents,
)

SPLIT_PARTS = ("features", "logits", "probs", "labels")  # the arrays a split may have
ENDS = tuple(f"_{part}" for part in SPLIT_PARTS)
WHOLE = ("weight", "bias", "class_names", "meta")  # what belongs to no split
EXPECTED = (
    "<split>_features or <split>_logits or <split>_probs, <split>_labels, and weight and bias with "
    "features"
)
ARRAYS = (".npz", ".npy", ".safetensors")
TABLES = (".csv", ".tsv", ".parquet")
PICKLES = (".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".bin", ".joblib")
FORMATS = "an .npz, .npy, .safetensors, .csv, .tsv or .parquet file"
# What a damaged file may raise while an array is read; numpy refuses a pickle with a ValueError.
DAMAGE = (
    *(zipfile.BadZipFile, zlib.error, SafetensorError),
    *(EOFError, OSError, RuntimeError, TypeError, ValueError),
)

Array = npt.NDArray[Any]
Loaders = dict[str, Callable[[], Array | Tensor]]  # the arrays of files, by name
FilePath = str | Path
Paths = FilePath | Sequence[FilePath] | Mapping[str, FilePath]


def import_files(
    paths: Paths,
    out: Path | str,
    *,
    label: str = "label",
    kind: Kind | None = None,
    ignore: Sequence[str] = (),
) -> Pack:
    """Writes files of logits, probabilities or features as a feature pack.

    Args:
        paths: one file, or several. A text may be `NAME=PATH` and a mapping has names as keys; the
            name is else that of the file without its ending. It is the split of a table (val), and
            what the array of an .npy file is (val_logits).
        out: the folder to make; it must not exist.
        label: the column of the labels, in tables.
        kind: what the numbers are, "logits" or "probs", in tables whose columns do not say it.
        ignore: columns of tables that are no scores, by name or pattern.

    Raises:
        InputError: for a file that cannot be used; nothing is left under `out`.
    """
    check_free(out, remedy=REMOVE)
    with _contents(paths, label, kind, ignore) as contents:
        meta = dict(contents.meta)  # the manifest has fields of their own for these two
        names = {key: meta.pop(key, "") for key in ("dataset", "model")}
        return write_pack(
            out,
            contents.splits,
            head=contents.head,
            class_names=contents.class_names,
            meta=meta,
            **names,
        )


def read_files(
    paths: Paths,
    *,
    label: str = "label",
    kind: Kind | None = None,
    ignore: Sequence[str] = (),
) -> dict[str, Batch]:
    """The same files in memory: one `Batch` per split, by name; logits in float32, as in a pack.

    >>> read_files("val.csv", kind="logits")["val"]  # doctest: +SKIP
    """
    with _contents(paths, label, kind, ignore) as contents:
        head = None if contents.head is None else head_tensors(contents.head)
        gate = Gate(head, contents.class_names)
        splits = {name: gate.checked(name, data) for name, data in contents.splits.items()}
        return {name: next(iter(Chunked(data, rows=maxsize))) for name, data in splits.items()}


def import_npz(file: Path | str, out: Path | str) -> Pack:
    """Writes the arrays of an `.npz` file as a feature pack; one split at a time is in memory.

    Raises:
        InputError: for a file or an array that cannot be used; nothing is left under `out`.
    """
    if Path(file).is_file() and Path(file).suffix.lower() != ".npz":
        raise InputError(f"{file} is not an .npz file: import_files reads other formats")
    return import_files(Path(file), out)


@contextmanager
def _contents(
    paths: Paths, label: str, kind: str | None, ignore: Sequence[str]
) -> Iterator[Contents]:
    """What the files hold, while they are open; what is wrong with it is said with their names."""
    if kind not in (None, "logits", "probs"):
        raise InputError(f"kind is {kind!r}: give 'logits' or 'probs'")
    skipped = (ignore,) if isinstance(ignore, str) else tuple(ignore)
    reading = Reading(label, cast(Kind | None, kind), skipped)
    files = _named_files(paths)
    with about(*(path for _, path in files)), ExitStack() as stack:
        lists = [path for _, path in files if path.suffix.lower() == ".parquet" and _lists(path)]
        arrays = [file for file in files if file[1].suffix.lower() in ARRAYS or file[1] in lists]
        if not arrays:
            tables: dict[str, Path] = {}
            for name, path in files:
                if tables.setdefault(name, path) is not path:
                    raise InputError(
                        f"{tables[name]} and {path} are both called {name!r}: give each its split, "
                        f"as in 'val={path}'"
                    )
            yield table_contents(tables, reading)
            return
        table = next((path for name, path in files if (name, path) not in arrays), None)
        if table is not None:
            raise InputError(
                f"{table} is a table and {arrays[0][1]} holds arrays: import them one by one"
            )
        if reading != (Reading(label) if lists else Reading()):
            raise InputError(
                "--logits, --probs, --label and --ignore (kind=, label= and ignore= in Python) are "
                "for tables: the names of arrays say what they are, <split>_logits, <split>_labels"
            )
        owners: dict[str, Path] = {}
        loaders: Loaders = {}
        for name, path in arrays:
            for key, loader in _opened(stack, name, path, label).items():
                if key in owners:
                    raise InputError(
                        f"{key} is in {owners[key]} and in {path}: leave one of them out"
                    )
                owners[key], loaders[key] = path, loader
        yield _array_contents(loaders)


def _named_files(paths: Paths) -> list[tuple[str, Path]]:
    """The files and the names they go by, refused where they are not there or of no known kind."""
    if isinstance(paths, Mapping):
        given = [(name, Path(path)) for name, path in paths.items()]
    else:
        given = []
        for text in [paths] if isinstance(paths, str | Path) else paths:
            name, mark, rest = str(text).partition("=")
            # A folder may be called lr=0.1: what is there as it is written is meant.
            named = mark and SPLIT_NAME.fullmatch(name) and not Path(text).exists()
            path = Path(rest if named and isinstance(text, str) else text)
            given.append((name if named else path.stem, path))
    if not given:
        raise InputError(f"paths is empty: give {FORMATS}")
    for _, path in given:
        suffix = path.suffix.lower()
        if suffix in PICKLES:
            raise InputError(
                f"{path}: a {suffix} file is a pickle, which can run code when it is read, and is "
                "never read: load it where you trust it and save its arrays, "
                "numpy.savez('arrays.npz', val_logits=..., val_labels=...)"
            )
        if not path.exists():
            raise InputError(f"{path} does not exist: give the path of {FORMATS}")
        if not path.is_file() or suffix not in ARRAYS + TABLES:
            raise InputError(f"{path} is not {FORMATS}: convert it to one of these")
    return given


def _opened(stack: ExitStack, name: str, path: Path, label: str) -> Loaders:
    """The arrays of one file by name, open as long as the stack is."""
    suffix = path.suffix.lower()
    try:
        if suffix == ".npz":
            # Not numpy.load, which takes what is no archive for a pickle.
            file = stack.enter_context(path.open("rb"))
            archive = stack.enter_context(np.lib.npyio.NpzFile(file))
            return {_whole_key(key, name): partial(archive.__getitem__, key) for key in archive}
        if suffix == ".safetensors":
            tensors = stack.enter_context(safe_open(path, framework="pt"))
            keys, texts = tensors.keys(), tensors.metadata() or {}
            loaders: Loaders = {
                _whole_key(key, name): partial(tensors.get_tensor, key) for key in keys
            }
            if "class_names" in texts:
                loaders["class_names"] = lambda: np.array(json.loads(texts["class_names"]))
            if "meta" in texts:
                loaders["meta"] = lambda: np.array(texts["meta"])
            return loaders
    except DAMAGE as error:
        raise InputError(
            f"{path} is not {'an' if suffix == '.npz' else 'a'} {suffix} file, or only a part of "
            f"one ({error}): copy it again or save it anew"
        ) from error
    if suffix == ".npy":
        if not name.endswith(ENDS) and name not in WHOLE:
            raise InputError(
                f"{path}: the name {name!r} does not say what the array is: name the files "
                f"{EXPECTED}; or give the name, as in val_logits={path}"
            )
        # Copy on write: torch takes no array it may not write to, and the file stays as it is.
        return {name: partial(np.lib.format.open_memmap, path, mode="c")}
    columns = {f"{name}_{part}": part for part in _lists(path)} | {f"{name}_labels": label}
    return {key: partial(_column, path, column) for key, column in columns.items()}


def _whole_key(key: str, split: str) -> str:
    """The name of an array with its split: a bare one has that of the file."""
    return f"{split}_{key}" if key in SPLIT_PARTS else key


def _lists(path: Path) -> list[str]:
    """The columns of a .parquet file that are arrays: logits, probs or features as lists."""
    with open_parquet(path) as file:
        fields = [field for field in file.schema_arrow if field.name in SPLIT_PARTS[:3]]
    return [field.name for field in fields if "list" in str(field.type)]


def _column(path: Path, name: str) -> Array:
    with open_parquet(path) as file:
        if name not in file.schema_arrow.names:
            raise InputError(
                f"{path} has no column {name!r}: name the column of labels with --label "
                "(label= in Python)"
            )
        values = file.read(columns=[name]).column(name).to_numpy()
    return np.stack(values) if values.dtype == object else np.array(values)


def _array_contents(loaders: Loaders) -> Contents:
    """What arrays are, by their names alone; those of a split are loaded when it is asked for."""
    keys = list(loaders)
    if not any(key.endswith(ENDS[:3]) for key in keys):
        raise InputError(
            "it has neither features nor logits nor probs "
            f"(found: {listed(keys)}): name the arrays {EXPECTED}"
        )
    splits = list(dict.fromkeys(key.rpartition("_")[0] for key in keys if key.endswith(ENDS)))
    probs = [split for split in splits if f"{split}_probs" in keys]
    kind: Kind = "probs" if probs else "logits"
    for split in splits:
        parts = [part for part in SPLIT_PARTS[:3] if f"{split}_{part}" in keys]
        if f"{split}_labels" not in keys:
            raise InputError(f"{split}_labels is missing: add the labels of split '{split}'")
        if not parts:
            raise InputError(
                f"{split}_labels has no rows to label: add {split}_features or {split}_logits"
            )
        if probs and parts != ["probs"]:
            raise InputError(
                f"{probs[0]}_probs and {split}_{parts[0]} are both there: give the probabilities "
                "of every split, and nothing else of it, or none"
            )
        if ("features" in parts or "bias" in keys) and "weight" not in keys:
            raise InputError(
                f"weight is missing, and {split}_features or bias cannot be used without the head: "
                "add weight (classes, features) and bias (classes,), or keep logits alone"
            )
    head = None
    if "weight" in keys:
        bias = _tensor(loaders, "bias") if "bias" in keys else None
        head = _tensor(loaders, "weight"), bias
    texts = {key: _array(loaders, key) for key in ("class_names", "meta") if key in keys}
    names, meta = texts.get("class_names"), cast(Any, None if "meta" in texts else {})
    if names is not None and (
        isinstance(names, Tensor) or names.ndim != 1 or names.dtype.kind != "U"
    ):
        raise InputError(
            f"class_names has shape {tuple(names.shape)} and type {names.dtype}: save a list of "
            "text, one name per class"
        )
    if "meta" in texts:
        with suppress(TypeError, ValueError):
            meta = json.loads(texts["meta"].item())  # type: ignore[arg-type]
    if not isinstance(meta, dict):
        raise InputError("meta is not a JSON object: save the text json.dumps({...}) gives")
    data = {split: _Split(loaders, split, kind) for split in splits}
    return Contents(data, head, None if names is None else names.tolist(), noted(meta, kind))


def _tensor(loaders: Loaders, key: str) -> Tensor:
    """One array of numbers; one that lies in a mapped file is read where it is looked at."""
    values = _array(loaders, key)
    plain = values.dtype.itemsize <= 8  # torch has no long doubles
    if isinstance(values, np.ndarray) and values.dtype.kind in "fiub" and plain:
        # Files may hold the other byte order, which torch does not take.
        values = torch.from_numpy(np.asarray(values, values.dtype.newbyteorder("=")))
    if not isinstance(values, Tensor) or values.is_complex() or values.ndim not in (1, 2):
        raise InputError(
            f"{key} has type {values.dtype} and shape {tuple(values.shape)}: save rows of float16, "
            "float32 or float64, and labels as integers"
        )
    return values


def _array(loaders: Loaders, key: str) -> Array | Tensor:
    """One array as its file gives it."""
    try:
        values = loaders[key]()
    except InputError:
        raise
    except DAMAGE as error:
        raise InputError(
            f"{key} cannot be read ({error}): copy the file again, or save {key} as plain numbers "
            "or text"
        ) from error
    return values if isinstance(values, Tensor) else np.asarray(values)


@final
@dataclass(frozen=True)
class _Split:
    """The rows of one split, loaded when they are asked for and not kept."""

    loaders: Loaders
    split: str
    kind: Kind

    def __iter__(self) -> Iterator[Batch]:
        keys = {part: f"{self.split}_{part}" for part in SPLIT_PARTS}
        known = {part: key for part, key in keys.items() if key in self.loaders}
        values = {part: _tensor(self.loaders, key) for part, key in known.items()}
        labels, features, scores = values["labels"], values.get("features"), values.get(self.kind)
        for part, found in values.items():
            if len(found) != len(labels):
                raise InputError(
                    f"{keys[part]} has {len(found)} rows and {keys['labels']} {len(labels)}: give "
                    "one label per row"
                )
        if scores is None and len(_tensor(self.loaders, "weight")) == 1:
            labels = zero_or_one(labels)  # those of a binary loss
        for start in range(0, len(labels), CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            batch = Batch(None, labels[rows])
            if scores is not None:
                place = partial(_place, keys[self.kind], start)
                batch = scored(self.kind, scores[rows], labels[rows], place)
            yield replace(batch, features=None if features is None else features[rows])


def _place(key: str, start: int, row: int) -> str:
    return f"{key}, row {start + row},"
