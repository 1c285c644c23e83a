"""The folder of a run: what lies in it, who may write there, and when it is taken."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from featcal.core.disk import LOCK, REMOVE, check_free, left_over_of, locked
from featcal.core.errors import InputError
from featcal.train.checkpoint import FILE as CHECKPOINT

WEIGHTS, RECORD, PACK = "model.safetensors", "run.json", "pack"


def check_unfinished(folder: Path) -> None:
    """Refuses a folder that holds a finished run: nothing is trained that could not be written."""
    if (folder / RECORD).exists():
        raise InputError(f"{folder} holds a finished run ({RECORD}): {REMOVE}")


def check_place(folder: Path) -> None:
    """Refuses a folder that no checkpoint can be kept in."""
    if not folder.is_dir():
        raise InputError(f"folder {folder} does not exist: make it first, or pass None")
    check_unfinished(folder)


def check_folder(folder: Path) -> bool:
    """Whether a folder holds a run to go on with.

    Raises:
        InputError: where it holds a finished run, or anything else.
    """
    check_unfinished(folder)
    if (folder / CHECKPOINT).exists():
        return True
    if not folder.is_dir() or not all(p.name == LOCK or _is_temporary(p) for p in folder.iterdir()):
        check_free(folder, remedy=REMOVE)
    return False


@contextmanager
def made_folder(folder: Path) -> Iterator[None]:
    """The folder for one process alone, without what a kill left half written in it.

    A folder that is made here is gone again where nothing came of it.
    """
    new = not folder.exists()
    folder.mkdir(exist_ok=True)
    with locked(folder):
        for path in filter(_is_temporary, list(folder.iterdir())):
            shutil.rmtree(path, ignore_errors=True)
        try:
            yield
        finally:
            (folder / LOCK).unlink(missing_ok=True)
            if new and not any(folder.iterdir()):
                folder.rmdir()


def _is_temporary(path: Path) -> bool:
    return left_over_of(path) in (CHECKPOINT, WEIGHTS, RECORD)
