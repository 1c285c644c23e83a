"""Several recipes side by side: all fitted on the same rows, and scored on the same others."""

from __future__ import annotations

import copy
import platform
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Literal, final, overload

import numpy as np
import torch
from torch import Tensor, nn

from featcal.core.batch import Batch, Data, Head, as_data, head_of
from featcal.core.calibrator import Calibrator, Pipeline
from featcal.core.checks import (
    ArgumentError,
    CalibrationWarning,
    InputError,
    check_choice,
    whole_number,
)
from featcal.core.fit import FitReport, Mode, evaluating, survey
from featcal.core.labels import suited
from featcal.core.listed import RESAMPLES as RESAMPLES
from featcal.core.memory import Size, under_cap
from featcal.core.progress import track
from featcal.core.sample import Folds, first_row
from featcal.core.text import NONE, parse
from featcal.data.pack import Pack, PackSplit, rows_of
from featcal.heads.head import as_head, linear_view
from featcal.methods import METHODS
from featcal.metrics.columns import COLUMNS, columns
from featcal.metrics.inputs import checked_bins
from featcal.report.bootstrap import (
    FLOOR,
    LEVEL,
    UNKNOWN,
    UNSEEN,
    Bootstrap,
    Difference,
    Interval,
    Resamples,
    checked_resamples,
    checked_seed,
    interval,
    marks,
)
from featcal.report.scores import (
    Scores,
    answered,
    calibrated_logits,
    check_usable,
    resampled,
    score,
)
from featcal.report.tables import html, markdown
from featcal.version import __version__

DEFAULT_RECIPES = (NONE, "auto", "temperature", "clip", "clip | temperature")
ALL = "all"  # in place of recipes: every one that can be fitted


