"""What every clipping threshold c would do: calibration, accuracy and entropy along a grid of c.

All numbers of one c come from one product of the head with the clipped features; later steps of a
recipe are refitted on val for each c. The best c is the one with the lowest loss on val: test is
scored everywhere and chosen by nowhere.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from featcal.analysis.base import (
    CONFIDENCE,
    HCE,
    LCE,
    TEST,
    VAL,
    Analysis,
    Groups,
    Magnitudes,
    Rows,
    Source,
    all_axes,
    entropies,
    first_axes,
    ink,
    opened,
    reading,
)
from featcal.core.batch import Batch, Data, Head
from featcal.core.calibrator import Calibrator
from featcal.core.checks import CalibrationWarning, InputError
from featcal.core.progress import track
from featcal.core.rows import bin_sums, predicted
from featcal.core.text import parse
from featcal.data import Pack
from featcal.heads.head import head_logits, linear_view
from featcal.methods.clip import FeatureClip
from featcal.metrics.bins import Bins
from featcal.metrics.inputs import checked_bins
from featcal.report.diagram import BLUE, DASHES, GREY, TEXT, VERMILLION

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from featcal.analysis.base import Panels


# --- Which thresholds to sweep: from where clipping breaks a network to where it does nothing.

LOW = 0.8  # of the features that are not 0 lie below the lowest c


def threshold_grid(
    rows: Rows, thresholds: Sequence[float] | None, fitted: Sequence[float], points: int
) -> list[float]:
    """Ascending thresholds as float32 holds them, the fitted ones among them, infinity last.

    Args:
        rows: whose features say where thresholds lie, when none are given.
        thresholds: the grid, or None.
        fitted: thresholds that must be in it.
        points: of a grid that is not given.
    """
    if thresholds is None:
        thresholds = _spread(rows, fitted, points)
    return sorted({*map(checked_threshold, thresholds), *fitted, math.inf})


def checked_threshold(threshold: float) -> float:
    """A threshold, rounded to float32 as a clip would hold it."""
    found = float(np.float32(threshold))
    if not found > 0:
        raise InputError(f"a threshold is {threshold!r}: every threshold must be above 0")
    return found


def _spread(rows: Rows, fitted: Sequence[float], points: int) -> list[float]:
    """Points of equal ratio, with room for the fitted ones on their left."""
    if isinstance(points, bool) or not isinstance(points, int) or points < 3:
        raise InputError(f"points is {points!r}: pass an integer of at least 3")
    sizes = Magnitudes.none()
    for (features,) in rows.features():
        sizes += Magnitudes.of(features)
    low, high = (sizes.quantile(share, zeros=False) for share in (LOW, 1.0))
    if math.isnan(low):  # every feature is 0: nothing to clip
        return []
    low = min(low, *(c / 2 for c in fitted))
    count = max(points - 1 - len(set(fitted) - {math.inf}), 2)
    return [float(c) for c in np.geomspace(low, max(high, 2 * low), count)]


# --- The logits at every threshold of a linear head, for little more than one product of the
# head.
#
# From one threshold to the next lower one, all units above both move the logits together, along a
# slope W sign(x); a unit between the two begins to move. Every unit begins once, so that a whole
# grid
# costs what the few units above its lowest threshold cost, not a product a threshold.

MANY = 256  # classes; with fewer, products a threshold are as quick and round less


def directions(head: Head, features: Tensor, own: Tensor) -> Tensor | None:
    """(d, k): what each unit adds to the logits; None where products a threshold serve better."""
    layer = linear_view(head)
    if layer is None or own.shape[1] < MANY or features.dtype != own.dtype:
        return None
    weight = layer.weight.detach()
    return weight.T.contiguous() if weight.dtype == own.dtype else None


def logits_along(
    features: Tensor, own: Tensor, thresholds: Sequence[float], weights: Tensor
) -> Tensor:
    """(t, n, k): the logits at every threshold.

    Args:
        features: (n, d).
        own: (n, k) logits of the features as they are.
        thresholds: ascending.
        weights: (d, k) of the head.
    """
    found = own.new_empty(len(thresholds), *own.shape)
    row, unit = (features.abs() > thresholds[0]).nonzero(as_tuple=True)
    size, sign = features[row, unit].abs(), features[row, unit].sign()
    grid = torch.tensor(thresholds, dtype=size.dtype, device=size.device)
    begins = torch.searchsorted(grid, size) - 1  # the highest threshold that clips the unit
    order = begins.argsort(stable=True)  # rows and units stay in order, as sparse products need
    parts = torch.split(order, torch.bincount(begins, minlength=len(grid)).tolist())
    logits, slope, above = own, torch.zeros_like(own), math.inf
    for place in reversed(range(len(grid))):
        c, part = thresholds[place], parts[place]
        if math.isfinite(above):  # nothing is above infinity
            logits = torch.add(logits, slope, alpha=c - above)
        if len(part):
            where = torch.stack([row[part], unit[part]])
            logits = _plus(logits, where, sign[part] * (c - size[part]), weights)
            slope = _plus(slope, where, sign[part], weights)
        found[place], above = logits, c
    return found


def _plus(logits: Tensor, where: Tensor, amounts: Tensor, weights: Tensor) -> Tensor:
    """The logits with some units changed by some amounts."""
    shape = len(logits), len(weights)
    # In range and sorted by construction: nonzero() gave the places.
    with torch.sparse.check_sparse_tensor_invariants(enable=False):  # type: ignore[no-untyped-call]
        few = torch.sparse_coo_tensor(where, amounts, shape, is_coalesced=True)
    moved: Tensor = torch.sparse.addmm(logits, few, weights)
    return moved


# --- What a sweep keeps of one split: a few sums for every threshold.


@final
@dataclass(frozen=True, eq=False)
class SweepScores:
    """Scores of one split at t thresholds; float64.

    Attributes:
        rows: of the split.
        groups: how many of them are HCE and LCE, by the unclipped logits.
        sums: (t, 3, m) rows, summed confidence and right rows in m bins of the confidence.
        nll: (t,) mean negative log-likelihood.
        entropy: (t, 2) mean softmax entropy of HCE and of LCE rows, NaN for a group without rows.
    """

    rows: int
    groups: tuple[int, int]
    sums: Tensor
    nll: Tensor
    entropy: Tensor

    @property
    def ece(self) -> Tensor:
        """(t,) expected calibration error."""
        return (self.sums[:, 1] - self.sums[:, 2]).abs().sum(1) / self.rows

    @property
    def accuracy(self) -> Tensor:
        """(t,) the share of right rows."""
        return self.sums[:, 2].sum(1) / self.rows

    @property
    def confidence(self) -> Tensor:
        """(t,) the mean confidence."""
        return self.sums[:, 1].sum(1) / self.rows

    def bins(self, place: int) -> Bins:
        """The bins at one threshold, for its reliability diagram."""
        return Bins(*self.sums[place])

    def as_json(self) -> dict[str, Any]:
        """One list a column; per threshold and bin three numbers, from which all can be drawn."""
        count, confidence, correct = self.sums.unbind(1)
        names = ("ece", "nll", "accuracy", "confidence")
        wrong, right = self.entropy.T
        return {
            "rows": self.rows,
            "hce": self.groups[0],
            "lce": self.groups[1],
            **{name: _rounded(getattr(self, name), 7) for name in names},
            "entropy": {"hce": _rounded(wrong, 7), "lce": _rounded(right, 7)},
            "bins": {
                "count": count.long().tolist(),
                "confidence": [_rounded(row, 4) for row in confidence],
                "correct": correct.long().tolist(),
            },
        }


def _rounded(values: Tensor, digits: int) -> list[float]:
    return [round(value, digits) for value in values.tolist()]


@final
class Tally:
    """Sums for t thresholds while rows come in."""

    def __init__(self, thresholds: int, bins: int) -> None:
        self.bins = torch.zeros(thresholds, 3, bins, dtype=torch.float64)
        self.nll = torch.zeros(thresholds, dtype=torch.float64)
        self.entropy = torch.zeros(thresholds, 2, dtype=torch.float64)

    def add(self, place: int, logits: Tensor, labels: Tensor, masks: Sequence[Tensor]) -> None:
        """Adds rows at one threshold.

        Args:
            place: of the threshold.
            logits: (n, k) of the rows.
            labels: (n,).
            masks: which of the rows are HCE, and which are LCE.
        """
        sure, right = logits.softmax(1).amax(1), predicted(logits) == labels
        self.bins[place] += bin_sums(sure, right, self.bins.shape[2]).cpu()
        losses = F.cross_entropy(logits, labels, reduction="none")
        self.nll[place] += losses.sum(dtype=torch.float64).cpu()
        for group, mask in enumerate(masks):
            self.entropy[place, group] += entropies(logits[mask]).sum().cpu()

    def scores(self, rows: int, groups: tuple[int, int]) -> SweepScores:
        """The scores, once all rows are in."""
        sizes = torch.tensor(groups, dtype=torch.float64)
        return SweepScores(rows, groups, self.bins, self.nll / rows, self.entropy / sizes)


# --- The passes of a sweep: every threshold while a block of rows is in the cache.

BLOCK = 2**18  # numbers of a block of rows: it stays in the cache for all thresholds
PART = 2**25  # logits of all thresholds that are held at once,
KEEP = 2**27  # and where all rows must be there: 512 MiB


def _clipped(rows: Rows, thresholds: Sequence[float]) -> Iterator[tuple[Tensor, ...]]:
    """The labels of some rows, and their logits (n, k) at every threshold."""
    head = rows.head
    assert head is not None
    step = max(PART // (len(thresholds) * rows.facts.classes), 1)
    for batch, own in rows:
        assert batch.features is not None
        for start in range(0, len(batch), step):
            part = slice(start, start + step)
            yield batch.labels[part], *_logits(batch.features[part], own[part], thresholds, head)


def _logits(features: Tensor, own: Tensor, thresholds: Sequence[float], head: Head) -> Tensor:
    """(t, n, k): the logits at every threshold; the network's own where nothing is clipped.

    A linear head with many classes is followed from threshold to threshold. Else rows go through in
    blocks that stay in the cache, since clipping is a matter of memory more than of arithmetic, and
    in the order of their largest features, so that high thresholds leave whole blocks alone.
    """
    weights = directions(head, features, own)
    if weights is not None:
        return logits_along(features, own, thresholds, weights)
    found = own.new_empty(len(thresholds), *own.shape)
    order = features.abs().amax(1).argsort()
    step = max(BLOCK // max(features.shape[1], 1), 1)
    buffer = torch.empty_like(features[:step])
    for rows in torch.split(order, step):
        block, clipped = features[rows], buffer[: len(rows)]
        unclipped, peak = own[rows], float(block.abs().max())
        for place, c in enumerate(thresholds):
            if c < peak:
                logits = head_logits(torch.clamp(block, -c, c, out=clipped), head)
                found[place, rows] = logits.to(found.dtype)
            else:
                found[place, rows] = unclipped
    return found


def sweep_val(
    rows: Rows, grid: list[float], recipes: Sequence[Calibrator | None], groups: Groups, bins: int
) -> tuple[list[SweepScores], list[list[Calibrator | None]]]:
    """Val at every threshold with each recipe, and what each recipe has learned there.

    A fit needs all rows of one threshold at once: so many thresholds at a time as fit into memory.
    """
    tallies = [Tally(len(grid), bins) for _ in recipes]
    fitted: list[list[Calibrator | None]] = [[] for _ in recipes]
    step = max(KEEP // (rows.facts.rows * rows.facts.classes), 1)
    for first in track("sweep: val", range(0, len(grid), step)):
        views: list[list[Batch]] = [[] for _ in grid[first : first + step]]
        for labels, *logits in _clipped(rows, grid[first : first + step]):
            for view, z in zip(views, logits, strict=True):
                view.append(Batch(z, labels))
        for place, view in enumerate(views, start=first):
            for recipe, tally, learned in zip(recipes, tallies, fitted, strict=True):
                tail = None if recipe is None else _refitted(recipe, view)
                learned.append(tail)
                stream = ((_after(tail, batch), batch.labels) for batch in view)
                for (z, labels), masks in groups.along(stream):
                    tally.add(place, z, labels, masks)
    return [tally.scores(rows.facts.rows, groups.sizes) for tally in tallies], fitted


def sweep_test(
    rows: Rows,
    grid: list[float],
    fitted: Sequence[Sequence[Calibrator | None]],
    groups: Groups,
    bins: int,
) -> list[SweepScores]:
    """Test at every threshold with what each recipe has learned on val."""
    tallies = [Tally(len(grid), bins) for _ in fitted]
    for (labels, *logits), masks in groups.along(_clipped(rows, grid)):
        for tally, tails in zip(tallies, fitted, strict=True):
            for place, (tail, z) in enumerate(zip(tails, logits, strict=True)):
                tally.add(place, _after(tail, Batch(z, labels)), labels, masks)
    return [tally.scores(rows.facts.rows, groups.sizes) for tally in tallies]


def _refitted(tail: Calibrator, view: list[Batch]) -> Calibrator:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        return parse(repr(tail)).fit(view)


def _after(tail: Calibrator | None, batch: Batch) -> Tensor:
    assert batch.logits is not None
    logits = batch.logits
    if tail is None:
        return logits
    return tail(batch.features, lambda _: logits)  # type: ignore[no-any-return]


# --- How a sweep of thresholds looks.


def draw_curves(sweep: ClipSweep, panels: Sequence[Axes]) -> None:
    """ECE, NLL, accuracy and entropy over c, as many of them as there are panels."""
    splits = (("val", GREY, DASHES), ("test", BLUE, "-"))
    columns = (("ECE, %", "ece", 100), ("NLL, nats", "nll", 1), ("accuracy, %", "accuracy", 100))
    for ax, (title, name, scale) in zip(panels, columns, strict=False):
        pair = [getattr(split, name) * scale for split in (sweep.val, sweep.test)]
        _curves(ax, sweep, pair, splits)
        ax.set_ylabel(title)
    _name_marks(panels[0], sweep)
    if len(panels) > len(columns):
        wrong, right = sweep.test.groups
        names = f"HCE of test, {wrong:,} rows", f"LCE of test, {right:,} rows"
        looks = ((names[0], HCE[0], DASHES), (names[1], LCE[0], "-"))
        _curves(panels[3], sweep, list(sweep.test.entropy.T), looks)
        panels[3].set_ylabel("mean entropy, nats")
        panels[3].legend(fontsize=TEXT, frameon=False)
    for ax in panels[2:] if len(panels) > len(columns) else panels:
        ax.set_xlabel("threshold c")
    panels[0].set_title(sweep.recipe, loc="left", size=TEXT + 1, parse_math=False)


def _name_marks(ax: Axes, sweep: ClipSweep) -> None:
    """The legend: both splits, and what the lines and marks are."""
    from matplotlib.lines import Line2D

    color = ink(ax)
    handles, _ = ax.get_legend_handles_labels()
    dotted: Any = {"color": color, "linewidth": 0.9, "linestyle": ":"}
    handles.append(Line2D([], [], label="no clipping", **dotted))
    if math.isfinite(float(sweep.thresholds[sweep.best])):
        mark: Any = {"color": color, "markersize": 5, "linestyle": "none", "marker": "D"}
        handles.append(Line2D([], [], label=f"lowest {sweep.criterion.upper()} on val", **mark))
    ax.legend(handles=handles, fontsize=TEXT, frameon=False)


def draw_trade(sweep: ClipSweep, ax: Panels) -> None:
    """ECE against accuracy on test: down and to the right is better."""
    ax = first_axes(ax)
    accuracy, ece = (100 * sweep.test.accuracy).tolist(), (100 * sweep.test.ece).tolist()
    finite = sweep.thresholds[:-1].log().numpy()
    ax.plot(accuracy[:-1], ece[:-1], color=GREY, linewidth=0.8, zorder=1)
    look: dict[str, Any] = {"cmap": "viridis", "edgecolors": ink(ax), "linewidths": 0.5}
    ax.scatter(accuracy[:-1], ece[:-1], s=24, c=finite, zorder=2, **look)
    marks = (
        ("no clipping", -1, "*", 130),
        (f"best on val, {_c(sweep, sweep.best)}", sweep.best, "D", 42),
    )
    for label, place, mark, area in marks:
        look = {"facecolors": "none", "edgecolors": ink(ax), "linewidths": 1.3}
        point = accuracy[place], ece[place]
        ax.scatter(*point, s=area, marker=mark, label=label, zorder=3, **look)
    for place in _spaced(len(finite)):
        at = (accuracy[place], ece[place])
        ax.annotate(_c(sweep, place), at, (6, -2), textcoords="offset points", size=TEXT)
    ax.set(xlabel="accuracy on test, %", ylabel="ECE on test, %")
    ax.set_title(sweep.recipe, loc="left", size=TEXT + 1, parse_math=False)
    ax.legend(fontsize=TEXT, frameon=False)


def _spaced(count: int) -> list[int]:
    """A few places to name, the lowest first."""
    return sorted({0, count // 8} & set(range(count)))


def _c(sweep: ClipSweep, place: int) -> str:
    c = float(sweep.thresholds[place])
    return "c = ∞" if math.isinf(c) else f"c = {c:.3g}"


def _curves(
    ax: Axes,
    sweep: ClipSweep,
    columns: Sequence[Tensor],
    looks: Sequence[tuple[str, str, object]],
) -> None:
    """Two curves over c, each with its value at no clipping, the best c and the fitted one."""
    c = sweep.thresholds[:-1].tolist()
    for column, (label, hue, line) in zip(columns, looks, strict=True):
        values = column.tolist()
        ax.plot(c, values[:-1], color=hue, linestyle=line, linewidth=1.5, label=label)
        ax.axhline(values[-1], color=hue, linewidth=0.9, linestyle=":")
        if math.isfinite(float(sweep.thresholds[sweep.best])):
            at = (float(sweep.thresholds[sweep.best]), values[sweep.best])
            ax.plot(*at, "D", color=hue, markersize=5, markeredgecolor=ink(ax))
    fitted = float(sweep.thresholds[sweep.fitted])
    if math.isfinite(fitted):
        ax.axvline(
            fitted,
            color=VERMILLION,
            linewidth=1.0,
            linestyle="-.",
            label=f"fitted c = {fitted:.3g}",
        )
    _log_ticks(ax)


def _log_ticks(ax: Axes) -> None:
    """Ticks at 1, 2 and 5 times powers of ten, as plain numbers: a sweep spans a decade or two."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_minor_locator(NullLocator())


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
        draw_curves(self, all_axes(ax))

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
        draw_trade(self.sweep, ax)


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
