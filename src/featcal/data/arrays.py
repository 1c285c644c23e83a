"""Named arrays, the form in which logits and features usually leave a notebook, as `Contents`.

For every split `<split>_labels`, and `<split>_logits` or `<split>_probs` or `<split>_features` (or
features and logits); `weight` (k, d) and `bias` (k,) of the head, which features need (a missing
bias is a head without one: zeros); and, if they are there, `class_names` and `meta` (JSON text,
whose `dataset` and `model` name the pack).
"""

from __future__ import annotations

import json
import math
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from featcal.core.batch import CHUNK_ROWS, Batch, Data, is_single, stored_logits, zero_or_one
from featcal.core.checks import ROUNDING, InputError, Kind
from featcal.data.manifest import FLOATS

# --- What files hold, in the terms of `write_pack`: every format is read as this, and only this.

SPLIT_PARTS = ("features", "logits", "probs", "labels")  # the arrays a split may have
SLACK = 1e-2  # how far from 1 the probabilities of a row may sum, rounded as files are


@final
@dataclass(frozen=True, slots=True)
class Contents:
    """The splits of one or more files, each read when it is asked for, and what goes with them.

    Attributes:
        splits: the data of every split, by name.
        head: weight (k, d) and bias (k,) of the last layer, or None.
        class_names: one name a class, or None.
        meta: anything else worth keeping, as JSON.
    """

    splits: Mapping[str, Data]
    head: tuple[Tensor, Tensor | None] | None = None
    class_names: Sequence[str] | None = None
    meta: dict[str, Any] = field(default_factory=dict)


@contextmanager
def about(*files: Path) -> Iterator[None]:
    """Puts the files in front of what is wrong with them, unless the sentence names one already."""
    try:
        yield
    except InputError as error:
        if any(str(file) in str(error) for file in files):
            raise
        names = listed([str(file) for file in files], at_most=2)
        raise InputError(f"{names}: {error}") from error


def listed(names: Sequence[str], *, at_most: int = 12) -> str:
    """Names for a sentence; the first few of many."""
    shown = ", ".join(names[:at_most]) + (", ..." if len(names) > at_most else "")
    return shown or "nothing"


def noted(meta: dict[str, Any], kind: str) -> dict[str, Any]:
    """The meta of a pack whose logits are logarithms of probabilities says so."""
    return {"source": "probabilities", **meta} if kind == "probs" else meta


def scored(kind: Kind, values: Tensor, labels: Tensor, place: Callable[[int], str]) -> Batch:
    """A batch of rows of logits or probabilities, (n, k), or (n,) or (n, 1) of class 1.

    Args:
        kind: what the values are.
        values: the scores.
        labels: (n,) integers.
        place: what to call a row, by its number in `values`, when it is refused.
    """
    if kind == "logits":
        return Batch(values, labels)
    wide = values.double()
    _check_probs(wide.reshape(len(wide), -1), place)
    batch = Batch.from_probs(wide.clamp(0, 1), labels)
    return replace(batch, logits=stored_logits(batch).clamp_min(_floor(values.dtype)).float())


def _floor(dtype: torch.dtype) -> float:
    """The logit of a probability that is 0 as stored: the smallest one the type could tell from 0.

    For wider types it is that of float32, so that the same numbers give the same pack.
    """
    half = torch.finfo(torch.float16)
    tiny = half.tiny * half.eps if dtype == torch.float16 else torch.finfo(torch.float32).tiny
    return math.log(tiny)


def _check_probs(probs: Tensor, place: Callable[[int], str]) -> None:
    """Refuses the first row that is no distribution; comparisons with NaN are false."""
    single = is_single(probs)
    inside = ((probs >= -ROUNDING) & (probs <= 1 + ROUNDING)).all(1)
    sums = probs.sum(1)
    fits = inside if single else inside & ((sums - 1).abs() <= SLACK)
    if bool(fits.all()):
        return
    row = int((~fits).nonzero()[0])
    low, high = float(probs[row].min()), float(probs[row].max())
    total = "" if single else f" with the sum {float(sums[row]):.6g}"
    raise InputError(
        f"{place(row)} holds numbers from {low:.6g} to {high:.6g}{total}: probabilities lie in "
        f"0..1{'' if single else ' and sum to 1'}; divide percentages by 100, and name logits as "
        "logits"
    )


EXPECTED = (
    "<split>_features or <split>_logits or <split>_probs, <split>_labels, and weight and bias with "
    "features"
)
ENDS = tuple(f"_{part}" for part in SPLIT_PARTS)

Array = npt.NDArray[Any]
Loader = Callable[[], Array | Tensor]
DAMAGE = (zipfile.BadZipFile, zlib.error, SafetensorError, EOFError, OSError, RuntimeError)


