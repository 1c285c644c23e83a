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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from featcal.core.batch import CHUNK_ROWS, PROBS_SLACK, Batch, Data, stored_logits
from featcal.core.checks import InputError, Kind, check_probs
from featcal.core.progress import tell
from featcal.core.stored import check_unpacked, reading
from featcal.data.pack import SPLIT_NAME

BLOCK_CELLS = 2**20  # of a table in memory at a time
WHOLE_ROWS = 8  # from here on a column of distinct whole numbers is taken for row numbers
PREFIXED = re.compile(r"(logit|prob)s?_(.+)", re.DOTALL)
ALONE = re.compile(r"(logit|prob)s?")  # a binary model's one column may have this name alone
PANDAS_INDEX = re.compile(r"__index_level_\d+__")  # row numbers that pandas adds by itself
UNLABELLED = "rows without labels are for featcal predict"
BOOLEANS = {"false": 0, "False": 0, "FALSE": 0, "true": 1, "True": 1, "TRUE": 1}

Numbers = npt.NDArray[np.float64]
# Some rows: finite scores (n, k), labels without blanks around them (none where they are not asked
# for), names such as "line 7".
Block = tuple[Numbers, list[str], list[str]]


class Contents(NamedTuple):
    """What files hold, in the terms of `write_pack`; each split is read when it is asked for.

    Attributes:
        splits: the data of every split, by name.
        head: weight (k, d) and bias (k,) of the last layer, or None.
        class_names: one name per class, or None.
        meta: anything else worth keeping, as JSON.
        kind: what the scores are.
    """

    splits: Mapping[str, Data]
    head: tuple[Tensor, Tensor | None] | None
    class_names: Sequence[str] | None
    meta: dict[str, Any]
    kind: Kind


def table_contents(
    tables: Mapping[str, Path],
    label: str,
    kind: Kind | None,
    ignore: Sequence[str],
    *,
    labelled: bool = True,
) -> Contents:
    """The tables of all splits; classes have the order of the first one.

    Without `labelled`, labels are not looked at and need not be there: every row has label 0.

    Raises:
        InputError: for a header that does not say enough, and while rows are read for cells.
    """
    names = {split: _column_names(path) for split, path in tables.items()}
    everything = [name for found in names.values() for name in found]
    skipped: set[str] = set()
    for pattern in ignore:  # a name, or a pattern such as "feature_*"
        found = {name for name in everything if name == pattern or fnmatchcase(name, pattern)}
        if not found:
            raise InputError(f"no column is called {pattern!r}: choose of {listed(everything)}")
        skipped |= found
    splits: dict[str, Iterator[Batch]] = {}
    for split, path in tables.items():
        with about(path):
            if not SPLIT_NAME.fullmatch(split):
                raise InputError(f"{split!r} cannot name a split: give one, as in 'val={path}'")
            kept = [name for name in names[split] if name not in skipped]
            if not labelled:
                kept = [name for name in kept if name != label]
            own, scores, told = _recognised(kept, label if labelled else None, kind)
            if not splits:
                first, shared, classes = path, own, scores
            if (own, scores.keys()) != (shared, classes.keys()):
                odd = sorted({*scores.values()} ^ {*classes.values()})
                raise InputError(
                    f"its scores are not those of {first} ({listed(odd)} in one of them alone)"
                )
            ordered = {name: scores[name] for name in classes}
            splits[split] = _rows(path, own, ordered, label if labelled else None, told=told)
    return Contents(splits, None, None if len(classes) == 1 else [*classes], {}, shared)


