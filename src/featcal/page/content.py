"""What the page shows, computed once: numbers first, and the words that they allow."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from time import perf_counter
from typing import Any, final

import torch

from featcal import analysis
from featcal.analysis.base import Rows, reading
from featcal.analysis.reliability import claims
from featcal.analysis.sweep import POINTS, fit_quietly
from featcal.core.batch import Batch, Data, Head, as_data, features_of
from featcal.core.calibrator import Calibrator
from featcal.core.checks import InputError
from featcal.core.fit import Mode
from featcal.core.memory import held_bytes
from featcal.core.progress import calm, track
from featcal.core.sample import row_hash
from featcal.core.text import NONE, parse
from featcal.data import Pack
from featcal.data.pack import MANIFEST, sha256
from featcal.methods.clip import FeatureClip
from featcal.page.verdict import FROM, Facts, Place
from featcal.page.wording import Summary, named, words
from featcal.report.bootstrap import Resamples, checked_resamples
from featcal.report.compare import (
    DEFAULT_RECIPES,
    RESAMPLES,
    Comparison,
    Row,
    compare,
    parse_all,
    usual_recipes,
)
from featcal.report.scores import Scores, evaluate
from featcal.report.tables import fitted_text

FORMAT, VERSION = "featcal.report", 1
SURE = 0.8  # the paper's level of a confident answer, in its entropy table and histograms
BANDS = 400  # resamples behind a band; a band is drawn some pixels wide
WARM = "clip | temperature"


@final
@dataclass(frozen=True, eq=False, repr=False)
class Content:
    """Everything on the page.

    Attributes:
        scene: the rows it is about.
        comparison: all recipes, the network as it is first.
        summary: the verdict in words.
        entries: one per row of the comparison.
        classes: by predicted class, before and after the recommended recipe.
        units: means of the features of confident rows, None without features.
        values: their histograms, None without features.
        sweeps: what every threshold would do; none without features.
        notes: what is missing, and why.
        about: where the numbers come from, JSON-ready.
    """

    scene: Scene
    comparison: Comparison
    summary: Summary
    entries: tuple[Entry, ...]
    classes: tuple[analysis.GroupCalibration, analysis.GroupCalibration]
    units: analysis.UnitMeans | None
    values: analysis.FeatureValues | None
    sweeps: tuple[analysis.ClipSweep, ...]
    notes: tuple[str, ...]
    about: dict[str, Any]

    def __repr__(self) -> str:
        return f"Content({self.about['pack']['path']}: {self.summary.headline})"

    @classmethod
    def of(
        cls,
        pack: Pack,
        recipes: Sequence[str] = DEFAULT_RECIPES,
        calibrators: Mapping[str, Calibrator] | Sequence[Calibrator] = (),
        *,
        fit: str = "val",
        test: str = "test",
        mode: Mode = "joint",
        bins: int = 15,
        resamples: int = RESAMPLES,
        seed: int = 0,
        command: str = "",
    ) -> Content:
        """Fits the recipes on one split, scores them on another, and looks closely.

        Args:
            pack: on disk.
            recipes: their texts; the network as it is comes first, whether it is among them or not.
                Of the default ones those that need features are left out where there are none.
            calibrators: fitted beforehand, by the names of their files where they have one.
            fit: the split to fit on.
            test: the split to score on.
            mode: pipelines are fitted jointly, or "sequential", step by step as in the paper.
            bins: of the binned metrics and the diagrams.
            resamples: behind the intervals, 100 to 10,000.
            seed: of all that is drawn.
            command: what was typed, for the reader to repeat.
        """
        check_splits(pack, fit, test)
        if not checked_resamples(resamples):
            raise InputError("resamples is 0: a page that says what is chance needs some, as 1000")
        scene = Scene.of(pack, fit, test, bins=bins, seed=seed)
        if tuple(recipes) == DEFAULT_RECIPES:
            recipes = usual_recipes(features=scene.has_features)
        chosen = {NONE if one is None else repr(one): one for one in (None, *parse_all(recipes))}
        for calibrator in filter(None, chosen.values()):
            check_train(calibrator)
        files = calibrators
        if not isinstance(files, Mapping):
            files = {f"calibrator {place}": one for place, one in enumerate(files, start=1)}
        asked: dict[str, Any] = {"bins": bins, "resamples": resamples, "seed": seed}
        with scene.calmly():
            found = compare(scene.fit, scene.samples, list(chosen), scene.head, mode=mode, **asked)
            rows = list(found.rows)
            for file, calibrator in track("scoring calibrators", list(files.items())):
                started = perf_counter()
                scores = evaluate(scene.samples, calibrator, scene.head, **asked)
                name, spent = f"{calibrator!r}{FROM}{file}", perf_counter() - started
                rows.append(Row(name, calibrator, scores, spent))
            name = pack.path.resolve().name
            settings = {"pack": name, "fit_split": fit, "test_split": test, **found.settings}
            against = (None, *(0 for _ in rows[1:]))
            found = replace(found, rows=tuple(rows), against=against, settings=settings)
            sources = [""] * (len(found) - len(files)) + list(files)
            pairs = list(zip(found, sources, strict=True))
            entries = tuple(
                Entry.of(scene, row, file) for row, file in track("looking closely", pairs)
            )
            seen, unknown = origins(scene, found, len(files))
            place = Place(
                str(pack.path),
                fit,
                test,
                scene.fit_rows,
                files=tuple((one.recipe, one.file) for one in entries if one.file),
                changed=tuple(len(one.changed.rows) for one in entries),
                seen=seen,
                unknown=unknown,
            )
            summary, units, values = Summary.of(Facts(found, place)), None, None
            if scene.shows_features:
                units = analysis.UnitMeans.of(scene.seen, groups=scene.groups, seed=seed)
                kind: Any = {"groups": scene.groups, "signed": units.absolute}
                values = analysis.FeatureValues.of(scene.seen, **kind)
            manifest = sha256(pack.path / MANIFEST)  # it holds the sha256 of every other file
            typed = shlex.quote(str(pack.path))
            return cls(
                scene,
                found,
                summary,
                entries,
                (entries[0].classes, entries[summary.pick or 0].classes),
                units,
                values,
                sweeps_of(scene, found, mode),
                scene.notes,
                {
                    "pack": {**pack.summary(), "path": str(pack.path), "sha256": manifest},
                    "command": command or f"featcal report {typed} -o report.html",
                    "fitted_on": {"split": fit, "rows": scene.fit_rows},
                    "scored_on": {"split": test, "rows": scene.test_rows},
                    "settings": settings,
                    "confident": SURE,
                },
            )

    @property
    def pick(self) -> int:
        """The entry the page shows as "after": the recommended one, else the last fair one."""
        if self.summary.pick is not None:
            return self.summary.pick
        return max(set(range(len(self.entries))) - set(self.summary.seen))

    def as_json(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        rows = self.comparison.as_json()["rows"]
        entries = [
            {**entry.as_json(), "differences": row["differences"]}
            for entry, row in zip(self.entries, rows, strict=True)
        ]
        before, after = self.classes
        return {
            "format": FORMAT,
            "version": VERSION,
            "about": self.about,
            "summary": self.summary.as_json(),
            "notes": list(self.notes),
            "recipes": entries,
            "groups": self.scene.groups.as_json(),
            "units": None if self.units is None else self.units.as_json(),
            "values": None if self.values is None else self.values.as_json(),
            "classes": {
                "before": {**before.as_json(), "bins": filled_bins(before)},
                "after": {**after.as_json(), "bins": filled_bins(after)},
            },
            "sweeps": [sweep.as_json() for sweep in self.sweeps],
        }


LARGE = 2**27  # features of all rows: half a gigabyte
AFFORDED = 2**28  # logits of one sweep, each scored with every recipe: some seconds on one core
SWEPT = 10_000  # rows of a split that a sweep looks at: its curves are some pixels wide
FEWEST = 20  # thresholds of a grid; with fewer a curve would have corners


@final
@dataclass(frozen=True, eq=False)
class Scene:
    """The rows a page is about: what is fitted on, what is scored. They are looked at many times.

    Attributes:
        pack: on disk.
        splits: the names of the split that is fitted on, and of the one that is scored.
        head: the classifier's last layer, None where logits are stored alone.
        fit: the rows to fit on, in memory where they fit.
        seen: the rows that are scored, likewise, with the network's own logits.
        groups: the confident rows among them.
        bins: of the diagrams.
        drawn: resamples of the scored rows, behind the bands.
    """

    pack: Pack
    splits: tuple[str, str]
    head: Head | None
    fit: Data
    seen: Rows
    groups: analysis.Groups
    bins: int
    drawn: Resamples

    @classmethod
    def of(cls, pack: Pack, fit: str, test: str, *, bins: int, seed: int) -> Scene:
        """Looks at all rows of the scored split once."""
        head, own = pack.head, pack.split(fit)
        width = (pack.manifest.features or 0) + pack.manifest.classes
        fits = 4 * own.rows * width <= held_bytes()
        with reading(pack.split(test), head) as rows:
            seen = rows.kept()
        groups = analysis.Groups.of_data(seen, confidence=SURE)
        numbers = [batch.groups for batch in seen.data if batch.groups is not None]
        samples = torch.cat(numbers) if numbers else None
        drawn = Resamples.draw(len(groups), BANDS, seed, samples)
        held = list(as_data(own, head)) if fits else own
        return cls(pack, (fit, test), head, held, seen, groups, bins, drawn)

    def calmly(self) -> AbstractContextManager[None]:
        """One thread for a block, unless the rows are so many that more would help.

        A page is thousands of small products and sums: where others use the machine too, threads
        would wait for each other most of the time.
        """
        width = self.pack.manifest.features or self.pack.manifest.classes
        return calm((self.fit_rows + self.test_rows) * width, LARGE)

    @property
    def fit_rows(self) -> int:
        """How many rows are fitted on."""
        return self.pack.split(self.splits[0]).rows

    @property
    def test_rows(self) -> int:
        """How many rows are scored."""
        return self.pack.split(self.splits[1]).rows

    @property
    def points(self) -> int:
        """Thresholds of a sweep: fewer where each has very many logits, as on ImageNet.

        The fitted thresholds are among them however few they are.
        """
        rows = min(self.fit_rows, SWEPT) + min(self.test_rows, SWEPT)
        logits = rows * self.pack.manifest.classes
        return min(max(AFFORDED // max(logits, 1), FEWEST), POINTS)

    @cached_property
    def swept(self) -> tuple[Data, Rows | Data]:
        """What a sweep looks at: about `SWEPT` rows of each split, chosen by their content."""

        def some(data: Data, rows: int) -> list[Batch]:
            limit = SWEPT * 2**32 // rows
            parts = (b.rows(row_hash(features_of(b)) < limit) for b in as_data(data, self.head))
            return [part for part in parts if len(part)]

        fit, seen = self.fit, self.seen.data
        return (
            some(fit, self.fit_rows) if self.fit_rows > SWEPT else fit,
            some(seen, self.test_rows) if self.test_rows > SWEPT else self.seen,
        )

    @property
    def has_features(self) -> bool:
        """Whether recipes that work on features can be fitted."""
        return self.head is not None and self.pack.manifest.features is not None

    @property
    def several(self) -> bool:
        """Whether samples have several labels, and rows are the answers about each."""
        return self.pack.manifest.several

    @property
    def shows_features(self) -> bool:
        """Whether there are figures of features; one of an answer would be that of the sample."""
        return self.has_features and not self.several

    @property
    def notes(self) -> tuple[str, ...]:
        """What is missing, and why."""
        if self.shows_features:
            return ()
        return (words().several_labels if self.several else words().no_features,)

    @property
    def samples(self) -> Data:
        """What is scored, as the network gives it."""
        return (self.seen.samples or self.seen).data

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """What is predicted of a row."""
        return ("no", "yes") if self.several else self.pack.manifest.class_names


@final
@dataclass(frozen=True, eq=False)
class Entry:
    """One recipe on the scored rows.

    Attributes:
        row: what was fitted and how it scores.
        file: where it was read from, "" where it was fitted for the page.
        diagram: its reliability, with bands.
        counts: confident answers before and after.
        entropy: of confident wrong and right rows, before and after.
        changed: predictions that became others.
        classes: calibration by predicted class.
    """

    row: Row
    file: str
    diagram: analysis.BandedDiagram
    counts: analysis.ConfidentCounts
    entropy: analysis.EntropyGrowth
    changed: analysis.ChangedPredictions
    classes: analysis.GroupCalibration

    @classmethod
    def of(cls, scene: Scene, row: Row, file: str = "") -> Entry:
        """Looks at the scored rows through a fitted recipe."""
        names, bins = scene.pack.manifest.class_names, scene.bins
        by_label: dict[str, Any] = {}
        if scene.several:
            labels = torch.arange(len(scene.groups)) % scene.pack.manifest.classes
            by_label = {"groups": labels, "by": "label"}
        with reading(scene.seen, calibrator=row.calibrator) as rows:
            return cls(
                row,
                file,
                analysis.BandedDiagram.of_claims(claims(rows)[1], scene.drawn, bins, row.recipe),
                analysis.ConfidentCounts.of_rows(rows),
                analysis.EntropyGrowth.of_rows(rows, groups=scene.groups),
                analysis.ChangedPredictions.of_rows(rows),
                analysis.GroupCalibration.of_rows(rows, names=names, bins=bins, **by_label),
            )

    @property
    def recipe(self) -> str:
        """Its text."""
        return self.row.recipe

    @property
    def fitted(self) -> str:
        """The fitted values in a few characters."""
        return fitted_text(self.row.reports)

    def as_json(self) -> dict[str, Any]:
        """The numbers of a row of `featcal compare --json`, and the analyses beside them."""
        return {
            **self.row.as_json(),
            "in_words": named(self.recipe),
            "file": self.file or None,
            "fitted": self.fitted,
            "diagram": self.diagram.as_json(),
            "counts": self.counts.as_json(),
            "entropy": self.entropy.as_json(),
            "changed": self.changed.as_json(),
        }


def filled_bins(found: analysis.GroupCalibration) -> list[list[list[float]]]:
    """Of each group the bins that have rows: place, rows, summed confidence, right rows."""
    return [
        [
            [place, int(rows), round(said, 3), int(right)]
            for place, (rows, said, right) in enumerate(sums.T.tolist())
            if rows
        ]
        for sums in found.sums
    ]


def check_splits(pack: Pack, fit: str, test: str) -> None:
    """Refuses to score the rows that are fitted on, and splits that are not there."""
    if fit == test:
        raise InputError(f"fit and test are both {fit!r}: score on rows that were not fitted on")
    for name in (fit, test):
        try:
            pack.split(name)
        except InputError as error:
            if len(pack.splits) > 1:
                raise
            (only,) = pack.splits
            option = "" if only == "val" else f" --fit-split {only}"
            command = f"featcal compare {shlex.quote(str(pack.path))}{option} --folds 5"
            raise InputError(
                f'{error}; a page needs a second split, to score on, and "{command}" does without'
            ) from error


def check_train(calibrator: Calibrator) -> None:
    """Refuses a recipe that measures distance to training rows, which a page is not given."""
    if calibrator.needs_train:
        raise InputError(
            f"{calibrator!r} measures distance to rows the network was trained on, and a page is "
            "not given any: score it with featcal compare --train-split, or fit it beforehand"
        )


# Of a loss: as much as another number of threads moves a mean of float32 logits, and a millionth of
# what other rows would.
SAME = 1e-7


def origins(scene: Scene, found: Comparison, files: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Places of calibrators from files that have seen the scored rows, and of those nobody knows.

    A report holds how many rows a fit was given and their loss before it: other rows that agree in
    both are not met by accident.

    Args:
        scene: the rows.
        found: the comparison, whose last rows are those of the files.
        files: how many there are.
    """

    def fitted_on(row: Row, raw: Scores) -> bool:
        return any(
            report.rows == raw.samples
            and math.isclose(
                report.loss_before, raw.metrics.get(report.loss, math.nan), rel_tol=SAME
            )
            for report in row.reports
        )

    if not files:
        return (), ()
    raw = evaluate(scene.fit, None, scene.head, bins=scene.bins)
    places = range(len(found) - files, len(found))
    seen = tuple(place for place in places if fitted_on(found[place], found[0].scores))
    known = {*seen, *(place for place in places if fitted_on(found[place], raw))}
    return seen, tuple(place for place in places if place not in known)


