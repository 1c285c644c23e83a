"""Group calibration: temperatures of learned groups, averaged (Yang et al., NeurIPS 2023)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from featcal.core.arguments import check_choice, check_flags, check_whole
from featcal.core.batch import Data, Head, Through, stored_logits, wide
from featcal.core.calibrator import Calibrator, seen_features
from featcal.core.errors import InputError
from featcal.core.fitting import Problem, StepReport
from featcal.core.head import head_logits
from featcal.core.progress import track
from featcal.core.sampling import hashed_sample
from featcal.core.steps import settle
from featcal.core.tempering import Tempered, temper
from featcal.core.threads import calm
from featcal.core.toplabel import keep_prediction
from featcal.methods.group_base import Bases, Placed, fit_bases, half_of
from featcal.methods.group_partition import Plan, learn_partitions, standardised, unit_scales

SAMPLE = 8192  # rows the partitions are learned from, at most
ITERATIONS = 30  # on rows not learned from later ones gain nothing, and rounding begins to matter
ONE_THREAD = 2**25  # numbers in the sample's features below which threads cost more than they give
APART = 0.5  # the logarithm of the starting temperatures around the common one
BASES = ("temperature", "ensemble")
VIEWS = ("unclipped", "clipped")
MIN_ROWS = 50


@final
class GroupCalibration(Calibrator):
    """Rows fall into groups by argmax V x, each group has its calibrator, partitions are averaged.

    V comes from a soft mixture (see `group_partition`) on standardised features. A linear gate on
    thousands of features can tell right rows from wrong ones on the very rows it was learned from,
    and groups fitted there would be far too sure elsewhere. So half of the rows, told apart by
    their content, teach the first half of the partitions and set the temperatures of the second
    half, and the other way round. Both are fitted by the NLL whatever the loss of the fit.

    Args:
        partitions: how many are averaged.
        groups: in each of them.
        base: "temperature" for each group's own T, or "ensemble" to mix softmax(z / T) with
            softmax(z) and 1 / k.
        min_rows: a group of fewer rows, or of one class alone, has the common temperature.
        features: "unclipped", or "clipped" to group rows by what the head gets after a clip.
        held_out: False fits the groups to all rows, those they were learned from included.
        seed: of the first partition; the next ones count up.
        reference: the published form: raw features, every step on all rows, T and then the weights
            of each group by the squared error, no smallest group; after a clip it grouped by
            features="clipped". An empty group has the common temperature there too.
    """

    name = "group"
    keeps_accuracy = True
    jumps = True  # a row between two groups changes sides with the last digit of its features
    quick = "temperature"
    centre: Tensor
    scale: Tensor
    gates: Tensor
    inverse: Tensor
    weights: Tensor

    def __init__(
        self,
        *,
        partitions: int = 20,
        groups: int = 2,
        base: str = "temperature",
        min_rows: int = MIN_ROWS,
        features: str = "unclipped",
        held_out: bool = True,
        seed: int = 0,
        reference: bool = False,
    ) -> None:
        super().__init__()
        check_whole(self.name, 1, partitions=partitions, min_rows=min_rows)
        check_whole(self.name, 2, groups=groups)
        check_whole(self.name, 0, seed=seed)
        check_choice(self.name, "base", base, BASES)
        check_choice(self.name, "features", features, VIEWS)
        check_flags(self.name, held_out=held_out, reference=reference)
        if reference and (base != "temperature" or not held_out or min_rows != MIN_ROWS):
            raise InputError(
                "group: reference=True fixes base, held_out and min_rows: leave them out"
            )
        self.partitions, self.groups, self.base = partitions, groups, base
        self.min_rows, self.features, self.held_out = min_rows, features, held_out
        self.seed, self.reference = seed, reference
        for buffer in ("centre", "scale", "gates", "inverse", "weights"):
            self.register_buffer(buffer, torch.zeros(0))

    def forward(self, features: Tensor, head: Head) -> Tensor:
        """The logarithm of the mean of the partitions' probabilities; one (n, k) at a time."""
        logits = head_logits(features, head)
        if self.inverse.numel() == 0:
            return logits
        group = self.grouped(self._seen(features, head))
        mixed = torch.full_like(logits, -torch.inf)
        for partition in range(self.inverse.shape[0]):
            mixed = torch.logaddexp(mixed, self._one(logits, partition, group[:, partition]))
        return keep_prediction(mixed - math.log(self.inverse.shape[0]), logits)

    def grouped(self, features: Tensor) -> Tensor:
        """The group of each row in each partition, (n, u) int64."""
        units = standardised(wide(features), self.centre, self.scale)
        gates = self.gates.to(units.dtype).flatten(0, 1)
        return (units @ gates.T).view(-1, *self.gates.shape[:2]).argmax(2)

    def _seen(self, features: Tensor, head: Head) -> Tensor:
        return seen_features(features, head) if self.features == "clipped" else features

    def _one(self, logits: Tensor, partition: int, group: Tensor) -> Tensor:
        """Log-probabilities under one partition, (n, k)."""
        inverse = self.inverse[partition].to(logits.dtype)[group]
        scaled = (logits * inverse[:, None]).log_softmax(1)
        if self.weights.numel() == 0:
            return scaled
        log_w = self.weights[partition].to(logits.dtype).log()[group]  # (n, 3)
        even = torch.full_like(scaled, -math.log(logits.shape[1])) + log_w[:, 2:]
        plain = torch.logaddexp(logits.log_softmax(1) + log_w[:, 1:2], even)
        return torch.logaddexp(scaled + log_w[:, :1], plain)

    @property
    def _mixes(self) -> bool:
        return self.reference or self.base == "ensemble"

    def check(self) -> None:
        """Finite values, temperatures above 0, weights that sum to 1, shapes that go together."""
        values = list(self.buffers())
        if not all(bool(torch.isfinite(value).all()) for value in values):
            raise InputError("group: a stored value is not finite: the file is damaged")
        if self.inverse.numel() == 0:
            return
        size = (self.partitions, self.groups)
        shaped = (
            self.inverse.shape == size
            and self.gates.shape == (*size, len(self.centre))
            and self.scale.shape == self.centre.shape
            and self.weights.shape == ((*size, 3) if self._mixes else (0,))
        )
        if not shaped or not bool((self.inverse > 0).all()):
            raise InputError(
                f"group: the stored values do not fit {self.partitions} partitions of "
                f"{self.groups} groups with temperatures above 0: the file is damaged"
            )
        sums = self.weights.double().sum(-1)
        shares = bool((self.weights >= 0).all()) and bool(((sums - 1).abs() < 0.01).all())
        if self._mixes and not shares:
            raise InputError("group: weights must be 0 or above and sum to 1: the file is damaged")

    def learn(self, problem: Problem) -> list[StepReport]:
        """The common temperature, the partitions, and then each group's own calibrator."""
        self.reset()
        bare = Through(problem.data, stored_logits, features=False)  # features are read when needed
        common = temper(bare)
        if common is None:
            return [settle(self, problem, {}, "each row's logits are all equal")]
        with calm(min(problem.facts.rows, SAMPLE) * problem.facts.width, ONE_THREAD):
            self._learn_gates(problem, common.temperature)
        with calm(problem.facts.rows * problem.facts.classes):
            fits = self._fit_groups(problem, bare, 1 / common.temperature)
        self.assign(inverse=fits.inverse)
        if fits.weights is not None:
            self.assign(weights=fits.weights)
        return [self._report(problem, common, fits)]

    def _learn_gates(self, problem: Problem, temperature: float) -> None:
        """Standardises the features and learns V from a sample of the rows."""
        facts, head = problem.facts, problem.head
        assert head is not None
        sample = hashed_sample(
            problem.data, SAMPLE, width=facts.width, classes=facts.classes, device=facts.device
        )
        assert sample.features is not None
        centre, scale = unit_scales(problem.data, lambda x: self._seen(x, head), facts)
        if self.reference:
            centre, scale = torch.zeros_like(centre), torch.ones_like(scale)
        self.assign(centre=centre, scale=scale)
        seen = self._seen(sample.features, head).double()
        units = standardised(seen, self.centre, self.scale)
        logits, half = stored_logits(sample), half_of(sample)
        gates = [
            learn_partitions(units[rows], logits[rows], sample.labels[rows], plan)
            for plan, rows in track("group: partitions", self._lessons(half, temperature))
        ]
        self.assign(gates=torch.cat(gates))

    def _lessons(self, half: Tensor, temperature: float) -> list[tuple[Plan, Tensor]]:
        """Which partitions are learned from which rows of the sample."""
        seeds = range(self.seed, self.seed + self.partitions)
        if self.reference:  # one by one, as published
            plan = Plan(seeds[:1], [1.5] * self.groups, 100)
            return [(replace(plan, seeds=range(seed, seed + 1)), half >= 0) for seed in seeds]
        apart = torch.linspace(-APART, APART, self.groups).exp()
        plan = Plan(seeds, (temperature * apart).tolist(), ITERATIONS)
        if not self.held_out:
            return [(plan, half >= 0)]
        cut = math.ceil(self.partitions / 2)
        shares = [(seeds[:cut], half == 0), (seeds[cut:], half == 1)]
        return [(replace(plan, seeds=part), rows) for part, rows in shares if part]

    def _fit_groups(self, problem: Problem, bare: Data, common: float) -> Bases:
        """Each partition's groups on the rows it was not learned from."""
        assert problem.head is not None
        groups, halves = [], []
        for batch in problem.data:
            assert batch.features is not None
            groups.append(self.grouped(self._seen(batch.features, problem.head)).short())
            halves.append(half_of(batch))
        cut = math.ceil(self.partitions / 2)
        all_rows = self.reference or not self.held_out
        views = []
        for partition in range(self.partitions):
            learned = -1 if all_rows else int(partition >= cut)
            used = [half != learned for half in halves]
            views.append(Placed(bare, groups, used, partition))
        form = "published" if self.reference else self.base
        return fit_bases(views, form, self.groups, problem.facts.classes, common, self.min_rows)

    def _report(self, problem: Problem, common: Tempered, fits: Bases) -> StepReport:
        coolest, hottest = (float(1 / b) for b in (fits.inverse.max(), fits.inverse.min()))
        of = f"{self.partitions} x {self.groups}"
        message = f"T from {coolest:.4g} to {hottest:.4g} in {of} groups"
        if fits.left_out:
            message += (
                f", {fits.left_out} of them too small: they have T = {common.temperature:.4g}"
            )
        warning = ""
        if common.capped.any():
            warning = f"the temperature all groups are compared with is at its cap, {coolest:.4g}"
        return settle(
            self,
            problem,
            {"T_min": coolest, "T_max": hottest},
            message,
            converged=not common.capped.any(),
            warning=warning,
            details={"T_common": common.temperature, "groups_left_out": fits.left_out},
            always=self.reference,
        )
