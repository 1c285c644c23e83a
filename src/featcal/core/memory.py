"""How much memory a run may take: the one place that turns a cap into chunks and what is kept.

Data of any size is read in chunks from files that are mapped; what takes memory are the chunks
themselves and the logits that are kept between passes. A cap counts what a process holds of its
own; pages of mapped files are the system's to give and take.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec, TypeVar

from featcal.core.checks import ArgumentError

KEEP_BYTES = 5 * 2**27  # logits of a view that stay in memory instead of being recomputed
CHUNK_VALUES = 2**26  # features or logits of a chunk at most: 256 MiB in float32
OWN = 2**28 + 2**27  # bytes of the interpreter, torch and what it keeps for itself
VIEWS = 8  # a joint fit holds half a dozen views of the logits,
COPIES = 16  # and an operation a few copies of a chunk, in float64 too
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}

Given = ParamSpec("Given")
Result = TypeVar("Result")
Size = str | int | None  # of memory, such as "2GB" or a number of bytes; None for no cap

_cap: ContextVar[int | None] = ContextVar("cap", default=None)


def parsed(memory: str | int) -> int:
    """The bytes of a text such as "2GB"; at least half a gigabyte, of which torch takes most.

    >>> parsed("1.5GB")
    1500000000
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]B|)", str(memory).strip().upper())
    size = int(float(found[1]) * UNITS[found[2]]) if found else 0
    if size < 5 * 10**8:
        raise ArgumentError(f"<memory> is {memory!r}: give a size such as 2GB, 500MB or more")
    return size


@contextmanager
def limited(memory: Size) -> Iterator[None]:
    """Keeps what runs inside the block below a cap; None leaves the cap as it is."""
    if memory is None:
        if _cap.get() is None:
            steady()
        yield
        return
    token = _cap.set(parsed(memory))
    steady(2**18)  # chunks under a cap are small
    try:
        yield
    finally:
        _cap.reset(token)


def under_cap(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Runs a function under the cap that its keyword `memory` names."""

    @wraps(function)
    def run(*given: Given.args, **named: Given.kwargs) -> Result:
        with limited(named.get("memory")):  # type: ignore[arg-type]
            return function(*given, **named)

    return run


def keep_bytes() -> int:
    """Bytes that one view may keep."""
    cap = _cap.get()
    return KEEP_BYTES if cap is None else min(max(cap - OWN, 0) // (2 * VIEWS), KEEP_BYTES)


def held_bytes() -> int:
    """Bytes of whole rows, features and all, that are held for many looks."""
    return keep_bytes() // 4


def chunk_values() -> int:
    """Numbers of a chunk at most."""
    cap = _cap.get()
    return CHUNK_VALUES if cap is None else min((cap - OWN) // (8 * COPIES), CHUNK_VALUES)


def steady(block: int = 2**23) -> None:
    """Lets the C library map blocks of so many bytes, which go back when they are freed.

    By default it learns to cut blocks of a chunk's size out of its heap. There every small result
    that is kept makes a hole that the next chunk does not fit into: gigabytes at many rows. Of what
    is smaller it keeps a few blocks when they are freed: by default their pages may go back to the
    system and come anew with each operation, which takes several times as long as the operation.
    """
    try:
        library = ctypes.CDLL(None)
        library.mallopt(-3, block)  # M_MMAP_THRESHOLD
        library.mallopt(-1, 4 * block)  # M_TRIM_THRESHOLD
    except (AttributeError, OSError, TypeError):  # another system, whose heap is another
        return