Clipped = tuple[str | None, float]  # what comes after a clip, and where a fit has put it


def clipped(calibrator: Calibrator | None) -> tuple[Clipped | None, Calibrator | None]:
    """What a sweep needs to know of a recipe that begins with a clip, or why it has no sweep.

    That is a step behind it that cannot be refitted from logits, or not sixty times.
    """
    steps = [] if calibrator is None else calibrator.steps_in_order()
    if not steps or not isinstance(steps[0], FeatureClip):
        return None, None
    for step in steps[1:]:
        if step.needs_features or step.needs_train or step.quick is not None:
            return None, step
    return (" | ".join(map(repr, steps[1:])) or None, float(steps[0].threshold)), None


def sweeps_of(scene: Scene, rows: Iterable[Row], mode: Mode) -> tuple[analysis.ClipSweep, ...]:
    """What every threshold would do: for clip alone, with temperature, and for each row it suits.

    Args:
        scene: the scored rows.
        rows: fitted recipes; those that begin with a clip tell where it ended, and what follows.
        mode: how they were fitted.
    """
    if not scene.shows_features:
        return ()
    given = {row.recipe: clipped(row.calibrator)[0] for row in rows}
    known = {recipe: one for recipe, one in given.items() if one is not None}
    for name in {"clip", WARM} - known.keys():
        one = clipped(fit_quietly(parse(name), scene.fit, scene.head, mode))[0]
        assert one is not None
        known[name] = one
    first = {name: known.pop(name) for name in ("clip", WARM)}
    return sweep(scene, {**first, **known})


def sweep(scene: Scene, recipes: Mapping[str, Clipped]) -> tuple[analysis.ClipSweep, ...]:
    """A sweep under the name of each recipe, all over one grid."""
    tails, thresholds = zip(*recipes.values(), strict=True)
    found = analysis.ClipSweep.several(
        *scene.swept,
        scene.head,
        thens=tails,
        fitted=thresholds,
        points=scene.points,
        confidence=SURE,
        bins=scene.bins,
    )
    # The curves know no arguments of a clip; the threshold that its fit chose is its own.
    return tuple(replace(one, recipe=name) for one, name in zip(found, recipes, strict=True))
