"""The three-line path: calibrate a trained model with its validation loader."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from featcal.core.attach import attach, head_of
from featcal.core.calibrator import Calibrator
from featcal.core.spec import parse
from featcal.core.steps import Mode
from featcal.data.collect import collect


def calibrate(
    model: nn.Module,
    loader: Iterable[tuple[Any, Tensor]],
    recipe: str | Calibrator = "clip | temperature",
    *,
    head: str | None = None,
    mode: Mode = "joint",
) -> nn.Module:
    """A model of the same class with the same weights and better probabilities.

    Args:
        model: the trained classifier; left untouched.
        loader: (inputs, labels) the model was not trained on.
        recipe: what to fit, as text or as a calibrator, which is then fitted in place.
        head: dotted path of the last layer, when it is not found by itself.
        mode: "joint" or "sequential"; see `Calibrator.fit`.
    """
    calibrator = parse(recipe) if isinstance(recipe, str) else recipe
    data = collect(model, loader, head=head)
    calibrator.fit(data, head_of(model, head), mode=mode)
    return attach(model, calibrator, head=head)
