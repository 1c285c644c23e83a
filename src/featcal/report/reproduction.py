"""Our own results beside the paper's tables, read from results/reproduction.json.

That file is made by experiments/reproduction.py and by nothing else. It holds `replays` (cells of
the paper computed again from the paper's own logits), `packs` (the paper's recipes on other
networks) and `beside` (small tables of ours that belong to one of the paper's).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from featcal.core.errors import InputError
from featcal.report.blocks import PAPER_METHODS
from featcal.report.grids import Grid
from featcal.report.paper import PaperTable, paper_tables

FILE = "reproduction.json"
REMEDY = "make it in a source checkout with: make reproduce"
PACK_METRICS = {"ece": "ECE", "adaptive_ece": "adaptive ECE", "accuracy": "accuracy"}
ARROWS = ("▼ ▲", "Lower or higher than base, and the paired 95 % interval says so.")
# Tables whose rows our packs have no counterpart of: other losses, other layers.
WITHOUT_PACKS = ("train-time", "layers")


def checkout_results() -> Path | None:
    """The results folder of the source checkout this package runs from; None when installed."""
    root = Path(__file__).parents[3]
    folder = root / "results"
    return folder if (root / "pyproject.toml").is_file() and (folder / FILE).is_file() else None


@final
@dataclass(frozen=True)
class Reproduction:
    """What experiments/reproduction.py left."""

    content: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Reproduction:
        """Reads the file in a folder.

        Raises:
            InputError: when it is not there or not what experiments/reproduction.py writes.
        """
        path = folder / FILE
        if folder.is_file():
            raise InputError(f"{folder} is a file: give its folder")
        if not path.is_file():
            raise InputError(f"{folder} holds no {FILE}: {REMEDY}")
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            missing = [key for key in ("replays", "packs", "beside") if key not in content]
        except (ValueError, TypeError) as error:
            raise InputError(f"{path} cannot be read ({error}): {REMEDY}") from error
        if missing:
            raise InputError(f"{path} lacks {', '.join(missing)}: {REMEDY}")
        found = cls(content)
        try:
            found._check()
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, InputError):
                raise
            why = f"{type(error).__name__}: {error}"
            raise InputError(f"{path} holds something else ({why}): {REMEDY}") from error
        return found

    def _check(self) -> None:
        """Lays out everything once: what is of another kind inside fails here, not halfway."""
        for table in paper_tables():
            self.beside(table)
            list(self.values(table))

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
        """Each of our values as a line of a CSV file, in the unit of the table."""
        for entry in self.content["replays"]:
            if entry["table"] == table.name:
                for form, value in entry["forms"].items():
                    where = {"row": entry["row"], "column": entry["column"]}
                    yield {"source": f"paper's logits, {form}", **where, "value": value}
        for pack in self._packs(table):
            for row in pack["results"]:
                low, high = _interval(row, table.metric)
                yield {
                    "source": pack["name"],
                    "row": row["recipe"],
                    "column": row["mode"],
                    "value": 100 * row["metrics"][table.metric],
                    "low": low,
                    "high": high,
                }

    def as_json(self, table: PaperTable) -> dict[str, Any]:
        """The part of the results that belongs to a table."""
        return {
            "replays": [e for e in self.content["replays"] if e["table"] == table.name],
            "beside": [e for e in self.content["beside"] if e["table"] == table.name],
            "packs": self._packs(table),
        }


def pack_grid(pack: dict[str, Any], metric: str) -> Grid:
    """The six methods on one network: alone, after a clip, and with a clip fitted jointly."""
    rows = []
    for printed, method in PAPER_METHODS.items():
        after = "clip" if method == "none" else f"clip | {method}"
        joint = None if method == "none" else _find(pack, after, "joint")
        found = (_find(pack, method, "sequential"), _find(pack, after, "sequential"), joint)
        if found[0] is not None:
            rows.append((f"{printed} ({method})", *(_with_interval(row, metric) for row in found)))
    title = (
        f"{pack['name']}, another network ({pack['dataset']}, {pack['model']}): "
        f"{PACK_METRICS[metric]} in percent on {pack['rows']['test']:,} test rows{_clip(pack)}"
    )
    headings = ("", "base", "after clip", "jointly with clip")
    return Grid(title, headings, tuple(rows), (ARROWS,))


def _clip(pack: dict[str, Any]) -> str:
    """The threshold of the clip alone, in words."""
    row = _find(pack, "clip", "sequential")
    if row is None:
        return ""
    c = row["fit"]["steps"][0]["threshold"]
    return "; clip is a no-op" if c is None else f"; clip at c = {c:.3g}"


def _find(pack: dict[str, Any], recipe: str, mode: str) -> dict[str, Any] | None:
    rows: Sequence[dict[str, Any]] = pack["results"]
    return next((r for r in rows if (r["recipe"], r["mode"]) == (recipe, mode)), None)


def _with_interval(row: dict[str, Any] | None, metric: str) -> str:
    """The value, its interval, and an arrow where the paired difference from base is one."""
    if row is None:
        return ""
    text = _number(100 * row["metrics"][metric], 2)
    low, high = _interval(row, metric)
    if low is not None and high is not None:
        text += f" [{low:.2f}, {high:.2f}]"
    found = (row.get("differences") or {}).get(metric)
    if found is None or found["verdict"] not in ("better", "worse"):
        return text
    return f"{text} {'▲' if found['delta'] > 0 else '▼'}"


def _interval(row: dict[str, Any], metric: str) -> tuple[float | None, float | None]:
    low, high = (row.get("intervals") or {}).get(metric) or (None, None)
    return (None, None) if low is None or high is None else (100 * low, 100 * high)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _small(entry: dict[str, Any]) -> Grid:
    digits = entry["digits"]
    rows = ((r["label"], *(_number(v, digits) for v in r["values"])) for r in entry["rows"])
    return Grid(entry["title"], ("", *entry["columns"]), tuple(rows))
