"""Vector and matrix scaling (Guo et al., 2017), Dirichlet calibration (Kull et al., 2019).

Affine maps that start at temperature scaling and are held near it. How firmly is a matter of rows:
unless it is given, the strength that counts most is chosen by cross-validation.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar, final

from torch import Tensor

from featcal.core.errors import InputError
from featcal.core.fitting import Problem, StepReport
from featcal.core.threads import calm
from featcal.methods.affine_fit import Start, Task, by_kind, descend, temperature_start
from featcal.methods.affine_folds import Choice, choose_strength
from featcal.methods.affine_map import AffineMap, strength

LOG_TINY = math.log(2.2e-16)  # where Dirichlet calibration clips ln p
MOST_CLASSES = 300  # for more, choosing the penalty of a matrix takes minutes


class HeldMap(AffineMap):
    """An affine map held near temperature scaling, by strengths that may have to be chosen."""

    matrix: ClassVar[bool]

    @abstractmethod
    def given(self) -> float | None:
        """The strength that is to be chosen unless it is given."""

    @abstractmethod
    def strengths(self, task: Task, start: Start, c: float) -> dict[str, float]:
        """The strengths under their own names, with the factor c on the one to be chosen."""

    @abstractmethod
    def pull(self, task: Task, start: Start, c: float) -> Tensor:
        """The same as weights of squared deviations, (k, d + 1), in nats over all rows."""

    def learn(self, problem: Problem) -> list[StepReport]:
        """The strength by cross-validation unless given, then L-BFGS from the temperature."""
        self.reset()
        loss, facts = problem.smooth_loss(self.name), problem.facts
        self._refuse_many(facts.classes)
        with calm(facts.rows * facts.classes * (facts.classes / 32 if self.matrix else 1)):
            data = self.seen(problem)
            start = temperature_start(data, loss)
            centre = by_kind(facts.classes, matrix=self.matrix, diagonal=start.inverse)
            task = Task.of(data, facts.rows, loss, centre)
            choice = self._choose(task, start)
            fitted = descend(task, self.pull(task, start, choice.strength))
        return [
            self.settled(
                problem,
                fitted,
                f"held near T = {1 / start.inverse:.4g} {self._how(choice)}",
                values=self.strengths(task, start, choice.strength),
                details={"held_out": {f"{c:.3g}": loss for c, loss in choice.losses.items()}},
                warning=_cap_warning(self.name, start),
            )
        ]

    def _refuse_many(self, classes: int) -> None:
        if self.matrix and classes > MOST_CLASSES and self.given() is None:
            raise InputError(
                f"{self.name}: {classes} classes make a matrix of {classes**2:,} values, too many "
                "to choose their penalty by cross-validation: use sms or svs, or give off_diagonal"
            )

    def _choose(self, task: Task, start: Start) -> Choice:
        if self.given() is not None:
            return Choice(0.0, {})
        return choose_strength(task, lambda c: self.pull(task, start, c), self.name)

    def _how(self, choice: Choice) -> str:
        if self.given() is not None:
            return "as strongly as given"
        if not choice.losses:
            return "with c = 1, for want of rows to choose by"
        return f"with c = {choice.strength:.2g}, the best of {len(choice.losses)} tried"


def _cap_warning(method: str, start: Start) -> str:
    if not start.capped:
        return ""
    why = "separate the labels completely" if start.capped > 0 else "are no better than guessing"
    return (
        f"{method} starts from a temperature at its cap, {1 / start.inverse:.4g}: the logits {why}"
    )


@final
class VectorScaling(HeldMap):
    """w * z + b, a factor and a bias for each class.

    Minimises the summed loss + ridge * sum_j [(T w_j - 1)^2 + b_j^2], from w = 1/T and b = 0, where
    T is the temperature by itself. Unless given, ridge is c k with the c of the lowest held-out
    loss in 3 folds, among 10, 3.2, 1, ..., 0.0032, from strong to weak until that loss is 1 % above
    its lowest. Without any pull, a class that is absent from the fit split has no best bias.

    Args:
        ridge: the pull towards temperature scaling, in nats over all rows; None to choose it, 0 for
            none, as published.
    """

    name = "vector"
    matrix = False

    def __init__(self, *, ridge: float | None = None) -> None:
        super().__init__()
        self.ridge = None if ridge is None else strength(self.name, "ridge", ridge)

    def given(self) -> float | None:
        """The ridge."""
        return self.ridge

    def strengths(self, task: Task, start: Start, c: float) -> dict[str, float]:
        """The ridge: c k unless given."""
        return {"ridge": c * len(task.centre) if self.ridge is None else self.ridge}

    def pull(self, task: Task, start: Start, c: float) -> Tensor:
        """The ridge on w and b."""
        ridge = self.strengths(task, start, c)["ridge"]
        slope = ridge / start.inverse**2
        return by_kind(len(task.centre), matrix=False, diagonal=slope, bias=ridge)


class PenalisedMatrix(HeldMap):
    """W x + b, penalised off the diagonal and at the bias (ODIR).

    Minimises the mean loss + off_diagonal * sum_{i != j} W_ij^2 + bias * sum_j b_j^2
    + (ridge / n) * sum_j (T W_jj - 1)^2: sums over the entries, not means. Unless given, bias is
    k / n and ridge k; off_diagonal is c T^2 k (k - 1) / n with the c of the lowest held-out loss in
    3 folds, among 10, 3.2, 1, ..., 0.0032, from strong to weak until that loss is 1 % above its
    lowest.
    """

    matrix = True

    def __init__(
        self,
        *,
        off_diagonal: float | None = None,
        bias: float | None = None,
        ridge: float | None = None,
    ) -> None:
        super().__init__()
        asked = {"off_diagonal": off_diagonal, "bias": bias, "ridge": ridge}
        held = {k: None if v is None else strength(self.name, k, v) for k, v in asked.items()}
        self.off_diagonal, self.bias, self.ridge = held["off_diagonal"], held["bias"], held["ridge"]

    def given(self) -> float | None:
        """The penalty off the diagonal."""
        return self.off_diagonal

    def strengths(self, task: Task, start: Start, c: float) -> dict[str, float]:
        """Penalties in nats a row, and the ridge."""
        k, (off, bias, ridge) = len(task.centre), (self.off_diagonal, self.bias, self.ridge)
        chosen = c * k * (k - 1) / start.inverse**2 / task.rows
        return {
            "off_diagonal": chosen if off is None else off,
            "bias": k / task.rows if bias is None else bias,
            "ridge": k if ridge is None else ridge,
        }

    def pull(self, task: Task, start: Start, c: float) -> Tensor:
        """Each penalty on its own kind of values."""
        held = self.strengths(task, start, c)
        return by_kind(
            len(task.centre),
            matrix=True,
            diagonal=held["ridge"] / start.inverse**2,
            bias=held["bias"] * task.rows,
            off_diagonal=held["off_diagonal"] * task.rows,
        )


@final
class MatrixScaling(PenalisedMatrix):
    """W z + b on the logits, by the loss and the penalties of `PenalisedMatrix`.

    Args:
        off_diagonal: lambda, the penalty off the diagonal; None to choose it.
        bias: mu, the penalty at the bias; None for k / n.
        ridge: the pull of the diagonal towards temperature scaling, in nats over all rows; None for
            k. All three 0 is plain matrix scaling, as published.
    """

    name = "matrix"


@final
class DirichletCalibration(PenalisedMatrix):
    """W ln p + b on the log-probabilities, by the loss and the penalties of `PenalisedMatrix`.

    p is clipped below at 2.2e-16. A constant added to all logits of a row changes nothing.

    Args:
        off_diagonal: lambda, the penalty off the diagonal; None to choose it.
        bias: mu, the penalty at the bias; None for k / n.
        ridge: the pull of the diagonal towards temperature scaling, in nats over all rows; None for
            k, 0 for none, as published.
    """

    name = "dirichlet"

    def inputs(self, logits: Tensor) -> Tensor:
        """Ln p, clipped."""
        return logits.log_softmax(1).clamp_min(LOG_TINY)