@under_cap
def compare(
    fit_data: Batch | Data | Pack,
    test_data: Batch | Data | None = None,
    recipes: Sequence[str] | Literal["all"] = DEFAULT_RECIPES,
    head: Head | None = None,
    *,
    mode: Mode = "joint",
    metrics: Sequence[str] = (),
    bins: int = 15,
    baseline: str | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
    folds: int | None = None,
    train: Batch | Data | None = None,
    memory: Size = None,
) -> Comparison:
    """Fits each recipe on `fit_data` and scores it on `test_data`, with 95 % intervals.

    Args:
        fit_data: labelled rows the classifier was not trained on, in any form `evaluate` takes; a
            pack stands for its splits val and test.
        test_data: other such rows; None with `folds` or a pack.
        recipes: their texts; "none" is the network as it is, and "all" every method that can be
            fitted.
        head: the classifier's last layer, when the data holds features and does not bring it along.
        mode: pipelines are fitted jointly, or "sequential", step by step as in the paper.
        metrics: the columns to show, which also sort the rows, by the first.
        bins: of the binned metrics.
        baseline: the recipe the others are compared with, by paired differences; without one
            "none", where it is among the recipes.
        resamples: how often the scored rows are drawn again, 0 for no intervals.
        seed: of resamples and folds.
        folds: with 2 or more, `fit_data` serves for both by cross-fitting: each recipe is fitted
            without one fold at a time and scored on that fold.
        train: rows the classifier was trained on, for recipes that need them.
        memory: the most this process may hold, such as "2GB", mapped files aside.

    >>> import featcal
    >>> pack = featcal.demo_pack()
    >>> recipes = ["none", "temperature"]
    >>> found = compare(pack, recipes=recipes, resamples=100)
    >>> found.difference(1, "ece").verdict
    'better'
    """
    every = isinstance(recipes, str) and recipes == ALL
    calibrators = [] if every else parse_all(recipes)
    shown = tuple(column.name for column in columns(tuple(map(str.lower, metrics))))
    if isinstance(fit_data, Pack) and test_data is None and folds is None:
        try:
            test_data = fit_data.split("test")
        except InputError as error:
            raise InputError(f"{error}, or cross-fit val with folds=5") from error
    fit_data = rows_of(fit_data, "val")
    if head is None:
        head, other = head_of(fit_data), head_of(test_data)
        pair = [linear_view(one) for one in (head, other)]
        if all(pair) and not torch.equal(*(one.weight for one in pair if one is not None)):
            raise InputError(
                "test_data comes with another head than fit_data: pass head=, one for both"
            )
    head = as_head(head)
    checked_bins(bins)
    checked_resamples(resamples)
    checked_seed(seed)
    if folds is None and test_data is None:
        raise InputError("test_data is None: pass rows to score on, or folds=5 to cross-fit")
    if folds is not None and test_data is not None:
        raise InputError(f"folds is {folds} and test_data is given: pass test_data=None")
    scored = as_data(fit_data if test_data is None else test_data, head)
    if every:
        with evaluating(head):
            facts = survey(scored, head)  # which it keeps
        features = head is not None and facts.width > 0
        found = every_recipe(classes=facts.classes, features=features, train=train is not None)
        calibrators = parse_all(found)
    names = [NONE if calibrator is None else repr(calibrator) for calibrator in calibrators]
    held = NONE if baseline is None else recipe_text(baseline)
    if baseline is not None and held not in names:
        raise InputError(
            f"baseline is {baseline!r}, which is not among the recipes: add it to them"
        )
    base = names.index(held) if held in names else None
    with evaluating(head):
        facts = survey(scored, head)
        first = first_row(scored)
        drawn = resampled(scored, head, facts, resamples, seed) if resamples else None
        first_drawn = first_row(answered(scored, head, facts))
    calibrators = [None if one is None else suited(one, facts) for one in calibrators]
    dealt = None
    if folds is not None:
        if not 2 <= whole_number(folds) <= facts.samples:
            what = "samples" if facts.groups else "rows"
            raise ArgumentError(
                f"<folds> is {folds!r} for {facts.samples} {what}: give an integer from 2 to "
                f"{facts.samples}"
            )
        grouped = facts.groups > 0
        dealt = Folds.shuffled(
            scored, folds, facts.rows, seed=seed, first_row=first, grouped=grouped
        )
    for calibrator in calibrators:
        check_usable(calibrator, facts, head)
        if calibrator is not None and calibrator.needs_train and train is None:
            raise InputError(f"{calibrator!r} measures distance to training rows: pass train=")
    sets = [fit_data] if dealt is None else [dealt.without(fold) for fold in range(dealt.count)]
    fits = [Fits(data, head, mode, calibrators, train) for data in sets]
    rows = []
    for name, calibrator in track("fitting recipes", list(zip(names, calibrators, strict=True))):
        fitted = [None if calibrator is None else fit.fit(calibrator) for fit in fits]
        bootstrap = None if drawn is None else Bootstrap(drawn, first_drawn, bins)
        started = perf_counter()
        with torch.no_grad(), evaluating(head):
            if dealt is not None:
                parts = _held_out(dealt, fitted, head)
            else:
                parts = ((b, calibrated_logits(b, fitted[0], head)) for b in scored)
            scores = score(parts, facts, bins, bootstrap)
        seconds = perf_counter() - started - (0 if bootstrap is None else bootstrap.seconds)
        reports = [one.report for one in fitted if one is not None and one.report is not None]
        seconds += sum(report.seconds for report in reports)
        of_folds = () if dealt is None else tuple(one for one in fitted if one is not None)
        rows.append(Row(name, fitted[0] if dealt is None else None, scores, seconds, of_folds))
    settings = settings_of(
        *(mode, bins, folds, resamples, seed),
        baseline=None if base is None else names[base],
        drawn=drawn,
    )
    against = tuple(None if index == base else base for index in range(len(rows)))
    compared = Comparison(tuple(rows), against, settings, shown)
    return compared.sorted_by(shown[0]) if shown else compared


def check_apart(val: object, test: object) -> None:
    """Refuses to score the rows of the fit: the same loader, split, batch or arrays twice."""
    same = val is test and val is not None
    if isinstance(val, PackSplit) or isinstance(test, PackSplit):
        same = val == test
    elif isinstance(val, Batch) and isinstance(test, Batch):
        first, other = (b.features if b.logits is None else b.logits for b in (val, test))
        same = first is not None and other is not None and first.device == other.device
        same = same and torch.equal(first, other) and torch.equal(val.labels, test.labels)  # type: ignore[arg-type]
    if same:
        raise InputError(
            "val and test are the same rows: never score on the rows of the fit; leave out test to "
            "cross-fit them"
        )


