"""Probabilities into a file, in the format its ending asks for, a block of rows at a time.

.npy is the array (rows, classes) in float32, .safetensors the same under the name `probs`; .csv,
.tsv and .parquet have a column `prob_<class>` for each class, which `featcal pack import` reads.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from importlib import import_module
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from featcal.core.checks import InputError
from featcal.core.files import new_file

Sink = Generator[None, Tensor, None]  # takes one block of rows after another


def write_probs(
    path: Path,
    blocks: Iterable[Tensor],
    class_names: Sequence[str] | None = None,
    *,
    overwrite: bool = False,
) -> tuple[int, int]:
    """Writes blocks of probabilities (n, k); the file appears whole or not at all.

    Args:
        path: the file; its ending says the format.
        blocks: the probabilities, at least one block.
        class_names: one per class; None for their numbers.
        overwrite: replace the file if it exists.

    Returns:
        how many rows and classes it holds.
    """
    sink, blocks, rows = check_format(path), iter(blocks), 0
    first = next(blocks)
    names = class_names or [str(number) for number in range(first.shape[1])]
    with new_file(path, overwrite=overwrite) as temporary, closing(sink(temporary, names)) as out:
        next(out)
        for block in chain([first], blocks):
            out.send(block.detach().cpu().float())
            rows += len(block)
    return rows, len(names)


def check_format(path: Path) -> Callable[[Path, Sequence[str]], Sink]:
    """What writes files of this ending; one of no known format is refused."""
    sink = SINKS.get(path.suffix.lower())
    if sink is None:
        raise InputError(f"output {path} is of no known format: end it in {', '.join(SINKS)}")
    return sink


def _npy(path: Path, classes: Sequence[str]) -> Sink:
    def header(rows: int) -> None:  # as long for any number of rows, so that it can be put in last
        about = {"descr": "<f4", "fortran_order": False, "shape": (rows, len(classes))}
        np.lib.format.write_array_header_1_0(file, about)

    rows = 0
    with path.open("wb") as file:
        header(rows)
        try:
            while True:
                block = yield
                file.write(block.numpy().astype("<f4").tobytes())
                rows += len(block)
        finally:
            file.seek(0)
            header(rows)


def _table(path: Path, classes: Sequence[str]) -> Sink:
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter, lineterminator="\n")
        writer.writerow([f"prob_{name}" for name in classes])
        while True:
            block = yield
            writer.writerows([[f"{value:.9g}" for value in row] for row in block.tolist()])


def _parquet(path: Path, classes: Sequence[str]) -> Sink:
    try:
        arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        raise InputError("a .parquet file needs pyarrow: pip install 'featcal[arrow]'") from error
    schema = arrow.schema([(f"prob_{name}", arrow.float32()) for name in classes])
    with parquet.ParquetWriter(path, schema) as writer:
        while True:
            block = yield
            columns = [arrow.array(column) for column in block.T.contiguous().numpy()]
            writer.write_table(arrow.Table.from_arrays(columns, schema=schema))


def _safetensors(path: Path, classes: Sequence[str]) -> Sink:
    blocks = [torch.empty(0, len(classes))]
    try:
        while True:
            blocks.append((yield))
    finally:
        save_file({"probs": torch.cat(blocks)}, path)


SINKS: dict[str, Callable[[Path, Sequence[str]], Sink]] = {
    ".npy": _npy,
    ".csv": _table,
    ".tsv": _table,
    ".parquet": _parquet,
    ".safetensors": _safetensors,
}
