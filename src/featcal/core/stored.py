"""What files say: loaded whole and finite, or refused in one sentence that names the file.

    reading(path, remedy)      the guard around a reader: what its parser raises becomes a sentence
    json_of(text)              a JSON document, its depth, its numbers and its letters checked
    made(kind, value)          a record of it: the annotations of `kind` are the schema
    read_tensors, save_tensors a safetensors file with a sha256 of all that it holds
    npy_of, map_npy            numpy's arrays, no larger than the file that declares them

Everything but the guard raises a plain ValueError, for the guard to put the file in front of.
"""

from __future__ import annotations

import hashlib
import json
import reprlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from math import isfinite, prod
from pathlib import Path
from types import NoneType, UnionType
from typing import IO, TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints, is_typeddict

from safetensors import safe_open

from featcal.core.checks import ArgumentError, InputError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

SHA256 = "sha256"
DEEPEST = 32  # brackets within brackets: more than any document of ours has
LONGEST = 200  # characters of what a parser says
UNPACKED, RATIO = 2**26, 100  # bytes, and times its stored size, beyond which nothing is unpacked
BLOCK = 2**20
WORDS = {
    **{str: "text", bool: "true or false", int: "a whole number from 0 up"},
    **{float: "a finite number", dict: "an object", list: "a list", tuple: "a list"},
}


@contextmanager
def reading(path: Path | str, remedy: str) -> Iterator[None]:
    """Says what is wrong with a file in one sentence, whatever its parser raises.

    Too little memory is no fault of a file: sizes are checked before anything is allocated.
    """
    try:
        yield
    except (ArgumentError, MemoryError):
        raise
    except InputError as error:
        if str(path) in str(error):
            raise
        raise InputError(f"{path}: {error}") from error
    except Exception as error:
        plain = type(error) is ValueError
        why = f"{error}" if plain else f"{type(error).__name__}: {error}"
        why = " ".join(why.split()).replace(str(path), "it")
        why = why if len(why) <= LONGEST else f"{why[:LONGEST]} ..."
        raise InputError(f"{path} cannot be read ({why}): {remedy}") from error


def json_of(text: str | bytes) -> Any:  # noqa: ANN401 - JSON is any
    """The document a text holds.

    >>> json_of('{"rows": NaN}')
    Traceback (most recent call last):
    ValueError: it holds nan: numbers must be finite
    """
    found = json.loads(text)
    check_plain(found)
    return found


def check_plain(document: object) -> None:
    """Refuses depth no document of ours has, numbers that are none, and half letters."""
    left: list[tuple[object, int]] = [(document, 1)]
    while left:
        value, depth = left.pop()
        if depth > DEEPEST:
            raise ValueError(f"it is nested deeper than {DEEPEST} levels")
        if isinstance(value, dict):
            left += [(part, depth + 1) for pair in value.items() for part in pair]
        elif isinstance(value, (list, tuple)):
            left += [(part, depth + 1) for part in value]
        elif isinstance(value, str):
            value.encode()
        elif isinstance(value, float) and not isfinite(value):
            raise ValueError(f"it holds {value}: numbers must be finite")


def made(kind: Any, value: Any, place: str = "", **own: object) -> Any:  # noqa: ANN401
    """What a JSON value says, as a `kind`: a dataclass, a TypedDict, or a type of their fields.

    Fields that a record does not know are left to later versions.

    Args:
        kind: also `X | None`, `list[X]`, `tuple[X, ...]`, `dict[str, X]` and `Any`.
        value: the parsed JSON.
        place: what to call it.
        own: fields of a dataclass that the document does not hold.

    >>> made(list[int], [1, -1])
    Traceback (most recent call last):
    ValueError: [1] is -1, not a whole number from 0 up
    """
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, UnionType):
        (other,) = (one for one in inner if one is not NoneType)
        return None if value is None else made(other, value, place)
    record = is_dataclass(kind) or is_typeddict(kind)
    base = dict if record else origin
    if kind is not Any and not _is_a(base, value):
        raise ValueError(f"{place or 'it'} is {reprlib.repr(value)}, not {WORDS[base]}")
    if record:
        hints = {key: hint for key, hint in get_type_hints(kind).items() if key not in own}
        free = [one.name for one in fields(kind) if _has_default(one)] if is_dataclass(kind) else []
        missing = [key for key in hints if key not in value and key not in free]
        if missing:
            raise ValueError(f"{place or 'it'} has no {missing[0]!r}")
        known = {key: value[key] for key in hints if key in value}
        dotted = f"{place}." if place else ""
        found = {key: made(hints[key], part, dotted + key) for key, part in known.items()}
        return kind(**found, **own)
    if origin in (list, tuple):
        return origin(made(inner[0], part, f"{place}[{i}]") for i, part in enumerate(value))
    if origin is dict and inner:
        return {key: made(inner[1], part, f"{place}.{key}") for key, part in value.items()}
    return value


