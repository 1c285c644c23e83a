"""Proximity-informed calibration: confidence by how close known rows lie (Xiong et al., 2023).

The chance of being right comes from (confidence, proximity), by two densities or by bins within
bins. Both coordinates are kept as their distance from 1, where most rows lie: a number close to 0
has digits left in any precision, a number close to 1 has not.
"""

from __future__ import annotations

import math
from functools import partial
from typing import ClassVar, final

import torch
from torch import Tensor

from featcal.core.batch import Head, features_of, stored_logits
from featcal.core.calibrator import VIEWS, Calibrator, seen_features
from featcal.core.checks import InputError, check_choice, check_flags, check_whole
from featcal.core.fit import Problem, StepReport, settle
from featcal.core.rows import with_confidence
from featcal.core.sample import hashed_sample, nearest, on_sphere
from featcal.heads.head import head_logits

HOW = ("density_ratio", "bin_mean_shift")
SLICES, BINS = 5, 10  # of proximity, and of confidence within each
ROUNDING = 4e-6  # of squared distances in float32, which reaches 1e-6
BLOCK = 1024  # kernels at a time: the loop's length is fixed, so that export unrolls it
NARROWEST = 1e-3  # of the kernels, in units of probability: all rows may be alike
FLOOR = 1e-10  # of the published denominator


@final
class ProximityCalibration(Calibrator):
    """The predicted class's probability from its confidence and the row's proximity.

    Proximity is the mean of exp(-d^2) over the nearest rows of the fit split, with features of
    length 1. A row that is itself among the stored ones is not its own neighbour, in the fit and
    after it: where the nearest stored row is as close as rounding brings a row to itself (a squared
    distance of 4e-6 in float32), it counts as that row and not as a neighbour. The other classes
    share what is left as before, and the prediction stays.

    The calibrator keeps rows of the fit split: their features, float32, are part of it.

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
    keeps_accuracy = True
    keeps_rows = True
    quick = "temperature"
    stored: Tensor
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
        super().__init__()
        check_whole(self.name, 1, neighbours=neighbours, references=references)
        check_choice(self.name, "how", how, HOW)
        check_choice(self.name, "features", features, VIEWS)
        check_flags(self.name, mirror=mirror, reference=reference)
        if reference and (how != "density_ratio" or not mirror):
            raise InputError("proximity: reference=True fixes how and mirror: leave them out")
        self.neighbours, self.how, self.references = neighbours, how, references
        self.features, self.mirror, self.reference = features, mirror, reference
        self.jumps = how == "bin_mean_shift"
        for buffer in ("stored", "right", "wrong", "width", "far_edges", "edges", "shares"):
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

    def sound(self) -> bool:
        """Whether values are finite, shapes go together, rows have length 1, widths are above 0."""
        sound = all(bool(torch.isfinite(value).all()) for value in self.buffers())
        if sound and self.stored.numel():
            by_bins = self.how == "bin_mean_shift"
            shapes = {
                "width": (0,) if by_bins else (2, 2),
                "far_edges": (SLICES - 1,) if by_bins else (0,),
                "edges": (SLICES, BINS - 1) if by_bins else (0,),
                "shares": (SLICES, BINS) if by_bins else (0,),
                "right": (0,) if by_bins else (len(self.right), 2),
                "wrong": (0,) if by_bins else (len(self.stored) - len(self.right), 2),
            }
            sound = (
                all(self.get_buffer(key).shape == shape for key, shape in shapes.items())
                and self.stored.ndim == 2
                and torch.allclose(on_sphere(self.stored), self.stored.float(), atol=0.01)
                and bool((self.width > 0).all())
            )
        return sound

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
