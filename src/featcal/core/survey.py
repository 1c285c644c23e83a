"""A look at all data before a fit: refuse what cannot be used, by name, row and value."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from featcal.core import dist
from featcal.core.batch import Batch, Data, Head, stored_logits
from featcal.core.errors import InputError


@dataclass(frozen=True)
class Facts:
    """What one look at the data tells."""

    rows: int
    classes: int
    width: int  # features a row, 0 when there are only logits
    device: torch.device

    @property
    def work(self) -> int:
        """Numbers one pass handles, with 256 multiplications of the head counted as one."""
        return self.rows * self.classes * max(self.width // 256, 1)


def survey(data: Data, head: Head | None) -> Facts:
    """Reads all data once and refuses what cannot be fitted, by name, row and value."""
    refused: InputError | None = None
    local = Facts(0, 0, 0, torch.device("cpu"))
    try:
        local = _local_facts(data, head)
    except InputError as error:
        refused = error
    # All processes leave together: one that raises alone would leave the others waiting for it.
    anywhere = bool(dist.largest(torch.tensor(int(refused is not None))))
    if refused is not None:
        raise refused
    if anywhere:
        raise InputError("another process found data it cannot use: see what it says")
    rows = int(dist.total(torch.tensor(local.rows)))
    if rows == 0:
        raise InputError("data is empty: a fit needs at least one labelled row")
    classes, width = dist.largest(torch.tensor([local.classes, local.width])).tolist()
    return Facts(rows, classes, width, local.device)


def _local_facts(data: Data, head: Head | None) -> Facts:
    """What this process's own rows tell."""
    rows, classes, device = 0, 0, torch.device("cpu")
    widths: dict[str, int | None] = {}
    for batch in data:
        if rows == 0 and len(batch):
            classes, device, widths = _classes(batch, head), batch.labels.device, _widths(batch)
        check_batch(batch, classes=classes, first_row=rows)
        if len(batch):
            _check_alike(_widths(batch), widths, rows)
        rows += len(batch)
    return Facts(rows, classes, widths.get("features") or 0, device)


def _widths(batch: Batch) -> dict[str, int | None]:
    """Features and logits a row; None where there are none."""
    parts = {"features": batch.features, "logits": batch.logits}
    return {name: None if part is None else _columns(part) for name, part in parts.items()}


def _columns(values: Tensor) -> int:
    """Values a row; 0 for a single number, which `check_batch` is to refuse."""
    return values.shape[-1] if values.ndim else 0


def _check_alike(found: dict[str, int | None], first: dict[str, int | None], row: int) -> None:
    """Every batch must hold what the first one holds, in the same width."""
    for name, width in first.items():
        if found[name] != width:
            here, there = ("no" if w is None else w for w in (found[name], width))
            raise InputError(
                f"the batch from row {row} on has {here} {name} a row and the first batch has "
                f"{there}: give every batch the same"
            )


def _classes(batch: Batch, head: Head | None) -> int:
    """The number of classes, from the stored logits or from one row through the head."""
    if batch.features is None and batch.logits is None:
        raise InputError("the batch has neither logits nor features: give one of them")
    if head is not None and batch.features is not None:
        return _checked_head(batch.rows(slice(0, 64)), head)
    if batch.logits is None:
        raise InputError("the batch has features but no logits: pass the classifier head")
    return _columns(batch.logits)


@torch.no_grad()
def _checked_head(batch: Batch, head: Head) -> int:
    """Runs a few rows through the head: does it fit, and are its logits the stored ones?"""
    assert batch.features is not None
    try:
        logits = head(batch.features)
    except RuntimeError as error:
        raise InputError(
            f"head does not accept features of shape {tuple(batch.features.shape)} and type "
            f"{batch.features.dtype}: {str(error).splitlines()[0]}"
        ) from error
    if logits.ndim != 2 or len(logits) != len(batch):
        raise InputError(
            f"head returned shape {tuple(logits.shape)} for {len(batch)} rows: it must return "
            "(rows, classes)"
        )
    if batch.logits is not None:
        check_same(logits, batch.logits)
    return logits.shape[1]