def _recognised(
    kept: Sequence[str], label: str | None, kind: Kind | None
) -> tuple[Kind, dict[str, str], bool]:
    """What the columns of a table are, by their names alone.

    Returns:
        the kind of the scores, the column of every class by the name of the class, and whether the
        columns say the kind, so that all others are known.
    """
    scores = [name for name in kept if name != label]
    if label is not None and label not in kept:
        other = len(kept) == 1 and next((mark for mark in ";\t|" if mark in kept[0]), "")
        named = f"name it with --label (label=); {UNLABELLED}"
        remedy = f"part columns by commas, not {other!r}" if other else named
        raise InputError(f"it has no column {label!r} (found: {listed(kept)}): {remedy}")
    if "" in kept:
        raise InputError("a column has no name (of row numbers?): leave it out with --ignore ''")
    if not scores:
        raise InputError(f"it has no scores (found: {listed(kept)}): add a column for each class")
    matches = [PREFIXED.fullmatch(name) for name in scores]
    if len(scores) == 1:
        matches = [matches[0] or ALONE.fullmatch(scores[0])]
    kinds = [None if match is None else cast(Kind, f"{match[1]}s") for match in matches]
    told = next((one for one in kinds if one is not None), None)
    found = told or kind
    if found is None:
        raise InputError(
            f"nothing says whether {listed(scores, at_most=3)} are logits or probabilities: say "
            "--logits or --probs (kind= in Python), or name the columns logit_... or prob_..."
        )
    others = [name for name, one in zip(scores, kinds, strict=True) if one != told]
    if others:
        flags = " ".join(f"--ignore {name}" for name in others[:3])
        raise InputError(
            f"the columns {listed(others)} are not named as {told} and others are: leave them "
            f"out with {flags} (ignore= in Python; patterns such as 'feature_*' will do)"
        )
    if kind not in (None, found):
        raise InputError(f"the columns are named as {found}: do not call them {kind}")
    columns = {PREFIXED.sub(r"\2", name) if told else name: name for name in scores}
    if len(columns) < len(scores) or (label is not None and kept.count(label) > 1):
        raise InputError(f"two of the columns {listed(kept)} name one class: rename one")
    return found, columns, told is not None