def _has_default(one: Any) -> bool:  # noqa: ANN401 - a field of a dataclass
    return one.default is not MISSING or one.default_factory is not MISSING


def _is_a(kind: type, value: object) -> bool:
    """Whether a JSON value is of a type; true and false are no numbers, a list is a tuple."""
    if kind is float:
        most = sys.float_info.max
        return type(value) in (int, float) and -most <= value <= most  # type: ignore[operator]
    if kind is int:
        return type(value) is int and 0 <= value < 2**63
    return isinstance(value, list if kind is tuple else kind)


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], texts: Mapping[str, str] | None = None
) -> None:
    """Writes tensors and texts with their sha256, which `read_tensors` checks."""
    from safetensors.torch import save_file

    about = dict(texts or {})
    save_file(dict(tensors), path, {**about, SHA256: digest(tensors, about)})


def read_tensors(path: Path | str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the texts of a safetensors file.

    A file of an earlier version has no sha256, and is taken as it is. safetensors itself compares
    the shapes with the size of the file.
    """
    with safe_open(path, framework="pt") as file:
        texts = dict(file.metadata() or {})
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    said = texts.pop(SHA256, None)
    if said is not None and said != digest(tensors, texts):
        raise ValueError("its sha256 has changed")
    return tensors, texts


def digest(tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> str:
    """The sha256 of names, types, shapes, values and texts, in any order, in hexadecimal."""
    import torch

    found = hashlib.sha256(json.dumps(texts, sort_keys=True).encode())
    for key in sorted(tensors):
        values = tensors[key].detach().cpu().contiguous()
        found.update(f"\n{key} {values.dtype} {tuple(values.shape)}\n".encode())
        flat = values.as_strided((values.numel(),), (1,))  # also one number that was expanded
        found.update(flat.view(torch.uint8).numpy().data)
    return found.hexdigest()


def check_unpacked(stored: int, unpacked: int) -> None:
    """Refuses what would unpack to far more than honest numbers do.

    >>> check_unpacked(3_000_000, 3_400_000_000)
    Traceback (most recent call last):
    ValueError: its 3000000 bytes would unpack to 3400000000: no honest numbers do
    """
    if unpacked > max(UNPACKED, RATIO * stored):
        raise ValueError(f"its {stored} bytes would unpack to {unpacked}: no honest numbers do")


def npy_of(stream: IO[bytes], stored: int) -> npt.NDArray[Any]:
    """The array in an .npy stream, which takes up so many bytes of a file, packed or not."""
    import numpy as np

    shape, fortran, dtype = _npy_header(stream)
    size = prod(shape) * dtype.itemsize
    check_unpacked(stored, size)
    content = np.empty(size, np.uint8)
    left = content.data
    while left:
        got = stream.readinto(left[:BLOCK])  # type: ignore[attr-defined]
        if not got:
            raise ValueError("it ends before its last number")
        left = left[got:]
    if stream.read(1):  # also what makes a zip file look at its checksum
        raise ValueError("it goes on after its last number")
    return content.view(dtype).reshape(shape, order="F" if fortran else "C")


def map_npy(path: Path) -> npt.NDArray[Any]:
    """The array of an .npy file, mapped and not read; the file stays as it is."""
    import numpy as np

    with path.open("rb") as file:
        shape, _, dtype = _npy_header(file)
        room = path.stat().st_size - file.tell()
    if prod(shape) * dtype.itemsize > room:
        raise ValueError(f"its shape {shape} needs more than its {room} bytes")
    # Copy on write: torch takes no array it may not write to.
    return np.lib.format.open_memmap(path, mode="c")


def _npy_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    import numpy as np

    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    else:
        shape, fortran, dtype = np.lib.format.read_array_header_2_0(stream)
    if dtype.hasobject or dtype.itemsize == 0 or any(length < 0 for length in shape):
        what = "Python objects" if dtype.hasobject else f"{dtype} {shape}"
        raise ValueError(f"an array of {what} is never read: save numbers or text")
    return shape, fortran, dtype
