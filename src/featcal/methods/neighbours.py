"""Calibration by how far known rows lie: density-aware, and proximity-informed.

Density-aware calibration (after Tomani et al., ICML 2023, who add up several layers; this is the
last layer's features alone): a temperature that grows with the distance to training rows.
Proximity-informed calibration (Xiong et al., 2023): the confidence by how close rows of the fit
split lie.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor

from featcal.core import dist
from featcal.core.batch import Batch, Data, Head, Through, features_of, stored_logits
from featcal.core.calibrator import VIEWS, Calibrator, seen_features, with_confidence
from featcal.core.checks import InputError, check_choice, check_flags, check_whole
from featcal.core.fit import Loss, Problem, StepReport, brier, measure, nll, settle
from featcal.core.gradient import minimize
from featcal.core.sample import hashed_sample
from featcal.core.scalar import row_nll, temper
from featcal.heads.head import head_logits

BLOCK = 1024  # stored rows at a time: the loop's length is fixed, so that export unrolls it

NEIGHBOURS = 50  # of the density
TINY = 1e-20  # the lowest temperature
REACH = 30.0  # how far w may go from its start, in logarithms
GAIN = 1e-9  # what a second number must lower the loss by to be worth having

HOW = ("density_ratio", "bin_mean_shift")
SLICES, BINS = 5, 10  # of proximity, and of confidence within each
ROUNDING = 4e-6  # of squared distances in float32, which reaches 1e-6
NARROWEST = 1e-3  # of the kernels, in units of probability: all rows may be alike
FLOOR = 1e-10  # of the published denominator


class KnownRows(Calibrator):
    """Keeps rows to measure distances to: their features, of length 1, are part of it."""

    keeps_accuracy = True
    keeps_rows = True
    quick = "temperature"
    stored: Tensor

    def __init__(self, *, neighbours: int, references: int, features: str, reference: bool) -> None:
        super().__init__()
        check_whole(self.name, 1, neighbours=neighbours, references=references)
        check_choice(self.name, "features", features, VIEWS)
        check_flags(self.name, reference=reference)
        self.neighbours, self.references = neighbours, references
        self.features, self.reference = features, reference
        self.register_buffer("stored", torch.zeros(0))


def on_sphere(features: Tensor) -> Tensor:
    """Rows (n, d) of length 1, in float32 or wider; rows of zeros stay as they are."""
    values = features if features.dtype == torch.float64 else features.float()
    # Scaled first: squares of very large or very small values leave the range of float32.
    largest = values.abs().amax(1, keepdim=True)
    tiny = torch.finfo(values.dtype).tiny
    return F.normalize(values / largest.clamp(min=tiny), dim=1)


def nearest(points: Tensor, stored: Tensor, count: int) -> Tensor:
    """Squared distances of points to the nearest of the stored rows, ascending.

    Args:
        points: (n, d).
        stored: (r, d), with r >= count.
        count: how many of the nearest.

    Returns:
        (n, count).
    """
    own = points.square().sum(1, keepdim=True)  # (n, 1)
    best = points.new_zeros(points.shape[0], 0)
    for block in torch.split(stored.to(points.dtype), BLOCK):
        squared = own + block.square().sum(1) - 2 * points @ block.T
        both = torch.cat([best, squared.clamp(min=0)], 1)
        best = both.topk(min(count, both.shape[1]), dim=1, largest=False).values
    return best


@final
class DensityAware(KnownRows):
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
    title = "density-aware calibration"
    needs_train = True
    weights: Tensor

    def __init__(
        self,
        *,
        neighbours: int = NEIGHBOURS,
        references: int = 5000,
        features: str = "unclipped",
        reference: bool = False,
    ) -> None:
        super().__init__(
            neighbours=neighbours, references=references, features=features, reference=reference
        )
        if reference and neighbours != NEIGHBOURS:
            raise InputError("density: reference=True takes the nearest row: leave neighbours out")
        self.register_buffer("weights", torch.zeros(0))

    def forward(self, features: Tensor, head: Head) -> Tensor:
        """Divides each row by its own temperature."""
        logits = head_logits(features, head)
        if self.weights.numel() == 0:
            return logits
        distance = self.distance(features, head).to(logits.dtype)
        return logits / temperature_at(self.weights.to(logits.dtype), distance)[:, None]

    def distance(self, features: Tensor, head: Head) -> Tensor:
        """To the k-th nearest stored row, (n,)."""
        points = on_sphere(seen_features(self.features, features, head))
        count = 1 if self.reference else min(self.neighbours, self.stored.shape[0])
        squared = nearest(points, self.stored, count)[:, -1]
        return squared if self.reference else squared.sqrt()

    def learn(self, problem: Problem) -> list[StepReport]:
        """Stores training rows, measures every fit row's distance once, and searches w."""
        self.reset()
        head, rows = problem.head, problem.facts.rows
        assert head is not None
        assert problem.train is not None
        loss = brier if self.reference else problem.smooth_loss(self.name)
        train = self._usable(problem.train, problem)
        self.assign(stored=on_sphere(seen_features(self.features, features_of(train), head)))
        # Too expensive to be measured again in a search.
        scores = [self.distance(features_of(b), head).double() for b in problem.data]
        data = Scored(problem.data, scores)
        found = published_weights(data, rows) if self.reference else best_weights(data, rows, loss)
        if found is None:
            return [settle(self, problem, {}, "each row's logits are all equal")]
        w0, w1 = found.w0, found.w1
        self.assign(weights=torch.tensor([w0, w1]))
        low, mean, high = (max(w0 + w1 * s, TINY) for s in data.range())
        values, message = {"w0": w0, "w1": w1}, f"T = {w0:.4g} + {w1:.4g} s"
        message += f", from {low:.4g} to {high:.4g}"
        details = {"T_mean": mean, "T_min": low, "T_max": high, "rows_kept": len(train)}
        ended = found.converged, found.warning, details
        return [settle(self, problem, values, message, *ended, always=self.reference)]

    def _usable(self, train: Data, problem: Problem) -> Batch:
        """The training rows to keep.

        A process that raised while it reads would leave the others waiting for its rows, so it
        stops reading and all of them raise afterwards.
        """
        width, unusable = problem.facts.width, False

        def checked() -> Iterator[Batch]:
            nonlocal unusable
            for batch in train:
                values = batch.features
                fits = values is not None and values.shape[1] == width
                unusable = not fits or not bool(torch.isfinite(features_of(batch)).all())
                if unusable:
                    return
                yield batch

        kept = hashed_sample(checked(), self.references, width=width, device=problem.facts.device)
        if bool(dist.largest(torch.tensor(int(unusable)))):
            raise InputError(f"density: every row of train must hold {width} finite features")
        if not len(kept):
            raise InputError("density: train is empty: pass rows the network was trained on")
        return kept


