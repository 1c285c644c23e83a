"""Everything of ours that stands beside the paper's tables, from one folder of results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from featcal.core.errors import InputError
from featcal.report.grids import Grid
from featcal.report.paper import PaperTable
from featcal.report.reproduction import Reproduction
from featcal.report.result_files import ResultFile
from featcal.report.training import TrainingRuns

KINDS: tuple[type[ResultFile], ...] = (Reproduction, TrainingRuns)


def checkout_results() -> Path | None:
    """The results folder of the source checkout this package runs from; None when installed."""
    root = Path(__file__).parents[3]
    folder = root / "results"
    found = (root / "pyproject.toml").is_file() and any(_is_in(folder, kind) for kind in KINDS)
    return folder if found else None


@final
@dataclass(frozen=True)
class Ours:
    """Replays and packs of other networks, and the networks we trained."""

    parts: tuple[ResultFile, ...]

    @classmethod
    def read(cls, folder: Path) -> Ours:
        """Reads what the folder holds; one of the files will do.

        Raises:
            InputError: when none is there, or one is not what its experiment writes.
        """
        if folder.is_file():
            raise InputError(f"{folder} is a file: give its folder")
        if not any(_is_in(folder, kind) for kind in KINDS):
            names = " and no ".join(kind.file for kind in KINDS)
            raise InputError(f"{folder} holds no {names}: {KINDS[0].remedy}")
        return cls(tuple(k.read(folder) if _is_in(folder, k) else k.none() for k in KINDS))

    def beside(self, table: PaperTable) -> list[Grid]:
        """Everything that belongs beside a table."""
        return [grid for part in self.parts for grid in part.beside(table)]

    def values(self, table: PaperTable) -> Iterator[dict[str, Any]]:
        """Each value as a line of a CSV file, in the unit of the table."""
        return (value for part in self.parts for value in part.values(table))

    def as_json(self, table: PaperTable) -> dict[str, Any]:
        """The part of the results that belongs to a table, by kind."""
        return {key: value for part in self.parts for key, value in part.as_json(table).items()}


def _is_in(folder: Path, kind: type[ResultFile]) -> bool:
    return (folder / kind.file).is_file()
