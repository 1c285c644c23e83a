"""What every clipping threshold c would do: calibration, accuracy and entropy along a grid of c.

All numbers of one c come from one product of the head with the clipped features; later steps of a
recipe are refitted on val for each c. The best c is the one with the lowest loss on val: test is
scored everywhere and chosen by nowhere.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, final

import torch
from torch import Tensor

from featcal.analysis import sweep_drawing
from featcal.analysis.base import Analysis, all_axes
from featcal.analysis.groups import CONFIDENCE, Groups
from featcal.analysis.reading import TEST, VAL, Source, opened, reading
from featcal.analysis.sweep_grid import checked_threshold, threshold_grid
from featcal.analysis.sweep_passes import sweep_test, sweep_val
from featcal.analysis.sweep_scores import SweepScores
from featcal.core.batch import Batch, Data, Head
from featcal.core.calibrator import Calibrator
from featcal.core.errors import CalibrationWarning, InputError
from featcal.core.spec import parse
from featcal.data import Pack
from featcal.methods.clip import FeatureClip
from featcal.metrics.inputs import checked_bins

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from featcal.analysis.base import Panels

POINTS = 60
WHAT = "a sweep of thresholds"
ROUNDING = 1e-7  # a smaller gain over c = inf is rounding, as in a fit

Criterion = Literal["nll", "ece"]


@final
@dataclass(frozen=True, eq=False)
class ClipSweep(Analysis):
    """Scores of val and test at t thresholds, ascending; the last is infinite and clips nothing.

    Attributes:
        recipe: "clip", or with its tail, such as "clip | temperature".
        thresholds: (t,) float64, each as float32 holds it.
        values: what the tail learned at each threshold, such as {"temperature": 1.2}.
        val: the split every choice is made on.
        test: the split that is only scored.
        fitted: the place of the threshold that a fit of the recipe on val gives.
        best: the place of the lowest criterion on val; infinite unless a threshold is truly lower.
        criterion: "nll" or "ece".
    """

    size: ClassVar[tuple[float, float]] = (7.2, 5.0)

    recipe: str
    thresholds: Tensor = field(repr=False)
    values: tuple[dict[str, Any], ...] = field(repr=False)
    val: SweepScores = field(repr=False)
    test: SweepScores = field(repr=False)
    fitted: int
    best: int
    criterion: Criterion

    @classmethod
    def of(
        cls,
        val: Source,
        test: Source | None = None,
        head: Head | None = None,
        *,
        splits: tuple[str, str] = (VAL, TEST),
        then: str | None = None,
        thresholds: Sequence[float] | None = None,
        fitted: float | None = None,
        points: int = POINTS,
        criterion: Criterion = "nll",
        confidence: float = CONFIDENCE,
        bins: int = 15,
    ) -> ClipSweep:
        """Sweeps the threshold.

        Args:
            val: a pack, or labelled rows with features, on which all choices are made.
            test: other such rows; those of the same pack by default.
            head: the classifier's last layer; a pack has its own.
            splits: of a pack: where choices are made, and what is scored.
            then: the recipe after the clip, of methods that need logits alone.
            thresholds: the grid; None for `points` of equal ratio, from the 80 % quantile of the
                features of val that are not 0 to the largest.
            fitted: the threshold of a fit that is known already; None to fit it here, on val.
            points: of the grid, infinity and the fitted threshold counted in.
            criterion: by which the best threshold is marked.
            confidence: of the groups whose entropy is measured.
            bins: of the reliability diagrams.
        """
        (found,) = cls.several(
            val,
            test,
            head,
            splits=splits,
            thens=[then],
            thresholds=thresholds,
            fitted=None if fitted is None else [fitted],
            points=points,
            criterion=criterion,
            confidence=confidence,
            bins=bins,
        )
        return found

    @classmethod
    def several(
        cls,
        val: Source,
        test: Source | None = None,
        head: Head | None = None,
        *,
        splits: tuple[str, str] = (VAL, TEST),
        thens: Sequence[str | None] = (None, "temperature"),
        thresholds: Sequence[float] | None = None,
        fitted: Sequence[float] | None = None,
        points: int = POINTS,
        criterion: Criterion = "nll",
        confidence: float = CONFIDENCE,
        bins: int = 15,
    ) -> tuple[ClipSweep, ...]:
        """A sweep for each of several tails, over one grid and for the price of one clip.

        A tail that comes twice, with thresholds of two fits, is swept once.

        Args:
            val: see `of`.
            test: see `of`.
            head: see `of`.
            splits: see `of`.
            thens: the recipes after the clip, None for none.
            thresholds: see `of`.
            fitted: the known threshold of each, in their order; None to fit them.
            points: see `of`.
            criterion: see `of`.
            confidence: see `of`.
            bins: see `of`.
        """
        tails = _checked_tails(thens)
        if criterion not in ("nll", "ece"):
            raise InputError(f"criterion is {criterion!r}: choose 'nll' or 'ece'")
        val, test, head = _both_splits(val, test, head, splits)
        with reading(val, head, features_for=WHAT):
            pass  # before a fit, whose messages are about fits
        own = [_fitted(val, head, tail) for tail in tails] if fitted is None else fitted
        known = [checked_threshold(c) for c in own]
        if len(known) != len(tails):
            raise InputError(f"fitted has {len(known)} entries for {len(tails)} recipes")
        with reading(val, head, features_for=WHAT) as rows:
            grid = threshold_grid(rows, thresholds, known, points)
            groups = Groups.of_rows(rows, confidence)
            distinct = {repr(tail): tail for tail in tails}
            recipes = list(distinct.values())
            scored, learned = sweep_val(rows, grid, recipes, groups, checked_bins(bins))
        with reading(test, head, features_for=WHAT) as rows:
            tested = sweep_test(rows, grid, learned, Groups.of_rows(rows, confidence), bins)
        values = [tuple(map(_learned, found)) for found in learned]
        swept = dict(zip(distinct, zip(values, scored, tested, strict=True), strict=True))
        at = torch.tensor(grid, dtype=torch.float64)
        return tuple(
            cls(
                "clip" if tail is None else f"clip | {tail!r}",
                at,
                *swept[repr(tail)],
                grid.index(c),
                _lowest(getattr(swept[repr(tail)][1], criterion)),
                criterion,
            )
            for tail, c in zip(tails, known, strict=True)
        )

    def numbers(self) -> dict[str, Any]:
        """Everything a page needs to let a person drag c."""
        return {
            "recipe": self.recipe,
            "criterion": self.criterion,
            "fitted": self.fitted,
            "best": self.best,
            "thresholds": self.thresholds.tolist(),
            "values": list(self.values),
            "val": self.val.as_json(),
            "test": self.test.as_json(),
        }

    def own_axes(self) -> Panels:
        """Four panels: ECE, NLL, accuracy, entropy."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=self.size, layout="constrained")
        return list(figure.subplots(2, 2, sharex=True).flat)

    def draw(self, ax: Panels) -> None:
        """ECE on one pair of axes; on several also NLL, accuracy and entropy, in this order."""
        sweep_drawing.draw_curves(self, all_axes(ax))

    def plot_trade(self, ax: Axes | None = None) -> ClipSweep:
        """ECE against accuracy on test, a point for each c and a star for no clipping."""
        return replace(self, axes=_Trade(self).plot(ax).axes)


