"""Group calibration: temperatures of learned groups, averaged (Yang et al., NeurIPS 2023).

A gate over the features is learned together with a temperature for each group, by soft mixtures:
with gates g(x) = softmax(V x) and p_j = softmax(z / tau_j), the loss of a row is the NLL of
sum_j g_j p_j at its label. Then rows fall into groups by argmax V x, tau is thrown away, and each
group gets its own calibrator on rows that V was not learned from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from featcal.core import dist
from featcal.core.batch import Batch, Data, Head, Through, features_of, stored_logits, wide
from featcal.core.calibrator import VIEWS, Calibrator, keep_prediction, seen_features
from featcal.core.checks import InputError, check_choice, check_flags, check_whole
from featcal.core.fit import Problem, StepReport, brier, settle
from featcal.core.gradient import Array, likeliest_weights, minimize, simplex_minimum
from featcal.core.progress import calm, track
from featcal.core.sample import hashed_sample, row_hash
from featcal.core.scalar import Shrinkage, row_curves, temper, temper_cells
from featcal.heads.head import head_logits

BASES = ("temperature", "ensemble")
MIN_ROWS = 50
SAMPLE = 8192  # rows the partitions are learned from, at most
ITERATIONS = 30  # on rows not learned from later ones gain nothing, and rounding begins to matter
ONE_THREAD = 2**25  # numbers in the sample's features below which threads cost more than they give
APART = 0.5  # the logarithm of the starting temperatures around the common one
DECAY = 0.1  # on the mean square of a partition's V
SPREAD = 0.5  # how far a group's 1 / T is expected to lie from the common one, in parts of it
STEP = math.log(2) / 3  # between tabulated inverse temperatures, in log b
REACH = 2.5  # how far beyond the starting temperatures the table goes, in log b


@final
class GroupCalibration(Calibrator):
    """Rows fall into groups by argmax V x, each group has its calibrator, partitions are averaged.

    V comes from a soft mixture on standardised features. A linear gate on thousands of features can
    tell right rows from wrong ones on the very rows it was learned from, and groups fitted there
    would be far too sure elsewhere. So half of the rows, told apart by their content, teach the
    first half of the partitions and set the temperatures of the second half, and the other way
    round. Both are fitted by the NLL whatever the loss of the fit.

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
    title = "group calibration"
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
        groups = self.grouped(features, head)
        mixed = torch.full_like(logits, -torch.inf)
        for partition in range(self.inverse.shape[0]):
            group = groups[:, partition]
            inverse = self.inverse[partition].to(logits.dtype)[group]
            found = (logits * inverse[:, None]).log_softmax(1)
            if self.weights.numel():
                log_w = self.weights[partition].to(logits.dtype).log()[group]  # (n, 3)
                even = torch.full_like(found, -math.log(logits.shape[1])) + log_w[:, 2:]
                plain = torch.logaddexp(logits.log_softmax(1) + log_w[:, 1:2], even)
                found = torch.logaddexp(found + log_w[:, :1], plain)
            mixed = torch.logaddexp(mixed, found)
        return keep_prediction(mixed - math.log(self.inverse.shape[0]), logits)

    def grouped(self, features: Tensor, head: Head | None) -> Tensor:
        """The group of each row in each partition, (n, u) int64."""
        seen = seen_features(self.features, features, head)
        units = standardised(wide(seen), self.centre, self.scale)
        gates = self.gates.to(units.dtype).flatten(0, 1)
        return (units @ gates.T).view(-1, *self.gates.shape[:2]).argmax(2)

    def learn(self, problem: Problem) -> list[StepReport]:
        """The common temperature, the partitions, and then each group's own calibrator."""
        self.reset()
        bare = Through(problem.data, stored_logits, features=False)  # features are read when needed
        common = temper(bare, problem.criterion("nll"))
        if common is None:
            return [settle(self, problem, {}, "each row's logits are all equal")]
        with calm(min(problem.facts.rows, SAMPLE) * problem.facts.width, ONE_THREAD):
            self._learn_gates(problem, common.temperature)
        with calm(problem.facts.rows * problem.facts.classes):
            inverse, left_out = self._fit_groups(problem, bare, 1 / common.temperature)
        coolest, hottest = float(1 / inverse.max()), float(1 / inverse.min())
        size = f"{self.partitions} x {self.groups}"
        message = f"T from {coolest:.4g} to {hottest:.4g} in {size} groups"
        if left_out:
            message += f", {left_out} of them too small: they have T = {common.temperature:.4g}"
        warning = ""
        if common.capped.any():
            warning = f"the temperature all groups are compared with is at its cap, {coolest:.4g}"
        details = {"T_common": common.temperature, "groups_left_out": left_out}
        values, ended = {"T_min": coolest, "T_max": hottest}, (not warning, warning, details)
        return [settle(self, problem, values, message, *ended, always=self.reference)]

    def _learn_gates(self, problem: Problem, temperature: float) -> None:
        """Standardises the features and learns V from a sample of the rows."""
        facts = problem.facts
        sample = hashed_sample(
            problem.data, SAMPLE, width=facts.width, classes=facts.classes, device=facts.device
        )

        def seen(batch: Batch) -> Tensor:
            return seen_features(self.features, features_of(batch), problem.head).double()

        def sums_of(batch: Batch) -> Tensor:
            values = seen(batch)
            return torch.stack([values.sum(0), values.square().sum(0)])

        centre, square = dist.summed(map(sums_of, problem.data), 2, facts.width) / facts.rows
        scale = (square - centre.square()).clamp(min=0).sqrt()
        # Below the steps of float32 around the mean there is nothing but rounding.
        scale = torch.where(scale > 1e-6 * square.sqrt(), scale, 0)
        if self.reference:
            centre, scale = torch.zeros_like(centre), torch.ones_like(scale)
        self.assign(centre=centre, scale=scale)
        units = standardised(seen(sample), self.centre, self.scale)
        logits, half = stored_logits(sample), half_of(sample)
        seeds = range(self.seed, self.seed + self.partitions)
        temperatures = temperature * torch.linspace(-APART, APART, self.groups).exp()
        iterations, lessons = ITERATIONS, [(seeds, half >= 0)]  # which partitions from which rows
        if self.reference:  # one by one, as published
            temperatures, iterations = torch.full((self.groups,), 1.5), 100
            lessons = [(range(seed, seed + 1), half >= 0) for seed in seeds]
        elif self.held_out:
            cut = math.ceil(self.partitions / 2)
            lessons = [(seeds[:cut], half == 0), (seeds[cut:], half == 1)]
        gates = []
        for part, rows in track("group: partitions", [lesson for lesson in lessons if lesson[0]]):
            taught = Batch(logits[rows], sample.labels[rows], units[rows])
            gates.append(learn_partitions(taught, part, temperatures.tolist(), iterations))
        self.assign(gates=torch.cat(gates))

    def _fit_groups(self, problem: Problem, bare: Data, common: float) -> tuple[Tensor, int]:
        """Each partition's groups on the rows it was not learned from.

        Returns:
            1 / T, (u, g), and how many groups have the common temperature for want of rows or
            classes.
        """
        groups, halves = [], []
        for batch in problem.data:
            groups.append(self.grouped(features_of(batch), problem.head).short())
            halves.append(half_of(batch))
        all_rows = self.reference or not self.held_out
        inverse, weights, left_out = [], [], 0
        for partition in track("group: temperatures", range(self.partitions)):
            learned_from = -1 if all_rows else int(partition >= math.ceil(self.partitions / 2))
            used = [half != learned_from for half in halves]
            view = Placed(bare, groups, used, partition)
            counts = class_counts(view, self.groups, problem.facts.classes)
            usable = (counts.sum(1) >= self.min_rows) & ((counts > 0).sum(1) > 1)
            if self.reference:
                usable = counts.sum(1) > 0
                own, mixed = published_base(view, self.groups, common)
                weights.append(torch.from_numpy(mixed))
            else:  # pulled towards the common one, and that itself where a group is unusable
                found = temper_cells(
                    view,
                    features_of,
                    self.groups,
                    Shrinkage(common, SPREAD),
                    smoothing=problem.loss.smoothing,
                )
                own = np.where(usable.numpy(), common if found is None else found.inverse, common)
                if self.base == "ensemble":
                    weights.append(torch.from_numpy(group_weights(view, own, counts, usable)))
            inverse.append(torch.from_numpy(own))
            left_out += int((~usable).sum())
        self.assign(inverse=torch.stack(inverse))
        if weights:
            self.assign(weights=torch.stack(weights))
        return torch.stack(inverse), left_out


