"""Learning how to group rows: a gate over features and a temperature a group, by soft mixtures.

With gates g(x) = softmax(V x) and p_j = softmax(z / tau_j), the loss of a row is the NLL of
sum_j g_j p_j at its label. Its slopes are short: with r_j the share of group j in that sum, they
are g_j - r_j in (V x)_j and r_j times the slope of group j's own NLL in tau_j. All partitions are
one stacked problem, so that an evaluation costs two products with the features.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from featcal.core import dist
from featcal.core.batch import Batch, Data, stored_logits
from featcal.core.curves import row_curves
from featcal.core.descend import minimize
from featcal.core.survey import Facts

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
