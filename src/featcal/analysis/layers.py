"""Where to clip: the same search at other layers, what comes behind computed again.

The ablation of Tao, Dong and Xu (AAAI 2025): a threshold for the output of a layer, for the
features before the head (their method) and for the logits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from torch import nn

from featcal.analysis.base import HCE, LCE, TEST, VAL, Analysis, first_axes, ink, opened
from featcal.api import calibrate
from featcal.core.batch import Batch, Data, Head
from featcal.core.calibrator import Calibrator
from featcal.core.checks import InputError
from featcal.core.fit import plain
from featcal.core.progress import track
from featcal.core.text import parse
from featcal.data import Pack
from featcal.data.collect import Unpack, collect
from featcal.report.diagram import TEXT
from featcal.report.scores import Scores, evaluate

if TYPE_CHECKING:
    from featcal.analysis.base import Panels

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
        found = {"label": self.label, "layer": self.layer, "threshold": self.threshold}
        return plain({**found, "metrics": self.metrics})  # type: ignore[no-any-return]


@final
@dataclass(frozen=True, eq=False)
class _Computed:
    """Scores through the model, which computes what comes behind a layer."""

    model: nn.Module
    val: Iterable[Any]
    test: Iterable[Any]
    head: str | None
    unpack: Unpack | None
    bins: int

    def before(self) -> dict[str, float]:
        return self._scored(self.model)

    def after(self, clip: Calibrator, layer: str | None) -> dict[str, float]:
        plan = {"head": self.head, "layer": layer, "unpack": self.unpack}
        return self._scored(calibrate(self.model, self.val, clip, **plan))  # type: ignore[arg-type]

    def _scored(self, model: nn.Module) -> dict[str, float]:
        data = collect(model, self.test, head=self.head, unpack=self.unpack)
        return _told(evaluate(data, bins=self.bins))


@final
@dataclass(frozen=True, eq=False)
class _Stored:
    """Scores from the features and the head of a pack."""

    val: Batch | Data
    test: Batch | Data
    head: Head | None
    bins: int

    @classmethod
    def of(cls, pack: Pack, splits: tuple[str, str], bins: int) -> _Stored:
        val, head = opened(pack, None, splits[0])
        return cls(val, pack.split(splits[1]), head, bins)

    def before(self) -> dict[str, float]:
        return _told(evaluate(self.test, None, self.head, bins=self.bins))

    def after(self, clip: Calibrator, layer: str | None) -> dict[str, float]:
        clip.fit(self.val, self.head)
        return _told(evaluate(self.test, clip, self.head, bins=self.bins))


def _told(scores: Scores) -> dict[str, float]:
    return {name: scores.metrics[name] for name in METRICS}


@final
@dataclass(frozen=True, eq=False)
class LayerAblation(Analysis):
    """A row for no clipping, for the logits, for the features, and for each layer, in this order.

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
        splits: tuple[str, str] = (VAL, TEST),
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

        if isinstance(model, Pack):
            if named:
                raise InputError(
                    f"a pack does not hold the outputs of {', '.join(named.values())}: pass the "
                    "model and two loaders"
                )
            places: _Stored | _Computed = _Stored.of(model, splits, bins)
        elif val_loader is None or test_loader is None:
            raise InputError("a loader is missing: pass the model, val_loader and test_loader")
        else:
            places = _Computed(model, val_loader, test_loader, head, unpack, bins)
        rows = [LayerRow("no clipping", None, math.inf, places.before())]
        wanted: list[tuple[str, str, str | None]] = [
            ("last layer", "logit_clip", None),
            ("penultimate", "clip", None),
            *((label, "clip", path) for label, path in named.items()),
        ]
        for label, recipe, layer in track("layers", wanted):
            clip = parse(recipe)
            metrics = places.after(clip, layer)
            (threshold,) = (float(buffer) for buffer in clip.buffers())
            place = layer or ("logits" if recipe == "logit_clip" else "features")
            rows.append(LayerRow(label, place, threshold, metrics))
        return cls(tuple(rows), bins)

    def numbers(self) -> dict[str, Any]:
        """One object a row."""
        return {"bins": self.bins, "rows": [row.as_json() for row in self.rows]}

    def draw(self, ax: Panels) -> None:
        """ECE as bars, with threshold and accuracy written beside them."""
        ax = first_axes(ax)
        values = [100 * row.metrics["ece"] for row in self.rows]
        hues = [HCE[0] if row.layer is None else LCE[0] for row in self.rows]
        hatches = [HCE[1] if row.layer is None else LCE[1] for row in self.rows]
        faces = ["none" if hatch else hue for hue, hatch in zip(hues, hatches, strict=True)]
        ax.barh(range(len(values)), values, 0.6, facecolor=faces, edgecolor=hues, hatch=hatches)
        for place, (row, value) in enumerate(zip(self.rows, values, strict=True)):
            c = "" if math.isinf(row.threshold) else f"c = {row.threshold:.3g}, "
            text = f"{c}accuracy {row.metrics['accuracy']:.2%}".replace("%", " %")
            ax.annotate(text, (value, place), (4, 0), textcoords="offset points", va="center")
        labels = [_named(row) for row in self.rows]
        ax.set_yticks(range(len(values)), labels, color=ink(ax), parse_math=False)
        ax.invert_yaxis()
        ax.set(xlabel="ECE on test, %", xlim=(0, 1.9 * max([*values, 1e-3])))
        ax.set_title("one threshold, fitted at each place", loc="left", size=TEXT + 1)


def _named(row: LayerRow) -> str:
    """What people call the place, and where it is."""
    return row.label if row.layer in (None, row.label) else f"{row.label}: {row.layer}"
