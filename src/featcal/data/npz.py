"""Importing an `.npz` file of arrays, the form in which features usually leave a notebook.

For every split `<split>_labels` and `<split>_features` or `<split>_logits` or both; `weight` (k, d)
and `bias` (k,) of the head, which features need (a missing bias is a head without one: zeros); and,
if they are there, `class_names` and `meta` (JSON text, whose `dataset` and `model` name the pack).
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from featcal.core.batch import Batch
from featcal.core.disk import REMOVE, check_free
from featcal.core.errors import InputError
from featcal.data.pack import Pack
from featcal.data.write import write_pack

EXPECTED = "<split>_features or <split>_logits, <split>_labels, weight, bias"

Array = npt.NDArray[Any]


def import_npz(file: Path | str, out: Path | str) -> Pack:
    """Writes the arrays of an `.npz` file as a feature pack; one split at a time is in memory.

    Raises:
        InputError: for a file or an array that cannot be used; nothing is left under `out`.
    """
    file = Path(file)
    check_free(out, remedy=REMOVE)
    with _opened(file) as arrays, _naming(file):
        meta = arrays.meta()
        return write_pack(
            out,
            {split: _Lazy(arrays, split) for split in arrays.splits()},
            head=arrays.head(),
            dataset=_text(meta, "dataset"),
            model=_text(meta, "model"),
            class_names=arrays.class_names(),
            meta=meta,
        )


@contextmanager
def _opened(file: Path) -> Iterator[_Arrays]:
    if not file.exists():
        raise InputError(f"{file} does not exist: give the path of an .npz file")
    if not file.is_file() or not zipfile.is_zipfile(file):
        raise InputError(
            f"{file} is not an .npz file, or only a part of one: "
            "copy it again or save it with numpy.savez"
        )
    try:
        archive = np.load(file, allow_pickle=False)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise InputError(f"{file} cannot be read ({error}): save it again") from error
    with archive:
        yield _Arrays(archive)


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Puts the name of the file in front of what is wrong with its content."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{file}: {error}") from error


@final
class _Lazy:
    """The rows of one split, loaded when they are asked for and not kept."""

    def __init__(self, arrays: _Arrays, split: str) -> None:
        self.arrays = arrays
        self.split = split

    def __iter__(self) -> Iterator[Batch]:
        labels = self.arrays.labels(f"{self.split}_labels")
        tensors = {
            name: self._matrix(f"{self.split}_{name}", len(labels))
            for name in ("features", "logits")
        }
        yield Batch(tensors["logits"], labels, tensors["features"])

    def _matrix(self, key: str, rows: int) -> Tensor | None:
        if key not in self.arrays.keys:
            return None
        values = self.arrays.tensor(key)
        if values.ndim != 2:
            raise InputError(f"{key} has shape {tuple(values.shape)}: it must be (rows, columns)")
        if len(values) != rows:
            raise InputError(
                f"{key} has {len(values)} rows and {self.split}_labels {rows}: give one label a row"
            )
        return values


@final
class _Arrays:
    """The arrays of an open `.npz` file by key, each refused by that key."""

    def __init__(self, archive: Mapping[str, Any]) -> None:
        self.archive = archive
        self.keys = list(archive)

    def splits(self) -> list[str]:
        """The splits found by the suffix of their keys, in the order of the file."""
        ends = ("_features", "_logits", "_labels")
        found = [key.rpartition("_")[0] for key in self.keys if key.endswith(ends)]
        splits = list(dict.fromkeys(found))
        if not any(key.endswith(ends[:2]) for key in self.keys):
            raise InputError(
                f"it has neither features nor logits (found: {_listed(self.keys)}): "
                f"name the arrays {EXPECTED}"
            )
        for split in splits:
            self._check_split(split)
        return splits

    def _check_split(self, split: str) -> None:
        if f"{split}_labels" not in self.keys:
            raise InputError(f"{split}_labels is missing: add the labels of split '{split}'")
        if f"{split}_features" not in self.keys and f"{split}_logits" not in self.keys:
            raise InputError(
                f"{split}_labels has no rows to label: add {split}_features or {split}_logits"
            )
        if f"{split}_features" in self.keys and "weight" not in self.keys:
            raise InputError(
                f"weight is missing, and {split}_features cannot be used without the head: "
                "add weight (classes, features) and bias (classes,), or keep logits alone"
            )

    def head(self) -> tuple[Tensor, Tensor | None] | None:
        """The head; None when there is none."""
        if "weight" not in self.keys:
            if "bias" in self.keys:
                raise InputError("bias is there without weight: add the weight of the head")
            return None
        return self.tensor("weight"), self.tensor("bias") if "bias" in self.keys else None

    def labels(self, key: str) -> Tensor:
        """Labels (n,) as int64."""
        values = self.array(key)
        if values.ndim != 1:
            remedy = f"{key}.ravel()" if values.shape[1:] == (1,) else f"{key}.argmax(1) if one-hot"
            raise InputError(f"{key} has shape {values.shape}: it must be (rows,), try {remedy}")
        if values.dtype.kind not in "iu":
            raise InputError(f"{key} has type {values.dtype}: save integers, {key}.astype('int64')")
        return torch.from_numpy(values.astype(np.int64))

    def class_names(self) -> list[str] | None:
        """The names of the classes; None when they are not given."""
        if "class_names" not in self.keys:
            return None
        values = self.array("class_names")
        if values.ndim != 1 or values.dtype.kind != "U":
            raise InputError(
                f"class_names has shape {values.shape} and type {values.dtype}: "
                "save a list of text, one name a class"
            )
        return [str(name) for name in values]

    def meta(self) -> dict[str, Any]:
        """The object in `meta`; empty when it is not given."""
        if "meta" not in self.keys:
            return {}
        values = self.array("meta")
        try:
            meta = (
                json.loads(values.item()) if values.dtype.kind in "US" and not values.ndim else None
            )
        except (ValueError, RecursionError):
            meta = None
        if not isinstance(meta, dict):
            raise InputError("meta is not a JSON object: save the text json.dumps({...}) gives")
        return meta

    def tensor(self, key: str) -> Tensor:
        """A floating-point array as a tensor of the same type."""
        values = self.array(key)
        if values.dtype.kind != "f" or values.dtype.itemsize > 8:
            raise InputError(f"{key} has type {values.dtype}: save float16, float32 or float64")
        # Files may hold the other byte order, and arrays no dimension: torch takes neither.
        return torch.from_numpy(np.array(values, dtype=values.dtype.newbyteorder("="), copy=None))

    def array(self, key: str) -> Array:
        """One array, read whole."""
        try:
            values = self.archive[key]
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError) as error:
            raise InputError(f"{key} cannot be read ({error}): copy the file again") from error
        except ValueError as error:
            pickled = "allow_pickle" in str(error)
            why = "holds Python objects" if pickled else f"cannot be read ({error})"
            raise InputError(f"{key} {why}: save it as plain numbers or text") from error
        if not isinstance(values, np.ndarray):
            raise InputError(f"{key} is not an array: save the file with numpy.savez")
        return values


def _text(meta: dict[str, Any], key: str) -> str:
    """Takes a name out of `meta`: the manifest has a field of its own for it."""
    value = meta.pop(key, "")
    if not isinstance(value, str):
        raise InputError(f'the "{key}" in meta is {value!r}: it must be text')
    return value


def _listed(keys: list[str]) -> str:
    return ", ".join(keys[:12]) + (", ..." if len(keys) > 12 else "") if keys else "nothing"
