"""Several recipes side by side: all fitted on the same rows, and scored on the same others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import final

import torch
from torch import Tensor

from featcal.core.batch import Batch, Data, Head, as_data
from featcal.core.calibrator import Calibrator
from featcal.core.errors import InputError
from featcal.core.fitting import evaluating
from featcal.core.head import as_head
from featcal.core.progress import track
from featcal.core.spec import parse
from featcal.core.steps import Mode
from featcal.core.survey import Facts, survey
from featcal.metrics.inputs import checked_bins
from featcal.report.bootstrap import Bootstrap, first_row
from featcal.report.fits import Fits
from featcal.report.folds import Folds
from featcal.report.intervals import LEVEL
from featcal.report.resample import Resamples, checked_resamples, checked_seed
from featcal.report.rows import Comparison, Row, versions
from featcal.report.scores import calibrated_logits, check_usable, score

NONE = "none"  # the recipe that leaves the network as it is
DEFAULT_RECIPES = (NONE, "temperature", "clip", "clip | temperature")
RESAMPLES = 1000


def parse_all(recipes: Sequence[str]) -> list[Calibrator | None]:
    """Reads every recipe before any is fitted, so that a misspelt last one costs no time."""
    if isinstance(recipes, str) or not recipes:
        raise InputError(f"recipes is {recipes!r}: pass a list of one recipe or more")
    return [None if recipe.strip() == NONE else parse(recipe) for recipe in recipes]


def recipe_text(recipe: str) -> str:
    """The recipe as rows are called: its spaces and defaults as `repr` writes them."""
    (calibrator,) = parse_all([recipe])
    return NONE if calibrator is None else repr(calibrator)


def compare(
    fit_data: Batch | Data,
    test_data: Batch | Data | None,
    recipes: Sequence[str] = DEFAULT_RECIPES,
    head: Head | None = None,
    *,
    mode: Mode = "sequential",
    bins: int = 15,
    baseline: str | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
    folds: int | None = None,
    train: Batch | Data | None = None,
) -> Comparison:
    """Fits each recipe on `fit_data` and scores it on `test_data`, with 95 % intervals.

    Args:
        fit_data: labelled rows the classifier was not trained on.
        test_data: other such rows; None with `folds`.
        recipes: their texts; "none" is the network as it is.
        head: the classifier's last layer, when the data holds features.
        mode: pipelines are fitted step by step, as in the paper, or jointly.
        bins: of the binned metrics.
        baseline: the recipe the others are compared with, by paired differences; without one
            "none", where it is among the recipes.
        resamples: how often the scored rows are drawn again, 0 for no intervals.
        seed: of resamples and folds.
        folds: with 2 or more, `fit_data` serves for both by cross-fitting: each recipe is fitted
            without one fold at a time and scored on that fold.
        train: rows the classifier was trained on, for recipes that need them.

    >>> import featcal
    >>> pack = featcal.demo_pack()
    >>> recipes = ["none", "temperature"]
    >>> found = compare(pack.split("val"), pack.split("test"), recipes, pack.head, resamples=100)
    >>> found.difference(1, "ece").verdict
    'better'
    """
    calibrators = parse_all(recipes)
    names = [NONE if calibrator is None else repr(calibrator) for calibrator in calibrators]
    head, base = as_head(head), _baseline(names, baseline)
    checked_bins(bins)
    checked_resamples(resamples)
    scene = _scene(fit_data, test_data, head, folds, checked_seed(seed))
    for calibrator in calibrators:
        check_usable(calibrator, scene.facts, head)
        if calibrator is not None and calibrator.needs_train and train is None:
            raise InputError(f"{calibrator!r} measures distance to training rows: pass train=")
    drawn = Resamples.draw(scene.facts.rows, resamples, seed) if resamples else None
    fits = [Fits(data, head, mode, calibrators, train) for data in scene.fit_data]
    rows = []
    for name, calibrator in track("fitting recipes", list(zip(names, calibrators, strict=True))):
        bootstrap = None if drawn is None else Bootstrap(drawn, scene.first_row, bins)
        rows.append(_row(name, calibrator, fits, scene, bins, bootstrap))
    settings = {
        **{"mode": mode, "bins": bins, "folds": folds, "resamples": resamples, "seed": seed},
        **{"level": LEVEL, "baseline": None if base is None else names[base]},
        "versions": versions(),
    }
    against = tuple(None if index == base else base for index in range(len(rows)))
    return Comparison(tuple(rows), against, settings)


def _baseline(names: list[str], wanted: str | None) -> int | None:
    """The place of the baseline among the recipes."""
    if wanted is None:
        return names.index(NONE) if NONE in names else None
    if recipe_text(wanted) not in names:
        raise InputError(f"baseline is {wanted!r}, which is not among the recipes: add it to them")
    return names.index(recipe_text(wanted))


@final
@dataclass(frozen=True, eq=False)
class _Scene:
    """Which rows are fitted on and which are scored.

    Attributes:
        fit_data: the rows of each fit: one set, or one a fold.
        scored: the rows that are scored.
        facts: of the scored rows.
        first_row: of this process, among the scored rows of all.
        folds: with cross-fitting.
    """

    fit_data: list[Batch | Data]
    scored: Data
    facts: Facts
    first_row: int
    folds: Folds | None = None

    def parts(
        self, fitted: list[Calibrator | None], head: Head | None
    ) -> Iterator[tuple[Batch, Tensor]]:
        """The scored batches with their calibrated logits."""
        if self.folds is not None:
            return self.folds.scored(fitted, head)
        (one,) = fitted
        return ((batch, calibrated_logits(batch, one, head)) for batch in self.scored)


def _scene(
    fit_data: Batch | Data,
    test_data: Batch | Data | None,
    head: Head | None,
    folds: int | None,
    seed: int,
) -> _Scene:
    if folds is None and test_data is None:
        raise InputError("test_data is None: pass rows to score on, or folds=5 to cross-fit")
    if folds is not None and test_data is not None:
        raise InputError(f"folds is {folds} and test_data is given: pass test_data=None")
    scored = as_data(fit_data if test_data is None else test_data, head)
    with evaluating(head):
        facts = survey(scored, head)
    first = first_row(scored)
    if folds is None:
        return _Scene([fit_data], scored, facts, first)
    dealt = Folds.deal(scored, facts.rows, folds, seed=seed, first_row=first)
    others = [dealt.without(fold) for fold in range(dealt.count)]
    return _Scene(list(others), scored, facts, first, dealt)


@torch.no_grad()
def _row(
    name: str,
    calibrator: Calibrator | None,
    fits: list[Fits],
    scene: _Scene,
    bins: int,
    bootstrap: Bootstrap | None,
) -> Row:
    """Fits a recipe wherever it is to be fitted, and scores it."""
    fitted = [None if calibrator is None else fit.fit(calibrator) for fit in fits]
    started, head = perf_counter(), fits[0].head
    with evaluating(head):
        scores = score(scene.parts(fitted, head), scene.facts, bins, bootstrap)
    reports = [one.report for one in fitted if one is not None and one.report is not None]
    spent = perf_counter() - started - (0 if bootstrap is None else bootstrap.seconds)
    seconds = spent + sum(report.seconds for report in reports)
    if scene.folds is None:
        return Row(name, fitted[0], scores, seconds)
    folds = tuple(one for one in fitted if one is not None)
    return Row(name, None, scores, seconds, folds)
