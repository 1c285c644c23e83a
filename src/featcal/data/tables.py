"""Tables of scores, .csv, .tsv and .parquet: one table per split, one column per class, and labels.

`logit_` or `prob_` in front of every class says what the numbers are; without that the caller says
it. Nothing is guessed from the numbers. One block of rows is in memory at a time. pyarrow reads
.parquet files; it is imported here, when such a file is met, and nowhere else.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, cast, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from featcal.core.batch import CHUNK_ROWS, PROBS_SLACK, Batch, Data, stored_logits
from featcal.core.checks import InputError, Kind, check_probs
from featcal.core.progress import tell
from featcal.data.manifest import SPLIT_NAME

BLOCK_CELLS = 2**22  # 32 MiB of numbers
WHOLE_ROWS = 8  # from here on a column of distinct whole numbers is taken for row numbers
PREFIXED = re.compile(r"(logit|prob)s?_(.+)", re.DOTALL)
ALONE = re.compile(r"(logit|prob)s?")  # a binary model's one column may have this name alone
PANDAS_INDEX = re.compile(r"__index_level_\d+__")  # row numbers that pandas adds by itself
BOOLEANS = {"false": 0, "False": 0, "FALSE": 0, "true": 1, "True": 1, "TRUE": 1}

Numbers = npt.NDArray[np.float64]


class Contents(NamedTuple):
    """What files hold, in the terms of `write_pack`; each split is read when it is asked for.

    Attributes:
        splits: the data of every split, by name.
        head: weight (k, d) and bias (k,) of the last layer, or None.
        class_names: one name per class, or None.
        meta: anything else worth keeping, as JSON.
    """

    splits: Mapping[str, Data]
    head: tuple[Tensor, Tensor | None] | None
    class_names: Sequence[str] | None
    meta: dict[str, Any]


@final
@dataclass(frozen=True, slots=True)
class Reading:
    """What the caller says of the columns: the labels', the kind of the others, those to skip."""

    label: str = "label"
    kind: Kind | None = None
    ignore: tuple[str, ...] = ()


def table_contents(tables: Mapping[str, Path], reading: Reading) -> Contents:
    """The tables of all splits; classes have the order of the first one.

    Raises:
        InputError: for a header that does not say enough, and while rows are read for cells.
    """
    names = {split: _column_names(path) for split, path in tables.items()}
    everything = [name for found in names.values() for name in found]
    for pattern in reading.ignore:
        if not any(_ignored(name, (pattern,)) for name in everything):
            raise InputError(f"no column is called {pattern!r}: choose of {listed(everything)}")
    splits: dict[str, _Table] = {}
    for split, path in tables.items():
        with about(path):
            if not SPLIT_NAME.fullmatch(split):
                raise InputError(
                    f"{split!r} cannot be the name of a split: give one, as in 'val={path}'"
                )
            table = _Table.of(path, names[split], reading)
            first = next(iter(splits.values()), table)
            if (table.kind, table.scores.keys()) != (first.kind, first.scores.keys()):
                odd = sorted({*table.scores.values()} ^ {*first.scores.values()})
                raise InputError(
                    f"its scores are not those of {first.path} ({listed(odd)} in one of them "
                    "alone): give every split the same columns"
                )
            splits[split] = replace(
                table, scores={name: table.scores[name] for name in first.scores}
            )
    classes = list(first.scores)
    return Contents(splits, None, None if len(classes) == 1 else classes, noted({}, first.kind))