def temperature_at(weights: Tensor, distance: Tensor) -> Tensor:
    """T = w0 + w1 s, (n,), above 0."""
    return (weights[0] + weights[1] * distance).clamp(min=TINY)


@dataclass(frozen=True)
class Scored:
    """Data in which each row's distance stands where the features stood.

    Attributes:
        data: the batches, with logits.
        scores: (n,) of each batch, in the order of the batches.
    """

    data: Data
    scores: list[Tensor]

    def __iter__(self) -> Iterator[Batch]:
        for batch, score in zip(self.data, self.scores, strict=True):
            yield Batch(stored_logits(batch), batch.labels, score)

    def range(self) -> tuple[float, float, float]:
        """The shortest, mean and longest distance, over all processes."""
        scores = torch.cat([torch.zeros(0, dtype=torch.float64), *map(Tensor.cpu, self.scores)])
        total, rows = dist.total(torch.stack([scores.sum(), torch.tensor(float(len(scores)))]))
        shortest, longest = dist.ends(scores)
        return shortest, float(total / rows), longest


@dataclass(frozen=True)
class Found:
    """Where the search for w ended."""

    w0: float
    w1: float
    converged: bool = True
    warning: str = ""


def best_weights(data: Scored, rows: int, loss: Loss) -> Found | None:
    """One temperature for all, one proportional to the distance, or the best sum of both."""
    single = temper(data, loss)
    if single is None:
        return None
    alone = Found(single.temperature, 0.0)
    if single.capped.any():
        return replace(alone, converged=False, warning=f"density: T = {alone.w0:.4g} is at its cap")
    shortest, mean, longest = data.range()
    if longest - shortest <= 1e-6 * longest:
        return alone
    choices = [alone]
    if shortest > 0:
        divided = Through(
            data, lambda b: stored_logits(b).double() / features_of(b)[:, None], keep=0
        )
        other = temper(divided, loss)
        assert other is not None
        choices.append(Found(0.0, other.temperature))

    # Both above 0, as logarithms, from the one temperature halved between them.
    first = math.log(alone.w0 / 2)

    def objective(at: Tensor, batch: Batch) -> Tensor:
        parts = at.clamp(first - REACH, first + REACH).exp()
        return _summed(loss, batch, parts[0] + parts[1] * features_of(batch) / mean)

    both = minimize(objective, torch.full((2,), first), data, rows)
    w0, w1 = both.at.clamp(first - REACH, first + REACH).exp().tolist()
    choices.append(Found(w0, w1 / mean, both.converged))

    best, lowest = alone, math.inf
    for choice in choices:
        weights = torch.tensor([choice.w0, choice.w1], dtype=torch.float64)

        def changed(logits: Tensor, batch: Batch, weights: Tensor = weights) -> Tensor:
            score = features_of(batch)
            return loss.sums(logits / temperature_at(weights.to(score), score)[:, None], batch)

        value = measure(data, replace(loss, sums=changed))[0]
        if value < lowest - GAIN:
            best, lowest = choice, value
    return best


