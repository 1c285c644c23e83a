"""The official binary archives of CIFAR-10 and CIFAR-100 (Krizhevsky, 2009), packed or unpacked.

A record is the label (CIFAR-100: the coarse label, then the fine one, which counts here) and 3072
bytes: 32 x 32 of red, then of green, then of blue. The archives are read member by member, each by
its exact name: nothing is unpacked to the disk, and no pickle is read.
"""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import torch

from featcal.core.errors import InputError
from featcal.core.progress import track
from featcal.datasets.images import ImageData, Images, check_labels
from featcal.datasets.names import CLASSES, check_names

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
