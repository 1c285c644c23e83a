"""Our own results beside the paper's tables, read from results/reproduction.json.

That file is made by experiments/reproduction.py and by nothing else. It holds `replays` (cells of
the paper computed again from the paper's own logits), `packs` (the paper's recipes on other
networks) and `beside` (small tables of ours that belong to one of the paper's).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

from featcal.report.blocks import PAPER_METHODS, after_clip
from featcal.report.grids import Grid
from featcal.report.paper import PaperTable
from featcal.report.result_files import ResultFile
from featcal.report.result_rows import ARROWS, find, percent_interval, threshold, with_interval

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
