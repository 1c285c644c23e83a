"""What the page shows, computed once: numbers first, and the words that they allow."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, final

from featcal.analysis import ClipSweep, FeatureValues, GroupCalibration, UnitMeans
from featcal.core.calibrator import Calibrator
from featcal.core.errors import InputError
from featcal.core.progress import track
from featcal.data import Pack
from featcal.data.manifest import MANIFEST
from featcal.data.pack import sha256
from featcal.page.advice import Place
from featcal.page.entries import SURE, Entry, Scene, check_train, classes_of, sweeps_of
from featcal.page.origins import Origins
from featcal.page.phrases import FROM
from featcal.page.words import Summary, summary
from featcal.report.comparison import DEFAULT_RECIPES, NONE, RESAMPLES, compare, parse_all
from featcal.report.resample import checked_resamples
from featcal.report.rows import Comparison, Row
from featcal.report.scores import evaluate

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