def published_weights(data: Scored, rows: int) -> Found:
    """From w = 1, by the squared error, within the published bounds."""

    def objective(at: Tensor, batch: Batch) -> Tensor:
        temperature = at[0].clamp(-100, 100) + at[1].clamp(0, 1e4) * features_of(batch)
        return _summed(brier, batch, temperature.clamp(min=TINY))

    found = minimize(objective, torch.ones(2), data, rows)
    w0, w1 = found.at.tolist()
    return Found(min(max(w0, -100.0), 100.0), min(max(w1, 0.0), 1e4), found.converged)


def _summed(loss: Loss, batch: Batch, temperature: Tensor) -> Tensor:
    """The summed loss of a batch at a temperature for each row, differentiable in these."""
    logits = stored_logits(batch)
    if loss.base is nll:
        return row_nll(logits, batch.labels, 1 / temperature, loss.smoothing).sum()
    return loss.sums(logits / temperature[:, None], batch)[0]


@final
class ProximityCalibration(KnownRows):
    """The predicted class's probability from its confidence and the row's proximity.

    Proximity is the mean of exp(-d^2) over the nearest rows of the fit split, with features of
    length 1. A row that is itself among the stored ones is not its own neighbour, in the fit and
    after it: where the nearest stored row is as close as rounding brings a row to itself (a squared
    distance of 4e-6 in float32), it counts as that row and not as a neighbour. The other classes
    share what is left as before, and the prediction stays.

    The calibrator keeps rows of the fit split: their features, float32, are part of it. Confidence
    and proximity are kept as their distance from 1, where most rows lie: a number close to 0 has
    digits left in any precision, a number close to 1 has not.

    Args:
        neighbours: how many of the nearest rows.
        how: "density_ratio": the densities of right and of wrong rows over (confidence, proximity),
            by Gaussian kernels; "bin_mean_shift": the share of right rows in 10 bins of confidence
            within each of 5 slices of proximity.
        references: rows kept, at most; picked by content where the fit split has more, and then
            neither density nor bins use the others.
        features: "unclipped", or "clipped" for what the head gets after a clip.
        mirror: reflect the kernels at full confidence, beyond which no row can lie.
        reference: the published density ratio: no reflection, no belief in the row's own confidence
            where nothing is near.
    """

    name = "proximity"
    title = "proximity-informed calibration"
    symbols: ClassVar[dict[str, str]] = {"proximity": "mean proximity"}
    right: Tensor
    wrong: Tensor
    width: Tensor
    far_edges: Tensor
    edges: Tensor
    shares: Tensor

    def __init__(
        self,
        *,
        neighbours: int = 10,
        how: str = "density_ratio",
        references: int = 5000,
        features: str = "unclipped",
        mirror: bool = True,
        reference: bool = False,
    ) -> None:
        super().__init__(
            neighbours=neighbours, references=references, features=features, reference=reference
        )
        check_choice(self.name, "how", how, HOW)
        check_flags(self.name, mirror=mirror)
        if reference and (how != "density_ratio" or not mirror):
            raise InputError("proximity: reference=True fixes how and mirror: leave them out")
        self.how, self.mirror, self.jumps = how, mirror, how == "bin_mean_shift"
        for buffer in ("right", "wrong", "width", "far_edges", "edges", "shares"):
            self.register_buffer(buffer, torch.zeros(0))

    def forward(self, features: Tensor, head: Head) -> Tensor:
        """Log-probabilities with the confidence that confidence and proximity call for."""
        logits = head_logits(features, head)
        if self.stored.numel() == 0:
            return logits
        at = self.coordinates(logits, seen_features(self.features, features, head))
        if self.how == "bin_mean_shift":
            slice_of, bin_of = bins_of(at, self.far_edges, self.edges)
            return with_confidence(logits, self.shares.to(at.dtype)[slice_of, bin_of])
        ratio = published_ratio if self.reference else partial(density_ratio, mirror=self.mirror)
        return with_confidence(logits, ratio(at, self.right, self.wrong, self.width.to(at.dtype)))

    def coordinates(self, logits: Tensor, features: Tensor) -> Tensor:
        """1 - confidence and 1 - proximity of each row, (n, 2); 0 where there is nobody else."""
        top = logits.argmax(1, keepdim=True)
        others = logits.scatter(1, top, -torch.inf).logsumexp(1)
        doubt = (others - logits.logsumexp(1)).exp()
        count = min(self.neighbours, self.stored.shape[0] - 1)
        squared = nearest(on_sphere(features), self.stored, count + 1)
        # How far two roundings of the same row may lie apart.
        half_steps = sum(torch.finfo(kind).eps / 2 for kind in (features.dtype, self.stored.dtype))
        itself = squared[:, :1] <= ROUNDING + half_steps**2
        known = torch.where(itself, squared[:, 1:], squared[:, :-1])  # (n, count)
        distance = -torch.expm1(-known).sum(1) / max(count, 1)
        return torch.stack([doubt, distance.to(doubt.dtype)], 1)

    def learn(self, problem: Problem) -> list[StepReport]:
        """Stores rows and learns who among them was right."""
        self.reset()
        facts, most = problem.facts, self.references
        rows = hashed_sample(
            problem.data, most, width=facts.width, classes=facts.classes, device=facts.device
        )
        seen = seen_features(self.features, features_of(rows), problem.head)
        self.assign(stored=on_sphere(seen))
        logits = stored_logits(rows)
        at = self.coordinates(logits, seen)
        right = logits.argmax(1) == rows.labels
        if self.how == "bin_mean_shift":
            far_edges, edges, shares = learn_bins(at, right, SLICES, BINS)
            self.assign(far_edges=far_edges, edges=edges, shares=shares)
        else:
            width = torch.stack([widths(at[right], at), widths(at[~right], at)])
            self.assign(right=at[right], wrong=at[~right], width=width)
        proximity, kept, misses = 1 - float(at[:, 1].mean()), len(right), int((~right).sum())
        of = "" if kept == facts.rows else f" of {facts.rows}"
        warning = ""
        if misses in (0, kept):
            which = "wrong" if misses else "right"
            warning = (
                f"proximity: all rows kept were {which}, so nothing tells when the network is not"
            )
        values, details = {"rows": kept, "proximity": proximity}, {"wrong": misses}
        message = f"{kept}{of} rows kept, {misses} of them wrong; mean proximity {proximity:.3f}"
        ended = True, warning, details
        return [settle(self, problem, values, message, *ended, always=self.reference)]


