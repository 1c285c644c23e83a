"""One call for every data set: CIFAR in any of its formats, or image files in a folder per class.

Image files lie in train/<class>/ with val/<class>/ or test/<class>/ and are made small once, when
they are read: the shorter side to `resize`, then the middle `image_size` x `image_size`. Where val/
is the only part beside train/, as in ImageNet, a fifth of it is val and the rest is test, by the
published cut (`imagenet_split`).
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import torch

from featcal.core.checks import ArgumentError, InputError, check_whole
from featcal.core.progress import shown
from featcal.datasets import images
from featcal.datasets.cifar import ARCHIVES, load_cifar

if TYPE_CHECKING:
    from PIL.Image import Image

NAMES = (*ARCHIVES, "folder")
ENDS = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".tif", ".tiff"}
CLUTTER = {"thumbs.db", "desktop.ini"}  # Windows leaves them, and nobody means them
GIB = 2**30
PUBLISHED_RESIZE = {224: 256}
Listing = dict[str, list[Path]]  # the files of each class


def load_images(
    name: str,
    folder: Path | str,
    *,
    download: bool = False,
    image_size: int | None = None,
    resize: int | None = None,
    memory_gib: float = 16.0,
) -> images.ImageData:
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
    if name != "folder" and (image_size is not None or resize is not None):
        raise ArgumentError(
            f"<image_size> is for folders alone, and {name} has 32 x 32 pixels: leave it out"
        )
    if name == "folder" and download:
        raise ArgumentError("<download> gets CIFAR alone: leave it out for a folder")
    try:
        with shown():
            if name != "folder":
                return load_cifar(ARCHIVES[name], path, download=download)
            return _load_folder(path, image_size, resize, memory_gib)
    except PermissionError as error:
        where = error.filename or path
        raise InputError(f"{where} cannot be read: check its permissions") from error


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
    image = image.resize((wide, high), Resampling.BILINEAR) if (wide, high) != image.size else image
    left, top = round((wide - size) / 2), round((high - size) / 2)
    return image.crop((left, top, left + size, top + size))


def _load_folder(
    folder: Path, image_size: int | None, resize: int | None, memory_gib: float
) -> images.ImageData:
    if image_size is None:
        raise ArgumentError(
            "<image_size> is missing: give the height and width that images are cut to, such as "
            "224 (ImageNet as published) or 32"
        )
    size, side = image_size, shorter_side(image_size, resize)
    listings, note = _listings(folder)
    count = sum(len(files) for listing in listings.values() for files in listing.values())
    needed = count * size * size * 3 / GIB
    if not needed <= memory_gib:
        raise ArgumentError(
            f"{count} images of {size} x {size} pixels take {needed:.1f} GiB of memory, above the "
            f"limit of {memory_gib} GiB: give a smaller <image_size>, fewer images, or from Python "
            "a larger memory_gib of load_images"
        )
    parts = {}
    for part, listing in listings.items():
        paths = [path for files in listing.values() for path in files]
        counts = torch.tensor([len(files) for files in listing.values()])
        pixels = np.empty((len(paths), size, size, 3), np.uint8)
        found = images.decode(
            paths, f"reading {part}, images", lambda image: fitted(image, side, size)
        )
        for row, image in enumerate(found):
            pixels[row] = image
        labels = torch.arange(len(counts)).repeat_interleave(counts)
        parts[part] = images.Images(torch.from_numpy(pixels), labels)
    name, classes = folder.resolve().name, tuple(listings["train"])
    if "test" in parts:
        own = parts.get("val")
        return images.ImageData(name, classes, parts["train"], parts["test"], own, note=note)
    both = parts["val"]
    val, test = images.imagenet_split(len(both))
    how = f"val: a fifth of the {len(both)} images in val/, shuffled by torch's seed "
    how += f"{images.IMAGENET_SEED}; test: the rest of them"
    return images.ImageData(
        name, classes, parts["train"], both.rows(test), both.rows(val), how, note
    )


def _listings(folder: Path) -> tuple[dict[str, Listing], str]:
    """The image files of every part that is there, and a word on files that were left out."""
    if not folder.is_dir():
        what = "is a file" if folder.is_file() else "does not exist"
        raise InputError(f"folder {folder} {what}: give the folder of the data set")
    if not (folder / "train").is_dir():
        raise InputError(
            f"{folder} has no folder train: give the folder that holds train/<class>/ and "
            "val/<class>/ or test/<class>/; where it has the classes alone, move those into "
            "train/ and some images of each into test/<class>/"
        )
    others: Counter[str] = Counter()
    parts = [part for part in ("train", "val", "test") if (folder / part).is_dir()]
    listings = {part: _listing(folder / part, others) for part in parts}
    classes = list(listings["train"])
    if len(listings) < 2:
        raise InputError(
            f"{folder} has neither val nor test beside train: put images that are not trained on "
            "into test/<class>/ or val/<class>/"
        )
    for part, listing in listings.items():
        if list(listing) != classes:
            other = ", ".join(sorted(set(listing) ^ set(classes))[:5])
            raise InputError(
                f"{folder / part} and {folder / 'train'} have not the same classes (in one alone: "
                f"{other}): give every part the same folders"
            )
    judged = sum(map(len, listings[parts[-1]].values()))
    if "test" not in listings and judged < images.LEAST_FIFTH:
        raise InputError(
            f"{folder / 'val'} has {judged} images, too few to be cut into val and test: put at "
            f"least {images.LEAST_FIFTH} there, or the test images into {folder / 'test'}"
        )
    if not others:
        return listings, ""
    plural = "s that are no images" if others.total() > 1 else " that is no image"
    return listings, f"left out: {others.total()} file{plural} ({', '.join(sorted(others)[:5])})"


def _listing(part: Path, others: Counter[str]) -> Listing:
    """The image files of each class of a part, sorted by name so that every machine agrees.

    What else is there and does not hide is counted by how its name ends.
    """

    def refuse(error: OSError) -> NoReturn:
        raise error

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
            raise InputError(
                f"{folder} has no image ({', '.join(sorted(ENDS))}): put images there, or remove "
                "that class from every part"
            )
    if len(listing) < 2:
        raise InputError(
            f"{part} has {len(listing)} folders: give one for each class, at least two"
        )
    return listing
