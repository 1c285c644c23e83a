"""What is said of an epoch, while it is told and in the record of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, final

from featcal.train.watch import Watched


@final
@dataclass(frozen=True)
class Epoch:
    """What is said of an epoch.

    Attributes:
        epoch: counted from 1.
        rate: the highest learning rate in it.
        loss: the mean over its rows, as the network was when it saw them.
        seconds: it took, watching not counted.
        watched: scores on the validation rows; None where they were not looked at.
    """

    epoch: int
    rate: float
    loss: float
    seconds: float
    watched: Watched | None = None

    def as_json(self) -> dict[str, Any]:
        """The public form."""
        watched = {} if self.watched is None else self.watched.as_json()
        return {**{k: v for k, v in vars(self).items() if k != "watched"}, **watched}

    @classmethod
    def of_json(cls, found: dict[str, Any]) -> Epoch:
        """The epoch a public form describes."""
        own = {key: _number(found[key]) for key in ("rate", "loss", "seconds")}
        seen = {key: _number(found[key]) for key in ("nll", "accuracy", "ece") if key in found}
        return cls(int(found["epoch"]), **own, watched=Watched(**seen) if seen else None)


def _number(value: Any) -> float:  # noqa: ANN401 - JSON
    if not math.isfinite(value):
        raise ValueError(f"{value} where a number belongs")
    return float(value)


def looks(epochs: Iterable[Epoch]) -> list[tuple[int, Watched]]:
    """The epochs after which val was looked at, by number, and what was seen."""
    return [(epoch.epoch, epoch.watched) for epoch in epochs if epoch.watched is not None]


Report = Callable[[Epoch], None]
