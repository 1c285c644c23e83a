"""An official archive from its site: whole and by its checksum, or not at all."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import BinaryIO
from urllib.request import urlopen

from featcal.core.disk import new_file
from featcal.core.errors import InputError
from featcal.core.progress import tell
from featcal.datasets.cifar_binary import Archive

BLOCK = 1 << 20
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