def array_contents(loaders: Mapping[str, Loader]) -> Contents:
    """Contents of arrays that are loaded when they are asked for, one split at a time.

    Raises:
        InputError: for an array that is missing or cannot be used, by its name.
    """
    arrays = _Arrays(loaders)
    meta, splits = arrays.meta(), arrays.splits()
    kind = _kind(arrays.keys, splits)
    return Contents(
        {split: _Split(arrays, split, kind) for split in splits},
        arrays.head(),
        arrays.class_names(),
        noted(meta, kind),
    )


def _kind(keys: list[str], splits: list[str]) -> Kind:
    """What the scores of the splits are; all alike, for one pack holds them."""
    given = [split for split in splits if f"{split}_probs" in keys]
    if not given:
        return "logits"
    for split in splits:
        for part in ("features", "logits"):
            if f"{split}_{part}" in keys:
                raise InputError(
                    f"{given[0]}_probs and {split}_{part} are both there: give the probabilities "
                    "of every split, and nothing else of it, or none"
                )
    return "probs"


@final
class _Split:
    """The rows of one split, loaded when they are asked for and not kept."""

    def __init__(self, arrays: _Arrays, split: str, kind: Kind) -> None:
        self.arrays = arrays
        self.split = split
        self.kind = kind

    def __iter__(self) -> Iterator[Batch]:
        features, scores = self._values("features"), self._values(self.kind)
        single = self._single_head() if scores is None else is_single(scores)
        labels = self.arrays.labels(f"{self.split}_labels", single=single)
        self._check("features", features, labels, dims=(2,))
        self._check(self.kind, scores, labels, dims=(1, 2))
        for start in range(0, len(labels), CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            part = None if features is None else features[rows]
            if scores is None:
                yield Batch(None, labels[rows], part)
                continue
            batch = scored(self.kind, scores[rows], labels[rows], self._place(start))
            yield Batch(batch.logits, batch.labels, part)

    def _single_head(self) -> bool:
        return "weight" in self.arrays.keys and len(self.arrays.floats("weight")) == 1

    def _values(self, part: str) -> Tensor | None:
        key = f"{self.split}_{part}"
        return self.arrays.floats(key) if key in self.arrays.keys else None

    def _place(self, start: int) -> Callable[[int], str]:
        return lambda row: f"{self.split}_{self.kind}, row {start + row},"

    def _check(
        self, part: str, values: Tensor | None, labels: Tensor, *, dims: tuple[int, ...]
    ) -> None:
        if values is None:
            return
        key = f"{self.split}_{part}"
        if values.ndim not in dims:
            raise InputError(f"{key} has shape {tuple(values.shape)}: it must be (rows, columns)")
        if len(values) != len(labels):
            raise InputError(
                f"{key} has {len(values)} rows and {self.split}_labels {len(labels)}: give one "
                "label a row"
            )


@final
class _Arrays:
    """The arrays by key, each refused by that key."""

    def __init__(self, loaders: Mapping[str, Loader]) -> None:
        self.loaders = loaders
        self.keys = list(loaders)

    def splits(self) -> list[str]:
        """The splits found by the ends of their keys, in the order of the files."""
        if not any(key.endswith(ENDS[:3]) for key in self.keys):
            raise InputError(
                "it has neither features nor logits nor probs "
                f"(found: {listed(self.keys)}): name the arrays {EXPECTED}"
            )
        found = [key.rpartition("_")[0] for key in self.keys if key.endswith(ENDS)]
        splits = list(dict.fromkeys(found))
        for split in splits:
            self._check_split(split)
        return splits

    def _check_split(self, split: str) -> None:
        if f"{split}_labels" not in self.keys:
            raise InputError(f"{split}_labels is missing: add the labels of split '{split}'")
        if not any(f"{split}{end}" in self.keys for end in ENDS[:3]):
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
        return self.floats("weight"), self.floats("bias") if "bias" in self.keys else None

    def labels(self, key: str, *, single: bool) -> Tensor:
        """Labels (n,) as int64; beside one logit a row they may be those of a binary loss."""
        values = self.numbers(key)
        if single and values.ndim:
            values = zero_or_one(values)
        if values.ndim != 1:
            shape = tuple(values.shape)
            remedy = f"{key}.ravel()" if shape[1:] == (1,) else f"{key}.argmax(1) if one-hot"
            raise InputError(f"{key} has shape {shape}: it must be (rows,), try {remedy}")
        if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
            raise InputError(
                f"{key} has type {_type(values)}: save integers, {key}.astype('int64')"
            )
        return values.to(torch.int64)

    def floats(self, key: str) -> Tensor:
        """Floating-point values in the type they are stored in."""
        values = self.numbers(key)
        if _type(values) not in FLOATS:
            raise InputError(f"{key} has type {_type(values)}: save float16, float32 or float64")
        return values

    def numbers(self, key: str) -> Tensor:
        """One array of numbers; one that lies in a mapped file is read where it is looked at."""
        values = self.array(key)
        if isinstance(values, Tensor):
            return values
        if values.dtype.kind not in "fiub" or values.dtype.itemsize > 8:
            raise InputError(
                f"{key} has type {values.dtype}: save float16, float32 or float64, and labels as "
                "integers"
            )
        # Files may hold the other byte order, which torch does not take.
        return torch.from_numpy(np.asarray(values, dtype=values.dtype.newbyteorder("=")))

    def class_names(self) -> list[str] | None:
        """The names of the classes; None when they are not given."""
        if "class_names" not in self.keys:
            return None
        values = self.array("class_names")
        if isinstance(values, Tensor) or values.ndim != 1 or values.dtype.kind != "U":
            raise InputError(
                f"class_names has shape {tuple(values.shape)} and type {values.dtype}: "
                "save a list of text, one name a class"
            )
        return [str(name) for name in values]

    def meta(self) -> dict[str, Any]:
        """The object in `meta`; empty when it is not given."""
        values = self.array("meta") if "meta" in self.keys else np.array("{}")
        meta = None
        if isinstance(values, np.ndarray) and values.dtype.kind in "US" and not values.ndim:
            try:
                meta = json.loads(values.item())
            except (ValueError, RecursionError):
                meta = None
        if not isinstance(meta, dict):
            raise InputError("meta is not a JSON object: save the text json.dumps({...}) gives")
        return meta

    def array(self, key: str) -> Array | Tensor:
        """One array as its file gives it."""
        try:
            values = self.loaders[key]()
        except InputError:
            raise
        except DAMAGE as error:
            raise InputError(f"{key} cannot be read ({error}): copy the file again") from error
        except ValueError as error:
            # numpy's words for an array of objects, in memory and in a mapped file
            pickled = "allow_pickle" in str(error) or "Python objects" in str(error)
            why = "holds Python objects" if pickled else f"cannot be read ({error})"
            raise InputError(f"{key} {why}: save it as plain numbers or text") from error
        if not isinstance(values, np.ndarray | Tensor):
            raise InputError(f"{key} is not an array: save the file with numpy.savez")
        return values


def _type(values: Tensor) -> str:
    return str(values.dtype).removeprefix("torch.")


# --- Files of named arrays: .npz, .npy and .safetensors.
#
# Each is opened as loaders by name, so that nothing is read before it is used; arrays of .npy and
# .safetensors files are mapped into memory. No pickle is ever read. A bare `logits`, `probs`,
# `features` or `labels` belongs to the split that the file is named for.

WHOLE = ("weight", "bias", "class_names", "meta")  # what belongs to no split

Loaders = dict[str, Loader]


@contextmanager
def open_npz(file: Path, split: str) -> Iterator[Loaders]:
    """The arrays of an .npz file, by key."""
    if not zipfile.is_zipfile(file):
        raise InputError(
            f"{file} is not an .npz file, or only a part of one: "
            "copy it again or save it with numpy.savez"
        )
    try:
        archive = np.load(file, allow_pickle=False)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise InputError(f"{file} cannot be read ({error}): save it again") from error
    with archive:
        yield {whole_key(key, split): partial(archive.__getitem__, key) for key in archive}


@contextmanager
def open_npy(file: Path, key: str) -> Iterator[Loaders]:
    """The one array of an .npy file, by the name of the file."""
    if not key.endswith(ENDS) and key not in WHOLE:
        raise InputError(
            f"{file}: the name {key!r} does not say what the array is: name the files {EXPECTED}; "
            f"or give the name, as in val_logits={file}"
        )
    yield {key: partial(_load_npy, file)}


def _load_npy(file: Path) -> Array:
    # Copy on write: torch takes no array it may not write to, and the file stays as it is.
    return np.lib.format.open_memmap(file, mode="c")  # which refuses Python objects


@contextmanager
def open_safetensors(file: Path, split: str) -> Iterator[Loaders]:
    """The tensors of a .safetensors file, by key, and the texts in its header."""
    try:
        opened = safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{file} is not a .safetensors file, or only a part of one ({error}): "
            "copy it again or save it with safetensors"
        ) from error
    with opened as tensors:
        keys = tensors.keys()  # not a dict: it cannot be iterated over
        loaders = {whole_key(key, split): partial(tensors.get_tensor, key) for key in keys}
        yield loaders | _texts(tensors.metadata() or {})


def _texts(header: dict[str, str]) -> Loaders:
    """The texts of a header in the form that .npz files have."""
    loaders: Loaders = {}
    if "class_names" in header:
        loaders["class_names"] = lambda: np.array(json.loads(header["class_names"]))
    if "meta" in header:
        loaders["meta"] = lambda: np.array(header["meta"])
    return loaders


def whole_key(key: str, split: str) -> str:
    """The name of an array with its split: a bare one has that of the file."""
    return f"{split}_{key}" if key in SPLIT_PARTS else key


def merged(opened: list[tuple[Path, Loaders]]) -> Loaders:
    """The loaders of several files as one."""
    owners: dict[str, Path] = {}
    whole: Loaders = {}
    for file, loaders in opened:
        for key, loader in loaders.items():
            if key in owners:
                raise InputError(f"{key} is in {owners[key]} and in {file}: leave one of them out")
            owners[key], whole[key] = file, loader
    return whole
