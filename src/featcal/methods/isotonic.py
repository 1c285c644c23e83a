"""Isotonic regression of hits on probabilities (Zadrozny and Elkan, KDD 2002; Zhang et al., 2020).

The ascending function nearest to the hits is constant on blocks. Lines from the centre of a block
to that of the next (centred isotonic regression, Oron and Flournoy, 2017) take its jumps away, so
that rounding cannot carry a row across one and different scores stay different.
"""

from __future__ import annotations

import math
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import logsigmoid

from featcal.core.arguments import check_choice, check_flags
from featcal.core.calibrator import LogitMap
from featcal.core.errors import InputError
from featcal.core.fitting import Problem, StepReport
from featcal.core.levels import halfway
from featcal.core.odds import class_log_odds, log_odds, odds_of
from featcal.core.steps import settle
from featcal.core.tables import lines, probable_lines, sound, stacked, steps
from featcal.core.toplabel import keep_prediction, with_confidence
from featcal.methods.isotonic_blocks import Blocks, fit_blocks

Array = NDArray[np.float64]

READINGS = ("multiclass", "one_vs_rest", "top")
BETWEEN = ("line", "step")
TIE_BREAK = 2.0**-14  # of the log-odds, in the logarithm: enough for float32 to tell classes apart
PUBLISHED_TIE_BREAK = 1e-9  # of the probability, added to the fitted one
ZERO = 100.0  # log-odds whose probability is 0 or 1 beside the published tie break


@final
class Isotonic(LogitMap):
    """An ascending map of probabilities, fitted by pooling adjacent violators on log-odds.

    Beyond the outermost blocks the map is constant. No value is 0 or 1: they end at 1 / ((n + 1) k)
    and (n + 1) / (n + 2), beyond every other value n rows can give.

    Args:
        reading: "multiclass" fits one map to all n k pairs of a row and a class (IRM): the
            predicted class gets its fitted value, the others share the rest in proportion to
            theirs, and the prediction stays. "one_vs_rest" fits one map to each class and divides a
            row by its sum (IROvA); predictions may change, and the map of a rare class is coarse.
            "top" fits one map to the predicted classes alone; the others share the rest as before.
        between: "line" from the centre of a block to that of the next, in log-odds; "step" halfway
            between the blocks.
        reference: as published: the map is flat on each block and linear in the probability from
            one block to the next, 1e-9 p is added to break ties, and a row is divided by its sum.
            float32 cannot hold that tie break, so that predictions may change.
    """

    name = "isotonic"
    keeps_accuracy = True
    quick = "temperature"
    nodes: Tensor
    values: Tensor

    def __init__(
        self, *, reading: str = "multiclass", between: str = "line", reference: bool = False
    ) -> None:
        super().__init__()
        check_choice(self.name, "reading", reading, READINGS)
        check_choice(self.name, "between", between, BETWEEN)
        check_flags(self.name, reference=reference)
        if reference and (reading == "top" or between != "line"):
            raise InputError(
                "isotonic: reference=True is multiclass or one_vs_rest, with lines of its own: "
                "leave between out and choose one of these readings"
            )
        self.reading, self.between, self.reference = reading, between, reference
        self.keeps_accuracy = reading != "one_vs_rest" and not reference
        self.jumps = between == "step"
        self.register_buffer("nodes", torch.empty(0))
        self.register_buffer("values", torch.empty(0))

    def map_logits(self, logits: Tensor) -> Tensor:
        """Looks up the fitted probabilities and makes a row of them."""
        if self.values.numel() == 0 or logits.shape[1] == 1:
            return logits
        if self.reading == "top":
            return with_confidence(logits, self._look_up(log_odds(logits)).sigmoid())
        odds = class_log_odds(logits)
        if self.reference:
            return self._published(odds, logits)
        found = self._look_up(odds)
        fitted = logsigmoid(found).to(logits.dtype)
        if self.reading == "one_vs_rest":
            return fitted
        ranked = keep_prediction(fitted + TIE_BREAK * odds, logits)
        return with_confidence(ranked, found.amax(1).sigmoid())

    def _look_up(self, odds: Tensor) -> Tensor:
        """The fitted log-odds, float32."""
        table = lines if self.between == "line" else steps
        return table(odds, self.nodes, self.values)

    def _published(self, odds: Tensor, logits: Tensor) -> Tensor:
        fitted = probable_lines(odds, self.nodes, self.values.float().sigmoid())
        nudge = logits.log_softmax(1) + math.log(PUBLISHED_TIE_BREAK)
        return torch.logaddexp(fitted.to(logits.dtype).log(), nudge)

    def check(self) -> None:
        """Nodes ascend, and there are as many values as the kind of map needs."""
        dims, more = (2 if self.reading == "one_vs_rest" else 1), int(self.between == "step")
        if not sound(self.nodes, self.values, dims=dims, more=more):
            shapes = f"{tuple(self.nodes.shape)} nodes and {tuple(self.values.shape)} values"
            raise InputError(f"isotonic: {shapes}: nodes must ascend, each with a finite value")

    def learn(self, problem: Problem) -> list[StepReport]:
        """Pools adjacent violators; see `isotonic_blocks`."""
        self.reset()
        fits = fit_blocks(problem.data, self.reading, problem.facts.classes)
        nodes, values = map(stacked, zip(*(self._table(fit, problem) for fit in fits), strict=True))
        if self.reading != "one_vs_rest":
            nodes, values = nodes[0], values[0]
        self.assign(nodes=nodes, values=values)
        counts = [len(fit.share) for fit in fits]
        message = f"blocks of the fit: {counts[0]}"
        if self.reading == "one_vs_rest":
            message = f"one fit a class, of {min(counts)} to {max(counts)} blocks"
        always = self.reference and problem.facts.classes > 1
        return [settle(self, problem, {"blocks": sum(counts)}, message, always=always)]

    def _table(self, fit: Blocks, problem: Problem) -> tuple[Array, Array]:
        """Where the map has its nodes or edges, and its values, in log-odds."""
        if self.reference:
            ends = np.stack([fit.low, fit.high], 1).ravel()
            return ends, odds_of(fit.share).clip(-ZERO, ZERO).repeat(2)
        rows, classes = problem.facts.rows, problem.facts.classes
        low = 1 / (rows + 2) if self.reading == "top" else 1 / ((rows + 1) * classes)
        values = odds_of(fit.share.clip(low, 1 - 1 / (rows + 2)))
        if self.between == "step":
            return halfway(fit.high[:-1], fit.low[1:]), values
        times = 2 if len(values) == 1 else 1  # a line needs two ends
        return fit.centre.repeat(times), values.repeat(times)
