"""The tables of the feature clipping paper as printed, and our own results beside them.

Tao, Dong and Xu, "Feature Clipping for Uncertainty Calibration", AAAI 2025. Everything is in
`assets/paper.json`, which experiments/paper_tables.py makes from the results of the experiments.
Nothing here needs torch, so that `featcal paper` answers at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from featcal.core.checks import InputError
from featcal.core.stored import json_of, reading
from featcal.core.table import Table

FILE = "paper.json"
REMEDY = "make it in a source checkout with: python experiments/paper_tables.py"
CSV_HEADER = (
    *("table", "source", "row", "column", "value", "low", "high"),
    *("threshold", "arrow", "bold", "marks"),
)


@final
@dataclass(frozen=True)
class PaperTable:
    """One table of the paper.

    Attributes:
        body: the table, what is known of its cells, and our results, as `--json` prints them.
        faulty: how many cells hold a defect or a misprint.
        csv: one line per value, the paper's and ours, in the columns of CSV_HEADER.
        shown: the table as printed with its footnotes, then our own tables.
    """

    body: dict[str, Any]
    faulty: int
    csv: tuple[str, ...]
    shown: tuple[Table, ...]

    @property
    def facts(self) -> dict[str, Any]:
        """What it is, in a line of a list."""
        facts = {key: self.body[key] for key in ("number", "name", "label", "summary")}
        return {**facts, "cells": len(self.body["cells"]), "faulty": self.faulty}


def read_paper(folder: Path | None = None) -> dict[str, PaperTable]:
    """The tables by their short names, in the order of their numbers.

    Args:
        folder: where another paper.json lies; None for the one of this package.

    >>> list(read_paper())[:3]
    ['entropy', 'ece-posthoc', 'vit']
    """
    path = (Path(__file__).parent / "assets" if folder is None else folder) / FILE
    if not path.is_file():
        raise InputError(f"{path.parent} holds no {FILE}: {REMEDY} {path.parent}")
    with reading(path, REMEDY):
        content = json_of(path.read_bytes())
        return {entry["json"]["name"]: _table(entry, content) for entry in content["tables"]}


def _table(entry: dict[str, Any], content: dict[str, Any]) -> PaperTable:
    """A table with its packs and runs, which the file holds once for all tables."""
    ours = entry["json"]["ours"]
    packs = [content["packs"][index] for index in ours["packs"]]
    runs = [content["runs"][index] for index in ours["training"]["runs"]]
    ours = {**ours, "packs": packs, "training": {**ours["training"], "runs": runs}}
    shown = (
        Table(
            one["title"],
            tuple(one["headings"]),
            tuple(map(tuple, one["rows"])),
            tuple((letter, text) for letter, text in one["notes"]),
            one["together"],
        )
        for one in entry["shown"]
    )
    body = {**entry["json"], "ours": ours}
    return PaperTable(body, entry["faulty"], tuple(entry["csv"]), tuple(shown))