def half_of(batch: Batch) -> Tensor:
    """0 or 1 for each row, (n,), by its features: equal rows stay together.

    The lowest bit, because a sample of rows is picked by the highest ones.
    """
    return row_hash(features_of(batch)) & 1


def standardised(features: Tensor, centre: Tensor, scale: Tensor) -> Tensor:
    """(x - centre) / scale, (n, d); 0 in units that never moved on the fit split."""
    centre, scale = centre.to(features.dtype), scale.to(features.dtype)
    moving = scale > 0
    return torch.where(moving, (features - centre) / torch.where(moving, scale, 1), 0)


def learn_partitions(
    rows: Batch, seeds: range, temperatures: list[float], iterations: int
) -> Tensor:
    """V of every partition, (u, g, d) float64: one stacked problem for all of them.

    Args:
        rows: with standardised features, float64, the same on all processes.
        seeds: one for each partition.
        temperatures: where each group's tau starts.
        iterations: of L-BFGS, at most.
    """
    features, generator = features_of(rows), torch.Generator()
    size = len(seeds), len(temperatures), features.shape[1]
    logs = [-math.log(t) for t in temperatures]
    low, high = min(logs) - REACH, max(logs) + REACH
    nodes = torch.linspace(low, high, math.ceil((high - low) / STEP) + 1, dtype=torch.float64)
    gates = torch.empty(size, dtype=torch.float64)
    for gate, seed in zip(gates, seeds, strict=True):  # uniform within 1 / sqrt(d)
        gate.uniform_(-1, 1, generator=generator.manual_seed(seed)).div_(math.sqrt(size[2]))
    inverse = -torch.tensor(temperatures, dtype=torch.float64).log().expand(size[:2])
    batch = Batch(tabulated(stored_logits(rows), rows.labels, nodes), rows.labels, features)

    def parts(at: Tensor) -> tuple[Tensor, Tensor]:
        """V (u, g, d) and log 1 / tau (u, g) of one flat vector."""
        return at[: gates.numel()].view(size), at[gates.numel() :].view(size[:2])

    def objective(at: Tensor, batch: Batch) -> Tensor:
        gates, inverse = parts(at.detach())
        table = read_table(nodes.to(at.device), stored_logits(batch), inverse.flatten())
        value, slope = mixture(gates, features_of(batch), *table)
        return value.sum() + slope @ (at - at.detach())

    def penalty(at: Tensor) -> Tensor:
        decay: Tensor = DECAY * at[: gates.numel()].square().sum() / (size[1] * size[2])
        return decay

    found = minimize(
        objective,
        torch.cat([gates.flatten(), inverse.flatten()]),
        [batch],
        max(len(rows), 1) * dist.world(),  # every process holds all of these rows
        penalty=penalty,
        iterations=iterations,
    )
    return parts(found.at)[0].to(features.device)


