"""What values the features of confident wrong and confident right rows have.

The paper reads a thicker tail off this histogram, and with it a larger variance of wrong rows (Tao,
Dong and Xu, AAAI 2025); the fitted sigmas say by how much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from featcal.analysis.base import HCE, LCE, Analysis, first_axes
from featcal.analysis.groups import CONFIDENCE, Groups, groups_of
from featcal.analysis.magnitudes import Magnitudes
from featcal.analysis.normal import NormalFit, sigma_error
from featcal.analysis.reading import TEST, Rows, Source, reading
from featcal.analysis.shares import Z
from featcal.core.batch import Head
from featcal.core.errors import InputError
from featcal.metrics.inputs import checked_bins
from featcal.report.drawing import DASHES, TEXT
from featcal.report.intervals import UNKNOWN, Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from featcal.analysis.base import Panels

BINS = 100
SHOWN = 0.995  # of the values of the group with the longer tail


@final
@dataclass(frozen=True, eq=False)
class FeatureValues(Analysis):
    """Histograms of all feature values of both groups, zeros included, and fitted normals.

    Attributes:
        groups: the rows.
        edges: (m + 1,) of the bins, which are [lo, hi) but for the last, as numpy has them.
        counts: (2, m) int64, values of HCE and of LCE rows in each bin.
        values: (2,) all values of each group, those outside of the bins too.
        fits: of HCE and of LCE values; see `analysis/normal.py` for the estimator.
        signed: whether features may be negative; the fits are of rectified normals otherwise.
        errors: standard errors over rows of the two sigmas; NaN for fewer than two rows.
        zeros: the share of each group's values that are not above 0; half of them, were they
            rectified normals of mean 0.
    """

    groups: Groups
    edges: Tensor = field(repr=False)
    counts: Tensor = field(repr=False)
    values: tuple[int, int]
    fits: tuple[NormalFit, NormalFit]
    signed: bool
    errors: tuple[float, float]
    zeros: tuple[float, float]

    @classmethod
    def of(
        cls,
        data: Source,
        head: Head | None = None,
        *,
        split: str = TEST,
        groups: Groups | None = None,
        confidence: float = CONFIDENCE,
        bins: int = BINS,
        limit: float | None = None,
        signed: bool | None = None,
    ) -> FeatureValues:
        """The values of the groups of `data`.

        Args:
            data: a pack, or labelled rows with features.
            head: the classifier's last layer; a pack has its own.
            split: which rows, where the data is a pack.
            groups: of these rows, where they are known already.
            confidence: of the groups, else.
            bins: how many bins of equal width.
            limit: where the bins end: at 0 and `limit`, or at -limit and limit for signed
                features; None for where 99.5 % of the values lie, infinity for the largest.
            signed: whether features may be negative; None to see from all rows of the data.
        """
        if limit is not None and not limit > 0:
            raise InputError(f"limit is {limit!r}: pass a number above 0, or None")
        m = checked_bins(bins)
        with reading(data, head, split=split, features_for="a histogram of feature values") as rows:
            found = groups_of(rows, groups, confidence)
            seen = [_Sums(), _Sums()]
            for (features,), masks in found.along(rows.features()):
                for sums, mask in zip(seen, masks, strict=True):
                    sums.add(features[mask])
            signed = rows.signed() if signed is None else bool(signed)
            edges = _edges(seen, m, limit, signed=signed)
            counts = _histogram(rows, found, edges)
        wrong, right = seen
        fits = wrong.fit(signed=signed), right.fit(signed=signed)
        errors = wrong.error(signed=signed), right.error(signed=signed)
        zeros = wrong.zero_share, right.zero_share
        return cls(found, edges, counts, (wrong.n, right.n), fits, signed, errors, zeros)

    @property
    def gap(self) -> float:
        """By how much the sigma of HCE values is the larger one."""
        return self.fits[0].sigma - self.fits[1].sigma

    @property
    def interval(self) -> Interval:
        """95 % interval of `gap` by normal theory, two independent groups of rows."""
        error = math.hypot(*self.errors)
        if math.isnan(error):
            return UNKNOWN
        return Interval(self.gap - Z * error, self.gap + Z * error)

    @property
    def density(self) -> Tensor:
        """(2, m) counts over all values of the group, by the width of a bin; NaN for no rows.

        The area below is the share of the values within the bins.
        """
        whole = torch.tensor(self.values, dtype=torch.float64)[:, None]
        return self.counts / whole / self.edges.diff()

    def numbers(self) -> dict[str, Any]:
        """The histograms and the fits."""
        return {
            "groups": self.groups.numbers(),
            "signed": self.signed,
            "values": dict(zip(("hce", "lce"), self.values, strict=True)),
            "fits": {"hce": self.fits[0].as_json(), "lce": self.fits[1].as_json()},
            "sigma_errors": dict(zip(("hce", "lce"), self.errors, strict=True)),
            "zeros": dict(zip(("hce", "lce"), self.zeros, strict=True)),
            "gap": self.gap,
            "interval": self.interval.as_json(),
            "edges": [float(f"{edge:.6g}") for edge in self.edges.tolist()],
            "counts": {"hce": self.counts[0].tolist(), "lce": self.counts[1].tolist()},
        }

    def draw(self, ax: Panels) -> None:
        """Both densities on a log scale, which shows the tails, and the fits with mean 0."""
        ax = first_axes(ax)
        edges = self.edges.numpy()
        for row, (hue, hatch), name in ((1, LCE, "LCE"), (0, HCE, "HCE")):
            if not self.values[row]:
                continue
            fit = self.fits[row]
            look: dict[str, Any] = {"linewidth": 1.2, "color": hue}
            label = f"{name}, $\\sigma$ = {fit.sigma:.3g}"
            style = DASHES if hatch else "-"
            ax.stairs(
                self.density[row].numpy(),
                edges,
                label=label,
                linestyle=style,
                baseline=None,
                **look,
            )
            self._draw_fit(ax, fit, hue)
        ax.set(xlabel="feature value", ylabel="density", yscale="log", xlim=(edges[0], edges[-1]))
        seen = self.density[self.density > 0]
        if len(seen):
            ax.set_ylim(float(seen.min()) / 3, 2 * float(seen.max()))
        wrong, right = self.groups.sizes
        title = f"confidence above {self.groups.confidence:g}: {wrong:,} HCE, {right:,} LCE rows"
        ax.set_title(title, loc="left", size=TEXT + 1)
        if any(self.values):
            kind = "normal" if self.signed else "rectified normal"
            ax.legend(title=f"dotted: {kind} of mean 0", fontsize=TEXT, frameon=False)

    def _draw_fit(self, ax: Axes, fit: NormalFit, hue: str) -> None:
        middles = ((self.edges[1:] + self.edges[:-1]) / 2).tolist()
        heights = [fit.density(x) for x in middles]
        ax.plot(middles, heights, color=hue, linewidth=0.8, linestyle=":")


class _Sums:
    """What one pass keeps of the values of a group."""

    def __init__(self) -> None:
        self.n = self.zeros = self.rows = 0
        self.total = self.squares = 0.0
        self.largest = 0.0
        self.sizes = Magnitudes.none()
        # By row: the sum of squares, q, and the number of values above 0, a: q^2, q a and a^2.
        self.products = torch.zeros(3, dtype=torch.float64)

    def add(self, values: Tensor) -> None:
        if not values.numel():
            return
        low, high = (float(end) for end in torch.aminmax(values))
        self.largest = max(self.largest, high, -low)
        self.n += values.numel()
        self.rows += len(values)
        squares, above = values.double().square_().sum(1), (values > 0).sum(1).double()
        self.zeros += values.numel() - int(above.sum())
        self.total += float(values.sum(dtype=torch.float64))
        self.squares += float(squares.sum())
        pairs = (squares, squares), (squares, above), (above, above)
        self.products += torch.stack([one @ other for one, other in pairs]).cpu()
        self.sizes += Magnitudes.of(values)

    def fit(self, *, signed: bool) -> NormalFit:
        zeros = 0 if signed else self.zeros
        above, rectified = self.n - zeros, not signed
        return NormalFit.of_sums(above, zeros, self.total, self.squares, rectified=rectified)

    @property
    def zero_share(self) -> float:
        return self.zeros / self.n if self.n else math.nan

    def error(self, *, signed: bool) -> float:
        """The standard error of sigma over rows."""
        sigma, (qq, qa, aa) = self.fit(signed=signed).sigma, self.products.tolist()
        if not signed:
            return sigma_error(sigma, self.rows, self.n - self.zeros, (qq, qa, aa))
        width = self.n / max(self.rows, 1)  # every value counts
        return sigma_error(
            sigma, self.rows, self.n, (qq, width * self.squares, width**2 * self.rows)
        )


def _edges(seen: list[_Sums], bins: int, limit: float | None, *, signed: bool) -> Tensor:
    """Edges in float64 that float32 holds too, so that values are compared as they are."""
    largest = max(part.largest for part in seen)
    if limit is None:
        ends = [part.sizes.quantile(SHOWN) for part in seen if part.n]
        limit = max(ends, default=largest)
    limit = min(limit, largest) if math.isinf(limit) else limit
    limit = limit if limit > 0 else 1.0  # every value is 0
    return torch.linspace(-limit if signed else 0.0, limit, bins + 1).double()


def _histogram(rows: Rows, groups: Groups, edges: Tensor) -> Tensor:
    """Counts of the values within the edges: (2, m)."""
    bins = len(edges) - 1
    counts = torch.zeros(2, bins + 2, dtype=torch.int64)
    for (features,), masks in groups.along(rows.features()):
        marks = edges.to(features.device, features.dtype)
        for row, mask in zip(counts, masks, strict=True):
            values = features[mask].flatten()
            cells = torch.bucketize(values, marks, right=True, out_int32=True)
            cells[values == marks[-1]] = bins  # the last bin holds its upper end too
            row += torch.bincount(cells, minlength=bins + 2).cpu()
    return counts[:, 1:-1]
