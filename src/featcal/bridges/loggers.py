"""Numbers and pictures in an experiment log, by what a logger can do and not by its type.

No logging library is imported: TensorBoard, mlflow, wandb, the loggers of Lightning, a dict and a
function are told apart by their methods.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from featcal.core.checks import InputError
from featcal.core.fit import FitReport
from featcal.metrics import Bins
from featcal.report.compare import Comparison, Row
from featcal.report.diagram import ReliabilityDiagram, figure, own_style
from featcal.report.scores import Scores

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Found = Scores | Row | Comparison | FitReport | Mapping[str, float]
Part = tuple[str, Mapping[str, float], Bins | None]  # its name, its numbers, what can be drawn
Draw = Callable[[str, "Figure", int | None], object]

PICTURE = "reliability"
TAKEN = (
    "add_scalar (TensorBoard's SummaryWriter), log_metrics (mlflow itself, inside a run, and the "
    "loggers of Lightning), log and define_metric (a wandb run); or pass a dict, or a function of "
    "(numbers, step)"
)


def log(
    logger: Any,  # noqa: ANN401 - by what it can do
    found: Found,
    *,
    step: int | None = None,
    prefix: str = "calibration",
) -> dict[str, float]:
    """Sends numbers to a logger, and the reliability diagram where it takes pictures.

    Names are `calibration/ece` and so on; those of a comparison have the recipe between, as in
    `calibration/clip_temperature/ece`, and those of a report say that they come from the rows of
    the fit, `calibration/fit_nll_after`. What is not finite, such as the AUROC of a model without
    a mistake, is left out. Pictures need matplotlib and are left out without it.

    Args:
        logger: a TensorBoard SummaryWriter, `mlflow`, a wandb run, a logger of Lightning, a
            dict, or a function that is called with the numbers and the step.
        found: what `evaluate` or `compare` gave, a row of it, the report of a fit, or a mapping.
        step: of the training, as loggers count.
        prefix: in front of every name; "" for none.

    Returns:
        What was sent, by name.

    >>> seen = {}
    >>> log(seen, {"ece": 0.25})
    {'calibration/ece': 0.25}
    """
    parts = [(_under(prefix, name), numbers, bins) for name, numbers, bins in _parts(found)]
    sent = {}
    for name, numbers, _ in parts:
        for key, value in numbers.items():
            try:
                number = float(value)
            except (TypeError, ValueError) as error:
                raise InputError(f"{key} is {value!r}: a logger takes numbers") from error
            if math.isfinite(number):
                sent[_under(name, key)] = number
    _send(logger, sent, step)
    draw = _drawer(logger)
    if draw is not None and importlib.util.find_spec("matplotlib") is not None:
        for name, _, bins in parts:
            if bins is not None:
                with own_style():
                    picture = figure([ReliabilityDiagram(bins)])[0]
                draw(_under(name, PICTURE), picture, step)
    return sent


def _under(prefix: str, name: str) -> str:
    return f"{prefix}/{name}" if prefix and name else prefix or name


def _parts(found: Found) -> Iterator[Part]:
    match found:
        case Scores():
            yield "", found.metrics, found.bins
        case Row():
            yield from _parts(found.scores)
        case Comparison():
            for row in found:
                # In letters that every logger takes: clip_min_accuracy_0.99_temperature.
                name = re.sub(r"[^\w.-]+", "_", row.recipe).strip("_")
                yield name, row.scores.metrics, row.scores.bins
        case FitReport():
            losses = {"before": found.loss_before, "after": found.loss_after}
            numbers = {f"fit_{found.loss}_{when}": loss for when, loss in losses.items()}
            fitted = {
                f"{step.name}/{key}": value
                for step in found.steps
                for key, value in step.values.items()
                if isinstance(value, (int, float))
            }
            yield "", {"fit_rows": found.rows, **numbers, **fitted}, None
        case Mapping():
            yield "", found, None
        case _:
            raise InputError(
                f"found is a {type(found).__name__}: pass what evaluate() or compare() gave, "
                "calibrator.report, or a dict of numbers"
            )


def _has(logger: object, *methods: str) -> bool:
    return all(callable(getattr(logger, method, None)) for method in methods)


def _send(logger: Any, numbers: dict[str, float], step: int | None) -> None:  # noqa: ANN401
    if isinstance(logger, MutableMapping):
        logger.update(numbers)
    elif _has(logger, "add_scalar"):
        for name, value in numbers.items():
            logger.add_scalar(name, value, step)
    elif _has(logger, "log_metrics"):
        logger.log_metrics(numbers, step=step)
    elif _has(logger, "log", "define_metric"):
        logger.log(numbers, step=step)
    elif callable(logger) and not isinstance(logger, nn.Module):
        logger(numbers, step)
    else:
        raise InputError(
            f"logger is a {type(logger).__name__}, without any of the methods looked for: {TAKEN}"
        )


def _drawer(logger: Any) -> Draw | None:  # noqa: ANN401
    """How a logger takes a figure under a name; None when it takes none."""
    if _has(logger, "add_figure"):
        return lambda name, figure, step: logger.add_figure(name, figure, step)
    if _has(logger, "log", "define_metric"):
        # wandb itself, or a run of it, whose package whoever made the run has imported
        package = type(logger).__module__.partition(".")[0]
        image = (logger if inspect.ismodule(logger) else sys.modules[package]).Image
        return lambda name, figure, step: logger.log({name: image(_pixels(figure))}, step=step)
    if _has(logger, "log_metrics", "log_figure"):
        if "artifact_file" not in inspect.signature(logger.log_figure).parameters:
            return None  # a namesake of mlflow's
        return lambda name, figure, step: logger.log_figure(figure, _file(name, step))
    # Lightning's loggers know numbers alone: figures go to what they log to.
    if not hasattr(logger, "experiment"):
        return None
    if _has(logger, "log_image"):  # of wandb, whose own step runs ahead of the trainer's
        return lambda name, figure, step: logger.log_image(name, [_pixels(figure)], step)
    if hasattr(logger, "run_id") and _has(logger.experiment, "log_figure"):
        client, run = logger.experiment, logger.run_id
        return lambda name, figure, step: client.log_figure(run, figure, _file(name, step))
    return _drawer(logger.experiment)


def _file(name: str, step: int | None) -> str:
    return f"{name}.png" if step is None else f"{name}-{step}.png"


def _pixels(figure: Figure) -> NDArray[np.uint8]:
    """The picture itself, for wandb, which takes figures of pyplot alone."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())