def settings_of(
    mode: Mode,
    bins: int = 15,
    folds: int | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
    *,
    baseline: str | None,
    drawn: Resamples | None = None,
) -> dict[str, Any]:
    """How the numbers of a comparison came about, as it keeps them."""
    return {
        **{"mode": mode, "bins": bins, "folds": folds, "resamples": resamples, "seed": seed},
        **{"level": LEVEL, "baseline": baseline},
        "marks": {"correction": "holm", "floor": FLOOR},
        "wide": [name for name, column in COLUMNS.items() if column.wide],
        "drawn": drawn.as_json if drawn else {"groups": None, "samples": None, "unseen": UNSEEN},
        "versions": versions(),
    }


def usual_recipes(*, features: bool) -> tuple[str, ...]:
    """The recipes that are compared where none are named: those that can be, with what there is."""
    every = zip(DEFAULT_RECIPES, parse_all(DEFAULT_RECIPES), strict=True)
    return tuple(text for text, one in every if features or one is None or not one.needs_features)


def every_recipe(*, classes: int, features: bool, train: bool) -> tuple[str, ...]:
    """The network as it is and every method by its defaults that can be fitted with what there is.

    Args:
        classes: how many there are.
        features: whether there are features and the layer they enter.
        train: whether there are rows the network was trained on.
    """
    every = {name: kind() for name, kind in METHODS.items()}
    fits = (
        name
        for name, one in every.items()
        if (features or not one.needs_features)
        and (train or not one.needs_train)
        and classes <= one.most_classes
    )
    pairs = ("clip | temperature",) if features else ()
    return (NONE, *fits, *pairs)


def parse_all(recipes: Sequence[str]) -> list[Calibrator | None]:
    """Reads every recipe before any is fitted, so that a misspelt last one costs no time."""
    if not isinstance(recipes, (list, tuple)) or not recipes:
        what = repr(recipes) if isinstance(recipes, (str, list, tuple)) else type(recipes).__name__
        raise InputError(f"recipes is {what}: pass a list of one recipe or more, by name")
    for one in recipes:
        if not isinstance(one, str):
            raise InputError(f"recipes hold a {type(one).__name__}: give texts, as 'temperature'")
    return [None if recipe.strip() == NONE else parse(recipe) for recipe in recipes]


def recipe_text(recipe: str) -> str:
    """The recipe as rows are called: its spaces and defaults as `repr` writes them."""
    (calibrator,) = parse_all([recipe])
    return NONE if calibrator is None else repr(calibrator)


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
        """The report of each fit: none, one, or one per fold."""
        fitted = (self.calibrator, *self.folds)
        return [c.report for c in fitted if c is not None and c.report is not None]

    def as_json(self) -> dict[str, Any]:
        """The public form of a row of `featcal compare --json`."""
        fits = [report.as_json() for report in self.reports]
        intervals = {name: found.as_json() for name, found in self.scores.intervals.items()}
        return {
            "recipe": self.recipe,
            "n": self.scores.n,
            **{k: v for k, v in self.scores.as_json().items() if k != "n"},
            "intervals": intervals or None,
            **({"few_wrong": True} if intervals and self.scores.few_wrong else {}),
            "fit": fits[0] if fits and not self.folds else None,
            **({"fits": fits} if self.folds else {}),
            "seconds": self.seconds,
        }