def _rows(
    path: Path, kind: Kind, scores: dict[str, str], label: str | None, *, told: bool
) -> Iterator[Batch]:
    """The rows of one table, a block at a time."""
    names = list(scores)
    counted = [str(number) for number in range(max(len(names), 2))]
    # The class of every label text: names as in the header, and numbers where those differ. A
    # number could mean another class than the one that has it for a name.
    classes = {text: i for i, one in enumerate(counted) for text in (one, f"{one}.0")}
    if len(names) == 1:
        names, classes = counted, classes | BOOLEANS
    elif names != counted and any(name.lstrip("+-").isdigit() for name in names):
        classes = {}
    classes |= {name: number for number, name in enumerate(names)}
    blocks = _parquet_blocks if path.suffix.lower() == ".parquet" else _csv_blocks
    size = max(1, min(CHUNK_ROWS, BLOCK_CELLS // len(scores)))
    with about(path):
        for number, block in enumerate(blocks(path, list(scores.values()), label, size)):
            values, texts, places = block
            if number == 0 and not told:
                _check_row_numbers(scores, values)
            for place, text in zip(places, texts, strict=label is not None):
                if text not in classes:
                    raise InputError(
                        f"{place}, column {label!r}: {text[:40]!r} is none of the classes "
                        f"{listed(names, at_most=6)}: correct it, or remove the row"
                    )
            known = [classes[text] for text in texts] if label is not None else [0] * len(values)
            labels = torch.tensor(known)
            yield scored(kind, torch.from_numpy(values), labels, places.__getitem__)


def _check_row_numbers(names: Iterable[str], values: Numbers) -> None:
    """Refuses a column of identifiers among columns whose names say nothing."""
    for name, column in zip(names, values.T, strict=True):
        whole = len(column) >= WHOLE_ROWS and bool((column == np.round(column)).all())
        if whole and len(np.unique(column)) == len(column):
            raise InputError(
                f"column {name!r} holds another whole number in every row, as row numbers do: "
                f"leave it out with --ignore {name}, or name all scores logit_... or prob_..."
            )


def _column_names(path: Path) -> list[str]:
    """The names of the columns of a table, in order."""
    if path.suffix.lower() == ".parquet":
        with open_parquet(path) as file:
            names = file.schema_arrow.names
        return [name for name in names if not PANDAS_INDEX.fullmatch(name)]
    with about(path):
        return [name.strip() for name in next(_csv_lines(path), ("", []))[1]]


def _csv_blocks(path: Path, columns: list[str], label: str | None, rows: int) -> Iterator[Block]:
    lines = _csv_lines(path)
    names = [name.strip() for name in next(lines)[1]]
    places = dict(
        zip(reversed(names), reversed(range(len(names))), strict=True)
    )  # the first counts
    wanted = [places[column] for column in columns]
    label_at = None if label is None else places[label]
    while block := list(islice(lines, rows)):
        values = np.empty((len(block), len(wanted)))
        for row, (place, cells) in enumerate(block):
            if len(cells) != len(names):
                raise InputError(
                    f"{place} has {len(cells)} cells and the header {len(names)}: numbers need "
                    "decimal points, and text with commas quotes"
                )
            values[row] = [_number(cells[i]) for i in wanted]
        for row, bad in np.argwhere(~np.isfinite(values)):
            place, cells = block[row]
            raise _no_score(place, columns[bad], cells[wanted[bad]])
        texts = [] if label_at is None else [cells[label_at].strip() for _, cells in block]
        yield values, texts, [place for place, _ in block]


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
            raise InputError(f"it is not UTF-8 text ({error.reason}): save it as UTF-8") from error
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
        _, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        raise InputError(f"{path} needs pyarrow: pip install 'featcal[arrow]'") from error
    with reading(path, "save it anew"), parquet.ParquetFile(path) as file:
        yield file


def check_columns(path: Path, file: Any, names: Iterable[str]) -> None:  # noqa: ANN401
    """Refuses columns of a .parquet file that unpack to far more than honest numbers do.

    Counted are the numbers in them, of which a row has many where a column is one of lists.
    """
    about, wanted = file.metadata, {*names}
    groups = [about.row_group(i) for i in range(about.num_row_groups)]
    parts = (group.column(i) for group in groups for i in range(about.num_columns))
    numbers = sum(
        part.num_values
        for part in parts
        if {part.path_in_schema, part.path_in_schema.partition(".")[0]} & wanted
    )
    check_unpacked(path.stat().st_size, 8 * numbers)


def _parquet_blocks(
    path: Path, columns: list[str], label: str | None, rows: int
) -> Iterator[Block]:
    done = 0
    with open_parquet(path) as file:
        check_columns(path, file, columns)
        types = import_module("pyarrow").types
        for batch in file.iter_batches(rows, columns=[*columns, *([label] if label else [])]):
            places = [f"row {row}" for row in range(done, done + batch.num_rows)]
            values = np.empty((batch.num_rows, len(columns)))
            for place, name in enumerate(columns):
                column = batch.column(name)
                numeric = (types.is_floating, types.is_integer, types.is_decimal)
                if not any(is_kind(column.type) for is_kind in numeric):
                    raise _no_score(places[0], name, str(column[0]))
                values[:, place] = column.to_numpy(zero_copy_only=False).astype(np.float64)
            for row, bad in np.argwhere(~np.isfinite(values)):
                raise _no_score(places[row], columns[bad], str(values[row, bad]))
            found = batch.column(label).to_pylist() if label else []
            texts = ("" if value is None else str(value) for value in found)
            yield values, [text.strip() for text in texts], places
            done += batch.num_rows
            tell(f"reading {path.name}", done, file.metadata.num_rows)


def scored(kind: Kind, values: Tensor, labels: Tensor, place: Callable[[int], str]) -> Batch:
    """A batch of rows of logits or probabilities, (n, k), or (n,) or (n, 1) of class 1.

    Args:
        kind: what the values are.
        values: the scores.
        labels: (n,) integers, or (n, k) of 0 and 1.
        place: what to call a row, by its number in `values`, when it is refused.
    """
    if kind == "logits":
        return Batch(values, labels)
    if labels.ndim == 1:
        check_probs(values.double(), slack=PROBS_SLACK, place=place)
    batch = Batch.from_probs(values.double().clamp(0, 1), labels)
    # A probability that is 0 as stored becomes the smallest one the type could tell from 0; for
    # wider types it is that of float32, so that the same numbers give the same pack.
    half = torch.finfo(torch.float16)
    narrow = values.dtype == torch.float16
    tiny = half.tiny * half.eps if narrow else torch.finfo(torch.float32).tiny
    return replace(batch, logits=stored_logits(batch).clamp_min(math.log(tiny)).float())


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
