"""Our own trained networks beside the paper's tables, read from results/training.json.

That file is made by experiments/train_grid.py and by nothing else. It holds `runs` (one network
each, with the scores of a few recipes on it) and `layers` (the same when other layers are clipped).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any, final

from featcal.report.grids import Grid
from featcal.report.paper import PaperTable
from featcal.report.result_files import ResultFile
from featcal.report.result_rows import Row, direction, percent_interval, threshold
from featcal.report.training_cells import made_note
from featcal.report.training_grids import layer_grid, loss_grids, temperature_grid
from featcal.report.training_runs import Run, Setting, settings, source

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
    clip = {"threshold": _number(threshold(row))} if row["recipe"].startswith("clip") else {}
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
            **({"threshold": _number(row["threshold"])} if row["layer"] else {}),
        }


def _number(c: float | None) -> float:
    """A threshold; one that clips nothing is infinite."""
    return math.inf if c is None else c
