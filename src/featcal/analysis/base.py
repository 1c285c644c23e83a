"""What every analysis is: numbers first, and a picture of exactly those numbers second."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from featcal.core.errors import InputError
from featcal.core.fitting import plain
from featcal.report.drawing import BLUE, VERMILLION, own_style, require_matplotlib

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
        if ax is not None:
            self.draw(ax)
            return replace(self, axes=ax)
        with own_style():
            own = self.own_axes()
            self.draw(own)
        return replace(self, axes=own)

    def own_axes(self) -> Panels:
        """The axes of a figure of its own."""
        from matplotlib.figure import Figure

        return Figure(figsize=self.size, layout="constrained").add_subplot()

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
