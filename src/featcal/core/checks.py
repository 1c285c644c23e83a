"""How values are checked, once, where they come in, and how a refusal is worded.

For every place that takes values from a user or a file:

    check_probs(probs, *, slack=None, place=..., remedy=...)      rows in 0..1 that sum to 1
    checked_labels(labels, classes, *, rows=None, first_row=0)    one class number per row, int64
    checked_groups(groups, rows)                                  one sample number per row, int64
    check_finite(name, values, *, first_row=0, remedy=None)       no NaN, no infinity
    check_batch(batch, *, classes, first_row=0)                   all of this for a Batch
    check_same(logits, stored)                                    stored logits are the head's own

Each raises `InputError` for anything else. `first_row` is the number of the first row among all of
them; `slack` is how far from 1 a row may sum, `sum_tolerance` of its precision by default. torch is
imported where tensors are checked: the command line, which knows the errors, starts without it.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from featcal.core.batch import Batch

Kind = Literal["logits", "probs"]

ARGUMENT = re.compile(r"<([\w=.]+)>")
ROUNDING = 1e-6  # how far below 0 or above 1 one may lie: exp(z - logsumexp(z)) may end there
ROW_SUM, ROW_SUM_16_BIT = 1e-3, 1e-2
ROUNDED_SUM = 1e-2 + 1e-6  # the same of probabilities rounded to two or three decimals
DOUBTED_ROWS = 1000  # rows that are looked at to tell logits from probabilities
SHOWN_ROWS = 5
REMEDY = "remove them first"
REMEDIES = {"logits": f"{REMEDY}, or write -50 for masked classes"}  # by what is refused
# The most of a whole number, by its name: a larger one would only take time or memory.
MOST = {
    **{"partitions": 200, "groups": 100, "restarts": 100, "hidden": 200, "layers": 10},
    **{"bins": 10_000, "knots": 1000, "top": 1000, "neighbours": 10**6, "references": 10**7},
    **{"min_rows": 10**9, "seed": 2**62},
}
STRONGEST = 1e6
SMALLEST, HUGEST = 1e-30, 1e30  # of a number that a recipe fixes: float32 has room beyond


class InputError(ValueError):
    """Input that cannot be used; the text names the argument, the value and the remedy."""


class ArgumentError(InputError):
    """Input refused for an argument that people may know under another name, such as an option.

    Attributes:
        template: the sentence, with every such argument in angle brackets.

    >>> error = ArgumentError("<batch> is 0: give a <batch> of 1 or more")
    >>> str(error)
    'batch is 0: give a batch of 1 or more'
    >>> error.sentence(lambda name: f"--{name}")
    '--batch is 0: give a --batch of 1 or more'
    """

    def __init__(self, template: str) -> None:
        self.template = template
        super().__init__(self.sentence(str))

    def sentence(self, name_of: Callable[[str], str]) -> str:
        """What is wrong, with arguments by the names the reader knows."""
        return ARGUMENT.sub(lambda found: name_of(found[1]), self.template)


class Elsewhere(InputError):
    """What ended this process and only another process of the same job can explain."""


ENDED = (
    "another process of this job has ended: see what it said, or whether it was killed or out of "
    "memory; no file was left half written"
)


class CalibrationWarning(UserWarning):
    """A fit that ended somewhere a person should look at."""


def check_flags(method: str, **given: object) -> None:
    """Refuses anything but True and False.

    >>> check_flags("group", reference=1)
    Traceback (most recent call last):
    featcal.core.checks.InputError: group: reference is 1: give True or False
    """
    for key, value in given.items():
        if not isinstance(value, bool):
            raise InputError(f"{method}: {key} is {value!r}: give True or False")


def check_choice(method: str, key: str, value: object, known: Iterable[str]) -> None:
    """Refuses anything but one of the known words.

    >>> check_choice("group", "base", "temp", ("temperature", "ensemble"))
    Traceback (most recent call last):
    featcal.core.checks.InputError: group: base is 'temp': choose temperature or ensemble
    """
    words = list(known)
    if not isinstance(value, str) or value not in words:
        *first, last = words
        listed = f"{', '.join(first)} or {last}" if first else last
        raise InputError(f"{method}: {key} is {value!r}: choose {listed}")


def check_whole(method: str, least: int, **given: object) -> None:
    """Refuses anything but whole numbers from `least` to what MOST has for their name, or up.

    >>> check_whole("histogram", 1, bins=0)
    Traceback (most recent call last):
    featcal.core.checks.InputError: histogram: bins is 0: give a whole number from 1 to 10000
    """
    for key, value in given.items():
        most = MOST.get(key, math.inf)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            end = f"to {most}" if key in MOST else "up"
            raise InputError(
                f"{method}: {key} is {value!r}: give a whole number from {least} {end}"
            )


def check_strength(method: str, key: str, value: object) -> float:
    """The strength of a penalty: 0 up to STRONGEST, beyond which nothing is left of a fit.

    >>> check_strength("vector", "ridge", 1e308)
    Traceback (most recent call last):
    featcal.core.checks.InputError: vector: ridge is 1e+308: give a number from 0 to 1e+06
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value <= STRONGEST:  # type: ignore[operator]
        raise InputError(f"{method}: {key} is {value!r}: give a number from 0 to {STRONGEST:g}")
    return value if isinstance(value, int) else float(value)  # type: ignore[arg-type]


