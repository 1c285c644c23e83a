"""Several recipes side by side: all fitted on the same rows, and scored on the same others."""

from __future__ import annotations

import copy
import operator
import platform
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, final, overload

import numpy as np
import torch
from torch import Tensor, nn

from featcal.core.batch import Batch, Data, Head, as_data
from featcal.core.calibrator import Calibrator, Pipeline
from featcal.core.checks import CalibrationWarning, InputError
from featcal.core.fit import Facts, FitReport, Mode, evaluating, survey
from featcal.core.progress import track
from featcal.core.text import parse
from featcal.heads.head import as_head
from featcal.metrics.inputs import checked_bins
from featcal.report.bootstrap import (
    Bootstrap,
    Resamples,
    checked_resamples,
    checked_seed,
    first_row,
)
from featcal.report.scores import (
    COLUMNS,
    LEVEL,
    UNKNOWN,
    Difference,
    Scores,
    calibrated_logits,
    check_usable,
    interval,
    score,
    verdict,
)
from featcal.report.tables import markdown
from featcal.version import __version__

# --- What a comparison holds: a row for every recipe, and their paired differences.


@final
@dataclass(frozen=True)
class Row:
    """One recipe: what was fitted, how it scores on unseen rows, and the seconds both took.

    Attributes:
        recipe: its text.
        calibrator: what was fitted; None for "none", and where there is one for each fold.
        scores: on rows it was not fitted on.
        seconds: of fitting and scoring, resampling not counted; a step that several recipes share
            counts in each.
        folds: with cross-fitting, the calibrator of each fold.
    """

    recipe: str
    calibrator: Calibrator | None
    scores: Scores
    seconds: float
    folds: tuple[Calibrator, ...] = ()

    @property
    def reports(self) -> list[FitReport]:
        """The report of each fit: none, one, or one a fold."""
        fitted = (self.calibrator, *self.folds)
        return [c.report for c in fitted if c is not None and c.report is not None]

    def as_json(self) -> dict[str, Any]:
        """The public form of a row of `featcal compare --json`."""
        fits = [report.as_json() for report in self.reports]
        intervals = {name: found.as_json() for name, found in self.scores.intervals.items()}
        return {
            "recipe": self.recipe,
            "n": self.scores.n,
            "metrics": self.scores.as_json()["metrics"],
            "intervals": intervals or None,
            "fit": fits[0] if fits and not self.folds else None,
            **({"fits": fits} if self.folds else {}),
            "seconds": self.seconds,
        }


@final
@dataclass(frozen=True, eq=False, repr=False)
class Comparison(Sequence[Row]):
    """The rows of a comparison, in order; iterates, counts and indexes like a list of them.

    Attributes:
        rows: one a recipe.
        against: for each row the index of the row it is compared with; None for a baseline.
        settings: how the numbers came about, JSON-ready.
    """

    rows: tuple[Row, ...]
    against: tuple[int | None, ...]
    settings: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        return self.rows[index]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __repr__(self) -> str:
        return markdown(self)

    def difference(self, index: int, metric: str) -> Difference | None:
        """Row `index` against its baseline by one metric; None when it has none.

        Both were resampled with the same rows, so the interval is that of paired differences.
        """
        other = self.against[index]
        if other is None:
            return None
        mine, base = self.rows[index].scores, self.rows[other].scores
        delta = mine.metrics[metric] - base.metrics[metric]
        found = UNKNOWN
        if metric in mine.replicates and metric in base.replicates:
            pairs = mine.replicates[metric] - base.replicates[metric]
            found = interval(delta, pairs, COLUMNS[metric].power)
        return Difference(self.rows[other].recipe, delta, found, verdict(metric, found))

    def sorted_by(self, metric: str) -> Comparison:
        """The same rows, the best by this metric first; equal ones stay in order."""
        merits = [COLUMNS[metric].merit(row.scores.metrics[metric]) for row in self.rows]
        order = sorted(range(len(self)), key=lambda index: -merits[index])
        place = {old: new for new, old in enumerate(order)}
        against = (self.against[index] for index in order)
        return replace(
            self,
            rows=tuple(self.rows[index] for index in order),
            against=tuple(None if other is None else place[other] for other in against),
        )

    def as_json(self) -> dict[str, Any]:
        """Everything, as `featcal compare --json` prints it."""
        rows = [self._row_json(index) for index in range(len(self))]
        return {"rows": rows, "settings": self.settings}

    def _row_json(self, index: int) -> dict[str, Any]:
        body = self.rows[index].as_json()
        found = {name: self.difference(index, name) for name in self.rows[index].scores.metrics}
        differences = {name: d.as_json() for name, d in found.items() if d is not None}
        return {**body, "differences": differences or None}


