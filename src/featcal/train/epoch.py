"""What is said of an epoch, while it is told and in the record of a run."""

from __future__ import annotations

from collections.abc import Callable
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
        own = {key: found[key] for key in ("epoch", "rate", "loss", "seconds")}
        seen = {key: found[key] for key in ("nll", "accuracy", "ece") if key in found}
        return cls(**own, watched=Watched(**seen) if seen else None)


Report = Callable[[Epoch], None]
