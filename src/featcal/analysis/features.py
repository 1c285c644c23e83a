"""What values the features of confident wrong and confident right rows have.

The paper's pictures behind feature clipping (Tao, Dong and Xu, AAAI 2025): some units are far
larger where the network is sure and wrong, and the histogram of wrong rows has the thicker tail,
and with it the larger variance. The fitted sigmas say by how much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch import Tensor

from featcal.analysis import base
from featcal.core.batch import Head
from featcal.core.checks import InputError
from featcal.core.sample import CELLS, size_counts, size_quantile
from featcal.metrics.inputs import checked_bins
from featcal.report.bootstrap import Interval, checked_seed
from featcal.report.diagram import DASHES, TEXT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

UNITS = 100  # of the paper's figure


@final
@dataclass(frozen=True, eq=False)
class UnitMeans(base.Analysis):
    """Mean feature values, unit by unit; NaN where a group has no rows.

    Attributes:
        groups: the rows.
        hce: (d,) means over confident wrong rows, float64.
        lce: (d,) means over confident right rows.
        chosen: (u,) the units drawn at random for the picture of a few.
        absolute: whether the means are of absolute values, as for signed features.
    """

    size: ClassVar[tuple[float, float]] = (7.0, 5.2)
    _panels: ClassVar[tuple[int, int]] = (2, 1)  # a few units, and all of them

    groups: base.Groups
    hce: Tensor = field(repr=False)
    lce: Tensor = field(repr=False)
    chosen: Tensor = field(repr=False)
    absolute: bool

    @classmethod
    def of(
        cls,
        data: base.Source,
        head: Head | None = None,
        *,
        split: str = base.TEST,
        groups: base.Groups | None = None,
        confidence: float = base.CONFIDENCE,
        units: int = UNITS,
        seed: int = 0,
        absolute: bool | None = None,
        reference: bool = False,
    ) -> UnitMeans:
        """The means over the groups of `data`.

        Args:
            data: a pack, or labelled rows with features.
            head: the classifier's last layer; a pack has its own.
            split: which rows, where the data is a pack.
            groups: of these rows, where they are known already.
            confidence: of the groups, else.
            units: how many to draw at random; all of them where there are fewer.
            seed: of the draw.
            absolute: whether to average absolute values; None to do so where a row has a negative.
            reference: draw with replacement, as the paper's figure did: some units come twice.
        """
        if isinstance(units, bool) or not isinstance(units, int) or units < 1:
            raise InputError(f"units is {units!r}: pass an integer of at least 1")
        generator = torch.Generator().manual_seed(checked_seed(seed))
        with base.reading(data, head, split=split, features_for="the mean of every unit") as rows:
            found = base.groups_of(rows, groups, confidence)
            absolute = rows.signed() if absolute is None else bool(absolute)
            width = rows.facts.width
            sums = torch.zeros(2, width, dtype=torch.float64)
            for (features,), masks in found.along(rows.features()):
                for row, mask in zip(sums, masks, strict=True):
                    values = features[mask].abs() if absolute else features[mask]
                    row += values.sum(0, dtype=torch.float64).cpu()
        hce, lce = sums / torch.tensor(found.sizes, dtype=torch.float64)[:, None]
        if reference:
            chosen = torch.randint(width, (units,), generator=generator)
        else:
            chosen = torch.randperm(width, generator=generator)[:units]
        return cls(found, hce, lce, chosen, absolute)

    @property
    def higher(self) -> float:
        """The share of all units whose mean is larger over HCE rows; NaN without both groups."""
        gap = self.hce - self.lce
        return float((gap > 0).double().mean()) if bool(gap.isfinite().all()) else math.nan

    @property
    def which(self) -> str:
        """Which units the picture of a few shows: "100 of 2,048 units, drawn at random"."""
        if len(set(self.chosen.tolist())) == len(self.hce):
            return f"all {len(self.hce):,} units, in no order"
        return f"{len(self.chosen)} of {len(self.hce):,} units, drawn at random"

    @property
    def order(self) -> Tensor:
        """(d,) all units by their mean over LCE rows, the largest first."""
        return self.lce.nan_to_num().argsort(descending=True, stable=True)

    def numbers(self) -> dict[str, Any]:
        """The drawn units, and all units in the order of their LCE means."""

        def columns(units: Tensor) -> dict[str, Any]:
            both = {"hce": self.hce[units].tolist(), "lce": self.lce[units].tolist()}
            rounded = {name: [float(f"{v:.6g}") for v in column] for name, column in both.items()}
            return {"unit": units.tolist(), **rounded}

        return {
            "groups": self.groups.numbers(),
            "absolute": self.absolute,
            "mean": {"hce": float(self.hce.mean()), "lce": float(self.lce.mean())},
            "higher_share": self.higher,
            "chosen": columns(self.chosen),
            "all": columns(self.order),
        }

    def draw(self, ax: Axes, *others: Axes) -> None:
        """A few units drawn at random; on a second panel, where there is one, all units."""
        mean_of = "mean |feature|" if self.absolute else "mean feature"
        # HCE as outlined bars behind, LCE as full narrower ones before them: both always show.
        places = range(len(self.chosen))
        outlined: Any = {"color": "none", "edgecolor": base.HCE[0], "hatch": base.HCE[1]}
        wrong = ax.bar(places, self.hce[self.chosen].numpy(), 0.95, linewidth=0.6, **outlined)
        right = ax.bar(places, self.lce[self.chosen].numpy(), 0.5, color=base.LCE[0], alpha=0.9)
        ax.set(xlim=(-0.8, len(places) - 0.2), xticks=[], xlabel=self.which, ylabel=mean_of)
        known = "no unit to tell" if math.isnan(self.higher) else f"{self.higher:.0%} of all units"
        title = f"confidence above {self.groups.confidence:g}: larger over HCE rows in {known}"
        base.set_title(ax, title.replace("%", " %"))
        ax.legend([wrong, right], self.groups.names, fontsize=TEXT, frameon=False, ncols=2)
        ax.set_ylim(top=1.15 * ax.get_ylim()[1])  # room for the legend
        for second in others[:1]:
            order, every = self.order, range(len(self.order))
            second.fill_between(
                every, self.lce[order].numpy(), color=base.LCE[0], alpha=0.45, linewidth=0
            )
            second.plot(every, self.hce[order].numpy(), ".", color=base.HCE[0], markersize=2.2)
            of = f"all {len(order):,} units, the largest mean over LCE rows first"
            second.set(xlabel=of, ylabel=mean_of, xlim=(0, len(order)))
            lowest = float(torch.minimum(self.hce, self.lce).nan_to_num().min())
            second.set_ylim(bottom=0 if lowest >= 0 else None)


BINS = 100
SHOWN = 0.995  # of the values of the group with the longer tail


@final
@dataclass(frozen=True, eq=False)
class FeatureValues(base.Analysis):
    """Histograms of all feature values of both groups, zeros included, and fitted normals.

    Attributes:
        groups: the rows.
        edges: (m + 1,) of the bins, which are [lo, hi) but for the last, as numpy has them.
        counts: (2, m) int64, values of HCE and of LCE rows in each bin.
        values: (2,) all values of each group, those outside of the bins too.
        fits: of HCE and of LCE values; see `NormalFit` for the estimator.
        signed: whether features may be negative; the fits are of rectified normals otherwise.
        errors: standard errors over rows of the two sigmas; NaN for fewer than two rows.
        zeros: the share of each group's values that are not above 0; half of them, were they
            rectified normals of mean 0.
    """

    groups: base.Groups
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
        data: base.Source,
        head: Head | None = None,
        *,
        split: str = base.TEST,
        groups: base.Groups | None = None,
        confidence: float = base.CONFIDENCE,
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
        with base.reading(
            data, head, split=split, features_for="a histogram of feature values"
        ) as rows:
            found = base.groups_of(rows, groups, confidence)
            signed = rows.signed() if signed is None else bool(signed)
            wrong, right = _Sums(signed=signed), _Sums(signed=signed)
            for (features,), masks in found.along(rows.features()):
                wrong.add(features[masks[0]])
                right.add(features[masks[1]])
            largest = max(wrong.largest, right.largest)
            if limit is None:
                ends = [size_quantile(part.sizes, SHOWN) for part in (wrong, right) if part.n]
                limit = max(ends, default=largest)
            limit = min(limit, largest) if math.isinf(limit) else limit
            limit = limit if limit > 0 else 1.0  # every value is 0
            # In float64 but of float32 values, so that features are compared as they are.
            edges = torch.linspace(-limit if signed else 0.0, limit, m + 1).double()
            counts = torch.zeros(2, m + 2, dtype=torch.int64)
            for (features,), masks in found.along(rows.features()):
                marks = edges.to(features.device, features.dtype)
                for row, mask in zip(counts, masks, strict=True):
                    values = features[mask].flatten()
                    cells = torch.bucketize(values, marks, right=True, out_int32=True)
                    cells[values == marks[-1]] = m  # the last bin holds its upper end too
                    row += torch.bincount(cells, minlength=m + 2).cpu()
        return cls(
            found,
            edges,
            counts[:, 1:-1],
            (wrong.n, right.n),
            (wrong.fit(), right.fit()),
            signed,
            (wrong.error(), right.error()),
            (wrong.zero_share, right.zero_share),
        )

    @property
    def gap(self) -> float:
        """By how much the sigma of HCE values is the larger one."""
        return self.fits[0].sigma - self.fits[1].sigma

    @property
    def interval(self) -> Interval:
        """95 % interval of `gap` by normal theory, two independent groups of rows."""
        return base.around(self.gap, math.hypot(*self.errors))

    @property
    def density(self) -> Tensor:
        """(2, m) counts over all values of the group, by the width of a bin; NaN for no rows.

        The area below is the share of the values within the bins.
        """
        whole = torch.tensor(self.values, dtype=torch.float64)[:, None]
        return self.counts / whole / self.edges.diff()

    def numbers(self) -> dict[str, Any]:
        """The histograms and the fits."""

        def named(both: Any) -> dict[str, Any]:  # noqa: ANN401 - a pair of anything
            return dict(zip(("hce", "lce"), both, strict=True))

        return {
            "groups": self.groups.numbers(),
            "signed": self.signed,
            "values": named(self.values),
            "fits": named(fit.as_json() for fit in self.fits),
            "sigma_errors": named(self.errors),
            "zeros": named(self.zeros),
            "gap": self.gap,
            "interval": self.interval.as_json(),
            "edges": [float(f"{edge:.6g}") for edge in self.edges.tolist()],
            "counts": named(self.counts.tolist()),
        }

    def draw(self, ax: Axes, *_: Axes) -> None:
        """Both densities on a log scale, which shows the tails, and the fits with mean 0."""
        edges, density = self.edges.numpy(), self.density
        middles = (edges[1:] + edges[:-1]) / 2
        for row, hue, style, name in (
            (1, base.LCE[0], "-", "LCE"),
            (0, base.HCE[0], DASHES, "HCE"),
        ):
            if not self.values[row]:
                continue
            fit = self.fits[row]
            look: Any = {"linewidth": 1.2, "color": hue, "linestyle": style, "baseline": None}
            label = f"{name}, $\\sigma$ = {fit.sigma:.3g}"
            ax.stairs(density[row].numpy(), edges, label=label, **look)
            heights = [fit.density(x) for x in middles.tolist()]
            ax.plot(middles, heights, color=hue, linewidth=0.8, linestyle=":")
        ax.set(xlabel="feature value", ylabel="density", yscale="log", xlim=(edges[0], edges[-1]))
        seen = density[density > 0]
        if len(seen):
            ax.set_ylim(float(seen.min()) / 3, 2 * float(seen.max()))
        wrong, right = self.groups.sizes
        level = f"confidence above {self.groups.confidence:g}"
        base.set_title(ax, f"{level}: {wrong:,} HCE, {right:,} LCE rows")
        if any(self.values):
            kind = "normal" if self.signed else "rectified normal"
            ax.legend(title=f"dotted: {kind} of mean 0", fontsize=TEXT, frameon=False)


class _Sums:
    """What one pass keeps of the values of a group."""

    def __init__(self, *, signed: bool) -> None:
        self.signed = signed
        self.n = self.zeros = self.rows = 0
        self.total = self.squares = self.largest = 0.0
        self.sizes = torch.zeros(CELLS, dtype=torch.int64)
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
        self.sizes += size_counts(values)

    @property
    def zero_share(self) -> float:
        return self.zeros / self.n if self.n else math.nan

    def fit(self) -> NormalFit:
        zeros = 0 if self.signed else self.zeros
        sums = self.n - zeros, zeros, self.total, self.squares
        return NormalFit.of_sums(*sums, rectified=not self.signed)

    def error(self) -> float:
        """The standard error of sigma over rows; values of one row need not be independent.

        sigma^2 is the ratio of two sums over rows: q, a row's sum of squares, by a, its values
        above 0 (all of them where they are signed). To first order it errs as the sum of
        q - sigma^2 a does (Cochran, "Sampling Techniques", 1977).
        """
        sigma = self.fit().sigma
        if self.rows < 2 or not sigma > 0:
            return math.nan
        (qq, qa, aa), above = self.products.tolist(), self.n - self.zeros
        if self.signed:
            width, above = self.n / self.rows, self.n
            qa, aa = width * self.squares, width**2 * self.rows
        left = max(qq - 2 * sigma**2 * qa + sigma**4 * aa, 0.0)
        return math.sqrt(left * self.rows / (self.rows - 1)) / (2 * sigma * above)


FARTHEST = 37.0  # standard deviations, beyond which a float64 tail is 0
HALVINGS = 80


@final
@dataclass(frozen=True)
class NormalFit:
    """A normal distribution fitted by maximum likelihood, from sums alone; NaN without values.

    After a ReLU a feature is taken as max(Z, 0) with Z normal: a 0 says only that Z was not above
    0, which is a normal sample censored at 0 (Tobin, "Estimation of relationships for limited
    dependent variables", 1958). Signed features are taken as Z itself.

    With the mean at 0, as the paper's theory has it, the estimator is sigma^2 = sum of x^2 over the
    values above 0, divided by their number: a 0 has probability 1/2 whatever sigma is. With a free
    mean the likelihood is concave in 1/sigma and mean/sigma (Olsen, 1978), and its one maximum is
    found by halving an interval.

    Attributes:
        sigma: the standard deviation with the mean held at 0.
        mean: the mean, where it is free.
        spread: the standard deviation beside it.
        rectified: whether values of 0 were read as "not above 0".
    """

    sigma: float
    mean: float
    spread: float
    rectified: bool

    @classmethod
    def of_sums(
        cls, above: int, zeros: int, total: float, squares: float, *, rectified: bool
    ) -> NormalFit:
        """The fit to values of which these sums are known.

        Args:
            above: how many are not 0.
            zeros: how many are 0.
            total: their sum.
            squares: the sum of their squares.
            rectified: whether they come after a ReLU.

        >>> NormalFit.of_sums(2, 2, 4.0, 8.0, rectified=True).sigma
        2.0
        """
        known = above if rectified else above + zeros
        if above + zeros == 0:
            return cls(math.nan, math.nan, math.nan, rectified)
        if above == 0 or squares == 0:
            return cls(0.0, 0.0, 0.0, rectified)
        sigma = math.sqrt(squares / known)
        if rectified and zeros:
            return cls(sigma, *_censored(above, zeros, total, squares), rectified)
        mean = total / known
        return cls(sigma, mean, math.sqrt(max(squares / known - mean**2, 0)), rectified)

    def density(self, x: float) -> float:
        """The density at x of the fit with mean 0; the mass a ReLU puts on 0 is not in it."""
        if not self.sigma > 0:
            return math.nan
        return math.exp(-0.5 * (x / self.sigma) ** 2) / (self.sigma * math.sqrt(2 * math.pi))

    def as_json(self) -> dict[str, Any]:
        """The public form."""
        return {"sigma": self.sigma, "mean": self.mean, "spread": self.spread}


def _censored(above: int, zeros: int, total: float, squares: float) -> tuple[float, float]:
    """Mean and standard deviation of a normal sample of which `zeros` are known to be below 0.

    With e = mean / s and h = 1 / s the log-likelihood is zeros log Phi(-e) + above log h
    - sum (h x - e)^2 / 2. The best h for an e is the root of a quadratic; what is left is one
    equation in e whose left side grows.
    """

    def inverse_spread(e: float) -> float:
        return (e * total + math.sqrt((e * total) ** 2 + 4 * squares * above)) / (2 * squares)

    def slope(e: float) -> float:
        tail = math.erfc(e / math.sqrt(2)) / 2
        hazard = math.exp(-0.5 * e * e) / (math.sqrt(2 * math.pi) * tail)  # phi(e) / Phi(-e)
        return zeros * hazard - inverse_spread(e) * total + above * e

    low, high = -FARTHEST, FARTHEST
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if slope(middle) > 0 else (middle, high)
    spread = 1 / inverse_spread(high)
    return high * spread, spread
