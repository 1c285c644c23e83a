"""A trained model and its loaders: calibrate it, measure it, compare recipes on it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn

from featcal.core.batch import Batch, Data, Head, as_data, paired
from featcal.core.calibrator import Calibrator
from featcal.core.checks import CalibrationWarning, InputError
from featcal.core.fit import Mode, undisturbed
from featcal.core.labels import all_labels
from featcal.core.progress import shown
from featcal.core.text import parse
from featcal.data.collect import IGNORED, Collected, Collector, Unpack, collect
from featcal.data.pack import Pack, rows_of
from featcal.heads.attach import (
    attach,
    attached,
    check_uncalibrated,
    detach,
    divided,
    is_calibrated,
)
from featcal.heads.find import NoHead, run, watched
from featcal.heads.head import Wrapper
from featcal.report.compare import DEFAULT_RECIPES, Comparison, check_apart, usual_recipes
from featcal.report.compare import compare as compare_rows
from featcal.report.evidence import Evidence
from featcal.report.scores import Scores
from featcal.report.scores import evaluate as score_rows

FOLDS = 5
Loader = Iterable[Any]  # batches in any form that `collect` knows


def calibrate(
    model: nn.Module,
    loader: Iterable[Any],
    recipe: str | Calibrator | None = None,
    *,
    head: str | None = None,
    layer: str | None = None,
    mode: Mode = "joint",
    unpack: Unpack | None = None,
    ignore_index: int = IGNORED,
    positions: int | None = None,
    seed: int = 0,
    test: Loader | None = None,
    evidence: bool = True,
) -> nn.Module:
    """A model of the same class with the same weights and better probabilities.

    `print(model.calibration)` shows what it does to rows that it was not fitted on, before and
    after; where that speaks against it, so does a `CalibrationWarning`.

    Args:
        model: the trained classifier; left untouched.
        loader: labelled batches the model was not trained on; see `collect` for their forms.
        recipe: what to fit, as text or as a calibrator, which is then fitted in place; None for
            "auto", or with a layer for "clip | temperature".
        head: dotted path of the last layer, when it is not found by itself.
        layer: dotted path of another layer, whose output the feature steps are to act on.
        mode: "joint" or "sequential"; see `Calibrator.fit`.
        unpack: makes (inputs, labels) of a batch in a form `collect` does not know.
        ignore_index: the label of pixels and tokens that do not count.
        positions: how many pixels or tokens of a sample to keep at most; see `collect`.
        seed: of their draw.
        test: labelled batches to score before and after on; without them the recipe is cross-fitted
            on those of `loader`, at most half as long again as a long fit.
        evidence: whether to score at all.
    """
    if recipe is None:
        recipe = "auto" if layer is None else "clip | temperature"
    calibrator = parse(recipe) if isinstance(recipe, str) else recipe
    if not isinstance(calibrator, Calibrator):
        raise InputError(
            f"recipe is a {type(calibrator).__name__}: give its text, such as 'temperature', or a "
            "calibrator; rows to score go by name, test="
        )
    check_uncalibrated(model)
    if layer is not None:
        divided(calibrator, layer)  # a recipe that cannot act there costs no pass over the data
    strict = calibrator.needs_features
    collector = Collector(model, head, layer, unpack, ignore_index, positions, seed, strict)
    with shown(), _named(calibrator):
        data = list(collector.batches(loader))
        if data[0].labels.ndim > 1 and not calibrator.several:
            calibrator = all_labels(calibrator)
        calibrator.fit(data, collector.head, mode=mode)
    calibrated = attach(model, calibrator, head=collector.path, layer=layer)
    _check_used(calibrated, collector)
    if evidence:
        drawn: Any = {"ignore_index": ignore_index, "positions": positions, "seed": seed}
        at = collector.path
        rows = None if test is None else _seen(model, test, at, unpack, layer, **drawn)[0]
        how: Any = {"test": rows, "mode": mode, "costly": layer is not None}
        found = Evidence.of(calibrator, data, collector.head, **how)
        calibrated.__dict__["calibration"] = found  # of the copy alone, and no weight of it
        for text in found.warnings:
            if text != found.report.few_rows:  # which the fit has said
                warnings.warn(text, CalibrationWarning, stacklevel=2)
    return calibrated


@contextmanager
def _named(calibrator: Calibrator) -> Iterator[None]:
    """Says which recipe asks for features where a model has no last layer they enter."""
    try:
        yield
    except NoHead as error:
        raise InputError(f"{calibrator!r} works on features, and {error}") from error


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


def evaluate(
    data: nn.Module | Batch | Data | Pack,
    calibrator: Calibrator | Loader | None = None,
    head: Head | str | None = None,
    *,
    unpack: Unpack | None = None,
    ignore_index: int = IGNORED,
    positions: int | None = None,
    **options: Any,  # noqa: ANN401 - of `featcal.report.scores.evaluate`
) -> Scores:
    """Scores a model on a loader, or rows with a calibrator or without one, by every metric.

    Args:
        data: the model, calibrated or not; or labelled rows: batches, what `collect` gave, a pack
            (its split test) or a split of it, or a pair of arrays (logits, labels).
        calibrator: the loader of labelled batches for a model; for rows what to apply to them.
        head: path of a model's last layer; for rows the layer itself, where they bring none along.
        unpack: makes (inputs, labels) of a batch in a form `collect` does not know.
        ignore_index: the label of pixels and tokens that do not count.
        positions: how many pixels or tokens of a sample to keep at most; see `collect`.
        options: bins (15), resamples for 95 % intervals (0), and the seed (0) of all draws.
    """
    if isinstance(getattr(data, "calibrator_", data), Calibrator):
        raise InputError("data is a calibrator: give the rows first, evaluate(data, calibrator)")
    if not isinstance(data, nn.Module):
        return score_rows(paired(data), calibrator, head, **options)  # type: ignore[arg-type]
    drawn = {"ignore_index": ignore_index, "positions": positions, "seed": options.get("seed", 0)}
    rows, used = _seen(data, calibrator, head, unpack, **drawn)  # type: ignore[arg-type]
    return score_rows(rows, used, **options)


def compare(
    data: nn.Module | Batch | Data | Pack,
    *others: Any,  # noqa: ANN401 - see the docstring
    recipes: Sequence[str] | Literal["all"] = DEFAULT_RECIPES,
    unpack: Unpack | None = None,
    ignore_index: int = IGNORED,
    positions: int | None = None,
    **options: Any,  # noqa: ANN401 - of `featcal.report.compare.compare`
) -> Comparison:
    """Fits each recipe on validation rows and scores it on test rows, with 95 % intervals.

    `compare(model, val_loader, test_loader)` runs the model. `compare(pack)` and
    `compare(val, test)` take rows in any form that `evaluate` does. Without test rows those of val
    are cross-fitted, five folds.

    Args:
        data: the model, without a calibrator; or a pack; or the rows to fit on.
        others: of a model the loaders of val and test; else the rows to score. The recipes may
            follow, and of rows the last layer, where they bring none along.
        recipes: their texts; "none" is the network as it is, and "all" every method that can be
            fitted.
        unpack: makes (inputs, labels) of a batch in a form `collect` does not know.
        ignore_index: the label of pixels and tokens that do not count.
        positions: how many pixels or tokens of a sample to keep at most; see `collect`.
        options: mode, metrics, bins, baseline, resamples, seed, folds, train, head.
    """
    named = [one for one in others if _are_recipes(one)]
    if len(named) + (recipes is not DEFAULT_RECIPES) > 1:
        raise InputError("recipes are given twice: name them once")
    others = tuple(one for one in others if not _are_recipes(one))
    recipes = named[0] if named else recipes
    if not isinstance(data, nn.Module):
        rows, *rest = map(paired, (data, *others))
        if recipes is DEFAULT_RECIPES:
            first = next(iter(as_data(rows_of(rows, "val"))), None)
            recipes = usual_recipes(features=first is not None and first.features is not None)
        test, *layer = rest or [options.pop("test_data", None)]
        check_apart(rows, test)
        if test is None and not isinstance(rows, Pack):
            options.setdefault("folds", FOLDS)
        return compare_rows(rows, test, recipes, *layer, **options)
    check_uncalibrated(data)
    if not 1 <= len(others) <= 2:
        raise InputError(
            "compare(model, ...): pass the loader of val, that of test if there is one, and the "
            "recipes, a list of texts"
        )
    head = options.pop("head", None)
    drawn = {"ignore_index": ignore_index, "positions": positions, "seed": options.get("seed", 0)}
    if len(others) == 2:
        check_apart(*others)
    val, *rest = (_seen(data, one, head, unpack, **drawn)[0] for one in others)
    if not rest:
        options.setdefault("folds", FOLDS)
    if recipes is DEFAULT_RECIPES:
        recipes = usual_recipes(features=val.head is not None)
    return compare_rows(val, rest[0] if rest else None, recipes, **options)


def _are_recipes(given: object) -> bool:
    """Whether an argument is meant as recipes: texts, or what `compare_rows` refuses as such."""
    if isinstance(given, (list, tuple)):
        return not given or isinstance(given[0], (str, Calibrator))
    return isinstance(given, (str, Calibrator))


def _seen(
    model: nn.Module,
    loader: Loader,
    head: str | None,
    unpack: Unpack | None,
    layer: str | None = None,
    **drawn: Any,  # noqa: ANN401 - of `collect`, for pixels and tokens
) -> tuple[Collected, Calibrator | None]:
    """What enters and leaves a model's last layer over a loader, and the calibrator it has."""
    calibrator = None
    if is_calibrated(model):
        calibrator, head, layer = attached(model)
        model = detach(model)
    return collect(model, loader, head=head, layer=layer, unpack=unpack, **drawn), calibrator
