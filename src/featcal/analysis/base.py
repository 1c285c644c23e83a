"""What every analysis shares: rows to read, groups of confident rows, one style of picture."""

from __future__ import annotations

import io
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias, TypeVar, final

import numpy as np
import torch
from torch import Tensor

from featcal.core.batch import (
    KEEP_BYTES,
    Batch,
    Data,
    Head,
    Through,
    as_data,
    raw_logits,
    stored_logits,
    wide,
)
from featcal.core.calibrator import Calibrator
from featcal.core.checks import InputError
from featcal.core.fit import Facts, evaluating, plain, survey
from featcal.core.progress import calm
from featcal.data import Pack, PackSplit
from featcal.heads.head import as_head
from featcal.metrics.inputs import Values, top_label
from featcal.report.bootstrap import UNKNOWN, Interval
from featcal.report.diagram import BLUE, DASHES, TEXT, VERMILLION, own_style, require_matplotlib
from featcal.report.scores import calibrated_logits, check_usable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    Panels = Axes | Sequence[Axes]

DPI = 150
# Wrong and right rows, in every picture. Okabe and Ito's hues: apart for every kind of colour
# vision; the hatching, or the line, tells them apart in grey.
HCE, LCE = (VERMILLION, "/////"), (BLUE, "")


@dataclass(frozen=True, eq=False)
class Analysis(ABC):
    """Numbers about labelled predictions, made by `of`, told by `as_json`, drawn by `plot`.

    Attributes:
        axes: what the picture was drawn on, once it was.
    """

    size: ClassVar[tuple[float, float]] = (4.6, 2.9)  # inches of a picture of its own
    _panels: ClassVar[tuple[int, int]] = (1, 1)  # rows and columns of it

    axes: Panels | None = field(default=None, repr=False, kw_only=True)

    @abstractmethod
    def numbers(self) -> dict[str, Any]:
        """The numbers as Python's own types; NaN and infinity where there is none."""

    @abstractmethod
    def draw(self, ax: Panels) -> None:
        """Draws on given axes, in whatever style they have."""

    def as_json(self) -> dict[str, Any]:
        """The numbers, ready for JSON: null for what is infinite or does not exist."""
        return plain(self.numbers())  # type: ignore[no-any-return]

    def plot(self, ax: Panels | None = None) -> Self:
        """Draws the numbers and returns them, now holding their axes: `plot().axes.figure`.

        Args:
            ax: where to draw; None makes a figure of its own, which pyplot does not know.
        """
        require_matplotlib()
        with own_style() if ax is None else nullcontext():
            ax = self.own_axes() if ax is None else ax
            self.draw(ax)
        return replace(self, axes=ax)

    def own_axes(self) -> Panels:
        """The axes of a figure of its own: one, or a list of several."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=self.size, layout="constrained")
        if self._panels == (1, 1):
            return figure.add_subplot()
        return all_axes(figure.subplots(*self._panels, sharex=self._panels[1] > 1))

    def _repr_png_(self) -> bytes | None:
        """The picture a notebook shows, unless pyplot shows it already."""
        if self.axes is not None and first_axes(self.axes).figure.canvas.manager is not None:
            return None
        try:
            require_matplotlib()
        except InputError:
            return None
        with own_style():
            figure = first_axes(self.plot().axes).get_figure(root=True)
            assert figure is not None
            picture = io.BytesIO()
            figure.savefig(picture, format="png", dpi=DPI)
        return picture.getvalue()


def all_axes(ax: Panels | None) -> list[Axes]:
    """The axes a caller gave as one, as a list or as the array `subplots` returns."""
    from matplotlib.axes import Axes

    assert ax is not None
    return [ax] if isinstance(ax, Axes) else list(np.ravel(np.asarray(ax, dtype=object)))


def first_axes(ax: Panels | None) -> Axes:
    """The axes of a picture, or the first of several."""
    return all_axes(ax)[0]


def ink(ax: Axes) -> str:
    """The colour of the text of these axes, so that lines show on a dark style too."""
    return str(ax.xaxis.label.get_color())


def set_title(ax: Axes, text: str, **look: Any) -> None:  # noqa: ANN401 - matplotlib's keywords
    """A title as all pictures have it: to the left, and with no mathematics in names."""
    ax.set_title(text, loc="left", size=TEXT + 1, parse_math=False, **look)


Z = 1.959963984540054  # of the standard normal, 95 % lie within


def around(estimate: float, error: float) -> Interval:
    """The 95 % interval of an estimate by normal theory; unknown where its error is."""
    if math.isnan(error):
        return UNKNOWN
    return Interval(estimate - Z * error, estimate + Z * error)


def wilson(hits: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Both ends of Wilson's 95 % interval of a share (1927), float64; NaN for no rows.

    Unlike the plain normal interval it has a width where all rows or none are hits.

    >>> low, high = wilson(torch.tensor([10]), torch.tensor([10]))
    >>> round(float(low), 3), float(high)
    (0.722, 1.0)
    """
    n, share = rows.double(), hits.double() / rows.double()
    middle = (share + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z * (share * (1 - share) / n + Z**2 / (4 * n**2)).sqrt() / (1 + Z**2 / n)
    # Rounding must not put an end beyond the share itself, which may be 0 or 1.
    return torch.minimum(middle - half, share).clamp(min=0), torch.maximum(middle + half, share)


def entropies(logits: Tensor) -> Tensor:
    """The entropy of each row's probabilities, in nats: (n,) float64.

    >>> entropies(torch.zeros(1, 4)).exp()
    tensor([4.], dtype=torch.float64)
    """
    logp = logits.double().log_softmax(1)
    return -(logp.exp() * logp).sum(1)


@final
class Rows:
    """Checked rows in chunks; iterating gives each batch with the network's own logits.

    Attributes:
        data: the chunks, read anew on each pass.
        head: the classifier's last layer, or None where logits are stored.
        facts: what one look at all rows told.
    """

    def __init__(self, data: Data, head: Head | None, facts: Facts, *, keep: bool = False) -> None:
        self.data, self.head, self.facts, self._keep = data, head, facts, keep
        self._last: tuple[Calibrator | None, Through] | None = None

    def __iter__(self) -> Iterator[tuple[Batch, Tensor]]:
        for batch in self.data:
            yield batch, wide(raw_logits(batch, self.head))

    def kept(self) -> Rows:
        """The same rows for many looks: in memory where they fit, else their logits where those do.

        The logits that the last calibrator gave are kept as well.
        """
        own = Through(self.data, lambda batch: raw_logits(batch, self.head))
        numbers = self.facts.rows * (self.facts.width + self.facts.classes)
        data = list(own) if 4 * numbers <= KEEP_BYTES else own
        return Rows(data, self.head, self.facts, keep=True)

    def both(self, calibrator: Calibrator | None) -> Iterator[tuple[Batch, Tensor, Tensor]]:
        """Each batch with its logits before and after a calibrator."""

        def after(batch: Batch) -> Tensor:
            return calibrated_logits(batch, calibrator, self.head)

        if not self._keep:
            for batch, logits in self:
                yield batch, logits, after(Batch(logits, batch.labels, batch.features))
            return
        if self._last is None or self._last[0] is not calibrator:
            self._last = calibrator, Through(self.data, after, features=False)
        for (batch, logits), known in zip(self, self._last[1], strict=True):
            yield batch, logits, stored_logits(known)

    def features(self) -> Iterator[tuple[Tensor]]:
        """The features of each batch, where there are features."""
        for batch in self.data:
            assert batch.features is not None
            yield (batch.features,)

    def signed(self) -> bool:
        """Whether a feature of any row is negative, as after a LayerNorm; one pass."""
        return any(bool((features < 0).any()) for (features,) in self.features())


# What every analysis takes: rows, or a pack, whose split and head are then its own.
Source: TypeAlias = Batch | Data | Pack | Rows
VAL, TEST = "val", "test"  # the splits of a pack that are meant where none is named


def opened(data: Source, head: Head | None, split: str = TEST) -> tuple[Any, Head | None]:
    """The rows of a pack with its own head, unless another is given; any other data as it is."""
    if isinstance(data, Rows):
        return data, data.head
    rows = data.split(split) if isinstance(data, Pack) else data
    if head is None and isinstance(rows, PackSplit):
        head = Pack(rows.path, rows.manifest).head
    return rows, head


@contextmanager
def reading(
    data: Source,
    head: Head | None = None,
    calibrator: object = None,
    *,
    split: str = TEST,
    features_for: str = "",
) -> Iterator[Rows]:
    """Rows to read inside the block, without gradients: the one door of every analysis.

    Args:
        data: a Batch, any re-iterable of batches, a split of a pack, a pack, or rows that were
            checked before.
        head: the classifier's last layer, when the data holds features; that of the pack by
            default.
        calibrator: what will be applied, checked here.
        split: of a pack.
        features_for: what needs features, for the message where there are none.
    """
    if not isinstance(calibrator, Calibrator | None):
        kind = type(calibrator).__name__
        wanted = "a fitted one, such as featcal.parse('clip').fit(val, head)"
        raise InputError(f"calibrator is a {kind}: pass {wanted}")
    found, head = opened(data, head, split)
    head = as_head(head)
    with torch.no_grad(), evaluating(head):
        if isinstance(found, Rows):
            rows = found
        else:
            chunks = as_data(found, head)
            rows = Rows(chunks, head, survey(chunks, head))
        check_usable(calibrator, rows.facts, head)
        if features_for and not rows.facts.width:
            raise InputError(
                f"{features_for} needs features, and the data holds logits alone: pass what "
                "featcal.collect(model, loader) gives, or a pack with features"
            )
        with calm(rows.facts.work):
            yield rows


Item = TypeVar("Item", bound=tuple[Tensor, ...])
CONFIDENCE = 0.95
BARS = 40


@final
@dataclass(frozen=True, eq=False)
class Groups(Analysis):
    """Confident rows, wrong and right: high and low calibration error (Tao, Dong and Xu, 2025).

    A single row has no calibration error. A wrong row with a high confidence stands for a high one
    (HCE), a right row with a high confidence for a low one (LCE). The network's own logits decide;
    the same rows are looked at after any calibration.

    Attributes:
        confidence: rows above it, strictly, are in one of the groups.
        sure: (n,) the confidence of each row, by the unclipped logits.
        right: (n,) bool, whether its prediction is the label.
    """

    confidence: float
    sure: Tensor = field(repr=False)
    right: Tensor = field(repr=False)

    @classmethod
    def of(
        cls,
        logits: Values | Pack,
        labels: Values | None = None,
        confidence: float = CONFIDENCE,
        *,
        split: str = TEST,
    ) -> Groups:
        """The groups of n rows of logits (n, k) with their labels, or of a split of a pack.

        >>> logits = torch.tensor([[0.0, 5.0], [5.0, 0.0], [0.0, 0.1]])
        >>> Groups.of(logits, torch.tensor([1, 1, 0])).sizes
        (1, 1)
        """
        if isinstance(logits, Pack):
            return cls.of_data(logits, confidence=confidence, split=split)
        top = top_label(logits=logits, labels=labels)
        return cls(checked_level(confidence), top.confidence.cpu(), top.correct.cpu())

    @classmethod
    def of_data(
        cls,
        data: Source,
        head: Head | None = None,
        confidence: float = CONFIDENCE,
        *,
        split: str = TEST,
    ) -> Groups:
        """The groups of the rows of `data`, by the network's own logits, in one pass."""
        with reading(data, head, split=split) as rows:
            tops = [top_label(logits=logits, labels=batch.labels) for batch, logits in rows]
        sure = torch.cat([top.confidence.cpu() for top in tops])
        right = torch.cat([top.correct.cpu() for top in tops])
        return cls(checked_level(confidence), sure, right)

    def __len__(self) -> int:
        return len(self.sure)

    def at(self, confidence: float) -> Groups:
        """The same rows, grouped at another confidence."""
        return replace(self, confidence=checked_level(confidence), axes=None)

    @property
    def hce(self) -> Tensor:
        """(n,) bool: wrong, with a confidence above the level."""
        return ~self.right & (self.sure > self.confidence)

    @property
    def lce(self) -> Tensor:
        """(n,) bool: right, with a confidence above the level."""
        return self.right & (self.sure > self.confidence)

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of HCE rows and of LCE rows."""
        return int(self.hce.sum()), int(self.lce.sum())

    @property
    def names(self) -> tuple[str, str]:
        """The groups with their sizes, as pictures call them."""
        wrong, right = self.sizes
        return f"HCE: wrong, {wrong:,} rows", f"LCE: right, {right:,} rows"

    def along(self, stream: Iterable[Item]) -> Iterator[tuple[Item, list[Tensor]]]:
        """Each item of a stream of these rows with its part of `hce` and of `lce`.

        Args:
            stream: tuples whose first entry is a tensor with a row for each row.
        """
        done, both = 0, (self.hce, self.lce)
        for item in stream:
            part = slice(done, done + len(item[0]))
            yield item, [mask[part].to(item[0].device) for mask in both]
            done += len(item[0])

    def numbers(self) -> dict[str, Any]:
        """Sizes, and the share of the confident rows that are wrong."""
        wrong, right = self.sizes
        return {
            "confidence": self.confidence,
            "rows": len(self),
            "hce": wrong,
            "lce": right,
            "wrong_share": wrong / (wrong + right) if wrong + right else math.nan,
        }

    def draw(self, ax: Panels) -> None:
        """How confident right and wrong rows are, with the groups' level marked."""
        ax = first_axes(ax)
        edges = torch.linspace(float(self.sure.min()) if len(self) else 0, 1, BARS + 1)
        filled: Any = {"color": LCE[0], "alpha": 0.55, "label": self.names[1]}
        hatched: Any = {"facecolor": "none", "edgecolor": HCE[0], "hatch": HCE[1]}
        ax.hist(self.sure[self.right].numpy(), bins=edges.tolist(), **filled)
        ax.hist(self.sure[~self.right].numpy(), bins=edges.tolist(), label=self.names[0], **hatched)
        ax.axvline(self.confidence, color=ink(ax), linewidth=1.1, linestyle=DASHES)
        ax.set(xlabel="confidence", ylabel="rows", yscale="log", xlim=(float(edges[0]), 1))
        ax.legend(title=f"above {self.confidence:g}", fontsize=TEXT, frameon=False)


def groups_of(rows: Rows, groups: Groups | None, confidence: float) -> Groups:
    """The groups a caller gave, or those of the rows at a confidence."""
    if groups is None:
        return Groups.of_data(rows, confidence=confidence)
    if len(groups) != rows.facts.rows:
        raise InputError(
            f"groups are of {len(groups)} rows and the data has {rows.facts.rows}: "
            "make them from the same data, Groups.of_data(data, head)"
        )
    return groups


def checked_level(confidence: float) -> float:
    """A level of the confidence, from 0 up to but not including 1."""
    number = isinstance(confidence, (int, float)) and not isinstance(confidence, bool)
    if not number or not 0 <= confidence < 1:
        raise InputError(f"confidence is {confidence!r}: pass a number in 0..1, such as 0.95")
    return float(confidence)


DROPPED = 16  # bits of a float32 that are not looked at
CELLS = 2 ** (31 - DROPPED)


@final
@dataclass(frozen=True, eq=False)
class Magnitudes:
    """Quantiles of sizes from a stream: every |x| is counted by the leading bits of its float32.

    Sign, exponent and seven bits of the fraction, as bfloat16 has them: (2^15,) int64 counters
    whatever the data, and quantiles to within 1 / 128 of their value. Counts of parts add up.
    """

    counts: Tensor = field(default_factory=lambda: torch.zeros(CELLS, dtype=torch.int64))

    def plus(self, values: Tensor) -> Magnitudes:
        """With the sizes of more values.

        >>> Magnitudes().plus(torch.tensor([0.0, -1.0, 1.0, 100.0])).quantile(0.5)
        1.0
        """
        bits = values.detach().abs().float().contiguous().view(torch.int32).flatten()
        return Magnitudes(self.counts + torch.bincount(bits >> DROPPED, minlength=CELLS).cpu())

    def quantile(self, share: float, *, zeros: bool = True) -> float:
        """The lower end of the cell in which this share of the values is reached; NaN for none.

        Args:
            share: 0 to 1.
            zeros: whether values of 0 count, which are many after a ReLU.
        """
        counts = self.counts.clone()
        if not zeros:
            counts[0] = 0
        total = int(counts.sum())
        if total == 0:
            return math.nan
        wanted = min(max(math.ceil(share * total), 1), total)
        cell = int(torch.searchsorted(counts.cumsum(0), wanted))
        return float((torch.tensor(cell, dtype=torch.int32) << DROPPED).view(torch.float32))