def mixture(
    gates: Tensor, features: Tensor, nll: Tensor, nll_slope: Tensor
) -> tuple[Tensor, Tensor]:
    """The summed NLL of each partition, (u,), and the slope of their sum in all parameters, (p,).

    The slopes are short: with r_j the share of group j in the mixture, they are g_j - r_j in
    (V x)_j and r_j times the slope of group j's own NLL in tau_j. So an evaluation costs two
    products with the features.

    Args:
        gates: V, (u, g, d).
        features: (n, d).
        nll: of each row at each group's tau, (n, u g).
        nll_slope: its slope in log 1 / tau, (n, u g).
    """
    rows, (partitions, groups, width) = len(features), gates.shape
    nll, nll_slope = (part.view(rows, partitions, groups) for part in (nll, nll_slope))
    gate = (features @ gates.view(-1, width).T).view(rows, partitions, groups).log_softmax(2)
    joint = gate - nll
    total = joint.logsumexp(2)  # (n, u)
    share = (joint - total[:, :, None]).exp()
    pull = (gate.exp() - share).view(rows, -1)
    slopes = (pull.T @ features).flatten(), (share * nll_slope).sum(0).flatten()
    return -total.sum(0), torch.cat(slopes)


def read_table(nodes: Tensor, curves: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
    """Value and slope of every row's NLL at u = log b (c,): two (n, c).

    By cubic pieces between nodes, flat beyond the last ones. At k = 1000 the exponentials of every
    group at every evaluation would cost far more than the products; tau is thrown away after the
    search, so a table is exact enough.

    Args:
        nodes: (m,), equally spaced.
        curves: (n, 2 m), as `tabulated` gives them.
        where: u.
    """
    count, step = len(nodes), nodes[1] - nodes[0]
    inside = where.clamp(nodes[0], nodes[-1])
    left = ((inside - nodes[0]) / step).long().clamp(max=count - 2)
    t = (inside - nodes[left]) / step
    ends = curves[:, torch.cat([left, left + 1, count + left, count + left + 1])]
    v0, v1, s0, s1 = ends.view(len(ends), 4, -1).unbind(1)
    rise, s0, s1 = v1 - v0, s0 * step, s1 * step
    bow, twist = 3 * rise - 2 * s0 - s1, s0 + s1 - 2 * rise
    value = v0 + t * (s0 + t * (bow + t * twist))
    slope = (s0 + t * (2 * bow + 3 * t * twist)) / step
    return value, slope * (where == inside)


def tabulated(logits: Tensor, labels: Tensor, nodes: Tensor) -> Tensor:
    """Values and slopes in u of each row's NLL at the nodes: (n, 2 m) float64."""
    values, slopes = [], []
    for node in nodes.tolist():
        value, slope, _ = row_curves(logits.double(), labels, math.exp(node))
        values.append(value)
        slopes.append(slope * math.exp(node))
    return torch.stack([*values, *slopes], 1)


@dataclass(frozen=True)
class Placed:
    """Data seen through one partition: the group of each row stands where the features stood.

    Attributes:
        data: the batches, with logits.
        groups: (n, u) of each batch, in the order of the batches.
        used: (n,) of each batch: which rows count.
        partition: which of the u.
    """

    data: Data
    groups: list[Tensor]
    used: list[Tensor]
    partition: int

    def __iter__(self) -> Iterator[Batch]:
        for batch, groups, used in zip(self.data, self.groups, self.used, strict=True):
            group = groups[used, self.partition].long()
            yield Batch(stored_logits(batch)[used], batch.labels[used], group)


def class_counts(data: Data, groups: int, classes: int) -> Tensor:
    """Rows of each group and class, (g, k) int64."""
    cells = (features_of(batch) * classes + batch.labels for batch in data)
    counts = (torch.bincount(cell, minlength=groups * classes) for cell in cells)
    return dist.summed(counts, groups, classes).long()


def group_weights(data: Data, inverse: Array, counts: Tensor, usable: Tensor) -> Array:
    """Weights of softmax(z / T), softmax(z) and 1 / k in each group, (g, 3), by the NLL."""
    parts, groups = [torch.zeros(0, 3, dtype=torch.float64)], [torch.zeros(0, dtype=torch.int64)]
    for batch in data:
        logits, group = stored_logits(batch).double(), features_of(batch)
        own = torch.from_numpy(inverse).to(logits.device)[group]
        scaled, plain = (row_curves(logits, batch.labels, b)[0] for b in (own, 1.0))
        uniform = torch.full_like(plain, math.log(counts.shape[1]))
        parts.append(-torch.stack([scaled, plain, uniform], 1).cpu())
        groups.append(group.cpu())
    log_p, group = torch.cat(parts), torch.cat(groups)
    weights = np.tile([1.0, 0.0, 0.0], (len(inverse), 1))
    for which in usable.nonzero().flatten().tolist():
        weights[which] = likeliest_weights(log_p[group == which], int(counts[which].sum()))[1]
    return weights


def published_base(data: Data, groups: int, common: float) -> tuple[Array, Array]:
    """T within 0.05 and 5 and then the weights of each group, both by the squared error.

    The weights are the exact minimum; the published solver often stays at its start, (1, 0, 0). A
    group without rows gets the common temperature: there is nothing to fit.
    """
    inverse, weights = np.full(groups, common), np.tile([1.0, 0.0, 0.0], (groups, 1))
    for group in range(groups):
        rows = [batch.rows(features_of(batch) == group) for batch in data]
        found = temper(rows, brier)
        if found is None:
            continue
        inverse[group] = min(max(float(found.inverse[0]), 1 / 5), 1 / 0.05)

        def sums_of(batch: Batch, scale: float = float(inverse[group])) -> Tensor:
            logits = stored_logits(batch).double()
            even = torch.full_like(logits, 1 / logits.shape[1])
            scaled = (logits * scale).softmax(1)
            parts = torch.stack([scaled, logits.softmax(1), even]).flatten(1)
            true = torch.zeros_like(logits).scatter(1, batch.labels[:, None], 1.0).view(-1, 1)
            return parts @ torch.cat([parts.T, true], 1)

        products: Array = dist.summed(map(sums_of, rows), 3, 4).numpy()
        weights[group] = simplex_minimum(products[:, :3], -products[:, 3])
    return inverse, weights
