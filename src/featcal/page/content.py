"""What the page shows, computed once: numbers first, and the words that they allow."""

from __future__ import annotations

import math
import shlex
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, final

import torch
from torch import Tensor

from featcal.analysis import (
    BandedDiagram,
    ChangedPredictions,
    ClipSweep,
    ConfidentCounts,
    EntropyGrowth,
    FeatureValues,
    GroupCalibration,
    Groups,
    UnitMeans,
)
from featcal.analysis.base import reading
from featcal.analysis.sweep import POINTS
from featcal.core.batch import Batch, Data, Head, Through, raw_logits
from featcal.core.calibrator import Calibrator
from featcal.core.checks import CalibrationWarning, InputError
from featcal.core.progress import calm, track
from featcal.data import Pack, PackSplit
from featcal.data.manifest import MANIFEST
from featcal.data.pack import sha256
from featcal.methods.clip import FeatureClip
from featcal.metrics.inputs import top_label
from featcal.page.verdict import FROM, Place, Summary, in_words, summary
from featcal.report.bootstrap import Resamples, checked_resamples
from featcal.report.compare import (
    DEFAULT_RECIPES,
    NONE,
    RESAMPLES,
    Comparison,
    Row,
    compare,
    parse_all,
)
from featcal.report.scores import Scores, evaluate
from featcal.report.tables import fitted_text

# --- Everything the page shows of one recipe, and how it is computed.

SURE = 0.8  # the paper's level of a confident answer, in its entropy table and histograms
LARGE = 2**27  # features of all rows: half a gigabyte
AFFORDED = 2**28  # logits of one sweep, each scored with every recipe: some seconds on one core
FEWEST = 20  # thresholds of a grid; with fewer a curve would have corners
WARM = "clip | temperature"
BANDS = 400  # resamples behind a band; a band is drawn some pixels wide


