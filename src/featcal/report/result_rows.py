"""A row of a result file, one recipe scored on one network, as the text of a table's cell.

Such rows are what `Comparison.as_json` gives, with the mode of their fit beside them. Values are
fractions there and percent in tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from featcal.report.columns import COLUMNS

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
