"""From files of logits, probabilities or features to a feature pack, whatever their format.

Arrays (.npz, .npy, .safetensors) go by the names of the arrays, tables (.csv, .tsv, .parquet) by
the names of the files and columns; both are read as `Contents`, which `write_pack` writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from sys import maxsize
from typing import Any, NamedTuple, cast

from featcal.core.batch import Batch, Chunked
from featcal.core.checks import InputError, Kind
from featcal.core.files import REMOVE, check_free
from featcal.data.arrays import (
    Contents,
    Loaders,
    about,
    array_contents,
    merged,
    open_npy,
    open_npz,
    open_safetensors,
)
from featcal.data.manifest import SPLIT_NAME, Gate, head_tensors
from featcal.data.pack import Pack, write_pack
from featcal.data.tables import (
    CsvTable,
    ParquetTable,
    Reading,
    TableFile,
    holds_lists,
    open_lists,
    table_contents,
)

ARRAYS = {".npz": open_npz, ".npy": open_npy, ".safetensors": open_safetensors}
TABLES: dict[str, type[CsvTable | ParquetTable]] = {
    ".csv": CsvTable,
    ".tsv": CsvTable,
    ".parquet": ParquetTable,
}
PICKLES = (".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".bin", ".joblib")
FORMATS = "an .npz, .npy, .safetensors, .csv, .tsv or .parquet file"

FilePath = str | Path
Paths = FilePath | Sequence[FilePath] | Mapping[str, FilePath]


def import_files(
    paths: Paths,
    out: Path | str,
    *,
    label: str = "label",
    kind: Kind | None = None,
    ignore: Sequence[str] = (),
) -> Pack:
    """Writes files of logits, probabilities or features as a feature pack.

    Args:
        paths: one file, or several. A text may be `NAME=PATH` and a mapping has names as keys; the
            name is else that of the file without its ending. It is the split of a table (val), and
            what the array of an .npy file is (val_logits).
        out: the folder to make; it must not exist.
        label: the column of the labels, in tables.
        kind: what the numbers are, "logits" or "probs", in tables whose columns do not say it.
        ignore: columns of tables that are no scores, by name or pattern.

    Raises:
        InputError: for a file that cannot be used; nothing is left under `out`.
    """
    check_free(out, remedy=REMOVE)
    with _contents(_sources(paths), _reading(label, kind, ignore)) as contents:
        meta = dict(contents.meta)
        return write_pack(
            out,
            contents.splits,
            head=contents.head,
            dataset=_text(meta, "dataset"),
            model=_text(meta, "model"),
            class_names=contents.class_names,
            meta=meta,
        )


def read_files(
    paths: Paths,
    *,
    label: str = "label",
    kind: Kind | None = None,
    ignore: Sequence[str] = (),
) -> dict[str, Batch]:
    """The same files in memory: one `Batch` a split, by name; logits in float32, as in a pack.

    >>> read_files("val.csv", kind="logits")["val"]  # doctest: +SKIP
    """
    with _contents(_sources(paths), _reading(label, kind, ignore)) as contents:
        names = contents.class_names
        gate = Gate(head_tensors(contents.head), None if names is None else tuple(names))
        splits = {name: gate.checked(name, data) for name, data in contents.splits.items()}
        return {name: next(iter(Chunked(data, rows=maxsize))) for name, data in splits.items()}


def import_npz(file: Path | str, out: Path | str) -> Pack:
    """Writes the arrays of an `.npz` file as a feature pack; one split at a time is in memory.

    Raises:
        InputError: for a file or an array that cannot be used; nothing is left under `out`.
    """
    file = Path(file)
    if file.is_file() and file.suffix.lower() != ".npz":
        raise InputError(f"{file} is not an .npz file: import_files reads other formats")
    return import_files(file, out)


def _reading(label: str, kind: str | None, ignore: Sequence[str]) -> Reading:
    if kind not in (None, "logits", "probs"):
        raise InputError(f"kind is {kind!r}: give 'logits' or 'probs'")
    return Reading(
        label, cast(Kind | None, kind), (ignore,) if isinstance(ignore, str) else tuple(ignore)
    )


class _Source(NamedTuple):
    """A file and the name it goes by."""

    name: str
    path: Path

    @property
    def suffix(self) -> str:
        return self.path.suffix.lower()


def _sources(paths: Paths) -> list[_Source]:
    sources = [_source(name, path) for name, path in _named(paths)]
    if not sources:
        raise InputError(f"paths is empty: give {FORMATS}")
    for source in sources:
        with about(source.path):
            _check_file(source)
    return sources


def _named(paths: Paths) -> Iterable[tuple[str, FilePath]]:
    if isinstance(paths, Mapping):
        return paths.items()
    return [("", path) for path in ([paths] if isinstance(paths, str | Path) else paths)]


def _source(name: str, path: FilePath) -> _Source:
    if isinstance(path, str) and not name:
        given, mark, rest = path.partition("=")
        # A folder may be called lr=0.1: what is there as it is written is meant.
        if mark and SPLIT_NAME.fullmatch(given) and not Path(path).exists():
            name, path = given, rest
    path = Path(path)
    return _Source(name or path.stem, path)


def _check_file(source: _Source) -> None:
    path, suffix = source.path, source.suffix
    if suffix in PICKLES:
        raise InputError(
            f"a {suffix} file is a pickle, which can run code when it is read, and is never "
            "read: load it where you trust it and save its arrays, numpy.savez('arrays.npz', "
            "val_logits=..., val_labels=...)"
        )
    if not path.exists():
        raise InputError(f"{path} does not exist: give the path of {FORMATS}")
    if not path.is_file() or (suffix not in ARRAYS and suffix not in TABLES):
        raise InputError(f"{path} is not {FORMATS}: convert it to one of these")


@contextmanager
def _contents(sources: list[_Source], reading: Reading) -> Iterator[Contents]:
    """What the files hold, while they are open; what is wrong with it is said with their names."""
    with about(*(source.path for source in sources)), ExitStack() as stack:
        arrays = [source for source in sources if _is_array(source)]
        if not arrays:
            yield table_contents(_tables(sources), reading)
            return
        _check_arrays(sources, arrays, reading)
        opened = [(source.path, stack.enter_context(_opened(source, reading))) for source in arrays]
        yield array_contents(merged(opened))


def _is_array(source: _Source) -> bool:
    return source.suffix in ARRAYS or (source.suffix == ".parquet" and holds_lists(source.path))


def _opened(source: _Source, reading: Reading) -> AbstractContextManager[Loaders]:
    if source.suffix in ARRAYS:
        return ARRAYS[source.suffix](source.path, source.name)
    return open_lists(source.path, source.name, reading.label)


def _check_arrays(sources: list[_Source], arrays: list[_Source], reading: Reading) -> None:
    """Refuses tables beside arrays, and words about columns where there are none."""
    table = next((source for source in sources if source not in arrays), None)
    if table is not None:
        raise InputError(
            f"{table.path} is a table and {arrays[0].path} holds arrays: import them one by one"
        )
    listed = any(source.suffix not in ARRAYS for source in arrays)
    if reading != (Reading(reading.label) if listed else Reading()):
        raise InputError(
            "--logits, --probs, --label and --ignore (kind=, label= and ignore= in Python) are for "
            "tables: the names of arrays say what they are, <split>_logits, <split>_labels"
        )


def _tables(sources: list[_Source]) -> dict[str, TableFile]:
    tables: dict[str, TableFile] = {}
    for source in sources:
        if source.name in tables:
            raise InputError(
                f"{tables[source.name].path} and {source.path} are both called {source.name!r}: "
                f"give each its split, as in 'val={source.path}'"
            )
        with about(source.path):
            tables[source.name] = TABLES[source.suffix](source.path)
    return tables


def _text(meta: dict[str, Any], key: str) -> str:
    """Takes a name out of `meta`: the manifest has a field of its own for it."""
    value = meta.pop(key, "")
    if not isinstance(value, str):
        raise InputError(f'the "{key}" in meta is {value!r}: it must be text')
    return value
