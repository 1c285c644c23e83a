"""Where to clip: the same search at other layers, what comes behind computed again.

The ablation of Tao, Dong and Xu (AAAI 2025): a threshold for the output of a layer, for the
features before the head (their method) and for the logits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from torch import nn

from featcal.analysis import base
from featcal.api import calibrate
from featcal.core.calibrator import Calibrator
from featcal.core.checks import InputError
from featcal.core.fit import plain
from featcal.core.progress import track
from featcal.core.text import parse
from featcal.data import Pack
from featcal.data.collect import Unpack, collect
from featcal.report.scores import Scores, evaluate

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
class LayerAblation(base.Analysis):
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
            found: Scores
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
                    made = calibrate(model, val_loader, clip, layer=layer, **kind)
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

    def draw(self, ax: base.Panels) -> None:
        """ECE as bars, with threshold and accuracy written beside them."""
        ax = base.first_axes(ax)
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