@final
@dataclass(frozen=True, eq=False, repr=False)
class Comparison(Sequence[Row]):
    """The rows of a comparison, in order; iterates, counts and indexes like a list of them.

    Attributes:
        rows: one per recipe.
        against: for each row the index of the row it is compared with; None for a baseline.
        settings: how the numbers came about, JSON-ready.
        metrics: the columns that are shown; the usual ones where there are none.
    """

    rows: tuple[Row, ...]
    against: tuple[int | None, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    metrics: tuple[str, ...] = ()

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

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return html(self)

    def differences(self, metric: str) -> list[Difference | None]:
        """Every row against its baseline by one metric; None where it has none.

        Both were resampled with the same rows, so the interval is that of paired differences; what
        counts as one is decided of all rows together.
        """
        compared: list[tuple[int, str]] = []
        found: list[tuple[float, Interval]] = []
        for index, (row, other) in enumerate(zip(self.rows, self.against, strict=True)):
            if other is None:
                continue
            mine, base, around = row.scores, self.rows[other].scores, UNKNOWN
            delta = mine.metrics[metric] - base.metrics[metric]
            if metric in mine.replicates and metric in base.replicates:
                pairs = mine.replicates[metric] - base.replicates[metric]
                around = interval(delta, pairs, COLUMNS[metric].power)
            compared.append((index, self.rows[other].recipe))
            found.append((delta, around))
        told: list[Difference | None] = [None] * len(self.rows)
        answers = marks(metric, found)
        for (index, recipe), (delta, around), answer in zip(compared, found, answers, strict=True):
            told[index] = Difference(recipe, delta, around, answer)
        return told

    def difference(self, index: int, metric: str) -> Difference | None:
        """Row `index` against its baseline by one metric; None when it has none."""
        return self.differences(metric)[index]

    def sorted_by(self, metric: str) -> Comparison:
        """The same rows, the best by this metric first; equal ones stay in order."""
        metric = metric.lower()
        check_choice("sorted_by", "metric", metric, COLUMNS)
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
        names = self.rows[0].scores.metrics if self.rows else ()
        every = {name: self.differences(name) for name in names}
        rows = []
        for index, row in enumerate(self.rows):
            found = {name: one[index] for name, one in every.items()}
            differences = {name: d.as_json() for name, d in found.items() if d is not None}
            rows.append({**row.as_json(), "differences": differences or None})
        return {"rows": rows, "settings": self.settings}


def versions() -> dict[str, str]:
    """What computed the numbers."""
    return {
        "featcal": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


@final
class Fits:
    """Fits recipes, one after the other, to the same rows; a first step they share is fitted once.

    `clip`, `clip | temperature` and `clip | vector` begin alike, and step by step the later steps
    are fitted to what the first one leaves. So they are fitted on the head that the first one
    makes, which is what they would see inside their own pipeline: the fitted values are the same to
    the bit.

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
        self.data, self.head, self.mode, self.train = as_data(data, head), head, mode, train
        begun = Counter(repr(one.steps_in_order()[0]) for one in recipes if one is not None)
        self._shared = {text for text, count in begun.items() if count > 1}
        # A fitted first step, the head it makes, and the rows for that head.
        self._begun: dict[str, tuple[Calibrator, nn.Module, Data]] = {}

    def fit(self, recipe: Calibrator) -> Calibrator:
        """A fitted calibrator of this recipe."""
        recipe = copy.deepcopy(recipe)
        first, *rest = recipe.steps_in_order()
        # Sharing pays where the first step costs head passes, and the rest need only its logits.
        share = (
            self.mode == "sequential"
            and repr(first) in self._shared
            and first.needs_features
            and not any(step.needs_features or step.needs_train for step in rest)
            and "reference=True" not in repr(first)  # such a recipe's later steps know of it
        )
        with warnings.catch_warnings():  # the reports keep them
            warnings.simplefilter("ignore", CalibrationWarning)
            if not share or not isinstance(self.head, nn.Module):
                recipe.fit(self.data, self.head, mode=self.mode, train=self.train)
                return recipe.outcome()
            if repr(first) not in self._begun:
                first.fit(self.data, self.head, mode=self.mode, train=self.train)
                wrapped = first.wrap(self.head)
                rows = as_data(_Features(self.data), wrapped)
                self._begun[repr(first)] = first, wrapped, rows
            known, head, data = self._begun[repr(first)]
            begun = copy.deepcopy(known)
            if not rest:
                return begun
            later = rest[0] if len(rest) == 1 else Pipeline(*rest)
            later.fit(data, head, mode="sequential")
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

    data: Data

    def __iter__(self) -> Iterator[Batch]:
        return (replace(batch, logits=None) for batch in self.data)


def _held_out(
    folds: Folds, calibrators: Sequence[Calibrator | None], head: Head | None
) -> Iterator[tuple[Batch, Tensor]]:
    """Every batch with its logits, each row's by the calibrator that has not seen it."""
    for batch, fold in folds:
        chosen = [(fold == number).nonzero()[:, 0] for number in range(folds.count)]
        logits = [
            calibrated_logits(batch.rows(rows), calibrator, head)
            for rows, calibrator in zip(chosen, calibrators, strict=True)
            if len(rows)
        ]
        back = torch.cat(chosen).argsort()
        yield batch, torch.cat(logits)[back] if logits else calibrated_logits(batch, None, head)
