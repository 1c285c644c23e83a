"""Several recipes side by side: each fitted on one split, scored on another."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, final

from featcal.core.batch import Batch, Data, Head
from featcal.core.calibrator import Calibrator
from featcal.core.errors import CalibrationWarning
from featcal.core.progress import track
from featcal.core.spec import parse
from featcal.core.steps import Mode
from featcal.report.scores import Scores, evaluate

NONE = "none"  # the recipe that leaves the network as it is
DEFAULT_RECIPES = (NONE, "temperature", "clip", "clip | temperature")


@final
@dataclass(frozen=True)
class Row:
    """One recipe: what was fitted, how it scores on unseen rows, and the seconds both took."""

    recipe: str
    calibrator: Calibrator | None
    scores: Scores
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """The public form of a row of `featcal compare --json`."""
        report = None if self.calibrator is None else self.calibrator.report
        fit = None if report is None else report.as_json()
        return {
            "recipe": self.recipe,
            "n": self.scores.n,
            "metrics": self.scores.as_json()["metrics"],
            "fit": fit,
            "seconds": self.seconds,
        }


def parse_all(recipes: Sequence[str]) -> list[Calibrator | None]:
    """Reads every recipe before any is fitted, so that a misspelt last one costs no time."""
    return [None if recipe.strip() == NONE else parse(recipe) for recipe in recipes]


def compare(
    fit_data: Batch | Data,
    test_data: Batch | Data,
    recipes: Sequence[str] = DEFAULT_RECIPES,
    head: Head | None = None,
    *,
    mode: Mode = "sequential",
    bins: int = 15,
) -> list[Row]:
    """Fits each recipe on `fit_data` and scores it on `test_data`.

    Pipelines are fitted by the paper's protocol, step by step, unless `mode` says "joint".
    """
    calibrators = parse_all(recipes)
    rows = []
    for calibrator in track("fitting recipes", calibrators):
        started = perf_counter()
        if calibrator is not None:
            with warnings.catch_warnings():  # the reports keep them
                warnings.simplefilter("ignore", CalibrationWarning)
                calibrator.fit(fit_data, head, mode=mode)
        scores = evaluate(test_data, calibrator, head, bins=bins)
        name = NONE if calibrator is None else repr(calibrator)
        rows.append(Row(name, calibrator, scores, perf_counter() - started))
    return rows
