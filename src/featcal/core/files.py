"""Files appear whole or not at all: written under a temporary name, then renamed.

What is renamed lies on the disk by then, so that this holds for a machine that loses power, too.
"""

import errno
import glob
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from featcal.core.checks import ArgumentError, InputError

OVERWRITE = "choose another name, or overwrite it with <overwrite=True>"
REMOVE = "choose another name, or remove it first"  # a folder is never replaced
LOCK = ".lock"
TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)  # what a name gives that something has
OURS = ".featcal-"  # in the name of a temporary folder, and in no name that people give
LEFT_OVER = re.compile(rf"\.(.+){re.escape(OURS)}[a-z0-9_]{{8}}")


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
        yield temporary
        _flush(temporary)
        _open_to_others(temporary, 0o666)  # some writers leave 0600
        if overwrite:
            check_free(path, overwrite=True)  # again: what is there may have come meanwhile
            os.replace(temporary, path)
        else:
            publish(temporary, path)


@contextmanager
def new_folder(path: Path | str) -> Iterator[Path]:
    """Yields a temporary folder beside `path`; on success it is renamed to `path`, else removed."""
    path = check_free(path, remedy=REMOVE)
    with _temporary_folder(path) as folder:
        _open_to_others(folder, 0o777)  # mkdtemp leaves 0700
        yield folder
        for file in filter(Path.is_file, folder.rglob("*")):
            _flush(file)
        publish(folder, path)


def publish(temporary: Path, path: Path) -> None:
    """Gives a finished file or folder its name, which nothing must have by now."""
    try:
        if temporary.is_dir():
            os.rename(temporary, path)  # refuses a name that is taken, but by an empty folder
            return
        try:
            os.link(temporary, path)  # refuses a name that is taken, at the same moment
        except FileExistsError:
            raise
        except OSError:  # a file system without such links: two steps will have to do
            os.close(os.open(path, os.O_CREAT | os.O_EXCL))
            os.replace(temporary, path)
    except OSError as error:
        if error.errno not in TAKEN:
            raise
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

    Its lock goes with the process that made it: what a killed one left is removed. No message has
    the folder's name, which nobody knows.
    """
    parent, prefix = path.absolute().parent, f".{path.name[:100]}{OURS}"
    for old in parent.glob(f"{glob.escape(prefix)}????????"):
        if left_over_of(old) is not None:
            with suppress(InputError, FileNotFoundError), locked(old, itself=True) as alone:
                if alone:
                    shutil.rmtree(old, ignore_errors=True)
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            stack.enter_context(locked(folder, itself=True))
        except (InputError, FileNotFoundError):  # taken for left over before it had its lock
            folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            stack.enter_context(locked(folder, itself=True))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        try:
            yield folder
        except InputError as error:
            known = str(error).replace(str(folder), str(path))  # the name that a person knows
            if known == str(error):
                raise
            raise InputError(known) from error
        except (OSError, SafetensorError) as error:  # such as a full disk
            about = getattr(error, "filename", None)
            if isinstance(error, BrokenPipeError) or (about and folder not in Path(about).parents):
                raise  # of a reader, or of another file
            why = getattr(error, "strerror", None) or error
            raise InputError(f"output {path} cannot be written: {why}") from error


def _flush(path: Path) -> None:
    """Waits until the content is on the disk and not only on its way."""
    file = os.open(path, os.O_RDWR)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _open_to_others(path: Path, mode: int) -> None:
    """As the umask has it, where the file system lets anybody change that."""
    mask = os.umask(0)  # the only way to read it is to set it
    os.umask(mask)
    with suppress(OSError):
        path.chmod(mode & ~mask)


@contextmanager
def locked(folder: Path, *, itself: bool = False) -> Iterator[bool]:
    """One process at a time in a folder; the lock of a process that is killed goes with it.

    Yields whether there is a lock: Windows and some file systems have none, and more of them have
    none for a folder `itself` in place of a file in it.
    """
    try:
        import fcntl
    except ImportError:  # pragma: no cover - Windows
        yield False
        return
    place, how = (folder, os.O_RDONLY) if itself else (folder / LOCK, os.O_CREAT | os.O_RDWR)
    while True:
        try:
            file = os.open(place, how, 0o644)
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
            if os.path.samestat(os.fstat(file), place.stat()):
                break
        except FileNotFoundError:
            pass
        os.close(file)
    try:
        yield True
    finally:
        os.close(file)
