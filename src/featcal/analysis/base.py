"""What every analysis shares: rows to read, groups of confident rows, one style of picture."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias, TypeVar, final

import torch
from torch import Tensor

from featcal.core.batch import (
    Batch,
    Data,
    Head,
    Through,
    as_data,
    features_of,
    head_of,
    raw_logits,
    stored_logits,
    wide,
)
from featcal.core.calibrator import Calibrator
from featcal.core.checks import InputError
from featcal.core.fit import Facts, evaluating, plain, survey
from featcal.core.labels import Answers
from featcal.core.memory import held_bytes
from featcal.core.progress import calm
from featcal.data import Pack
from featcal.data.pack import rows_of
from featcal.heads.head import as_head
from featcal.metrics.bins import Bins
from featcal.metrics.inputs import Values, top_label
from featcal.report.bootstrap import UNKNOWN, Interval
from featcal.report.diagram import (
    BLUE,
    DASHES,
    TEXT,
    VERMILLION,
    all_axes,
    notebook_png,
    own_style,
    require_matplotlib,
)
from featcal.report.scores import calibrated_logits, check_usable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from featcal.report.diagram import Panels

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
    def draw(self, ax: Axes, *others: Axes) -> None:
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
            self.draw(*all_axes(ax))
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
        return notebook_png(self, lambda: all_axes(self.plot().axes)[0].figure)  # type: ignore[arg-type,return-value]


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


class Binned:
    """Calibration of each of g sets of rows, from sums (g, 3, m) over m bins of the confidence.

    The sums are count, summed confidence and right rows; numbers are (g,), NaN without rows.
    """

    sums: Tensor

    def bins(self, place: int) -> Bins:
        """The bins of one set, for a diagram of it."""
        return Bins(*self.sums[place])

    @property
    def count(self) -> Tensor:
        """(g,) rows."""
        return self.sums[:, 0].sum(1)

    @property
    def accuracy(self) -> Tensor:
        """(g,) the share of right rows."""
        return self.sums[:, 2].sum(1) / self.count

    @property
    def confidence(self) -> Tensor:
        """(g,) the mean confidence."""
        return self.sums[:, 1].sum(1) / self.count

    @property
    def ece(self) -> Tensor:
        """(g,) the expected calibration error."""
        return (self.sums[:, 1] - self.sums[:, 2]).abs().sum(1) / self.count


@final
@dataclass(frozen=True, eq=False)
class Rows:
    """Checked rows in chunks; iterating gives each batch with the network's own logits.

    Attributes:
        data: the chunks, read anew on each pass.
        head: the classifier's last layer, or None where logits are stored.
        facts: what one look at all rows told.
        calibrator: what the rows are looked at through, None for the network as it is.
        after: the chunks with the calibrator's logits, of rows that are kept; else None.
        samples: where they have several labels, the samples whose answers the rows are; else None.
    """

    data: Data
    head: Head | None
    facts: Facts
    calibrator: Calibrator | None = None
    after: Data | None = None
    samples: Rows | None = None

    def __iter__(self) -> Iterator[tuple[Batch, Tensor]]:
        for batch in self.data:
            yield batch, wide(raw_logits(batch, self.head))

    @property
    def recipe(self) -> str:
        """That of the calibrator, "none" without one."""
        return repr(self.calibrator) if self.calibrator else "none"

    def kept(self) -> Rows:
        """The same rows for many looks: in memory where they fit, else their logits if those do."""
        if self.samples is not None:
            return self.samples.kept().answered()
        own = Through(self.data, partial(raw_logits, head=self.head))
        numbers = self.facts.rows * (self.facts.width + self.facts.classes)
        data = list(own) if 4 * numbers <= held_bytes() else own
        return replace(self, data=data, after=data)

    def answered(self) -> Rows:
        """The answers about samples of several labels, rows of two classes; else the same rows."""
        if not self.facts.several:
            return self
        facts = replace(self.facts, rows=self.facts.judged, classes=2, width=0, several=False)
        rows = Answers(self.data, self.head)
        return Rows(rows, None, facts, after=rows, samples=self)

    def through(self, calibrator: Calibrator | None) -> Rows:
        """The same rows through a calibrator, whose logits are kept where the rows are."""
        if calibrator is self.calibrator:
            return self
        if self.samples is not None:
            logits_of = partial(calibrated_logits, calibrator=calibrator, head=self.samples.head)
            found = Answers(Through(self.samples.data, logits_of, features=False))
            return replace(self, calibrator=calibrator, after=found)
        after = self.after
        if after is not None:
            logits_of = partial(calibrated_logits, calibrator=calibrator, head=self.head)
            after = Through(self.data, logits_of, features=False)
        return replace(self, calibrator=calibrator, after=after)

    def both(self) -> Iterator[tuple[Batch, Tensor, Tensor]]:
        """Each batch with its logits before and after the calibrator."""
        if self.after is not None:
            for (batch, logits), known in zip(self, self.after, strict=True):
                yield batch, logits, stored_logits(known)
            return
        for batch, logits in self:
            known = Batch(logits, batch.labels, batch.features)
            yield batch, logits, calibrated_logits(known, self.calibrator, self.head)

    def features(self) -> Iterator[tuple[Tensor]]:
        """The features of each batch, where there are features."""
        return ((features_of(batch),) for batch in self.data)

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
    rows = rows_of(data, split)
    return rows, head_of(rows) if head is None else head


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
        if not isinstance(found, Rows):
            found = as_data(found, head)
            found = Rows(found, head, survey(found, head)).answered()
        rows = found.through(calibrator)
        whole = rows.samples or rows
        check_usable(calibrator, whole.facts, whole.head)
        if features_for and not rows.facts.width:
            raise InputError(
                f"{features_for} needs features of rows with one label, and the data holds logits "
                "alone or several labels a row: pass what "
                "featcal.collect(model, loader) gives, or a pack with features"
            )
        with calm(rows.facts.work):
            yield rows


class Effect(Analysis):
    """What a calibrator does to rows: an analysis of them before and after it."""

    @classmethod
    def of(
        cls,
        data: Source,
        calibrator: Calibrator | None = None,
        head: Head | None = None,
        *,
        split: str = TEST,
        **options: Any,  # noqa: ANN401 - those of `of_rows`
    ) -> Self:
        """The analysis of `data`, in one pass.

        Args:
            data: a pack, or labelled rows that were not used to fit.
            calibrator: fitted, such as a clip; None for the network as it is.
            head: the classifier's last layer, when the data holds features; a pack has its own.
            split: which rows, where the data is a pack.
            **options: those of `of_rows`, by name.
        """
        with reading(data, head, calibrator, split=split) as rows:
            return cls.of_rows(rows, **options)

    @classmethod
    @abstractmethod
    def of_rows(cls, rows: Rows, *args: Any, **options: Any) -> Self:  # noqa: ANN401
        """The analysis of rows that are checked, and bound to the calibrator."""


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

    def draw(self, ax: Axes, *_: Axes) -> None:
        """How confident right and wrong rows are, with the groups' level marked."""
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
