"""Tables in .parquet files: a column a class, or a column of lists, which is an array by itself.

pyarrow reads them; it is imported here, when such a file is met, and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, final

import numpy as np

from featcal.core.errors import InputError
from featcal.core.progress import tell
from featcal.data.reading.contents import SPLIT_PARTS
from featcal.data.reading.named_arrays import Array, Loader
from featcal.data.reading.table import (
    Block,
    Numbers,
    TableFile,
    block_rows,
    check_finite,
    not_a_number,
)

PANDAS_INDEX = re.compile(r"__index_level_\d+__")  # row numbers that pandas adds by itself


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A parquet file; what is wrong with it is an InputError."""
    try:
        arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        raise InputError(
            f"{path} needs pyarrow to be read: pip install 'featcal[arrow]'"
        ) from error
    try:
        with parquet.ParquetFile(path) as file:
            yield file
    except InputError:  # a ValueError, as some of arrow's are
        raise
    except (arrow.ArrowException, OSError) as error:
        raise InputError(
            f"{path} is not a .parquet file, or only a part of one "
            f"({' '.join(str(error).split())}): copy it again or write it anew"
        ) from error


@final
class ParquetTable(TableFile):
    """One column of numbers a class."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _opened(path) as file:
            names = file.schema_arrow.names
        self.names = [name for name in names if not PANDAS_INDEX.fullmatch(name)]

    def blocks(self, columns: Sequence[int], label: int) -> Iterator[Block]:
        """The rows, block by block."""
        names = [self.names[column] for column in columns]
        wanted = [*names, self.names[label]]
        done = 0
        with _opened(self.path) as file:
            for batch in file.iter_batches(block_rows(len(names)), columns=wanted):
                places = [f"row {row}" for row in range(done, done + batch.num_rows)]
                values = np.column_stack([_numbers(batch, name, places) for name in names])
                check_finite(values, names, places)
                labels = _column(batch, wanted[-1]).to_pylist()
                yield Block(values, [_text(value) for value in labels], places)
                done += batch.num_rows
                tell(f"reading {self.path.name}", done, file.metadata.num_rows)


def _text(value: object) -> str:
    return "" if value is None else str(value).strip()


def _column(batch: Any, name: str) -> Any:  # noqa: ANN401 - arrow has no types
    return batch.column(batch.schema.get_field_index(name))


def _numbers(batch: Any, name: str, places: Sequence[str]) -> Numbers:  # noqa: ANN401
    column, types = _column(batch, name), import_module("pyarrow").types
    if column.null_count:
        raise not_a_number(places[column.is_null().to_pylist().index(True)], name, "")
    kind = column.type
    if not (types.is_floating(kind) or types.is_integer(kind) or types.is_decimal(kind)):
        raise not_a_number(places[0], name, str(column[0]))
    values: Numbers = column.to_numpy(zero_copy_only=False).astype(np.float64)
    return values


def holds_lists(path: Path) -> bool:
    """Whether logits, probs or features are a column of lists, one list a row."""
    with _opened(path) as file:
        return bool(_lists(file))


def _lists(file: Any) -> list[str]:  # noqa: ANN401
    types, schema = import_module("pyarrow").types, file.schema_arrow
    listed = (types.is_list, types.is_large_list, types.is_fixed_size_list)
    return [
        field.name
        for field in schema
        if field.name in SPLIT_PARTS and any(is_kind(field.type) for is_kind in listed)
    ]


@contextmanager
def open_lists(path: Path, split: str, label: str) -> Iterator[dict[str, Loader]]:
    """The columns of lists as arrays, by the name of the split, and the column of labels."""
    with _opened(path) as file:
        names, found = _lists(file), file.schema_arrow.names
    if label not in found:
        raise InputError(
            f"{path} has no column {label!r}: name the column of labels with --label "
            "(label= in Python)"
        )
    loaders: dict[str, Loader] = {
        f"{split}_{name}": partial(_matrix, path, name) for name in names if name != label
    }
    yield {**loaders, f"{split}_labels": partial(_values, path, label)}


def _values(path: Path, name: str) -> Array:
    with _opened(path) as file:
        column = file.read(columns=[name]).column(name)
    if column.null_count:
        row = column.is_null().to_pylist().index(True)
        raise InputError(f"{path}, row {row}, column {name!r}: the cell is empty: remove the row")
    return np.array(column.to_numpy())


def _matrix(path: Path, name: str) -> Array:
    with _opened(path) as file:
        column = file.read(columns=[name]).column(name).combine_chunks()
    flat = column.flatten()
    compute = import_module("pyarrow.compute")
    lengths = compute.list_value_length(column).unique().to_pylist() or [0]
    if len(lengths) > 1 or lengths == [None] or flat.null_count:
        raise InputError(
            f"{path}, column {name!r}: the lists have holes or different lengths: give every row "
            "as many numbers"
        )
    return np.array(flat.to_numpy(zero_copy_only=False)).reshape(len(column), lengths[0])
