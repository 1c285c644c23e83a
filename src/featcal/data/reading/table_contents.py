"""Tables as `Contents`: one table a split, one column a class, and a column of labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from featcal.core.batch import Batch
from featcal.core.errors import InputError
from featcal.data.manifest import SPLIT_NAME
from featcal.data.reading.contents import Contents, about, listed, noted, scored
from featcal.data.reading.table import Block, TableFile, short
from featcal.data.reading.table_header import Header, Reading, read_header

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
