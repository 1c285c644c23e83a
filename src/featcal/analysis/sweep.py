"""Where else to clip: at every threshold of a grid, and at other layers.

All numbers of one threshold come from one product of the head with the clipped features; later
steps of a recipe are refitted on val for each threshold. The best one has the lowest loss on val:
test is scored everywhere and chosen by nowhere.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featcal.analysis import base
from featcal.api import calibrate
from featcal.core.batch import Batch, Chunked, Data, Head, bin_sums, features_of, predicted
from featcal.core.calibrator import Calibrator
from featcal.core.checks import CalibrationWarning, InputError
from featcal.core.fit import Mode, plain
from featcal.core.progress import track
from featcal.core.sample import CELLS, size_counts, size_quantile
from featcal.core.text import parse
from featcal.data import Pack
from featcal.data.collect import Unpack, collect
from featcal.heads.head import head_logits, linear_view
from featcal.methods.clip import FeatureClip, LinearPath
from featcal.metrics.inputs import checked_bins
from featcal.report.diagram import BLUE, DASHES, GREY, TEXT, VERMILLION
from featcal.report.scores import calibrated_logits, evaluate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS = 60
LOW = 0.8  # of the features that are not 0 lie below the lowest c of a grid of ours
ROUNDING = 1e-7  # a smaller gain over c = inf is rounding, as in a fit

Criterion = Literal["nll", "ece"]
Tail = Calibrator | None  # what comes after the clip


@final
@dataclass(frozen=True, eq=False)
class ClipSweep(base.Analysis):
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
    _panels: ClassVar[tuple[int, int]] = (2, 2)  # ECE, NLL, accuracy, entropy

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
        val: base.Source,
        test: base.Source | None = None,
        head: Head | None = None,
        *,
        then: str | None = None,
        fitted: float | None = None,
        **options: Any,  # noqa: ANN401 - those of `several`
    ) -> ClipSweep:
        """Sweeps the threshold of one recipe: `several` of one, with the same options.

        Args:
            val: a pack, or labelled rows with features, on which all choices are made.
            test: other such rows; those of the same pack by default.
            head: the classifier's last layer; a pack has its own.
            then: the recipe after the clip, of methods that need logits alone.
            fitted: the threshold of a fit that is known already; None to fit it here, on val.
            **options: splits, thresholds, points, criterion, confidence and bins of `several`.
        """
        known = None if fitted is None else [fitted]
        return cls.several(val, test, head, thens=[then], fitted=known, **options)[0]

    @classmethod
    def several(
        cls,
        val: base.Source,
        test: base.Source | None = None,
        head: Head | None = None,
        *,
        splits: tuple[str, str] = (base.VAL, base.TEST),
        thens: Sequence[str | None] = (None, "temperature"),
        thresholds: Sequence[float] | None = None,
        fitted: Sequence[float] | None = None,
        points: int = POINTS,
        criterion: Criterion = "nll",
        confidence: float = base.CONFIDENCE,
        bins: int = 15,
    ) -> tuple[ClipSweep, ...]:
        """A sweep for each of several tails, over one grid and for the price of one clip.

        A tail that comes twice, with thresholds of two fits, is swept once.

        Args:
            val: see `of`.
            test: see `of`.
            head: see `of`.
            splits: of a pack: where choices are made, and what is scored.
            thens: the recipes after the clip, None for none.
            thresholds: the grid; None for `points` of equal ratio, from the 80 % quantile of the
                features of val that are not 0 to the largest.
            fitted: the known threshold of each recipe, in their order; None to fit them.
            points: of the grid, infinity and the fitted thresholds counted in.
            criterion: by which the best threshold is marked.
            confidence: of the groups whose entropy is measured.
            bins: of the reliability diagrams.
        """
        if isinstance(thens, str) or not thens:
            raise InputError(
                f"thens is {thens!r}: pass a list of one recipe or more, None for none"
            )
        if criterion not in ("nll", "ece"):
            raise InputError(f"criterion is {criterion!r}: choose 'nll' or 'ece'")
        if test is None and not isinstance(val, Pack):
            raise InputError("test is None: pass rows that nothing was chosen on, or a whole pack")
        tails: list[Tail] = [None if then is None else parse(then) for then in thens]
        for later in filter(None, tails):
            if later.needs_features or later.needs_train:
                raise InputError(
                    f"then is '{later!r}', which needs features: a sweep refits methods that need "
                    "logits alone, such as 'temperature'"
                )
        own, head = base.opened(val, head, splits[0])
        scored, _ = base.opened(val if test is None else test, head, splits[1])
        if head is None:
            raise InputError("head is None: a sweep needs the classifier's last layer, head=")
        what, distinct = "a sweep of thresholds", {repr(tail): tail for tail in tails}
        with base.reading(own, head, features_for=what) as rows:
            if fitted is None:
                fitted = []
                for tail in tails:
                    clip = FeatureClip()
                    recipe = clip if tail is None else clip | parse(repr(tail))
                    fit_quietly(recipe, rows.data, rows.head)
                    fitted.append(float(clip.threshold))
            known = [_checked_threshold(c) for c in fitted]
            if len(known) != len(tails):
                raise InputError(f"fitted has {len(known)} entries for {len(tails)} recipes")
            grid = _grid(rows, thresholds, known, points)
            groups = base.Groups.of_data(rows, confidence=confidence)
            chosen_on, learned = _sweep_val(
                rows, grid, list(distinct.values()), groups, checked_bins(bins)
            )
        with base.reading(scored, head, features_for=what) as rows:
            groups = base.Groups.of_data(rows, confidence=confidence)
            tested = _sweep_test(rows, grid, learned, groups, bins)
        swept = dict(zip(distinct, zip(learned, chosen_on, tested, strict=True), strict=True))
        found = []
        for tail, c in zip(tails, known, strict=True):
            steps, by_val, by_test = swept[repr(tail)]
            reports = [
                () if one is None or one.report is None else one.report.steps for one in steps
            ]
            values = [
                {k: v for step in report for k, v in step.values.items()} for report in reports
            ]
            scores: Tensor = getattr(by_val, criterion)
            best = int(scores.argmin())
            if not float(scores[best]) < float(scores[-1]) - ROUNDING:
                best = len(grid) - 1  # clips nothing, unless a threshold is truly lower
            recipe_text = "clip" if tail is None else f"clip | {tail!r}"
            at = torch.tensor(grid, dtype=torch.float64)
            chosen = (grid.index(c), best, criterion)
            found.append(cls(recipe_text, at, tuple(values), by_val, by_test, *chosen))
        return tuple(found)

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

    def draw(self, ax: Axes, *others: Axes) -> None:
        """ECE on one pair of axes; on several also NLL, accuracy and entropy, in this order."""
        from matplotlib.lines import Line2D

        panels = (ax, *others)
        splits = (("val", GREY, DASHES), ("test", BLUE, "-"))
        columns = (
            ("ECE, %", "ece", 100),
            ("NLL, nats", "nll", 1),
            ("accuracy, %", "accuracy", 100),
        )
        for panel, (title, name, scale) in zip(panels, columns, strict=False):
            pair = [getattr(split, name) * scale for split in (self.val, self.test)]
            self._draw_pair(panel, pair, splits)
            panel.set_ylabel(title)
        color = base.ink(panels[0])
        handles, _ = panels[0].get_legend_handles_labels()
        dotted: Any = {"color": color, "linewidth": 0.9, "linestyle": ":"}
        handles.append(Line2D([], [], label="no clipping", **dotted))
        if math.isfinite(float(self.thresholds[self.best])):
            mark: Any = {"color": color, "markersize": 5, "linestyle": "none", "marker": "D"}
            handles.append(Line2D([], [], label=f"lowest {self.criterion.upper()} on val", **mark))
        panels[0].legend(handles=handles, fontsize=TEXT, frameon=False)
        base.set_title(panels[0], self.recipe)
        lowest = panels
        if len(panels) > len(columns):
            lowest, entropy = panels[2:], panels[3]
            wrong, right = (f"of test, {rows:,} rows" for rows in self.test.groups)
            looks = ((f"HCE {wrong}", base.HCE[0], DASHES), (f"LCE {right}", base.LCE[0], "-"))
            self._draw_pair(entropy, list(self.test.entropy.T), looks)
            entropy.set_ylabel("mean entropy, nats")
            entropy.legend(fontsize=TEXT, frameon=False)
        for panel in lowest:
            panel.set_xlabel("threshold c")

    def _draw_pair(
        self, ax: Axes, columns: Sequence[Tensor], looks: Sequence[tuple[str, str, object]]
    ) -> None:
        """Two curves over c, each with its value at no clipping, the best c and the fitted one."""
        from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

        best, fitted = (float(self.thresholds[place]) for place in (self.best, self.fitted))
        for column, (label, hue, line) in zip(columns, looks, strict=True):
            *values, unclipped = column.tolist()
            c = self.thresholds[:-1].tolist()
            ax.plot(c, values, color=hue, linestyle=line, linewidth=1.5, label=label)
            ax.axhline(unclipped, color=hue, linewidth=0.9, linestyle=":")
            if math.isfinite(best):
                look: Any = {"color": hue, "markersize": 5, "markeredgecolor": base.ink(ax)}
                ax.plot(best, values[self.best], "D", **look)
        if math.isfinite(fitted):
            label = f"fitted c = {fitted:.3g}"
            ax.axvline(fitted, color=VERMILLION, linewidth=1.0, linestyle="-.", label=label)
        # Ticks at 1, 2 and 5 times powers of ten, as plain numbers: a sweep spans a decade or two.
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.xaxis.set_minor_locator(NullLocator())

    def plot_trade(self, ax: Axes | None = None) -> ClipSweep:
        """ECE against accuracy on test, a point for each c and a star for no clipping."""
        return replace(self, axes=_Trade(self).plot(ax).axes)


def _checked_threshold(threshold: float) -> float:
    """A threshold, rounded to float32 as a clip would hold it."""
    found = float(np.float32(threshold))
    if not found > 0:
        raise InputError(f"a threshold is {threshold!r}: every threshold must be above 0")
    return found


def fit_quietly(
    calibrator: Calibrator, data: Batch | Data, head: Head | None = None, mode: Mode = "joint"
) -> Calibrator:
    """The calibrator fitted, without warnings: a sweep shows more than they would say."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        return calibrator.fit(data, head, mode=mode)


