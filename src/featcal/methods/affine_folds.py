"""How strongly to hold an affine map, chosen by cross-validation along a path of strengths.

The path runs from strong to weak, every fold from its own last solution, and ends where the
held-out loss is clearly above its lowest: the dear fits, those held weakly, are mostly never made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from featcal.core import dist
from featcal.core.batch import Batch, Data, Through, stored_logits
from featcal.core.folds import fold_of
from featcal.core.loss import measure
from featcal.core.progress import track
from featcal.methods.affine_fit import Task, affine, descend, parts

FOLDS = 3
STRENGTHS = tuple(10 ** (1 - step / 2) for step in range(8))  # 10, 3.2, 1, ..., 0.0032
MIDDLE = 1.0  # where there are too few rows to choose by
BEYOND = 1.01  # times the lowest loss, where the path ends: small dips and humps lie within it
ITERATIONS = 12  # of a fold's descent: held-out losses need fewer digits than fitted values

PullOf = Callable[[float], Tensor]  # strength -> the pull (k, d + 1), in nats over all rows


@dataclass(frozen=True)
class Choice:
    """The strength chosen, and the held-out loss of each one tried."""

    strength: float
    losses: dict[float, float]


@dataclass(frozen=True)
class Fold:
    """The rows of one fold, or all rows but those."""

    data: Data
    fold: int
    held: bool

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.data:
            inside = fold_of(batch, FOLDS) == self.fold
            yield batch.rows(inside if self.held else ~inside)


def choose_strength(task: Task, pull_of: PullOf, label: str) -> Choice:
    """The strength with the lowest held-out loss; `label` names the work to whoever listens."""
    sizes = _fold_sizes(task.data)
    if min(sizes) == 0:
        return Choice(MIDDLE, {})
    path = _Path(task, sizes)
    losses: dict[float, float] = {}
    for strength in track(label, STRENGTHS):
        losses[strength] = path.held_out(pull_of(strength))
        if losses[strength] > BEYOND * min(losses.values()):
            break
    return Choice(min(losses, key=losses.__getitem__), losses)


class _Path:
    """The folds' fits, each of which begins where its last one ended."""

    def __init__(self, task: Task, sizes: list[int]) -> None:
        self.task, self.sizes = task, sizes
        self.at = [task.centre] * FOLDS
        self.held = [_kept(Fold(task.data, fold, held=True)) for fold in range(FOLDS)]
        self.rest = [_kept(Fold(task.data, fold, held=False)) for fold in range(FOLDS)]

    def held_out(self, pull: Tensor) -> float:
        """The mean loss of rows under the fit of the other folds."""
        task, total = self.task, 0.0
        for fold, size in enumerate(self.sizes):
            rest = task.share(self.rest[fold], task.rows - size)
            self.at[fold] = descend(rest, pull, self.at[fold], iterations=ITERATIONS).values
            total += size * self._loss(fold)
        return total / task.rows

    def _loss(self, fold: int) -> float:
        loss = self.task.loss.after(lambda x: affine(x, *parts(self.at[fold].to(x))))
        return measure(self.held[fold], loss)[0]


def _kept(rows: Fold) -> Through:
    """The same rows, in memory where they fit: finding them costs as much as a pass."""
    return Through(rows, stored_logits, features=False)


def _fold_sizes(data: Data) -> list[int]:
    sums = torch.zeros(FOLDS, dtype=torch.int64)
    for batch in data:
        sums += torch.bincount(fold_of(batch, FOLDS), minlength=FOLDS).cpu()
    return [int(size) for size in dist.total(sums)]
