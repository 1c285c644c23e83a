"""Group calibration: temperatures of learned groups, averaged (Yang et al., NeurIPS 2023)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import final

import numpy as np
import torch
from torch import Tensor

from featcal.core import dist
from featcal.core.batch import Batch, Data, Head, Through, stored_logits, wide
from featcal.core.calibrator import Calibrator, seen_features
from featcal.core.checks import InputError, check_choice, check_flags, check_whole
from featcal.core.fit import Facts, Problem, StepReport, settle
from featcal.core.gradient import Array, likeliest_weights, minimize, simplex_minimum
from featcal.core.loss import brier
from featcal.core.progress import calm, track
from featcal.core.rows import keep_prediction, row_curves
from featcal.core.sample import hashed_sample, row_hash
from featcal.core.scalar import Shrinkage, Tempered, temper, temper_cells
from featcal.heads.head import head_logits

# --- The calibrator of each group: a temperature, or one mixed with the plain and uniform
# outputs.

SPREAD = 0.5  # how far a group's 1 / T is expected to lie from the common one, in parts of it


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


@dataclass(frozen=True)
class Bases:
    """Every group's calibrator.

    Attributes:
        inverse: 1 / T, (u, g).
        weights: of softmax(z / T), softmax(z) and 1 / k, (u, g, 3); None for the first alone.
        left_out: groups that have the common temperature for want of rows or classes.
    """

    inverse: Tensor
    weights: Tensor | None
    left_out: int


def half_of(batch: Batch) -> Tensor:
    """0 or 1 for each row, (n,), by its features: equal rows stay together.

    The lowest bit, because a sample of rows is picked by the highest ones.
    """
    assert batch.features is not None
    return row_hash(batch.features) & 1


def fit_bases(
    views: list[Placed], form: str, groups: int, classes: int, common: float, min_rows: int
) -> Bases:
    """Fits the groups of every partition.

    Args:
        views: the data through each partition.
        form: "temperature", "ensemble" or "published".
        groups: g.
        classes: k.
        common: 1 / T of all rows.
        min_rows: groups of fewer rows have the common T.
    """
    inverse, weights, left_out = [], [], 0
    mixed: Array | None
    for view in track("group: temperatures", views):
        counts = class_counts(view, groups, classes)
        usable = (counts.sum(1) >= min_rows) & ((counts > 0).sum(1) > 1)
        if form == "published":
            usable = counts.sum(1) > 0
            own, mixed = published_base(view, groups, common)
        else:
            own = group_inverses(view, groups, common, usable)
            mixed = group_weights(view, own, counts, usable) if form == "ensemble" else None
        inverse.append(torch.from_numpy(own))
        weights.append(None if mixed is None else torch.from_numpy(mixed))
        left_out += int((~usable).sum())
    known = [part for part in weights if part is not None]
    return Bases(torch.stack(inverse), torch.stack(known) if known else None, left_out)


def group_of(batch: Batch) -> Tensor:
    """The group of each row of placed data, (n,)."""
    assert batch.features is not None
    return batch.features


def one_group(data: Data, group: int) -> list[Batch]:
    """The rows of one group, held in memory."""
    return [batch.rows(group_of(batch) == group) for batch in data]


def class_counts(data: Data, groups: int, classes: int) -> Tensor:
    """Rows of each group and class, (g, k) int64."""
    counts = torch.zeros(groups * classes, dtype=torch.int64)
    for batch in data:
        cell = group_of(batch) * classes + batch.labels
        counts += torch.bincount(cell, minlength=len(counts)).cpu()
    return dist.total(counts).view(groups, classes)


def group_inverses(data: Data, groups: int, common: float, usable: Tensor) -> Array:
    """1 / T of each group, pulled towards the common one; that itself where a group is unusable."""
    found = temper_cells(data, group_of, groups, Shrinkage(common, SPREAD))
    if found is None:
        return np.full(groups, common)
    return np.where(usable.numpy(), found.inverse, common)


def group_weights(data: Data, inverse: Array, counts: Tensor, usable: Tensor) -> Array:
    """Weights of softmax(z / T), softmax(z) and 1 / k in each group, (g, 3), by the NLL."""
    parts, group = _true_class_parts(data, inverse, counts.shape[1])
    weights = np.tile([1.0, 0.0, 0.0], (len(inverse), 1))
    for which in usable.nonzero().flatten().tolist():
        weights[which] = likeliest_weights(parts[group == which], int(counts[which].sum()))[1]
    return weights


def _true_class_parts(data: Data, inverse: Array, classes: int) -> tuple[Tensor, Tensor]:
    """The log p of the label under each part, (n, 3) float64, and the group of each row, (n,)."""
    parts, groups = [torch.zeros(0, 3, dtype=torch.float64)], [torch.zeros(0, dtype=torch.int64)]
    for batch in data:
        logits, group = stored_logits(batch).double(), group_of(batch)
        own = torch.from_numpy(inverse).to(logits.device)[group]
        scaled, plain = (row_curves(logits, batch.labels, b)[0] for b in (own, 1.0))
        uniform = torch.full_like(plain, math.log(classes))
        parts.append(-torch.stack([scaled, plain, uniform], 1).cpu())
        groups.append(group.cpu())
    return torch.cat(parts), torch.cat(groups)


def published_base(data: Data, groups: int, common: float) -> tuple[Array, Array]:
    """T within 0.05 and 5 and then the weights of each group, both by the squared error.

    The weights are the exact minimum; the published solver often stays at its start, (1, 0, 0). A
    group without rows gets the common temperature: there is nothing to fit.
    """
    inverse, weights = np.full(groups, common), np.tile([1.0, 0.0, 0.0], (groups, 1))
    for group in range(groups):
        rows = one_group(data, group)
        found = temper(rows, brier)
        if found is not None:
            inverse[group] = min(max(float(found.inverse[0]), 1 / 5), 1 / 0.05)
            weights[group] = _least_squares(rows, inverse[group])
    return inverse, weights


def _least_squares(data: Data, inverse: float) -> Array:
    """The weights on the simplex with the lowest squared error."""
    sums = torch.zeros(3, 4, dtype=torch.float64)
    for batch in data:
        logits = stored_logits(batch).double()
        even = torch.full_like(logits, 1 / logits.shape[1])
        parts = torch.stack([(logits * inverse).softmax(1), logits.softmax(1), even]).flatten(1)
        true = torch.zeros_like(logits).scatter(1, batch.labels[:, None], 1.0).view(-1, 1)
        sums += (parts @ torch.cat([parts.T, true], 1)).cpu()
    found: Array = dist.total(sums).numpy()
    return simplex_minimum(found[:, :3], -found[:, 3])


# --- Learning how to group rows: a gate over features and a temperature a group, by soft
# mixtures.
#
# With gates g(x) = softmax(V x) and p_j = softmax(z / tau_j), the loss of a row is the NLL of
# sum_j g_j p_j at its label. Its slopes are short: with r_j the share of group j in that sum, they
# are g_j - r_j in (V x)_j and r_j times the slope of group j's own NLL in tau_j. All partitions are
# one stacked problem, so that an evaluation costs two products with the features.

DECAY = 0.1  # on the mean square of a partition's V
STEP = math.log(2) / 3  # between tabulated inverse temperatures, in log b
REACH = 2.5  # how far beyond the starting temperatures the table goes, in log b


@dataclass(frozen=True)
class Plan:
    """What is asked for: so many partitions of so many groups, from these seeds and temperatures.

    Attributes:
        seeds: one for each partition.
        temperatures: where each group's tau starts.
        iterations: of L-BFGS, at most.
    """

    seeds: range
    temperatures: list[float]
    iterations: int

    @property
    def groups(self) -> int:
        """Groups a partition."""
        return len(self.temperatures)


def learn_partitions(features: Tensor, logits: Tensor, labels: Tensor, plan: Plan) -> Tensor:
    """V of every partition, (u, g, d) float64.

    Args:
        features: (n, d) float64, the same on all processes, as are the logits and labels.
        logits: (n, k).
        labels: (n,).
        plan: what is asked for.
    """
    width = features.shape[1]
    size = len(plan.seeds), plan.groups, width
    nodes = _nodes(plan.temperatures)
    gates = torch.stack([_first_gates(seed, plan.groups, width) for seed in plan.seeds])
    inverse = -torch.tensor(plan.temperatures, dtype=torch.float64).log().expand(size[:2])
    batch = Batch(tabulated(logits, labels, nodes), labels, features)

    def objective(at: Tensor, batch: Batch) -> Tensor:
        table = Table(nodes.to(at.device), stored_logits(batch))
        assert batch.features is not None
        value, slope = mixture(_parts(at.detach(), size), batch.features, table)
        return value.sum() + slope @ (at - at.detach())

    def penalty(at: Tensor) -> Tensor:
        decay: Tensor = DECAY * at[: gates.numel()].square().sum() / (size[1] * size[2])
        return decay

    found = minimize(
        objective,
        torch.cat([gates.flatten(), inverse.flatten()]),
        [batch],
        max(len(labels), 1) * dist.world(),  # every process holds all of these rows
        penalty=penalty,
        iterations=plan.iterations,
    )
    return _parts(found.at, size)[0].to(features.device)


def unit_scales(
    data: Data, seen: Callable[[Tensor], Tensor], facts: Facts
) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of every unit, two (d,) float64; a deviation of 0 where constant.

    Args:
        data: batches with features.
        seen: what is made of the features first.
        facts: of the data.
    """
    sums = torch.zeros(2, facts.width, dtype=torch.float64)
    for batch in data:
        assert batch.features is not None
        values = seen(batch.features).double()
        sums += torch.stack([values.sum(0), values.square().sum(0)]).cpu()
    mean, square = dist.total(sums) / facts.rows
    scale = (square - mean.square()).clamp(min=0).sqrt()
    # Below the steps of float32 around the mean there is nothing but rounding.
    return mean, torch.where(scale > 1e-6 * square.sqrt(), scale, 0)


