"""Fitting many recipes to the same data: a first step they share is fitted once.

`clip`, `clip | temperature` and `clip | vector` begin alike, and step by step the later steps are
fitted to what the first one leaves. So they are fitted on the head that the first one makes, which
is what they would see inside their own pipeline: the fitted values are the same to the bit.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

from torch import nn

from featcal.core.batch import Batch, Data, Head
from featcal.core.calibrator import Calibrator, Pipeline
from featcal.core.errors import CalibrationWarning
from featcal.core.steps import Mode


@final
class Fits:
    """Fits recipes, one after the other, to the same rows.

    Args:
        data: the rows.
        head: the classifier's last layer, or None.
        mode: "joint" or "sequential"; only the latter can share.
        recipes: all that will be fitted, None for those that fit nothing.
        train: rows the classifier was trained on, for recipes that need them.
    """

    def __init__(
        self,
        data: Batch | Data,
        head: Head | None,
        mode: Mode,
        recipes: Sequence[Calibrator | None],
        train: Batch | Data | None = None,
    ) -> None:
        self.data, self.head, self.mode, self.train = data, head, mode, train
        begun = Counter(
            repr(recipe.steps_in_order()[0]) for recipe in recipes if recipe is not None
        )
        self._shared = {text for text, count in begun.items() if count > 1}
        self._firsts: dict[str, Calibrator] = {}

    def fit(self, recipe: Calibrator) -> Calibrator:
        """A fitted calibrator of this recipe."""
        first, *rest = recipe.steps_in_order()
        with warnings.catch_warnings():  # the reports keep them
            warnings.simplefilter("ignore", CalibrationWarning)
            if not self._can_share(first, rest):
                return self._fit(copy.deepcopy(recipe))
            if repr(first) not in self._firsts:
                self._firsts[repr(first)] = self._fit(copy.deepcopy(first))
            begun = copy.deepcopy(self._firsts[repr(first)])
            return self._continued(begun, copy.deepcopy(rest)) if rest else begun

    def _fit(self, recipe: Calibrator) -> Calibrator:
        return recipe.fit(self.data, self.head, mode=self.mode, train=self.train)

    def _can_share(self, first: Calibrator, rest: Sequence[Calibrator]) -> bool:
        """Whether the first step costs head passes, and the rest need no more than its logits."""
        return (
            self.mode == "sequential"
            and repr(first) in self._shared
            and first.needs_features
            and isinstance(self.head, nn.Module)
            and not any(step.needs_features or step.needs_train for step in rest)
        )

    def _continued(self, begun: Calibrator, rest: list[Calibrator]) -> Calibrator:
        """The pipeline of a fitted first step and later ones, fitted to what it leaves."""
        assert isinstance(self.head, nn.Module)
        later = rest[0] if len(rest) == 1 else Pipeline(*rest)
        later.fit(_Features(self.data), begun.wrap(self.head), mode="sequential")
        whole = Pipeline(begun, later)
        assert begun.report is not None
        assert later.report is not None
        whole.report = replace(
            begun.report,
            recipe=repr(whole),
            steps=begun.report.steps + later.report.steps,
            loss_after=later.report.loss_after,
            seconds=begun.report.seconds + later.report.seconds,
        )
        for part in whole.steps_in_order():
            part.report = None  # a part of a pipeline has no report of its own
        return whole


@final
@dataclass(frozen=True, eq=False)
class _Features:
    """The same batches without stored logits, which are those of another head."""

    data: Batch | Data

    def __iter__(self) -> Iterator[Batch]:
        for batch in [self.data] if isinstance(self.data, Batch) else self.data:
            yield replace(batch, logits=None)
