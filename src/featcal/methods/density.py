"""Density-aware calibration: a temperature that grows with the distance to training rows.

After Tomani et al., ICML 2023, who add up several layers; this is the last layer's features alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor

from featcal.core import dist
from featcal.core.arguments import check_choice, check_flags, check_whole
from featcal.core.batch import Batch, Data, Head
from featcal.core.calibrator import Calibrator, seen_features
from featcal.core.errors import InputError
from featcal.core.fitting import Problem, StepReport
from featcal.core.head import head_logits
from featcal.core.loss import brier
from featcal.core.neighbours import nearest, on_sphere
from featcal.core.sampling import hashed_sample
from featcal.core.steps import settle
from featcal.methods.density_weights import (
    TINY,
    Found,
    Scored,
    best_weights,
    published_weights,
    temperature_at,
)

VIEWS = ("unclipped", "clipped")
NEIGHBOURS = 50


@final
class DensityAware(Calibrator):
    """z / T(x) with T(x) = w0 + w1 s(x), w >= 0, and s a distance to what the network has seen.

    s is the distance to the k-th nearest training row, by features scaled to length 1. Pass rows
    the network was trained on, fit(..., train=...): some of them become part of the calibrator.
    w0 = 0 and w1 = 0 are candidates of their own, and the second is temperature scaling.

    Args:
        neighbours: k; at most as many as there are rows.
        references: training rows kept, at most; picked by content where there are more.
        features: "unclipped", or "clipped" for what the head gets after a clip.
        reference: what the published code does: the nearest neighbour whatever k, squared
            distances, the squared error instead of the NLL, w0 without a lower bound.
    """

    name = "density"
    keeps_accuracy = True
    keeps_rows = True
    needs_train = True
    quick = "temperature"
    stored: Tensor
    weights: Tensor

    def __init__(
        self,
        *,
        neighbours: int = NEIGHBOURS,
        references: int = 5000,
        features: str = "unclipped",
        reference: bool = False,
    ) -> None:
        super().__init__()
        check_whole(self.name, 1, neighbours=neighbours, references=references)
        check_choice(self.name, "features", features, VIEWS)
        check_flags(self.name, reference=reference)
        if reference and neighbours != NEIGHBOURS:
            raise InputError("density: reference=True takes the nearest row: leave neighbours out")
        self.neighbours, self.references = neighbours, references
        self.features, self.reference = features, reference
        self.register_buffer("stored", torch.zeros(0))
        self.register_buffer("weights", torch.zeros(0))

    def forward(self, features: Tensor, head: Head) -> Tensor:
        """Divides each row by its own temperature."""
        logits = head_logits(features, head)
        if self.weights.numel() == 0:
            return logits
        distance = self.distance(self._seen(features, head)).to(logits.dtype)
        temperature = temperature_at(self.weights.to(logits.dtype), distance)
        return logits / temperature[:, None]

    def distance(self, features: Tensor) -> Tensor:
        """To the k-th nearest stored row, (n,)."""
        count = 1 if self.reference else min(self.neighbours, self.stored.shape[0])
        squared = nearest(on_sphere(features), self.stored, count)[:, -1]
        return squared if self.reference else squared.sqrt()

    def _seen(self, features: Tensor, head: Head) -> Tensor:
        return seen_features(features, head) if self.features == "clipped" else features

    def check(self) -> None:
        """Rows of length 1, and two finite weights; never below 0 but for the published w0."""
        if self.weights.numel() == 0:
            return
        weights = self.weights.double()
        sound = weights.shape == (2,) and bool(torch.isfinite(weights).all())
        if not sound or not self._rows_fit():
            raise InputError("density: the stored values do not fit it: the file is damaged")
        if bool((weights < 0).any()) and not self.reference:
            raise InputError(f"density: w is {weights.tolist()}: it must not be below 0")

    def _rows_fit(self) -> bool:
        """Whether there are stored rows, each of length 1 or 0."""
        stored = self.stored
        if stored.ndim != 2 or stored.numel() == 0:
            return False
        return torch.allclose(on_sphere(stored), stored.float(), atol=0.01)

    def learn(self, problem: Problem) -> list[StepReport]:
        """Stores training rows, measures every fit row's distance once, and searches w."""
        self.reset()
        loss = brier if self.reference else problem.smooth_loss(self.name)
        self._store(problem)
        data = Scored(problem.data, self._distances(problem))
        found = (
            published_weights(data, problem)
            if self.reference
            else best_weights(data, problem, loss)
        )
        if found is None:
            return [settle(self, problem, {}, "each row's logits are all equal")]
        self.assign(weights=torch.tensor([found.w0, found.w1]))
        return [self._report(problem, data, found)]

    def _store(self, problem: Problem) -> None:
        facts = problem.facts
        assert problem.train is not None
        assert problem.head is not None
        rows = Usable(problem.train, facts.width)
        train = hashed_sample(rows, self.references, width=facts.width, device=facts.device)
        rows.leave_together()
        assert train.features is not None
        if not len(train):
            raise InputError("density: train is empty: pass rows the network was trained on")
        self.assign(stored=on_sphere(self._seen(train.features, problem.head)))

    def _distances(self, problem: Problem) -> list[Tensor]:
        """Of each batch, in the order of the batches: too dear to be measured again in a search."""
        found = []
        for batch in problem.data:
            assert batch.features is not None
            assert problem.head is not None
            found.append(self.distance(self._seen(batch.features, problem.head)).double())
        return found

    def _report(self, problem: Problem, data: Scored, found: Found) -> StepReport:
        low, mean, high = (max(found.w0 + found.w1 * s, TINY) for s in data.range())
        return settle(
            self,
            problem,
            {"w0": found.w0, "w1": found.w1},
            f"T = {found.w0:.4g} + {found.w1:.4g} s, from {low:.4g} to {high:.4g}",
            converged=found.converged,
            warning=found.warning,
            details={"T_mean": mean, "T_min": low, "T_max": high, "rows_kept": len(self.stored)},
            always=self.reference,
        )


@final
class Usable:
    """Training rows up to the first batch that cannot be used; why not is told afterwards.

    A process that raised while it reads would leave the others waiting for its rows.
    """

    def __init__(self, train: Data, width: int) -> None:
        self.train, self.width = train, width
        self.refused: InputError | None = None

    def __iter__(self) -> Iterator[Batch]:
        try:
            yield from _checked(self.train, self.width)
        except InputError as error:
            self.refused = error

    def leave_together(self) -> None:
        """Raises on every process where one of them met rows it cannot use."""
        anywhere = bool(dist.largest(torch.tensor(int(self.refused is not None))))
        if self.refused is not None:
            raise self.refused
        if anywhere:
            raise InputError("density: another process found train rows it cannot use: see there")


def _checked(train: Data, width: int) -> Iterator[Batch]:
    """The training rows, refused by name where they cannot be used."""
    for batch in train:
        if batch.features is None:
            raise InputError("density: train holds logits alone: pass rows with features")
        if batch.features.shape[1] != width:
            raise InputError(
                f"density: train has {batch.features.shape[1]} features a row and the data "
                f"{width}: pass rows of the same layer"
            )
        if not bool(torch.isfinite(batch.features.sum(dtype=torch.float64))):
            raise InputError("density: train holds NaN or infinite features: remove those rows")
        yield batch
