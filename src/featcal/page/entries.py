"""Everything the page shows of one recipe, and how it is computed."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from featcal.analysis import (
    BandedDiagram,
    ChangedPredictions,
    ClipSweep,
    ConfidentCounts,
    EntropyGrowth,
    GroupCalibration,
    Groups,
)
from featcal.analysis.reading import reading
from featcal.analysis.sweep import POINTS
from featcal.core.batch import Batch, Data, Head, Through, raw_logits
from featcal.core.calibrator import Calibrator
from featcal.core.errors import CalibrationWarning, InputError
from featcal.core.threads import calm
from featcal.data import Pack, PackSplit
from featcal.methods.clip import FeatureClip
from featcal.metrics.predictions import top_label
from featcal.page.phrases import in_words
from featcal.report.fitted import fitted_text
from featcal.report.resample import Resamples
from featcal.report.rows import Row

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
