"""The tables of the feature clipping paper as printed, each cell with what is known about it.

Tao, Dong and Xu, "Feature Clipping for Uncertainty Calibration", AAAI 2025. `assets/paper` holds
the transcription (tables.json) apart from our judgement of it (marks.json).
"""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, cached_property
from pathlib import Path
from statistics import fmean
from string import ascii_lowercase
from typing import Any, ClassVar, Self, final

from featcal.core.checks import InputError
from featcal.report.scores import COLUMNS
from featcal.report.tables import PAPER_METHODS, after_clip

# --- A table of text that fits where it is shown: cut into blocks for a terminal, or as Markdown.

BORDER = 3  # what a column costs besides its text: a line and a space on either side


@final
@dataclass(frozen=True)
class Grid:
    """A table of text.

    Attributes:
        title: one line above it.
        headings: one a column, the first over the labels; a line break parts two levels.
        rows: the cells, labels first; **text** is bold.
        notes: letter and sentence of each footnote.
        together: columns that belong together, counted after the labels.
    """

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[tuple[str, str], ...] = ()
    together: int = 1

    def blocks(self, width: int) -> Iterator[Grid]:
        """The same table as several, each with the labels in front and no wider than `width`.

        Columns that belong together are parted only where they do not fit alone; a single column is
        given even where it is too wide.
        """
        widths = [self._width(column) for column in range(len(self.headings))]
        shown = [0]
        for group in self._groups(widths, width):
            used = sum(widths[column] for column in shown + group) + 1
            if len(shown) > 1 and used > width:
                yield self._only(shown)
                shown = [0]
            shown += group
        yield self._only(shown)

    def _groups(self, widths: list[int], width: int) -> Iterator[list[int]]:
        for start in range(1, len(widths), self.together):
            group = list(range(start, min(start + self.together, len(widths))))
            if widths[0] + sum(widths[column] for column in group) + 1 <= width:
                yield group
            else:
                yield from ([column] for column in group)

    def _width(self, column: int) -> int:
        texts = [*self.headings[column].split("\n"), *(row[column] for row in self.rows)]
        return BORDER + max(len(text.replace("**", "")) for text in texts)

    def _only(self, columns: list[int]) -> Grid:
        rows = tuple(tuple(row[column] for column in columns) for row in self.rows)
        return replace(self, headings=tuple(self.headings[c] for c in columns), rows=rows)

    def markdown(self) -> str:
        r"""A pipe table.

        >>> print(Grid("", ("", "ECE"), (("clip | temperature", "1.2"),)).markdown())
        |  | ECE |
        |---|---:|
        | clip \| temperature | 1.2 |
        """
        heads = (heading.replace("\n", " ") for heading in self.headings)
        columns = list(zip(*self.rows, strict=True)) or [()] * len(self.headings)
        rule = "|---|" + "".join("---:|" if _numeric(c) else "---|" for c in columns[1:])
        return "\n".join([_line(heads), rule, *map(_line, self.rows)])

    def document(self) -> str:
        """Title, pipe table and footnotes, as Markdown."""
        notes = "".join(f"\n- [{letter}] {text}" for letter, text in self.notes)
        return f"{self.title}\n\n{self.markdown()}\n{notes}".rstrip()


def _numeric(cells: tuple[str, ...]) -> bool:
    """Whether a column is one of numbers, which stand best at the right."""
    starts = (cell.lstrip("*")[:1] for cell in cells)
    return all(start in "-0123456789" for start in starts)


