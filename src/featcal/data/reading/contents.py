"""What files hold, in the terms of `write_pack`: every format is read as this, and only this."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from featcal.core.batch import Batch, Data, stored_logits
from featcal.core.binary import is_single
from featcal.core.errors import InputError
from featcal.core.probabilities import ROUNDING, Kind

SPLIT_PARTS = ("features", "logits", "probs", "labels")  # the arrays a split may have
SLACK = 1e-2  # how far from 1 the probabilities of a row may sum, rounded as files are


@final
@dataclass(frozen=True, slots=True)
class Contents:
    """The splits of one or more files, each read when it is asked for, and what goes with them.

    Attributes:
        splits: the data of every split, by name.
        head: weight (k, d) and bias (k,) of the last layer, or None.
        class_names: one name a class, or None.
        meta: anything else worth keeping, as JSON.
    """

    splits: Mapping[str, Data]
    head: tuple[Tensor, Tensor | None] | None = None
    class_names: Sequence[str] | None = None
    meta: dict[str, Any] = field(default_factory=dict)


@contextmanager
def about(*files: Path) -> Iterator[None]:
    """Puts the files in front of what is wrong with them, unless the sentence names one already."""
    try:
        yield
    except InputError as error:
        if any(str(file) in str(error) for file in files):
            raise
        names = listed([str(file) for file in files], at_most=2)
        raise InputError(f"{names}: {error}") from error


def listed(names: Sequence[str], *, at_most: int = 12) -> str:
    """Names for a sentence; the first few of many."""
    shown = ", ".join(names[:at_most]) + (", ..." if len(names) > at_most else "")
    return shown or "nothing"


def noted(meta: dict[str, Any], kind: str) -> dict[str, Any]:
    """The meta of a pack whose logits are logarithms of probabilities says so."""
    return {"source": "probabilities", **meta} if kind == "probs" else meta


def scored(kind: Kind, values: Tensor, labels: Tensor, place: Callable[[int], str]) -> Batch:
    """A batch of rows of logits or probabilities, (n, k), or (n,) or (n, 1) of class 1.

    Args:
        kind: what the values are.
        values: the scores.
        labels: (n,) integers.
        place: what to call a row, by its number in `values`, when it is refused.
    """
    if kind == "logits":
        return Batch(values, labels)
    wide = values.double()
    _check_probs(wide.reshape(len(wide), -1), place)
    batch = Batch.from_probs(wide.clamp(0, 1), labels)
    return replace(batch, logits=stored_logits(batch).clamp_min(_floor(values.dtype)).float())


def _floor(dtype: torch.dtype) -> float:
    """The logit of a probability that is 0 as stored: the smallest one the type could tell from 0.

    For wider types it is that of float32, so that the same numbers give the same pack.
    """
    half = torch.finfo(torch.float16)
    tiny = half.tiny * half.eps if dtype == torch.float16 else torch.finfo(torch.float32).tiny
    return math.log(tiny)


def _check_probs(probs: Tensor, place: Callable[[int], str]) -> None:
    """Refuses the first row that is no distribution; comparisons with NaN are false."""
    single = is_single(probs)
    inside = ((probs >= -ROUNDING) & (probs <= 1 + ROUNDING)).all(1)
    sums = probs.sum(1)
    fits = inside if single else inside & ((sums - 1).abs() <= SLACK)
    if bool(fits.all()):
        return
    row = int((~fits).nonzero()[0])
    low, high = float(probs[row].min()), float(probs[row].max())
    total = "" if single else f" with the sum {float(sums[row]):.6g}"
    raise InputError(
        f"{place(row)} holds numbers from {low:.6g} to {high:.6g}{total}: probabilities lie in "
        f"0..1{'' if single else ' and sum to 1'}; divide percentages by 100, and name logits as "
        "logits"
    )
