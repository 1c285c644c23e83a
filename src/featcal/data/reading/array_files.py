"""Files of named arrays: .npz, .npy and .safetensors.

Each is opened as loaders by name, so that nothing is read before it is used; arrays of .npy and
.safetensors files are mapped into memory. No pickle is ever read. A bare `logits`, `probs`,
`features` or `labels` belongs to the split that the file is named for.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from featcal.core.errors import InputError
from featcal.data.reading.contents import SPLIT_PARTS
from featcal.data.reading.named_arrays import ENDS, EXPECTED, Array, Loader

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