def standardised(features: Tensor, centre: Tensor, scale: Tensor) -> Tensor:
    """(x - centre) / scale, (n, d); 0 in units that never moved on the fit split."""
    centre, scale = centre.to(features.dtype), scale.to(features.dtype)
    moving = scale > 0
    return torch.where(moving, (features - centre) / torch.where(moving, scale, 1), 0)


def _first_gates(seed: int, groups: int, width: int) -> Tensor:
    """Uniform within 1 / sqrt(d), by a generator of its own."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(groups, width, generator=generator, dtype=torch.float64)
    return (2 * drawn - 1) / math.sqrt(width)


def _parts(at: Tensor, size: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """V (u, g, d) and log 1 / tau (u, g) of one flat vector."""
    gates, inverse = torch.split(at, [size[0] * size[1] * size[2], size[0] * size[1]])
    return gates.view(size), inverse.view(size[:2])


def mixture(at: tuple[Tensor, Tensor], features: Tensor, table: Table) -> tuple[Tensor, Tensor]:
    """The summed NLL of each partition, (u,), and the slope of their sum in all parameters, (p,).

    Args:
        at: V (u, g, d) and log 1 / tau (u, g).
        features: (n, d).
        table: each row's NLL as a function of the inverse temperature.
    """
    gates, inverse = at
    rows, (partitions, groups, width) = len(features), gates.shape
    nll, nll_slope = (part.view(rows, partitions, groups) for part in table.at(inverse.flatten()))
    flat = gates.view(-1, width)
    gate = (features @ flat.T).view(rows, partitions, groups).log_softmax(2)
    joint = gate - nll
    total = joint.logsumexp(2)  # (n, u)
    share = (joint - total[:, :, None]).exp()
    pull = (gate.exp() - share).view(rows, -1)
    slopes = (pull.T @ features).flatten(), (share * nll_slope).sum(0).flatten()
    return -total.sum(0), torch.cat(slopes)


@dataclass(frozen=True)
class Table:
    """The NLL of n rows over u = log b, as cubic pieces between nodes; flat beyond the last ones.

    At k = 1000 the exponentials of every group at every evaluation would cost far more than the
    products; tau is thrown away after the search, so a table is exact enough.

    Attributes:
        nodes: (m,), equally spaced.
        curves: (n, 2 m): the values at the nodes, then the slopes in u.
    """

    nodes: Tensor
    curves: Tensor

    def at(self, where: Tensor) -> tuple[Tensor, Tensor]:
        """Value and slope of every row at u (c,): two (n, c)."""
        count, step = len(self.nodes), self.nodes[1] - self.nodes[0]
        inside = where.clamp(self.nodes[0], self.nodes[-1])
        left = ((inside - self.nodes[0]) / step).long().clamp(max=count - 2)
        t = (inside - self.nodes[left]) / step
        ends = self.curves[:, torch.cat([left, left + 1, count + left, count + left + 1])]
        v0, v1, s0, s1 = ends.view(len(ends), 4, -1).unbind(1)
        rise, s0, s1 = v1 - v0, s0 * step, s1 * step
        bow, twist = 3 * rise - 2 * s0 - s1, s0 + s1 - 2 * rise
        value = v0 + t * (s0 + t * (bow + t * twist))
        slope = (s0 + t * (2 * bow + 3 * t * twist)) / step
        return value, slope * (where == inside)


def _nodes(temperatures: list[float]) -> Tensor:
    """Equally spaced log b from well below to well above the starting points."""
    logs = [-math.log(t) for t in temperatures]
    low, high = min(logs) - REACH, max(logs) + REACH
    return torch.linspace(low, high, math.ceil((high - low) / STEP) + 1, dtype=torch.float64)


def tabulated(logits: Tensor, labels: Tensor, nodes: Tensor) -> Tensor:
    """Values and slopes in u of each row's NLL at the nodes: (n, 2 m) float64."""
    values, slopes = [], []
    for node in nodes.tolist():
        value, slope, _ = row_curves(logits.double(), labels, math.exp(node))
        values.append(value)
        slopes.append(slope * math.exp(node))
    return torch.stack([*values, *slopes], 1)


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