def check_positive(method: str, key: str, value: object) -> float:
    """A number above 0 that float32 can work with, as a recipe may fix one.

    >>> check_positive("clip", "threshold", 0)
    Traceback (most recent call last):
    featcal.core.checks.InputError: clip: threshold is 0: give a number from 1e-30 to 1e+30, or \
leave it out to have it fitted
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not SMALLEST <= value <= HUGEST:  # type: ignore[operator]
        raise InputError(
            f"{method}: {key} is {value!r}: give a number from {SMALLEST:g} to {HUGEST:g}, or "
            "leave it out to have it fitted"
        )
    return value if isinstance(value, int) else float(value)  # type: ignore[arg-type]


def whole_number(value: object) -> int:
    """The integer that a value is; -1, which every caller refuses, for what is none."""
    try:
        return -1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return -1


def rows_text(rows: Tensor, first_row: int = 0) -> str:
    """Row numbers as a message shows them.

    >>> import torch
    >>> rows_text(torch.arange(7), 10)
    'rows 10, 11, 12, 13, 14 and 2 more'
    """
    shown = ", ".join(str(first_row + row) for row in rows[:SHOWN_ROWS].tolist())
    more = len(rows) - SHOWN_ROWS
    return f"row{'s' * (len(rows) > 1)} {shown}" + (f" and {more} more" if more > 0 else "")


def sum_tolerance(values: Tensor) -> float:
    """How far from 1 a row of probabilities of this precision may sum."""
    return ROW_SUM if values.dtype.itemsize >= 4 else ROW_SUM_16_BIT


def like_probs(rows: Tensor) -> bool:
    """Whether rows (n, k) given as logits look like probabilities, whole or rounded.

    The two logits (0, z) of a sigmoid never do: z near 1 would.
    """
    if rows.ndim != 2 or rows.shape[1] < 2 or not len(rows):
        return False
    rows = rows[:DOUBTED_ROWS].float()
    if rows.shape[1] == 2 and not bool(rows[:, 0].any()):
        return False
    near = (rows.sum(1) - 1).abs() <= ROUNDED_SUM
    return bool(((rows >= 0) & (rows <= 1)).all() & near.all())


def doubt_logits(rows: Tensor, name: str, remedy: str) -> str:
    """What to say of rows (n, k) that are read as logits and look like probabilities; else "".

    >>> import torch
    >>> doubt_logits(torch.tensor([[0.25, 0.74]]), "the rows of X", "pass kind='probs'")
    "the rows of X lie in 0..1 and sum to 1, as probabilities do, and are read as logits: pass \
kind='probs' if they are probabilities"
    """
    if not like_probs(rows):
        return ""
    return (
        f"{name} lie in 0..1 and sum to 1, as probabilities do, and are read as logits: {remedy} "
        "if they are probabilities"
    )


def check_probs(
    probs: Tensor,
    *,
    slack: float | None = None,
    place: Callable[[int], str] = lambda row: f"probs[{row}]",
    remedy: str = "divide percentages by 100, and pass logits as logits",
) -> None:
    """Refuses the first row that is no distribution.

    Args:
        probs: (n, k), or the probability of class 1 alone as (n,) or (n, 1).
        slack: how far from 1 a row may sum; `sum_tolerance` by default.
        place: what to call a row.
        remedy: what to do instead.

    >>> import torch
    >>> check_probs(torch.tensor([[0.5, 0.5], [2.0, -3.0]]))
    Traceback (most recent call last):
    featcal.core.checks.InputError: probs[1] holds -3 to 2 with the sum -1: probabilities lie in \