def _grid(
    rows: base.Rows, thresholds: Sequence[float] | None, fitted: Sequence[float], points: int
) -> list[float]:
    """Ascending thresholds as float32 holds them, the fitted ones among them, infinity last.

    Without thresholds, points of equal ratio from where clipping breaks a network to where it does
    nothing, with room for the fitted ones on their left.
    """
    if thresholds is None:
        if isinstance(points, bool) or not isinstance(points, int) or points < 3:
            raise InputError(f"points is {points!r}: pass an integer of at least 3")
        sizes = torch.zeros(CELLS, dtype=torch.int64)
        for (features,) in rows.features():
            sizes += size_counts(features)
        low, high = (size_quantile(sizes, share, zeros=False) for share in (LOW, 1.0))
        low = min(low, *(c / 2 for c in fitted))
        count = max(points - 1 - len(set(fitted) - {math.inf}), 2)
        spread = np.geomspace(low, max(high, 2 * low), count)
        # Where every feature is 0 there is nothing to clip.
        thresholds = [] if math.isnan(high) else spread.tolist()
    return sorted({*map(_checked_threshold, thresholds), *fitted, math.inf})


@final
@dataclass(frozen=True, eq=False)
class SweepScores(base.Binned):
    """Scores of one split at t thresholds; float64.

    Attributes:
        rows: of the split.
        groups: how many of them are HCE and LCE, by the unclipped logits.
        sums: (t, 3, m) rows, summed confidence and right rows in m bins of the confidence.
        losses: (t,) summed negative log-likelihoods.
        entropies: (t, 2) summed softmax entropies of HCE and of LCE rows.
    """

    rows: int
    groups: tuple[int, int]
    sums: Tensor
    losses: Tensor
    entropies: Tensor

    @classmethod
    def before_rows(cls, groups: base.Groups, thresholds: int, bins: int) -> SweepScores:
        """Zeros, to which `add` adds rows; the scores are there once all rows are in."""
        shapes = (thresholds, 3, bins), (thresholds,), (thresholds, 2)
        sums = (torch.zeros(shape, dtype=torch.float64) for shape in shapes)
        return cls(len(groups), groups.sizes, *sums)

    def add(self, place: int, logits: Tensor, labels: Tensor, masks: Sequence[Tensor]) -> None:
        """Adds rows at one threshold.

        Args:
            place: of the threshold.
            logits: (n, k) of the rows.
            labels: (n,).
            masks: which of the rows are HCE, and which are LCE.
        """
        sure, right = logits.softmax(1).amax(1), predicted(logits) == labels
        self.sums[place] += bin_sums(sure, right, self.sums.shape[2]).cpu()
        losses = F.cross_entropy(logits, labels, reduction="none")
        self.losses[place] += losses.sum(dtype=torch.float64).cpu()
        for group, mask in enumerate(masks):
            self.entropies[place, group] += base.entropies(logits[mask]).sum().cpu()

    @property
    def nll(self) -> Tensor:
        """(t,) mean negative log-likelihood."""
        return self.losses / self.rows

    @property
    def entropy(self) -> Tensor:
        """(t, 2) mean softmax entropy of HCE and of LCE rows, NaN for a group without rows."""
        return self.entropies / torch.tensor(self.groups, dtype=torch.float64)

    def as_json(self) -> dict[str, Any]:
        """One list per column; per threshold and bin three numbers, from which all can be drawn."""
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


