"""Folders of image files, a folder a class: train/<class>/ with val/<class>/ or test/<class>/.

Images are made small once, when they are read: the shorter side to `resize`, then the middle
`image_size` x `image_size`. Where val/ is the only part beside train/, as in ImageNet, a fifth of
it is val and the rest is test, by the published cut (`imagenet_split`).
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import torch

from featcal.core.checks import ArgumentError, InputError, check_whole
from featcal.datasets.images import (
    IMAGENET_SEED,
    LEAST_FIFTH,
    ImageData,
    Images,
    decoded,
    imagenet_split,
    in_threads,
    need_pillow,
)

if TYPE_CHECKING:
    from PIL.Image import Image

ENDS = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".tif", ".tiff"}
CLUTTER = {"thumbs.db", "desktop.ini"}  # Windows leaves them, and nobody means them
GIB = 2**30
PUBLISHED_RESIZE = {224: 256}
Listing = dict[str, list[Path]]  # the files of each class


def has_class_folders(folder: Path) -> bool:
    """Whether the folder has the parts of a data set, each with folders of classes."""
    return (folder / "train").is_dir()


def read_folders(
    folder: Path, *, image_size: int, resize: int | None = None, memory_gib: float = 16.0
) -> ImageData:
    """A data set from folders of image files.

    Args:
        folder: Holds train/ and val/ or test/, each with a folder for every class.
        image_size: Height and width of the images in pixels.
        resize: What the shorter side becomes before the middle is cut out; by default 256 for an
            image_size of 224 (as published for ImageNet) and else `image_size`.
        memory_gib: The most memory that the pixels may take.
    """
    need_pillow()
    side = shorter_side(image_size, resize)
    others: Counter[str] = Counter()
    listings = _listings(folder, others)
    _check_val_alone(folder, listings)
    _check_memory(listings, image_size, memory_gib)
    classes = tuple(listings["train"])
    parts = {
        part: _read(listing, classes, partial(fitted, side=side, size=image_size), part)
        for part, listing in listings.items()
    }
    return replace(_data(folder.resolve().name, classes, parts), note=_left_out(others))


def shorter_side(image_size: int, resize: int | None = None) -> int:
    """What the shorter side of an image becomes before its middle is cut out."""
    check_whole("load_images", 1, image_size=image_size)
    if resize is None:
        return PUBLISHED_RESIZE.get(image_size, image_size)
    check_whole("load_images", 1, resize=resize)
    if resize < image_size:
        raise InputError(
            f"load_images: image_size={image_size}, resize={resize}: give a resize that is not "
            "below image_size"
        )
    return resize


def _data(name: str, classes: tuple[str, ...], parts: dict[str, Images]) -> ImageData:
    if "test" in parts:
        return ImageData(name, classes, parts["train"], parts["test"], parts.get("val"))
    both = parts["val"]
    val, test = imagenet_split(len(both))
    how = f"val: a fifth of the {len(both)} images in val/, shuffled by torch's seed "
    how += f"{IMAGENET_SEED}; test: the rest of them"
    return ImageData(name, classes, parts["train"], both.rows(test), both.rows(val), how)


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


def _left_out(others: Counter[str]) -> str:
    """A word on files that look as if they might have been meant."""
    if not others:
        return ""
    ends = ", ".join(sorted(others)[:5])
    plural = "s that are no images" if others.total() > 1 else " that is no image"
    return f"left out: {others.total()} file{plural} ({ends})"


def _listings(folder: Path, others: Counter[str]) -> dict[str, Listing]:
    """The files of every part that is there."""
    found = {part: _listing(folder / part, others) for part in ("train", "val", "test")}
    listings = {part: listing for part, listing in found.items() if listing is not None}
    if len(listings) < 2:
        raise InputError(
            f"{folder} has neither val nor test beside train: put images that are not trained on "
            "into test/<class>/ or val/<class>/"
        )
    for part, listing in listings.items():
        if list(listing) != list(listings["train"]):
            other = sorted(set(listing) ^ set(listings["train"]))
            raise InputError(
                f"{folder / part} and {folder / 'train'} have not the same classes (in one alone: "
                f"{', '.join(other[:5])}): give every part the same folders"
            )
    if len(listings["train"]) == 1:
        (name,) = listings["train"]
        raise InputError(f"{folder / 'train'} has one class ({name}): give at least two folders")
    return listings


def _check_val_alone(folder: Path, listings: dict[str, Listing]) -> None:
    """Refuses a val/ that must give the test images, too, and has too few for both."""
    count = sum(map(len, listings.get("val", {}).values()))
    if "test" not in listings and count < LEAST_FIFTH:
        raise InputError(
            f"{folder / 'val'} has {count} images, too few to be cut into val and test: put at "
            f"least {LEAST_FIFTH} there, or the test images into {folder / 'test'}"
        )


def _listing(part: Path, others: Counter[str]) -> Listing | None:
    """The image files of each class of a part, sorted by name so that every machine agrees."""
    if not part.is_dir():
        return None
    classes = sorted(path for path in part.iterdir() if path.is_dir() and path.name[0] != ".")
    if not classes:
        raise InputError(f"{part} has no folders: put the images into a folder for each class")
    listing = {path.name: _image_files(path, others) for path in classes}
    empty = [name for name, files in listing.items() if not files]
    if empty:
        raise InputError(
            f"{part / empty[0]} has no image ({', '.join(sorted(ENDS))}): put images there, or "
            "remove that class from every part"
        )
    return listing


def _image_files(folder: Path, others: Counter[str]) -> list[Path]:
    """The images, sorted; what else is there and does not hide is counted by how its name ends."""
    # Not rglob, which leaves out what it may not read without a word.
    found = [
        Path(top) / name for top, _, names in os.walk(folder, onerror=_refuse) for name in names
    ]
    seen = [path for path in found if path.name[0] != "." and path.name.lower() not in CLUTTER]
    others.update(path.suffix.lower() or path.name for path in seen if not _is_image(path))
    return sorted(path for path in seen if _is_image(path) and path.is_file())


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in ENDS


def _refuse(error: OSError) -> NoReturn:
    raise error


def _check_memory(listings: dict[str, Listing], size: int, limit: float) -> None:
    count = sum(len(files) for listing in listings.values() for files in listing.values())
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit > 0:
        raise InputError(f"load_images: memory_gib is {limit!r}: give a number above 0")
    needed = count * size * size * 3 / GIB
    if needed > limit:
        raise ArgumentError(
            f"{count} images of {size} x {size} pixels take {needed:.1f} GiB of memory, above the "
            f"limit of {limit} GiB: give a smaller <image_size>, fewer images, or from Python a "
            "larger memory_gib of load_images"
        )


def _read(listing: Listing, classes: tuple[str, ...], prepare: partial[Image], part: str) -> Images:
    paths = [path for name in classes for path in listing[name]]
    labels = [label for label, name in enumerate(classes) for _ in listing[name]]
    side = prepare.keywords["size"]
    pixels = np.empty((len(paths), side, side, 3), np.uint8)

    def place(row: int) -> None:
        pixels[row] = decoded(paths[row], prepare)

    in_threads(place, range(len(paths)), f"reading {part}, images")
    return Images(torch.from_numpy(pixels), torch.tensor(labels))
