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

import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from sys import maxsize
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from torch import Tensor

from featcal.core.batch import CHUNK_ROWS, Batch, Chunked, zero_or_one
from featcal.core.checks import CalibrationWarning, InputError, Kind, doubt_logits
from featcal.core.files import REMOVE, check_free
from featcal.core.stored import json_of, made, map_npy, npy_of, reading
from featcal.data.pack import SPLIT_NAME, Gate, Pack, head_tensors, write_pack
from featcal.data.tables import (
    UNLABELLED,
    Contents,
    about,
    check_columns,
    listed,
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
PACKINGS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # those of numpy's archives
ANEW = "copy it again or save it anew"

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
        source = {"source": "probabilities"} if contents.kind == "probs" else {}
        pack = write_pack(
            out,
            contents.splits,
            head=contents.head,
            class_names=contents.class_names,
            meta=source | meta,
            **names,
        )
    if told := doubt(pack):
        warnings.warn(told, CalibrationWarning, stacklevel=2)
    return pack


def doubt(pack: Pack) -> str:
    """Says where what was imported as logits looks like probabilities; else empty."""
    first = next(iter(pack.split(pack.splits[0])))
    if first.logits is None or first.labels.ndim > 1:
        return ""
    remedy = "import them with --probs, or as arrays called <split>_probs,"
    return doubt_logits(first.logits, f"the rows of {pack.splits[0]}", remedy)


def read_files(
    paths: Paths, *, label: str = "label", kind: Kind | None = None, ignore: Sequence[str] = ()
) -> dict[str, Batch]:
    """The same files in memory: one `Batch` per split, by name; logits in float32, as in a pack.

    >>> read_files("val.csv", kind="logits")["val"]  # doctest: +SKIP
    """
    with _contents(paths, label, kind, ignore) as contents:
        head = None if contents.head is None else head_tensors(contents.head)
        gate = Gate(head, contents.class_names)
        splits = {name: gate.checked(name, data) for name, data in contents.splits.items()}
        return {name: next(iter(Chunked(data, rows=maxsize))) for name, data in splits.items()}


@contextmanager
def opened_rows(
    path: FilePath, *, label: str = "label", kind: Kind | None = None, ignore: Sequence[str] = ()
) -> Iterator[Contents]:
    """One file of rows to predict, while it is open; labels need not be there, and are all 0.

    An .npy file is what its name or `kind` says.
    """
    given: Paths = path
    if kind and Path(path).suffix.lower() == ".npy":
        given, kind = {f"rows_{kind}": path}, None
    with _contents(given, label, kind, ignore, labelled=False) as contents:
        yield contents


@contextmanager
def _contents(
    paths: Paths, label: str, kind: str | None, ignore: Sequence[str], *, labelled: bool = True
) -> Iterator[Contents]:
    """What the files hold, while they are open; what is wrong with it is said with their names."""
    if kind not in (None, "logits", "probs"):
        raise InputError(f"kind is {kind!r}: give 'logits' or 'probs'")
    files = _named_files(paths)
    with about(*(path for _, path in files)), ExitStack() as stack:
        lists = [path for _, path in files if path.suffix.lower() == ".parquet" and _lists(path)]
        arrays = [file for file in files if file[1].suffix.lower() in ARRAYS or file[1] in lists]
        if not arrays:
            tables: dict[str, Path] = {}
            for name, path in files:
                if tables.setdefault(name, path) is not path:
                    raise InputError(
                        f"two tables are called {name!r}: give each its split, as in 'val={path}'"
                    )
            skipped = [ignore] if isinstance(ignore, str) else ignore
            yield table_contents(tables, label, cast(Kind | None, kind), skipped, labelled=labelled)
            return
        table = next((path for name, path in files if (name, path) not in arrays), None)
        if table is not None:
            raise InputError(
                f"{table} is a table and {arrays[0][1]} holds arrays: import one at a time"
            )
        if kind or ignore or (label != "label" and not lists):
            raise InputError(
                "--logits, --probs, --label and --ignore are for tables: the names of arrays say it"
            )
        owners: dict[str, Path] = {}
        loaders: Loaders = {}
        for name, path in arrays:
            for bare, loader in _opened(stack, name, path, label).items():
                key = f"{name}_{bare}" if bare in SPLIT_PARTS else bare
                if key in owners:
                    raise InputError(f"{key} is in {owners[key]} and {path}: leave one out")
                owners[key], loaders[key] = path, loader
        yield _array_contents(loaders, labelled=labelled)


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
    with reading(path, ANEW):
        if suffix == ".npz":
            archive = stack.enter_context(zipfile.ZipFile(path))
            members = {one.filename.removesuffix(".npy"): one for one in archive.infolist()}
            return {key: partial(_member, archive, one) for key, one in members.items()}
        if suffix == ".safetensors":
            tensors = stack.enter_context(safe_open(path, framework="pt"))
            keys, texts = tensors.keys(), tensors.metadata() or {}
            loaders: Loaders = {key: partial(tensors.get_tensor, key) for key in keys}
            if "class_names" in texts:
                loaders["class_names"] = lambda: np.array(
                    made(list[str], json_of(texts["class_names"]))
                )
            if "meta" in texts:
                loaders["meta"] = lambda: np.array(texts["meta"])
            return loaders
    if suffix == ".npy":
        if not name.endswith(ENDS) and name not in WHOLE:
            raise InputError(
                f"{path}: the name {name!r} does not say what the array is: name it val_logits, "
                f"val_labels, ..., or give the name, as in val_logits={path} (for rows to predict, "
                "say --logits or --probs)"
            )
        return {name: partial(map_npy, path)}
    columns = {part: part for part in _lists(path)} | {"labels": label}
    return {key: partial(_column, path, column) for key, column in columns.items()}


def _member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Array:
    """One array of an .npz archive; its own checksum is compared."""
    if member.compress_type not in PACKINGS:
        raise ValueError(f"it is packed by way {member.compress_type} of zip, which numpy never is")
    with archive.open(member) as stream:
        return npy_of(stream, member.compress_size)


def _lists(path: Path) -> list[str]:
    """The columns of a .parquet file that are arrays: logits, probs or features as lists."""
    with open_parquet(path) as file:
        fields = [field for field in file.schema_arrow if field.name in SPLIT_PARTS[:3]]
    return [field.name for field in fields if "list" in str(field.type)]


def _column(path: Path, name: str) -> Array:
    with open_parquet(path) as file:
        if name not in file.schema_arrow.names:
            raise InputError(f"{path} has no column {name!r}: name that of the labels with --label")
        check_columns(path, file, [name])
        values = file.read(columns=[name]).column(name).to_numpy()
        return np.stack(values) if values.dtype == object else np.array(values)


def _array_contents(loaders: Loaders, *, labelled: bool = True) -> Contents:
    """What arrays are, by their names alone; those of a split are loaded when it is asked for."""
    if not labelled:
        loaders = {key: one for key, one in loaders.items() if not key.endswith("_labels")}
    keys = list(loaders)
    if not any(key.endswith(ENDS[:3]) for key in keys):
        raise InputError(f"it has no scores (found: {listed(keys)}): name the arrays {EXPECTED}")
    splits = list(dict.fromkeys(key.rpartition("_")[0] for key in keys if key.endswith(ENDS)))
    probs = [split for split in splits if f"{split}_probs" in keys]
    kind: Kind = "probs" if probs else "logits"
    for split in splits:
        parts = [part for part in SPLIT_PARTS[:3] if f"{split}_{part}" in keys]
        if (labelled and f"{split}_labels" not in keys) or not parts:
            missing = f"{split}_logits or {split}_features" if not parts else f"{split}_labels"
            hint = f" ({UNLABELLED})" if parts else ""
            raise InputError(f"{missing} is missing: add what split '{split}' lacks{hint}")
        if probs and parts != ["probs"]:
            raise InputError(
                f"{probs[0]}_probs and {split}_{parts[0]} are both there: give probabilities alone"
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
    with reading("meta", "save the text that json.dumps({...}) gives"):
        text = texts["meta"].item() if "meta" in texts else "{}"
        meta = made(dict[str, Any], json_of(text))  # type: ignore[arg-type]
    with reading("class_names", "save a list of texts"):
        names = texts.get("class_names")
        class_names = None if names is None else np.atleast_1d(names).tolist()
    data = {split: _rows(loaders, split, kind) for split in splits}
    return Contents(data, head, class_names, meta, kind)


def _tensor(loaders: Loaders, key: str) -> Tensor:
    """One array of numbers; one that lies in a mapped file is read where it is looked at."""
    values = _array(loaders, key)
    plain = values.dtype.itemsize <= 8  # torch has no long doubles
    if isinstance(values, np.ndarray) and values.dtype.kind in "fiub" and plain:
        # Files may hold the other byte order, which torch does not take.
        values = torch.from_numpy(np.asarray(values, values.dtype.newbyteorder("=")))
    if not isinstance(values, Tensor) or values.is_complex() or values.ndim not in (1, 2):
        raise InputError(
            f"{key} has type {values.dtype} and shape {tuple(values.shape)}: save rows of numbers"
        )
    return values


def _array(loaders: Loaders, key: str) -> Array | Tensor:
    """One array as its file gives it."""
    with reading(key, "save numbers or text"):
        values = loaders[key]()
    return values if isinstance(values, Tensor) else np.asarray(values)


def _rows(loaders: Loaders, split: str, kind: Kind) -> Iterator[Batch]:
    """The rows of one split, loaded when they are asked for and not kept."""
    keys = {part: f"{split}_{part}" for part in SPLIT_PARTS}
    values = {part: _tensor(loaders, key) for part, key in keys.items() if key in loaders}
    features, scores = values.get("features"), values.get(kind)
    size = len(next(iter(values.values())))
    labels = values.get("labels", torch.zeros(size, dtype=torch.int64))
    for part, found in values.items():
        if len(found) != len(labels):
            raise InputError(f"{keys[part]} has {len(found)} rows and {len(labels)} labels")
    if scores is None and len(_tensor(loaders, "weight")) == 1:
        labels = zero_or_one(labels)  # those of a binary loss
    for start in range(0, len(labels), CHUNK_ROWS):

        def place(row: int, start: int = start) -> str:
            return f"{keys[kind]}, row {start + row},"

        rows = slice(start, start + CHUNK_ROWS)
        batch = Batch(None, labels[rows])
        if scores is not None:
            batch = scored(kind, scores[rows], labels[rows], place)
        yield replace(batch, features=None if features is None else features[rows])
