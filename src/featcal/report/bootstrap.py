"""The bootstrap of one recipe: the replicates of every metric, from rows as they are scored."""

from __future__ import annotations

from time import perf_counter
from typing import final

import torch
from torch import Tensor

from featcal.core import dist
from featcal.core.batch import Data
from featcal.core.threads import calm
from featcal.metrics import Ordered, Predictions
from featcal.report.resample import Resamples, weighted_sums
from featcal.report.resample_classes import ClassReplicates
from featcal.report.resample_ranked import ranked_replicates
from featcal.report.resample_smooth import smooth_replicates

LARGE = 2**25  # counts beyond which products over all of them pay for threads


@final
class Bootstrap:
    """Kept of each row: its loss and squared error, and what the class-wise error needs.

    Attributes:
        seconds: spent so far, which is no part of what a recipe costs.
    """

    def __init__(self, resamples: Resamples, first_row: int, bins: int) -> None:
        self.counts, self.bins = resamples.counts, bins
        self.classes = ClassReplicates(self.counts, first_row, bins)
        self.losses: list[Tensor] = []  # (rows, 2)
        self.seconds = 0.0

    def add(self, seen: Predictions) -> None:
        """Takes the next rows."""
        started = perf_counter()
        true = seen.probs.gather(1, seen.labels[:, None])[:, 0].double()
        squares = seen.probs.square().sum(1, dtype=torch.float64)
        losses = torch.stack([-seen.log_true.double(), squares + (1 - 2 * true)], 1)
        self.losses.append(losses.cpu())
        self.classes.add(seen)
        self.seconds += perf_counter() - started

    def replicates(self, ordered: Ordered) -> dict[str, Tensor]:
        """Name -> (b,) float64, the metric on each resample; the same on every rank.

        Args:
            ordered: confidence and correctness of the rows of all ranks, in their order.
        """
        started = perf_counter()
        losses = dist.gather(torch.cat(self.losses))
        with calm(self.counts.numel(), LARGE):
            nll, brier = weighted_sums(losses.T, self.counts) / len(losses)
            found = {
                "nll": nll,
                "brier": brier,
                "classwise_ece": self.classes.replicates(len(losses)),
                "smooth_ece": smooth_replicates(ordered, self.counts),
                **ranked_replicates(ordered, self.counts, self.bins),
            }
        self.seconds += perf_counter() - started
        return found


def first_row(data: Data) -> int:
    """How many rows lie on the ranks before this one."""
    if not dist.active():
        return 0
    sizes = dist.gather(torch.tensor([sum(map(len, data))]))
    return int(sizes[: dist.rank()].sum())