0..1 and sum to 1; divide percentages by 100, and pass logits as logits
    """
    import torch

    if not probs.is_floating_point():
        raise InputError(f"probs have type {probs.dtype}: pass floating point values")
    if not len(probs):
        return
    slack = sum_tolerance(probs) if slack is None else slack
    values = (probs.float() if probs.dtype.itemsize < 4 else probs).reshape(len(probs), -1)
    single = values.shape[1] == 1
    sums = values.sum(1)
    near = torch.ones_like(sums, dtype=torch.bool) if single else (sums - 1).abs() <= slack
    low, high = torch.aminmax(values)
    if bool(low >= -ROUNDING) and bool(high <= 1 + ROUNDING) and bool(near.all()):
        return  # comparisons with NaN are false
    fits = near & ((values >= -ROUNDING) & (values <= 1 + ROUNDING)).all(1)
    row = int((~fits).nonzero()[0])
    numbers = f"{float(values[row].min()):.6g}"
    if not single:
        numbers += f" to {float(values[row].max()):.6g} with the sum {float(sums[row]):.6g}"
    rule = "lie in 0..1" if single else "lie in 0..1 and sum to 1"
    raise InputError(f"{place(row)} holds {numbers}: probabilities {rule}; {remedy}")


def check_whole_labels(labels: Tensor) -> None:
    """Refuses what is no class: the targets of a regression.

    >>> import torch
    >>> check_whole_labels(torch.tensor([0.5, 2.0]))
    Traceback (most recent call last):
    featcal.core.checks.InputError: labels are fractions such as 0.5, as the targets of a \
regression, which is not supported: give the class of each row, 0, 1, 2, ...; of soft labels take \
argmax(1)
    """
    odd = labels[labels % 1 != 0] if labels.is_floating_point() else labels[:0]
    if odd.numel():
        raise InputError(
            f"labels are fractions such as {float(odd.flatten()[0]):.4g}, as the targets of a "
            "regression, which is not supported: give the class of each row, 0, 1, 2, ...; of soft "
            "labels take argmax(1)"
        )


def checked_labels(
    labels: Tensor, classes: int, *, rows: int | None = None, first_row: int = 0
) -> Tensor:
    """One integer per row, 0 to classes - 1, as many as there are rows: (n,) int64."""
    import torch

    check_whole_labels(labels)
    kinds = labels.is_floating_point(), labels.is_complex(), labels.dtype == torch.bool
    if labels.ndim != 1 or any(kinds):
        raise InputError(
            f"labels have shape {tuple(labels.shape)} and type {labels.dtype}: they must be one "
            "integer per row; take labels.argmax(1) if they are one-hot, labels[:, 0] of a single "
            "column, labels.long() of whole numbers"
        )
    if rows is not None and len(labels) != rows:
        raise InputError(f"there are {len(labels)} labels for {rows} rows: give one per row")
    labels = labels.long()
    wrong = ((labels < 0) | (labels >= classes)).nonzero().flatten()
    if len(wrong):
        raise InputError(
            f"labels are outside 0..{classes - 1} in {rows_text(wrong, first_row)}: "
            "correct them first"
        )
    return labels


def checked_groups(groups: Tensor, rows: int) -> Tensor:
    """The number of its sample for each row, 0 or more: (n,) int64.

    >>> import torch
    >>> checked_groups(torch.tensor([0, 0, -1]), 3)
    Traceback (most recent call last):
    featcal.core.checks.InputError: groups have shape (3,), type torch.int64 and the least number \
