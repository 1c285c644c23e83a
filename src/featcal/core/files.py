"""Files appear whole or not at all: written under a temporary name, then renamed.

What is renamed lies on the disk by then, so that this holds for a machine that loses power, too.
"""

import glob
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from featcal.core.checks import ArgumentError, InputError

OVERWRITE = "choose another name, or overwrite it with <overwrite=True>"
REMOVE = "choose another name, or remove it first"  # a folder is never replaced
LOCK = ".lock"
LEFT_OVER = re.compile(r"\.(.+)\.[a-z0-9_]{8}")  # the names that mkdtemp makes here


def check_free(path: Path | str, *, overwrite: bool = False, remedy: str = OVERWRITE) -> Path:
    """Refuses an output path that exists, or whose folder does not exist or cannot be written."""
    path = Path(path)
    if overwrite and (path.is_symlink() or (path.exists() and not path.is_file())):
        kind = "a folder" if path.is_dir() and not path.is_symlink() else "no regular file"
        raise InputError(f"output {path} is {kind}: choose another name")
    if (path.exists() or path.is_symlink()) and not overwrite:
        raise ArgumentError(f"output {path} exists: {remedy}")
    parent = path.absolute().parent
    if not parent.is_dir():
        raise InputError(f"output folder {parent} does not exist: create it first")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"output folder {parent} cannot be written: choose another")
    return path


@contextmanager
def new_file(path: Path | str, *, overwrite: bool = False) -> Iterator[Path]:
    """Yields a temporary path beside `path`; on success it is renamed to `path`, else removed.

    Without `overwrite` a file that has come to be there meanwhile stays, and this one is refused.
    """
    path = check_free(path, overwrite=overwrite)
    with _temporary_folder(path) as folder:
        temporary = folder / path.name
        try:
            yield temporary
        except (OSError, SafetensorError) as error:  # such as a full disk
            why = getattr(error, "strerror", None) or error
            raise InputError(f"output {path} cannot be written: {why}") from error
        _flush(temporary)
        with suppress(PermissionError):  # some writers leave 0600, which hides it from others
            temporary.chmod(0o666 & ~_umask())
        if overwrite:
            os.replace(temporary, path)
        else:
            _publish(temporary, path)


@contextmanager
def new_folder(path: Path | str) -> Iterator[Path]:
    """Yields a temporary folder beside `path`; on success it is renamed to `path`, else removed."""
    path = check_free(path, remedy=REMOVE)
    with _temporary_folder(path) as folder:
        folder.chmod(0o777 & ~_umask())  # mkdtemp's 0700 hides the result from others
        yield folder
        for file in folder.rglob("*"):
            if file.is_file() and file.name != LOCK:
                _flush(file)
        (folder / LOCK).unlink(missing_ok=True)
        os.rename(folder, path)


def _publish(temporary: Path, path: Path) -> None:
    """Gives a finished file its name, which nothing must have by now."""
    try:
        try:
            os.link(temporary, path)  # refuses a name that is taken, at the same moment
        except FileExistsError:
            raise
        except OSError:  # a file system without such links: two steps will have to do
            os.close(os.open(path, os.O_CREAT | os.O_EXCL))
            os.replace(temporary, path)
    except FileExistsError as error:
        raise InputError(
            f"output {path} has come to exist meanwhile: choose another name"
        ) from error


def left_over_of(path: Path) -> str | None:
    """The name of the file that a killed process was writing in this folder; None if none was."""
    found = LEFT_OVER.fullmatch(path.name)
    return found[1] if found and path.is_dir() and not path.is_symlink() else None


@contextmanager
def _temporary_folder(path: Path) -> Iterator[Path]:
    """A hidden folder beside the path, so that the last step is a rename on one file system.

    The lock in it goes with the process that made it: what a killed one left is removed.
    """
    parent, prefix = path.absolute().parent, f".{path.name[:100]}."
    for old in parent.glob(f"{glob.escape(prefix)}????????"):
        if left_over_of(old) is not None:
            with suppress(InputError), locked(old) as alone:
                if alone:
                    shutil.rmtree(old, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        with locked(folder):
            yield folder
    except InputError as error:
        known = str(error).replace(str(folder), str(path))  # the name that a person knows
        if known == str(error):
            raise
        raise InputError(known) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _flush(path: Path) -> None:
    """Waits until the content is on the disk and not only on its way."""
    file = os.open(path, os.O_RDWR)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _umask() -> int:
    mask = os.umask(0)  # the only way to read it is to set it
    os.umask(mask)
    return mask


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """One process at a time in a folder; the lock of a process that is killed goes with it.

    Yields whether there is a lock: Windows and some file systems have none.
    """
    try:
        import fcntl
    except ImportError:  # pragma: no cover - Windows
        yield False
        return
    while True:
        try:
            file = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR, 0o644)
        except PermissionError as error:
            raise InputError(
                f"{folder} cannot be written to: check its permissions or choose another name"
            ) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(file)
            raise InputError(
                f"{folder} is being written by another process: wait for it or choose another name"
            ) from error
        except OSError:
            os.close(file)
            yield False
            return
        # Whoever had the lock before may have removed the file, and a lock on a file that is gone
        # keeps nobody out: the next comer makes a new one.
        try:
            if os.path.samestat(os.fstat(file), (folder / LOCK).stat()):
                break
        except FileNotFoundError:
            pass
        os.close(file)
    try:
        yield True
    finally:
        os.close(file)