def versions() -> dict[str, str]:
    """What computed the numbers."""
    return {
        "featcal": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


# --- Fitting many recipes to the same data: a first step they share is fitted once.
#
# `clip`, `clip | temperature` and `clip | vector` begin alike, and step by step the later steps are
# fitted to what the first one leaves. So they are fitted on the head that the first one makes,
# which
# is what they would see inside their own pipeline: the fitted values are the same to the bit.


@final
class Fits:
    """Fits recipes, one after the other, to the same rows.

    Args:
        data: the rows.
        head: the classifier's last layer, or None.
        mode: "joint" or "sequential"; only the latter can share.
        recipes: all that will be fitted, None for those that fit nothing.
        train: rows the classifier was trained on, for recipes that need them.
    """

    def __init__(
        self,
        data: Batch | Data,
        head: Head | None,
        mode: Mode,
        recipes: Sequence[Calibrator | None],
        train: Batch | Data | None = None,
    ) -> None:
        self.data, self.head, self.mode, self.train = data, head, mode, train
        begun = Counter(
            repr(recipe.steps_in_order()[0]) for recipe in recipes if recipe is not None
        )
        self._shared = {text for text, count in begun.items() if count > 1}
        self._firsts: dict[str, Calibrator] = {}

    def fit(self, recipe: Calibrator) -> Calibrator:
        """A fitted calibrator of this recipe."""
        first, *rest = recipe.steps_in_order()
        with warnings.catch_warnings():  # the reports keep them
            warnings.simplefilter("ignore", CalibrationWarning)
            if not self._can_share(first, rest):
                return self._fit(copy.deepcopy(recipe))
            if repr(first) not in self._firsts:
                self._firsts[repr(first)] = self._fit(copy.deepcopy(first))
            begun = copy.deepcopy(self._firsts[repr(first)])
            return self._continued(begun, copy.deepcopy(rest)) if rest else begun

    def _fit(self, recipe: Calibrator) -> Calibrator:
        return recipe.fit(self.data, self.head, mode=self.mode, train=self.train)

    def _can_share(self, first: Calibrator, rest: Sequence[Calibrator]) -> bool:
        """Whether the first step costs head passes, and the rest need no more than its logits."""
        return (
            self.mode == "sequential"
            and repr(first) in self._shared
            and first.needs_features
            and isinstance(self.head, nn.Module)
            and not any(step.needs_features or step.needs_train for step in rest)
        )

    def _continued(self, begun: Calibrator, rest: list[Calibrator]) -> Calibrator:
        """The pipeline of a fitted first step and later ones, fitted to what it leaves."""
        assert isinstance(self.head, nn.Module)
        later = rest[0] if len(rest) == 1 else Pipeline(*rest)
        later.fit(_Features(self.data), begun.wrap(self.head), mode="sequential")
        whole = Pipeline(begun, later)
        assert begun.report is not None
        assert later.report is not None
        whole.report = replace(
            begun.report,
            recipe=repr(whole),
            steps=begun.report.steps + later.report.steps,
            loss_after=later.report.loss_after,
            seconds=begun.report.seconds + later.report.seconds,
        )
        for part in whole.steps_in_order():
            part.report = None  # a part of a pipeline has no report of its own
        return whole


@final
@dataclass(frozen=True, eq=False)
class _Features:
    """The same batches without stored logits, which are those of another head."""

    data: Batch | Data

    def __iter__(self) -> Iterator[Batch]:
        for batch in [self.data] if isinstance(self.data, Batch) else self.data:
            yield replace(batch, logits=None)


# --- Cross-fitting: every row is scored by a calibrator that was fitted without it.
#
# The rows are dealt out to k folds by a seeded permutation; a recipe is fitted k times, each time
# without one fold, and the rows of that fold are what it is scored on. One split serves for both,
# and
# no other split is touched.


def checked_folds(folds: int, rows: int) -> int:
    """The number of folds, at least 2 and at most as many as there are rows."""
    try:
        number = operator.index(folds)
    except TypeError:
        number = 0
    if isinstance(folds, bool) or not 2 <= number <= rows:
        raise InputError(f"folds is {folds!r} for {rows} rows: pass an integer from 2 to {rows}")
    return number


@final
@dataclass(frozen=True, eq=False)
class Folds:
    """Rows that are each held out once.

    Attributes:
        data: the batches.
        fold: (rows of this process,) the fold of each row, 0 to k - 1.
        count: k.
    """

    data: Data
    fold: Tensor
    count: int

    @classmethod
    def deal(cls, data: Data, rows: int, folds: int, *, seed: int, first_row: int) -> Folds:
        """Deals out `rows` rows, those of all processes; `first_row` is the first of this one."""
        count = checked_folds(folds, rows)
        # The number of folds joins the seed, so that folds and resamples are not drawn alike.
        order = np.random.default_rng((seed, count)).permutation(rows)
        fold = torch.empty(rows, dtype=torch.int64)
        fold[torch.from_numpy(order)] = torch.arange(rows) % count
        return cls(data, fold[first_row:], count)

    def without(self, fold: int) -> Data:
        """The rows of all other folds, as a view: no more than a batch of them is copied."""
        return _Others(self, fold)

    def scored(
        self, calibrators: Sequence[Calibrator | None], head: Head | None
    ) -> Iterator[tuple[Batch, Tensor]]:
        """Every batch with its logits, each row's by the calibrator that has not seen it."""
        for batch, fold in self.batches():
            chosen = [(fold == number).nonzero()[:, 0] for number in range(self.count)]
            logits = [
                calibrated_logits(batch.rows(rows), calibrator, head)
                for rows, calibrator in zip(chosen, calibrators, strict=True)
                if len(rows)
            ]
            back = torch.cat(chosen).argsort()
            yield batch, torch.cat(logits)[back] if logits else calibrated_logits(batch, None, head)

    def batches(self) -> Iterator[tuple[Batch, Tensor]]:
        """Every batch with the folds of its rows."""
        row = 0
        for batch in self.data:
            yield batch, self.fold[row : row + len(batch)].to(batch.labels.device)
            row += len(batch)


@final
@dataclass(frozen=True, eq=False)
class _Others:
    """All rows but those of one fold."""

    folds: Folds
    left_out: int

    def __iter__(self) -> Iterator[Batch]:
        for batch, fold in self.folds.batches():
            yield batch.rows((fold != self.left_out).nonzero()[:, 0])


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