@final
@dataclass(frozen=True, slots=True)
class _Table:
    """The rows of one table as Data, read from the file on every pass.

    Attributes:
        path: the file.
        kind: of its scores.
        scores: the column of every class, by the name of the class.
        label: the column of the labels.
        told: whether the names of the columns say the kind, so that all others are known.
    """

    path: Path
    kind: Kind
    scores: dict[str, str]
    label: str
    told: bool

    @classmethod
    def of(cls, path: Path, names: Sequence[str], reading: Reading) -> _Table:
        """Tells the columns apart by their names; the remedy is an option or a better name."""
        kept = [name for name in names if not _ignored(name, reading.ignore)]
        scores = [name for name in kept if name != reading.label]
        if reading.label not in kept:
            raise InputError(
                f"it has no column {reading.label!r} (found: {listed(kept)}): name the column of "
                "labels with --label (label= in Python)"
            )
        if "" in kept:
            raise InputError(
                "a column has no name (row numbers, as pandas writes them?): leave it out when "
                "saving, index=False, or with --ignore '' (ignore=[''] in Python)"
            )
        if not scores:
            raise InputError(f"it has no column but {kept[0]!r}: add the scores, one per class")
        matches = [PREFIXED.fullmatch(name) for name in scores]
        if len(scores) == 1:
            matches = [matches[0] or ALONE.fullmatch(scores[0])]
        kinds = [None if match is None else cast(Kind, f"{match[1]}s") for match in matches]
        told = next((one for one in kinds if one is not None), None)
        kind = told or reading.kind
        if kind is None:
            raise InputError(
                f"nothing says whether {listed(scores, at_most=3)} are logits or probabilities: "
                "say --logits or --probs (kind='logits' or kind='probs' in Python), or begin the "
                "names of the columns with logit_ or prob_"
            )
        others = [name for name, one in zip(scores, kinds, strict=True) if one != told]
        if others:
            flags = " ".join(f"--ignore {name}" for name in others[:3])
            raise InputError(
                f"the columns {listed(others)} are not named as {kind} and others are: leave them "
                f"out with {flags} (ignore= in Python; patterns such as 'feature_*' will do)"
            )
        if reading.kind not in (None, kind):
            raise InputError(f"the columns are named as {kind}: do not call them {reading.kind}")
        columns = {PREFIXED.sub(r"\2", name) if told else name: name for name in scores}
        if len(columns) < len(scores) or kept.count(reading.label) > 1:
            raise InputError(
                f"two of the columns {listed(kept)} have one name, or name one class, as logit_ "
                "and logits_: rename one"
            )
        return cls(path, kind, columns, reading.label, told=told is not None)

    def __iter__(self) -> Iterator[Batch]:
        known, classes = list(self.scores) if len(self.scores) > 1 else ["0", "1"], self._classes()
        blocks = _parquet_blocks if self.path.suffix.lower() == ".parquet" else _csv_blocks
        rows = max(1, min(CHUNK_ROWS, BLOCK_CELLS // len(self.scores)))
        with about(self.path):
            read = blocks(self.path, list(self.scores.values()), self.label, rows)
            for number, block in enumerate(read):
                if number == 0 and not self.told:
                    self._check_row_numbers(block.values)
                odd = next(
                    (row for row, text in enumerate(block.labels) if text not in classes), -1
                )
                if odd >= 0:
                    raise InputError(
                        f"{block.places[odd]}, column {self.label!r}: {block.labels[odd][:40]!r} "
                        f"is none of the classes {listed(known, at_most=6)}: correct it, or remove "
                        "the row"
                    )
                labels = torch.tensor([classes[text] for text in block.labels])
                values = torch.from_numpy(block.values)
                yield scored(self.kind, values, labels, block.places.__getitem__)

    def _classes(self) -> dict[str, int]:
        """The class of every label text: names as in the header, and numbers where those differ."""
        names = list(self.scores)
        counted = [str(number) for number in range(max(len(names), 2))]
        numbers = {text: i for i, one in enumerate(counted) for text in (one, f"{one}.0")}
        if len(names) == 1:
            return numbers | BOOLEANS
        named = {name: number for number, name in enumerate(names)}
        # A number could mean another class than the one that has it for a name.
        numeric = names != counted and any(name.lstrip("+-").isdigit() for name in names)
        return named if numeric else numbers | named

    def _check_row_numbers(self, values: Numbers) -> None:
        """Refuses a column of identifiers among columns whose names say nothing."""
        for name, column in zip(self.scores, values.T, strict=True):
            whole = len(column) >= WHOLE_ROWS and bool((column == np.round(column)).all())
            if whole and len(np.unique(column)) == len(column):
                raise InputError(
                    f"column {name!r} holds another whole number in every row, as row numbers do: "
                    f"leave it out with --ignore {name} (ignore=[{name!r}] in Python), or begin "
                    "the names of all scores with logit_ or prob_"
                )


class _Block(NamedTuple):
    """Some rows of a table.

    Attributes:
        values: (n, k) scores, finite.
        labels: n labels, as text without blanks around it.
        places: n names of the rows, such as "line 7".
    """

    values: Numbers
    labels: list[str]
    places: list[str]


def _column_names(path: Path) -> list[str]:
    """The names of the columns of a table, in order."""
    if path.suffix.lower() == ".parquet":
        with open_parquet(path) as file:
            names = file.schema_arrow.names
        return [name for name in names if not PANDAS_INDEX.fullmatch(name)]
    with about(path):
        return [name.strip() for name in next(_csv_lines(path), ("", []))[1]]


def _csv_blocks(path: Path, columns: list[str], label: str, rows: int) -> Iterator[_Block]:
    lines = _csv_lines(path)
    names = [name.strip() for name in next(lines)[1]]
    wanted, label_at = [names.index(column) for column in columns], names.index(label)
    values: list[Numbers] = []
    block = _Block(np.zeros(0), [], [])
    for place, cells in lines:
        if len(cells) != len(names):
            raise InputError(
                f"{place} has {len(cells)} cells and the header {len(names)}: correct the line; "
                "numbers need decimal points, and text with commas quotes"
            )
        numbers = np.fromiter((_number(cells[i]) for i in wanted), np.float64, len(wanted))
        if not np.isfinite(numbers).all():
            bad = int(np.flatnonzero(~np.isfinite(numbers))[0])
            raise _no_score(place, columns[bad], cells[wanted[bad]])
        values.append(numbers)
        block.labels.append(cells[label_at].strip())
        block.places.append(place)
        if len(values) == rows:
            yield block._replace(values=np.stack(values))
            values, block = [], _Block(np.zeros(0), [], [])
    if values:
        yield block._replace(values=np.stack(values))


def _csv_lines(path: Path) -> Iterator[tuple[str, list[str]]]:
    """The place and the cells of every line that is not blank, the header first."""
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    task, size = f"reading {path.name}", path.stat().st_size
    with path.open("rb") as file:
        text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
        reader = csv.reader(text, delimiter=delimiter, strict=True, skipinitialspace=True)
        try:
            for number, cells in enumerate(reader, start=1):
                if len(cells) > 1 or "".join(cells).strip():
                    yield f"line {reader.line_num}", cells
                if number % CHUNK_ROWS == 0:
                    tell(task, file.tell(), size)
        except UnicodeDecodeError as error:
            raise InputError(
                f"after line {reader.line_num} it is not UTF-8 text ({error.reason}): save it as "
                "UTF-8"
            ) from error
        except csv.Error as error:
            raise InputError(
                f"line {reader.line_num} is no row of a table ({error}): correct its quotes"
            ) from error
    tell(task, size, size)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _no_score(place: str, name: str, found: str) -> InputError:
    return InputError(
        f"{place}, column {name!r}: {found[:40]!r} is not a finite number: correct it, remove the "
        f"row, or leave a column that holds no scores out with --ignore {name} "
        f"(ignore=[{name!r}] in Python)"
    )


@contextmanager
def open_parquet(path: Path) -> Iterator[Any]:
    """A .parquet file; what is wrong with it is an InputError."""
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


def _parquet_blocks(path: Path, columns: list[str], label: str, rows: int) -> Iterator[_Block]:
    done = 0
    with open_parquet(path) as file:
        types = import_module("pyarrow").types
        for batch in file.iter_batches(rows, columns=[*columns, label]):
            places = [f"row {row}" for row in range(done, done + batch.num_rows)]
            values = np.empty((batch.num_rows, len(columns)))
            for place, name in enumerate(columns):
                column = batch.column(name)
                numeric = (types.is_floating, types.is_integer, types.is_decimal)
                if not any(is_kind(column.type) for is_kind in numeric):
                    raise _no_score(places[0], name, str(column[0]))
                values[:, place] = column.to_numpy(zero_copy_only=False).astype(np.float64)
            if not np.isfinite(values).all():
                row, bad = np.argwhere(~np.isfinite(values))[0]
                raise _no_score(places[row], columns[bad], str(values[row, bad]))
            texts = (
                "" if value is None else str(value) for value in batch.column(label).to_pylist()
            )
            yield _Block(values, [text.strip() for text in texts], places)
            done += batch.num_rows
            tell(f"reading {path.name}", done, file.metadata.num_rows)


def scored(kind: Kind, values: Tensor, labels: Tensor, place: Callable[[int], str]) -> Batch:
    """A batch of rows of logits or probabilities, (n, k), or (n,) or (n, 1) of class 1.

    Args:
        kind: what the values are.
        values: the scores.
        labels: (n,) integers.
        place: what to call a row, by its number in `values`, when it is refused.
    """
    if kind == "logits":
        return Batch(values, labels)
    check_probs(values.double(), slack=PROBS_SLACK, place=place)
    batch = Batch.from_probs(values.double().clamp(0, 1), labels)
    # A probability that is 0 as stored becomes the smallest one the type could tell from 0; for
    # wider types it is that of float32, so that the same numbers give the same pack.
    half = torch.finfo(torch.float16)
    narrow = values.dtype == torch.float16
    tiny = half.tiny * half.eps if narrow else torch.finfo(torch.float32).tiny
    return replace(batch, logits=stored_logits(batch).clamp_min(math.log(tiny)).float())


def noted(meta: dict[str, Any], kind: str) -> dict[str, Any]:
    """The meta of a pack whose logits are logarithms of probabilities says so."""
    return {"source": "probabilities", **meta} if kind == "probs" else meta


@contextmanager
def about(*files: Path) -> Iterator[None]:
    """Puts the files in front of what is wrong with them, unless the sentence names one already."""
    try:
        yield
    except InputError as error:
        if any(str(file) in str(error) for file in files):
            raise
        raise InputError(f"{listed([*map(str, files)], at_most=2)}: {error}") from error


def listed(names: Sequence[str], *, at_most: int = 12) -> str:
    """Names for a sentence; the first few of many."""
    shown = ", ".join(names[:at_most]) + (", ..." if len(names) > at_most else "")
    return shown or "nothing"


def _ignored(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a column is to be left out, by its name or a pattern such as "feature_*"."""
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns)