@final
@dataclass(frozen=True, eq=False)
class _Trade(Analysis):
    """The same sweep in the paper's picture: ECE against accuracy."""

    sweep: ClipSweep

    def numbers(self) -> dict[str, Any]:
        return self.sweep.numbers()

    def draw(self, ax: Panels) -> None:
        sweep_drawing.draw_trade(self.sweep, ax)


def _both_splits(
    val: Source, test: Source | None, head: Head | None, splits: tuple[str, str]
) -> tuple[Batch | Data, Batch | Data, Head]:
    """What is chosen on and what is scored, of one pack or of two pieces of data."""
    if test is None:
        if not isinstance(val, Pack):
            raise InputError("test is None: pass rows that nothing was chosen on, or a whole pack")
        test = val
    rows, own = opened(val, head, splits[0])
    scored, _ = opened(test, own, splits[1])
    if own is None:
        raise InputError("head is None: a sweep needs the classifier's last layer, head=")
    return rows, scored, own


def _checked_tails(thens: Sequence[str | None]) -> list[Calibrator | None]:
    if isinstance(thens, str) or not thens:
        raise InputError(f"thens is {thens!r}: pass a list of one recipe or more, None for none")
    tails = [None if then is None else parse(then) for then in thens]
    for tail in tails:
        if tail is not None and (tail.needs_features or tail.needs_train):
            raise InputError(
                f"then is '{tail!r}', which needs features: a sweep refits methods that need "
                "logits alone, such as 'temperature'"
            )
    return tails


def _fitted(val: Batch | Data, head: Head, tail: Calibrator | None) -> float:
    """The threshold of the recipe, fitted as anyone would fit it."""
    clip = FeatureClip()
    recipe = clip if tail is None else clip | parse(repr(tail))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        recipe.fit(val, head)
    return float(clip.threshold)


def _learned(tail: Calibrator | None) -> dict[str, Any]:
    if tail is None or tail.report is None:
        return {}
    return {key: value for step in tail.report.steps for key, value in step.values.items()}


def _lowest(scores: Tensor) -> int:
    """The place of the lowest score; the last, which clips nothing, unless one is truly lower."""
    best, last = int(scores.argmin()), len(scores) - 1
    return best if float(scores[best]) < float(scores[last]) - ROUNDING else last
