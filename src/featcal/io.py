"""One file for a fitted calibrator: tensors in safetensors, recipe and fit report in its header.

The file of a calibrated model holds the calibrator and where in the model it belongs; the network's
own weights stay where its users keep them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, overload

import torch
from torch import nn

from featcal.core.calibrator import METHODS, Calibrator
from featcal.core.checks import InputError
from featcal.core.files import new_file
from featcal.core.fit import FitReport
from featcal.core.stored import json_of, made, read_tensors, reading, save_tensors
from featcal.core.text import parse
from featcal.heads.attach import attach, attached
from featcal.version import __version__

FORMAT = "featcal.calibrator"
VERSION = 1
TEXTS = {"format", "version", "recipe", "versions", "report", "place"}
WIDEST = 2**24  # classes and features of a try


def save(
    given: Calibrator | nn.Module | Any,  # noqa: ANN401 - an estimator of `featcal.arrays`
    path: Path | str,
    *,
    overwrite: bool = False,
) -> Path:
    """Writes a calibrator to one safetensors file; the file appears whole or not at all.

    Args:
        given: the calibrator; or a calibrated model, whose calibrator is written with its place in
            the model, and none of the model's own weights; or a `featcal.arrays.Calibrated`.
        path: the file.
        overwrite: replace the file if it exists.
    """
    check_ending(Path(path))
    place: dict[str, str | None] = {}
    if isinstance(given, nn.Module) and not isinstance(given, Calibrator):
        given, head, layer = attached(given)
        place = {"head": head, "layer": layer}
    calibrator = getattr(given, "calibrator_", given)
    if not isinstance(calibrator, Calibrator):
        kind = type(given).__name__
        raise InputError(f"{kind} holds no fitted calibrator: fit it, or give a calibrated model")
    calibrator = calibrator.outcome()
    report = calibrator.report
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "recipe": repr(calibrator),
        "versions": json.dumps({"featcal": __version__, "torch": str(torch.__version__)}),
        "report": json.dumps(None if report is None else report.as_record()),
        "place": json.dumps(place),
    }
    with new_file(path, overwrite=overwrite) as temporary:
        tensors = {key: value.contiguous() for key, value in calibrator.state_dict().items()}
        save_tensors(temporary, tensors, metadata)
    return Path(path)


def check_ending(path: Path) -> None:
    """Refuses a file whose ending promises another format."""
    if path.suffix not in ("", ".safetensors"):
        raise InputError(
            f"output {path} is of no known format: end it in .safetensors; featcal export makes "
            "the ONNX file of it"
        )


@overload
def load(path: Path | str) -> Calibrator: ...
@overload
def load(path: Path | str, *, onto: nn.Module, head: str | None = None) -> nn.Module: ...
def load(
    path: Path | str, *, onto: nn.Module | None = None, head: str | None = None
) -> Calibrator | nn.Module:
    """The calibrator in a file, fitted values to the bit, or a model calibrated by it.

    Args:
        path: the file that `save` or `featcal fit` wrote.
        onto: the network it was fitted to, with its own weights loaded; the result is then a model
            of the same class with the calibrator attached, and with the report of the fit as its
            `calibration`.
        head: path of the model's last layer, where the file names none or another.

    Raises:
        InputError: when the file is missing, damaged, or not a calibrator of a known version.
    """
    if not Path(path).is_file():
        why = "is a folder" if Path(path).is_dir() else "does not exist"
        raise InputError(f"{path} {why}: give the file that 'featcal fit -o' wrote")
    with reading(path, "give the file that 'featcal fit -o' wrote, or fit it again"):
        tensors, texts = read_tensors(path)
        if texts.get("format") != FORMAT:
            raise InputError(f"{path} is not a featcal calibrator: make one with 'featcal fit'")
        if texts.get("version") != str(VERSION):
            raise InputError(f"{path} is of another version than {VERSION}: update featcal")
        if not texts.keys() <= TEXTS:
            raise InputError(f"its header has {min(texts.keys() - TEXTS)!r}, which no fit writes")
        calibrator = parse(texts.get("recipe", ""))
        fresh = (getattr(step, "step", step) for step in calibrator.steps_in_order())
        values = (pair for step in fresh for pair in step.named_buffers())
        infinite = {name for name, value in values if value.isinf().any()}
        for key, value in tensors.items():
            unbounded = key.rpartition(".")[2] in infinite
            if bool(value.isnan().any()) or (not unbounded and bool(value.isinf().any())):
                raise InputError(f"{key} is NaN or infinite, which no fit gives")
        calibrator.load_state_dict(tensors)
        place = made(dict[str, str | None], json_of(texts.get("place", "{}")), "place")
        record = json_of(texts.get("report", "null"))
        if record is not None:
            calibrator.report = FitReport.of_record(record)
            unknown = {step.name for step in calibrator.report.steps} - {*METHODS}
            if unknown:
                raise InputError(f"its report tells of {min(unknown)[:40]!r}, which is no method")
        _try_out(calibrator)
    if onto is None:
        return calibrator
    head = place.get("head") if head is None else head
    model = attach(onto, calibrator, head=head, layer=place.get("layer"))
    vars(model)["calibration"] = calibrator.report  # where `calibrate` leaves its evidence
    return model


@torch.no_grad()
def _try_out(calibrator: Calibrator) -> None:
    """Refuses fitted values that give no logits, as a damaged file may hold them."""
    report = calibrator.report
    if report is None or not report.classes:
        return
    if max(report.classes, report.features) > WIDEST:
        raise InputError(f"it says {report.classes} classes of {report.features} features")
    rows = min(64, max(2, 2**22 // max(report.classes, report.features)))
    generator, size = torch.Generator().manual_seed(0), torch.logspace(-2, 2, rows)[:, None]
    logits = size * torch.randn(rows, report.classes, generator=generator)
    features = size * torch.randn(rows, max(report.features, 1), generator=generator)
    found = calibrator(features, lambda x: logits + 0 * x.sum(1, keepdim=True))
    old, new = (z > 0 if calibrator.several else z.argmax(1) for z in (logits, found))
    same = torch.equal(old, new) or not calibrator.keeps_accuracy
    if found.shape != logits.shape or not bool(torch.isfinite(found).all()) or not same:
        raise InputError(f"{calibrator}: no fit gives such values: the file is damaged")
