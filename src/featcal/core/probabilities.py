"""Scores as callers hold them: what they are called, and how far probabilities may be off."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

Kind = Literal["logits", "probs"]

ROUNDING = 1e-6  # how far below 0 or above 1 one may lie: exp(z - logsumexp(z)) may end there
ROW_SUM = 1e-3
ROW_SUM_16_BIT = 1e-2
SHOWN_ROWS = 5


def sum_tolerance(values: Tensor) -> float:
    """How far from 1 a row of probabilities of this precision may sum."""
    return ROW_SUM if values.dtype.itemsize >= 4 else ROW_SUM_16_BIT


def rows_text(rows: Tensor, first_row: int = 0) -> str:
    """Row numbers as a message shows them.

    >>> import torch
    >>> rows_text(torch.arange(7), 10)
    'rows 10, 11, 12, 13, 14 and 2 more'
    """
    shown = ", ".join(str(first_row + row) for row in rows[:SHOWN_ROWS].tolist())
    more = len(rows) - SHOWN_ROWS
    return f"row{'s' * (len(rows) > 1)} {shown}" + (f" and {more} more" if more > 0 else "")
