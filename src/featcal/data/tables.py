"""A file with named columns, read block by block, and how a cell of it is refused."""

from __future__ import annotations

import csv
import io
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, cast, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from featcal.core.batch import CHUNK_ROWS, Batch
from featcal.core.checks import InputError, Kind
from featcal.core.progress import tell
from featcal.data.arrays import SPLIT_PARTS, Array, Contents, Loader, about, listed, noted, scored
from featcal.data.manifest import SPLIT_NAME

BLOCK_CELLS = 2**22  # 32 MiB of numbers

Numbers = npt.NDArray[np.float64]


@final
@dataclass(frozen=True, slots=True)
class Block:
    """Some rows of a table.

    Attributes:
        values: (n, k) scores, finite.
        labels: n labels, as text without blanks around it.
        places: n names of the rows, such as "line 7".
    """

    values: Numbers
    labels: Sequence[str]
    places: Sequence[str]


class TableFile(ABC):
    """A file with named columns.

    Attributes:
        path: the file.
        names: of its columns, in order.
    """

    path: Path
    names: list[str]

    @abstractmethod
    def blocks(self, columns: Sequence[int], label: int) -> Iterator[Block]:
        """The rows, block by block: the numbers of `columns`, in that order, and their labels."""


def block_rows(columns: int) -> int:
    """Rows a block."""
    return max(1, min(CHUNK_ROWS, BLOCK_CELLS // max(columns, 1)))


def not_a_number(place: str, name: str, found: str) -> InputError:
    """The refusal of a cell, with the remedy that most likely helps."""
    where, found = f"{place}, column {name!r}", short(found)
    if not found.strip():
        return InputError(f"{where}: the cell is empty: fill it in or remove the row")
    if found.strip().lower().lstrip("+-") in ("nan", "inf", "infinity", "na", "null", "none"):
        return InputError(f"{where}: {found!r} is no finite number: correct it or remove the row")
    if found.count(",") == 1 and "." not in found:
        return InputError(f"{where}: {found!r} is not a number: write {found.replace(',', '.')}")
    return InputError(
        f"{where}: {found!r} is not a number: correct it, or leave a column that holds no scores "
        f"out with --ignore {name} (ignore=[{name!r}] in Python)"
    )


def short(text: str) -> str:
    """The beginning of a long text."""
    return text if len(text) <= 40 else text[:37] + "..."


def check_finite(values: Numbers, names: Sequence[str], places: Sequence[str]) -> None:
    """Refuses the first cell that is NaN or infinite."""
    if not np.isfinite(values).all():
        row, column = np.argwhere(~np.isfinite(values))[0]
        raise not_a_number(places[row], names[column], str(values[row, column]))


# --- What the header of a table says: which column is the label's, which are scores, and of what
# kind.
#
# `logit_` or `prob_` in front of every class says what the numbers are; without that the caller
# says
# it. Nothing is guessed from the numbers.

PREFIXED = re.compile(r"(logit|prob)s?_(.+)", re.DOTALL)
ALONE = re.compile(r"(logit|prob)s?")  # a binary model's one column may have this name alone


@final
@dataclass(frozen=True, slots=True)
class Reading:
    """What the caller says of the columns: the labels', the kind of the others, those to skip."""

    label: str = "label"
    kind: Kind | None = None
    ignore: tuple[str, ...] = ()

    def ignores(self, name: str) -> bool:
        """Whether a column is to be left out, by its name or a pattern such as "feature_*"."""
        return any(name == pattern or fnmatchcase(name, pattern) for pattern in self.ignore)


@final
@dataclass(frozen=True, slots=True)
class Header:
    """The columns of one table.

    Attributes:
        kind: of its scores.
        columns: the position of every class, by its name.
        label: the position of the labels.
        told: whether the names say the kind, so that nothing else can be among the scores.
    """

    kind: Kind
    columns: dict[str, int]
    label: int
    told: bool


def read_header(names: Sequence[str], reading: Reading) -> Header:
    """Tells the columns apart by their names.

    Raises:
        InputError: where the names do not say enough; the remedy is an option or a better name.
    """
    kept = [name for name in names if not reading.ignores(name)]
    _check_names(kept, reading.label)
    scores = [name for name in kept if name != reading.label]
    kind, told = _kind(scores, reading)
    columns = {_class_name(name) if told else name: names.index(name) for name in scores}
    if len(columns) < len(scores):
        raise InputError("two columns name the same class, once with logit_ or prob_: rename one")
    return Header(kind, columns, names.index(reading.label), told)


def _check_names(names: Sequence[str], label: str) -> None:
    if label not in names:
        raise InputError(
            f"it has no column {label!r} (found: {listed(names)}): name the column of labels with "
            "--label (label= in Python)"
        )
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"{names.count(twice)} columns are called {twice!r}: rename them")
    if "" in names:
        raise InputError(
            "a column has no name (row numbers, as pandas writes them?): leave it out when saving, "
            "index=False, or with --ignore '' (ignore=[''] in Python)"
        )
    if len(names) == 1:
        raise InputError(f"it has no column but {label!r}: add the scores, one column a class")


def _kind(names: Sequence[str], reading: Reading) -> tuple[Kind, bool]:
    """What the numbers are, and whether the names say it."""
    found = [_kind_by_name(name, alone=len(names) == 1) for name in names]
    kind = next((one for one in found if one is not None), None)
    if kind is None:
        return _kind_by_word(names, reading), False
    others = [name for name, one in zip(names, found, strict=True) if one != kind]
    if others:
        flags = " ".join(f"--ignore {name}" for name in others[:3])
        raise InputError(
            f"the columns {listed(others)} are not named as {kind} and others are: leave them out "
            f"with {flags} (ignore= in Python; patterns such as 'feature_*' will do)"
        )
    if reading.kind not in (None, kind):
        raise InputError(f"the columns are named as {kind}: do not call them {reading.kind}")
    return kind, True


def _kind_by_name(name: str, *, alone: bool) -> Kind | None:
    match = PREFIXED.fullmatch(name) or (ALONE.fullmatch(name) if alone else None)
    return None if match is None else cast(Kind, f"{match[1]}s")


def _kind_by_word(names: Sequence[str], reading: Reading) -> Kind:
    if reading.kind is None:
        raise InputError(
            f"nothing says whether {listed(names, at_most=3)} are logits or probabilities: say "
            "--logits or --probs (kind='logits' or kind='probs' in Python), or begin the names of "
            "the columns with logit_ or prob_"
        )
    return reading.kind


def _class_name(name: str) -> str:
    match = PREFIXED.fullmatch(name)
    return name if match is None else str(match[2])


# --- Tables as `Contents`: one table a split, one column a class, and a column of labels.

WHOLE_ROWS = 8  # from here on a column of distinct whole numbers is taken for row numbers
BOOLEANS = {"false": 0, "False": 0, "FALSE": 0, "true": 1, "True": 1, "TRUE": 1}


def table_contents(tables: Mapping[str, TableFile], reading: Reading) -> Contents:
    """Contents of tables by split; all must have the same classes, in any order.

    Raises:
        InputError: for columns that cannot be told apart, and while reading for cells.
    """
    _check_ignored([name for table in tables.values() for name in table.names], reading)
    headers = {split: _header(split, table, reading) for split, table in tables.items()}
    (first, header), *others = headers.items()
    for split, other in others:
        with about(tables[split].path):
            _check_alike(other, header, str(tables[first].path))
    names = list(header.columns)
    return Contents(
        {split: _Split(tables[split], one, names) for split, one in headers.items()},
        class_names=None if len(names) == 1 else names,
        meta=noted({}, header.kind),
    )


def _check_ignored(names: Sequence[str], reading: Reading) -> None:
    for pattern in reading.ignore:
        if not any(Reading(ignore=(pattern,)).ignores(name) for name in names):
            raise InputError(f"no column is called {pattern!r}: choose of {listed(names)}")


def _header(split: str, table: TableFile, reading: Reading) -> Header:
    with about(table.path):
        if not SPLIT_NAME.fullmatch(split):
            raise InputError(
                f"{split!r} cannot be the name of a split: give one, as in 'val={table.path}'"
            )
        return read_header(table.names, reading)


def _check_alike(header: Header, first: Header, path: str) -> None:
    if header.kind != first.kind:
        raise InputError(f"it holds {header.kind} and {path} {first.kind}: give all alike")
    odd = sorted(header.columns.keys() ^ first.columns.keys())
    if odd:
        raise InputError(
            f"its classes are not those of {path} ({listed(odd)} in one of them alone): give every "
            "split the same columns"
        )


@final
@dataclass(frozen=True, slots=True)
class _Split:
    """The rows of one table, read from the file on every pass; classes in the order of `names`."""

    table: TableFile
    header: Header
    names: list[str]

    def __iter__(self) -> Iterator[Batch]:
        lookup = _lookup(self.names)
        columns = [self.header.columns[name] for name in self.names]
        with about(self.table.path):
            for number, block in enumerate(self.table.blocks(columns, self.header.label)):
                if number == 0 and not self.header.told:
                    _check_row_numbers(block, self.names)
                labels = self._labels(block, lookup)
                values = torch.from_numpy(block.values)
                yield scored(self.header.kind, values, labels, block.places.__getitem__)

    def _labels(self, block: Block, lookup: Mapping[str, int]) -> Tensor:
        try:
            return torch.tensor([lookup[text] for text in block.labels])
        except KeyError:
            row = next(row for row, text in enumerate(block.labels) if text not in lookup)
        where = f"{block.places[row]}, column {self.table.names[self.header.label]!r}"
        if not block.labels[row]:
            raise InputError(f"{where}: the label is empty: fill it in or remove the row")
        raise InputError(
            f"{where}: {short(block.labels[row])!r} is no class: give {_accepted(self.names)}"
        )


def _lookup(names: Sequence[str]) -> dict[str, int]:
    """The class of every label text: names as in the header, and numbers where those differ."""
    count = max(len(names), 2)
    numbers = {text: number for number in range(count) for text in (str(number), f"{number}.0")}
    if len(names) == 1:
        return numbers | BOOLEANS
    named = {name: number for number, name in enumerate(names)}
    return named if _numeric(names) else numbers | named


def _numeric(names: Sequence[str]) -> bool:
    """Whether a number in the place of a label could mean another class than the one it names."""
    counted = [str(number) for number in range(len(names))]
    return list(names) != counted and any(name.lstrip("+-").isdigit() for name in names)


def _accepted(names: Sequence[str]) -> str:
    if len(names) == 1:
        return "0 or 1, which is the class of the scores"
    either = "" if _numeric(names) else f" or a number from 0 to {len(names) - 1}"
    return f"a name of the header ({listed(names, at_most=6)}){either}"


def _check_row_numbers(block: Block, names: Sequence[str]) -> None:
    """Refuses a column of identifiers among columns whose names say nothing."""
    if len(block.values) < WHOLE_ROWS:
        return
    whole = (block.values == np.round(block.values)).all(0)
    for column in whole.nonzero()[0]:
        if len(np.unique(block.values[:, column])) == len(block.values):
            name = names[column]
            raise InputError(
                f"column {name!r} holds another whole number in every row, as row numbers do: "
                f"leave it out with --ignore {name} (ignore=[{name!r}] in Python), or begin the "
                "names of all scores with logit_ or prob_"
            )


# --- Tables as text, .csv and .tsv: any size of file, one block of rows in memory.


@final
class CsvTable(TableFile):
    """Text in UTF-8 whose first line names the columns; tabs part them in a .tsv, else commas."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
        with self._opened() as (rows, _):
            header = next(rows, [])
        self.names = [name.strip() for name in header]
        self._check_header()

    def _check_header(self) -> None:
        if not self.names:
            raise InputError("it is empty: the first line must name the columns")
        other = next((mark for mark in ";\t,|" if mark in self.names[0]), None)
        if len(self.names) == 1 and other is not None:
            wanted = "tabs" if self.delimiter == "\t" else "commas"
            raise InputError(
                f"line 1: the columns are parted by {other!r}: save it with {wanted} between them"
            )
        if all(_is_number(name) and "." in name for name in self.names[:-1]) and self.names[1:]:
            raise InputError("line 1 holds numbers: the first line must name the columns")

    def blocks(self, columns: Sequence[int], label: int) -> Iterator[Block]:
        """The rows, block by block."""
        names = [self.names[column] for column in columns]
        full = block_rows(len(columns))
        values: list[Numbers] = []
        labels: list[str] = []
        places: list[str] = []
        with self._opened() as (rows, done):
            next(rows)
            for row in rows:
                place = f"line {rows.line}"
                self._check_width(row, place)
                values.append(_numbers([row[column] for column in columns], names, place))
                labels.append(row[label].strip())
                places.append(place)
                if len(values) == full:
                    yield _block(values, labels, places, names)
                    done()
                    values, labels, places = [], [], []
            if values:
                yield _block(values, labels, places, names)
            done()

    def _check_width(self, row: list[str], place: str) -> None:
        if len(row) != len(self.names):
            raise InputError(
                f"{place} has {len(row)} cells and the header {len(self.names)}: correct the line; "
                "numbers need decimal points, and text with commas quotes"
            )

    @contextmanager
    def _opened(self) -> Iterator[tuple[_Rows, Callable[[], None]]]:
        """The rows that are not blank, and a function that tells how far the reading is."""
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            rows = _Rows(file, self.delimiter)
            try:
                yield rows, lambda: tell(f"reading {self.path.name}", file.tell(), size)
            except UnicodeDecodeError as error:
                raise InputError(
                    f"after line {rows.line} it is not UTF-8 text ({error.reason}): save it as "
                    "UTF-8"
                ) from error
            except csv.Error as error:
                raise InputError(
                    f"line {rows.line} is no row of a table ({error}): correct its quotes"
                ) from error


@final
class _Rows:
    """The rows of a text file without the blank lines, and the line where the last one ends."""

    def __init__(self, file: BinaryIO, delimiter: str) -> None:
        text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
        self.reader = csv.reader(text, delimiter=delimiter, strict=True, skipinitialspace=True)

    @property
    def line(self) -> int:
        return self.reader.line_num

    def __iter__(self) -> Iterator[list[str]]:
        return self

    def __next__(self) -> list[str]:
        for row in self.reader:
            if len(row) > 1 or any(cell.strip() for cell in row):
                return row
        raise StopIteration


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text  # which Python allows in a number, and no file means


def _numbers(cells: list[str], names: Sequence[str], place: str) -> Numbers:
    try:
        if "_" not in "".join(cells):
            return np.fromiter(map(float, cells), np.float64, len(cells))
    except ValueError:
        pass
    name, found = next(pair for pair in zip(names, cells, strict=True) if not _is_number(pair[1]))
    raise not_a_number(place, name, found)


def _block(
    values: list[Numbers], labels: list[str], places: list[str], names: Sequence[str]
) -> Block:
    whole = np.stack(values)
    check_finite(whole, names, places)
    return Block(whole, labels, places)


# --- Tables in .parquet files: a column a class, or a column of lists, which is an array by
# itself.
#
# pyarrow reads them; it is imported here, when such a file is met, and nowhere else.

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
                values = np.column_stack(
                    [_table_parquet_numbers(batch, name, places) for name in names]
                )
                check_finite(values, names, places)
                labels = _column(batch, wanted[-1]).to_pylist()
                yield Block(values, [_text(value) for value in labels], places)
                done += batch.num_rows
                tell(f"reading {self.path.name}", done, file.metadata.num_rows)


def _text(value: object) -> str:
    return "" if value is None else str(value).strip()


def _column(batch: Any, name: str) -> Any:  # noqa: ANN401 - arrow has no types
    return batch.column(batch.schema.get_field_index(name))


def _table_parquet_numbers(batch: Any, name: str, places: Sequence[str]) -> Numbers:  # noqa: ANN401
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
