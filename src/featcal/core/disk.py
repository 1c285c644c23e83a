"""Files appear whole or not at all: written under a temporary name, then renamed."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from featcal.core.errors import InputError


def check_free(path: Path | str, *, overwrite: bool = False) -> Path:
    """Refuses an output path that exists, or whose folder does not exist or cannot be written."""
    path = Path(path)
    if path.is_dir() and overwrite:
        raise InputError(f"output {path} is a folder: choose another name")
    if path.exists() and not overwrite:
        raise InputError(f"output {path} exists: choose another name or ask to overwrite it")
    parent = path.absolute().parent
    if not parent.is_dir():
        raise InputError(f"output folder {parent} does not exist: create it first")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"output folder {parent} cannot be written: choose another")
    return path


@contextmanager
def new_file(path: Path | str, *, overwrite: bool = False) -> Iterator[Path]:
    """Yields a temporary path beside `path`; on success it is renamed to `path`, else removed."""
    path = check_free(path, overwrite=overwrite)
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.absolute().parent))
    try:
        temporary = folder / path.name
        yield temporary
        os.replace(temporary, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def new_folder(path: Path | str) -> Iterator[Path]:
    """Yields a temporary folder beside `path`; on success it is renamed to `path`, else removed."""
    path = check_free(path)
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.absolute().parent))
    try:
        folder.chmod(0o755)  # mkdtemp's 0o700 would hide the result from the user's own group
        yield folder
        os.rename(folder, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
