"""The three-line path: calibrate a trained model with its validation loader."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from featcal.core.calibrator import Calibrator
from featcal.core.checks import InputError
from featcal.core.fit import Mode, undisturbed
from featcal.core.progress import shown
from featcal.core.text import parse
from featcal.data.collect import Collector, Unpack
from featcal.heads.attach import attach, check_uncalibrated, divided
from featcal.heads.find import run, watched
from featcal.heads.head import Wrapper


def calibrate(
    model: nn.Module,
    loader: Iterable[Any],
    recipe: str | Calibrator | None = None,
    *,
    head: str | None = None,
    layer: str | None = None,
    mode: Mode = "joint",
    unpack: Unpack | None = None,
) -> nn.Module:
    """A model of the same class with the same weights and better probabilities.

    Args:
        model: the trained classifier; left untouched.
        loader: labelled batches the model was not trained on; see `collect` for their forms.
        recipe: what to fit, as text or as a calibrator, which is then fitted in place; None for
            "auto", or with a layer for "clip | temperature".
        head: dotted path of the last layer, when it is not found by itself.
        layer: dotted path of another layer, whose output the feature steps are to act on.
        mode: "joint" or "sequential"; see `Calibrator.fit`.
        unpack: makes (inputs, labels) of a batch in a form `collect` does not know.
    """
    if recipe is None:
        recipe = "auto" if layer is None else "clip | temperature"
    calibrator = parse(recipe) if isinstance(recipe, str) else recipe
    check_uncalibrated(model)
    if layer is not None:
        divided(calibrator, layer)  # a recipe that cannot act there costs no pass over the data
    collector = Collector(model, head, layer, unpack)
    with shown():
        data = list(collector.batches(loader))
        calibrator.fit(data, collector.head, mode=mode)
    calibrated = attach(model, calibrator, head=collector.path, layer=layer)
    _check_used(calibrated, collector)
    return calibrated


@torch.no_grad()
def _check_used(calibrated: nn.Module, collector: Collector) -> None:
    """Refuses a model that reaches its old layers by a way of its own, past those put in."""
    paths = [name for name, part in calibrated.named_modules() if isinstance(part, Wrapper)]
    with undisturbed(calibrated), watched(calibrated, paths) as calls:
        run(calibrated, collector.example)
    unused = set(paths) - {path for path, _, _ in calls}
    if unused:
        raise InputError(
            f"the calibrated copy of the model does not run its own {min(unused)!r}: the model "
            "keeps another reference to that layer; deepcopy the model and set the layer by hand "
            "to calibrator.wrap(layer)"
        )