def widths(spots: Tensor, everyone: Tensor) -> Tensor:
    """Bandwidths (2,) by the normal reference rule, 1.06 s n^(-1/6).

    Args:
        spots: (n, 2), the rows of one density.
        everyone: (m, 2), all rows, whose spread stands in where there are fewer than two.
    """
    values = spots if len(spots) > 1 else everyone
    spread = values.std(0, correction=0) if len(values) else values.new_zeros(2)
    rule: Tensor = 1.06 * spread * float(max(len(spots), 1)) ** (-1 / 6)
    return rule.clamp(min=NARROWEST)


def kernel_sums(at: Tensor, spots: Tensor, width: Tensor, *, mirror: bool) -> Tensor:
    """The sum of the kernels around the spots, (n,): their number times their density.

    Far from every spot it is 0; both forms below have a floor that holds then.

    Args:
        at: (n, 2), where; the first coordinate is 0 at full confidence.
        spots: (m, 2).
        width: (2,).
        mirror: reflect the kernels at full confidence, beyond which no row can lie.
    """
    total = torch.zeros_like(at[:, 0])
    for block in torch.split(spots.to(at.dtype), BLOCK):
        across = ((at[:, 1:] - block[:, 1]) / width[1]).square()  # (n, b)
        for side in (1, -1) if mirror else (1,):
            along = ((at[:, :1] - side * block[:, 0]) / width[0]).square()
            total = total + (-(along + across) / 2).exp().sum(1)
    return total / (2 * math.pi * width[0] * width[1])


