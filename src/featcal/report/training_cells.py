"""Cells over several seeds, and the footnotes that say what stands behind them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from featcal.report.columns import COLUMNS
from featcal.report.result_rows import ARROW, ARROWS, Row, direction, threshold
from featcal.report.training_runs import PUBLISHED_EPOCHS, Run, Setting, listed

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