PART = 2**25  # logits of all thresholds that are held at once,
KEEP = 2**27  # and where all rows must be there: 512 MiB


def _sweep_val(
    rows: base.Rows, grid: list[float], tails: Sequence[Tail], groups: base.Groups, bins: int
) -> tuple[list[SweepScores], list[list[Tail]]]:
    """Val at every threshold with each tail, and what each tail has learned there.

    A fit needs all rows of one threshold at once: so many thresholds at a time as fit into memory.
    """
    found = [SweepScores.before_rows(groups, len(grid), bins) for _ in tails]
    fitted: list[list[Tail]] = [[] for _ in tails]
    step = max(KEEP // (rows.facts.rows * rows.facts.classes), 1)
    for first in track("sweep: val", range(0, len(grid), step)):
        views: list[list[Batch]] = [[] for _ in grid[first : first + step]]
        for labels, *logits in _clipped(rows, grid[first : first + step]):
            for view, z in zip(views, logits, strict=True):
                view.append(Batch(z, labels))
        for place, view in enumerate(views, start=first):
            data = Chunked(view)
            data.surveyed = None, replace(rows.facts, width=0)  # checked rows need no second look
            for tail, scores, learned in zip(tails, found, fitted, strict=True):
                now = None if tail is None else fit_quietly(parse(repr(tail)), data)
                learned.append(now)
                stream = ((calibrated_logits(one, now, None), one.labels) for one in view)
                for (z, labels), masks in groups.along(stream):
                    scores.add(place, z, labels, masks)
    return found, fitted


def _sweep_test(
    rows: base.Rows,
    grid: list[float],
    fitted: Sequence[Sequence[Tail]],
    groups: base.Groups,
    bins: int,
) -> list[SweepScores]:
    """Test at every threshold with what each tail has learned on val."""
    found = [SweepScores.before_rows(groups, len(grid), bins) for _ in fitted]
    for (labels, *logits), masks in groups.along(_clipped(rows, grid)):
        for scores, tails in zip(found, fitted, strict=True):
            for place, (tail, z) in enumerate(zip(tails, logits, strict=True)):
                after = calibrated_logits(Batch(z, labels), tail, None)
                scores.add(place, after, labels, masks)
    return found


def _clipped(rows: base.Rows, thresholds: Sequence[float]) -> Iterator[tuple[Tensor, ...]]:
    """The labels of some rows, and their logits (n, k) at every threshold."""
    head = rows.head
    assert head is not None
    step = max(PART // (len(thresholds) * rows.facts.classes), 1)
    for batch, own in rows:
        features = features_of(batch)
        for start in range(0, len(batch), step):
            part = slice(start, start + step)
            yield batch.labels[part], *logits_at(thresholds, features[part], own[part], head)


BLOCK = 2**18  # numbers of a block of rows: it stays in the cache for all thresholds
MANY = 256  # classes; with fewer, a product per threshold is as quick and rounds less


def logits_at(thresholds: Sequence[float], features: Tensor, own: Tensor, head: Head) -> Tensor:
    """(t, n, k): the logits at every threshold; the network's own where nothing is clipped.

    A linear head with many classes is followed from threshold to threshold. Else rows go through in
    blocks that stay in the cache, since clipping is a matter of memory more than of arithmetic, and
    in the order of their largest features, so that high thresholds leave whole blocks alone.

    Args:
        thresholds: ascending.
        features: (n, d).
        own: (n, k) logits of the features as they are.
        head: the classifier's last layer.
    """
    found, layer, low = own.new_empty(len(thresholds), *own.shape), linear_view(head), thresholds[0]
    if layer is not None and own.shape[1] >= MANY:
        weight, top = layer.weight.detach(), float(features.abs().max())
        if features.dtype == own.dtype == weight.dtype and low < top:
            path = LinearPath(
                features, own, weight.T.contiguous(), top, math.log(1.001 * top / low)
            )
            for place in reversed(range(len(thresholds))):
                found[place] = path.move(min(thresholds[place], top))
            return found
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


@final
@dataclass(frozen=True, eq=False)
class _Trade(base.Analysis):
    """The same sweep in the paper's picture: ECE against accuracy; down and right is better."""

    sweep: ClipSweep

    def numbers(self) -> dict[str, Any]:
        return self.sweep.numbers()

    def draw(self, ax: Axes, *_: Axes) -> None:
        sweep = self.sweep
        accuracy, ece = (100 * sweep.test.accuracy).tolist(), (100 * sweep.test.ece).tolist()
        finite = sweep.thresholds[:-1].log().numpy()

        def named(place: int) -> str:
            c = float(sweep.thresholds[place])
            return "c = ∞" if math.isinf(c) else f"c = {c:.3g}"

        ax.plot(accuracy[:-1], ece[:-1], color=GREY, linewidth=0.8, zorder=1)
        look: Any = {"cmap": "viridis", "edgecolors": base.ink(ax), "linewidths": 0.5}
        ax.scatter(accuracy[:-1], ece[:-1], s=24, c=finite, zorder=2, **look)
        look = {"facecolors": "none", "edgecolors": base.ink(ax), "linewidths": 1.3, "zorder": 3}
        best = f"best on val, {named(sweep.best)}"
        ax.scatter(accuracy[-1], ece[-1], s=130, marker="*", label="no clipping", **look)
        ax.scatter(accuracy[sweep.best], ece[sweep.best], s=42, marker="D", label=best, **look)
        for place in sorted({0, len(finite) // 8} & set(range(len(finite)))):  # a few are named
            at = (accuracy[place], ece[place])
            ax.annotate(named(place), at, (6, -2), textcoords="offset points", size=TEXT)
        ax.set(xlabel="accuracy on test, %", ylabel="ECE on test, %")
        base.set_title(ax, sweep.recipe)
        ax.legend(fontsize=TEXT, frameon=False)


METRICS = ("accuracy", "ece", "nll", "brier")


@final
@dataclass(frozen=True)
class LayerRow:
    """One place to clip at.

    Attributes:
        label: what people call it.
        layer: the path of the layer, "features", "logits", or None for no clipping.
        threshold: the c fitted on val; infinite where nothing is to be clipped.
        metrics: accuracy, ece, nll and brier on test.
    """

    label: str
    layer: str | None
    threshold: float
    metrics: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        """The public form."""
        return plain(asdict(self))  # type: ignore[no-any-return]


@final
@dataclass(frozen=True, eq=False)
class LayerAblation(base.Analysis):
    """A row for no clipping, for the logits, for the features, and for each layer, in this order.

    The ablation of Tao, Dong and Xu (AAAI 2025): the same search of a threshold for the output of a
    layer, what comes behind computed again, for the features before the head (their method) and for
    the logits.

    Attributes:
        rows: what was found at each place.
        bins: of the ECE.
    """

    rows: tuple[LayerRow, ...]
    bins: int = field(default=15)

    @classmethod
    def of(
        cls,
        model: nn.Module | Pack,
        val_loader: Iterable[Any] | None = None,
        test_loader: Iterable[Any] | None = None,
        layers: Sequence[str] | Mapping[str, str] = (),
        *,
        head: str | None = None,
        bins: int = 15,
        unpack: Unpack | None = None,
        splits: tuple[str, str] = (base.VAL, base.TEST),
    ) -> LayerAblation:
        """Fits a threshold at each place on val, and scores the calibrated model on test.

        Args:
            model: the trained classifier; left untouched. A pack has no model and needs no
                loader: it serves for the logits and the features alone.
            val_loader: labelled batches the model was not trained on, read once for each place.
            test_loader: other such batches.
            layers: dotted paths, or what people call the places -> their paths.
            head: dotted path of the last layer, when it is not found by itself.
            bins: of the ECE.
            unpack: makes (inputs, labels) of a batch in a form `collect` does not know.
            splits: of a pack: what is fitted on, and what is scored.
        """
        if isinstance(layers, str):
            raise InputError(f"layers is the text {layers!r}: pass a list of paths, [{layers!r}]")
        named = dict(layers) if isinstance(layers, Mapping) else {path: path for path in layers}
        if isinstance(model, Pack) and named:
            raise InputError(
                f"a pack does not hold the outputs of {', '.join(named.values())}: pass the "
                "model and two loaders"
            )
        if not isinstance(model, Pack) and (val_loader is None or test_loader is None):
            raise InputError("a loader is missing: pass the model, val_loader and test_loader")

        def scored(clip: Calibrator | None, layer: str | None = None) -> dict[str, float]:
            """The metrics on test with a clip fitted at a layer; as it is without a clip."""
            if isinstance(model, Pack):
                val, own_head = base.opened(model, None, splits[0])
                if clip is not None:
                    clip.fit(val, own_head)
                found = evaluate(model.split(splits[1]), clip, own_head, bins=bins)
            else:
                assert val_loader is not None
                assert test_loader is not None
                kind: Any = {"head": head, "unpack": unpack}
                made = model
                if clip is not None:
                    made = calibrate(model, val_loader, clip, layer=layer, evidence=False, **kind)
                found = evaluate(collect(made, test_loader, **kind), bins=bins)
            return {name: found.metrics[name] for name in METRICS}

        rows = [LayerRow("no clipping", None, math.inf, scored(None))]
        wanted: list[tuple[str, str, str | None]] = [
            ("last layer", "logit_clip", None),
            ("penultimate", "clip", None),
            *((label, "clip", path) for label, path in named.items()),
        ]
        for label, recipe, layer in track("layers", wanted):
            clip = parse(recipe)
            metrics = scored(clip, layer)
            (threshold,) = (float(buffer) for buffer in clip.buffers())
            place = layer or ("logits" if recipe == "logit_clip" else "features")
            rows.append(LayerRow(label, place, threshold, metrics))
        return cls(tuple(rows), bins)

    def numbers(self) -> dict[str, Any]:
        """One object per row."""
        return {"bins": self.bins, "rows": [row.as_json() for row in self.rows]}

    def draw(self, ax: Axes, *_: Axes) -> None:
        """ECE as bars, with threshold and accuracy written beside them."""
        labels = []
        for place, row in enumerate(self.rows):
            hue, hatch = base.HCE if row.layer is None else base.LCE
            value = 100 * row.metrics["ece"]
            face = "none" if hatch else hue
            ax.barh(place, value, 0.6, facecolor=face, edgecolor=hue, hatch=hatch)
            c = "" if math.isinf(row.threshold) else f"c = {row.threshold:.3g}, "
            text = f"{c}accuracy {row.metrics['accuracy']:.2%}".replace("%", " %")
            ax.annotate(text, (value, place), (4, 0), textcoords="offset points", va="center")
            where = "" if row.layer in (None, row.label) else f": {row.layer}"
            labels.append(f"{row.label}{where}")
        ax.set_yticks(range(len(labels)), labels, color=base.ink(ax), parse_math=False)
        ax.invert_yaxis()
        widest = max(100 * row.metrics["ece"] for row in self.rows)
        ax.set(xlabel="ECE on test, %", xlim=(0, 1.9 * max(widest, 1e-3)))
        base.set_title(ax, "one threshold, fitted at each place")