@final
@dataclass(frozen=True, eq=False)
class Scene:
    """The rows a page is about: what is fitted on, what is scored.

    Attributes:
        pack: on disk.
        fit: the split that is fitted on.
        test: the split that is scored.
        head: the classifier's last layer, None where logits are stored alone.
        seen: the rows of the scored split, their logits kept: they are looked at many times.
        groups: the confident rows of the scored split.
        bins: of the diagrams.
        drawn: resamples of the scored rows, behind the bands.
    """

    pack: Pack
    fit: PackSplit
    test: PackSplit
    head: Head | None
    seen: Data
    groups: Groups
    bins: int
    drawn: Resamples

    @classmethod
    def of(cls, pack: Pack, fit: str, test: str, *, bins: int, seed: int) -> Scene:
        """Looks at all rows of the scored split once."""
        scored, head = pack.split(test), pack.head
        seen = scored if head is None else _with_logits(scored, head)
        groups = Groups.of_data(seen, head, SURE)
        drawn = Resamples.draw(len(groups), BANDS, seed)
        return cls(pack, pack.split(fit), scored, head, seen, groups, bins, drawn)

    def calmly(self) -> AbstractContextManager[None]:
        """One thread for a block, unless the rows are so many that more would help.

        A page is thousands of small products and sums: where others use the machine too, threads
        would wait for each other most of the time.
        """
        width = self.pack.manifest.features or self.pack.manifest.classes
        return calm((self.fit.rows + self.test.rows) * width, LARGE)

    @property
    def points(self) -> int:
        """Thresholds of a sweep: fewer where each has very many logits, as on ImageNet.

        The fitted thresholds are among them however few they are.
        """
        logits = (self.fit.rows + self.test.rows) * self.pack.manifest.classes
        return min(max(AFFORDED // max(logits, 1), FEWEST), POINTS)

    @property
    def has_features(self) -> bool:
        """Whether recipes that work on features can be fitted."""
        return self.head is not None and self.pack.manifest.features is not None

    @property
    def class_names(self) -> Sequence[str] | None:
        """Of the pack, where it has them."""
        return self.pack.manifest.class_names


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
    """

    row: Row
    file: str
    diagram: BandedDiagram
    counts: ConfidentCounts
    entropy: EntropyGrowth
    changed: ChangedPredictions

    @classmethod
    def of(cls, scene: Scene, row: Row, file: str = "") -> Entry:
        """Looks at the scored rows through a fitted recipe."""
        of = scene.seen, row.calibrator, scene.head
        sure, right = _top(scene, row.calibrator)
        look = {"bins": scene.bins, "title": row.recipe}
        return cls(
            row,
            file,
            BandedDiagram.of_pairs(sure, right, scene.drawn, **look),  # type: ignore[arg-type]
            ConfidentCounts.of(*of),
            EntropyGrowth.of(*of, groups=scene.groups),
            ChangedPredictions.of(*of),
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
            "in_words": in_words(self.recipe),
            "file": self.file or None,
            "fitted": self.fitted,
            "diagram": self.diagram.as_json(),
            "counts": self.counts.as_json(),
            "entropy": self.entropy.as_json(),
            "changed": self.changed.as_json(),
        }


def _with_logits(data: Data, head: Head) -> Data:
    def own(batch: Batch) -> Tensor:
        return raw_logits(batch, head)

    return Through(data, own)


def check_train(calibrator: Calibrator) -> None:
    """Refuses a recipe that measures distance to training rows, which a page is not given."""
    if calibrator.needs_train:
        raise InputError(
            f"{calibrator!r} measures distance to rows the network was trained on, and a page is "
            "not given any: score it with featcal compare --train-split, or fit it beforehand"
        )


def classes_of(scene: Scene, row: Row) -> GroupCalibration:
    """Calibration by predicted class."""
    names, calibrator = scene.class_names, row.calibrator
    return GroupCalibration.of(scene.seen, calibrator, scene.head, names=names, bins=scene.bins)


@final
@dataclass(frozen=True)
class Clipped:
    """A recipe that begins with a clip: what comes after it, and where a fit has put it."""

    tail: str | None
    threshold: float

    @classmethod
    def of(cls, calibrator: Calibrator | None) -> Clipped | None:
        """None where a sweep makes no sense."""
        steps = [] if calibrator is None else calibrator.steps_in_order()
        if not steps or not isinstance(steps[0], FeatureClip) or any(map(_dear, steps[1:])):
            return None
        return cls(" | ".join(map(repr, steps[1:])) or None, float(steps[0].threshold))


def why_no_sweep(calibrator: Calibrator | None) -> str:
    """Why the threshold explorer has no place for a recipe with a clip; "" where it has one."""
    steps = [] if calibrator is None else calibrator.steps_in_order()
    clips = [place for place, step in enumerate(steps) if isinstance(step, FeatureClip)]
    if not clips or Clipped.of(calibrator) is not None:
        return ""
    told = "The threshold explorer has no place for it: there "
    if clips[0] > 0:
        return f"{told}the clip comes first."
    dear = next(step for step in steps[1:] if _dear(step))
    why = "needs features" if dear.needs_features else "takes too long for that"
    return (
        f"{told}what follows the clip is fitted again at every threshold, from logits alone, and "
        f"{dear.name} {why}."
    )


def sweeps_of(scene: Scene, rows: Iterable[Row]) -> tuple[ClipSweep, ...]:
    """What every threshold would do: for clip alone, with temperature, and for each row it suits.

    Args:
        scene: the scored rows.
        rows: fitted recipes; those that begin with a clip tell where it ended, and what follows.
    """
    if not scene.has_features:
        return ()
    given = {row.recipe: Clipped.of(row.calibrator) for row in rows}
    known = {recipe: clipped for recipe, clipped in given.items() if clipped is not None}
    if "clip" not in known:
        known["clip"] = Clipped(None, _fitted_clip(scene))
    # Step by step a clip is fitted for itself, so that one threshold serves for every tail.
    known.setdefault(WARM, Clipped("temperature", known["clip"].threshold))
    first = {name: known.pop(name) for name in ("clip", WARM)}
    return sweep(scene, {**first, **known})


def _fitted_clip(scene: Scene) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        return float(FeatureClip().fit(scene.fit, scene.head).threshold)


def sweep(scene: Scene, recipes: Mapping[str, Clipped]) -> tuple[ClipSweep, ...]:
    """A sweep under the name of each recipe, all over one grid."""
    head = scene.head
    assert head is not None
    found = ClipSweep.several(
        scene.fit,
        scene.seen,
        head,
        thens=[one.tail for one in recipes.values()],
        fitted=[one.threshold for one in recipes.values()],
        points=scene.points,
        confidence=SURE,
        bins=scene.bins,
    )
    # The curves know no arguments of a clip; the threshold that its fit chose is its own.
    return tuple(replace(one, recipe=name) for one, name in zip(found, recipes, strict=True))


def _dear(step: Calibrator) -> bool:
    """Whether a step cannot be refitted from logits, or not sixty times."""
    return step.needs_features or step.needs_train or step.quick is not None


def _top(scene: Scene, calibrator: Calibrator | None) -> tuple[Tensor, Tensor]:
    """The confidence of every scored row, and whether its prediction is right."""
    with reading(scene.seen, scene.head, calibrator) as rows:
        tops = [
            top_label(logits=logits, labels=batch.labels)
            for batch, _, logits in rows.both(calibrator)
        ]
    return torch.cat([top.confidence for top in tops]), torch.cat([top.correct for top in tops])


# --- What rows a calibrator from a file was fitted on, as far as its own report tells.
#
# A report holds how many rows a fit was given and their loss before it: other rows that agree in
# both
# are not met by accident.

# Of a loss: as much as another number of threads moves a mean of float32 logits, and a millionth of
# what other rows would.
SAME = 1e-7


@final
@dataclass(frozen=True)
class Origins:
    """Places of calibrators from files.

    Attributes:
        seen: those that were fitted on the scored rows.
        unknown: those that were fitted neither on these nor on the fit split, or do not say.
    """

    seen: tuple[int, ...] = ()
    unknown: tuple[int, ...] = ()

    @classmethod
    def of(cls, scene: Scene, found: Comparison, files: Mapping[str, Calibrator]) -> Origins:
        """Looks at the reports of the last rows of a comparison, which are the files'."""
        places = range(len(found) - len(files), len(found))
        if not places:
            return cls()
        fitted_on = evaluate(scene.fit, None, scene.head, bins=scene.bins, resamples=0)
        seen = tuple(place for place in places if _is_of(found[place], found[0].scores))
        known = (*seen, *(place for place in places if _is_of(found[place], fitted_on)))
        return cls(seen, tuple(place for place in places if place not in known))


def _is_of(row: Row, raw: Scores) -> bool:
    """Whether the fit of a row began with these rows, by their number and their loss."""
    return any(
        report.rows == raw.n
        and math.isclose(report.loss_before, raw.metrics.get(report.loss, math.nan), rel_tol=SAME)
        for report in row.reports
    )


FORMAT, VERSION = "featcal.report", 1
NO_FEATURES = (
    "This pack holds logits alone, so recipes that work on features (clip among them), the figures "
    "of feature values and the threshold explorer are left out; collect features to have them."
)


@final
@dataclass(frozen=True, eq=False)
class Content:
    """Everything on the page.

    Attributes:
        scene: the rows it is about.
        comparison: all recipes, the network as it is first.
        summary: the verdict in words.
        entries: one a row of the comparison.
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
    classes: tuple[GroupCalibration, GroupCalibration]
    units: UnitMeans | None
    values: FeatureValues | None
    sweeps: tuple[ClipSweep, ...]
    notes: tuple[str, ...]
    about: dict[str, Any]

    @classmethod
    def of(
        cls,
        pack: Pack,
        recipes: Sequence[str] = DEFAULT_RECIPES,
        calibrators: Mapping[str, Calibrator] | Sequence[Calibrator] = (),
        *,
        fit: str = "val",
        test: str = "test",
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
            bins: of the binned metrics and the diagrams.
            resamples: behind the intervals, 100 to 10,000.
            seed: of all that is drawn.
            command: what was typed, for the reader to repeat.
        """
        check_splits(fit, test)
        if not checked_resamples(resamples):
            raise InputError("resamples is 0: a page that says what is chance needs some, as 1000")
        scene = Scene.of(pack, fit, test, bins=bins, seed=seed)
        chosen, notes = _chosen(recipes, scene)
        files = _named(calibrators)
        asked = {"bins": bins, "resamples": resamples, "seed": seed}
        with scene.calmly():
            found = compare(scene.fit, scene.test, chosen, scene.head, **asked)  # type: ignore[arg-type]
            found = _with_files(found, files, scene, asked)
            return cls._looking(scene, found, files, notes, command)

    @classmethod
    def _looking(
        cls,
        scene: Scene,
        found: Comparison,
        files: Mapping[str, Calibrator],
        notes: tuple[str, ...],
        command: str,
    ) -> Content:
        """Looks closely at what was fitted."""
        looked = _entries(scene, found, files)
        where = str(scene.pack.path), scene.fit.name, scene.test.name, scene.fit.rows
        changed = tuple(len(entry.changed.rows) for entry in looked)
        origins = Origins.of(scene, found, files)
        place = Place(
            *where, tuple(files_of(looked)), changed, seen=origins.seen, unknown=origins.unknown
        )
        words = summary(found, place)
        after = found[0 if words.pick is None else words.pick]
        units, values = _features(scene, found.settings["seed"])
        return cls(
            scene,
            found,
            words,
            looked,
            (classes_of(scene, found[0]), classes_of(scene, after)),
            units,
            values,
            sweeps_of(scene, found),
            notes,
            _about(scene, found, command),
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
            "classes": {"before": before.as_json(), "after": after.as_json()},
            "sweeps": [sweep.as_json() for sweep in self.sweeps],
        }


def check_splits(fit: str, test: str) -> None:
    """Refuses to score the rows that are fitted on."""
    if fit == test:
        raise InputError(f"fit and test are both {fit!r}: score on rows that were not fitted on")


def _chosen(recipes: Sequence[str], scene: Scene) -> tuple[list[str], tuple[str, ...]]:
    """The recipes with "none" first and none twice, and what had to be left out."""
    parsed = [(NONE, None), *zip(recipes, parse_all(recipes), strict=True)]
    usable = {NONE if one is None else repr(one): one for _, one in parsed}
    for calibrator in filter(None, usable.values()):
        check_train(calibrator)
    if scene.has_features:
        return list(usable), ()
    if tuple(recipes) == DEFAULT_RECIPES:
        usable = {
            name: one for name, one in usable.items() if one is None or not one.needs_features
        }
    return list(usable), (NO_FEATURES,)


def _named(calibrators: Mapping[str, Calibrator] | Sequence[Calibrator]) -> dict[str, Calibrator]:
    """File -> calibrator; numbered where there are no files."""
    if isinstance(calibrators, Mapping):
        return dict(calibrators)
    return {f"calibrator {place}": one for place, one in enumerate(calibrators, start=1)}


def _with_files(
    found: Comparison, files: Mapping[str, Calibrator], scene: Scene, asked: dict[str, Any]
) -> Comparison:
    """The comparison with a row for every calibrator that was fitted beforehand."""
    rows = list(found.rows)
    for file, calibrator in track("scoring calibrators", list(files.items())):
        started = perf_counter()
        scores = evaluate(scene.test, calibrator, scene.head, **asked)
        name = f"{calibrator!r}{FROM}{file}"
        rows.append(Row(name, calibrator, scores, perf_counter() - started))
    against = (None, *(0 for _ in rows[1:]))
    where = {"pack": scene.pack.path.resolve().name, "fit_split": scene.fit.name}
    settings = {**where, "test_split": scene.test.name, **found.settings}
    return replace(found, rows=tuple(rows), against=against, settings=settings)


def _entries(scene: Scene, found: Comparison, files: Mapping[str, Calibrator]) -> tuple[Entry, ...]:
    sources = [""] * (len(found) - len(files)) + list(files)
    pairs = list(zip(found, sources, strict=True))
    return tuple(Entry.of(scene, row, file) for row, file in track("looking closely", pairs))


def _features(scene: Scene, seed: int) -> tuple[UnitMeans | None, FeatureValues | None]:
    if not scene.has_features:
        return None, None
    of, groups = (scene.test, scene.head), scene.groups
    units = UnitMeans.of(*of, groups=groups, seed=seed)
    return units, FeatureValues.of(*of, groups=groups, signed=units.absolute)


def files_of(entries: Sequence[Entry]) -> list[tuple[str, str]]:
    """Recipe and file of every calibrator that was fitted beforehand."""
    return [(entry.recipe, entry.file) for entry in entries if entry.file]


def _about(scene: Scene, found: Comparison, command: str) -> dict[str, Any]:
    """Where the numbers come from: enough to check them and to make them again."""
    pack = scene.pack
    manifest = pack.path / MANIFEST
    return {
        "pack": {
            **pack.summary(),
            "path": str(pack.path),
            "sha256": sha256(manifest),  # it holds the sha256 of every other file
        },
        "command": command or f"featcal report {shlex.quote(str(pack.path))} -o report.html",
        "fitted_on": {"split": scene.fit.name, "rows": scene.fit.rows},
        "scored_on": {"split": scene.test.name, "rows": scene.test.rows},
        "settings": found.settings,
        "confident": SURE,
    }
