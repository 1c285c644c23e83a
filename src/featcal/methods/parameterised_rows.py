"""Each row's loss as a function of its own b = 1/T, cheap enough to be asked for a thousand times.

With few classes it is computed from the logits. With many it is tabulated once, at knots of log b
around the common value, and read by quintic interpolation: value, slope and curvature are right at
every knot, and a network's fit then costs the same for 1,000 classes as for 10.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from featcal.core.batch import Batch, stored_logits
from featcal.core.curves import row_curves
from featcal.core.errors import InputError
from featcal.core.loss import Loss, brier, nll
from featcal.methods.parameterised_network import REACH

INTERVALS = 24
STEP = 2 * REACH / INTERVALS  # between knots of log b
MANY = 3 * (INTERVALS + 1)  # classes above which the table is smaller than the logits

Curves = Callable[[Tensor, Tensor, Tensor | float], Tensor]  # logits, labels, b -> (3, n)
RowLoss = Callable[[Batch, Tensor], Tensor]  # (batch, log T over the common T (n,)) -> (n,)


@dataclass(frozen=True)
class Tabulated:
    """How the rows of a fit are kept, and what a change of their temperature costs them."""

    curves: Curves
    inverse: float  # b at the common temperature
    in_table: bool

    def keep(self, batch: Batch, inputs: Tensor) -> Batch:
        """The batch with the network's inputs as features, and with what `loss` reads as logits."""
        logits = stored_logits(batch)
        return Batch(self._table(batch) if self.in_table else logits, batch.labels, inputs)

    def loss(self, batch: Batch, change: Tensor) -> Tensor:
        """Each row's loss at log T = log T0 + change, (n,), twice differentiable in the change."""
        if self.in_table:
            return interpolated(stored_logits(batch).double(), -change)
        inverse = self.inverse * torch.exp(-change)
        with torch.no_grad():
            logits = stored_logits(batch).double()
            value, slope, bend = self.curves(logits, batch.labels, inverse)
        # The graph holds one number a row instead of one for each class.
        step = inverse - inverse.detach()
        surrogate: Tensor = value + slope * step + bend * step.square() / 2
        return surrogate

    def _table(self, batch: Batch) -> Tensor:
        """Value, slope and curvature in units of the knots' distance: (n, 3 * knots) float32."""
        logits = stored_logits(batch).double()
        columns = []
        for knot in range(INTERVALS + 1):
            inverse = self.inverse * float(torch.tensor(knot * STEP - REACH).double().exp())
            value, slope, bend = self.curves(logits, batch.labels, inverse)
            first = inverse * slope * STEP
            columns += [value, first, inverse**2 * bend * STEP**2 + first * STEP]
        return torch.stack(columns, 1).float()


def tabulated(loss: Loss, inverse: float, classes: int) -> Tabulated:
    """How to keep rows for this loss."""
    known = {nll.name: row_curves, brier.name: brier_curves}
    if loss.name not in known:
        raise InputError(f"parameterised cannot be fitted by {loss.name}: choose nll or brier")
    return Tabulated(known[loss.name], inverse, in_table=classes > MANY)


def interpolated(table: Tensor, log_b: Tensor) -> Tensor:
    """The quintic through both knots around each row's log b, (n,)."""
    place = (log_b + REACH) / STEP
    left = place.detach().floor().clamp(0, INTERVALS - 1)
    t = place - left
    columns = 3 * left.long()[:, None] + torch.arange(6, device=table.device)
    f0, d0, c0, f1, d1, c1 = table.gather(1, columns).unbind(1)
    rise = f1 - f0
    cubic = 10 * rise - 6 * d0 - 4 * d1 - 1.5 * c0 + 0.5 * c1
    quartic = -15 * rise + 8 * d0 + 7 * d1 + 1.5 * c0 - c1
    quintic = 6 * rise - 3 * d0 - 3 * d1 - 0.5 * c0 + 0.5 * c1
    found: Tensor = f0 + t * (d0 + t * (c0 / 2 + t * (cubic + t * (quartic + t * quintic))))
    return found


def brier_curves(logits: Tensor, labels: Tensor, inverse: Tensor | float) -> Tensor:
    """Value, slope and curvature in b of each row's Brier score: (3, n)."""
    rowwise = inverse[:, None] if isinstance(inverse, Tensor) else inverse
    probs = (logits * rowwise).softmax(1)
    away = logits - (probs * logits).sum(1, keepdim=True)  # dp/db = p * away
    spread = (probs * away.square()).sum(1)  # d away/db = -spread
    squares, pulled = probs.square(), probs.square() * away
    true, gap = (values.gather(1, labels[:, None])[:, 0] for values in (probs, away))
    value = squares.sum(1) - 2 * true + 1
    slope = 2 * pulled.sum(1) - 2 * true * gap
    bend = 4 * (pulled * away).sum(1) - 2 * squares.sum(1) * spread
    return torch.stack([value, slope, bend - 2 * true * (gap.square() - spread)])