-1: give the number of its sample, 0 or more, for each of 3 rows
    """
    whole = not groups.is_floating_point() and "bool" not in str(groups.dtype)
    least = int(groups.min()) if whole and groups.numel() else 0
    if groups.shape != (rows,) or not whole or least < 0:
        raise InputError(
            f"groups have shape {tuple(groups.shape)}, type {groups.dtype} and the least number "
            f"{least}: give the number of its sample, 0 or more, for each of {rows} rows"
        )
    return groups.long()


def check_finite(
    name: str, values: Tensor, *, first_row: int = 0, remedy: str | None = None
) -> None:
    """Refuses rows that are not finite; `name` is a plural, such as "features"."""
    import torch

    # A finite sum proves finite terms, and costs one read instead of three. One that is not may be
    # an overflow of the sum itself: the terms decide.
    if not bool(torch.isfinite(values.sum())):
        bad = (~torch.isfinite(values).flatten(1).all(1)).nonzero().flatten()
        if len(bad):
            rows = rows_text(bad, first_row)
            remedy = remedy or REMEDIES.get(name, REMEDY)
            raise InputError(f"{name} are NaN or infinite in {rows}: {remedy}")


def check_batch(batch: Batch, *, classes: int, first_row: int = 0) -> None:
    """Refuses shapes, labels and values no fit can use; rows are counted from `first_row`."""
    if batch.features is None and batch.logits is None:
        raise InputError("the batch has neither logits nor features: give one of them")
    for name, values in (("features", batch.features), ("logits", batch.logits)):
        if values is not None:
            if values.ndim != 2 or len(values) != len(batch) or not values.is_floating_point():
                raise InputError(
                    f"{name} have shape {tuple(values.shape)} and type {values.dtype}: they must "
                    f"be floating point, ({len(batch)}, ...), one row per label"
                )
            check_finite(name, values, first_row=first_row)
    if batch.labels.ndim == 1:
        checked_labels(batch.labels, classes, first_row=first_row)
    else:
        check_multi_hot(batch.labels, classes, first_row=first_row)


def check_multi_hot(labels: Tensor, classes: int, *, first_row: int = 0) -> None:
    """Refuses labels (n, ...) that are not 0 or 1 for each class.

    >>> import torch
    >>> check_multi_hot(torch.tensor([[0, 1], [2, 0]]), 2)
    Traceback (most recent call last):
    featcal.core.checks.InputError: labels are neither 0 nor 1 in row 1: say of each label whether \
the sample has it
    """
    kinds = labels.is_floating_point() and labels.numel() > 0, labels.is_complex()
    if any(kinds) or labels.shape[1:] != (classes,):
        raise InputError(
            f"labels have shape {tuple(labels.shape)} and type {labels.dtype}, and there are "
            f"{classes} classes: give one integer per row (labels.argmax(1) of one-hot ones, "
            "labels[:, 0] of a single column), or of several labels per sample (rows, "
            f"{classes}) of 0 and 1"
        )
    wrong = ((labels < 0) | (labels > 1)).any(1).nonzero().flatten()
    if len(wrong):
        raise InputError(
            f"labels are neither 0 nor 1 in {rows_text(wrong, first_row)}: say of each label "
            "whether the sample has it"
        )


def check_same(logits: Tensor, stored: Tensor) -> None:
    """Refuses stored logits that are not those the head gives."""
    import torch

    if logits.shape != stored.shape:
        raise InputError(
            f"head gives {logits.shape[1]} classes and the stored logits have {stored.shape[-1]}: "
            "this is not the head that made them"
        )
    share = 0.05 if min(logits.dtype.itemsize, stored.dtype.itemsize) < 4 else 1e-3
    logits, stored = logits.double(), stored.double()
    gaps = (logits - stored).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    gaps = gaps.where(stored.isfinite(), 0)  # check_batch names the rows of those that are not
    # A gap is compared with the logit itself and the row's largest. Not with the largest of all:
    # a class masked by -1e9 would excuse the others. A row whose largest logit is near 0 by chance
    # has the rounding of rows like the others.
    tops = stored.amax(1, keepdim=True).abs()
    usual = tops.median() if len(tops) else tops.sum()
    sizes = torch.maximum(torch.maximum(stored.abs(), tops), usual)
    far = gaps > share * torch.where(sizes.isfinite(), sizes, 1).clamp(min=1)
    if bool(far.any()):
        raise InputError(
            f"head(features) differs from the stored logits by {float(gaps[far].max()):.3g}: this "
            "is not the head that made them, or something stands between features and head (a "
            "missing ReLU, active dropout)"
        )
