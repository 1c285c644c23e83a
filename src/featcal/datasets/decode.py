"""Image files to arrays of bytes, by pillow, several at once: it decodes without Python's lock."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from featcal.core.errors import InputError
from featcal.core.progress import tell

if TYPE_CHECKING:
    from PIL.Image import Image

Bytes = npt.NDArray[np.uint8]
WIDE = ("I", "F")  # how pillow's names for pixels of more than 8 bits start
DAMAGE = (OSError, ValueError, SyntaxError, EOFError, IndexError, struct.error)
Item = TypeVar("Item")
Result = TypeVar("Result")


def need_pillow() -> None:
    """Refuses to go on without the package that decodes."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise InputError(
            "image files need the package pillow: pip install 'featcal[train]'"
        ) from error


def decoded(path: Path, prepare: Callable[[Image], Image] | None = None) -> Bytes:
    """The pixels of an image file as bytes (height, width, 3).

    Args:
        path: The file.
        prepare: What is done to the image before its pixels are taken.
    """
    from PIL import Image

    try:
        with Image.open(path) as file:
            _check_depth(path, file.mode)
            image = file.convert("RGB")
    except (InputError, PermissionError):  # no damage; `load_images` speaks of permissions
        raise
    except (*DAMAGE, Image.DecompressionBombError) as error:
        raise InputError(
            f"{path} cannot be read as an image ({_why(error, path)}): copy it again or remove it"
        ) from error
    return np.array(image if prepare is None else prepare(image))


def _why(error: Exception, path: Path) -> str:
    """Pillow's reason, without the path that the sentence begins with."""
    return str(error).replace(f" {str(path)!r}", "")


def _check_depth(path: Path, mode: str) -> None:
    """Refuses pixels that pillow would cut off at 255 without a word."""
    if mode.startswith(WIDE):
        raise InputError(f"{path} has 16-bit or float pixels: save it with 8 bits a channel")


def in_threads(work: Callable[[Item], Result], items: Sequence[Item], label: str) -> list[Result]:
    """Does `work` on every item, tells how far it is, and stops at the first that fails."""
    found: list[Result] = []
    tell(label, 0, len(items))
    pool = ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1))
    try:
        for result in pool.map(work, items):
            found.append(result)
            tell(label, len(found), len(items))
    finally:
        pool.shutdown(cancel_futures=True)
    return found
