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

from featcal.analysis.base import HCE, LCE, Analysis, first_axes, ink
from featcal.api import calibrate
from featcal.core.errors import InputError
from featcal.core.fitting import plain
from featcal.core.progress import track
from featcal.core.spec import parse
from featcal.data.collect import collect
from featcal.data.loading import Unpack
from featcal.report.drawing import TEXT
from featcal.report.scores import evaluate

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
        model: nn.Module,
        val_loader: Iterable[Any],
        test_loader: Iterable[Any],
        layers: Sequence[str] | Mapping[str, str] = (),
        *,
        head: str | None = None,
        bins: int = 15,
        unpack: Unpack | None = None,
    ) -> LayerAblation:
        """Fits a threshold at each place on val, and scores the calibrated model on test.

        Args:
            model: the trained classifier; left untouched.
            val_loader: labelled batches the model was not trained on, read once for each place.
            test_loader: other such batches.
            layers: dotted paths, or what people call the places -> their paths.
            head: dotted path of the last layer, when it is not found by itself.
            bins: of the ECE.
            unpack: makes (inputs, labels) of a batch in a form `collect` does not know.
        """
        if isinstance(layers, str):
            raise InputError(f"layers is the text {layers!r}: pass a list of paths, [{layers!r}]")
        named = dict(layers) if isinstance(layers, Mapping) else {path: path for path in layers}

        def scored(of: nn.Module) -> dict[str, float]:
            data = collect(of, test_loader, head=head, unpack=unpack)
            metrics = evaluate(data, bins=bins).metrics
            return {name: metrics[name] for name in METRICS}

        rows = [LayerRow("no clipping", None, math.inf, scored(model))]
        places: list[tuple[str, str, str | None]] = [
            ("last layer", "logit_clip", None),
            ("penultimate", "clip", None),
            *((label, "clip", path) for label, path in named.items()),
        ]
        for label, recipe, layer in track("layers", places):
            clip = parse(recipe)
            plan = {"head": head, "layer": layer, "unpack": unpack}
            calibrated = calibrate(model, val_loader, clip, **plan)  # type: ignore[arg-type]
            (threshold,) = (float(buffer) for buffer in clip.buffers())
            place = layer or ("logits" if recipe == "logit_clip" else "features")
            rows.append(LayerRow(label, place, threshold, scored(calibrated)))
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
