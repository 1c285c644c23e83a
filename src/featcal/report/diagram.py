"""Reliability diagrams: the numbers first, the picture of exactly those numbers second.

Niculescu-Mizil and Caruana, "Predicting Good Probabilities With Supervised Learning", 2005.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from torch import Tensor

from featcal.core.disk import new_file
from featcal.core.errors import InputError
from featcal.metrics.bins import Bins
from featcal.metrics.classwise import ClassBins
from featcal.metrics.inputs import Values, checked_rows
from featcal.report import drawing
from featcal.report.wording import Wording, wording

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_PANELS = 6
DPI = 150
# Without these fields a file depends on its numbers alone, not on the day or the version.
METADATA: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "svg": {"Creator": None, "Date": None},
}


@final
@dataclass(frozen=True, slots=True, eq=False)
class ReliabilityDiagram:
    """Accuracy against confidence, bin by bin; per-bin numbers are (m,), NaN where a bin is empty.

    With `of_class` it is the curve people know of binary models: the probability of that class is
    the confidence, and the share of its rows the accuracy.

    Attributes:
        bins: the summary that is drawn.
        title: what the predictions are, such as "before".
        of_class: the class the bins are of, or None for the predicted one of each row.
        axes: the diagram and its histogram (or None), once drawn.
    """

    bins: Bins
    title: str = ""
    of_class: int | None = field(default=None, kw_only=True)
    axes: tuple[Axes, Axes | None] | None = field(default=None, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        checked_rows(self.bins.n)

    @classmethod
    def of(
        cls,
        probs: Values | None = None,
        labels: Values | None = None,
        *,
        logits: Values | None = None,
        bins: int = 15,
        title: str = "",
        of_class: int | None = None,
    ) -> ReliabilityDiagram:
        """The diagram of n predictions, given as probabilities or as logits.

        Args:
            probs: (n, k), or (n,) of class 1 of a binary model.
            labels: (n,) the class of every row.
            logits: in place of `probs`.
            bins: how many bins of equal width.
            title: what the predictions are.
            of_class: the class whose probability to hold against its share of the rows; None for
                the confidence of the prediction against its accuracy.

        >>> import torch
        >>> print(ReliabilityDiagram.of(torch.tensor([[0.75, 0.25]]), torch.tensor([0])).caption)
        ECE 25.0 %
        accuracy 100.0 %  confidence 75.0 %
        """
        if of_class is None:
            return cls(Bins.of(probs, labels, logits=logits, bins=bins), title)
        classes = ClassBins.of(probs, labels, logits=logits, bins=bins)
        return cls(classes.of_class(of_class), title, of_class=of_class)

    @property
    def wording(self) -> Wording:
        """What the numbers are called in the picture."""
        return wording(self.of_class)

    @property
    def edges(self) -> Tensor:
        """The m + 1 edges of the bins."""
        return self.bins.edges

    @property
    def accuracy(self) -> Tensor:
        """The share of right rows in each bin; with `of_class`, of rows of that class."""
        return self.bins.accuracy

    @property
    def mean_confidence(self) -> Tensor:
        """The mean confidence in each bin."""
        return self.bins.mean_confidence

    @property
    def gap(self) -> Tensor:
        """Mean confidence minus accuracy in each bin, positive where overconfident."""
        return self.bins.gap

    @property
    def share(self) -> Tensor:
        """The share of all rows in each bin, 0 where it is empty."""
        return self.bins.count / self.bins.n

    @property
    def ece(self) -> float:
        """Expected calibration error."""
        return self.bins.ece

    @property
    def overall_accuracy(self) -> float:
        """The accuracy over all rows."""
        return float(self.bins.correct.sum()) / self.bins.n

    @property
    def overall_confidence(self) -> float:
        """The mean confidence over all rows."""
        return float(self.bins.confidence.sum()) / self.bins.n

    @property
    def caption(self) -> str:
        """The numbers over the whole, as they stand above the picture."""
        words = self.wording
        return (
            f"{words.error} {self.ece:.1%}\n"
            f"{words.so} {self.overall_accuracy:.1%}  {words.said} {self.overall_confidence:.1%}"
        ).replace("%", " %")

    def plot(self, ax: Axes | Sequence[Axes] | None = None) -> ReliabilityDiagram:
        """Draws the diagram and returns it, now holding its axes: `plot().axes[0].figure`.

        Args:
            ax: axes for the diagram, or a pair of axes for the diagram and the histogram of the
                confidence below it; None makes a figure of its own, which pyplot does not know.
        """
        drawing.require_matplotlib()
        if ax is None:
            with drawing.own_style():
                return replace(self, axes=drawing.figure([self])[1][0])
        diagram, histogram = _pair(ax)
        drawing.draw_diagram(diagram, self)
        handles = drawing.legend_handles([self])
        brief = [str(handle.get_label()).partition(":")[0] for handle in handles]
        diagram.legend(handles, brief, loc="best", fontsize=drawing.TEXT)
        if histogram is None or not diagram.get_shared_x_axes().joined(diagram, histogram):
            diagram.set_xlabel(self.wording.x)
        if histogram is not None:
            drawing.draw_histogram(histogram, self, tallest=float(self.share.max()))
        return replace(self, axes=(diagram, histogram))

    def _repr_png_(self) -> bytes | None:
        """The picture a notebook shows, unless pyplot shows it already."""
        if self.axes is not None and self.axes[0].figure.canvas.manager is not None:
            return None
        try:
            drawing.require_matplotlib()
        except InputError:
            return None
        picture = io.BytesIO()
        with drawing.own_style():
            drawing.figure([self])[0].savefig(picture, format="png", dpi=DPI)
        return picture.getvalue()


def save_comparison(
    diagrams: Sequence[ReliabilityDiagram],
    path_stem: Path | str,
    *,
    formats: Sequence[str] = ("png", "svg"),
    overwrite: bool = False,
) -> list[Path]:
    """Writes a picture of 1 to 6 diagrams side by side, `<path_stem>.<format>` for each format.

    The same numbers give the same bytes. Either every file appears or none.

    Raises:
        InputError: for a number of diagrams or a format that cannot be drawn, a path that exists
            or cannot be written, or when matplotlib is missing.
    """
    drawing.require_matplotlib()
    _check_request(diagrams, formats)
    paths = {form: Path(f"{path_stem}.{form}") for form in formats}
    with ExitStack() as files, drawing.own_style():
        # The files are renamed when the stack unwinds, after the last of them has been drawn.
        drafts = {
            form: files.enter_context(new_file(path, overwrite=overwrite))
            for form, path in paths.items()
        }
        figure, _ = drawing.figure(diagrams)
        for form, draft in drafts.items():
            figure.savefig(draft, format=form, dpi=DPI, metadata=METADATA[form])
    return list(paths.values())


def _check_request(diagrams: Sequence[ReliabilityDiagram], formats: Sequence[str]) -> None:
    if not 1 <= len(diagrams) <= MAX_PANELS:
        raise InputError(f"diagrams has {len(diagrams)} entries: pass 1 to {MAX_PANELS}")
    if len({diagram.of_class for diagram in diagrams}) > 1:
        raise InputError("diagrams are of different classes: give all of them the same of_class=")
    if isinstance(formats, str) or not formats or not set(formats) <= set(METADATA):
        raise InputError(f"formats is {formats!r}: pass a list of one or more of 'png' and 'svg'")


def _pair(ax: Axes | Sequence[Axes]) -> tuple[Axes, Axes | None]:
    from matplotlib.axes import Axes

    if isinstance(ax, Axes):
        return ax, None
    if len(ax) != 2:
        raise InputError(f"ax has {len(ax)} axes: pass one, or two for diagram and histogram")
    return ax[0], ax[1]