def _line(cells: tuple[str, ...] | Iterator[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


PAPER = Path(__file__).parents[1] / "assets" / "paper"
PRINTED = re.compile(
    r"(\*\*)?(?P<value>\d+(?:\.\d+)?)(\*\*)?(?:\((?P<c>[\d.]+)\))?(?P<arrow>[▼▲]?)"
)


@final
@dataclass(frozen=True)
class Mark:
    """What a reader of a cell should know.

    Attributes:
        id: stable, for programs.
        kind: "defect", "misprint" or "note".
        evidence: how it is known.
        sentence: one plain sentence.
        instead: what to compare the cell with.
    """

    id: str
    kind: str
    evidence: str
    sentence: str
    instead: str

    def as_json(self) -> dict[str, str]:
        """The public form."""
        return {**vars(self)}


@final
@dataclass(frozen=True)
class Cell:
    """One printed value.

    Attributes:
        row: the label of its row, such as "CIFAR-10 ResNet-50".
        column: the heading of its column, such as "TS base".
        printed: its text, digit for digit, with threshold and arrow.
        value: the number.
        threshold: c, where it is printed.
        arrow: "▼" (green in the paper), "▲" (red) or "".
        bold: whether it is printed in bold.
        marks: what is known about it.
    """

    row: str
    column: str
    printed: str
    value: float
    threshold: float | None
    arrow: str
    bold: bool
    marks: tuple[Mark, ...] = ()

    @classmethod
    def read(cls, row: str, column: str, text: str) -> Cell:
        """A cell from the notation of tables.json.

        >>> Cell.read("CIFAR-10 DenseNet-121", "+ours(c)", "**1.05**(0.45)▼").threshold
        0.45
        """
        match = PRINTED.fullmatch(text)
        assert match is not None, f"{row}, {column}: {text}"
        c = match["c"]
        return cls(
            row,
            column,
            text.replace("*", ""),
            float(match["value"]),
            None if c is None else float(c),
            match["arrow"],
            "**" in text,
        )

    def as_json(self) -> dict[str, Any]:
        """The public form; marks by their ids."""
        return {**vars(self), "marks": [mark.id for mark in self.marks]}


@final
@dataclass(frozen=True)
class PaperTable:
    """One table of the paper.

    Attributes:
        name: a short name that does not change.
        number: as LaTeX counts them.
        label: the LaTeX label.
        summary: one line on what it shows.
        metric: the id of our metric, where we have it.
        unit: of the values.
        columns: headings, one or two levels each.
        cells: row by row.
    """

    name: str
    number: int
    label: str
    summary: str
    metric: str
    unit: str
    columns: tuple[tuple[str, ...], ...]
    cells: tuple[tuple[Cell, ...], ...]

    def __iter__(self) -> Iterator[Cell]:
        return (cell for row in self.cells for cell in row)

    @property
    def rows(self) -> tuple[str, ...]:
        """The labels of the rows."""
        return tuple(row[0].row for row in self.cells)

    @property
    def marks(self) -> tuple[Mark, ...]:
        """Every mark of its cells, once, in the order of marks.json."""
        present = {mark.id for cell in self for mark in cell.marks}
        return tuple(mark for mark in all_marks() if mark.id in present)

    @property
    def faulty(self) -> int:
        """How many cells carry a defect or a misprint."""
        return sum(any(mark.kind != "note" for mark in cell.marks) for cell in self)

    def cell(self, row: str, column: str) -> Cell:
        """One cell by its labels.

        >>> paper_table("ece-posthoc").cell("CIFAR-10 ResNet-50", "TS base").value
        1.39
        """
        for cell in self:
            if (cell.row, cell.column) == (row, column):
                return cell
        raise InputError(f"table {self.name} has no cell {row!r}, {column!r}")

    def values(self) -> Iterator[dict[str, Any]]:
        """Each cell as a line of a CSV file, its digits as printed."""
        for cell in self:
            found = PRINTED.fullmatch(cell.printed)
            assert found is not None
            yield {
                "row": cell.row,
                "column": cell.column,
                "value": found["value"],
                "threshold": found["c"],
                "arrow": {"▼": "down", "▲": "up", "": ""}[cell.arrow],
                "bold": "yes" if cell.bold else "",
                "marks": " ".join(mark.id for mark in cell.marks),
            }

    def as_json(self) -> dict[str, Any]:
        """The public form."""
        return {
            **{key: getattr(self, key) for key in ("name", "number", "label", "summary")},
            **{"metric": self.metric, "unit": self.unit},
            "cells": [cell.as_json() for cell in self],
            "marks": [mark.as_json() for mark in self.marks],
        }


def paper_table(name: str) -> PaperTable:
    """A table by its short name."""
    tables = {table.name: table for table in paper_tables()}
    if name not in tables:
        raise InputError(f"the paper has no table {name!r}: choose one of {', '.join(tables)}")
    return tables[name]


@cache
def paper_tables() -> tuple[PaperTable, ...]:
    """Every table of the paper, in the order of their numbers.

    >>> len(paper_tables())
    8
    """
    places = _read("marks.json")["marks"]
    return tuple(_table(table, places) for table in _read("tables.json")["tables"])


@cache
def all_marks() -> tuple[Mark, ...]:
    """Every mark there is."""
    return tuple(_mark(entry) for entry in _read("marks.json")["marks"])


def _read(name: str) -> Any:  # noqa: ANN401 - JSON
    return json.loads((PAPER / name).read_text(encoding="utf-8"))


def _mark(entry: dict[str, Any]) -> Mark:
    return Mark(**{key: value for key, value in entry.items() if key != "cells"})


def _table(entry: dict[str, Any], places: list[dict[str, Any]]) -> PaperTable:
    columns = tuple(map(tuple, entry["columns"]))
    cells = []
    for row in entry["rows"]:
        label = " ".join(row["label"])
        pairs = zip(columns, row["cells"], strict=True)
        read = (Cell.read(label, " ".join(column), text) for column, text in pairs)
        cells.append(tuple(_marked(cell, entry["name"], places) for cell in read))
    facts = {key: entry[key] for key in ("name", "number", "label", "summary", "metric", "unit")}
    return PaperTable(**facts, columns=columns, cells=tuple(cells))


def _marked(cell: Cell, table: str, places: list[dict[str, Any]]) -> Cell:
    marks = [_mark(entry) for entry in places if any(_at(cell, table, p) for p in entry["cells"])]
    return replace(cell, marks=tuple(marks))


def _at(cell: Cell, table: str, place: dict[str, Any]) -> bool:
    """Whether a place, given by patterns of row labels and column headings, holds the cell."""
    rows, columns = place.get("rows", ["*"]), place.get("columns", ["*"])
    return (
        place["table"] == table
        and any(fnmatchcase(cell.row, pattern) for pattern in rows)
        and any(fnmatchcase(cell.column, pattern) for pattern in columns)
    )


# --- A row of a result file, one recipe scored on one network, as the text of a table's cell.
#
# Such rows are what `Comparison.as_json` gives, with the mode of their fit beside them. Values are
# fractions there and percent in tables.

Row = dict[str, Any]
ARROW = {"down": "▼", "up": "▲", "": ""}
ARROWS = ("▼ ▲", "Lower or higher than base, and the paired 95 % interval says so.")


def find(rows: Sequence[Row], recipe: str, mode: str = "sequential") -> Row | None:
    """The row of a recipe."""
    return next((r for r in rows if (r["recipe"], r["mode"]) == (recipe, mode)), None)


def direction(row: Row, metric: str, against: str | None = None) -> str:
    """The way the row differs from its baseline, "up" or "down"; "" where no interval says so.

    Args:
        row: of the result file.
        metric: its name.
        against: the baseline that counts; by default any.
    """
    found = (row.get("differences") or {}).get(metric)
    if found is None or found["verdict"] not in ("better", "worse"):
        return ""
    if against not in (None, found["baseline"]):
        return ""
    return "up" if found["delta"] > 0 else "down"


def with_interval(row: Row | None, metric: str) -> str:
    """The value, its interval, and an arrow where the paired difference from base is one.

    >>> with_interval({"metrics": {"ece": 0.0124}, "intervals": {"ece": [0.01, 0.015]}}, "ece")
    '1.24 [1.00, 1.50]'
    """
    if row is None:
        return ""
    number = COLUMNS[metric].number
    text = number(row["metrics"][metric])
    low, high = _ends(row, metric)
    if low is not None and high is not None:
        text += f" [{number(low)}, {number(high)}]"
    return f"{text} {ARROW[direction(row, metric)]}".rstrip()


def percent_interval(row: Row, metric: str) -> tuple[float | None, float | None]:
    """Both ends in percent, or neither."""
    low, high = _ends(row, metric)
    return (None, None) if low is None or high is None else (100 * low, 100 * high)


def _ends(row: Row, metric: str) -> tuple[float | None, float | None]:
    low, high = (row.get("intervals") or {}).get(metric) or (None, None)
    return low, high


def threshold(row: Row) -> float | None:
    """The c of a recipe that begins with a clip; None where the clip is a no-op."""
    c: float | None = row["fit"]["steps"][0]["threshold"]
    return c


# --- The result file of an experiment, as what stands beside the paper's tables.

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


# --- A table of the paper with its marks as letters and the sentences behind them.


def paper_grid(table: PaperTable) -> Grid:
    """The table for people.

    A letter stands once for many cells where it can: in the title when every cell carries the mark,
    at a heading or a label when the whole column or row does.
    """
    letters = dict(zip(table.marks, ascii_lowercase, strict=False))
    places = _Places(table, letters)
    headings = ("\n".join(column) + places.column(j) for j, column in enumerate(table.columns))
    return Grid(
        f"Table {table.number}, {table.name}: {table.summary}, {table.unit}{places.whole()}",
        ("", *headings),
        tuple(_row(table, i, places) for i in range(len(table.cells))),
        tuple((letter, note(mark)) for mark, letter in letters.items()),
        together=2 if len(table.columns[0]) == 2 else 1,
    )


def note(mark: Mark) -> str:
    """A mark as the text of a footnote."""
    instead, evidence = (text.removesuffix(".") for text in (mark.instead, mark.evidence))
    return (
        f"{mark.kind.capitalize()}: {mark.sentence} Compare with: {instead}. "
        f"Known from: {evidence}."
    )


def _row(table: PaperTable, i: int, places: _Places) -> tuple[str, ...]:
    cells = table.cells[i]
    shown = (f"**{cell.printed}**" if cell.bold else cell.printed for cell in cells)
    return (
        table.rows[i] + places.row(i),
        *(text + places.cell(i, j) for j, text in enumerate(shown)),
    )


@final
class _Places:
    """Where the letter of each mark stands."""

    def __init__(self, table: PaperTable, letters: dict[Mark, str]) -> None:
        self.table, self.letters = table, letters
        self.everywhere = _common(tuple(table))
        self.in_row = [_common(row) - self.everywhere for row in table.cells]
        columns = zip(*table.cells, strict=True)
        self.in_column = [_common(column) - self.everywhere for column in columns]

    def whole(self) -> str:
        return self._text(self.everywhere, " ")

    def row(self, i: int) -> str:
        return self._text(self.in_row[i], " ")

    def column(self, j: int) -> str:
        return self._text(self.in_column[j], " ")

    def cell(self, i: int, j: int) -> str:
        said = self.everywhere | self.in_row[i] | self.in_column[j]
        return self._text(set(self.table.cells[i][j].marks) - said, "")

    def _text(self, marks: set[Mark], space: str) -> str:
        letters = "".join(letter for mark, letter in self.letters.items() if mark in marks)
        return f"{space}[{letters}]" if letters else ""


def _common(cells: tuple[Cell, ...]) -> set[Mark]:
    """The marks that all of the cells carry."""
    return set.intersection(*(set(cell.marks) for cell in cells))


# --- Our own results beside the paper's tables, read from results/reproduction.json.
#
# That file is made by experiments/reproduction.py and by nothing else. It holds `replays` (cells of
# the paper computed again from the paper's own logits), `packs` (the paper's recipes on other
# networks) and `beside` (small tables of ours that belong to one of the paper's).

PACK_METRICS = {"ece": "ECE", "adaptive_ece": "adaptive ECE", "accuracy": "accuracy"}
# Tables whose rows our packs have no counterpart of: other losses, other layers.
WITHOUT_PACKS = ("train-time", "layers")


@final
class Reproduction(ResultFile):
    """What experiments/reproduction.py left."""

    file = "reproduction.json"
    keys = ("replays", "packs", "beside")
    remedy = "make it in a source checkout with: make reproduce"

    def beside(self, table: PaperTable) -> list[Grid]:
        """Everything of ours that belongs beside a table."""
        return [*self.replays(table), *self.small(table), *self.packs(table)]

    def replays(self, table: PaperTable) -> list[Grid]:
        """The cells that the paper's own logits give again; none or one."""
        found = [entry for entry in self.content["replays"] if entry["table"] == table.name]
        if not found:
            return []
        forms = list(dict.fromkeys(form for entry in found for form in entry["forms"]))
        digits = 4 if table.unit == "nats" else 2
        rows = []
        for entry in found:
            printed = table.cell(entry["row"], entry["column"]).printed
            ours = (_number(entry["forms"].get(form), digits) for form in forms)
            rows.append((f"{entry['row']}, {entry['column']}", printed, *ours))
        reference = " (reference: as the published code has it)" if "reference" in forms else ""
        title = f"{table.name} again, from the paper's own logits, {table.unit}{reference}"
        return [Grid(title, ("", "printed", *forms), tuple(rows))]

    def small(self, table: PaperTable) -> list[Grid]:
        """Small tables of our own networks."""
        found = [entry for entry in self.content["beside"] if entry["table"] == table.name]
        return [_small(entry) for entry in found]

    def packs(self, table: PaperTable) -> list[Grid]:
        """The paper's recipes on our packs, one table a network."""
        return [pack_grid(pack, table.metric) for pack in self._packs(table)]

    def _packs(self, table: PaperTable) -> list[dict[str, Any]]:
        if table.metric not in PACK_METRICS or table.name in WITHOUT_PACKS:
            return []
        return [p for p in self.content["packs"] if table.name != "vit" or "vit" in p["name"]]

    def values(self, table: PaperTable) -> Iterator[dict[str, Any]]:
        """Each of the replayed values and of those of packs."""
        for entry in self.content["replays"]:
            if entry["table"] == table.name:
                for form, value in entry["forms"].items():
                    where = {"row": entry["row"], "column": entry["column"]}
                    yield {"source": f"paper's logits, {form}", **where, "value": value}
        for pack in self._packs(table):
            for row in pack["results"]:
                low, high = percent_interval(row, table.metric)
                yield {
                    "source": pack["name"],
                    "row": row["recipe"],
                    "column": row["mode"],
                    "value": 100 * row["metrics"][table.metric],
                    "low": low,
                    "high": high,
                }

    def as_json(self, table: PaperTable) -> dict[str, Any]:
        """Replays, small tables and packs."""
        return {
            "replays": [e for e in self.content["replays"] if e["table"] == table.name],
            "beside": [e for e in self.content["beside"] if e["table"] == table.name],
            "packs": self._packs(table),
        }


def pack_grid(pack: dict[str, Any], metric: str) -> Grid:
    """The six methods on one network: alone, after a clip, and with a clip fitted jointly."""
    rows, results = [], pack["results"]
    for printed, method in PAPER_METHODS.items():
        after = after_clip(method)
        joint = None if method == "none" else find(results, after, "joint")
        found = (find(results, method), find(results, after), joint)
        if found[0] is not None:
            rows.append((f"{printed} ({method})", *(with_interval(row, metric) for row in found)))
    title = (
        f"{pack['name']}, another network ({pack['dataset']}, {pack['model']}): "
        f"{PACK_METRICS[metric]} in percent on {pack['rows']['test']:,} test rows{_clip(pack)}"
    )
    headings = ("", "base", "after clip", "jointly with clip")
    return Grid(title, headings, tuple(rows), (ARROWS,))


def _clip(pack: dict[str, Any]) -> str:
    """The threshold of the clip alone, in words."""
    row = find(pack["results"], "clip")
    if row is None:
        return ""
    c = threshold(row)
    return "; clip is a no-op" if c is None else f"; clip at c = {c:.3g}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _small(entry: dict[str, Any]) -> Grid:
    digits = entry["digits"]
    rows = ((r["label"], *(_number(v, digits) for v in r["values"])) for r in entry["rows"])
    return Grid(entry["title"], ("", *entry["columns"]), tuple(rows))


# --- One trained network of results/training.json, and what every table must say of its training.
#
# Runs are put beside each other only where all of their training but loss and seed is the same: a
# network trained for 40 epochs and one trained for 350 never share a row.

PUBLISHED_EPOCHS = 350
# The losses of the paper by their headings, and the texts of ours that are meant by them. The
# published gamma of dual focal loss differs from network to network.
PAPER_LOSSES = {
    "Cross Entropy": r"ce",
    "Brier Loss": r"brier",
    "MMCE": r"mmce\(variant='weighted', form='published'\)",
    "LS-0.05": r"label_smoothing(\(\w+=0\.05\))?",
    "Focal Loss": r"focal(\(gamma=3(\.0)?\))?",
    "FLSD-53": r"flsd",
    "Dual Focal Loss": r"dual_focal(\(gamma=[\d.]+\))?",
}
REDUCTION = re.compile(r"reduction=['\"](\w+)['\"](?:, )?")
DATASETS = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
NETWORKS = {
    "resnet50": "ResNet-50",
    "resnet110": "ResNet-110",
    "densenet121": "DenseNet-121",
    "wrn26x10": "Wide-Resnet-26",
    "wrn16x4": "WRN-16-4",
    "vit": "ViT",
}
# Words for what a recipe calls otherwise; what is not here is said by its own name.
WORDS = {
    **{"lr": "learning rate", "schedule": "rate by", "augment": "images shifted and mirrored"},
    "clip_norm": "gradient norm at most",
}
NORMALISED = {
    "matched": "test images normalised as in training",
    "reference": "test images normalised as published, unlike those of CIFAR-100's training",
}
APART = ("epochs", "seed", "reduction")  # said elsewhere


@final
@dataclass(frozen=True)
class Run:
    """One network, trained with one loss and one seed."""

    content: dict[str, Any]

    @cached_property
    def network(self) -> str:
        """Data and network under the paper's names: CIFAR-10 ResNet-50."""
        return named(self.content)

    @property
    def seed(self) -> int:
        """Of weights, order and augmentation."""
        seed: int = self.content["seed"]
        return seed

    @property
    def epochs(self) -> int:
        """How long it was trained."""
        epochs: int = self.content["recipe"]["epochs"]
        return epochs

    @cached_property
    def reduction(self) -> str:
        """Whether the loss is the "mean" over a batch or its "sum"."""
        found = REDUCTION.search(self.content["loss"])
        told: str = found[1] if found else self.content["recipe"].get("reduction", "mean")
        return told

    @cached_property
    def loss(self) -> str:
        """The text of the loss without its reduction.

        >>> Run({"loss": "focal(gamma=2.0, reduction='sum')"}).loss, Run({"loss": "ce"}).loss
        ('focal(gamma=2.0)', 'ce')
        """
        text = REDUCTION.sub("", self.content["loss"])
        return text.replace(", )", ")").removesuffix("()")

    @property
    def variant(self) -> tuple[str, str]:
        """What runs of several seeds must share."""
        return self.loss, self.reduction

    @property
    def source(self) -> str:
        """Where a value comes from, for programs."""
        return source(self.content, f", {self.epochs} epochs")

    @cached_property
    def training(self) -> str:
        """Everything about the training but loss and seed, in words."""
        recipe, rows = self.content["recipe"], self.content["rows"]
        instead = (
            "" if self.epochs == PUBLISHED_EPOCHS else f", the paper's have {PUBLISHED_EPOCHS}"
        )
        apart = APART if recipe["schedule"] == "steps" else (*APART, "drops")
        told = (_told(key, value) for key, value in recipe.items() if key not in apart)
        return (
            f"{self.epochs} epochs{instead}; {', '.join(filter(None, told))}; "
            f"{self.content['precision']}; {NORMALISED[self.content['test_norm']]}; "
            f"trained on {rows['train']:,} rows, fitted on {rows['val']:,} of val, scored on "
            f"{rows['test']:,} of test"
        )

    def row(self, recipe: str, mode: str = "sequential") -> Row | None:
        """The scores of a recipe."""
        return find(self.content["results"], recipe, mode)


@final
@dataclass(frozen=True)
class Setting:
    """The runs of one network that differ in loss and seed alone."""

    network: str
    training: str
    runs: tuple[Run, ...]

    @cached_property
    def variants(self) -> dict[tuple[str, str], list[Run]]:
        """The runs by loss, each with all of its seeds, the paper's losses first."""
        found: dict[tuple[str, str], list[Run]] = {}
        for run in self.runs:
            found.setdefault(run.variant, []).append(run)
        return {key: found[key] for key in sorted(found, key=_loss_order)}

    @cached_property
    def paper(self) -> dict[str, list[Run]]:
        """The runs of each loss of the paper; of two forms of one loss the shorter text's."""
        return {
            heading: self.variants[min(forms, key=lambda form: (len(form[0]), form[1]))]
            for heading in PAPER_LOSSES
            if (forms := [form for form in self.variants if heading_of(form[0]) == heading])
        }

    @property
    def further(self) -> Iterator[list[Run]]:
        """The runs of every other loss."""
        taken = [runs[0].variant for runs in self.paper.values()]
        return (runs for variant, runs in self.variants.items() if variant not in taken)

    def only(self, runs: Iterable[Run]) -> Setting:
        """The same with some of its runs alone."""
        return replace(self, runs=tuple(runs))

    def label(self, run: Run) -> str:
        """The loss of a run as the label of a row: its heading in the paper, else its text."""
        heading = heading_of(run.loss)
        if heading and self.paper[heading][0].variant == run.variant:
            return heading
        return run.loss + (", sum" if run.reduction == "sum" else "")


def settings(runs: Iterable[Run]) -> list[Setting]:
    """The runs by network and training, networks in the order of the paper.

    Raises:
        InputError: for two runs that differ in nothing.
    """
    found: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        alike = found.setdefault((run.network, run.training), [])
        if any((other.variant, other.seed) == (run.variant, run.seed) for other in alike):
            # Two of them would pass for two seeds.
            raise InputError(f"{run.source}, {run.loss} is in the file twice: keep one of them")
        alike.append(run)
    in_order = sorted(found, key=lambda key: _order(found[key][0].content))
    return [Setting(*key, tuple(found[key])) for key in in_order]


def heading_of(loss: str) -> str:
    """The paper's heading for the text of a loss, "" for a loss of ours.

    >>> heading_of("focal(gamma=3.0)"), heading_of("focal(gamma=2.0)")
    ('Focal Loss', '')
    """
    headings = (heading for heading, text in PAPER_LOSSES.items() if re.fullmatch(text, loss))
    return next(headings, "")


def named(entry: dict[str, Any]) -> str:
    """Data and network of an entry under the paper's names."""
    dataset, network = entry["dataset"], entry["network"]
    return f"{DATASETS.get(dataset, dataset)} {NETWORKS.get(network, network)}"


def source(entry: dict[str, Any], more: str = "") -> str:
    """Where a value comes from: our cifar10 wrn16x4, seed 1."""
    return f"our {entry['dataset']} {entry['network']}{more}, seed {entry['seed']}"


def listed(values: Iterable[object]) -> str:
    """Values in words.

    >>> listed([1, 2, 3])
    '1, 2 and 3'
    """
    *most, last = map(str, values)
    return f"{', '.join(most)} and {last}" if most else last


def _order(entry: dict[str, Any]) -> tuple[int, int]:
    return _place(entry["dataset"], tuple(DATASETS)), _place(entry["network"], tuple(NETWORKS))


def _loss_order(variant: tuple[str, str]) -> int:
    return _place(heading_of(variant[0]), tuple(PAPER_LOSSES))


def _place(name: str, names: Sequence[str]) -> int:
    return names.index(name) if name in names else len(names)


def _told(key: str, value: object) -> str:
    """One setting of a recipe; nothing for what was not used."""
    if key == "clip_norm" and value is None:
        return "gradients not clipped"
    if value is None or value is False or value == 0:
        return ""
    word = WORDS.get(key, key.replace("_", " "))
    if value is True:
        return word
    if isinstance(value, (list, tuple)):
        return f"{word} {listed(_short(part) for part in value)}" if value else ""
    return f"{word} {_short(value)}"


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


# --- Cells over several seeds, and the footnotes that say what stands behind them.

Note = tuple[str, str]
MISSING, SPREAD, NOOP = "-", "±", "no-op"
ROWS_ALONE = "Intervals are over the test rows of one network; another seed gives another network."


def spread(rows: Sequence[Row | None], metric: str) -> str:
    """The mean over seeds and half the distance from the lowest to the highest.

    >>> spread([{"metrics": {"ece": 0.04}}, {"metrics": {"ece": 0.05}}], "ece")
    '4.50 ± 0.50'
    """
    values = [row["metrics"][metric] for row in rows if row is not None]
    if not values:
        return MISSING
    number = COLUMNS[metric].number
    half = f" {SPREAD} {number((max(values) - min(values)) / 2)}" if len(values) > 1 else ""
    return number(fmean(values)) + half


def clipped(rows: Sequence[Row | None], metric: str) -> str:
    """The same for rows after a clip, with c and an arrow: 1.38 (0.245)▼."""
    found = [row for row in rows if row is not None]
    if not found:
        return MISSING
    return f"{spread(found, metric)} ({_thresholds(found)}){arrow(found, metric)}"


def arrow(rows: Iterable[Row | None], metric: str) -> str:
    """The arrow that the paired intervals of every seed agree on, against no calibration."""
    found = {direction(row, metric, "none") for row in rows if row is not None}
    return ARROW[found.pop()] if len(found) == 1 else ""


def _thresholds(rows: Iterable[Row]) -> str:
    """The mean c of the seeds; "/-" follows where the clip is a no-op for some of them."""
    every = [threshold(row) for row in rows]
    acting = [c for c in every if c is not None]
    if not acting:
        return NOOP
    return f"{fmean(acting):.3g}" + ("/-" if len(acting) < len(every) else "")


# --- footnotes -------------------------------------------------------------------------------


def numbered(found: Sequence[Setting]) -> dict[str, str]:
    """A number for every way the networks were trained; the paper's own notes have letters."""
    trainings = dict.fromkeys(setting.training for setting in found)
    return {training: str(number) for number, training in enumerate(trainings, 1)}


def training_notes(found: Sequence[Setting]) -> list[Note]:
    """How the networks were trained, a note for every way."""
    notes = []
    for training, number in numbered(found).items():
        alike = [run for setting in found if setting.training == training for run in setting.runs]
        notes.append((number, f"{training}; {seeds(alike)}."))
    return notes


def seeds(runs: Iterable[Run]) -> str:
    """Which seeds there are."""
    found = sorted({run.seed for run in runs})
    return f"seed{'s' if len(found) > 1 else ''} {listed(found)}"


def epochs(found: Iterable[Setting]) -> str:
    """How long the networks were trained, for titles.

    Titles say it because a table is often shown without its notes.
    """
    every = sorted({run.epochs for setting in found for run in setting.runs})
    told = f"{every[0]} epochs" if len(every) == 1 else f"{every[0]} to {every[-1]} epochs"
    return told if every == [PUBLISHED_EPOCHS] else f"{told}, the paper's have {PUBLISHED_EPOCHS}"


def cell_notes(rows: Iterable[Sequence[str]], groups: Iterable[Sequence[Run]]) -> list[Note]:
    """What the signs in the cells mean, of those that are there."""
    cells = [cell for row in rows for cell in row[1:]]
    several = sorted({len(runs) for runs in groups if len(runs) > 1})
    notes = []
    if any(SPREAD in cell for cell in cells):
        count = " to ".join(str(n) for n in dict.fromkeys((several[0], several[-1])))
        agree = " An arrow beside it: so for each seed." if _arrows(cells) else ""
        told = f"Mean over {count} seeds, and half the distance from the lowest to the highest."
        told += " c is the mean of those that clip." if any(map(_mean_threshold, cells)) else ""
        notes.append((SPREAD, f"{told} Cells without it are of one seed.{agree}"))
    if _arrows(cells):
        notes.append(ARROWS)
    if any(f"({NOOP})" in cell or "/-" in cell for cell in cells):
        notes.append((NOOP, "No clipping was best on val, nothing is changed; /- for some seeds."))
    if MISSING in cells:
        notes.append((MISSING, "Not trained."))
    return notes


def _mean_threshold(cell: str) -> bool:
    return SPREAD in cell and "(" in cell and f"({NOOP})" not in cell


def _arrows(cells: Iterable[str]) -> bool:
    return any(set(cell) & set(ARROWS[0].split()) for cell in cells)


def loss_notes(found: Iterable[Setting]) -> list[Note]:
    """The text of each loss, as `featcal.losses` reads it, and whether it was a sum."""
    texts: dict[str, dict[str, None]] = {}
    summed: dict[str, None] = {}
    for setting in found:
        for heading, (run, *_) in setting.paper.items():
            texts.setdefault(heading, {})[run.loss] = None
            if run.reduction == "sum":
                summed[heading] = None
    names = "; ".join(f"{heading} is {' or '.join(forms)}" for heading, forms in texts.items())
    how = "each is the mean over a batch"
    if summed:
        every = summed.keys() == texts.keys()
        how = f"{'each is' if every else listed(summed)} summed over a batch"
    return [("losses", f"{names}; {how}.")]


def made_note(content: dict[str, Any]) -> Note:
    """What the runs were made with."""
    facts = (facts_text(content.get(key) or {}) for key in ("hardware", "versions"))
    return "made", "; ".join((content.get("made_by", "by hand"), *filter(None, facts))) + "."


def facts_text(facts: dict[str, Any]) -> str:
    """Hardware or versions in words.

    >>> facts_text({"device": "NVIDIA H200", "compiled": True, "graph": False})
    'device NVIDIA H200, compiled'
    """
    given = {key: value for key, value in facts.items() if value is not False}
    return ", ".join(key if value is True else f"{key} {value}" for key, value in given.items())


# --- Tables of our own trained networks: by loss, by layer, and beside a temperature.

Cells = Callable[[Setting], tuple[str, ...]]
# Each with the mode of its fit, under its heading.
HONEST = {
    "none": ("none", "sequential"),
    "clip": ("clip", "sequential"),
    "temperature": ("temperature", "sequential"),
    "clip | temperature": ("clip | temperature", "sequential"),
    "jointly": ("clip | temperature", "joint"),
}
TITLES = {
    "ece": "ECE in percent on test, alone and after clip at c",
    "accuracy": "accuracy in percent on test",
}


def loss_grids(found: Sequence[Setting], metric: str, name: str, made: Note) -> list[Grid]:
    """A row a network: the losses of the paper, then every other loss in a table of its own."""
    main = [setting for setting in found if setting.paper]
    rest = [setting for setting in found if any(setting.further)]
    headings, cells = _columns(metric)
    title = f"{name}, our own networks ({{}}): {{}}{TITLES[metric]}"
    grids = []
    if main:
        numbers = numbered(main)
        rows = tuple((f"{s.network} [{numbers[s.training]}]", *cells(s)) for s in main)
        groups = (runs for setting in main for runs in setting.paper.values())
        signs, losses = cell_notes(rows, groups), loss_notes(main)
        notes = (*training_notes(main), *losses, *signs, made)
        together = 2 if metric == "ece" else 1
        grids.append(Grid(title.format(epochs(main), ""), headings, rows, notes, together))
    return [*grids, *(_further(s, metric, title, made) for s in rest)]


def _columns(metric: str) -> tuple[tuple[str, ...], Cells]:
    if metric == "ece":
        pairs = ((f"{loss}\nbase", f"{loss}\n+clip (c)") for loss in PAPER_LOSSES)
        return ("", *(heading for pair in pairs for heading in pair)), _ece_cells
    return ("", *PAPER_LOSSES, "clip after\nCross Entropy"), _accuracy_cells


def _ece_cells(setting: Setting) -> tuple[str, ...]:
    pairs = (_pair(setting.paper.get(loss, []), "ece") for loss in PAPER_LOSSES)
    return tuple(cell for pair in pairs for cell in pair)


def _pair(runs: Sequence[Run], metric: str) -> tuple[str, str]:
    return spread(_rows(runs, "none"), metric), clipped(_rows(runs, "clip"), metric)


def _accuracy_cells(setting: Setting) -> tuple[str, ...]:
    base = (_rows(setting.paper.get(loss, []), "none") for loss in PAPER_LOSSES)
    clip = _rows(setting.paper.get("Cross Entropy", []), "clip")
    after = f"{spread(clip, 'accuracy')} {arrow(clip, 'accuracy')}".rstrip()
    return (*(spread(rows, "accuracy") for rows in base), after)


def _rows(runs: Sequence[Run], recipe: str) -> list[Row | None]:
    return [run.row(recipe) for run in runs]


def _further(setting: Setting, metric: str, title: str, made: Note) -> Grid:
    """The losses the paper does not have, and other forms of those it has."""
    groups = list(setting.further)
    rows = tuple((setting.label(runs[0]), *_pair(runs, metric)) for runs in groups)
    shown = setting.only(run for runs in groups for run in runs)
    notes = (*training_notes([shown]), *cell_notes(rows, groups), made)
    told = title.format(epochs([setting]), f"further losses, {setting.network} [1], ")
    return Grid(told, ("", "base", "+clip (c)"), rows, notes)


# --- beside a temperature --------------------------------------------------------------------


def temperature_grid(setting: Setting, made: Note) -> Grid:
    """Every run, uncalibrated and after clip, temperature and both: ECE with intervals, and NLL."""
    shown = {
        heading: fit
        for heading, fit in HONEST.items()
        if heading != "jointly" or any(run.row(*fit) for run in setting.runs)
    }
    rows = tuple(_honest(setting, run, shown.values()) for run in _by_loss(setting))
    headings = (*(f"ECE %\n{name}" for name in shown), *(f"NLL\n{name}" for name in shown))
    title = f"{setting.network} ({epochs([setting])}) [1]: clip beside a temperature, every run"
    notes = (*training_notes([setting]), ("intervals", ROWS_ALONE), *_baselines(setting), made)
    return Grid(title, ("", *headings), rows, notes, together=len(shown))


def _by_loss(setting: Setting) -> list[Run]:
    return [run for runs in setting.variants.values() for run in runs]


def _honest(setting: Setting, run: Run, shown: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    several = len({other.seed for other in setting.runs}) > 1
    label = setting.label(run) + (f", seed {run.seed}" if several else "")
    found = [run.row(*fit) for fit in shown]
    ece = (with_interval(row, "ece") or MISSING for row in found)
    return (label, *ece, *(_with_arrow(row, "nll") for row in found))


def _with_arrow(row: Row | None, metric: str) -> str:
    """The value and its arrow without the interval: narrow enough for a column beside others."""
    if row is None:
        return MISSING
    return with_interval({**row, "intervals": {}}, metric)


def _baselines(setting: Setting) -> list[Note]:
    """What the arrows of each recipe compare it with."""
    rows = [row for run in setting.runs for row in run.content["results"]]
    pairs = {
        f"{row['recipe']} with {row['differences'][metric]['baseline']}": None
        for row in rows
        for metric in ("ece", "nll")
        if direction(row, metric)
    }
    if not pairs:
        return []
    told = "; ".join(pairs)
    return [("▼ ▲", f"Lower or higher, and the paired 95 % interval says so, comparing {told}.")]


# --- layers ----------------------------------------------------------------------------------


def layer_grid(
    entry: dict[str, Any], found: Sequence[Setting], table: PaperTable, made: Note
) -> Grid:
    """Another layer clipped; the paper's values stand in the rows where the network is its own."""
    runs = ([run for run in setting.runs if _made(entry, run)] for setting in found)
    ours = [setting.only(own) for setting, own in zip(found, runs, strict=True) if own]
    same = named(entry) == "CIFAR-10 ResNet-50" and Run(entry).loss == "ce"
    rows = tuple(_layer_row(row, table if same else None) for row in entry["rows"])
    trained = f" ({epochs(ours)})" if ours else ""
    title = (
        f"{table.name}, our own {named(entry)}{trained}, loss {entry['loss']}, seed "
        f"{entry['seed']}: ECE and accuracy in percent when another layer is clipped"
    )
    printed = ("paper\nECE (c)", "paper\naccuracy") if same else ()
    headings = ("", "layer", "c", "ECE", "accuracy", *printed)
    return Grid(title, headings, rows, (*training_notes(ours), *_noop(rows), made))


def _made(entry: dict[str, Any], run: Run) -> bool:
    keys = ("dataset", "network", "loss", "seed")
    return all(entry[key] == run.content[key] for key in keys)


def _noop(rows: Iterable[Sequence[str]]) -> list[Note]:
    idle = any(row[2] == NOOP for row in rows)
    return (
        [(NOOP, "No clipping of this layer was best on val, nothing is changed.")] if idle else []
    )


def _layer_row(row: dict[str, Any], table: PaperTable | None) -> tuple[str, ...]:
    c, layer = row["threshold"], row["layer"] or MISSING
    idle = MISSING if layer == MISSING else NOOP
    values = (COLUMNS[key].number(row["metrics"][key]) for key in ("ece", "accuracy"))
    cells = (row["label"], layer, idle if c is None else f"{c:.3g}", *values)
    return cells if table is None else (*cells, *_printed(row["label"], table))


def _printed(label: str, table: PaperTable) -> tuple[str, ...]:
    """The paper's row of a layer: Antepenultimate Layer for antepenultimate."""
    name = label.lower()
    for cells in table.cells:
        row = cells[0].row.lower()
        if row.startswith(name) or f"({name})" in row:
            return tuple(cell.printed for cell in cells)
    return (MISSING,) * len(table.columns)


# --- Our own trained networks beside the paper's tables, read from results/training.json.
#
# That file is made by experiments/train_grid.py and by nothing else. It holds `runs` (one network
# each, with the scores of a few recipes on it) and `layers` (the same when other layers are
# clipped).

BY_LOSS = ("train-time", "accuracy")
BY_LAYER = "layers"


@final
class TrainingRuns(ResultFile):
    """What experiments/train_grid.py left."""

    file = "training.json"
    keys = ("runs", "layers")
    remedy = "make it in a source checkout with: python experiments/train_grid.py"

    @cached_property
    def settings(self) -> list[Setting]:
        """The runs by network and training."""
        return settings(self.runs)

    @property
    def runs(self) -> list[Run]:
        """Every network."""
        return [Run(entry) for entry in self.content["runs"]]

    def beside(self, table: PaperTable) -> list[Grid]:
        """Everything of our own training that belongs beside a table."""
        if table.name == BY_LAYER:
            return self.layers(table)
        temperatures = self.temperatures() if table.name == "train-time" else []
        return [*self.losses(table), *temperatures]

    def losses(self, table: PaperTable) -> list[Grid]:
        """The table with our networks in its rows; losses it does not have follow."""
        if table.name not in BY_LOSS:
            return []
        return loss_grids(self.settings, table.metric, table.name, made_note(self.content))

    def temperatures(self) -> list[Grid]:
        """Every run with and without clip and temperature, a table a network."""
        return [temperature_grid(setting, made_note(self.content)) for setting in self.settings]

    def layers(self, table: PaperTable) -> list[Grid]:
        """Other layers clipped, a table a network."""
        made = made_note(self.content)
        return [layer_grid(entry, self.settings, table, made) for entry in self.content["layers"]]

    def values(self, table: PaperTable) -> Iterator[dict[str, Any]]:
        """The scores of every recipe on every network, or of every layer."""
        if table.name in BY_LOSS:
            for run in self.runs:
                yield from (_value(run, row, table.metric) for row in run.content["results"])
        elif table.name == BY_LAYER:
            for entry in self.content["layers"]:
                yield from (line for row in entry["rows"] for line in _layer_values(entry, row))

    def as_json(self, table: PaperTable) -> dict[str, Any]:
        """Runs without their curves, and layers, in fractions."""
        runs = self.content["runs"] if table.name in BY_LOSS else []
        facts = {key: self.content.get(key) for key in ("made_by", "hardware", "versions")}
        found = {
            "runs": [{key: run[key] for key in run if key != "curve"} for run in runs],
            "layers": self.content["layers"] if table.name == BY_LAYER else [],
        }
        return {"training": {**facts, **found}}


def _value(run: Run, row: Row, metric: str) -> dict[str, Any]:
    low, high = percent_interval(row, metric)
    joint = ", joint" if row["mode"] == "joint" else ""
    clip = (
        {"threshold": _training_number(threshold(row))} if row["recipe"].startswith("clip") else {}
    )
    return {
        "source": run.source,
        "row": run.content["loss"],
        "column": row["recipe"] + joint,
        "value": 100 * row["metrics"][metric],
        **{"low": low, "high": high, "arrow": direction(row, metric)},
        **clip,
    }


def _layer_values(entry: dict[str, Any], row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for column, metric in (("ECE (c)", "ece"), ("Accuracy", "accuracy")):
        yield {
            "source": source(entry, f", {entry['loss']}"),
            "row": row["label"],
            "column": column,
            "value": 100 * row["metrics"][metric],
            **({"threshold": _training_number(row["threshold"])} if row["layer"] else {}),
        }


def _training_number(c: float | None) -> float:
    """A threshold; one that clips nothing is infinite."""
    return math.inf if c is None else c


# --- Everything of ours that stands beside the paper's tables, from one folder of results.

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
