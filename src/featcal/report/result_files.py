"""The result file of an experiment, as what stands beside the paper's tables."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from featcal.core.errors import InputError
from featcal.report.grids import Grid
from featcal.report.paper import PaperTable, paper_tables

OF_ANOTHER_KIND = (LookupError, TypeError, ValueError, AttributeError)


@dataclass(frozen=True)
class ResultFile(ABC):
    """What an experiment left.

    Attributes:
        file: its name in a folder of results.
        keys: the lists it must hold.
        remedy: how to make it, for messages.
        content: of the file.
    """

    file: ClassVar[str]
    keys: ClassVar[tuple[str, ...]]
    remedy: ClassVar[str]

    content: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Reads the file in a folder.

        Raises:
            InputError: when it is not there or not what the experiment writes.
        """
        path = folder / cls.file
        if not path.is_file():
            raise InputError(f"{folder} holds no {cls.file}: {cls.remedy}")
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            missing = [key for key in cls.keys if key not in content]
        except (ValueError, TypeError) as error:
            raise InputError(f"{path} cannot be read ({error}): {cls.remedy}") from error
        if missing:
            raise InputError(f"{path} lacks {', '.join(missing)}: {cls.remedy}")
        found = cls(content)
        found._check(path)
        return found

    @classmethod
    def none(cls) -> Self:
        """No results."""
        return cls({key: [] for key in cls.keys})

    def _check(self, path: Path) -> None:
        """Lays out everything once: what is of another kind inside fails here, not halfway."""
        try:
            for table in paper_tables():
                self.beside(table)
                list(self.values(table))
        except InputError:
            raise
        except OF_ANOTHER_KIND as error:
            why = f"{type(error).__name__}: {error}"
            raise InputError(f"{path} holds something else ({why}): {self.remedy}") from error

    @abstractmethod
    def beside(self, table: PaperTable) -> list[Grid]:
        """Everything that belongs beside a table."""

    @abstractmethod
    def values(self, table: PaperTable) -> Iterator[dict[str, Any]]:
        """Each value as a line of a CSV file, in the unit of the table."""

    @abstractmethod
    def as_json(self, table: PaperTable) -> dict[str, Any]:
        """The part of the results that belongs to a table, by kind."""