def check_same(logits: Tensor, stored: Tensor) -> None:
    """Refuses stored logits that are not those the head gives."""
    if logits.shape != stored.shape:
        raise InputError(
            f"head gives {logits.shape[1]} classes and the stored logits have {stored.shape[-1]}: "
            "this is not the head that made them"
        )
    narrow = min(logits.dtype.itemsize, stored.dtype.itemsize) < 4
    logits, stored = logits.double(), stored.double()
    gaps = (logits - stored).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    gaps = gaps.where(stored.isfinite(), 0)  # check_batch names the rows of those that are not
    far = gaps > (0.05 if narrow else 1e-3) * _sizes(stored)
    if bool(far.any()):
        gap = float(gaps[far].max())
        raise InputError(
            f"head(features) differs from the stored logits by {gap:.3g}: this is not the head "
            "that made them, or something stands between features and head (a missing ReLU, "
            "active dropout)"
        )


def _sizes(logits: Tensor) -> Tensor:
    """What a difference (n, k) is to be compared with: the logit itself, and the row's largest.

    Not the largest size of all: a class masked by -1e9 would excuse the others. A row whose
    largest logit is near 0 by chance has the rounding of rows like the others.
    """
    tops = logits.amax(1, keepdim=True).abs()
    usual = tops.median() if len(tops) else tops.sum()
    sizes = torch.maximum(torch.maximum(logits.abs(), tops), usual)
    return torch.where(sizes.isfinite(), sizes, 1).clamp(min=1)


def check_batch(batch: Batch, *, classes: int, first_row: int = 0) -> None:
    """Refuses shapes, labels and values no fit can use; rows are counted from `first_row`."""
    if batch.features is None and batch.logits is None:
        raise InputError("the batch has neither logits nor features: give one of them")
    labels = batch.labels
    if labels.ndim != 1 or labels.is_floating_point() or labels.dtype == torch.bool:
        raise InputError(
            f"labels have shape {tuple(labels.shape)} and type {labels.dtype}"
            f"{_odd_label(labels, first_row)}: they must be one integer a row"
            f"{_label_remedy(labels)}"
        )
    for name, values in (("features", batch.features), ("logits", batch.logits)):
        if values is None:
            continue
        if values.ndim != 2 or len(values) != len(labels) or not values.is_floating_point():
            raise InputError(
                f"{name} have shape {tuple(values.shape)} and type {values.dtype}: "
                f"they must be floating point, ({len(labels)}, ...), one row a label"
            )
        # A finite sum proves finite terms, and costs one read instead of three. One that is not
        # may be an overflow of the sum itself: _refuse looks at the terms.
        if not bool(torch.isfinite(values.sum())):
            _refuse(name, ~torch.isfinite(values).all(1), first_row, "NaN or infinite", "remove")
    _refuse("labels", (labels < 0) | (labels >= classes), first_row, f"outside 0..{classes - 1}")


def _odd_label(labels: Tensor, first_row: int) -> str:
    """The first label that no class can have, such as a smoothed 0.9; empty where there is none."""
    odd = (labels.frac() != 0).nonzero() if labels.is_floating_point() else labels[:0]
    if labels.ndim != 1 or not len(odd):
        return ""
    row = int(odd[0, 0])
    return f", {float(labels[row]):.6g} in row {first_row + row}"


def _label_remedy(labels: Tensor) -> str:
    """How labels in a form that is known are made to be one integer a row."""
    if labels.ndim == 2 and labels.shape[1] == 1:
        return "; take labels[:, 0]" + (".long()" if labels.is_floating_point() else "")
    if labels.ndim == 2 and bool(((labels != 0).sum(1) == 1).all()):
        return "; take labels.argmax(1)"
    whole = labels.dtype == torch.bool or not bool((labels.frac() != 0).any())
    return "; take labels.long()" if labels.ndim == 1 and whole else ""


def check_finite(data: Data, name: str = "the head's logits", *, first_row: int = 0) -> None:
    """Refuses logits that are not finite, as a head makes them of finite but huge features."""
    row = first_row
    for batch in data:
        bad = ~torch.isfinite(stored_logits(batch)).all(1)
        _refuse(name, bad, row, "NaN or infinite", "remove or rescale")
        row += len(batch)


def _refuse(name: str, bad: Tensor, first_row: int, what: str, remedy: str = "correct") -> None:
    rows = (bad.nonzero().flatten() + first_row).tolist()
    if rows:
        shown = ", ".join(map(str, rows[:5])) + (", ..." if len(rows) > 5 else "")
        which = f"row {shown}" if len(rows) == 1 else f"{len(rows)} rows ({shown})"
        raise InputError(f"{name} are {what} in {which}: {remedy} them first")