def density_ratio(
    at: Tensor, right: Tensor, wrong: Tensor, width: Tensor, *, mirror: bool
) -> Tensor:
    """The chance of being right, (n,), by the densities of right and of wrong rows.

    The row's own confidence counts as one further row that lies right here, under a kernel as wide
    as both densities' on average. Where rows are many it changes nothing; where there are none, the
    confidence stays what it was.

    Args:
        at: (n, 2), where.
        right: (m, 2), the rows that were right; wrong likewise.
        wrong: (l, 2).
        width: (2, 2), bandwidths of the one and of the other.
        mirror: reflect at full confidence.
    """
    mean = width.prod(0).sqrt()
    height = 1 / (2 * math.pi * mean[0] * mean[1])  # one for both, or the wider one would lose
    hits = kernel_sums(at, right, width[0], mirror=mirror) + (1 - at[:, 0]) * height
    misses = kernel_sums(at, wrong, width[1], mirror=mirror) + at[:, 0] * height
    return hits / (hits + misses)


def published_ratio(at: Tensor, right: Tensor, wrong: Tensor, width: Tensor) -> Tensor:
    """The ratio as published: no reflection, and 0 far from every row that was right."""
    hits = kernel_sums(at, right, width[0], mirror=False)
    misses = kernel_sums(at, wrong, width[1], mirror=False)
    floor = max(FLOOR * right.shape[0], torch.finfo(at.dtype).tiny)
    return hits / (hits + misses).clamp(min=floor)


def bins_of(at: Tensor, far_edges: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
    """The slice of proximity and the bin of confidence of each row, (n,) each.

    Args:
        at: (n, 2).
        far_edges: (s - 1,), between slices of proximity.
        edges: (s, m - 1), between bins of confidence within each slice.
    """
    slice_of = (at[:, 1:] > far_edges.to(at.dtype)).sum(1)
    return slice_of, (at[:, :1] > edges.to(at.dtype)[slice_of]).sum(1)


def learn_bins(at: Tensor, right: Tensor, slices: int, bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """Edges, as in `bins_of`, and values of bins of equal numbers of rows.

    A bin's value is its share of right rows, its own mean confidence counted as one row more.
    """
    far_edges = inner_quantiles(at[:, 1], slices)
    slice_of = (at[:, 1:] > far_edges).sum(1)
    parts = [at[slice_of == part, 0] for part in range(slices)]
    edges = torch.stack([inner_quantiles(part if len(part) else at[:, 0], bins) for part in parts])
    bin_of = slice_of * bins + bins_of(at, far_edges, edges)[1]
    columns = torch.stack([torch.ones_like(at[:, 0]), 1 - at[:, 0], right.to(at.dtype)], 1)
    sums = at.new_zeros(slices * bins, 3).index_add_(0, bin_of, columns)
    rows, sure, hits = sums.unbind(1)
    # An empty bin, as equal confidences leave them, is never asked for a fit row's value.
    mean = torch.where(rows > 0, sure / rows.clamp(min=1), (1 - at[:, 0]).mean())
    return far_edges, edges, ((hits + mean) / (rows + 1)).view(slices, bins)


def inner_quantiles(values: Tensor, parts: int) -> Tensor:
    """The values that cut into parts of equal size, (parts - 1,)."""
    levels = torch.arange(1, parts, dtype=values.dtype, device=values.device) / parts
    return torch.quantile(values, levels)
